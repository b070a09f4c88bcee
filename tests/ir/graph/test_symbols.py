"""Expressions: what they evaluate to, and normal forms that evaluate to the same."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from precast.ir import limits
from precast.ir.graph import symbols
from precast.ir.graph.schema import Apply, Expr
from precast.ir.graph.symbols import ExprError

NAMES = ("T", "B", "tp", "rank")
OPS = ("add", "mul", "min", "max", "floordiv", "mod", "ceildiv")
BINARY = ("floordiv", "mod", "ceildiv")


def apply(op: str, *args: Expr) -> Apply:
    return Apply(op, args)  # type: ignore[arg-type]


def _operations(inner: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
    many = st.builds(apply, st.sampled_from(("add", "mul", "min", "max")), inner, inner)
    three = st.builds(apply, st.sampled_from(("add", "mul", "min", "max")), inner, inner, inner)
    return many | three | st.builds(apply, st.sampled_from(BINARY), inner, inner)


EXPRESSIONS: st.SearchStrategy[Expr] = st.recursive(
    st.integers(-4, 12) | st.sampled_from(NAMES), _operations, max_leaves=8
)
BINDINGS = st.fixed_dictionaries({name: st.integers(0, 40) for name in NAMES})


def value(expr: Expr, bound: dict[str, int]) -> int | None:
    """What `expr` evaluates to; None where it divides by zero."""
    try:
        return symbols.evaluate(expr, bound)
    except ZeroDivisionError:
        return None


def normal(expr: Expr) -> Expr | None:
    """The normal form; None where there is none."""
    try:
        return symbols.normal(expr)
    except ExprError:
        return None


# --- evaluation ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expr", "expected"),
    [
        (7, 7),
        ("T", 10),
        (apply("add", "T", 3, "B"), 16),
        (apply("mul", "T", "B", 2), 60),
        (apply("floordiv", "T", 3), 3),
        (apply("floordiv", apply("mul", -1, "T"), 3), -4),
        (apply("ceildiv", "T", 3), 4),
        (apply("ceildiv", apply("mul", -1, "T"), 3), -3),
        (apply("mod", "T", 3), 1),
        (apply("mod", apply("mul", -1, "T"), 3), 2),
        (apply("min", "T", "B", 5), 3),
        (apply("max", "T", "B", 5), 10),
    ],
)
def test_evaluate(expr: Expr, expected: int) -> None:
    assert symbols.evaluate(expr, {"T": 10, "B": 3}) == expected


def test_unbound_symbol() -> None:
    with pytest.raises(KeyError, match="tp"):
        symbols.evaluate(apply("mul", "T", "tp"), {"T": 1})


def test_free_symbols() -> None:
    assert symbols.free_symbols(apply("add", "T", apply("min", "B", apply("mod", "T", 2)))) == {"T", "B"}
    assert symbols.free_symbols(4) == set()


# --- normal forms ----------------------------------------------------------------------------------------------


@given(EXPRESSIONS, BINDINGS)
def test_normal_form_evaluates_equal(expr: Expr, bound: dict[str, int]) -> None:
    form, expected = normal(expr), value(expr, bound)
    if form is not None and expected is not None:
        assert value(form, bound) == expected


@given(EXPRESSIONS)
def test_normal_form_of_a_normal_form_is_itself(expr: Expr) -> None:
    form = normal(expr)
    if form is not None:
        assert symbols.normal(form) == form


@given(EXPRESSIONS, st.randoms(use_true_random=False))
def test_order_of_arguments_does_not_matter(expr: Expr, rng: random.Random) -> None:
    def shuffled(part: Expr) -> Expr:
        if not isinstance(part, Apply):
            return part
        args = [shuffled(arg) for arg in part.args]
        if part.op not in BINARY:
            rng.shuffle(args)
        return apply(part.op, *args)

    assert normal(shuffled(expr)) == normal(expr)


@given(EXPRESSIONS, EXPRESSIONS, BINDINGS)
def test_equal_expressions_evaluate_equal(a: Expr, b: Expr, bound: dict[str, int]) -> None:
    if normal(a) is None or normal(b) is None or not symbols.equal(a, b):
        return
    left, right = value(a, bound), value(b, bound)
    assert None in (left, right) or left == right


@given(st.lists(EXPRESSIONS, max_size=3), BINDINGS)
def test_sums_and_products(parts: list[Expr], bound: dict[str, int]) -> None:
    values = [value(part, bound) for part in parts]
    if None in values or None in [normal(part) for part in parts]:
        return
    known = [number for number in values if number is not None]
    assert value(symbols.add(*parts), bound) == sum(known)
    try:
        product = symbols.mul(*parts)
    except ExprError:
        return
    assert value(product, bound) == math.prod(known)
    assert symbols.equal(symbols.numel(parts), product)


@given(EXPRESSIONS, st.integers(1, 12), BINDINGS)
def test_quotients(expr: Expr, divisor: int, bound: dict[str, int]) -> None:
    expected = value(expr, bound)
    if normal(expr) is None or expected is None:
        return
    assert value(symbols.floordiv(expr, divisor), bound) == expected // divisor


@given(EXPRESSIONS, BINDINGS)
def test_what_is_never_negative_is_never_negative(expr: Expr, bound: dict[str, int]) -> None:
    found = value(expr, bound)
    if normal(expr) is not None and found is not None and symbols.never_negative(expr):
        assert found >= 0


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (apply("add", "T", 1), apply("add", 1, "T")),
        (apply("mul", apply("add", "T", 1), apply("add", "T", -1)), apply("add", apply("mul", "T", "T"), -1)),
        (apply("add", "T", apply("mul", -1, "T")), 0),
        (apply("floordiv", apply("mul", "T", 6), 3), apply("mul", 2, "T")),
        (
            apply("floordiv", apply("add", apply("mul", "T", 6), "B", 7), 3),
            apply("add", apply("mul", 2, "T"), apply("floordiv", apply("add", "B", 7), 3)),
        ),
        (apply("floordiv", apply("add", apply("mul", "T", 2), 1), 2), "T"),
        (apply("ceildiv", apply("add", apply("mul", "T", 2), 1), 2), apply("add", "T", 1)),
        (apply("mod", apply("add", apply("mul", "T", 6), "B"), 3), apply("mod", "B", 3)),
        (apply("mod", apply("mul", "T", 6), 3), 0),
        (
            apply("floordiv", apply("add", apply("mul", 7, "T"), "B"), 3),
            apply("add", apply("mul", 2, "T"), apply("floordiv", apply("add", "B", "T"), 3)),
        ),
        (apply("ceildiv", apply("mul", 129, "T"), 128), apply("add", "T", apply("ceildiv", "T", 128))),
        (
            apply("floordiv", apply("mul", -4, "T"), 3),
            apply("add", apply("mul", -1, "T"), apply("floordiv", apply("mul", -1, "T"), 3)),
        ),
        (apply("mod", apply("mul", 7, "T"), 3), apply("mod", "T", 3)),
        (apply("max", "T", "T"), "T"),
        (apply("mul", "T", 0), 0),
        (apply("mul", 1, "T"), "T"),
        (apply("ceildiv", "T", 1), "T"),
    ],
)
def test_equal(a: Expr, b: Expr) -> None:
    assert symbols.equal(a, b)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("T", "B"),
        (apply("floordiv", "T", 2), apply("ceildiv", "T", 2)),
        (apply("mul", apply("floordiv", "T", 2), 2), "T"),
        (apply("min", "T", "B"), apply("max", "T", "B")),
        (apply("floordiv", "T", "B"), apply("floordiv", "B", "T")),
        (apply("add", "T", 1), apply("add", "T", 2)),
    ],
)
def test_different(a: Expr, b: Expr) -> None:
    assert not symbols.equal(a, b)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("args", [(), ("T",)])
def test_too_few_arguments(op: str, args: tuple[Expr, ...]) -> None:
    with pytest.raises(ExprError):
        symbols.normal(apply(op, *args))


@pytest.mark.parametrize("op", BINARY)
def test_too_many_arguments(op: str) -> None:
    with pytest.raises(ExprError):
        symbols.normal(apply(op, "T", 2, 3))


@pytest.mark.parametrize("op", BINARY)
@pytest.mark.parametrize("zero", [0, apply("add", "T", apply("mul", -1, "T"))])
def test_division_by_zero(op: str, zero: Expr) -> None:
    with pytest.raises(ExprError):
        symbols.normal(apply(op, "T", zero))


def test_normal_forms_do_not_explode() -> None:
    factors = [apply("add", f"a{i}", f"b{i}") for i in range(20)]

    with pytest.raises(ExprError, match=str(limits.MAX_EXPRESSION_TERMS)):
        symbols.normal(apply("mul", *factors))
    with pytest.raises(ExprError, match=str(limits.MAX_EXPRESSION_TERMS)):
        symbols.normal(apply("add", *(f"a{i}" for i in range(limits.MAX_EXPRESSION_TERMS + 1))))


def test_the_largest_takes_so_many_comparisons(monkeypatch: pytest.MonkeyPatch) -> None:
    sums: list[Expr] = [symbols.add(symbols.mul(i, "a"), symbols.mul(20 - i, "b")) for i in range(1, 20)]
    monkeypatch.setattr(limits, "MAX_COMPARISONS", 19 * 18)
    symbols.largest(sums)

    monkeypatch.setattr(limits, "MAX_COMPARISONS", 19 * 18 - 1)

    with pytest.raises(ExprError, match="comparisons to find the largest"):
        symbols.largest(sums)
