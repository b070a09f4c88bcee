"""Cache tensors are strided views of one memory: ops read and write their own pages, and nothing between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from op_samples.draw import Draw, Sample
from op_samples.table import chosen, samples_of
from strided import CACHES, with_strided_caches

from precast.kernels import registry
from precast.kernels.spec import OpSpec

CACHE_OPS = [spec for spec in registry.specs() if any(arg.name in CACHES for arg in spec.definition.args)]


def test_all_ops_on_caches_are_here() -> None:
    names = {spec.name for spec in CACHE_OPS}

    assert {spec.name for spec in registry.specs() if spec.definition.mutated} <= names
    assert {"precast.paged_attention", "precast.paged_latent_attention", "precast.write_latent"} <= names
    assert sum("stateful" in name for name in names) >= 7


@pytest.mark.parametrize("spec", CACHE_OPS, ids=lambda spec: spec.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("which", ["reference", "fast"])
def test_pages_far_apart_give_the_same(
    spec: OpSpec,
    dtype: torch.dtype,
    which: str,
    device: torch.device,
    copied: Callable[[Sample], Sample],
    same: Callable[..., None],
) -> None:
    op: Callable[..., Any] = spec.reference if which == "reference" else chosen(spec, device)
    for sample in samples_of(spec, Draw(dtype, device)):
        close, (spread, between) = copied(sample), with_strided_caches(sample)

        same(spec, op(**spread), op(**close))

        for name in CACHES:
            if name in sample:
                assert torch.equal(spread[name].view(torch.uint8), close[name].view(torch.uint8)), name
        assert all(bool((gap == 0xFF).all()) for gap in between)
