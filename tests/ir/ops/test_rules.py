"""The shape rules against torch's own answers, on the meta device and on the CPU, over odd sizes and all dtypes.

A rule may refuse what torch accepts (a bundle writes sizes out, and stores float8 without computing in it); it never
accepts what torch refuses, nor gives another shape or dtype.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from op_calls import (
    ALONG,
    B1,
    BLOCK_EXPERTS,
    BLOCKS_PACKED,
    BLOCKS_PAGES,
    ENTRIES,
    ENTRY_CHOICE,
    ENTRY_PAGES,
    EXPERTS,
    FP8,
    FP8_OF_A_RANK,
    FP8_OF_ROWS,
    FUSED,
    GATED,
    GPTQ,
    GROUPED,
    LATENT,
    LATENT_HEADS,
    LATENT_PAGES,
    MXFP4,
    NAMED_ENTRIES,
    NORM,
    NVFP4,
    OURS,
    PACKED,
    PACKED4,
    PAGED,
    PAGES8,
    ROPE,
    ROTARY,
    ROUNDED,
    ROUTE,
    SAMPLE,
    SCALES,
    SELECT,
    SELECT_BLOCKS,
    SELECT_BLOCKS_PAGES,
    SELECT_PAGES,
    SELECTED,
    SLOTS,
    STATES,
    STREAM,
    T1,
    TABLE,
    TABLE_OF_A_RANK,
    TABLES,
    TURNED,
    TWO_NORMS,
    WRITE,
    WRITE_ENTRIES,
    WRITE_INDEX,
    WRITE_LATENT,
    Args,
    f32,
    t,
)
from router_ops import ROUTER_OPS

from precast.ir.graph import symbols
from precast.ir.graph.schema import Apply, Dtype, TensorType
from precast.ir.ops import table as ops
from precast.ir.ops.op import ShapeError

DTYPES: dict[Dtype, torch.dtype] = {
    "bool": torch.bool,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "int32": torch.int32,
    "int64": torch.int64,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}
NAMES = {value: name for name, value in DTYPES.items()}
COMPUTED = [name for name in DTYPES if name != "float8_e4m3fn"]


def infer(op: str, args: Args) -> tuple[TensorType, ...]:
    definition = ops.lookup(op)
    assert definition is not None, op
    return definition.shape_rule(args)


def run(op: str, args: Args, device: str) -> TensorType | None:
    """What torch returns for tensors of these types, or None when it raises."""
    function: Any = torch.ops.aten
    for part in op.removeprefix("aten.").split("."):
        function = getattr(function, part)
    try:
        result = function(**{name: _real(name, value, device) for name, value in args.items()})
    except (RuntimeError, IndexError, NotImplementedError):
        return None
    return TensorType(NAMES.get(result.dtype, str(result.dtype)), tuple(result.shape))  # type: ignore[arg-type]


def _real(name: str, value: Any, device: str) -> Any:
    if isinstance(value, TensorType):
        return torch.ones(value.shape, dtype=DTYPES[value.dtype], device=device)  # type: ignore[arg-type]
    if isinstance(value, tuple):
        return [_real(name, item, device) for item in value]
    return DTYPES[value] if name == "dtype" else value  # type: ignore[index]


def at(value: Any, sizes: Mapping[str, int]) -> Any:
    """`value` with each symbol replaced by its size."""
    if isinstance(value, TensorType):
        return TensorType(value.dtype, tuple(symbols.evaluate(size, sizes) for size in value.shape))
    if isinstance(value, tuple):
        return tuple(at(item, sizes) for item in value)
    if isinstance(value, Apply) or (isinstance(value, str) and value in sizes):
        return symbols.evaluate(value, sizes)
    return value


UNARY = [
    "neg", "abs", "relu", "exp", "expm1", "log", "log1p", "softplus", "floor", "rsqrt", "sqrt", "tanh", "sigmoid",
    "silu", "gelu", "cos", "sin",
]  # fmt: skip
BINARY = ["add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "minimum.default", "maximum.default"]
COMPARISONS = ["eq.Tensor", "ne.Tensor", "ge.Tensor", "gt.Tensor", "le.Tensor", "lt.Tensor"]


@pytest.mark.parametrize("name", UNARY)
@pytest.mark.parametrize("shape", [(), (3,), (1, 3, 0, 5)])
def test_unary_ops_agree_with_torch_for_every_dtype(name: str, shape: tuple[int, ...]) -> None:
    for dtype in DTYPES:
        _agree(f"aten.{name}.default", {"self": t(dtype, *shape)})


@pytest.mark.parametrize("name", [*BINARY, *COMPARISONS])
@pytest.mark.parametrize("left", [(), (3, 1)])
@pytest.mark.parametrize("right", [(), (1, 5)])
def test_binary_ops_promote_as_torch_does(name: str, left: tuple[int, ...], right: tuple[int, ...]) -> None:
    for a, b in itertools.product(DTYPES, DTYPES):
        _agree(f"aten.{name}", {"self": t(a, *left), "other": t(b, *right)})


@pytest.mark.parametrize("op", ["add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "rsub.Scalar"])
@pytest.mark.parametrize("number", [2, 2.5, True])
@pytest.mark.parametrize("shape", [(), (3, 5)])
def test_numbers_promote_as_torch_does(op: str, number: float, shape: tuple[int, ...]) -> None:
    for dtype in DTYPES:
        _agree(f"aten.{op}", {"self": t(dtype, *shape), "other": number})


@pytest.mark.parametrize("shape", [(), (3, 1)])
def test_a_choice_of_two_promotes_as_torch_does(shape: tuple[int, ...]) -> None:
    for a, b in itertools.product(DTYPES, DTYPES):
        _agree("aten.where.self", {"condition": t("bool", 1, 5), "self": t(a, *shape), "other": t(b, 3, 1)})


@pytest.mark.parametrize("exponent", [2, 0.5])
def test_powers_promote_as_torch_does(exponent: float) -> None:
    for dtype in DTYPES:
        _agree("aten.pow.Tensor_Scalar", {"self": t(dtype, 3), "exponent": exponent})


@pytest.mark.parametrize(("low", "high"), [(None, 1), (0, None), (0.5, 1.5), (-1, 2.5)])
def test_clamp_promotes_as_torch_does(low: float | None, high: float | None) -> None:
    for dtype in DTYPES:
        _agree("aten.clamp.default", {"self": t(dtype, 3), "min": low, "max": high})


def _agree(op: str, args: Args) -> None:
    real = run(op, args, "cpu")
    result = _accepted(op, args)
    if result is None:
        assert _may_refuse(op, args, real), f"{op} {args}: torch gives {real}"
    else:
        assert real == result == run(op, args, "meta"), f"{op} {args}"


def _accepted(op: str, args: Args) -> TensorType | None:
    try:
        (result,) = infer(op, args)
    except ShapeError:
        return None
    return result


def _may_refuse(op: str, args: Args, real: TensorType | None) -> bool:
    dtypes = {value.dtype for value in args.values() if isinstance(value, TensorType)}
    dtypes |= {"bool"} if any(isinstance(value, bool) for value in args.values()) else set()
    return (
        real is None
        or "float8_e4m3fn" in dtypes
        or {"int8", "uint8"} <= dtypes
        # torch takes `x - True` and clamps a bool to integers; no model means it.
        or (op in ("aten.sub.Tensor", "aten.rsub.Scalar", "aten.clamp.default") and "bool" in dtypes)
    )


ACCEPTED: list[tuple[str, Args]] = [
    ("aten.linear.default", {"input": f32(1, "T", 5), "weight": f32(7, 5)}),
    ("aten.linear.default", {"input": f32(5), "weight": f32(7, 5), "bias": f32(7)}),
    ("aten.linear.default", {"input": t("bfloat16", "T", 5), "weight": t("bfloat16", 0, 5)}),
    ("aten.addmm.default", {"self": f32(7), "mat1": f32("T", 5), "mat2": f32(5, 7)}),
    ("aten.addmm.default", {"self": f32("T", 1), "mat1": f32("T", 5), "mat2": f32(5, 7)}),
    ("aten.matmul.default", {"self": f32("T", 3), "other": f32(3, 5)}),
    ("aten.matmul.default", {"self": f32(2, 1, "T", 3), "other": f32(7, 3, "T")}),
    ("aten.add.Tensor", {"self": f32(1, "T", 1), "other": f32(3, 1, 5)}),
    ("aten.mul.Tensor", {"self": f32("T", T1), "other": f32(T1)}),
    ("aten.mul.Tensor", {"self": t("int64", "T"), "other": 0.5}),
    ("aten.sub.Tensor", {"self": f32(0, 3), "other": f32(1, 1)}),
    ("aten.div.Tensor", {"self": t("int32", "T"), "other": t("int32")}),
    ("aten.rsub.Scalar", {"self": f32("T"), "other": 1}),
    ("aten.pow.Tensor_Scalar", {"self": f32("T"), "exponent": 2}),
    ("aten.gelu.default", {"self": f32("T", 3), "approximate": "tanh"}),
    ("aten.softplus.default", {"self": t("bfloat16", "T"), "beta": 2.0, "threshold": 5}),
    ("aten.minimum.default", {"self": t("bool", "T", T1), "other": t("bool", "T", 1)}),
    ("aten.maximum.default", {"self": t("int32", 1, "T"), "other": f32()}),
    ("aten.bitwise_xor.Tensor", {"self": t("int64", "T", 1), "other": t("int32", 6)}),
    ("aten.remainder.Tensor", {"self": t("int64", "T", 1), "other": t("int64", 6)}),
    ("aten.clamp.default", {"self": f32("T"), "min": None, "max": 3}),
    *((f"aten.{name}.default", {"self": f32(1, "T", 3)}) for name in UNARY),
    ("aten.mean.dim", {"self": f32(3, "T", 5), "dim": (1,)}),
    ("aten.mean.dim", {"self": t("float16", 3, "T", 5), "dim": (-1, 0), "keepdim": True}),
    ("aten.sum.dim_IntList", {"self": t("bool", 3, "T"), "dim": (-1,), "keepdim": True}),
    ("aten.sum.dim_IntList", {"self": t("int32", 3, "T"), "dim": (0,)}),
    ("aten.sum.dim_IntList", {"self": f32(3, "T"), "dim": (0, 1)}),
    ("aten.softmax.int", {"self": t("bfloat16", 3, "T"), "dim": -1}),
    ("aten.softmax.int", {"self": t("bfloat16", 3, "T"), "dim": 0, "dtype": "float32"}),
    ("aten.softmax.int", {"self": t("int64", 3), "dim": 0, "dtype": "float64"}),
    *(("aten.to.dtype", {"self": t("float32", 1, "T"), "dtype": dtype}) for dtype in DTYPES),
    *(("aten.to.dtype", {"self": t(dtype, 3), "dtype": "bfloat16"}) for dtype in DTYPES),
    ("aten.reshape.default", {"self": f32(1, "T", 15), "shape": (1, "T", 3, 5)}),
    ("aten.reshape.default", {"self": f32("T", 4, 3), "shape": (Apply("mul", (4, "T")), 3)}),
    ("aten.reshape.default", {"self": f32(), "shape": (1, 1)}),
    ("aten.reshape.default", {"self": f32(1), "shape": ()}),
    ("aten.reshape.default", {"self": f32(0, 3), "shape": (5, 0)}),
    ("aten.transpose.int", {"self": f32(1, "T", 3, 5), "dim0": 1, "dim1": -2}),
    ("aten.transpose.int", {"self": f32(3), "dim0": 0, "dim1": -1}),
    ("aten.permute.default", {"self": f32(1, "T", 3), "dims": (2, 0, -2)}),
    ("aten.permute.default", {"self": f32(), "dims": ()}),
    ("aten.unsqueeze.default", {"self": f32(3, "T"), "dim": -1}),
    ("aten.unsqueeze.default", {"self": f32(3, "T"), "dim": -3}),
    ("aten.unsqueeze.default", {"self": f32(), "dim": 0}),
    ("aten.squeeze.dim", {"self": f32("T", 1, 3), "dim": -2}),
    ("aten.expand.default", {"self": f32(1, 3, 1), "size": (7, "T", 3, 5)}),
    ("aten.expand.default", {"self": f32(), "size": ("T",)}),
    ("aten.expand.default", {"self": f32(1), "size": (0,)}),
    ("aten.slice.Tensor", {"self": f32(1, "T", 9), "dim": -1, "start": 2, "end": 9, "step": 3}),
    ("aten.slice.Tensor", {"self": f32(1, "T", 9), "dim": 1, "start": 1, "end": "T"}),
    ("aten.slice.Tensor", {"self": f32(T1), "dim": 0, "start": 0, "end": "T", "step": 2}),
    ("aten.slice.Tensor", {"self": f32(5), "dim": 0, "start": 5, "end": 5}),
    ("aten.select.int", {"self": f32(3, "T"), "dim": 0, "index": -3}),
    ("aten.select.int", {"self": f32(3, "T"), "dim": 1, "index": 0}),
    ("aten.cat.default", {"tensors": (f32(1, "T", 3), f32(1, "T", 4)), "dim": -1}),
    ("aten.cat.default", {"tensors": (f32("T", 2), f32("T", 2), f32(3, 2))}),
    ("aten.cat.default", {"tensors": (t("int8", 0),), "dim": 0}),
]


@pytest.mark.parametrize(("op", "args"), ACCEPTED)
@pytest.mark.parametrize("size", [1, 2, 7])
def test_a_symbolic_result_is_torch_s_at_every_size(op: str, args: Args, size: int) -> None:
    (result,) = infer(op, args)
    sizes = {"T": size}
    if size == 1 and op == "aten.slice.Tensor" and args["start"] == 1 and args["end"] == "T":
        sizes = {"T": 3}
    real = at_args(args, sizes)
    assert at(result, sizes) == run(op, real, "meta") == run(op, real, "cpu")


def at_args(args: Args, sizes: Mapping[str, int]) -> Args:
    return {name: value if name == "dtype" else at(value, sizes) for name, value in args.items()}


@pytest.mark.parametrize(("op", "args", "expected"), OURS)
def test_our_ops_give_these_types(op: str, args: Args, expected: tuple[TensorType, ...]) -> None:
    assert infer(f"precast.{op}", args) == expected


def both(first: str, second: str, value: TensorType) -> Args:
    return {first: value, second: value}


SCALED: Args = {**WRITE, "k_cache": PAGES8, "v_cache": PAGES8, **SCALES}
# op, arguments, what the message must say
SINKHORN: Args = {"x": f32("T", 9), "size": 3, "iterations": 20, "eps": 1e-6}
REJECTED: list[tuple[str, Args, str]] = [
    ("aten.linear.default", {"input": f32("T", 5), "weight": f32(7, 6)}, "input's last dimension.*6.*5"),
    ("aten.linear.default", {"input": f32("T", 5), "weight": f32(7)}, "weight: expected 2 dimensions"),
    ("aten.linear.default", {"input": f32(), "weight": f32(7, 5)}, "at least one dimension"),
    ("aten.linear.default", {"input": f32(5), "weight": t("float16", 7, 5)}, "weight: expected dtype float32"),
    ("aten.linear.default", {"input": f32(5), "weight": f32(7, 5), "bias": f32(5)}, "bias"),
    ("aten.addmm.default", {"self": f32(7), "mat1": f32("T", 5), "mat2": f32(4, 7)}, "mat2's first dimension"),
    ("aten.addmm.default", {"self": f32(7), "mat1": f32("T", 5), "mat2": f32(5, 7, 1)}, "mat2: expected 2"),
    ("aten.addmm.default", {"self": f32(5), "mat1": f32("T", 5), "mat2": f32(5, 7)}, "don't broadcast"),
    ("aten.addmm.default", {"self": f32(2, 2, 7), "mat1": f32(2, 5), "mat2": f32(5, 7)}, "self, broadcast"),
    ("aten.addmm.default", {"self": f32(7), "mat1": f32(2, 5), "mat2": t("float64", 5, 7)}, "mat2: expected dtype"),
    ("aten.matmul.default", {"self": f32(3), "other": f32(3, 5)}, "two matrices"),
    ("aten.matmul.default", {"self": f32("T", 3), "other": f32(T1, 5)}, "second to last"),
    ("aten.matmul.default", {"self": f32(2, 2, 3), "other": f32(3, 3, 5)}, "don't broadcast"),
    *(
        (f"aten.{name}.Tensor", {"self": f32("T"), "other": f32(T1)}, r"\[T\], \[\(T \+ 1\)\] don't broadcast")
        for name in ("add", "sub", "mul", "div")
    ),
    ("aten.add.Tensor", {"self": f32("T"), "other": f32("B")}, "don't broadcast"),
    ("aten.sub.Tensor", {"self": t("bool", 3), "other": t("bool", 3)}, "expected numbers"),
    ("aten.mul.Tensor", {"self": t("int8", 3), "other": t("uint8", 3)}, "int16"),
    ("aten.rsub.Scalar", {"self": t("bool", 3), "other": 1}, "expected numbers"),
    ("aten.bitwise_xor.Tensor", {"self": t("int64", 3), "other": t("bool", 3)}, "other: expected dtype"),
    ("aten.remainder.Tensor", {"self": f32(3), "other": t("int64", 3)}, "self: expected dtype"),
    ("aten.pow.Tensor_Scalar", {"self": t("float8_e4m3fn", 3), "exponent": 2}, "for storage"),
    *((f"aten.{name}.default", {"self": t("bool", 3)}, "numbers") for name in ("neg", "abs", "relu", "floor")),
    *((f"aten.{name}.default", {"self": t("int64", 3)}, "expected dtype") for name in ("silu", "gelu", "softplus")),
    *((f"aten.{name}.default", {"self": f32(3), "other": f32("T")}, "don't") for name in ("minimum", "maximum")),
    *(
        (f"aten.{name}.default", {"self": t("float8_e4m3fn", 3)}, "for storage")
        for name in ("exp", "expm1", "log", "log1p", "rsqrt", "sqrt", "tanh", "sigmoid", "cos", "sin")
    ),
    ("aten.gelu.default", {"self": f32(3), "approximate": "erf"}, "approximate: expected none or tanh"),
    ("aten.clamp.default", {"self": f32(3), "min": None, "max": None}, "one of them"),
    ("aten.mean.dim", {"self": t("int64", 3), "dim": (0,)}, "self: expected dtype"),
    ("aten.mean.dim", {"self": f32(3, 5), "dim": (0, -2)}, "different dimensions"),
    ("aten.mean.dim", {"self": f32(3, 5), "dim": (2,)}, "2 is outside of 2 dimensions"),
    ("aten.sum.dim_IntList", {"self": f32(3, 5), "dim": ()}, "at least one"),
    ("aten.sum.dim_IntList", {"self": t("float8_e4m3fn", 3), "dim": (0,)}, "expected dtype"),
    ("aten.softmax.int", {"self": t("int64", 3), "dim": 0}, "expected dtype"),
    ("aten.softmax.int", {"self": f32(3), "dim": 1}, "outside"),
    ("aten.softmax.int", {"self": f32(), "dim": 0}, "outside of 0 dimensions"),
    ("aten.reshape.default", {"self": f32("T", 6), "shape": ("T", 5)}, "another number of elements"),
    ("aten.reshape.default", {"self": f32("T", 6), "shape": ("T", -1)}, "never -1"),
    ("aten.reshape.default", {"self": f32(6), "shape": (-2, -3)}, "never -3"),
    ("aten.transpose.int", {"self": f32(3, 5), "dim0": 0, "dim1": 2}, "dim1: 2 is outside"),
    ("aten.transpose.int", {"self": f32(3, 5), "dim0": -3, "dim1": 1}, "dim0: -3 is outside"),
    ("aten.transpose.int", {"self": f32(), "dim0": 0, "dim1": 0}, "outside of 0 dimensions"),
    ("aten.transpose.int", {"self": f32(3, 5), "dim0": "T", "dim1": 1}, "dim0: T"),
    ("aten.permute.default", {"self": f32(3, 5), "dims": (0, -2)}, "no permutation"),
    ("aten.permute.default", {"self": f32(3, 5), "dims": (0,)}, "no permutation"),
    ("aten.unsqueeze.default", {"self": f32(3), "dim": 2}, "outside"),
    ("aten.squeeze.dim", {"self": f32(3, 5), "dim": 0}, r"dim 0 of \[3, 5\] is not 1"),
    ("aten.squeeze.dim", {"self": f32("T"), "dim": 0}, "is not 1"),
    ("aten.squeeze.dim", {"self": f32(), "dim": 0}, "outside"),
    ("aten.expand.default", {"self": f32(3), "size": (5,)}, "don't broadcast"),
    ("aten.expand.default", {"self": f32("T"), "size": (1,)}, "self, broadcast"),
    ("aten.expand.default", {"self": f32(2, 3), "size": (3,)}, "self, broadcast"),
    ("aten.expand.default", {"self": f32(3), "size": (2, -1)}, "never -1"),
    ("aten.slice.Tensor", {"self": f32(5), "dim": 0, "start": 2, "end": 6}, "isn't known to lie"),
    ("aten.slice.Tensor", {"self": f32(5), "dim": 0, "start": 3, "end": 2}, "isn't known to lie"),
    ("aten.slice.Tensor", {"self": f32("T"), "dim": 0, "start": -1, "end": "T"}, "isn't known to lie"),
    ("aten.slice.Tensor", {"self": f32("T"), "dim": 0, "start": 0, "end": 2**63 - 1}, "isn't known to lie"),
    ("aten.slice.Tensor", {"self": f32("T"), "dim": 0, "start": 0, "end": T1}, "isn't known to lie"),
    ("aten.slice.Tensor", {"self": f32(5), "dim": 0, "start": 0, "end": 5, "step": 0}, "step"),
    ("aten.slice.Tensor", {"self": f32(), "dim": 0, "start": 0, "end": 0}, "outside"),
    ("aten.select.int", {"self": f32(3), "dim": 0, "index": 3}, "index: 3 is outside"),
    ("aten.select.int", {"self": f32(3), "dim": 0, "index": -4}, "index: -4 is outside"),
    ("aten.select.int", {"self": f32(), "dim": 0, "index": 0}, "outside"),
    ("aten.cat.default", {"tensors": ()}, "at least one"),
    ("aten.cat.default", {"tensors": (f32(), f32())}, "outside"),
    ("aten.cat.default", {"tensors": (f32(2, 3), f32(3)), "dim": 0}, "expected 2 dimensions"),
    ("aten.cat.default", {"tensors": (f32(2, 3), f32(2, 4)), "dim": 0}, "after dim"),
    ("aten.cat.default", {"tensors": (f32(2, 3), f32(3, 3)), "dim": 1}, "before dim"),
    ("aten.cat.default", {"tensors": (f32(3), t("int64", 3))}, "expected dtype float32, found int64"),
    ("precast.sinkhorn", {**SINKHORN, "x": f32("T", 8)}, r"x's last dimension: expected shape \[9\], found \[8\]"),
    ("precast.sinkhorn", {**SINKHORN, "size": "T"}, "size: expected at least 1, found T"),
    ("precast.sinkhorn", {**SINKHORN, "iterations": 0}, "iterations: expected 1 to 1000, found 0"),
    ("precast.embedding", {"ids": f32("T"), "weight": f32(9, 8)}, "ids: expected dtype"),
    ("precast.embedding", {"ids": t("int64", "T"), "weight": f32(8)}, "weight: expected 2"),
    ("precast.embedding", {"ids": t("int64", "T"), "weight": t("int64", 9, 8), "scale": 2.0}, "scale: expected 1.0"),
    (
        "precast.sharded_embedding",
        {"ids": t("int64", "T"), "weight": f32(9, 8), "start": "T"},
        "start: expected a size",
    ),
    ("precast.quantised_embedding", {**TABLE, "ids": f32("T")}, "ids: expected dtype"),
    ("precast.quantised_embedding", {**TABLE, "format": "int8"}, "format: expected one of fp8, found 'int8'"),
    ("precast.quantised_embedding", {**TABLE, "dtype": "int64"}, "dtype: expected one of float16, .* found 'int64'"),
    ("precast.quantised_embedding", {**TABLE, "weight": t("int8", 99, 27)}, "weight: expected dtype float8_e4m3fn"),
    ("precast.quantised_embedding", {**TABLE, "scales": f32(24, 4)}, r"expected scales of \[25, 4\], found \[24, 4\]"),
    ("precast.quantised_embedding", {**TABLE, "block": (4,)}, "a block of"),
    (
        "precast.quantised_embedding",
        {**TABLE, "weight": t("float8_e4m3fn", 3, 99, 27), "scales": f32(3, 25, 4)},
        "weight: expected 2 dimensions",
    ),
    ("precast.quantised_sharded_embedding", {**TABLE, "start": "T"}, "start: expected a size"),
    ("precast.quantised_sharded_embedding", {**TABLE_OF_A_RANK, "block": (1000, 1)}, "expected scales of"),
    ("precast.rms_norm", {**NORM, "weight": f32(7)}, "weight: expected shape"),
    ("precast.rms_norm", {**NORM, "x": t("int64", 8)}, "x: expected dtype"),
    ("precast.rms_norm", {"x": f32(), "weight": f32()}, "at least one dimension"),
    ("precast.residual_rms_norm", {**STREAM, "residual": f32(1, "T", 1)}, "residual: expected shape"),
    ("precast.residual_rms_norm", {**STREAM, "residual": t("float64", 1, "T", 8)}, "residual: expected dtype"),
    ("precast.layer_norm", {**NORM, "bias": f32(1)}, "bias: expected shape"),
    ("precast.rope_frequencies", {**ROPE, "kind": "yarn"}, "kind: expected longrope or dynamic"),
    ("precast.rope_frequencies", {**ROPE, "long": None}, "two sets"),
    ("precast.rope_frequencies", {**ROPE, "kind": "dynamic"}, "one set"),
    ("precast.rope_frequencies", {**ROPE, "long": f32(9)}, "long: expected shape"),
    ("precast.rope_frequencies", {**ROPE, "lengths": t("int32", 1, "T")}, "lengths: expected dtype"),
    ("precast.norm_residual_norm", {**TWO_NORMS, "inner_weight": f32(7)}, "inner_weight: expected shape"),
    ("precast.norm_residual_norm", {**TWO_NORMS, "residual": f32(1, "T", 1)}, "residual: expected shape"),
    ("precast.rotary_tables", {**TABLES, "inv_freq": f32("T", 8)}, "inv_freq"),
    ("precast.rotary_tables", {**TABLES, "inv_freq": f32()}, "inv_freq"),
    ("precast.rotary_tables", {**TABLES, "dtype": "int64"}, "dtype: expected dtype"),
    ("precast.rotary_tables", {**TABLES, "positions": f32(1, "T")}, "positions: expected dtype"),
    ("precast.rotary", {**ROTARY, "x": f32("T", 8, 16)}, "x: expected 4 dimensions"),
    ("precast.rotary", {**ROTARY, **both("cos", "sin", t("int64", 1, "T", 8))}, "cos: expected dtype"),
    ("precast.rotary", {**ROTARY, **both("cos", "sin", f32(1, "T", 8, 1))}, "cos: expected 3 dimensions"),
    ("precast.rotary", {**ROTARY, "sin": f32(1, "T", 7)}, "sin: expected shape"),
    ("precast.rotary", {**ROTARY, "sin": t("float64", 1, "T", 8)}, "sin: expected dtype"),
    ("precast.rotary", {**ROTARY, "cos": f32(1, "T", 9), "sin": f32(1, "T", 9)}, "9 pairs don't fit"),
    ("precast.rotary", {**ROTARY, "cos": f32(1, T1, 8), "sin": f32(1, T1, 8)}, "cos, but for its last"),
    ("precast.gated_activation", {"x": f32(1, "T", 7), "kind": "silu"}, "halved twice"),
    ("precast.gated_activation", {"x": f32("T", "H"), "kind": "silu"}, "halved twice"),
    ("precast.gated_activation", {"x": f32(1, "T", 8), "kind": "swish"}, "kind: expected one of silu"),
    ("precast.gated_activation", {"x": f32(), "kind": "silu"}, "at least one dimension"),
    ("precast.gated_linear", {**GATED, "weight": f32(7, 8), "bias": None}, "weight's first dimension, halved twice"),
    ("precast.gated_linear", {**GATED, "weight": f32(6, 9)}, "input's last dimension.*9.*8"),
    ("precast.gated_linear", {**GATED, "bias": f32(3)}, "bias: expected shape"),
    ("precast.gated_linear", {**GATED, "kind": "relu"}, "kind: expected one of silu"),
    ("precast.rounded_linear", {**ROUNDED, "input": t("bfloat16", 1, "T", 45)}, "input: expected dtype float8_e4m3fn"),
    ("precast.rounded_linear", {**ROUNDED, "activation": "int8_token"}, "input: expected dtype int8"),
    ("precast.rounded_linear", {**ROUNDED, "input_scales": f32(1, "T", 45)}, "input_scales: expected shape"),
    ("precast.rounded_linear", {**ROUNDED, "format": "awq"}, "format: expected one of fp8, int8"),
    ("precast.rounded_linear", {**ROUNDED, "bias": f32(27)}, "bias: expected dtype bfloat16"),
    ("precast.rounded_rms_norm", {**NORM, "activation": "none"}, "activation: expected one of fp8_token, "),
    ("precast.rounded_rms_norm", {**NORM, "activation": "fp8_tensor"}, "input_scale: missing"),
    (
        "precast.rounded_residual_rms_norm",
        {**STREAM, "activation": "fp8_token", "input_scale": f32(1)},
        "input_scale: not taken by fp8_token",
    ),
    (
        "precast.rounded_gated_activation",
        {"x": f32(1, "T", 7), "kind": "silu", "activation": "fp8_token"},
        "x's last dimension, halved twice",
    ),
    ("precast.quantised_linear", {**GPTQ, "format": "int3"}, "format: expected one of fp8, .* found 'int3'"),
    ("precast.quantised_linear", {**GPTQ, "format": "awq"}, "format: expected one of fp8, .* found 'awq'"),
    ("precast.quantised_linear", {**GPTQ, "input": f32(1, "T", 24)}, "input's last dimension"),
    ("precast.quantised_linear", {**GPTQ, "zeros": t("int8", 3, 3)}, "zeros: expected dtype int32"),
    ("precast.quantised_linear", {**GPTQ, "zeros": None}, "gptq: zeros is missing"),
    ("precast.quantised_linear", {**GPTQ, "block": (1, 8)}, "gptq: block is not part of the format"),
    ("precast.quantised_linear", {**GPTQ, "weight": t("int32", 5, 24)}, "gptq: .* don't fit"),
    ("precast.quantised_linear", {**GPTQ, "groups": None, "weight": t("int32", 5, 24)}, "gptq: .* don't fit"),
    ("precast.quantised_linear", {**GPTQ, "bias": f32(48)}, "bias: expected shape"),
    ("precast.quantised_linear", {**FP8, "weight": t("int8", 27, 45)}, "weight: expected dtype float8_e4m3fn"),
    ("precast.quantised_linear", {**FP8, "scales": t("uint8", 7, 6)}, "scales: expected dtype float32"),
    ("precast.quantised_linear", {**FP8, "scales": f32(6, 7)}, r"expected scales of \[7, 6\], found \[6, 7\]"),
    ("precast.quantised_linear", {**FP8, "block": (4,)}, "a block of"),
    ("precast.quantised_linear", {**FP8, "block": (4, 0)}, "a block of"),
    ("precast.quantised_linear", {**FP8, "zero_offset": 1}, "a zero_offset without zeros"),
    ("precast.quantised_linear", {**FP8, "input_scale": None}, "input_scale: missing"),
    ("precast.quantised_linear", {**FP8, "activation": "fp8_token"}, "input_scale: not taken by fp8_token"),
    ("precast.quantised_linear", {**FP8, "activation": "fp4"}, "activation: expected one of none, fp8_token"),
    ("precast.quantised_linear", {**FP8_OF_A_RANK, "block": (512, 1000)}, "expected scales of"),
    ("precast.quantised_linear", {**FP8_OF_ROWS, "scales": f32(8, 2)}, "expected scales of"),
    ("precast.quantised_linear", {**PACKED4, "scales": t("bfloat16", 512, 3)}, "packed4: .* don't fit"),
    (
        "precast.quantised_linear",
        {**MXFP4, "weight": t("uint8", 3, 9000, 2, 16), "scales": t("uint8", 3, 9000, 2)},
        "weight, dequantised: expected 2 dimensions",
    ),
    ("precast.quantised_linear", {**NVFP4, "global_scale": f32(1)}, "nvfp4: .* don't fit"),
    ("precast.attention", {**PACKED, "k": t("bfloat16", 1, "T", 3, 16), "v": t("bfloat16", 1, "T", 3, 16)}, "multiple"),
    ("precast.attention", {**PACKED, "k": t("bfloat16", 1, "T", 2, 8)}, "key's head size"),
    ("precast.attention", {**PACKED, "v": t("bfloat16", 1, "T", 4, 16)}, "v's tokens and heads"),
    ("precast.attention", {**PACKED, "q": t("bfloat16", 2, "T", 8, 16)}, "k's tokens"),
    (
        "precast.attention",
        {**PACKED, **dict.fromkeys(("q", "k", "v"), t("bfloat16", 2, "T", 2, 16))},
        "first dimension",
    ),
    ("precast.attention", {**PACKED, "k": t("float16", 1, "T", 2, 16)}, "k: expected dtype"),
    ("precast.attention", {**PACKED, "sinks": f32(2)}, "sinks: expected shape"),
    ("precast.attention", {**PACKED, **both("k", "v", t("bfloat16", 1, "T", 2, 2, 16))}, "k: expected 4"),
    ("precast.attention", {**PACKED, "window": 0}, "window: expected None or at least 1"),
    ("precast.attention", {**PACKED, "chunk": 0}, "chunk: expected None or at least 1"),
    (
        "precast.attention",
        {**PACKED, "window": 3, "chunk": 3},
        "window, chunk: expected one of them at most, found both",
    ),
    ("precast.attention", {**PACKED, "slopes": f32(2)}, "slopes: expected shape"),
    ("precast.attention", {**PACKED, "slopes": t("bfloat16", 8)}, "slopes: expected dtype float32"),
    ("precast.attention", {**PACKED, "bias": f32(1, "T", 2, 5)}, "bias's tokens and heads: expected shape"),
    ("precast.attention", {**PACKED, "bias": f32(1, "T", 8)}, "bias: expected 4"),
    ("precast.attention", {**PACKED, "bias": f32(1, "T", 8, 0)}, "bias: expected a size of at least 1"),
    ("precast.attention", {**PACKED, "bias": f32(1, "T", 8, "T")}, "bias's size: expected"),
    ("precast.attention", {**PACKED, "bias": t("int64", 1, "T", 8, 5)}, "bias: expected dtype"),
    ("precast.attention", {**PACKED, "cu_seqlens": t("int64", B1)}, "cu_seqlens: expected dtype int32"),
    ("precast.rotary_write_kv", {**TURNED, "q": t("bfloat16", 1, "T", 8, 12)}, "q's tokens and head size"),
    ("precast.rotary_write_kv", {**TURNED, "q": f32(1, "T", 8, 16)}, "q: expected dtype bfloat16, found float32"),
    ("precast.rotary_write_kv", {**TURNED, "slot_mapping": t("int64", "B")}, "slot_mapping: expected shape"),
    ("precast.rotary_write_kv", {**TURNED, "v_cache": PAGES8}, "v_cache: expected dtype"),
    ("precast.rotary_write_kv", {**TURNED, "cos": f32(1, "T", 9), "sin": f32(1, "T", 9)}, "9 pairs don't fit"),
    ("precast.rotary_write_kv", {**TURNED, "k_weight": f32(8)}, "k_weight: expected shape"),
    ("precast.rotary_write_kv", {**TURNED, "eps": None}, "q_weight: expected none without eps"),
    ("precast.rotary_write_kv", {**TURNED, "q_weight": None, "eps": None}, "k_weight: expected none without eps"),
    ("precast.write_kv", {**WRITE, "slot_mapping": t("int64", "B")}, "slot_mapping: expected shape"),
    ("precast.write_kv", {**WRITE, "slot_mapping": t("int32", "T")}, "slot_mapping: expected dtype"),
    ("precast.write_kv", {**WRITE, "k": t("bfloat16", 1, "T", 4, 16)}, "k_cache's heads"),
    ("precast.write_kv", {**WRITE, "k": t("bfloat16", 2, "T", 2, 16)}, "k's first dimension"),
    ("precast.write_kv", {**WRITE, "v_cache": t("bfloat16", "P", 8, 2, 16)}, "v_cache's pages"),
    ("precast.write_kv", {**WRITE, **both("k", "k_cache", t("bfloat16", 1, "T", 2, 16, 1))}, "k: expected 4"),
    ("precast.write_kv", {**WRITE, "v_cache": t("float16", "P", 4, 2, 16)}, "v_cache: expected dtype"),
    ("precast.write_kv", {**WRITE, "v_cache": PAGES8}, "v_cache: expected dtype bfloat16, found float8_e4m3fn"),
    ("precast.write_kv", {**WRITE, **both("k", "v", t("float8_e4m3fn", 1, "T", 2, 16))}, "k: expected dtype"),
    ("precast.write_kv", {**WRITE, **both("k_cache", "v_cache", t("int8", "P", 4, 2, 16))}, "k_cache: expected dtype"),
    ("precast.write_kv", {**SCALED, "v_scale": None}, "k_scale, v_scale: expected both or neither, found k_scale"),
    ("precast.write_kv", {**SCALED, "k_scale": f32(2)}, "k_scale: expected shape"),
    ("precast.write_kv", {**SCALED, "v_scale": t("bfloat16", 1)}, "v_scale: expected dtype float32"),
    ("precast.write_kv", {**WRITE, **SCALES}, "k_scale: expected none for a cache of bfloat16"),
    ("precast.paged_attention", {**PAGED, **SCALES}, "k_scale: expected none for a cache of bfloat16"),
    ("precast.write_latent", {**WRITE_LATENT, "latent": t("float8_e4m3fn", 1, "T", 16)}, "latent: expected dtype"),
    ("precast.write_latent", {**WRITE_LATENT, "cache": t("uint8", "P", 4, 19)}, "cache: expected dtype"),
    *(
        (f"precast.{name}", {**args, "cu_seqlens": t("int64", B1)}, "cu_seqlens: expected dtype int32")
        for name, args, _, _ in STATES
    ),
    *((f"precast.stateful_{name}", {**args, **SLOTS, "state": f32("P", 7, 7)}, "state") for name, args, _, _ in STATES),
    ("precast.route", {**ROUTE, "top_k": 13}, "top_k: expected 1 to 12"),
    ("precast.grouped_linear", {**GROUPED, "expert_ids": t("int64", "B")}, "expert_ids: expected shape"),
    ("precast.experts", {**EXPERTS, "gated": False}, "down: expected shape"),
    ("precast.quantised_experts", {**BLOCK_EXPERTS, "gated": False}, "down, dequantised: expected shape"),
    ("precast.quantised_experts", {**BLOCK_EXPERTS, "rounding": "fp8_tensor"}, "rounding: expected"),
    ("precast.latent_attention", {**LATENT, **LATENT_HEADS, "value_size": 7}, "weight: expected shape"),
    ("precast.write_latent", {**WRITE_LATENT, "cache": f32("P", 4, 18)}, "cache's last dimension"),
    ("precast.paged_latent_attention", {**LATENT_PAGES, "cache": f32("P", 4, 20)}, "weight: expected shape"),
    ("precast.paged_attention", {**PAGED, "page_start": t("int32", B1)}, "page_start: expected shape"),
    ("precast.paged_attention", {**PAGED, "page_indptr": t("int32", "B")}, "page_indptr: expected shape"),
    ("precast.paged_attention", {**PAGED, "cu_seqlens": t("int32", "B")}, "cu_seqlens: expected shape"),
    ("precast.paged_attention", {**PAGED, "page_indices": t("int64", "N")}, "page_indices: expected dtype"),
    ("precast.paged_attention", {**PAGED, "v_cache": t("bfloat16", "P", 4, 4, 16)}, "v_cache's pages and heads"),
    ("precast.paged_attention", {**PAGED, "q": t("bfloat16", "T", 8, 16)}, "q: expected 4"),
    (
        "precast.paged_attention",
        {**PAGED, **both("k_cache", "v_cache", t("bfloat16", "P", 4, 2, 2, 16))},
        "k_cache: expected 4",
    ),
    ("precast.paged_attention", {**PAGED, **both("k_cache", "v_cache", t("int8", "P", 4, 2, 16))}, "k_cache: expected"),
    ("precast.paged_attention", {**PAGED, "k_cache": PAGES8}, "v_cache: expected dtype float8_e4m3fn, found bfloat16"),
    ("precast.paged_attention", {**PAGED, "q": t("float8_e4m3fn", 1, "T", 8, 16)}, "q: expected dtype"),
    ("precast.paged_latent_attention", {**LATENT_PAGES, "cache": t("int32", "P", 4, 19)}, "cache: expected dtype"),
    ("precast.write_index_keys", {**WRITE_INDEX, "cache": f32("P", 4, 7)}, "cache's last dimension: expected shape"),
    ("precast.write_index_keys", {**WRITE_INDEX, "slot_mapping": t("int64", "B")}, "slot_mapping: expected shape"),
    ("precast.write_entries", {**WRITE_ENTRIES, "cache": f32("P", 2, 7)}, "cache's last dimension: expected shape"),
    ("precast.write_entries", {**WRITE_ENTRIES, "rate": 0}, "rate: expected at least 1, found 0"),
    ("precast.entry_attention", {**ENTRIES, "entries": f32(1, "T", 7)}, r"entries' size: expected shape \[6\]"),
    ("precast.entry_attention", {**ENTRIES, "entries": f32(1, "B", 6)}, "entries' tokens: expected shape"),
    ("precast.entry_attention", {**ENTRIES, "window": 3}, "window: expected none with a rate of 4"),
    (
        "precast.entry_attention",
        {**ENTRIES, **NAMED_ENTRIES, "rate": 1, "window": 3},
        "window, selected: expected one of them at most",
    ),
    ("precast.paged_entry_attention", {**ENTRY_PAGES, "page_start": t("int32", B1)}, "page_start: expected shape"),
    ("precast.paged_entry_attention", {**ENTRY_PAGES, "cache": f32("P", 2, 7)}, "entries' size: expected shape"),
    ("precast.select_entries", {**ENTRIES, **ENTRY_CHOICE, "count": 0}, "count: expected at least 1, found 0"),
    ("precast.select_entries", {**ENTRIES, **ENTRY_CHOICE, "weights": f32(1, "T", 2)}, "weights: expected shape"),
    ("precast.paged_select_entries", {**ENTRY_PAGES, **ENTRY_CHOICE, "rate": "T"}, "rate: expected at least 1"),
    ("precast.select_keys", {**SELECT, "k": f32(1, "T", 7)}, r"key's size: expected shape \[6\], found \[7\]"),
    ("precast.select_keys", {**SELECT, "k": t("float16", 1, "T", 6)}, "k: expected dtype float32"),
    ("precast.select_keys", {**SELECT, "weights": f32(1, "T", 2)}, "weights: expected shape"),
    ("precast.select_keys", {**SELECT, "weights": t("bfloat16", 1, "T", 3)}, "weights: expected dtype float32"),
    ("precast.select_keys", {**SELECT, "count": 0}, "count: expected at least 1, found 0"),
    ("precast.select_keys", {**SELECT, "count": "T"}, "count: expected at least 1, found T"),
    ("precast.paged_select_keys", {**SELECT_PAGES, "cache": f32("P", 4, 1, 6)}, "cache: expected 3 dimensions"),
    ("precast.paged_select_keys", {**SELECT_PAGES, "cache": t("int8", "P", 4, 6)}, "cache: expected dtype"),
    ("precast.paged_select_keys", {**SELECT_PAGES, "page_start": t("int32", B1)}, "page_start: expected shape"),
    (
        "precast.sparse_latent_attention",
        {**LATENT, **LATENT_HEADS, **SELECTED, "selected": t("int32", 1, "B", 5)},
        "selected's tokens: expected shape",
    ),
    (
        "precast.paged_sparse_latent_attention",
        {**LATENT_PAGES, **SELECTED, "selected": t("int64", 1, "T", 5)},
        "selected: expected dtype int32",
    ),
    ("precast.paged_sparse_latent_attention", {**LATENT_PAGES, **SELECTED, "sinks": f32(5)}, "sinks: expected shape"),
    ("precast.select_blocks", {**SELECT_BLOCKS, "k": f32(1, "T", 7)}, r"key's size: expected shape \[6\], found \[7\]"),
    ("precast.select_blocks", {**SELECT_BLOCKS, "k": t("float16", 1, "T", 6)}, "k: expected dtype float32"),
    ("precast.select_blocks", {**SELECT_BLOCKS, "count": "T"}, "count: expected at least 1, found T"),
    ("precast.select_blocks", {**SELECT_BLOCKS, "block_size": 0}, "block_size: expected at least 1, found 0"),
    ("precast.select_blocks", {**SELECT_BLOCKS, "local": -1}, "local: expected at least 0, found -1"),
    ("precast.paged_select_blocks", {**SELECT_BLOCKS_PAGES, "cache": f32("P", 4, 1, 6)}, "cache: expected 3 dim"),
    ("precast.paged_select_blocks", {**SELECT_BLOCKS_PAGES, "cache": t("int8", "P", 4, 6)}, "cache: expected dtype"),
    ("precast.paged_select_blocks", {**SELECT_BLOCKS_PAGES, "kv_lens": t("int32", B1)}, "expected shape"),
    (
        "precast.block_sparse_attention",
        {**BLOCKS_PACKED, "selected": t("int32", 1, "B", 2, 5)},
        "selected's tokens: expected shape",
    ),
    (
        "precast.block_sparse_attention",
        {**BLOCKS_PACKED, "selected": t("int32", 1, "T", 3, 5)},
        "q: 8 heads are no multiple of 3 of selected",
    ),
    ("precast.block_sparse_attention", {**BLOCKS_PACKED, "block_size": 0}, "block_size: expected at least 1, found 0"),
    (
        "precast.paged_block_sparse_attention",
        {**BLOCKS_PAGES, "selected": t("int64", 1, "T", 2, 5)},
        "selected: expected dtype int32",
    ),
    ("precast.paged_block_sparse_attention", {**BLOCKS_PAGES, "k_cache": PAGES8}, "v_cache: expected dtype float8"),
    ("precast.paged_attention", {**PAGED, "window": -1}, "window"),
    ("precast.paged_attention", {**PAGED, "chunk": -1}, "chunk: expected None or at least 1"),
    ("precast.paged_attention", {**PAGED, "slopes": f32(8, 1)}, "slopes: expected shape"),
    ("precast.paged_attention", {**PAGED, "bias": f32(1, "B", 8, 5)}, "bias's tokens and heads: expected shape"),
    ("precast.gather_rows", {"x": f32("T", 8), "rows": t("int64", "R")}, "x: expected 3"),
    ("precast.gather_rows", {"x": f32(1, "T", 8), "rows": t("int32", "R")}, "rows: expected dtype"),
    ("precast.sample", {**SAMPLE, "logits": f32(1, "B", 99)}, "logits: expected 2"),
    ("precast.sample", {**SAMPLE, "top_k": t("int64", "B")}, "top_k: expected dtype int32"),
    ("precast.sample", {**SAMPLE, "top_p": f32()}, "top_p: expected shape"),
    ("precast.all_reduce", {"x": f32(1, "T", 8), "group": "dp"}, "group: expected one of tp, found 'dp'"),
    ("precast.all_reduce", {"x": t("int64", 1, "T", 8), "group": "tp"}, "x: expected dtype"),
    ("precast.all_reduce_residual_rms_norm", {**STREAM, "group": "dp"}, "group: expected one of tp, found 'dp'"),
    ("precast.all_reduce_residual_rms_norm", {**STREAM, "group": "tp", "residual": f32(1, "T", 1)}, "residual: expec"),
    ("precast.all_gather", {"x": f32(1, 8), **ALONG, "dim": 2}, "dim: 2 is outside of 2 dimensions"),
    ("precast.all_gather", {"x": f32(1, 8), **ALONG, "size": 0}, "size: expected at least 1, found 0"),
    ("precast.all_gather", {"x": f32(1, 8), **ALONG, "size": "T"}, "size: expected a size that is the same in every"),
    ("precast.all_gather", {"x": f32(1, 8), **ALONG, "group": ""}, "group: expected one of tp"),
    ("precast.reduce_scatter", {"x": f32(1, 8), **ALONG, "size": 3}, r"x's dimension 1, 3 parts of it: expected"),
    ("precast.reduce_scatter", {"x": f32(1, 8), **ALONG, "dim": -3}, "dim: -3 is outside of 2 dimensions"),
    ("precast.send", {"x": f32(1, 8), "group": "tp", "target": 1}, "group: expected one of pp"),
    ("precast.send", {"x": f32(1, 8), "group": "pp", "target": -1}, "target: expected a stage from 0 on, found -1"),
    ("precast.receive", {"shape": (2,), "dtype": "float32", "group": "", "source": 0}, "group: expected one of pp"),
    ("precast.receive", {"shape": (2,), "dtype": "float32", "group": "pp", "source": -1}, "source: expected a stage"),
    ("precast.fused", {**FUSED, "x1": f32(7)}, r"step s2, aten.mul.Tensor: shapes \[1, T, 8\], \[7\] don't broadcast"),
]


@pytest.mark.parametrize(("op", "args", "message"), REJECTED)
def test_a_rule_says_what_it_expected(op: str, args: Args, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        infer(op, args)


PRODUCTS = [
    case for case in ACCEPTED if case[0] in ("aten.linear.default", "aten.addmm.default", "aten.matmul.default")
]
STRICT = [*((f"precast.{op}", args) for op, args, _ in OURS), *PRODUCTS]
# (op, argument): where an op takes an argument of any dtype or rank, or a cache in float8, on purpose.
ANY_DTYPE = {("precast.gather_rows", "x"), ("precast.all_gather", "x"), ("precast.send", "x")}
_OVER_KEYS_AND_VALUES = ("write_kv", "rotary_write_kv", "paged_attention", "paged_block_sparse_attention")
MAY_BE_FLOAT8 = {
    *(("precast.quantised_linear", name) for name in ("weight", "scales")),  # in some formats
    *(("precast.rounded_linear", name) for name in ("input", "weight")),
    ("precast.quantised_embedding", "weight"),
    ("precast.quantised_sharded_embedding", "weight"),
    *((f"precast.{op}", f"{name}_cache") for op in _OVER_KEYS_AND_VALUES for name in "kv"),
    *(
        (f"precast.{op}", "cache")
        for op in (
            "write_latent",
            "paged_latent_attention",
            "write_index_keys",
            "paged_select_keys",
            "paged_select_blocks",
            "paged_sparse_latent_attention",
            "write_entries",
            "paged_entry_attention",
            "paged_select_entries",
        )
    ),
    *(("precast.quantised_experts", f"{name}{part}") for name in ("up", "down") for part in ("", "_scales")),
}
ANY_RANK = {
    ("precast.all_reduce", "x"),
    ("precast.all_gather", "x"),
    ("precast.reduce_scatter", "x"),
    ("precast.send", "x"),
    ("precast.embedding", "ids"),
    ("precast.sharded_embedding", "ids"),
    ("precast.quantised_embedding", "ids"),
    ("precast.quantised_sharded_embedding", "ids"),
    ("precast.rms_norm", "x"),
    ("precast.sinkhorn", "x"),
    ("precast.layer_norm", "x"),
    ("precast.gated_activation", "x"),
    ("precast.gated_linear", "input"),
    ("precast.quantised_linear", "input"),
    ("precast.rounded_rms_norm", "x"),
    ("precast.rounded_gated_activation", "x"),
    ("precast.fused", "x0"),
    ("precast.fused", "x1"),
    ("aten.linear.default", "input"),
    ("aten.addmm.default", "self"),
    ("aten.matmul.default", "self"),
    ("aten.matmul.default", "other"),
}


def _refusal(op: str, args: Args) -> str:
    """What the shape rule refuses the arguments with; empty if it takes them."""
    try:
        infer(op, args)
    except ShapeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("op", "args"), STRICT)
@pytest.mark.parametrize("dtype", ["bool", "float8_e4m3fn"])
def test_every_tensor_has_a_dtype_that_is_checked(op: str, args: Args, dtype: Dtype) -> None:
    for name, value in args.items():
        is_stored = dtype == "float8_e4m3fn" and (op, name) in MAY_BE_FLOAT8
        if isinstance(value, TensorType) and (op, name) not in ANY_DTYPE and not is_stored:
            message = f"the shape rule of {op} takes {name} in {dtype}: check it with `expect_dtype`, or, if meant, "
            message += f"add ({op!r}, {name!r}) to ANY_DTYPE, or to MAY_BE_FLOAT8 for what is stored in it"
            assert "expected dtype" in _refusal(op, {**args, name: TensorType(dtype, value.shape)}), message


@pytest.mark.parametrize(("op", "args"), STRICT)
def test_every_tensor_has_a_rank_that_is_checked(op: str, args: Args) -> None:
    for name, value in args.items():
        if isinstance(value, TensorType) and (op, name) not in ANY_RANK:
            for shape in ((1, *value.shape), value.shape[1:]):
                message = f"the shape rule of {op} takes {name} {list(shape)}: check it with `expect_rank`, or, if "
                message += f"meant, add ({op!r}, {name!r}) to ANY_RANK"
                assert _refusal(op, {**args, name: TensorType(value.dtype, shape)}), message


@pytest.mark.parametrize(("op", "args"), PRODUCTS)
def test_products_are_of_floats_only(op: str, args: Args) -> None:
    with pytest.raises(ShapeError, match="expected dtype"):
        infer(op, {name: TensorType("int64", value.shape) for name, value in args.items()})


def test_every_op_is_accepted_once_and_rejected_once() -> None:
    """But for those that routers are written in: `test_rules_experts.py` has theirs."""
    table = {name for name, _ in ops.names()} - ROUTER_OPS
    always_fits = {"aten.to.dtype"}
    accepted = {op for op, _ in ACCEPTED} | {f"precast.{op}" for op, _, _ in OURS}
    rejected = {op for op, _, _ in REJECTED}
    assert accepted == table, "give OURS (for aten ops ACCEPTED) a call of each op"
    assert rejected == table - always_fits, "give REJECTED a call of each op that its shape rule refuses"


def test_argument_names_are_torch_s() -> None:
    for name, version in ops.names():
        if name.startswith("aten."):
            operator, overload = name.removeprefix("aten.").split(".")
            schema = getattr(getattr(torch.ops.aten, operator), overload)._schema
            definition = ops.lookup(name, version)
            assert definition is not None
            assert {arg.name for arg in definition.args} <= {arg.name for arg in schema.arguments}, name
            assert len(schema.returns) == definition.num_outputs
