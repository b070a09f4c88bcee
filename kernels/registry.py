"""All ops of this room: their specs, their registration with torch, and the functions that records name.

The builder registers the ops with `torch.library`, to trace models that call them. The loader calls what
`implementations` gives, without torch's dispatcher between.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from precast.ir.ops import table as ops
from precast.kernels.attention.attention import ATTENTION
from precast.kernels.attention.paged import PAGED_ATTENTION
from precast.kernels.attention.write_kv import WRITE_KV
from precast.kernels.causal_conv.causal_conv import CAUSAL_CONV
from precast.kernels.causal_conv.stateful import STATEFUL_CAUSAL_CONV
from precast.kernels.choices import cases, fastest
from precast.kernels.delta_rule.delta_rule import DELTA_RULE
from precast.kernels.delta_rule.stateful import STATEFUL_DELTA_RULE
from precast.kernels.embedding.embedding import EMBEDDING
from precast.kernels.experts.experts import EXPERTS
from precast.kernels.experts.grouped_linear import GROUPED_LINEAR
from precast.kernels.gated_activation.gated_activation import GATED_ACTIVATION
from precast.kernels.gather_rows.gather_rows import GATHER_ROWS
from precast.kernels.latent_attention.latent_attention import LATENT_ATTENTION
from precast.kernels.latent_attention.paged import PAGED_LATENT_ATTENTION
from precast.kernels.latent_attention.write_latent import WRITE_LATENT
from precast.kernels.layer_norm.layer_norm import LAYER_NORM
from precast.kernels.linear_attention.linear_attention import LINEAR_ATTENTION
from precast.kernels.linear_attention.stateful import STATEFUL_LINEAR_ATTENTION
from precast.kernels.linear_recurrence.linear_recurrence import LINEAR_RECURRENCE
from precast.kernels.linear_recurrence.stateful import STATEFUL_LINEAR_RECURRENCE
from precast.kernels.records import Ranges, Record
from precast.kernels.rms_norm.residual_rms_norm import RESIDUAL_RMS_NORM
from precast.kernels.rms_norm.rms_norm import RMS_NORM
from precast.kernels.rotary.rope_frequencies import ROPE_FREQUENCIES
from precast.kernels.rotary.rotary import ROTARY
from precast.kernels.rotary.rotary_tables import ROTARY_TABLES
from precast.kernels.route.route import ROUTE
from precast.kernels.sampling.sample import SAMPLE
from precast.kernels.selective_scan.selective_scan import SELECTIVE_SCAN
from precast.kernels.selective_scan.stateful import STATEFUL_SELECTIVE_SCAN
from precast.kernels.spec import OpSpec
from precast.kernels.state_space_scan.state_space_scan import STATE_SPACE_SCAN
from precast.kernels.state_space_scan.stateful import STATEFUL_STATE_SPACE_SCAN
from precast.kernels.use import GPU, Target, Use
from precast.kernels.wkv.stateful import STATEFUL_WKV
from precast.kernels.wkv.wkv import WKV

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
    """The spec of every `precast.*` op, sorted by name."""
    return _SPECS


@cache
def register() -> torch.library.Library:
    """Define `torch.ops.precast.*` from the op table: each op's reference, and its fake; once, however often called.

    The ops live as long as the library that is returned, which this function keeps.
    """
    from precast.kernels.fakes import fake_of

    library = torch.library.Library(_NAMESPACE, "DEF")
    for spec in _SPECS:
        name = spec.name.removeprefix("precast.")
        library.define(ops.signature(spec.name, spec.version).replace("Dtype ", "ScalarType "))
        library.impl(name, spec.reference, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{_NAMESPACE}::{name}", fake_of(spec.definition), lib=library)
    return library


class Implementation(NamedTuple):
    """What computes a node in steps of these sizes, of all sizes if none are named; see `Record` for `allocates`."""

    sizes: Ranges
    function: Callable[..., Any]
    allocates: bool


def implementations(use: Use) -> tuple[Implementation, ...]:
    """What computes a use: one implementation, or one for each class of sizes that its records tell apart.

    They take the arguments by the names of the op's signature, element types as `torch.dtype`, and return a tensor, a
    tuple of tensors, or None for an op without results; those that don't allocate write into `out` instead.

    Raises BundleError `op-unknown` for a name or version that isn't in the op table, and TargetError
    `implementation-missing` for a use that no record takes.
    """
    return tuple(
        Implementation(sizes, function_of(choice.record), choice.record.allocates) for sizes, choice in cases(use)
    )


def resolve(name: str, version: int, device: torch.device) -> Callable[..., Any]:
    """The fastest implementation of an op on `device`, for whoever has no node: it may not take all types.

    Raises BundleError `op-unknown` for a name or version that isn't in the op table.
    """
    return function_of(fastest(name, version, target_of(device)))


def target_of(device: torch.device) -> Target:
    """The target that a device is, with what is installed here; Triton is published for Linux alone."""
    target = Target("cpu") if device.type == "cpu" else GPU
    if device.type == "cuda" and torch.cuda.is_available():
        target = target._replace(capability=torch.cuda.get_device_capability(device))
    return target if find_spec("triton") is not None else target._replace(kinds=target.kinds - {"triton"})


def function_of(record: Record) -> Callable[..., Any]:
    """The function that a record names, imported when it is first wanted."""
    assert isinstance(record.runs, str), "the torch backend runs functions"
    return _named(record.runs)


@cache
def _named(runs: str) -> Callable[..., Any]:
    module, _, path = runs.partition(":")
    function: Callable[..., Any] = attrgetter(path)(import_module(module))
    return function
