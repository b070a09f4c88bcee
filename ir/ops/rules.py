"""Shape rules: the result types of each op from the types of its arguments, over symbolic sizes.

A rule takes the node's arguments by name (tensors as `TensorType`, lists of tensors as tuples of it, integers as
expressions, element types as strings) and returns the result types, or raises `RuleError` with what was expected
and what was found. Rules are the only place where a signature's shapes are written down; the verifier, the text
form's parser and the tests of the torch fakes read them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from precast.ir.graph import symbols
from precast.ir.graph.schema import Expr, TensorType

Args = Mapping[str, Any]
Rule = Callable[[Args], tuple[TensorType, ...]]

COMPUTED = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("bool", "int8", "uint8", "int32", "int64")
FLOATS = ("float8_e4m3fn", "float16", "bfloat16", "float32", "float64")
_RANK = {"bool": 0, "uint8": 1, "int8": 1, "int32": 2, "int64": 3,
         "float8_e4m3fn": 4, "float16": 5, "bfloat16": 5, "float32": 6, "float64": 7}  # fmt: skip
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


class RuleError(Exception):
    """The arguments don't fit the op."""


# --- checks ----------------------------------------------------------------------------------------------------


def _expect(ok: bool, message: str) -> None:
    if not ok:
        raise RuleError(message)


def _shape_text(shape: Sequence[Expr]) -> str:
    return "[" + ", ".join(symbols.text(size) for size in shape) + "]"


def _same(name: str, found: Sequence[Expr], expected: Sequence[Expr]) -> None:
    ok = len(found) == len(expected) and all(symbols.equal(a, b) for a, b in zip(found, expected, strict=True))
    _expect(ok, f"{name}: expected shape {_shape_text(expected)}, found {_shape_text(found)}")


def _rank(name: str, tensor: TensorType, rank: int) -> None:
    _expect(len(tensor.shape) == rank, f"{name}: expected {rank} dimensions, found {_shape_text(tensor.shape)}")


def _dtype(name: str, tensor: TensorType, *allowed: str) -> None:
    _expect(tensor.dtype in allowed, f"{name}: expected dtype {' or '.join(allowed)}, found {tensor.dtype}")


def _axis(dim: Any, rank: int, name: str = "dim") -> int:
    """The dimension that `dim` names, counted from the front."""
    _expect(isinstance(dim, int) and -rank <= dim < rank, f"{name}: {dim} is outside of {rank} dimensions")
    return int(dim) % rank


def _sizes(name: str, shape: Sequence[Any]) -> tuple[Expr, ...]:
    known = [size for size in shape if isinstance(size, int)]
    _expect(min(known, default=0) >= 0, f"{name}: sizes are written out, never {min(known, default=0)}")
    return tuple(shape)


def broadcast(*shapes: Sequence[Expr]) -> tuple[Expr, ...]:
    """The common shape of tensors that are combined element by element."""
    out: list[Expr] = []
    for axis in range(1, max(len(s) for s in shapes) + 1):
        size: Expr = 1
        for shape in shapes:
            if axis > len(shape) or shape[-axis] == 1:
                continue
            _expect(
                size == 1 or symbols.equal(size, shape[-axis]),
                f"shapes {', '.join(map(_shape_text, shapes))} don't broadcast",
            )
            size = shape[-axis]
        out.append(size)
    return tuple(reversed(out))


def _promote(operands: Sequence[Any]) -> str:
    """The dtype in which torch combines tensors and numbers.

    Tensors with dimensions decide; zero-dim tensors, then numbers, count only if they are of a higher category
    (bool, integer, floating). A number that is no tensor is an int64 or a float32.
    """
    dims, zero_dim, number = "", "", ""
    for operand in operands:
        if not isinstance(operand, TensorType):
            dtype = "bool" if isinstance(operand, bool) else "float32" if isinstance(operand, float) else "int64"
            number = _wider(number, dtype)
        elif operand.shape:
            dims = _wider(dims, operand.dtype)
        else:
            zero_dim = _wider(zero_dim, operand.dtype)
    best = zero_dim if _category(zero_dim) > _category(dims) else dims
    return number if _category(number) > _category(best) else best


def _wider(best: str, dtype: str) -> str:
    pair = {best, dtype}
    _expect(pair != {"int8", "uint8"}, "int8 and uint8 combine to int16, which is no element type here")
    _expect("float8_e4m3fn" not in pair, "float8_e4m3fn is for storage: cast it first")
    if pair == {"float16", "bfloat16"}:
        return "float32"
    return dtype if not best or _RANK[dtype] > _RANK[best] else best


def _category(dtype: str) -> int:
    return 3 if dtype in FLOATS else 0 if not dtype else 1 if dtype == "bool" else 2


# --- aten ------------------------------------------------------------------------------------------------------


def pointwise(args: Args) -> tuple[TensorType, ...]:
    operands = [value for value in args.values() if value is not None]
    shape = broadcast(*(operand.shape for operand in operands if isinstance(operand, TensorType)))
    return (TensorType(_promote(operands), shape),)  # type: ignore[arg-type]


def pointwise_float(args: Args) -> tuple[TensorType, ...]:
    (result,) = pointwise(args)
    return (result if result.dtype in FLOATS else TensorType("float32", result.shape),)


def arithmetic(args: Args) -> tuple[TensorType, ...]:
    """As `pointwise`, of numbers only: torch subtracts, negates and compares with zero no bool."""
    for name, value in args.items():
        is_bool = isinstance(value, bool) or (isinstance(value, TensorType) and value.dtype == "bool")
        _expect(not is_bool, f"{name}: expected numbers, found bool")
    return pointwise(args)


def clamp(args: Args) -> tuple[TensorType, ...]:
    _expect(args.get("min") is not None or args.get("max") is not None, "min, max: expected one of them at least")
    return arithmetic(args)


def activation(args: Args) -> tuple[TensorType, ...]:
    x, kind = args["self"], args.get("approximate", "none")
    _dtype("self", x, *COMPUTED)
    _expect(kind in ("none", "tanh"), f"approximate: expected none or tanh, found {kind!r}")
    return (x,)


def softplus(args: Args) -> tuple[TensorType, ...]:
    _dtype("self", args["self"], *COMPUTED)
    return (args["self"],)


def linear(args: Args) -> tuple[TensorType, ...]:
    x, weight, bias = args["input"], args["weight"], args.get("bias")
    _rank("weight", weight, 2)
    _expect(len(x.shape) >= 1, "input: expected at least one dimension")
    _dtype("input", x, *COMPUTED)
    _same("input's last dimension", x.shape[-1:], weight.shape[1:])
    _dtype("weight", weight, x.dtype)
    if bias is not None:
        _same("bias", bias.shape, weight.shape[:1])
        _dtype("bias", bias, x.dtype)
    return (TensorType(x.dtype, (*x.shape[:-1], weight.shape[0])),)


def addmm(args: Args) -> tuple[TensorType, ...]:
    bias, a, b = args["self"], args["mat1"], args["mat2"]
    _rank("mat1", a, 2)
    _rank("mat2", b, 2)
    _dtype("mat1", a, *COMPUTED)
    _dtype("mat2", b, a.dtype)
    _dtype("self", bias, a.dtype)
    _same("mat2's first dimension", b.shape[:1], a.shape[1:])
    out = (a.shape[0], b.shape[1])
    _same("self, broadcast", broadcast(bias.shape, out), out)
    return (TensorType(a.dtype, out),)


def matmul(args: Args) -> tuple[TensorType, ...]:
    a, b = args["self"], args["other"]
    _expect(len(a.shape) >= 2 and len(b.shape) >= 2, "expected two matrices or batches of matrices")
    _same("other's second to last dimension", b.shape[-2:-1], a.shape[-1:])
    _dtype("self", a, *COMPUTED)
    _dtype("other", b, a.dtype)
    return (TensorType(a.dtype, (*broadcast(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])),)


def mean(args: Args) -> tuple[TensorType, ...]:
    _dtype("self", args["self"], *COMPUTED)
    return (_reduced(args, args["self"].dtype),)


def sum_(args: Args) -> tuple[TensorType, ...]:
    dtype = args["self"].dtype
    _dtype("self", args["self"], *INTEGERS, *COMPUTED)
    return (_reduced(args, dtype if dtype in FLOATS else "int64"),)


def _reduced(args: Args, dtype: str) -> TensorType:
    x = args["self"]
    dims = [_axis(dim, len(x.shape)) for dim in args["dim"]]
    _expect(0 < len(set(dims)) == len(dims), f"dim: expected different dimensions, at least one, found {dims}")
    kept = bool(args.get("keepdim"))
    shape = tuple(1 if i in dims else size for i, size in enumerate(x.shape) if kept or i not in dims)
    return TensorType(dtype, shape)  # type: ignore[arg-type]


def softmax(args: Args) -> tuple[TensorType, ...]:
    x = args["self"]
    _axis(args["dim"], len(x.shape))
    result = TensorType(args.get("dtype") or x.dtype, x.shape)
    _dtype("dtype, or self", result, *COMPUTED)
    return (result,)


def cast(args: Args) -> tuple[TensorType, ...]:
    return (TensorType(args["dtype"], args["self"].shape),)


def reshape(args: Args) -> tuple[TensorType, ...]:
    x, shape = args["self"], _sizes("shape", args["shape"])
    _expect(
        symbols.equal(symbols.numel(x.shape), symbols.numel(shape)),
        f"shape: {_shape_text(shape)} has another number of elements than {_shape_text(x.shape)}",
    )
    return (TensorType(x.dtype, shape),)


def transpose(args: Args) -> tuple[TensorType, ...]:
    x = args["self"]
    shape = list(x.shape)
    i, j = _axis(args["dim0"], len(shape), "dim0"), _axis(args["dim1"], len(shape), "dim1")
    shape[i], shape[j] = shape[j], shape[i]
    return (TensorType(x.dtype, tuple(shape)),)


def permute(args: Args) -> tuple[TensorType, ...]:
    x = args["self"]
    dims = [_axis(dim, len(x.shape)) for dim in args["dims"]]
    _expect(sorted(dims) == list(range(len(x.shape))), f"dims: {dims} is no permutation of {len(x.shape)} dimensions")
    return (TensorType(x.dtype, tuple(x.shape[dim] for dim in dims)),)


def unsqueeze(args: Args) -> tuple[TensorType, ...]:
    x = args["self"]
    dim = _axis(args["dim"], len(x.shape) + 1)
    return (TensorType(x.dtype, (*x.shape[:dim], 1, *x.shape[dim:])),)


def squeeze(args: Args) -> tuple[TensorType, ...]:
    x = args["self"]
    dim = _axis(args["dim"], len(x.shape))
    _expect(x.shape[dim] == 1, f"dim {dim} of {_shape_text(x.shape)} is not 1")
    return (TensorType(x.dtype, (*x.shape[:dim], *x.shape[dim + 1 :])),)


def expand(args: Args) -> tuple[TensorType, ...]:
    x, size = args["self"], _sizes("size", args["size"])
    _same("self, broadcast", broadcast(x.shape, size), size)
    return (TensorType(x.dtype, size),)


def slice_(args: Args) -> tuple[TensorType, ...]:
    """torch clamps bounds and counts negative ones from the end; here they are written out and must fit."""
    x = args["self"]
    dim = _axis(args["dim"], len(x.shape))
    start, end, step = args["start"], args["end"], args.get("step", 1)
    _expect(isinstance(step, int) and step > 0, f"step: expected a positive constant, found {step}")
    length = symbols.add(end, symbols.mul(-1, start))
    rest = symbols.add(x.shape[dim], symbols.mul(-1, end))
    ok = not any(isinstance(value, int) and value < 0 for value in (start, end, length))
    where = f"dimension {dim} of {_shape_text(x.shape)}"
    _expect(
        ok and symbols.never_negative(rest),
        f"start, end: {symbols.text(start)}:{symbols.text(end)} isn't known to lie in {where}",
    )
    count = symbols.floordiv(symbols.add(length, step - 1), step)
    return (TensorType(x.dtype, (*x.shape[:dim], count, *x.shape[dim + 1 :])),)


def select(args: Args) -> tuple[TensorType, ...]:
    x, index = args["self"], args["index"]
    dim = _axis(args["dim"], len(x.shape))
    size = x.shape[dim]
    if isinstance(size, int) and isinstance(index, int):
        _expect(-size <= index < size, f"index: {index} is outside of dimension {dim} of {_shape_text(x.shape)}")
    return (TensorType(x.dtype, (*x.shape[:dim], *x.shape[dim + 1 :])),)


def cat(args: Args) -> tuple[TensorType, ...]:
    parts = args["tensors"]
    _expect(len(parts) > 0, "tensors: expected at least one")
    first = parts[0]
    dim = _axis(args.get("dim", 0), len(first.shape))
    for part in parts[1:]:
        _rank("tensors", part, len(first.shape))
        _dtype("tensors", part, first.dtype)
        _same("tensors before dim", part.shape[:dim], first.shape[:dim])
        _same("tensors behind dim", part.shape[dim + 1 :], first.shape[dim + 1 :])
    total = symbols.add(*(part.shape[dim] for part in parts))
    return (TensorType(first.dtype, (*first.shape[:dim], total, *first.shape[dim + 1 :])),)


# --- precast ---------------------------------------------------------------------------------------------------


def embedding(args: Args) -> tuple[TensorType, ...]:
    ids, weight = args["ids"], args["weight"]
    _dtype("ids", ids, "int64", "int32")
    _rank("weight", weight, 2)
    _dtype("weight", weight, *COMPUTED)
    return (TensorType(weight.dtype, (*ids.shape, weight.shape[1])),)


def _norm(args: Args, *weights: str) -> TensorType:
    x: TensorType = args["x"]
    _expect(len(x.shape) > 0, "x: expected at least one dimension")
    _dtype("x", x, *COMPUTED)
    for name in weights:
        weight = args.get(name)
        if weight is not None:
            _same(name, weight.shape, x.shape[-1:])
            _dtype(name, weight, *COMPUTED)
    return x


def rms_norm(args: Args) -> tuple[TensorType, ...]:
    return (_norm(args, "weight"),)


def residual_rms_norm(args: Args) -> tuple[TensorType, ...]:
    x, residual = args["x"], args["residual"]
    _same("residual", residual.shape, x.shape)
    _dtype("residual", residual, x.dtype)
    return (_norm(args, "weight"), x)


def layer_norm(args: Args) -> tuple[TensorType, ...]:
    return (_norm(args, "weight", "bias"),)


def rope_frequencies(args: Args) -> tuple[TensorType, ...]:
    lengths, short, long = args["lengths"], args["short"], args.get("long")
    _rank("lengths", lengths, 2)
    _dtype("lengths", lengths, "int64")
    _rank("short", short, 1)
    _dtype("short", short, "float32")
    kind = args["kind"]
    _expect(kind in ("longrope", "dynamic"), f"kind: expected longrope or dynamic, found {kind!r}")
    if kind == "dynamic":
        _expect(long is None, "long: dynamic takes one set of frequencies, found two")
    elif long is None:
        raise RuleError("long: longrope takes two sets of frequencies, found one")
    else:
        _same("long", long.shape, short.shape)
        _dtype("long", long, "float32")
    return (TensorType("float32", (*lengths.shape, *short.shape)),)


def rotary_tables(args: Args) -> tuple[TensorType, ...]:
    positions, inv_freq = args["positions"], args["inv_freq"]
    _rank("positions", positions, 2)
    _dtype("positions", positions, "int64")
    _dtype("inv_freq", inv_freq, "float32")
    if len(inv_freq.shape) != 1:
        _same("inv_freq, but for its last dimension", inv_freq.shape[:-1], positions.shape)
    table = TensorType(args["dtype"], (*positions.shape, inv_freq.shape[-1]))
    _dtype("dtype", table, *COMPUTED)
    return (table, table)


def rotary(args: Args) -> tuple[TensorType, ...]:
    x, cos, sin = args["x"], args["cos"], args["sin"]
    _rank("x", x, 4)
    _rank("cos", cos, 3)
    _dtype("x", x, *COMPUTED)
    _dtype("cos", cos, *COMPUTED)
    _dtype("sin", sin, cos.dtype)
    _same("cos, but for its last dimension", cos.shape[:2], x.shape[:2])
    _same("sin", sin.shape, cos.shape)
    half, size = cos.shape[-1], x.shape[-1]
    if isinstance(half, int) and isinstance(size, int):
        _expect(2 * half <= size, f"cos: {half} pairs don't fit a head of size {size}")
    return (x,)


def gated_activation(args: Args) -> tuple[TensorType, ...]:
    x, kind = args["x"], args["kind"]
    _dtype("x", x, *COMPUTED)
    _expect(len(x.shape) > 0, "x: expected at least one dimension")
    _expect(kind in ACTIVATIONS, f"kind: expected one of {', '.join(ACTIVATIONS)}, found {kind!r}")
    half = symbols.floordiv(x.shape[-1], 2)
    _same("x's last dimension, halved twice", (symbols.mul(half, 2),), x.shape[-1:])
    return (TensorType(x.dtype, (*x.shape[:-1], half)),)


def _heads(args: Args, key: TensorType, value: TensorType) -> TensorType:
    q, sinks = args["q"], args.get("sinks")
    _rank("q", q, 4)
    _same("q's first dimension", q.shape[:1], (1,))
    _same("key's head size", key.shape[-1:], q.shape[-1:])
    heads, kv_heads = q.shape[2], key.shape[-2]
    if isinstance(heads, int) and isinstance(kv_heads, int):
        _expect(kv_heads > 0 and heads % kv_heads == 0, f"q: {heads} heads are no multiple of {kv_heads} kv heads")
    if sinks is not None:
        _same("sinks", sinks.shape, (heads,))
        _dtype("sinks", sinks, *COMPUTED)
    window = args.get("window")
    ok = window is None or (isinstance(window, int) and window > 0)
    _expect(ok, f"window: expected None or at least 1, found {window}")
    _slopes_and_chunk(args, heads)
    _dtype("q", q, *COMPUTED)
    return TensorType(q.dtype, (*q.shape[:-1], value.shape[-1]))


def _slopes_and_chunk(args: Args, heads: Expr) -> None:
    slopes, chunk = args.get("slopes"), args.get("chunk")
    if slopes is not None:
        _same("slopes", slopes.shape, (heads,))
        _dtype("slopes", slopes, "float32")
    ok = chunk is None or (isinstance(chunk, int) and chunk > 0)
    _expect(ok, f"chunk: expected None or at least 1, found {chunk}")
    _expect(chunk is None or args.get("window") is None, "window, chunk: expected one of them at most, found both")


def attention(args: Args) -> tuple[TensorType, ...]:
    q, k, v = args["q"], args["k"], args["v"]
    _rank("k", k, 4)
    _rank("v", v, 4)
    _same("k's tokens", k.shape[:2], q.shape[:2])
    _same("v's tokens and heads", v.shape[:3], k.shape[:3])
    _dtype("k", k, q.dtype)
    _dtype("v", v, q.dtype)
    _rank("cu_seqlens", args["cu_seqlens"], 1)
    _dtype("cu_seqlens", args["cu_seqlens"], "int32")
    return (_heads(args, k, v),)


def write_kv(args: Args) -> tuple[TensorType, ...]:
    for name in ("k", "v"):
        new, pages = args[name], args[f"{name}_cache"]
        _rank(name, new, 4)
        _rank(f"{name}_cache", pages, 4)
        _same(f"{name}'s first dimension", new.shape[:1], (1,))
        _same(f"{name}_cache's heads and head size", pages.shape[2:], new.shape[2:])
        _same("slot_mapping", args["slot_mapping"].shape, new.shape[1:2])
    _same("v_cache's pages and heads", args["v_cache"].shape[:3], args["k_cache"].shape[:3])
    _dtype("k", args["k"], *COMPUTED)
    _dtype("v", args["v"], args["k"].dtype)
    _dtype("k_cache", args["k_cache"], *FLOATS)
    _dtype("v_cache", args["v_cache"], args["k_cache"].dtype)
    _dtype("slot_mapping", args["slot_mapping"], "int64")
    return ()


def paged_attention(args: Args) -> tuple[TensorType, ...]:
    k_cache, v_cache = args["k_cache"], args["v_cache"]
    _rank("k_cache", k_cache, 4)
    _rank("v_cache", v_cache, 4)
    _dtype("k_cache", k_cache, *FLOATS)
    _dtype("v_cache", v_cache, k_cache.dtype)
    _same("v_cache's pages and heads", v_cache.shape[:3], k_cache.shape[:3])
    for name in ("cu_seqlens", "kv_lens", "page_indices", "page_indptr", "page_start"):
        _rank(name, args[name], 1)
        _dtype(name, args[name], "int32")
    sequences = args["kv_lens"].shape
    bounds = (symbols.add(sequences[0], 1),)
    _same("cu_seqlens", args["cu_seqlens"].shape, bounds)
    _same("page_indptr", args["page_indptr"].shape, bounds)
    _same("page_start", args["page_start"].shape, sequences)
    return (_heads(args, k_cache, v_cache),)


def gather_rows(args: Args) -> tuple[TensorType, ...]:
    x, rows = args["x"], args["rows"]
    _rank("x", x, 3)
    _rank("rows", rows, 1)
    _dtype("rows", rows, "int64")
    return (TensorType(x.dtype, (x.shape[0], rows.shape[0], x.shape[2])),)


def sample(args: Args) -> tuple[TensorType, ...]:
    logits = args["logits"]
    _rank("logits", logits, 2)
    _dtype("logits", logits, *COMPUTED)
    wanted = {"temperature": "float32", "top_k": "int32", "top_p": "float32", "min_p": "float32",
              "seeds": "int64", "steps": "int64"}  # fmt: skip
    for name, dtype in wanted.items():
        _same(name, args[name].shape, logits.shape[:1])
        _dtype(name, args[name], dtype)
    return (TensorType("int64", logits.shape[:1]),)
