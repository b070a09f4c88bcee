"""What holds for each op with a state: however a sequence is cut into steps, results and states are the same; slots are
read and written as `precast.kernels.stateful.walks` says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from op_samples.draw import Draw, Sample
from op_samples.sequences import without_states
from op_samples.table import samples_of

from precast.kernels import registry
from precast.kernels.spec import OpSpec
from precast.kernels.stateful.walks import fresh

SPECS = {spec.name: spec for spec in registry.specs()}
STATEFUL = [spec for name, spec in SPECS.items() if name.startswith("precast.stateful_")]
LENGTHS = (70, 129, 41)
SLOTS = (3, 0, 2)

each_op = pytest.mark.parametrize("spec", STATEFUL, ids=lambda spec: spec.name)


@pytest.fixture(params=["reference", "implementation"])
def function(request: pytest.FixtureRequest, spec: OpSpec) -> Callable[..., torch.Tensor]:
    """The op itself, in each of its forms."""
    if request.param == "reference":
        return spec.reference
    return registry.resolve(spec.name, spec.version, torch.device("cpu"))


def of_tokens(sample: Sample) -> dict[str, torch.Tensor]:
    """The arguments that have a row for each token."""
    return {name: x for name, x in sample.items() if isinstance(x, torch.Tensor) and x.dim() > 2 and x.shape[0] == 1}


def long_sample(spec: OpSpec) -> Sample:
    """A call whose tokens are enough for sequences of LENGTHS, all of which begin in it; each state is NaN."""
    total = sum(LENGTHS)
    samples = samples_of(spec, Draw(torch.float32, torch.device("cpu")))
    sample = next(sample for sample in samples if first(sample).shape[1] >= total)
    state = torch.full((5, *sample["state"].shape[1:]), torch.nan)
    bounds = torch.tensor((0, *LENGTHS)).cumsum(0).int()
    metadata = {"slots": torch.tensor(SLOTS).int(), "cu_seqlens": bounds, "kv_lens": bounds.diff()}
    return sample | {"state": state} | metadata


def first(sample: Sample) -> torch.Tensor:
    return next(iter(of_tokens(sample).values()))


def in_steps(function: Callable[..., torch.Tensor], sample: Sample, step: int) -> torch.Tensor:
    """The result of calls with at most `step` tokens of each sequence; a sequence that has ended has none."""
    tokens = of_tokens(sample)
    bounds = sample["cu_seqlens"].tolist()
    out: torch.Tensor | None = None
    for start in range(0, max(LENGTHS), step):
        spans = [(min(start, length), min(start + step, length)) for length in LENGTHS]
        rows = torch.cat([torch.arange(bounds[b] + low, bounds[b] + high) for b, (low, high) in enumerate(spans)])
        metadata = {
            "cu_seqlens": torch.tensor([0] + [high - low for low, high in spans]).cumsum(0).int(),
            "kv_lens": torch.tensor([high for _, high in spans]).int(),
        }
        y = function(**sample | {name: x[:, rows] for name, x in tokens.items()} | metadata)
        out = y.new_full((1, bounds[-1], *y.shape[2:]), torch.nan) if out is None else out
        out[:, rows] = y
    assert out is not None
    return out


@each_op
@pytest.mark.parametrize("step", [7, 1])
def test_steps_give_what_the_whole_sequence_gives(
    spec: OpSpec, function: Callable[..., torch.Tensor], step: int
) -> None:
    whole, cut = long_sample(spec), long_sample(spec)

    expected = function(**whole)[:, : sum(LENGTHS)]
    found = in_steps(function, cut, step)

    assert expected.isfinite().all()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(cut["state"], whole["state"], rtol=1e-4, atol=1e-5, equal_nan=True)


@each_op
def test_only_the_slots_of_sequences_with_tokens_are_written(
    spec: OpSpec, function: Callable[..., torch.Tensor]
) -> None:
    for sample in samples_of(spec, Draw(torch.float32, torch.device("cpu"))):
        before = sample["state"].clone()
        lengths = sample["cu_seqlens"].diff()
        named = sample["slots"][(lengths > 0) & (sample["slots"] >= 0)].tolist()
        function(**sample)

        for slot, (old, new) in enumerate(zip(before, sample["state"], strict=True)):
            if slot in named:
                assert new.isfinite().all()
                assert new.numel() == 0 or not torch.equal(old, new)
            else:
                assert torch.equal(old.view(torch.int32), new.view(torch.int32))


@each_op
def test_padding_gives_zeros_and_stale_states_are_not_read(spec: OpSpec, function: Callable[..., torch.Tensor]) -> None:
    for sample in samples_of(spec, Draw(torch.float32, torch.device("cpu"))):
        y = function(**sample)

        assert y.isfinite().all()
        assert not y[:, sample["cu_seqlens"][-1] :].any()


@each_op
def test_a_sequence_without_a_slot_begins_with_zeros(spec: OpSpec, function: Callable[..., torch.Tensor]) -> None:
    sample = long_sample(spec)
    sample["slots"] = torch.tensor([-1, 1, -1]).int()
    if spec.name != "precast.stateful_compress":  # whose blocks are counted by positions
        sample["kv_lens"] = sample["kv_lens"] + torch.tensor([9, 0, 1]).int()
    alone = registry.resolve(spec.name.replace("stateful_", ""), 1, torch.device("cpu"))

    found = function(**sample)
    expected = alone(**without_states(sample))

    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert sample["state"][[0, 2, 3, 4]].isnan().all()


@each_op
@pytest.mark.parametrize("form", ["reference", "implementation"])
def test_the_cache_free_form_is_the_stateful_one_with_states_of_zero(spec: OpSpec, form: str) -> None:
    alone = SPECS[spec.name.replace("stateful_", "")]
    run = alone.reference if form == "reference" else registry.resolve(alone.name, 1, torch.device("cpu"))
    for sample in samples_of(spec, Draw(torch.float32, torch.device("cpu"))):
        x = first(sample)
        zeros = fresh(sample["cu_seqlens"], sample["state"].shape[1:], x)._asdict()
        expected = spec.reference(**sample | zeros)

        torch.testing.assert_close(run(**without_states(sample)), expected, rtol=1e-4, atol=1e-5)


@each_op
def test_float64_is_computed_in_float64(spec: OpSpec, function: Callable[..., torch.Tensor]) -> None:
    sample = long_sample(spec)
    wide: dict[str, Any] = {
        name: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() and name != "state" else x
        for name, x in sample.items()
    }
    if spec.name == "precast.stateful_causal_conv":  # whose state is of x's type
        wide["state"] = wide["state"].double()

    found = function(**wide)[:, : sum(LENGTHS)]

    assert found.dtype == torch.float64
    torch.testing.assert_close(found.float(), function(**sample)[:, : sum(LENGTHS)], rtol=1e-4, atol=1e-5)
