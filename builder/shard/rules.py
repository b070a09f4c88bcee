"""How dimensions of an op's tensors belong together, by op: what is split in one of them is split in the others.

An op has a rule here, or nothing that it takes or makes can be split. A dimension that a rule doesn't name is whole:
the op needs all of it at once. Rules say nothing of layers; those are found where splits end (`solve`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from precast.ir.graph.infer import references
from precast.ir.graph.schema import Arg, Const, Expr, Items, Node, Ref, TensorType

Types = dict[str, TensorType]
Place = tuple[str, int]
"""A dimension of a value, counted from the front."""


class Same(NamedTuple):
    """Element `start + i` of `whole` belongs to element `i` of `part`, for all of `part`."""

    whole: Place
    part: Place
    start: int = 0


class Every(NamedTuple):
    """Element `step * i`, or one of those that follow it, of `whole` is element `i` of `part`."""

    whole: Place
    part: Place
    step: int


class Through(NamedTuple):
    """One tensor is the other under another shape."""

    before: str
    after: str


class Shares(NamedTuple):
    """Each head of `few` serves equally many neighbours of `many`: key heads and query heads."""

    many: Place
    few: Place


class Sums(NamedTuple):
    """The op sums over both dimensions at once; split, they give each rank a part of the sum."""

    places: tuple[Place, ...]


class Gathers(NamedTuple):
    """The op needs all of the dimension of `given`, and makes as much of `made`; ranks can exchange their parts."""

    given: Place
    made: Place


class HeadRows(NamedTuple):
    """Equally many rows of `rows` belong to each head of `heads`."""

    rows: Place
    heads: Place


Relation = Same | Every | Through | Shares | Sums | Gathers | HeadRows


def relations(node: Node, types: Types) -> Iterator[Relation]:
    """What the op's dimensions have to do with each other; nothing for an op without a rule."""
    rule = _RULES.get(node.op)
    if rule is not None:
        yield from rule(_Of(node, types))


class _Of:
    """A node's tensors by the names of its arguments, and the dimensions of them."""

    def __init__(self, node: Node, types: Types) -> None:
        self.node = node
        self.types = types
        self.result = node.outputs[0].name if node.outputs else ""

    def name(self, arg: str) -> str | None:
        given = self.node.args.get(arg)
        return given.name if isinstance(given, Ref) else None

    def given(self, arg: str) -> str:
        """The tensor of an argument that is always given."""
        name = self.name(arg)
        assert name is not None, "it fits the signature"
        return name

    def shape(self, name: str) -> tuple[Expr, ...]:
        return self.types[name].shape

    def at(self, name: str, dim: int) -> Place:
        return name, dim % len(self.shape(name))

    def arg(self, arg: str, dim: int) -> Place | None:
        name = self.name(arg)
        return None if name is None else self.at(name, dim)

    def number(self, arg: str, default: int) -> int | None:
        given: Arg = self.node.args.get(arg, Const(default))
        return given.value if isinstance(given, Const) and type(given.value) is int else None

    def same(self, *places: Place | None) -> Iterator[Same]:
        """All of these belong together, element by element."""
        first, *others = [place for place in places if place is not None]
        yield from (Same(first, other) for other in others)

    def leading(self, *names: str) -> Iterator[Same]:
        """All dimensions but the last of tensors of one shape."""
        for dim in range(len(self.shape(names[0])) - 1):
            yield from self.same(*((name, dim) for name in names))

    def aligned(self, name: str, result: str, but: int = 0) -> Iterator[Same]:
        """The dimensions of a broadcast tensor, counted from the back, without the last `but`."""
        for back in range(1 + but, len(self.shape(name)) + 1):
            if self.shape(name)[-back] != 1 or self.shape(result)[-back] == 1:
                yield Same(self.at(result, -back), self.at(name, -back))


def _pointwise(of: _Of) -> Iterator[Relation]:
    for name in references(of.node.args):
        yield from of.aligned(name, of.result)


def _linear(of: _Of) -> Iterator[Relation]:
    x, weight = of.given("input"), of.given("weight")
    yield from of.leading(of.result, x)
    yield from of.same(of.at(of.result, -1), (weight, 0), of.arg("bias", 0))
    yield Sums((of.at(x, -1), (weight, 1)))


def _addmm(of: _Of) -> Iterator[Relation]:
    a, b, bias = of.given("mat1"), of.given("mat2"), of.given("self")
    yield from of.same((of.result, 0), (a, 0))
    yield from of.same((of.result, 1), (b, 1))
    yield from of.aligned(bias, of.result)
    yield Sums(((a, 1), (b, 0)))


def _matmul(of: _Of) -> Iterator[Relation]:
    a, b = of.given("self"), of.given("other")
    for name in (a, b):
        yield from of.aligned(name, of.result, but=2)
    yield from of.same(of.at(of.result, -2), of.at(a, -2))
    yield from of.same(of.at(of.result, -1), of.at(b, -1))
    yield Sums((of.at(a, -1), of.at(b, -2)))


def _gated_activation(of: _Of) -> Iterator[Relation]:
    x = of.given("x")
    yield from of.leading(of.result, x)
    half = of.shape(of.result)[-1]
    yield Same(of.at(x, -1), of.at(of.result, -1))
    if isinstance(half, int):
        yield Same(of.at(x, -1), of.at(of.result, -1), half)


def _norm(of: _Of) -> Iterator[Relation]:
    x = of.given("x")
    yield from of.leading(of.result, x)
    yield Gathers(of.at(x, -1), of.at(of.result, -1))


def _residual_norm(of: _Of) -> Iterator[Relation]:
    names = [value.name for value in of.node.outputs]
    for arg in ("x", "residual"):
        names.append(of.given(arg))
    yield from of.leading(*names)


def _along_dim(of: _Of) -> Iterator[Relation]:
    """All dimensions but the one that is worked along."""
    name, dim = of.given("self"), of.number("dim", -1)
    if name is None or dim is None:
        return
    for value in of.node.outputs:
        if len(of.shape(value.name)) == len(of.shape(name)):
            for each in range(len(of.shape(name))):
                if each != dim % len(of.shape(name)):
                    yield Same((value.name, each), (name, each))


def _reduction(of: _Of) -> Iterator[Relation]:
    name, dims = of.given("self"), of.node.args.get("dim")
    if not isinstance(dims, Items):
        return
    rank = len(of.shape(name))
    gone = {item.value % rank for item in dims.items if isinstance(item, Const) and type(item.value) is int}
    kept = of.node.args.get("keepdim") == Const(True)
    left = [dim for dim in range(rank) if dim not in gone]
    for place, dim in enumerate(left):
        yield Same((of.result, dim if kept else place), (name, dim))


def _reshape(of: _Of) -> Iterator[Relation]:
    name = of.given("self")
    yield Through(name, of.result)


def _transpose(of: _Of) -> Iterator[Relation]:
    name = of.given("self")
    i, j = of.number("dim0", 0), of.number("dim1", 0)
    if name is None or i is None or j is None:
        return
    order = list(range(len(of.shape(name))))
    order[i], order[j] = order[j], order[i]
    yield from (Same((of.result, place), (name, dim)) for place, dim in enumerate(order))


def _permute(of: _Of) -> Iterator[Relation]:
    name, dims = of.given("self"), of.node.args["dims"]
    if name is None or not isinstance(dims, Items):
        return
    order = [item.value for item in dims.items if isinstance(item, Const) and type(item.value) is int]
    yield from (Same((of.result, place), of.at(name, dim)) for place, dim in enumerate(order))


def _expand(of: _Of) -> Iterator[Relation]:
    name = of.given("self")
    yield from of.aligned(name, of.result)


def _slice(of: _Of) -> Iterator[Relation]:
    name, dim = of.given("self"), of.number("dim", 0)
    if name is None or dim is None:
        return
    axis = dim % len(of.shape(name))
    for each in range(len(of.shape(name))):
        start, end, step = of.number("start", 0), of.number("end", 0), of.number("step", 1)
        if each != axis:
            yield Same((name, each), (of.result, each))
        elif step is not None and step > 1 and start is not None and start < step and end == of.shape(name)[axis]:
            yield Every((name, axis), (of.result, axis), step)
        elif start is not None and step == 1 and isinstance(of.shape(of.result)[axis], int):
            yield Same((name, axis), (of.result, axis), start)


def _select(of: _Of) -> Iterator[Relation]:
    name, dim = of.given("self"), of.number("dim", 0)
    if name is None or dim is None:
        return
    axis = dim % len(of.shape(name))
    left = [each for each in range(len(of.shape(name))) if each != axis]
    yield from (Same((of.result, place), (name, each)) for place, each in enumerate(left))


def _cat(of: _Of) -> Iterator[Relation]:
    parts, dim = of.node.args["tensors"], of.number("dim", 0)
    if not isinstance(parts, Items) or dim is None:
        return
    axis = dim % len(of.shape(of.result))
    start: Expr = 0
    for part in parts.items:
        assert isinstance(part, Ref), "a tensor"
        for each in range(len(of.shape(of.result))):
            if each != axis:
                yield Same((of.result, each), (part.name, each))
            elif isinstance(start, int):
                yield Same((of.result, axis), (part.name, axis), start)
        size = of.shape(part.name)[axis]
        start = start + size if isinstance(start, int) and isinstance(size, int) else "?"


def _rotary(of: _Of) -> Iterator[Relation]:
    yield from of.same((of.result, 2), of.arg("x", 2))


def _rotary_write_kv(of: _Of) -> Iterator[Relation]:
    yield from of.same((of.result, 2), of.arg("q", 2))
    yield from _write_kv(of)


def _write_kv(of: _Of) -> Iterator[Relation]:
    yield from of.same(of.arg("k_cache", 2), of.arg("v_cache", 2), of.arg("k", 2), of.arg("v", 2))


def _paged_attention(of: _Of) -> Iterator[Relation]:
    yield from of.same((of.result, 2), of.arg("q", 2), of.arg("sinks", 0), of.arg("slopes", 0), of.arg("bias", 2))
    yield from of.same(of.arg("k_cache", 2), of.arg("v_cache", 2))
    yield Shares((of.result, 2), of.at(of.given("k_cache"), 2))


def _block_sparse_attention(of: _Of) -> Iterator[Relation]:
    yield from _paged_attention(of)
    yield Shares((of.result, 2), of.at(of.given("selected"), 2))


def _select_blocks(of: _Of) -> Iterator[Relation]:
    yield from of.same((of.result, 2), of.arg("q", 2))


def _latent_attention(of: _Of) -> Iterator[Relation]:
    weight = of.given("weight")
    yield from of.same((of.result, 2), of.arg("q", 2), of.arg("sinks", 0))
    yield HeadRows((weight, 0), (of.result, 2))


def _entry_attention(of: _Of) -> Iterator[Relation]:
    weight = of.node.outputs[1].name
    yield from of.same((of.result, 2), (weight, 2), of.arg("q", 2))


def _channels(**places: int) -> Callable[[_Of], Iterator[Relation]]:
    """Dimensions of arguments, by name, that belong to the same channels or heads as the last of what they make."""

    def rule(of: _Of) -> Iterator[Relation]:
        yield from of.same((of.result, 2), *(of.arg(name, dim) for name, dim in places.items()))

    return rule


def _state_space_scan(of: _Of) -> Iterator[Relation]:
    yield from _channels(x=2, dt=2, a=0, d=0, dt_bias=0, state=1)(of)
    yield from of.same(of.arg("b", 2), of.arg("c", 2))
    yield Shares((of.result, 2), of.at(of.given("b"), 2))


def _delta_rule(of: _Of) -> Iterator[Relation]:
    yield from _channels(v=2, beta=2, decay=2, state=1)(of)
    yield from of.same(of.arg("q", 2), of.arg("k", 2))
    yield Shares((of.result, 2), of.at(of.given("q"), 2))


def _linear_attention(of: _Of) -> Iterator[Relation]:
    yield from _channels(q=2, k=2, v=2, state=1)(of)
    decay = of.name("decay")
    if decay is not None:
        yield from of.same((of.result, 2), (decay, 0 if len(of.shape(decay)) == 1 else 2))


def _experts(of: _Of) -> Iterator[Relation]:
    yield from of.same(of.arg("up", 0), of.arg("down", 0), of.arg("up_bias", 0), of.arg("down_bias", 0))
    up, down = of.given("up"), of.given("down")
    half = of.shape(down)[2]
    for name in filter(None, (up, of.name("up_bias"))):
        yield Same((name, 1), (down, 2))
        if of.node.args["gated"] == Const(True) and isinstance(half, int):
            yield Same((name, 1), (down, 2), half)


def _grouped_linear(of: _Of) -> Iterator[Relation]:
    x, weight = of.given("x"), of.given("weight")
    yield from of.same((of.result, 1), (weight, 1), of.arg("bias", 1))
    yield Sums(((x, 1), (weight, 2)))


_POINTWISE = (
    "add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "rsub.Scalar", "pow.Tensor_Scalar", "minimum.default",
    "maximum.default", "clamp.default", "neg.default", "abs.default", "floor.default", "relu.default", "exp.default",
    "expm1.default", "log.default", "log1p.default", "rsqrt.default", "sqrt.default", "tanh.default",
    "sigmoid.default", "cos.default", "sin.default", "silu.default", "gelu.default", "softplus.default", "to.dtype",
    "logical_not.default", "bitwise_not.default", "full_like.default", "masked_fill.Scalar", "where.self",
    *(f"{name}.{kind}" for name in ("eq", "ne", "ge", "gt", "le", "lt") for kind in ("Scalar", "Tensor")),
)  # fmt: skip

_RULES: dict[str, Callable[[_Of], Iterator[Relation]]] = {
    **{f"aten.{name}": _pointwise for name in _POINTWISE},
    "aten.linear.default": _linear,
    "aten.addmm.default": _addmm,
    "aten.matmul.default": _matmul,
    "aten.reshape.default": _reshape,
    "aten.unsqueeze.default": _reshape,
    "aten.squeeze.dim": _reshape,
    "aten.transpose.int": _transpose,
    "aten.permute.default": _permute,
    "aten.expand.default": _expand,
    "aten.slice.Tensor": _slice,
    "aten.select.int": _select,
    "aten.cat.default": _cat,
    "aten.mean.dim": _reduction,
    "aten.sum.dim_IntList": _reduction,
    "aten.softmax.int": _along_dim,
    "aten.cumsum.default": _along_dim,
    "aten.topk.default": _along_dim,
    "aten.sort.default": _along_dim,
    "precast.gated_activation": _gated_activation,
    "precast.rms_norm": _norm,
    "precast.layer_norm": _norm,
    "precast.residual_rms_norm": _residual_norm,
    "precast.norm_residual_norm": _residual_norm,
    "precast.rotary": _rotary,
    "precast.rotary_write_kv": _rotary_write_kv,
    "precast.write_kv": _write_kv,
    "precast.paged_attention": _paged_attention,
    "precast.paged_block_sparse_attention": _block_sparse_attention,
    "precast.paged_select_blocks": _select_blocks,
    "precast.paged_latent_attention": _latent_attention,
    "precast.paged_sparse_latent_attention": _latent_attention,
    "precast.paged_entry_attention": _entry_attention,
    "precast.stateful_causal_conv": _channels(x=2, weight=0, bias=0, state=1),
    "precast.stateful_selective_scan": _channels(x=2, dt=2, a=0, d=0, dt_bias=0, state=1),
    "precast.stateful_state_space_scan": _state_space_scan,
    "precast.stateful_delta_rule": _delta_rule,
    "precast.stateful_linear_attention": _linear_attention,
    "precast.stateful_linear_recurrence": _channels(x=2, factor=2, state=1),
    "precast.stateful_wkv": _channels(k=2, v=2, decay=0, first=0, state=2),
    "precast.experts": _experts,
    "precast.grouped_linear": _grouped_linear,
}
