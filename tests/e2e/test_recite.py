"""The example model, from its config to the text that it knows by heart, to the letter, in every way to ask for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from recitation import MODEL, OPENING, TEXT, line_prompts, rest, run_precast

import precast
from precast.cli.main import main

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "v1.0" / "recite.bundle"
WHOLE = precast.SamplingParams(max_tokens=600)
BOS, EOS = 1, 2
CHAT = "<|user|>Recite the Gettysburg Address.<|assistant|>"
MAX_BUNDLE_BYTES = 300_000


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recite") / "recite.bundle"
    precast.build(MODEL, path)
    return path


@pytest.fixture(scope="module")
def engine(bundle: Path) -> Iterator[precast.Engine]:
    """Steps of at most 48 tokens and 8 sequences: longer prompts are prefilled in chunks, and most have to wait."""
    with precast.load(bundle, weights=MODEL, device="cpu", max_num_seqs=8, max_num_tokens=48) as engine:
        yield engine


def half_of_the_text() -> str:
    """The text's lines up to the middle: a prompt of several chunks."""
    lines = TEXT.split("\n")
    return "\n".join(lines[: len(lines) // 2])


def test_bundle_is_small(bundle: Path) -> None:
    opened = precast.Bundle.open(bundle)
    on_disk = sum(file.stat().st_size for file in bundle.rglob("*") if file.is_file())

    tokenizer = sum(len(data) for data in opened.files("tokenizer").values())
    assert tokenizer > 0
    assert on_disk - tokenizer < MAX_BUNDLE_BYTES


def test_streams_the_text(engine: precast.Engine) -> None:
    events = list(engine.stream(OPENING, WHOLE))

    assert OPENING + "".join(event.text for event in events) == TEXT
    assert [event.finish_reason for event in events] == [None] * (len(events) - 1) + ["stop"]
    assert events[-1].token_ids == (EOS,)


def test_recites_from_every_line_in_one_batch(engine: precast.Engine) -> None:
    before = engine.stats
    prompts = line_prompts()

    outputs = engine.generate(prompts, WHOLE)

    assert [output.text for output in outputs] == [rest(prompt) for prompt in prompts]
    assert {output.finish_reason for output in outputs} == {"stop"}
    assert engine.stats.steps - before.steps < sum(len(output.token_ids) for output in outputs) / 2


def test_recites_for_token_ids_and_for_a_chat(engine: precast.Engine) -> None:
    outputs = engine.generate([[BOS], CHAT, half_of_the_text()], WHOLE)

    assert [output.text for output in outputs] == [TEXT, TEXT, rest(half_of_the_text())]


def test_requests_that_arrive_while_others_are_answered(engine: precast.Engine) -> None:
    """Each arrives five steps after the one before it; the third is prefilled in chunks beside their decoding."""
    prompts = [OPENING, line_prompts()[9], half_of_the_text(), line_prompts()[-2]]
    assert len(engine.tokenizer.encode(half_of_the_text())) > 4 * 48  # type: ignore[union-attr]
    waiting = dict(enumerate(prompts))
    texts: dict[int, str] = {}
    names: dict[int, int] = {}
    steps = 0
    while waiting or engine.has_work:
        if waiting and steps % 5 == 0:
            number = min(waiting)
            names[engine.submit(waiting.pop(number), WHOLE)] = number
        for event in engine.step():
            number = names[event.request_id]
            texts[number] = texts.get(number, "") + event.text
        steps += 1

    assert [texts[number] for number in range(len(prompts))] == [rest(prompt) for prompt in prompts]
    assert engine.stats.requests_running == 0
    engine.forget_prefixes()
    assert all(pool.pages_in_use == 0 for pool in engine.stats.pools.values())


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ("a new nation", rest(OPENING).partition("a new nation")[0]),
        (("never in it", "Liberty", "created"), rest(OPENING).partition("Liberty")[0]),
        ("equal.\n\nNow", rest(OPENING).partition("equal.\n\nNow")[0]),
    ],
)
def test_stop_strings_end_the_text_before_them(
    stop: str | tuple[str, ...], expected: str, engine: precast.Engine
) -> None:
    params = precast.SamplingParams(max_tokens=600, stop=stop)

    (output,) = engine.generate([OPENING], params)
    events = list(engine.stream(OPENING, params))

    assert (output.text, output.finish_reason) == (expected, "stop")
    assert "".join(event.text for event in events) == expected
    assert [token for event in events for token in event.token_ids] == output.token_ids


def test_beginning_of_a_stop_string_is_kept_back_and_then_given_out(engine: precast.Engine) -> None:
    last = line_prompts()[-2]
    events = list(engine.stream(last, precast.SamplingParams(max_tokens=600, stop="from the earth. Amen")))

    assert "".join(event.text for event in events) == rest(last)
    assert "from the earth." in events[-1].text
    assert events[-1].token_ids == (EOS,)


def test_length_ends_the_text(engine: precast.Engine) -> None:
    (output,) = engine.generate([OPENING], precast.SamplingParams(max_tokens=9))

    assert len(output.token_ids) == 9
    assert output.finish_reason == "length"
    assert rest(OPENING).startswith(output.text)


def test_end_of_the_text_can_be_ignored(engine: precast.Engine) -> None:
    last = line_prompts()[-1]
    (known,) = engine.generate([last], WHOLE)
    (output,) = engine.generate([last], precast.SamplingParams(max_tokens=len(known.token_ids) + 3, ignore_eos=True))

    assert output.token_ids[: len(known.token_ids)] == known.token_ids
    assert known.token_ids[-1] == EOS
    assert output.finish_reason == "length"


def test_seeds_reproduce_an_answer(engine: precast.Engine) -> None:
    """At a temperature at which the model forgets its text, alone and among others."""

    def params(seed: int | None) -> precast.SamplingParams:
        return precast.SamplingParams(max_tokens=24, temperature=4.0, top_k=50, seed=seed, ignore_eos=True)

    (alone,) = engine.generate([OPENING], params(7))
    among = engine.generate([OPENING] * 4, [params(8), params(None), params(7), params(None)])
    streamed = [token for event in engine.stream(OPENING, params(7)) for token in event.token_ids]

    assert alone.token_ids == among[2].token_ids == streamed
    assert len({tuple(output.token_ids) for output in among}) == 4


def test_recites_in_bfloat16(tmp_path: Path) -> None:
    precast.build(MODEL, tmp_path / "b", dtype="bfloat16")
    check_recitation(tmp_path / "b", device="cpu")


@pytest.mark.gpu
def test_recites_on_a_gpu() -> None:
    """From a bundle that another machine built: the target needs no transformers."""
    check_recitation(GOLDEN, device="cuda")


def check_recitation(bundle: Path, device: str) -> None:
    with precast.load(bundle, weights=MODEL, device=device, max_num_seqs=4, max_num_tokens=32) as engine:
        outputs = engine.generate([OPENING, line_prompts()[-3]], WHOLE)

    assert [output.text for output in outputs] == [rest(OPENING), rest(line_prompts()[-3])]


def test_recites_on_the_command_line(bundle: Path) -> None:
    arguments = ("run", bundle, "--weights", MODEL, "--device", "cpu", "--max-tokens", "600", "--prompt", OPENING)

    plain = run_precast(*arguments)
    several = (*arguments[:-1], line_prompts()[-3], "--token-ids", "1", "--max-num-tokens", "5", "--json")
    as_json = CliRunner().invoke(main, [str(argument) for argument in several])

    assert (plain.returncode, plain.stderr) == (0, "")
    assert plain.stdout == rest(OPENING) + "\n"
    texts = [output["text"] for output in json.loads(as_json.stdout)["outputs"]]
    assert texts == [rest(line_prompts()[-3]), TEXT]
