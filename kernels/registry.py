"""All ops of this room: their specs, their registration with torch, and the choice of an implementation.

The builder registers the ops with `torch.library`, to trace models that call them. The loader calls what `resolve`
gives, without torch's dispatcher between.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from precast.ir import ops
from precast.ir.errors import BundleError
from precast.kernels.attention.attention import ATTENTION
from precast.kernels.attention.paged import PAGED_ATTENTION
from precast.kernels.attention.write_kv import WRITE_KV
from precast.kernels.embedding.embedding import EMBEDDING
from precast.kernels.gated_activation.gated_activation import GATED_ACTIVATION
from precast.kernels.gather_rows.gather_rows import GATHER_ROWS
from precast.kernels.layer_norm.layer_norm import LAYER_NORM
from precast.kernels.rms_norm.residual_rms_norm import RESIDUAL_RMS_NORM
from precast.kernels.rms_norm.rms_norm import RMS_NORM
from precast.kernels.rotary.rope_frequencies import ROPE_FREQUENCIES
from precast.kernels.rotary.rotary import ROTARY
from precast.kernels.rotary.rotary_tables import ROTARY_TABLES
from precast.kernels.sampling.sample import SAMPLE
from precast.kernels.spec import OpSpec

_NAMESPACE = "precast"

_SPECS = (
    ATTENTION,
    EMBEDDING,
    GATED_ACTIVATION,
    GATHER_ROWS,
    LAYER_NORM,
    PAGED_ATTENTION,
    RESIDUAL_RMS_NORM,
    RMS_NORM,
    ROPE_FREQUENCIES,
    ROTARY,
    ROTARY_TABLES,
    SAMPLE,
    WRITE_KV,
)


def specs() -> tuple[OpSpec, ...]:
    """The spec of every `precast.*` op, sorted by name."""
    return _SPECS


@cache
def register() -> torch.library.Library:
    """Define `torch.ops.precast.*` from the op table, with each op's reference and fake; once, however often called.

    The ops live as long as the library that is returned, which this function keeps.
    """
    library = torch.library.Library(_NAMESPACE, "DEF")
    for spec in _SPECS:
        name = spec.name.removeprefix("precast.")
        library.define(ops.signature(spec.name, spec.version).replace("Dtype ", "ScalarType "))
        library.impl(name, spec.reference, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{_NAMESPACE}::{name}", spec.fake, lib=library)
    return library


def resolve(name: str, version: int, device: torch.device) -> Callable[..., Any]:
    """The fastest implementation of an op of the op table on `device`.

    It takes the arguments by the names of the op's signature, element types as `torch.dtype`, and returns a tensor,
    a tuple of tensors, or None for an op without results.

    Raises BundleError `op-unknown` for a name or version that isn't in the op table.
    """
    if ops.lookup(name, version) is None:
        raise BundleError(
            "op-unknown",
            f"op {name}@{version} is not in the op table",
            fix="load the bundle with the Precast that built it, or a newer one",
        )
    if name.startswith("aten."):
        packet, overload = name.removeprefix("aten.").split(".")
        return getattr(getattr(torch.ops.aten, packet), overload)
    spec = next(spec for spec in _SPECS if (spec.name, spec.version) == (name, version))
    implementation = spec.implementations.get(device.type)
    return spec.reference if implementation is None else implementation()
