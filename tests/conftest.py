"""What every test can rely on: no network, one thread a worker, the same numbers each run, `gpu` tests only on a GPU.

The environment is set while this file is imported, before any test module can import torch or transformers.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["XDG_CONFIG_HOME"] = os.devnull  # whoever runs the tests may have a trust policy of their own
# What a shell starts in the background ignores it, and hands that on: tests that interrupt would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)
if "PYTEST_XDIST_WORKER" in os.environ:
    # The workers share the cores; more threads than cores only wait for each other. Subprocesses inherit this.
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["MKL_NUM_THREADS"] = "1"

# The same examples in each run, and no deadline, nor a limit to how long they take to be drawn: a slow machine is not a
# failure.
settings.register_profile("precast", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("precast")


def pytest_collection_finish() -> None:
    """What the imports made stays for good: the garbage collector, which looked through it every few tests, needn't."""
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test marked `gpu` where torch sees no CUDA device. Other tests don't pay for importing torch."""
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU, and torch sees none")


@pytest.fixture(autouse=True)
def _fixed_torch_seed() -> None:
    """pytest-randomly seeds `random` with a new number each run; tensors start from the same seed in every run."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(0)


@pytest.fixture(scope="module")
def traced_once() -> Iterator[None]:
    """A model is traced once for all the tests of this process that build it, where they aren't about the trace."""
    from traced_once import traced_once

    with traced_once():
        yield
