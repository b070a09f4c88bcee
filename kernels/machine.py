"""The machine that measures, as tables of choices name it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from precast.kernels.linear import cublaslt
from precast.kernels.measured import Machine


def this_machine() -> Machine:
    """The current GPU, its driver, and the versions of what computes on it."""
    return Machine(
        gpu=torch.cuda.get_device_name(),
        capability=torch.cuda.get_device_capability(),
        driver=_driver(),
        torch=str(torch.__version__),  # a class of torch's own, which isn't encoded as text
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
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
