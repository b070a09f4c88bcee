"""What the tests of the ops share: the devices they run on, samples, and how results are compared."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from op_samples.draw import Draw, Sample

from precast.kernels.spec import OpSpec

if os.environ.get("TRITON_INTERPRET") == "1":
    import quick_interpreter

    quick_interpreter.install()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device that ops run on."""
    return torch.device(request.param)


@pytest.fixture
def draw(device: torch.device) -> Draw:
    """Draws float32 tensors on `device`, and draws the same in each run."""
    return Draw(torch.float32, device)


def tensors_of(result: Any) -> tuple[torch.Tensor, ...]:
    """The results of an op as a tuple."""
    if result is None:
        return ()
    return result if isinstance(result, tuple) else (result,)


@pytest.fixture
def results() -> Callable[[Any], tuple[torch.Tensor, ...]]:
    """Gives the results of an op as a tuple."""
    return tensors_of


@pytest.fixture
def copied() -> Callable[[Sample], Sample]:
    """Gives a sample with every tensor copied."""
    return lambda sample: {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in sample.items()}


@pytest.fixture
def same() -> Callable[..., None]:
    """Asserts that results are equal within the spec's tolerances: `same(spec, found, expected)`. A fourth argument is
    the type in which products are computed, if that isn't the results'."""

    def compare(spec: OpSpec, found: Any, expected: Any, computed: torch.dtype | None = None) -> None:
        for x, y in zip(tensors_of(found), tensors_of(expected), strict=True):
            rtol, atol = spec.tolerances.get(computed or y.dtype, (0.0, 0.0))
            if x.dtype == y.dtype == torch.float8_e4m3fn:
                x, y = x.float(), y.float()  # else they are compared bit by bit alone
            torch.testing.assert_close(x, y, rtol=rtol, atol=atol, equal_nan=True)

    return compare


@pytest.fixture
def no_waiting() -> Callable[[], AbstractContextManager[None]]:
    """A context that raises where the host waits for the GPU."""

    @contextmanager
    def context() -> Iterator[None]:
        torch.cuda.synchronize()
        try:
            with warnings.catch_warnings(action="ignore", category=UserWarning):  # that it doesn't see every wait
                torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return context


@pytest.fixture(scope="module")
def fresh_compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No kernel that Triton compiled in an earlier run is taken for one of this run; what tests share compiles once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        # Triton 3.9 warns where the default of the next version isn't chosen.
        patch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
        yield
