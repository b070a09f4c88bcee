"""What each op allocates beside its results while it runs, as expressions: the most bytes at any moment of it.

The rows say what the implementations in `precast.kernels` do, tensor by tensor; tests measure them, on a CPU and on a
GPU. Every op of the op table has one. Attention in PyTorch and ops that keep states have modules of their own.
"""

from __future__ import annotations

from collections.abc import Mapping

from precast.ir.graph.schema import Expr, Node, TensorType
from precast.ir.graph.symbols import add, floordiv, largest, maximum, minimum, mul, numel
from precast.ir.memory import workspace_attention, workspace_states
from precast.ir.memory.operands import Operand, Row, Use, copied, numbers, size, wide, width
from precast.ir.weights.tensorfile import element_bytes

_DRAWN_ELEMENTS = 1 << 22
"""Logits that `precast.kernels.sampling.sample` sorts at a time."""
_GATHERED_ELEMENTS = 1 << 26
"""Elements of experts' weights that `precast.kernels.experts.grouped` gathers at a time."""


def workspace(node: Node, operands: Mapping[str, Operand], device: str) -> Expr:
    """Bytes beside the results that the op holds at most on a `device` of this kind, "cpu" or "cuda".

    `operands` are the node's tensors by argument, without those in lists.
    """
    return ROWS[node.op](Use(node, operands, device))


def drawing(logits: TensorType, device: str) -> Expr:
    """Bytes that drawing a token for each row of `logits` [..., V] holds at most, beside them.

    For each logit float32 copies, sorted ones, their int64 order, int64 weights and their sums: 42 bytes. To sort
    several rows at once a GPU numbers them too, and holds 48, and a quarter for its counters.
    """
    rows, size = numel(logits.shape[:-1]), logits.shape[-1]
    if device == "cpu":
        return mul(48, rows, size)
    together = minimum(rows, maximum(1, floordiv(_DRAWN_ELEMENTS, size)))
    several = minimum(1, maximum(0, add(together, -1)))
    numbered = mul(several, floordiv(mul(25, together, size), 4))
    return add(mul(42, together, size), numbered, mul(64, rows), 16 << 10)


def _bytes(kind: TensorType) -> Expr:
    return mul(element_bytes(kind.dtype), numel(kind.shape))


def _converted(use: Use) -> Expr:
    """On a CPU, elementwise ops copy arguments that have another type than their common one."""
    if len(use.operands) < 2 or use.device != "cpu":
        return 0
    common = max(width(operand) for operand in use.operands.values())
    return add(*(mul(common, numbers(operand)) for operand in use.operands.values() if width(operand) != common))


def _linear(use: Use) -> Expr:
    """The input without gaps."""
    given = use.operands["input"]
    return 0 if given.is_contiguous else size(given)


def _matmul(use: Use) -> Expr:
    """Both factors of batches, which may lie otherwise or be repeated."""
    result = use.result.shape
    if len(result) < 3:
        return 0
    factors = (use.operands["self"], use.operands["other"])
    return add(*(mul(width(factor), *result[:-2], *factor.type.shape[-2:]) for factor in factors))


def _sorted(use: Use) -> Expr:
    """Keys and int64 places, twice over; on a GPU the rows' numbers too, and a byte for its counters."""
    given = use.operands["self"]
    return mul(2 * (width(given) + 8) + (9 if use.device == "cuda" else 0), numbers(given))


def _along_rows(use: Use) -> Expr:
    """Softmax and sums over a dimension: the argument in the result's type, without gaps."""
    given = use.operands["self"]
    as_is = given.is_contiguous and given.type.dtype == use.result.dtype
    return 0 if as_is else _bytes(use.result)


def _embedding(use: Use) -> Expr:
    """The rows before they are scaled, and the scale."""
    return 0 if use.constant("scale") in (None, 1.0) else add(_bytes(use.result), 16)


def _rms_norm(use: Use) -> Expr:
    """The wide copy, the normed rows, and what weight and rounding make of them."""
    x, weight = use.operands["x"], use.operands.get("weight")
    full, narrow, copy = wide(x), width(x), copied(x)
    rounded = narrow if copy else 0
    if weight is None:
        total = copy + full + rounded
    elif use.constant("cast_before_scale"):
        product = max(narrow, width(weight))
        total = copy + full + rounded + product + (narrow if product > narrow else 0)
    else:
        total = copy + 2 * full + rounded
    rows = mul(3 * full, numel(x.type.shape[:-1]))
    gaps: Expr = 0 if x.is_contiguous else size(x)
    scale: Expr = 0 if weight is None else mul(2 * full, numbers(weight))
    return add(mul(max(total, copy + full) - narrow, numbers(x)), rows, gaps, scale)


def _layer_norm(use: Use) -> Expr:
    """The wide copy, the centred rows, and two products at a time."""
    x = use.operands["x"]
    full, narrow, copy = wide(x), width(x), copied(x)
    products = 2 if use.has("weight") or use.has("bias") else 1
    rows = mul(4 * full, numel(x.type.shape[:-1]))
    return add(mul(copy + (1 + products) * full - narrow, numbers(x)), rows, mul(full, x.type.shape[-1]))


def _gated_activation(use: Use) -> Expr:
    """The wide copy of both halves, the activated gate, the product before it is rounded."""
    x = use.operands["x"]
    total = 2 * copied(x) + 2 * wide(x)
    return mul(total - width(x), numel(use.result.shape))


def _rotary_tables(use: Use) -> Expr:
    """Angles, a table and its scaled copy, before that is rounded."""
    made = element_bytes(use.result.dtype)
    return add(mul(12 - made, numel(use.result.shape)), mul(4, numbers(use.operands["positions"])))


def _rope_frequencies(use: Use) -> Expr:
    return mul(6, _bytes(use.result))


def _rotary(use: Use) -> Expr:
    """Of the turned part a wide copy, the halves of products, the halves joined, their rounded copy."""
    x, table = use.operands["x"], use.operands["cos"]
    full, narrow, copy = wide(x), width(x), copied(x)
    turned = mul(2, table.type.shape[-1])
    halves = add(mul(copy + 2 * full, turned), mul(-narrow, x.type.shape[3]))
    joined = mul(copy + full + (narrow if copy else 0), turned)
    tables: Expr = mul(2 * full, numbers(table)) if width(table) < full else 0
    return add(mul(numel(x.type.shape[:3]), largest((halves, joined))), tables)


def _write_kv(use: Use) -> Expr:
    """The Triton kernel needs nothing; the reference gathers rows, rounds them and chooses among them.

    For 8 bits a saturated copy stands beside what was gathered. The keys' rows are there until the values' are rounded.
    """
    if use.device == "cuda":
        return 0
    made, cached = use.width("k"), use.width("k_cache")
    is_copied = use.operands["k"].type.dtype == use.operands["k_cache"].type.dtype
    rounding = made if is_copied else 2 * made if cached == 1 else made + cached
    k, v = (numbers(use.operands[new]) for new in ("k", "v"))
    rows = (mul(max(rounding, 2 * cached), k), add(mul(cached, k), mul(rounding, v)), mul(2 * cached, v))
    return add(largest(rows), mul(64, use.shape("slot_mapping")[0]))


def _write_latent(use: Use) -> Expr:
    """Rows of both parts, joined, rounded, and chosen from; for 8 bits with a saturated copy."""
    made, cached = use.width("latent"), use.width("cache")
    both = add(numbers(use.operands["latent"]), numbers(use.operands["k_rope"]))
    held = 2 * made if cached in (1, made) else made + max(made, cached) + cached
    return add(mul(held, both), mul(64, use.shape("slot_mapping")[0]))


def _route(use: Use) -> Expr:
    """Scores, ranks and the places of the sorted ones."""
    return mul(8 * wide(use.operands["logits"]), numbers(use.operands["logits"]))


def _experts(use: Use) -> Expr:
    """Rows sorted by expert: the first product, the activation in float32, the second, rows put back and weighted."""
    x, down = use.operands["x"], use.operands["down"]
    full, narrow, copy = wide(x), width(x), copied(x)
    (_, made, outer), inner = use.shape("up"), down.type.shape[2]
    gated = use.constant("gated")
    # A gate and its values, limited; what is activated, the values with their offset, the product.
    limits = 2 if gated and use.constant("limit") is not None else 0
    extras = limits + (3 if gated or use.constant("alpha") not in (None, 1.0) else 2)
    rows = numbers(use.operands["expert_ids"])
    opened = add(mul(narrow, outer), mul((3 if use.has("up_bias") else 2) * narrow, made))
    closed = add(mul(full + (narrow if copy else 0), inner), mul((3 if use.has("down_bias") else 2) * narrow, outer))
    stages = (
        add(mul(rows, opened), _gathered(use, "up", rows)),
        mul(rows, add(mul(narrow + copy, made), mul(extras * full, inner))),
        add(mul(rows, closed), _gathered(use, "down", rows)),
        mul(rows, 2 * narrow + copy + full, outer),
    )
    places = add(mul(64, rows), mul(64, use.shape("up")[0]))
    summed = add(mul(rows, 2 * narrow + full, outer), mul(full, numbers(x)))
    return add(largest((add(largest(stages), mul(-1, size(x))), summed)), places)


def _grouped_linear(use: Use) -> Expr:
    """Rows sorted by expert and their products; then the products put back."""
    rows, narrow = use.shape("x")[0], use.width("x")
    products = mul((2 if use.has("bias") and use.device != "cpu" else 1) * narrow, use.shape("weight")[1])
    places = add(mul(64, rows), mul(64, use.shape("weight")[0]))
    return add(mul(rows, add(mul(narrow, use.shape("x")[1]), products)), places, _gathered(use, "weight", rows))


def _gathered(use: Use, name: str, rows: Expr) -> Expr:
    """Weights gathered row by row, where a GPU has no grouped product for them."""
    weight = use.operands[name]
    _, outer, inner = weight.type.shape
    whole = all(isinstance(each, int) and each % 8 == 0 for each in (outer, inner))
    if use.device == "cpu" or (weight.type.dtype == "bfloat16" and whole):
        return 0
    one = mul(outer, inner)
    return mul(width(weight), minimum(mul(rows, one), largest((_GATHERED_ELEMENTS, one))))


def _nothing(use: Use) -> Expr:
    """For views, and for ops that write their results and no more."""
    return 0


def _sample(use: Use) -> Expr:
    return drawing(use.operands["logits"].type, use.device)


_ELEMENTWISE = (
    "add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "rsub.Scalar", "pow.Tensor_Scalar", "neg.default",
    "abs.default", "relu.default", "exp.default", "expm1.default", "log.default", "log1p.default", "softplus.default",
    "floor.default", "minimum.default", "maximum.default", "rsqrt.default", "sqrt.default", "tanh.default",
    "sigmoid.default", "silu.default", "gelu.default", "cos.default", "sin.default", "clamp.default",
    "masked_fill.Scalar", "where.self", "logical_not.default", "bitwise_not.default", "full_like.default",
    *(f"{name}.{other}" for name in ("eq", "ne", "ge", "gt", "le", "lt") for other in ("Scalar", "Tensor")),
)  # fmt: skip
_WITHOUT = (
    "addmm.default", "to.dtype", "reshape.default", "transpose.int", "permute.default", "unsqueeze.default",
    "squeeze.dim", "expand.default", "slice.Tensor", "select.int", "max.dim", "argmax.default", "gather.default",
    "scatter.src", "scatter.value", "one_hot.default", "cat.default", "mean.dim", "sum.dim_IntList",
)  # fmt: skip

ROWS: dict[str, Row] = {
    **{f"aten.{name}": _converted for name in _ELEMENTWISE},
    **{f"aten.{name}": _nothing for name in _WITHOUT},
    "precast.gather_rows": _nothing,
    "precast.sample": _sample,
    "aten.linear.default": _linear,
    "aten.matmul.default": _matmul,
    "aten.topk.default": _sorted,
    "aten.sort.default": _sorted,
    "aten.softmax.int": _along_rows,
    "aten.cumsum.default": _along_rows,
    "precast.embedding": _embedding,
    "precast.rms_norm": _rms_norm,
    "precast.residual_rms_norm": _rms_norm,
    "precast.layer_norm": _layer_norm,
    "precast.gated_activation": _gated_activation,
    "precast.rotary_tables": _rotary_tables,
    "precast.rope_frequencies": _rope_frequencies,
    "precast.rotary": _rotary,
    "precast.write_kv": _write_kv,
    "precast.write_latent": _write_latent,
    "precast.route": _route,
    "precast.experts": _experts,
    "precast.grouped_linear": _grouped_linear,
    **workspace_attention.ROWS,
    **workspace_states.ROWS,
}
