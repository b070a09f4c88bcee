"""Caches of more than 2^31 elements: each kernel finds the pages at their end."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from op_samples.draw import Draw, Sample
from op_samples.table import samples_of, taking
from strided import CACHES, with_distant_caches

from precast.kernels import registry
from precast.kernels.spec import OpSpec

CACHE_OPS = [spec for spec in registry.specs() if any(arg.name in CACHES for arg in spec.definition.args)]
BYTES = 24 << 30
"""Of a GPU, at least: the two caches of a sample, in bfloat16, twice."""


def has_pages(sample: Sample) -> bool:
    """More than two, so that they can be far apart."""
    return all(len(sample[name]) > 2 for name in CACHES if name in sample)


@pytest.mark.gpu
@pytest.mark.parametrize("spec", CACHE_OPS, ids=lambda spec: spec.name)
def test_pages_beyond_two_to_the_31_elements(
    spec: OpSpec, copied: Callable[[Sample], Sample], same: Callable[..., None]
) -> None:
    device = torch.device("cuda")
    if torch.cuda.mem_get_info()[0] < BYTES:
        pytest.skip(f"less than {BYTES >> 30} GiB of memory are free")
    samples = [given for given in samples_of(spec, Draw(torch.bfloat16, device)) if has_pages(given)][:2]
    assert samples
    for sample in samples:
        for record in taking(spec, sample, device):
            if record.control == "host":
                continue
            expected, far = copied(sample), with_distant_caches(sample)
            computed = sample[spec.products_of].dtype if spec.products_of else None
            wanted = spec.reference(**expected)

            same(spec, registry.function_of(record)(**far), wanted, computed)

            for name in spec.definition.mutated:
                same(spec, far[name], expected[name])
