"""Fakes on symbolic sizes: results are symbolic where the shape rule says so, and what doesn't fit is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from precast.ir.ops.op import ShapeError
from precast.kernels.registry import register


@pytest.fixture
def mode() -> Iterator[FakeTensorMode]:
    """Fake tensors with symbolic sizes."""
    register()
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        yield mode


def symbolic(mode: FakeTensorMode, *shape: int, dynamic: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor whose dimension `dynamic` has a symbol for its size."""
    kinds = [DimDynamic.DYNAMIC if dim == dynamic else DimDynamic.STATIC for dim in range(len(shape))]
    context = StatelessSymbolicContext(dynamic_sizes=kinds)  # type: ignore[arg-type]
    with torch._subclasses.fake_tensor.unset_fake_temporarily():
        real = torch.empty(shape, dtype=dtype)
    return mode.from_tensor(real, symbolic_context=context)


def test_tokens_stay_symbolic(mode: FakeTensorMode) -> None:
    x = symbolic(mode, 1, 7, 34, dynamic=1)
    y = torch.ops.precast.gated_activation(x, kind="silu")
    total, both = torch.ops.precast.residual_rms_norm(y, y, torch.empty(17), eps=1e-6, cast_before_scale=True)

    assert isinstance(y.shape[1], torch.SymInt)
    assert str(y.shape[1]) == str(x.shape[1]) == str(total.shape[1]) == str(both.shape[1])
    assert (y.shape[0], y.shape[2]) == (1, 17)
    assert mode.shape_env is not None
    assert not mode.shape_env.guards


def test_sizes_that_follow_from_each_other_stay_symbolic(mode: FakeTensorMode) -> None:
    x = symbolic(mode, 1, 7, 6, dynamic=1)
    bounds = symbolic(mode, 4, dynamic=0, dtype=torch.int32)
    sequences = torch.empty(bounds.shape[0] - 1, dtype=torch.int32)
    y = torch.ops.precast.stateful_linear_recurrence(x, x, torch.empty(9, 6), sequences, bounds, sequences)

    assert isinstance(y.shape[1], torch.SymInt)
    assert mode.shape_env is not None
    assert not mode.shape_env.guards


def test_sizes_that_torch_does_not_relate_are_taken_as_numbers(mode: FakeTensorMode) -> None:
    x = symbolic(mode, 1, 7, 6, dynamic=1)
    bounds, sequences = (symbolic(mode, size, dynamic=0, dtype=torch.int32) for size in (4, 3))
    y = torch.ops.precast.stateful_linear_recurrence(x, x, torch.empty(9, 6), sequences, bounds, sequences)

    assert tuple(map(type, y.shape)) == (int, int, int)
    assert tuple(y.shape) == (1, 7, 6)
    assert mode.shape_env is not None
    assert not mode.shape_env.guards
    assert isinstance(x.shape[1], torch.SymInt)


def test_result_may_have_a_size_that_no_argument_has(mode: FakeTensorMode) -> None:
    x = symbolic(mode, 3, 8, dynamic=1)
    doubled = torch.cat((x, x), 1)

    assert str(torch.ops.precast.gated_activation(doubled, kind="silu").shape[1]) == str(x.shape[1])


def test_what_does_not_fit_is_refused_by_the_shape_rule(mode: FakeTensorMode) -> None:
    x = symbolic(mode, 1, 7, 8, dynamic=1)

    with pytest.raises(ShapeError, match="weight: expected shape"):
        torch.ops.precast.rms_norm(x, torch.empty(9), eps=1e-6, cast_before_scale=True)


def test_no_result_is_no_result(mode: FakeTensorMode) -> None:
    k = symbolic(mode, 1, 7, 2, 8, dynamic=1)
    cache = torch.empty(5, 16, 2, 8)

    assert torch.ops.precast.write_kv(k, k, cache, cache.clone(), torch.empty(k.shape[1], dtype=torch.int64)) is None
