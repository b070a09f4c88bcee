"""How many prompt tokens a step takes beside sequences that decode, by the seconds that steps took."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from precast.loader.schedule.prefill_budget import (
    DECODE_AFTER,
    DECODE_EVERY,
    DECODES,
    FORGOTTEN_AFTER,
    MIXED,
    PrefillBudget,
)

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640)
DECODE = 0.008
"""Of 32 sequences. Two and a half times as long may a step take that computes prompts too: 20 ms."""


def budget(decodes: Sequence[float] = (DECODE,) * 3, most: int = 8192) -> PrefillBudget:
    """What has seen these steps in which 32 sequences decode."""
    made = PrefillBudget(most, SIZES)
    for seconds in decodes:
        made.measured(32, seconds, has_prompts=False)
    return made


def mixed(made: PrefillBudget, num_tokens: int, *seconds: float) -> None:
    for each in seconds:
        made.measured(num_tokens, each, has_prompts=True)


def test_steps_without_prompts_are_measured_first() -> None:
    made = budget(())
    found = []
    for _ in range(4):
        found.append(made.beside(32))
        made.measured(32, DECODE, has_prompts=False)
    assert found == [0, 0, 0, 128]


def test_steps_that_are_alike_are_measured_now_and_then_and_all_others_always() -> None:
    made, wanted = PrefillBudget(8192, SIZES), []
    for _ in range(DECODES + 2 * DECODE_EVERY):
        wanted.append(made.is_wanted(has_prompts=False))
        if wanted[-1]:
            made.measured(32, DECODE, has_prompts=False)
    assert wanted == [True] * DECODES + ([False] * (DECODE_EVERY - 1) + [True]) * 2

    mixed(made, 160, 0.008)
    assert [made.is_wanted(has_prompts=has_prompts) for has_prompts in (True, True, False)] == [True] * 3


def test_the_least_is_filled_up_to_the_next_size() -> None:
    """128 tokens of prompts, and as many as the captured size has besides."""
    made = budget()
    assert [made.beside(number) for number in (1, 32, 33, 100)] == [159, 128, 159, 156]


def test_a_larger_size_is_tried_if_its_tokens_take_no_longer_than_those_of_a_smaller_one() -> None:
    made = budget()
    mixed(made, 160, 0.008)
    assert made.beside(32) == 128, "once may be chance"
    mixed(made, 160, 0.008)
    assert made.beside(32) == 384 - 32, "384 tokens take 19.2 ms at most, 448 may take 22.4"
    mixed(made, 384, 0.016, 0.016)
    assert made.beside(32) == 448 - 32
    mixed(made, 448, 0.021, 0.021)
    assert made.beside(32) == 384 - 32, "it took more than 20 ms"


def test_a_slow_step_is_overlooked_and_two_are_not() -> None:
    made = budget()
    mixed(made, 384, *[0.019] * MIXED, 0.4)
    assert made.beside(32) == 352
    mixed(made, 384, 0.4)
    assert made.beside(32) == 128
    mixed(made, 384, *[0.019] * (MIXED - 1))
    assert made.beside(32) == 352, "one of them is long ago"


def test_steps_without_prompts_may_be_held_up() -> None:
    made = budget((0.9, DECODE, DECODE, 0.5, DECODE))
    mixed(made, 384, 0.019, 0.019)
    assert made.beside(32) == 352


def test_a_step_of_other_sequences_is_judged_by_the_ones_that_were_measured() -> None:
    """32 took 8 ms: 64 take as long at least, and 8 a fourth of it at least."""
    made = budget()
    mixed(made, 192, 0.0049, 0.0049)
    assert made.beside(64) == 768 - 64
    assert made.beside(8) == 192 - 8


def test_a_step_without_prompts_is_computed_now_and_then() -> None:
    made = budget()
    mixed(made, 160, *[0.008] * (DECODE_AFTER - 1))
    assert made.beside(32) > 0
    mixed(made, 160, 0.008)
    assert made.beside(32) == 0
    made.measured(32, DECODE, has_prompts=False)
    assert made.beside(32) > 0


def test_what_was_slow_long_ago_is_tried_again() -> None:
    made = budget()
    mixed(made, 448, 0.021, 0.021)
    found = []
    for _ in range(FORGOTTEN_AFTER + 1):
        mixed(made, 384, 0.016)
        made.measured(32, DECODE, has_prompts=False)
        found.append(made.beside(32))
    assert (found[-2], found[-1]) == (384 - 32, 448 - 32)
    mixed(made, 448, 0.021)
    assert made.beside(32) == 448 - 32, "of those that are forgotten none counts"
    mixed(made, 448, 0.021)
    assert made.beside(32) == 384 - 32


def test_steps_beyond_captured_sizes_have_sizes_too() -> None:
    made = PrefillBudget(3000, SIZES)
    for _ in range(3):
        made.measured(32, 1.0, has_prompts=False)
    mixed(made, 700, 0.75, 0.75)  # as 768
    assert made.beside(32) == 2560 - 32
    mixed(made, 2560, 0.75, 0.75)
    assert made.beside(32) == 3000 - 32, "the last size is the largest step"


@pytest.mark.parametrize(("most", "num_decodes", "expected"), [(64, 3, 61), (64, 64, 1), (129, 1, 128), (7, 0, 7)])
def test_a_step_of_few_tokens_is_not_divided(most: int, num_decodes: int, expected: int) -> None:
    """Where the least is all that the step has, nothing is to be measured."""
    assert PrefillBudget(most).beside(num_decodes) == expected
