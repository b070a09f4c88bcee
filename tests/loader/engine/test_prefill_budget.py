"""Prompts beside sequences that decode: an engine measures its steps, and takes as many tokens as are fast enough."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import VOCAB
from tiny_engine import engine_on

from precast.loader.device import Event
from precast.loader.engine.engine import Engine
from precast.loader.engine.params import SamplingParams
from precast.loader.torch_device import CpuDevice

MOST = 512
DECODING = [7, 7, 30]
PROMPTS = [[number % VOCAB, number // VOCAB, *range(3, 47)] for number in range(200)]


class At:
    """An event that is passed when it is recorded, by a device's own clock."""

    def __init__(self, device: TimedDevice) -> None:
        self.device, self.at = device, 0.0

    def record(self, stream: object = None) -> None:
        self.at = self.device.now

    def wait(self, stream: object = None) -> None:
        pass

    synchronize = wait


class TimedDevice(CpuDevice):
    """A CPU by whose clock steps take what `seconds_of` says of their tokens; `lengths` are the tokens of each."""

    def __init__(self, seconds_of: Callable[[int], float]) -> None:
        super().__init__()
        self.now = 0.0
        self.seconds_of = seconds_of
        self.lengths: list[int] = []

    def event(self, *, timed: bool = False) -> Any:
        return At(self)

    def seconds_between(self, first: Event, last: Event) -> float:
        assert isinstance(first, At)
        assert isinstance(last, At)
        return last.at - first.at

    def program(self, _: object) -> Callable[..., dict[str, torch.Tensor]]:
        """One whose calls take time and compute nothing."""

        def call(**inputs: torch.Tensor) -> dict[str, torch.Tensor]:
            self.lengths.append(inputs["input_ids"].numel())
            self.now += self.seconds_of(self.lengths[-1])
            return {"logits": torch.zeros(1, len(inputs["logit_rows"]), VOCAB)}

        return call


def engine_of(device: TimedDevice, **options: Any) -> Engine:
    return engine_on(device, sizes=(), wrap=device.program, seqs=32, slabs=700, tokens=MOST, **options)


def serve(engine: Engine, device: TimedDevice) -> list[int]:
    """One sequence decodes for a while before prompts come. The tokens of the steps in which it decodes."""
    engine.submit(DECODING, SamplingParams(max_tokens=60))
    for _ in range(6):
        engine.step()
    for prompt in PROMPTS:
        engine.submit(prompt, SamplingParams(max_tokens=1))
    while len(device.lengths) < 60:
        engine.step()
    return device.lengths[1:]


@pytest.mark.parametrize("runs_ahead", [True, False])
@pytest.mark.parametrize(("token_seconds", "expected"), [(60e-6, 320), (41e-6, 448), (1e-6, MOST), (1e-3, 160)])
def test_steps_with_prompts_take_two_and_a_half_decode_steps_at_most(
    token_seconds: float, expected: int, *, runs_ahead: bool
) -> None:
    """A decode step takes 8 ms, and a step of `expected` tokens up to 20; 128 of prompts are taken in any case."""
    device = TimedDevice(lambda num_tokens: max(8e-3, token_seconds * num_tokens))
    engine = engine_of(device, runs_ahead=runs_ahead)

    lengths = serve(engine, device)

    assert max(lengths) == expected
    assert lengths.count(expected) > 1
    assert engine.stats.prefill_budget == expected - 1


def test_the_time_of_a_pause_is_no_step_s() -> None:
    """What a caller does between steps, and a capture, are not on the device's clock between a step's two ends."""
    device = TimedDevice(lambda num_tokens: max(8e-3, 60e-6 * num_tokens))
    engine = engine_of(device)
    launch = engine._runner.launch

    def paused(*arguments: Any, **options: Any) -> Any:
        device.now += 5.0
        return launch(*arguments, **options)

    engine._runner.launch = paused  # type: ignore[method-assign]

    assert max(serve(engine, device)) == 320


def test_the_users_budget_counts() -> None:
    device = TimedDevice(lambda _: 0.01)
    engine = engine_of(device, max_prefill_tokens=37)
    assert engine.stats.prefill_budget == 37
    assert max(serve(engine, device)) == 38
    assert engine_of(device, max_prefill_tokens=10**9).stats.prefill_budget == MOST, "a step has no more"


def test_a_step_in_which_nobody_decodes_takes_all_that_it_can() -> None:
    device = TimedDevice(lambda _: 0.01)
    engine = engine_of(device, max_prefill_tokens=37)

    engine.generate(PROMPTS[:12], SamplingParams(max_tokens=1))

    assert device.lengths == [MOST, 12 * len(PROMPTS[0]) - MOST]


def test_nothing_is_measured_while_sizes_are_to_be_captured() -> None:
    engine = engine_on(CpuDevice(), tokens=MOST)
    assert engine.stats.prefill_budget == MOST
    engine.wait_until_captured()
    assert engine.stats.prefill_budget == 0, "a step without prompts comes first"
    engine.generate([DECODING], SamplingParams(max_tokens=6))
    assert engine.stats.prefill_budget == 159


@pytest.mark.parametrize("sizes", [(), (2, 8, 32)], ids=["eager", "captured"])
def test_tokens_do_not_depend_on_it(sizes: tuple[int, ...]) -> None:
    asked = [PROMPTS[0][:30], PROMPTS[1][:9], DECODING, PROMPTS[2][:17]]
    params = [SamplingParams(max_tokens=count) for count in (2, 14, 9, 5)]
    found = []
    for most in (None, 1, 7, 20):
        engine = engine_on(CpuDevice(), sizes=sizes, seqs=3, max_prefill_tokens=most)
        engine.wait_until_captured()
        found.append([output.token_ids for output in engine.generate(asked, params)])
    alone = engine_on(CpuDevice(), sizes=(), runs_ahead=False)
    expected = [alone.generate([prompt], each)[0].token_ids for prompt, each in zip(asked, params, strict=True)]
    assert found == [expected] * 4
