"""The samples of every op, by name and version."""

from __future__ import annotations

from collections.abc import Iterator

from op_samples import attention, experts, latent_attention, norms, rotary, rows, sampling, states
from op_samples.draw import Draw, Sample
from precast.kernels.spec import OpSpec

SAMPLES = {
    **attention.SAMPLES,
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
