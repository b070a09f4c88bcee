"""A native layer written by hand, and ways to make it wrong."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from precast.ir.native import NO_ARGUMENT, NativeKernel, NativeLayer, NativeParam

IMAGE = b"\x7fELF no code"
DIGEST = hashlib.sha256(IMAGE).hexdigest()
MODULE = "precast.kernels.rms_norm.triton"
KERNEL = NativeKernel(
    kernel=f"{MODULE}:rms_norm_kernel", key="ab" * 32, image=DIGEST, function="rms_norm_kernel", threads=128,
    shared_bytes=1024, params=(NativeParam("pointer", 0), NativeParam("int32", 2), NativeParam("pointer", NO_ARGUMENT)),
    aligned=(0, 2), ones=(3,), pdl=True,
)  # fmt: skip
LAYER = NativeLayer(
    target="sm_90", driver=12000, compilers={"triton": "3.7.1"}, sources={MODULE: "cd" * 32}, kernels=(KERNEL,),
    images={DIGEST: IMAGE},
)  # fmt: skip


def layer(**changes: Any) -> NativeLayer:
    """The layer with other fields."""
    return msgspec.structs.replace(LAYER, **changes)


def with_kernel(**changes: Any) -> NativeLayer:
    """The layer whose kernel has other fields."""
    return layer(kernels=(msgspec.structs.replace(KERNEL, **changes),))
