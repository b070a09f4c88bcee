"""What integers the values of a graph can be: a range for each value of an integer type, without running anything.

A range holds for every step of a model of these numbers, and is that of the dtype where nothing better is known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from precast.ir.graph.infer import references
from precast.ir.graph.schema import Arg, Call, Const, DtypeArg, Node, Ref, TensorType


class Range(NamedTuple):
    """From `low` to `high`, both included."""

    low: int
    high: int


_ALL = {"bool": Range(0, 1), "int8": Range(-(2**7), 2**7 - 1), "uint8": Range(0, 2**8 - 1),
        "int32": Range(-(2**31), 2**31 - 1), "int64": Range(-(2**63), 2**63 - 1)}  # fmt: skip
Ranges = dict[str, Range]

_MOVES = frozenset(f"aten.{op}" for op in (
    "reshape.default", "transpose.int", "permute.default", "unsqueeze.default", "squeeze.dim", "expand.default",
    "slice.Tensor", "select.int", "cat.default", "minimum.default", "maximum.default",
))  # fmt: skip
"""Each element of the result is an element of an argument."""
_INDICES = {"aten.topk.default": 1, "aten.sort.default": 1, "aten.max.dim": 1, "aten.argmax.default": 0}
"""Which of the results are places along `dim` of the argument."""


def widest(kind: TensorType) -> Range | None:
    """All integers of the type; None for one of floating point."""
    return _ALL.get(kind.dtype)


def joined(ranges: Sequence[Range]) -> Range:
    """From the least to the largest of all."""
    return Range(min(each.low for each in ranges), max(each.high for each in ranges))


class Truth(NamedTuple):
    """What is known of other values where a bool is true, and where it is false."""

    when_true: Ranges
    when_false: Ranges


def follow(steps: Sequence[Node | Call], types: Mapping[str, TensorType], known: Ranges) -> Ranges:
    """The ranges of all integer values in a scope, from those of what it is given; a call's results may be anything."""
    found = {name: whole for name, kind in types.items() if (whole := widest(kind)) is not None}
    found |= known
    truths: dict[str, Truth] = {}
    for step in steps:
        if not isinstance(step, Node):
            continue
        for place, value in enumerate(step.outputs):
            whole = found.get(value.name)
            made = whole and (_chosen(step, found, truths) or _made(step, place, types, found))
            if whole and made and whole.low <= made.low and made.high <= whole.high:
                found[value.name] = made
            if value.type.dtype == "bool" and (truth := _truth(step, found, truths)) is not None:
                truths[value.name] = truth
    return found


def _chosen(node: Node, found: Ranges, truths: Mapping[str, Truth]) -> Range | None:
    """The range of what `where` and `masked_fill` take, by what their conditions say of it."""
    if node.op not in ("aten.where.self", "aten.masked_fill.Scalar"):
        return None
    (condition,) = _names(node.args.get("condition", node.args.get("mask")))
    when_true, when_false = truths.get(condition, Truth({}, {}))
    first, second = ("self", "other") if node.op == "aten.where.self" else ("value", "self")
    taken = [(node.args[first], when_true), (node.args[second], when_false)]
    ranges = [_operand(arg, found, narrowed) for arg, narrowed in taken]
    return joined([each for each in ranges if each is not None]) if None not in ranges else None


def _truth(node: Node, found: Ranges, truths: Mapping[str, Truth]) -> Truth | None:
    names = list(references(node.args))
    if node.op in _BOUNDS and len(names) == 1 and names[0] in found:
        x, other = found[names[0]], node.args["other"]
        if not isinstance(other, Const) or type(other.value) is not int:
            return None
        first_above = other.value + _BOUNDS[node.op]
        below, above = Range(x.low, min(x.high, first_above - 1)), Range(max(x.low, first_above), x.high)
        truth = Truth({names[0]: below}, {names[0]: above})
        return truth if node.op in ("aten.lt.Scalar", "aten.le.Scalar") else Truth(*reversed(truth))
    parts = [truths.get(name, Truth({}, {})) for name in names]
    if node.op in ("aten.logical_not.default", "aten.bitwise_not.default"):
        return Truth(*reversed(parts[0]))
    if node.op in ("aten.minimum.default", "aten.mul.Tensor") and len(parts) == 2:
        return Truth(_both(*(part.when_true for part in parts)), {})
    if node.op in ("aten.maximum.default", "aten.add.Tensor") and len(parts) == 2:
        return Truth({}, _both(*(part.when_false for part in parts)))
    return None


_BOUNDS = {"aten.lt.Scalar": 0, "aten.ge.Scalar": 0, "aten.le.Scalar": 1, "aten.gt.Scalar": 1}
"""Comparisons, and how far from what they compare with the first number lies that counts as larger."""


def _both(one: Ranges, other: Ranges) -> Ranges:
    return one | {name: _common(each, one.get(name, each)) for name, each in other.items()}


def _common(a: Range, b: Range) -> Range:
    return Range(max(a.low, b.low), min(a.high, b.high))


def _made(node: Node, place: int, types: Mapping[str, TensorType], found: Ranges) -> Range | None:
    """The range of a result before it is held in its dtype; None: not known."""
    args = node.args
    if node.op in _MOVES:
        return _union(list(references(args)), found)
    if node.op in _INDICES:
        return _below(_size(args, types)) if place == _INDICES[node.op] else None
    if node.op == "precast.route":
        return _below(types[_names(args["logits"])[0]].shape[-1])
    if node.op == "aten.gather.default":
        return _union(_names(args["self"]), found)
    if node.op == "aten.one_hot.default":
        return Range(0, 1)
    rule = _ARITHMETIC.get(node.op)
    known = {name: each for name, arg in args.items() if (each := _operand(arg, found)) is not None}
    wanted = [name for name, arg in args.items() if not isinstance(arg, DtypeArg) and arg != Const(None)]
    return rule(known) if rule is not None and all(name in known for name in wanted) else None


def _union(names: Sequence[str], found: Ranges) -> Range | None:
    ranges = [found[name] for name in names if name in found]
    return joined(ranges) if len(ranges) == len(names) > 0 else None


def _names(arg: Arg | None) -> list[str]:
    return list(references({"": arg})) if arg is not None else []


def _size(args: Mapping[str, Arg], types: Mapping[str, TensorType]) -> object:
    """The size along `dim`, by default the last; None where it isn't written out."""
    dim, shape = args.get("dim", Const(-1)), types[_names(args["self"])[0]].shape
    return shape[dim.value] if isinstance(dim, Const) and type(dim.value) is int else None


def _below(size: object) -> Range | None:
    return Range(0, max(size - 1, 0)) if isinstance(size, int) else None


def _operand(arg: Arg, found: Ranges, narrowed: Mapping[str, Range] = MappingProxyType({})) -> Range | None:
    if isinstance(arg, Ref):
        return narrowed.get(arg.name) or found.get(arg.name)
    return Range(arg.value, arg.value) if isinstance(arg, Const) and isinstance(arg.value, int) else None


def _product(of: Ranges) -> Range:
    a, b = of["self"], of["other"]
    ends = [x * y for x in a for y in b]
    return Range(min(ends), max(ends))


def _clamped(of: Ranges) -> Range:
    low, high = (of[name].low if name in of else None for name in ("min", "max"))

    def clamp(x: int) -> int:
        x = x if low is None else max(x, low)
        return x if high is None else min(x, high)

    return Range(*map(clamp, of["self"]))


def _mixed(of: Ranges) -> Range:
    """No bit above the highest of both; of a negative number, any."""
    if min(each.low for each in of.values()) < 0:
        return _ALL["int64"]
    return Range(0, (1 << max(each.high for each in of.values()).bit_length()) - 1)


def _remainder(of: Ranges) -> Range | None:
    """Of the sign of what is divided by, and nearer to 0. By 0 it may be anything on a GPU."""
    low, high = of["other"]
    return None if low <= 0 <= high else Range(min(low + 1, 0), max(high - 1, 0))


def _difference(a: Range, b: Range) -> Range:
    return Range(a.low - b.high, a.high - b.low)


_ARITHMETIC: dict[str, Callable[[Ranges], Range | None]] = {
    "aten.add.Tensor": lambda of: Range(of["self"].low + of["other"].low, of["self"].high + of["other"].high),
    "aten.sub.Tensor": lambda of: _difference(of["self"], of["other"]),
    "aten.rsub.Scalar": lambda of: _difference(of["other"], of["self"]),
    "aten.mul.Tensor": _product,
    "aten.bitwise_xor.Tensor": _mixed,
    "aten.remainder.Tensor": _remainder,
    "aten.clamp.default": _clamped,
    "aten.full_like.default": lambda of: of["fill_value"],
    "aten.to.dtype": lambda of: of["self"],
}
"""What else becomes of ranges, by the names of the arguments."""
