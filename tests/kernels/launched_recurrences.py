"""The launches of ops with a state against the references: selective scan, wkv, linear recurrence, and the delta rule
token by token and in chunks. `test_triton.py` runs this file in processes of its own, in the interpreter and on a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from captured_steps import STEPS, TOKENS, stateful_step
from op_samples.draw import Draw, Sample
from op_samples.sequences import without_states
from op_samples.table import samples_of
from strided import with_strided_caches
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from precast.kernels import registry
from precast.kernels.choices import records_of
from precast.kernels.delta_rule import launches
from precast.kernels.records import Record
from precast.kernels.spec import OpSpec

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
# The interpreter holds bfloat16 as integers, and multiplies them as such.
HALF = torch.float16 if IS_INTERPRETED else torch.bfloat16
SPECS = {spec.name: spec for spec in registry.specs()}
CHUNK = 32
"""Tokens of a chunk in float32."""
Function = Callable[..., torch.Tensor]


class Case(NamedTuple):
    """An op without `stateful_`, the end of its record's name, and sizes."""

    op: str
    variant: str
    sizes: dict[str, Any]

    def record(self, form: str) -> Record:
        """The record of a form of the op."""
        name = f"triton.{form}{self.op}{self.variant}"
        return next(each for each in records_of(f"precast.{form}{self.op}", 1) if each.name == name)


SMALL = [
    Case("delta_rule", "", {"size": 6, "value": 9, "heads": 2}),
    Case("delta_rule", ".few", {"size": 6, "value": 9, "heads": 2}),
    Case("delta_rule", ".walk", {"size": 10, "value": 5, "heads": 2, "rowwise": True}),
    Case("selective_scan", "", {"channels": 70, "width": 16}),
    Case("wkv", "", {"channels": 130}),
    Case("linear_recurrence", "", {"channels": 200}),
]
ODD = [
    *SMALL,
    Case("delta_rule", "", {"size": 72, "value": 40, "keys": 1, "heads": 2}),
    Case("delta_rule", ".walk", {"size": 72, "value": 20, "keys": 1, "heads": 2}),
    Case("delta_rule", ".walk", {"size": 128, "value": 8, "rowwise": True, "heads": 2}),
    Case("selective_scan", "", {"channels": 1, "width": 1}),
    Case("selective_scan", "", {"channels": 9, "width": 100}),
    Case("linear_recurrence", "", {"channels": 1, "kind": "max"}),
]
LARGE = [
    Case("delta_rule", "", {"size": 128, "value": 128, "keys": 16, "heads": 32}),
    Case("delta_rule", "", {"size": 256, "value": 96, "keys": 1, "heads": 2}),
    Case("delta_rule", ".few", {"size": 128, "value": 128, "keys": 16, "heads": 32}),
    Case("delta_rule", ".walk", {"size": 96, "value": 72, "keys": 4, "heads": 4, "rowwise": True}),
    Case("delta_rule", ".walk", {"size": 512, "value": 256}),
    Case("selective_scan", "", {"channels": 8192, "width": 16}),
    Case("wkv", "", {"channels": 4096}),
    Case("linear_recurrence", "", {"channels": 2560}),
]
"""Sizes of models, which the interpreter would take minutes for."""

each_small = pytest.mark.parametrize("case", SMALL, ids=str)


@pytest.fixture(autouse=True)
def chunks_of_two_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks are for sequences of two tokens and more, so that short ones test them."""
    monkeypatch.setattr(launches, "WALKED", 1)


def agrees(
    spec: OpSpec, function: Function, sample: Sample, same: Callable[..., None], *, in_tf32: bool = False
) -> None:
    """Both give the same result and states, of which those that nobody writes stay as they are, bit by bit.

    `in_tf32`: states come from products in TF32, and agree within 1e-3 of their numbers, and 6e-4.
    """
    at_home = {name: x.cpu().clone() if isinstance(x, torch.Tensor) else x for name, x in sample.items()}
    expected = spec.reference(**at_home)
    found = function(**sample)

    same(spec, found.cpu(), expected)
    if in_tf32:
        torch.testing.assert_close(sample["state"].cpu(), at_home["state"], rtol=1e-3, atol=6e-4, equal_nan=True)
    elif "state" in sample:
        same(spec, sample["state"].cpu(), at_home["state"])


def takes(case: Case, sample: Sample) -> bool:
    """Whether the record computes the sample, and the interpreter within a second."""
    is_walk = case.variant in (".few", ".walk")
    if IS_INTERPRETED and is_walk and len(sample["q"][0]) > 20:
        return False
    decay = sample.get("decay")
    return case.op != "delta_rule" or is_walk or decay is None or decay.dim() == 3


@pytest.mark.parametrize("form", ["stateful_", ""])
@each_small
def test_samples(case: Case, form: str, same: Callable[..., None]) -> None:
    spec, function = SPECS[f"precast.{form}{case.op}"], registry.function_of(case.record(form))
    for sample in samples_of(spec, Draw(torch.float32, DEVICE)):
        if takes(case, sample):
            agrees(spec, function, sample, same)


@pytest.mark.parametrize("case", ODD if IS_INTERPRETED else [*ODD, *LARGE], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_odd_sizes(case: Case, dtype: torch.dtype, same: Callable[..., None]) -> None:
    sample = stateful_step(case.op, Draw(dtype, DEVICE), "mixed", **case.sizes)
    function = registry.function_of(case.record("stateful_"))
    in_chunks = case.op == "delta_rule" and not case.variant

    agrees(SPECS[f"precast.stateful_{case.op}"], function, sample, same, in_tf32=in_chunks and dtype == HALF)


@pytest.mark.parametrize("step", [step for step in STEPS if step != "mixed"])
@each_small
def test_steps_of_one_shape(case: Case, step: str, same: Callable[..., None]) -> None:
    sample = stateful_step(case.op, Draw(torch.float32, DEVICE), step, **case.sizes)

    agrees(SPECS[f"precast.stateful_{case.op}"], registry.function_of(case.record("stateful_")), sample, same)


@each_small
def test_results_are_written_into_what_is_given(case: Case, same: Callable[..., None]) -> None:
    sample = stateful_step(case.op, Draw(torch.float32, DEVICE), "mixed", **case.sizes)
    for form, given in (("stateful_", sample), ("", without_states(sample))):
        spec = SPECS[f"precast.{form}{case.op}"]
        kept = {"state": given["state"].clone()} if form else {}
        expected = spec.reference(**given | kept)
        out = torch.full_like(expected, float("nan"))

        assert registry.function_of(case.record(form))(**given, out=out) is out
        same(spec, out, expected)
        assert not out[:, TOKENS - 2 :].any()


@each_small
def test_slots_far_apart(case: Case, same: Callable[..., None]) -> None:
    sample = stateful_step(case.op, Draw(torch.float32, DEVICE), "full", **case.sizes)
    spread, between = with_strided_caches(sample)

    agrees(SPECS[f"precast.stateful_{case.op}"], registry.function_of(case.record("stateful_")), spread, same)
    assert all(bool((gap == 0xFF).all()) for gap in between)


def chunked() -> Function:
    """The stateful delta rule in chunks."""
    return registry.function_of(Case("delta_rule", "", {}).record("stateful_"))


def prompts(draw: Draw, lengths: list[int], *, heads: int = 2, size: int = 8, value: int = 5) -> Sample:
    """Sequences of a delta rule, each of which has had one token before; the last of `lengths` is padding."""
    own, total = lengths[:-1], sum(lengths)
    ends = torch.tensor([0, *own]).cumsum(0).int().to(DEVICE)
    return {
        "q": draw.normal(1, total, 1, size), "k": draw.normal(1, total, 1, size),
        "v": draw.normal(1, total, heads, value), "beta": draw.uniform(1, total, heads),
        "decay": -draw.uniform(1, total, heads, high=0.3, dtype=torch.float32),
        "state": draw.normal(len(own), heads, size, value, dtype=torch.float32),
        "slots": torch.arange(len(own), dtype=torch.int32, device=DEVICE), "cu_seqlens": ends,
        "kv_lens": ends.diff() + 1, "scale": size**-0.5, "normalise": True,
    }  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_prompts_around_a_chunk(dtype: torch.dtype, same: Callable[..., None]) -> None:
    lengths = [1, 2, CHUNK - 1, CHUNK, 0, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1, 3]

    sample = prompts(Draw(dtype, DEVICE), lengths)
    agrees(SPECS["precast.stateful_delta_rule"], chunked(), sample, same, in_tf32=dtype == HALF)


@pytest.mark.parametrize("tile", [launches.Tile(64, 32, 4, 2), launches.Tile(32, 16, 4, 1)], ids=str)
@pytest.mark.parametrize("lengths", [[1, 63, 65, 0, 4, 7], [33, 0], [2, 2, 2, 2, 1]], ids=str)
def test_nothing_is_touched_beyond_the_workspace(
    lengths: list[int], tile: launches.Tile, monkeypatch: pytest.MonkeyPatch, same: Callable[..., None]
) -> None:
    """What lies around it, and in it before, are bytes that make no number; so are the padding's tokens."""
    around, made = 4096, []
    empty = torch.empty

    def within_guards(*size: Any, **more: Any) -> torch.Tensor:
        if more.get("dtype") != torch.uint8:
            return empty(*size, **more)
        made.append(torch.full((size[0] + 2 * around,), 0xFF, **more))
        return made[-1][around:-around]

    monkeypatch.setattr(launches, "tile_of", lambda use: tile)
    sample = prompts(Draw(HALF, DEVICE), lengths)
    for name in ("q", "k", "v", "decay", "beta"):
        sample[name][:, sum(lengths[:-1]) :] = float("nan")
    monkeypatch.setattr(torch, "empty", within_guards)

    agrees(SPECS["precast.stateful_delta_rule"], chunked(), sample, same, in_tf32=True)
    (workspace,) = made
    assert bool((workspace[:around] == 0xFF).all())
    assert bool((workspace[-around:] == 0xFF).all())


def test_more_sequences_than_are_looked_at_together(same: Callable[..., None]) -> None:
    """Of which few are computed in chunks."""
    lengths = [CHUNK + 5 if i in (3, 127, 128, 140) else i % 2 for i in range(150)]

    agrees(SPECS["precast.stateful_delta_rule"], chunked(), prompts(Draw(torch.float32, DEVICE), [*lengths, 0]), same)


@pytest.mark.parametrize("walked", [0, 1])
def test_short_sequences_are_walked_beside_long_ones(
    walked: int, monkeypatch: pytest.MonkeyPatch, same: Callable[..., None]
) -> None:
    monkeypatch.setattr(launches, "WALKED", 7 + walked)
    lengths = [8, 1, 40, 7, 9, 0]

    agrees(SPECS["precast.stateful_delta_rule"], chunked(), prompts(Draw(torch.float32, DEVICE), lengths), same)


@pytest.mark.parametrize("steep", [-1e4, -float("inf")])
def test_steep_decays_neither_overflow_nor_blur_the_others(steep: float) -> None:
    sample = prompts(Draw(torch.float32, DEVICE), [150, 0])
    sample["decay"] *= 0.01
    sample["decay"][:, 3::20] = steep
    kept = {"state": sample["state"].clone()}

    expected = SPECS["precast.stateful_delta_rule"].reference(**sample | kept)

    torch.testing.assert_close(chunked()(**sample), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sample["state"], kept["state"], rtol=1e-5, atol=1e-5)


def test_equal_keys_are_solved_exactly() -> None:
    """Powers of the triangular matrix, all ones, have numbers of eighteen digits: no sum of them is exact."""
    sample = prompts(Draw(torch.float32, DEVICE), [3 * CHUNK, 0])
    sample["k"][:] = sample["k"][:, :1].clone()
    sample["beta"][:] = 1.0
    sample["decay"][:] = 0.0

    expected = SPECS["precast.stateful_delta_rule"].reference(**sample | {"state": sample["state"].clone()})

    torch.testing.assert_close(chunked()(**sample), expected, rtol=1e-5, atol=2e-6)


def test_a_sequence_gets_the_same_bits_in_any_company() -> None:
    draw = Draw(torch.float32, DEVICE)
    mixed, other = prompts(draw, [40, 1, 70, 3]), prompts(draw, [5, 70, 1])
    for name in ("q", "k", "v", "decay", "beta"):
        other[name][:, 5:75] = mixed[name][:, 41:111]
    other["state"][1] = mixed["state"][2]

    assert torch.equal(chunked()(**mixed)[:, 41:111], chunked()(**other)[:, 5:75])
    assert torch.equal(mixed["state"][2], other["state"][1])


@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter has no bfloat16")
@pytest.mark.parametrize("decays", [0.0, 0.5])
def test_halves_drift_no_more_than_those_of_transformers(decays: float) -> None:
    """Keys that are much alike, of the size of Qwen3-Next: what is written depends on all that was."""
    draw = Draw(torch.bfloat16, DEVICE)
    sample = prompts(draw, [1000, 0], heads=4, size=128, value=128)
    sample["k"] += draw.normal(1, 1, 1, 128)
    sample["decay"] *= decays
    wide = {name: x.double() if torch.is_tensor(x) and x.is_floating_point() else x for name, x in sample.items()}
    exact = SPECS["precast.stateful_delta_rule"].reference(**wide)
    q, k = (sample[name].expand(-1, -1, 4, -1) for name in "qk")
    theirs, _ = torch_chunk_gated_delta_rule(
        q, k, sample["v"], g=sample["decay"], beta=sample["beta"], initial_state=sample["state"],
        output_final_state=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    found = chunked()(**sample)

    drifts = [float((y.double() - exact).pow(2).mean().sqrt()) for y in (found, theirs)]
    assert drifts[0] <= 1.1 * drifts[1]
