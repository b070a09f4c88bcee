"""all_reduce@1: y = sum over ranks of x_rank; all_gather@1: y = x_0, x_1, ... one after another along `dim`;
reduce_scatter@1: y_rank = the rank's part, along `dim`, of the sum over ranks of x_rank.

The argument `group` is what connects the ranks. Its name alone, as in a trace, stands for a group of one rank.
"""

from __future__ import annotations

import math

import torch

from precast.kernels.collectives.group import Alone, Group
from precast.kernels.dtypes import BY_NAME, FLOAT
from precast.kernels.spec import PRODUCT, OpSpec


def all_reduce(x: torch.Tensor, *, group: Group | str) -> torch.Tensor:
    """The sum of `x` over the ranks; contiguous, new memory."""
    return all_reduce_into(x, group=group)


def all_reduce_into(x: torch.Tensor, *, group: Group | str, out: torch.Tensor | None = None) -> torch.Tensor:
    """As `all_reduce`, into `out`."""
    out = x.new_empty(x.shape) if out is None else out
    _connected(group).all_reduce(out, x)
    return out


def all_gather(x: torch.Tensor, *, dim: int, group: Group | str, size: int) -> torch.Tensor:
    """The `x` of all `size` ranks, one after another along `dim`; contiguous, new memory."""
    return all_gather_into(x, dim=dim, group=group, size=size)


def all_gather_into(
    x: torch.Tensor, *, dim: int, group: Group | str, size: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    """As `all_gather`, into `out`."""
    dim, connected = dim % x.dim(), _connected(group, size)
    if out is None:
        out = x.new_empty(*x.shape[:dim], size * x.shape[dim], *x.shape[dim + 1 :])
    if math.prod(x.shape[:dim]) == 1:  # what the ranks give lies one after another
        connected.all_gather(out.view(size, *x.shape), x)
    else:
        parts = x.new_empty(size, *x.shape)
        connected.all_gather(parts, x)
        out.unflatten(dim, (size, x.shape[dim])).copy_(parts.movedim(0, dim))
    return out


def reduce_scatter(x: torch.Tensor, *, dim: int, group: Group | str, size: int) -> torch.Tensor:
    """This rank's part, one of `size` along `dim`, of the sum of `x` over the ranks; contiguous, new memory."""
    return reduce_scatter_into(x, dim=dim, group=group, size=size)


def reduce_scatter_into(
    x: torch.Tensor, *, dim: int, group: Group | str, size: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    """As `reduce_scatter`, into `out`."""
    dim = dim % x.dim()
    part = x.shape[dim] // size
    out = x.new_empty(*x.shape[:dim], part, *x.shape[dim + 1 :]) if out is None else out
    _connected(group, size).reduce_scatter(out, x.unflatten(dim, (size, part)).movedim(dim, 0))
    return out


def _connected(group: Group | str, size: int | None = None) -> Group:
    """What connects the ranks; a name stands for one rank. `size`: how many the call expects."""
    found = Alone() if isinstance(group, str) else group
    if size not in (None, found.size):
        raise ValueError(f"the graph is bound to {size} ranks, and the group has {found.size}")
    return found


ALL_REDUCE = OpSpec(
    name="precast.all_reduce",
    axes={"x": "..."},
    results={"y": "..."},
    dtypes={"x": FLOAT},
    reference=all_reduce,
    tolerances=PRODUCT,
)
# The axes of these are those of one rank: with more, the dimension `dim` of the larger tensor is a multiple.
ALL_GATHER = OpSpec(
    name="precast.all_gather",
    axes={"x": "..."},
    results={"y": "..."},
    dtypes={"x": tuple(BY_NAME.values())},
    reference=all_gather,
)
REDUCE_SCATTER = OpSpec(
    name="precast.reduce_scatter",
    axes={"x": "..."},
    results={"y": "..."},
    dtypes={"x": FLOAT},
    reference=reduce_scatter,
    tolerances=PRODUCT,
)
