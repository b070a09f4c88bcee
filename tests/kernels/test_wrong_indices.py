"""Ops that take integers which the verifier can't bound: whatever these are, nothing outside of their tensors is read.

Each tensor lies between guards of NaN: what is read of them shows in the result, and what is written, in the guards.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from op_samples.draw import Draw, Sample
from op_samples.table import chosen, samples_of

from precast.kernels import registry
from precast.kernels.spec import OpSpec

PASSED_OVER = [
    (spec, name) for spec in registry.specs() for name, word in spec.definition.integers.items() if word.kind == "any"
]
WRONG = (-1, -(2**63), 10**6, 2**31, 2**63 - 1)
GUARD = 4096


def guarded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A copy of `x` in the middle of memory of NaN, and that memory."""
    memory = torch.full((x.numel() + 2 * GUARD,), float("nan"), dtype=x.dtype, device=x.device)
    copy = memory[GUARD : GUARD + x.numel()].view(x.shape)
    return copy.copy_(x), memory


def numbered(sample: Sample, name: str) -> int:
    """Of how many things, at most, the integers of an op name one."""
    if name == "groups":
        return sample["scales"].shape[0 if sample["format"] == "gptq" else 1]
    if "block_size" in sample:  # no more blocks than keys
        return sample["k_cache"].shape[:2].numel() if "k_cache" in sample else sample["k"].shape[1]
    if "rate" in sample:  # entries of blocks
        return sample["cache" if "cache" in sample else "entries"].shape[:2].numel()
    return next(sample[key].shape[0] for key in ("up", "weight") if key in sample)


def test_the_ops_that_pass_over_wrong_integers_are_known() -> None:
    found = sorted((spec.name, name) for spec, name in PASSED_OVER)
    assert found == [
        ("precast.block_sparse_attention", "selected"),
        ("precast.entry_attention", "selected"),
        ("precast.experts", "expert_ids"),
        ("precast.grouped_linear", "expert_ids"),
        ("precast.paged_block_sparse_attention", "selected"),
        ("precast.paged_entry_attention", "selected"),
        ("precast.paged_sparse_latent_attention", "selected"),
        ("precast.quantised_experts", "expert_ids"),
        ("precast.quantised_linear", "groups"),
        ("precast.quantised_sharded_embedding", "ids"),
        ("precast.sharded_embedding", "ids"),
        ("precast.sparse_latent_attention", "selected"),
    ]


@pytest.mark.parametrize(("spec", "name"), PASSED_OVER, ids=lambda value: getattr(value, "name", value))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("which", ["reference", "fast"])
def test_an_index_of_nothing_adds_nothing(
    spec: OpSpec, name: str, dtype: torch.dtype, which: str, device: torch.device, same: Any
) -> None:
    op: Any = spec.reference if which == "reference" else chosen(spec, device)
    for sample in samples_of(spec, Draw(dtype, device)):
        if sample.get(name) is None:
            continue
        memories, given = [], dict(sample)
        for key, x in sample.items():
            if isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype.itemsize > 1:
                given[key], memory = guarded(x)
                memories.append(memory)
        first = sample.get("start", 0)
        first_of_none = first + numbered(sample, name)
        ids = sample[name].flatten().clone()
        wrong = (first_of_none, *(each for each in WRONG if abs(each) <= torch.iinfo(ids.dtype).max))
        ids[::2] = torch.tensor(wrong, dtype=ids.dtype, device=device).repeat(len(ids))[: len(ids[::2])]
        given[name] = ids.view(sample[name].shape)
        nothing = torch.where((given[name] < first) | (given[name] >= first_of_none), -1, given[name])

        found = op(**given)

        computed = sample[spec.products_of].dtype if spec.products_of else None
        same(spec, found, spec.reference(**{**sample, name: nothing}), computed)
        results = found if isinstance(found, tuple) else (found,)
        assert not any(bool(each.isnan().any()) for each in results)
        assert bool(results[0].isfinite().all())  # what comes beside it may be the logarithm of nothing
        for memory in memories:
            assert bool(memory[:GUARD].isnan().all())
            assert bool(memory[-GUARD:].isnan().all())
