"""State space scans, linear attention and causal convolutions in Triton against the references: in Triton's interpreter
and on GPUs. `test_triton.py` runs this file in a process of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from captured_steps import STEPS, TOKENS, stateful_step
from op_samples.draw import Draw, Sample
from op_samples.sequences import state_sample, without_states
from op_samples.table import samples_of
from strided import with_strided_caches

from precast.kernels import registry
from precast.kernels.choices import records_of
from precast.kernels.launch import as_function
from precast.kernels.linear_attention import launches
from precast.kernels.records import Record
from precast.kernels.spec import OpSpec

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
# The interpreter holds bfloat16 as integers, and multiplies them as such.
HALF = torch.float16 if IS_INTERPRETED else torch.bfloat16
SPECS = {spec.name: spec for spec in registry.specs()}
SMALL: dict[str, dict[str, Any]] = {
    "state_space_scan": {"size": 5, "width": 16, "heads": 2, "groups": 1},
    "linear_attention": {"size": 10, "value": 5, "heads": 2},
    "causal_conv": {"channels": 70, "taps": 4},
}
ODD: list[tuple[str, dict[str, Any]]] = [
    *SMALL.items(),
    ("state_space_scan", {"size": 12, "width": 128, "heads": 2, "groups": 1}),
    ("state_space_scan", {"size": 33, "width": 7, "heads": 3, "groups": 3}),
    ("linear_attention", {"size": 10, "value": 5, "rowwise": True, "heads": 1}),
    ("linear_attention", {"size": 96, "value": 10, "heads": 2}),
    ("linear_attention", {"size": 256, "value": 3, "heads": 1}),
    ("linear_attention", {"size": 300, "value": 1, "heads": 1}),
    ("causal_conv", {"channels": 1, "taps": 2}),
    ("causal_conv", {"channels": 260, "taps": 6}),
    ("causal_conv", {"channels": 3, "taps": 1}),
]
LARGE: list[tuple[str, dict[str, Any]]] = [
    ("state_space_scan", {"size": 64, "width": 128, "heads": 80, "groups": 1}),
    ("state_space_scan", {"size": 64, "width": 256, "heads": 24, "groups": 8}),
    ("linear_attention", {"size": 128, "value": 128, "heads": 64}),
    ("linear_attention", {"size": 256, "value": 513, "heads": 2}),
    ("linear_attention", {"size": 72, "value": 96, "rowwise": True}),
    ("causal_conv", {"channels": 10240, "taps": 4}),
]
"""Sizes of models, which the interpreter would take minutes for."""
RECORDS = [
    record
    for name in SMALL
    for form in (f"stateful_{name}", name)
    for record in records_of(f"precast.{form}", 1)
    if record.kind == "triton" and not record.name.endswith(".walk")  # which runs what `.few` does
]
CHUNK = 64
LENGTHS = (1, CHUNK - 1, 2, CHUNK, 17, CHUNK + 1, 0, 3 * CHUNK + 5, 16)

each_record = pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
each_stateful = pytest.mark.parametrize(
    "record", [record for record in RECORDS if "stateful" in record.name], ids=lambda record: record.name
)


def name_of(record: Record) -> str:
    return record.op.removeprefix("precast.").removeprefix("stateful_")


def agrees(record: Record, sample: Sample, same: Callable[..., None]) -> None:
    """The record gives the reference's result and states; states that nobody writes stay as they are, bit by bit."""
    spec = SPECS[record.op]
    at_home = {name: x.cpu().clone() if isinstance(x, torch.Tensor) else x for name, x in sample.items()}
    expected = spec.reference(**at_home)
    found = as_function(record)(**sample, out=torch.full_like(expected, torch.nan, device=DEVICE))

    same(spec, found.cpu(), expected)
    if "state" in sample:
        same(spec, sample["state"].cpu(), at_home["state"])


def packed(name: str, draw: Draw, lengths: Sequence[int], *, padding: int = 3, **sizes: Any) -> Sample:
    """A step of sequences of these lengths, every second of which continues; the last but one has no slot."""
    sequences = [(length, length + 7 * (i % 2)) for i, length in enumerate(lengths)]
    tokens = sum(lengths) + padding
    step = stateful_step(name, draw, "nothing", **SMALL[name] | sizes)
    shape = step["state"].shape[1:]
    made: Sample = {}
    for key, x in step.items():
        is_packed = isinstance(x, torch.Tensor) and x.dim() > 2 and x.shape[:2] == (1, TOKENS)
        made[key] = draw.normal(1, tokens, *x.shape[2:], scale=0.5) if is_packed else x
        if is_packed and key == "decay":
            made[key] = -made[key].abs().float()
        if is_packed:
            made[key][:, sum(lengths) :] = float("nan")
    return made | state_sample(draw, sequences, (len(lengths) - 2,), shape, step["state"].dtype)


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of more than 64 tokens are cut into segments."""
    monkeypatch.setattr(launches, "LEAST_SEGMENT", 64)


@each_record
def test_samples(record: Record, same: Callable[..., None]) -> None:
    for sample in samples_of(SPECS[record.op], Draw(torch.float32, DEVICE)):
        decay = sample.get("decay")
        if record.name.endswith("linear_attention") and decay is not None and decay.dim() == 4:
            continue  # it takes none for each row
        if IS_INTERPRETED and record.name.endswith(".few") and sample["cu_seqlens"][-1:].sum() > 40:
            continue  # token by token, and each takes milliseconds
        agrees(record, sample, same)


@each_record
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_lengths_around_a_chunk(record: Record, dtype: torch.dtype, same: Callable[..., None]) -> None:
    # Token by token, and in the interpreter each takes milliseconds.
    lengths = (1, 2, 17, 0, 16) if record.name.endswith(".few") else LENGTHS
    sample = packed(name_of(record), Draw(dtype, DEVICE), lengths)

    agrees(record, sample if "stateful" in record.name else without_states(sample), same)


@pytest.mark.parametrize(("name", "sizes"), ODD if IS_INTERPRETED else [*ODD, *LARGE], ids=str)
def test_odd_sizes(name: str, sizes: dict[str, Any], same: Callable[..., None]) -> None:
    """In the implementation of steps of few tokens, and if its sizes allow, in that of more."""
    for record in RECORDS:
        if record.op == f"precast.stateful_{name}":
            sample = packed(name, Draw(HALF, DEVICE), (5, 1, 0, 40, 1), **sizes)
            if takes(record, sample):
                agrees(record, sample, same)


def takes(record: Record, sample: Sample) -> bool:
    if record.name != "triton.stateful_linear_attention":
        return True
    return sample["decay"].dim() < 4 and sample["q"].shape[3] <= 256


@each_stateful
@pytest.mark.parametrize("step", STEPS)
def test_steps_with_unused_sequences(record: Record, step: str, same: Callable[..., None]) -> None:
    agrees(record, stateful_step(name_of(record), Draw(torch.float32, DEVICE), step, **SMALL[name_of(record)]), same)


@pytest.mark.parametrize("name", ["state_space_scan", "linear_attention"])
def test_sequences_that_are_not_cut(name: str, monkeypatch: pytest.MonkeyPatch, same: Callable[..., None]) -> None:
    monkeypatch.setattr(launches, "ENOUGH", 1)
    for form in ("stateful_", ""):
        (record,) = (record for record in RECORDS if record.name == f"triton.{form}{name}")
        sample = packed(name, Draw(HALF, DEVICE), (150, 1, 20, 65))

        agrees(record, sample if form else without_states(sample), same)


@each_stateful
def test_slots_far_apart(record: Record, same: Callable[..., None]) -> None:
    sample = packed(name_of(record), Draw(torch.float32, DEVICE), (1, 30, 2, 1))
    spread, between = with_strided_caches(sample)

    agrees(record, spread, same)
    assert all(bool((gap == 0xFF).all()) for gap in between)


@each_stateful
def test_slices_of_a_fused_product(record: Record, same: Callable[..., None]) -> None:
    sample = packed(name_of(record), Draw(torch.float32, DEVICE), (3, 1, 25))
    for name, x in sample.items():
        if isinstance(x, torch.Tensor) and x.dim() > 2 and name != "state":
            wide = torch.stack((x, torch.full_like(x, torch.nan)), dim=-1)
            sample[name] = wide[..., 0]

    agrees(record, sample, same)


@pytest.mark.parametrize("steep", [-1e4, -float("inf")])
def test_steep_decays_neither_overflow_nor_blur_the_others(steep: float, same: Callable[..., None]) -> None:
    (record,) = (record for record in RECORDS if record.name == "triton.stateful_linear_attention")
    sample = packed("linear_attention", Draw(torch.float32, DEVICE), (150, 20, 2))
    sample["decay"] = torch.full((1, 175, 2), -0.01, device=DEVICE)
    sample["decay"][:, 3::20] = steep

    spec: OpSpec = SPECS[record.op]
    at_home = {name: x.cpu().clone() if isinstance(x, torch.Tensor) else x for name, x in sample.items()}
    torch.testing.assert_close(as_function(record)(**sample).cpu(), spec.reference(**at_home), rtol=1e-5, atol=2e-5)


def test_many_sequences_are_found_by_their_lengths(same: Callable[..., None]) -> None:
    """More of them than are looked at together, of which few are long."""
    (record,) = (record for record in RECORDS if record.name == "triton.stateful_state_space_scan")
    lengths = [20 if i in (3, 127, 128, 140) else i % 2 for i in range(150)]
    sample = packed("state_space_scan", Draw(torch.float32, DEVICE), lengths, heads=1, groups=1, size=2, width=3)

    agrees(record, sample, same)


@pytest.mark.parametrize("softplus", [True, False])
@pytest.mark.parametrize("limits", [(0.0, float("inf")), (0.3, 0.9)], ids=str)
def test_step_sizes(softplus: bool, limits: tuple[float, float], same: Callable[..., None]) -> None:
    for record in RECORDS:
        if record.op == "precast.stateful_state_space_scan":
            sample = packed("state_space_scan", Draw(torch.float32, DEVICE), (40, 3), padding=0)
            sample["dt"] = torch.linspace(-30.0, 30.0, sample["dt"].numel(), device=DEVICE).view_as(sample["dt"])
            if not softplus:
                sample["dt"] = sample["dt"].abs()
            more = {"softplus": softplus, "dt_min": limits[0], "dt_max": limits[1], "d": None, "dt_bias": None}
            agrees(record, sample | more, same)
