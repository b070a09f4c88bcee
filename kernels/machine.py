"""The machine that measures, as tables of choices name it."""

from __future__ import annotations

from pathlib import Path

from precast.kernels.linear import cublaslt
from precast.kernels.measured import Machine


def this_machine() -> Machine:
    """The current GPU, its driver, and the versions of what computes on it."""
    import torch

    return machine_with(torch.cuda.get_device_name(), torch.cuda.get_device_capability())


def machine_with(gpu: str, capability: tuple[int, int]) -> Machine:
    """The machine with this GPU. No torch: its version is what is installed."""
    return Machine(
        gpu=gpu,
        capability=capability,
        driver=_driver(),
        torch=_version("torch"),
        triton=_version("triton"),
        cublaslt=cublaslt.version() if cublaslt.is_installed() else 0,
    )


def _driver() -> str:
    """What the kernel module says of its version; "" where it isn't asked this way."""
    try:
        said = Path("/sys/module/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return ""
    return said.strip()


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version  # a start without a sealed table has no use for it

    try:
        return version(package)
    except PackageNotFoundError:
        return ""
