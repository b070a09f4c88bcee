"""The samples of every op, by name and version."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from op_samples import attention, collectives, experts, latent_attention, norms, rotary, rows, sampling, states
from op_samples.draw import Draw, Sample
from precast.kernels import registry
from precast.kernels.choices import runnable
from precast.kernels.records import Record
from precast.kernels.spec import OpSpec

SAMPLES = {
    **attention.SAMPLES,
    **collectives.SAMPLES,
    **experts.SAMPLES,
    **latent_attention.SAMPLES,
    **norms.SAMPLES,
    **rotary.SAMPLES,
    **rows.SAMPLES,
    **sampling.SAMPLES,
    **states.SAMPLES,
}


def samples_of(spec: OpSpec, draw: Draw) -> Iterator[Sample]:
    """The samples of an op, with `draw`'s tensors."""
    return SAMPLES[spec.name, spec.version](draw)


def records_of_any_size(spec: OpSpec, device: torch.device) -> list[Record]:
    """What computes an op on a device, the fastest first, but for the weight stream: `test_linear.py` is about that.

    It takes few rows, widths and dtypes, and reads beyond others.
    """
    records = runnable(spec.name, spec.version, registry.target_of(device))
    return [record for record in records if record.kind != "cuda"]
