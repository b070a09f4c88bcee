"""All ops of this room: their specs, their registration with torch, and the choice of an implementation.

The builder registers the ops with `torch.library`, to trace models that call them. The loader calls what `resolve`
gives, without torch's dispatcher between.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from precast.ir.errors import BundleError
from precast.ir.ops import table as ops
from precast.kernels.attention.attention import ATTENTION
from precast.kernels.attention.paged import PAGED_ATTENTION
from precast.kernels.attention.write_kv import WRITE_KV
from precast.kernels.causal_conv.causal_conv import CAUSAL_CONV, STATEFUL_CAUSAL_CONV
from precast.kernels.delta_rule.delta_rule import DELTA_RULE, STATEFUL_DELTA_RULE
from precast.kernels.embedding.embedding import EMBEDDING
from precast.kernels.experts.experts import EXPERTS
from precast.kernels.experts.grouped_linear import GROUPED_LINEAR
from precast.kernels.gated_activation.gated_activation import GATED_ACTIVATION
from precast.kernels.gather_rows.gather_rows import GATHER_ROWS
from precast.kernels.latent_attention.latent_attention import LATENT_ATTENTION
from precast.kernels.latent_attention.paged import PAGED_LATENT_ATTENTION
from precast.kernels.latent_attention.write_latent import WRITE_LATENT
from precast.kernels.layer_norm.layer_norm import LAYER_NORM
from precast.kernels.linear_attention.linear_attention import LINEAR_ATTENTION, STATEFUL_LINEAR_ATTENTION
from precast.kernels.linear_recurrence.linear_recurrence import LINEAR_RECURRENCE, STATEFUL_LINEAR_RECURRENCE
from precast.kernels.rms_norm.residual_rms_norm import RESIDUAL_RMS_NORM
from precast.kernels.rms_norm.rms_norm import RMS_NORM
from precast.kernels.rotary.rope_frequencies import ROPE_FREQUENCIES
from precast.kernels.rotary.rotary import ROTARY
from precast.kernels.rotary.rotary_tables import ROTARY_TABLES
from precast.kernels.route.route import ROUTE
from precast.kernels.sampling.sample import SAMPLE, SAMPLE_2
from precast.kernels.selective_scan.selective_scan import SELECTIVE_SCAN, STATEFUL_SELECTIVE_SCAN
from precast.kernels.spec import OpSpec
from precast.kernels.state_space_scan.state_space_scan import STATE_SPACE_SCAN, STATEFUL_STATE_SPACE_SCAN
from precast.kernels.wkv.wkv import STATEFUL_WKV, WKV

_NAMESPACE = "precast"

_SPECS = (
    ATTENTION,
    CAUSAL_CONV,
    DELTA_RULE,
    EMBEDDING,
    EXPERTS,
    GATED_ACTIVATION,
    GATHER_ROWS,
    GROUPED_LINEAR,
    LATENT_ATTENTION,
    LAYER_NORM,
    LINEAR_ATTENTION,
    LINEAR_RECURRENCE,
    PAGED_ATTENTION,
    PAGED_LATENT_ATTENTION,
    RESIDUAL_RMS_NORM,
    RMS_NORM,
    ROPE_FREQUENCIES,
    ROTARY,
    ROTARY_TABLES,
    ROUTE,
    SAMPLE,
    SAMPLE_2,
    SELECTIVE_SCAN,
    STATE_SPACE_SCAN,
    STATEFUL_CAUSAL_CONV,
    STATEFUL_DELTA_RULE,
    STATEFUL_LINEAR_ATTENTION,
    STATEFUL_LINEAR_RECURRENCE,
    STATEFUL_SELECTIVE_SCAN,
    STATEFUL_STATE_SPACE_SCAN,
    STATEFUL_WKV,
    WKV,
    WRITE_KV,
    WRITE_LATENT,
)


def specs() -> tuple[OpSpec, ...]:
    """The spec of every `precast.*` op, sorted by name and version."""
    return _SPECS


@cache
def register() -> torch.library.Library:
    """Define `torch.ops.precast.*` from the op table: each op's reference, and its fake; once, however often called.

    The ops live as long as the library that is returned, which this function keeps.
    """
    from precast.kernels.fakes import fake_of

    library = torch.library.Library(_NAMESPACE, "DEF")
    for spec in _SPECS:
        name, signature = spec.torch_name, ops.signature(spec.name, spec.version)
        library.define(name + signature[signature.index("(") :].replace("Dtype ", "ScalarType "))
        library.impl(name, spec.reference, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{_NAMESPACE}::{name}", fake_of(spec.definition), lib=library)
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
