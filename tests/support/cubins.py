"""What kernels of CUDA C++ need, by the cubins that NVRTC makes of them for compute capability 9.0."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import pytest

from precast.kernels import cuda_source
from precast.kernels.records import Launch

_RESERVED = 1024
"""Bytes of shared memory that each block has beside those that a kernel asks for, and which cuobjdump counts."""


def used_by(launch: Launch) -> dict[str, int]:
    """Registers of a thread (REG), bytes of its stack (STACK, LOCAL), and bytes of a block's shared memory (SHARED)."""
    if not cuda_source.is_installed():
        pytest.skip("cuda-bindings are not installed")
    triton = pytest.importorskip("triton", reason="cuobjdump comes with Triton, which is published for Linux only")
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    file = launch.kernel.removeprefix("precast.kernels.").partition(":")[0]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(cuda_source.compiled(file, tuple(launch.constants.items()), (9, 0)))
        cubin.flush()
        said = subprocess.run(
            [tool, "--dump-resource-usage", cubin.name], capture_output=True, text=True, check=True
        ).stdout  # fmt: skip
    words = (word.partition(":") for word in said.split() if word.count(":") == 1)
    used = {name: int(number) for name, _, number in words if number.isdigit()}
    return used | {"SHARED": max(0, used["SHARED"] - _RESERVED) + launch.shared_bytes}
