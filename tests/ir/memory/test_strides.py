"""Where views have their elements, against torch: random tensors, views of views, and copies."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from precast.ir.memory import strides
from precast.ir.memory.strides import Layout

Made = tuple[torch.Tensor, Layout]


def layout_of(x: torch.Tensor) -> Layout:
    return Layout(tuple(x.shape), x.stride())


def _permuted(x: torch.Tensor, draw: random.Random) -> Made:
    dims = draw.sample(range(x.dim()), x.dim())
    return x.permute(dims), strides.permuted(layout_of(x), dims)


def _transposed(x: torch.Tensor, draw: random.Random) -> Made:
    one, other = draw.randrange(-x.dim(), x.dim()), draw.randrange(x.dim())
    return x.transpose(one, other), strides.transposed(layout_of(x), one, other)


def _unsqueezed(x: torch.Tensor, draw: random.Random) -> Made:
    dim = draw.randrange(-x.dim() - 1, x.dim() + 1)
    return x.unsqueeze(dim), strides.unsqueezed(layout_of(x), dim)


def _selected(x: torch.Tensor, draw: random.Random) -> Made:
    dim = draw.randrange(-x.dim(), x.dim())
    return x.select(dim, 0), strides.without(layout_of(x), dim)


def _sliced(x: torch.Tensor, draw: random.Random) -> Made:
    dim, step = draw.randrange(x.dim()), draw.choice((1, 2))
    found = torch.ops.aten.slice.Tensor(x, dim, draw.randrange(2), x.shape[dim], step)
    return found, strides.sliced(layout_of(x), found.shape, dim, step)


def _expanded(x: torch.Tensor, draw: random.Random) -> Made:
    shape = (2, *(3 if size == 1 else size for size in x.shape))
    return x.expand(shape), strides.expanded(layout_of(x), shape)


VIEWS: tuple[Callable[[torch.Tensor, random.Random], Made], ...] = (
    _permuted, _transposed, _unsqueezed, _selected, _sliced, _expanded,
)  # fmt: skip


def tensors(draw: random.Random) -> torch.Tensor:
    """New memory, or a view of a view of it."""
    x = torch.empty([draw.choice((1, 2, 3, 4)) for _ in range(draw.randrange(2, 5))])
    for _ in range(draw.randrange(3)):
        viewed, _ = draw.choice(VIEWS)(x, draw)
        if viewed.dim() > 1 and viewed.numel():
            x = viewed
    return x


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.__name__[1:])
def test_views_are_torchs(view: Callable[[torch.Tensor, random.Random], Made]) -> None:
    draw = random.Random(0)
    for _ in range(300):
        expected, found = view(tensors(draw), draw)
        assert found == layout_of(expected)
        assert found.is_contiguous == expected.is_contiguous()


def test_a_reshape_is_a_view_where_torch_makes_one() -> None:
    draw, views = random.Random(1), 0
    for _ in range(3000):
        x = tensors(draw)
        sizes = [1, *(factor for size in x.shape for factor in ((2, 2) if size == 4 else (size,)))]
        while len(sizes) > 1 and draw.random() < 0.6:
            at = draw.randrange(len(sizes) - 1)
            sizes[at : at + 2] = [sizes[at] * sizes[at + 1]]
        expected, found = x.reshape(sizes), strides.reshaped(layout_of(x), sizes)
        is_view = expected.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        assert (found is not None) == is_view, (x.shape, x.stride(), sizes)
        if found is not None:
            views += 1
            assert found == layout_of(expected)
    assert 500 < views < 2900


def test_elementwise_results_keep_the_order_of_dimensions() -> None:
    draw = random.Random(2)
    for _ in range(300):
        x = torch.empty([draw.choice((2, 3, 4)) for _ in range(3)])
        viewed, layout = _permuted(x, draw)
        assert strides.like(layout) == layout_of(viewed.exp())
