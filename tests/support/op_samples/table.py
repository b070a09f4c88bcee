"""The samples of every op, by name and version."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from op_samples import (
    attention,
    block_sparse_attention,
    collectives,
    entries,
    experts,
    latent_attention,
    norms,
    quantised,
    quantised_experts,
    rotary,
    rounded,
    rows,
    sampling,
    sparse_attention,
    states,
)
from op_samples.draw import Draw, Sample
from precast.kernels import registry
from precast.kernels.choices import fitting
from precast.kernels.launch import use_of_tensors
from precast.kernels.records import Record
from precast.kernels.spec import OpSpec

SAMPLES = {
    **attention.SAMPLES,
    **block_sparse_attention.SAMPLES,
    **collectives.SAMPLES,
    **entries.SAMPLES,
    **experts.SAMPLES,
    **latent_attention.SAMPLES,
    **norms.SAMPLES,
    **quantised.SAMPLES,
    **quantised_experts.SAMPLES,
    **rotary.SAMPLES,
    **rounded.SAMPLES,
    **rows.SAMPLES,
    **sampling.SAMPLES,
    **sparse_attention.SAMPLES,
    **states.SAMPLES,
}


def samples_of(spec: OpSpec, draw: Draw) -> Iterator[Sample]:
    """The samples of an op, with `draw`'s tensors."""
    return SAMPLES[spec.name, spec.version](draw)


def taking(spec: OpSpec, sample: Sample, device: torch.device) -> list[Record]:
    """What computes the op over these tensors on a device, the fastest first; the reference only if nothing else does.

    The weight stream and the attention of single steps are left out: `test_linear.py` and `test_decode_attention.py`
    are about those.
    """
    use = use_of_tensors(spec.name, spec.version, sample)._replace(target=registry.target_of(device))
    records = [record for record in fitting(use, step_of(spec, sample)) if record.kind != "cuda"]
    others = [record for record in records if not record.name.startswith("reference.")]
    return others or records


def chosen(spec: OpSpec, device: torch.device) -> Callable[..., Any]:
    """The op as a function that computes each call with the fastest of those that take it."""

    def call(**sample: Any) -> Any:
        return registry.function_of(taking(spec, sample, device)[0])(**sample)

    return call


def step_of(spec: OpSpec, sample: Sample) -> dict[str, int]:
    """The sizes of the step that has these tensors: its tokens, and its sequences."""
    found = {"T": 0}
    for name, axes in spec.axes.items():
        x = sample.get(name)
        if not isinstance(x, torch.Tensor):
            continue
        names = axes.split()
        if names[0] == "..." and len(names) > 1:  # rows of all leading axes
            found["T"] = max(found["T"], x.shape[: 1 - len(names)].numel())
        found |= {name: size for name, size in zip(names, x.shape, strict=False) if name in ("T", "B")}
    return found
