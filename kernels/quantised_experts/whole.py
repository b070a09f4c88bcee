"""The launches of experts whose weights are dequantised in each step, those that have tokens, and then multiplied as
any others. No torch and no triton here.

For formats that hold a matrix with its inputs as rows: no kernel multiplies by these as they lie.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from precast.ir.graph.schema import Expr, Ref, TensorType
from precast.ir.graph.symbols import add, ceildiv
from precast.ir.memory.liveness import Operand
from precast.ir.ops.rows_experts import TRANSPOSED
from precast.kernels.experts import launches as experts
from precast.kernels.experts.launches import Sizes, has_pdl
from precast.kernels.quantised_experts.rounding import rounding_of
from precast.kernels.quantised_experts.sizes import sizes_of
from precast.kernels.records import Launch, Launches, Pointer, Stride
from precast.kernels.use import Use

_KERNEL = "precast.kernels.quantised_experts.triton_whole:dequantise_kernel"
_BLOCK = 64
"""Outputs, and inputs, of a program that dequantises."""
_MOST_BYTES = 4 << 30
"""What all matrices of a layer may take as whole numbers: a step has room for them, whether it needs them or not."""


def is_taken(use: Use) -> bool:
    """Whether the format is one of these, of sizes that are known at load, rows stay as they are, and there is room for
    whole numbers."""
    if use.constant("format") not in TRANSPOSED or rounding_of(use) != "none":
        return False
    sizes = _numbers(use)
    parts = [name for name in use.operands if name.startswith(("up", "down"))]
    is_whole = all(use.operands[name].is_contiguous for name in parts)
    return is_whole and sizes is not None and _bytes(use, sizes) <= _MOST_BYTES


def grouped(tokens: int | None) -> Launches:
    """In steps of up to `tokens`: the order of pairs, the matrices of experts that have some, and what is launched over
    those."""
    return lambda use: _grouped(use, tokens)


def grouped_workspace(tokens: int | None) -> Callable[[Use], Expr]:
    """All matrices, and what experts take besides."""
    return lambda use: add(_bytes(use, _known(use)), experts.grouped_workspace(tokens)(_plain(use)))


def _grouped(use: Use, tokens: int | None) -> tuple[Launch, ...]:
    sizes, plain = _known(use), _plain(use)
    launched = [_over_made(use, launch) for launch in experts.grouped(tokens)(plain)]
    places = experts.places_of(sizes.pairs, sizes.num_experts, is_counted=experts.are_many(tokens))
    starts = places.starts._replace(offset=add(places.starts.offset, _bytes(use, sizes)))
    products = len(launched) - 3
    return (*launched[:products], *(_made(use, name, starts) for name in ("up", "down")), *launched[products:])


def _made(use: Use, name: str, starts: Pointer) -> Launch:
    """The launch that dequantises a weight."""
    rows, columns = _shape(use, name)
    sizes, groups = _known(use), use.number(f"{name}_scales", 1)
    assert groups is not None, "sizes of weights are known at load"
    return Launch(
        _KERNEL,
        (ceildiv(rows, _BLOCK), ceildiv(columns, _BLOCK), sizes.num_experts),
        (_at(use, name), Pointer(name), Pointer(f"{name}_scales"), Pointer(f"{name}_zeros"), starts),
        {
            "SIZE_N": rows, "SIZE_K": columns, "GROUP_K": columns // groups,
            "IS_AWQ": use.constant("format") == "awq", "ZERO_OFFSET": int(use.constant("zero_offset") or 0),
            "BLOCK_N": _BLOCK, "BLOCK_K": _BLOCK, "PDL": has_pdl(use),
        },
        pdl=has_pdl(use),
    )  # fmt: skip


def _over_made(use: Use, launch: Launch) -> Launch:
    """The launch of experts, over the matrices that were made, and what they keep after those."""
    start = _bytes(use, _known(use))

    def moved(arg: Pointer | Stride | Expr | float | None) -> Pointer | Stride | Expr | float | None:
        if isinstance(arg, Pointer) and arg.tensor in ("up", "down"):
            return _at(use, arg.tensor)
        if isinstance(arg, Pointer) and arg.tensor == "workspace":
            return arg._replace(offset=add(arg.offset, start))
        if isinstance(arg, Stride) and arg.tensor in ("up", "down"):
            rows, columns = _shape(use, arg.tensor)
            return (rows * columns, columns, 1)[arg.axis]
        return arg

    return launch._replace(args=tuple(map(moved, launch.args)))


def _plain(use: Use) -> Use:
    """The use as one of `precast.experts`, over whole matrices."""
    sizes, dtype = _known(use), use.operands["x"].type.dtype
    kept = ("x", "expert_ids", "expert_weights", "up_bias", "down_bias")
    operands = {name: use.operands[name] for name in kept if use.has(name)}
    for name in ("up", "down"):
        operands[name] = Operand(TensorType(dtype, (sizes.num_experts, *_shape(use, name))), True, False)
    constants = {name: use.node.args[name] for name in ("activation", "gated", "alpha", "limit", "offset")
                 if name in use.node.args}  # fmt: skip
    node = msgspec.structs.replace(
        use.node, op="precast.experts", args={name: Ref(name) for name in operands} | constants
    )
    return Use(node, operands, use.target)


def _shape(use: Use, name: str) -> tuple[int, int]:
    """Outputs and inputs of a weight."""
    sizes = _known(use)
    opened = 2 * sizes.inner if use.constant("gated") else sizes.inner
    return (opened, sizes.width) if name == "up" else (sizes.width, sizes.inner)


def _at(use: Use, name: str) -> Pointer:
    """Where a weight's matrices lie in the workspace: the first one's at its begin."""
    sizes, dtype = _known(use), use.operands["x"].type.dtype
    rows, columns = _shape(use, "up")
    num_bytes = experts.aligned(use.width("x") * sizes.num_experts * rows * columns)
    return Pointer("workspace", dtype, 0 if name == "up" else num_bytes)


def _bytes(use: Use, sizes: Sizes) -> int:
    """Of all matrices."""
    up, down = ((2 if use.constant("gated") else 1) * sizes.inner * sizes.width, sizes.width * sizes.inner)
    found = [experts.aligned(use.width("x") * sizes.num_experts * each) for each in (up, down)]
    assert all(isinstance(each, int) for each in found)
    return sum(each for each in found if isinstance(each, int))


def _numbers(use: Use) -> Sizes | None:
    """The sizes; None if one that kernels are compiled for isn't known at load."""
    opened, width = use.number("up_scales", 2), use.number("x", 1)
    num_experts, top_k = use.number("up", 0), use.number("expert_ids", 1)
    if opened is None or width is None or num_experts is None or top_k is None:
        return None
    inner = opened // 2 if use.constant("gated") else opened
    return Sizes(num_experts, top_k, width, inner, sizes_of(use).pairs, use.shape("x")[0])


def _known(use: Use) -> Sizes:
    sizes = _numbers(use)
    assert sizes is not None, "the record's condition"
    return sizes
