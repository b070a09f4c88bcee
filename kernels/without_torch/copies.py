"""Elements brought from where they lie to where they are wanted: one launch for each tensor that is copied."""

from __future__ import annotations

from collections.abc import Sequence

from precast.ir.graph.schema import Expr, Items
from precast.ir.graph.symbols import add, ceildiv, mul, numel
from precast.ir.weights.tensorfile import element_bytes
from precast.kernels.fused.launches import tile
from precast.kernels.records import Launch, Pointer, Stride
from precast.kernels.use import Use

MAX_AXES = 3
"""Axes before the last whose size isn't 1, for which the kernel has strides."""


def joined(use: Use) -> tuple[Launch, ...]:
    """`cat`: each tensor goes to its part of the result."""
    result, dim = use.result, use.constant("dim") or 0
    assert isinstance(dim, int)
    axis, steps = dim % len(result.shape), _row_major(result.shape)
    begin: Expr = 0
    found = []
    for name in _listed(use):
        at = mul(element_bytes(result.dtype), begin, steps[axis])
        found.append(_copy(use, name, Pointer("out.0", offset=at), steps))
        begin = add(begin, use.shape(name)[axis])
    return tuple(found)


def dense(use: Use) -> tuple[Launch, ...]:
    """The elements of `self` in row-major order without gaps."""
    return (_copy(use, "self", Pointer("out.0"), _row_major(use.shape("self"))),)


def has_few_axes(use: Use) -> bool:
    """Whether the kernel has as many axes as all tensors."""
    return all(sum(size != 1 for size in each.type.shape[:-1]) <= MAX_AXES for each in use.operands.values())


def _listed(use: Use) -> list[str]:
    items = use.node.args["tensors"]
    assert isinstance(items, Items)
    return [f"tensors.{i}" for i in range(len(items.items))]


def _copy(use: Use, name: str, into: Pointer, steps: Sequence[Expr]) -> Launch:
    """`steps`: elements from one index to the next in the result, by the axes of the tensor."""
    shape, has_pdl = use.shape(name), use.target.capability >= (9, 0)
    axes = [axis for axis, size in enumerate(shape[:-1]) if size != 1]
    missing, last = MAX_AXES - len(axes), len(shape) - 1
    num_columns = shape[-1] if shape else 1
    columns, rows = tile(num_columns, whole=False)
    num_rows = numel(shape[axis] for axis in axes)
    given = [Stride(name, axis) for axis in (*axes, *([last] if shape else []))]
    taken = [steps[axis] for axis in (*axes, *([last] if shape else []))]
    places = MAX_AXES + 1 - missing
    return Launch(
        "precast.kernels.without_torch.triton:copy_kernel",
        (ceildiv(num_rows, rows), ceildiv(num_columns, columns)),
        (
            Pointer(name), into, num_rows, num_columns, *[1] * missing, *(shape[axis] for axis in axes),
            *[0] * missing, *given, *[0] * (places - len(given)),
            *[0] * missing, *taken, *[0] * (places - len(taken)),
        ),
        constants={"ROWS": rows, "COLUMNS": columns, "PDL": has_pdl},
        num_warps=max(1, min(16, rows * columns // 256)),
        pdl=has_pdl,
    )  # fmt: skip


def _row_major(shape: Sequence[Expr]) -> list[Expr]:
    return [numel(shape[axis + 1 :]) for axis in range(len(shape))]
