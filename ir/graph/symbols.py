"""Integer expressions over symbols: evaluation, a normal form, and equality.

Shapes and integer arguments are expressions of seven operations. Two expressions are equal when their normal
forms are: a sum of products with sorted factors, in which `floordiv`, `mod`, `min`, `max` and `ceildiv` stand as
factors of their own with normal arguments.

Normal forms multiply out, so a short expression can have a huge one: functions that build them raise `ExprError`
past `limits.MAX_EXPRESSION_TERMS` terms or `MAX_FACTORS` factors of a term, for an operation with
too few or too many arguments, and for a division by the constant zero.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache

from precast.ir import limits
from precast.ir.graph.schema import Apply, Expr

Monomial = tuple[Expr, ...]
Polynomial = dict[Monomial, int]

MAX_FACTORS = 64
"""Factors of one term of a normal form: the number of elements of a tensor has one or two for each dimension."""

_BINARY = frozenset(("floordiv", "mod", "ceildiv"))
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")


class ExprError(ValueError):
    """The expression has no normal form, or one that is too large to compare."""


def add(*terms: Expr) -> Expr:
    """The sum of the terms, in normal form."""
    if all(isinstance(term, int) for term in terms):
        return sum(term for term in terms if isinstance(term, int))
    return _from_polynomial(_sum(terms))


def mul(*factors: Expr) -> Expr:
    """The product of the factors, in normal form; 1 for none."""
    if all(isinstance(factor, int) for factor in factors):
        return math.prod(factor for factor in factors if isinstance(factor, int))
    return _product_of(factors)


def floordiv(a: Expr, b: Expr) -> Expr:
    """The quotient rounded down, in normal form; exact when a constant `b` divides every coefficient of `a`."""
    return _apply("floordiv", a, b)


def ceildiv(a: Expr, b: Expr) -> Expr:
    """The quotient rounded up, in normal form."""
    return _apply("ceildiv", a, b)


def maximum(first: Expr, *others: Expr) -> Expr:
    """The largest of the arguments, in normal form."""
    return _apply("max", first, *others) if others else normal(first)


def minimum(first: Expr, *others: Expr) -> Expr:
    """The smallest of the arguments, in normal form."""
    return _apply("min", first, *others) if others else normal(first)


def largest(sums: Iterable[Expr]) -> Expr:
    """The maximum of expressions whose symbols are never negative, without those that another one always exceeds.

    Raises ExprError past `limits.MAX_COMPARISONS` comparisons.
    """
    comparisons = 0
    kept: list[tuple[Expr, dict[tuple[Expr, ...], int]]] = []
    for each in {normal(one) for one in sums}:
        parts = each.args if isinstance(each, Apply) and each.op == "max" else (each,)
        for expr in parts:
            found = terms(expr)
            comparisons += 2 * len(kept)
            if comparisons > limits.MAX_COMPARISONS:
                raise ExprError(f"more than {limits.MAX_COMPARISONS} comparisons to find the largest expression")
            if any(_exceeds(other, found) for _, other in kept):
                continue
            kept = [(one, other) for one, other in kept if not _exceeds(found, other)]
            kept.append((expr, found))
    return maximum(*(expr for expr, _ in kept)) if kept else 0


def terms(expr: Expr) -> dict[tuple[Expr, ...], int]:
    """The normal form as a sum: each product's sorted factors, and how often it is taken; the constant has none."""
    return dict(_polynomial(normal(expr)))


def evaluate(expr: Expr, symbols: Mapping[str, int]) -> int:
    """The value of `expr` with each symbol bound.

    Raises KeyError for a symbol that isn't bound and ZeroDivisionError for a division by zero.
    """
    if isinstance(expr, int):
        return expr
    if isinstance(expr, str):
        return symbols[expr]
    return _FOLD[expr.op]([evaluate(arg, symbols) for arg in expr.args])


def substitute(expr: Expr, values: Mapping[str, Expr]) -> Expr:
    """`expr` with other expressions in place of symbols, in normal form; where that has none, as it comes."""
    if isinstance(expr, str):
        return values.get(expr, expr)
    if isinstance(expr, int):
        return expr
    made = Apply(expr.op, tuple(substitute(arg, values) for arg in expr.args))
    try:
        return normal(made)
    except ExprError:
        return made


def normal(expr: Expr) -> Expr:
    """The normal form: equal for expressions that are equal as polynomials over their atoms."""
    return expr if isinstance(expr, (int, str)) else _normal(expr)


def equal(a: Expr, b: Expr) -> bool:
    """Whether two expressions have one normal form."""
    return a == b or normal(a) == normal(b)


def never_negative(expr: Expr) -> bool:
    """Whether `expr` is seen to be at least 0 for all symbols that are: no negative coefficient, no negative atom.

    False means only that this isn't seen: `T - 1` may well be positive.
    """
    return all(
        coefficient >= 0 and all(map(_atom_never_negative, monomial))
        for monomial, coefficient in _polynomial(expr).items()
    )


def free_symbols(expr: Expr) -> set[str]:
    """The names of all symbols in `expr`."""
    if isinstance(expr, int):
        return set()
    if isinstance(expr, str):
        return {expr}
    return set().union(*(free_symbols(arg) for arg in expr.args))


def numel(shape: Iterable[Expr]) -> Expr:
    """The number of elements of a tensor of this shape."""
    return mul(*shape)


def text(expr: Expr) -> str:
    """The expression as the text form writes it: `T`, `32`, `(T * 8)`, `floordiv(H, tp)`.

    A symbol that is no plain name is quoted, so that two expressions with one text are one expression.
    """
    if isinstance(expr, int):
        return str(expr)
    if isinstance(expr, str):
        return expr if is_plain(expr) else json.dumps(expr)
    parts = [text(arg) for arg in expr.args]
    infix = {"add": " + ", "mul": " * "}.get(expr.op)
    if infix and len(parts) > 1:
        return f"({infix.join(parts)})"
    return f"{expr.op}({', '.join(parts)})"


def shape_text(shape: Iterable[Expr]) -> str:
    """The sizes of a tensor as the text form writes them: `[T, 32]`."""
    return f"[{', '.join(map(text, shape))}]"


def is_plain(name: str) -> bool:
    """Whether the text form writes this name without quotes."""
    return _PLAIN.fullmatch(name) is not None


def _exceeds(a: Polynomial, b: Polynomial) -> bool:
    """Whether `a` is at least `b` term by term."""
    return all(a.get(term, 0) >= factor for term, factor in b.items()) and all(
        factor >= 0 or b.get(term, 0) <= factor for term, factor in a.items()
    )


_FOLD: dict[str, Callable[[Sequence[int]], int]] = {
    "add": sum,
    "mul": math.prod,
    "min": min,
    "max": max,
    "floordiv": lambda pair: pair[0] // pair[1],
    "mod": lambda pair: pair[0] % pair[1],
    "ceildiv": lambda pair: -(-pair[0] // pair[1]),
}


def _apply(op: str, *args: Expr) -> Expr:
    """The normal form of an operation other than `add` and `mul`."""
    if len(args) < 2 or (op in _BINARY and len(args) != 2):
        raise ExprError(f"{op} has {len(args)} arguments")
    args = tuple(normal(arg) for arg in args)
    if op in _BINARY and args[1] == 0:
        raise ExprError(f"{op} divides by zero")
    if all(isinstance(arg, int) for arg in args):
        return _FOLD[op]([arg for arg in args if isinstance(arg, int)])
    if op in ("min", "max"):
        args = tuple(sorted(set(args), key=text))
        if len(args) == 1:
            return args[0]
    if op in _BINARY and isinstance(args[1], int) and args[1] > 0:
        poly = _polynomial(args[0])
        if all(coefficient % args[1] == 0 for coefficient in poly.values()):
            quotient = {monomial: coefficient // args[1] for monomial, coefficient in poly.items()}
            return 0 if op == "mod" else _from_polynomial(quotient)
        whole = {monomial: _whole(monomial, coefficient, args[1]) for monomial, coefficient in poly.items()}
        if any(whole.values()):  # (b q + r) / b is q + r / b, rounded either way, and its rest that of r
            rest = _from_polynomial({monomial: c - whole[monomial] * args[1] for monomial, c in poly.items()})
            rest = _apply(op, rest, args[1])
            return rest if op == "mod" else add(_from_polynomial(whole), rest)
    return Apply(op, args)  # type: ignore[arg-type]


def _whole(monomial: Monomial, coefficient: int, divisor: int) -> int:
    """How often a positive divisor goes into a coefficient, towards 0; into a constant only without a rest."""
    if not monomial:
        return coefficient // divisor if coefficient % divisor == 0 else 0
    return coefficient // divisor if coefficient > 0 else -(-coefficient // divisor)


@lru_cache(maxsize=4096)
def _product_of(factors: tuple[Expr, ...]) -> Expr:
    return _from_polynomial(_multiply(factors))


@lru_cache(maxsize=4096)
def _normal(expr: Apply) -> Expr:
    if expr.op in ("add", "mul"):
        return _from_polynomial(_polynomial(expr))
    return _apply(expr.op, *expr.args)


def _polynomial(expr: Expr) -> Polynomial:
    if isinstance(expr, int):
        return {(): expr} if expr else {}
    if isinstance(expr, str):
        return {(expr,): 1}
    if expr.op in ("add", "mul"):
        if len(expr.args) < 2:
            raise ExprError(f"{expr.op} has {len(expr.args)} arguments")
        return _sum(expr.args) if expr.op == "add" else _multiply(expr.args)
    atom = _normal(expr)
    return {(atom,): 1} if isinstance(atom, Apply) and atom.op not in ("add", "mul") else _polynomial(atom)


def _sum(terms: Iterable[Expr]) -> Polynomial:
    total: Polynomial = {}
    for term in terms:
        for monomial, factor in _polynomial(term).items():
            total[monomial] = total.get(monomial, 0) + factor
        _within_limit(len(total), limits.MAX_EXPRESSION_TERMS, "terms")
    return total


def _multiply(factors: Iterable[Expr]) -> Polynomial:
    total: Polynomial = {(): 1}
    for factor in factors:
        total = _product(total, _polynomial(factor))
    return total


def _product(a: Polynomial, b: Polynomial) -> Polynomial:
    out: Polynomial = {}
    for left, x in a.items():
        for right, y in b.items():
            monomial = tuple(sorted(left + right, key=text))
            _within_limit(len(monomial), MAX_FACTORS, "factors in a term")
            out[monomial] = out.get(monomial, 0) + x * y
        _within_limit(len(out), limits.MAX_EXPRESSION_TERMS, "terms")
    return out


def _within_limit(count: int, limit: int, what: str) -> None:
    if count > limit:
        raise ExprError(f"an expression has more than {limit} {what} when it is multiplied out")


def _from_polynomial(poly: Polynomial) -> Expr:
    terms: list[Expr] = []
    for monomial, coefficient in sorted(poly.items(), key=lambda item: [text(atom) for atom in item[0]]):
        if coefficient:
            factors: list[Expr] = [*monomial] if coefficient == 1 and monomial else [coefficient, *monomial]
            terms.append(factors[0] if len(factors) == 1 else Apply("mul", tuple(factors)))
    if not terms:
        return 0
    return terms[0] if len(terms) == 1 else Apply("add", tuple(terms))


def _atom_never_negative(atom: Expr) -> bool:
    if isinstance(atom, Apply):
        seen = [never_negative(arg) for arg in atom.args]
        return any(seen) if atom.op == "max" else all(seen)
    return True
