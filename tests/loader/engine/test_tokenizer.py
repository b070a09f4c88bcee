"""Text as it grows: whole characters, right spaces, nothing of a stop string."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers_by_hand import (
    byte_level,
    byte_pairs,
    letters,
    sentencepiece,
    with_front,
    with_padding_and_truncation,
    without_text,
)

from precast.ir.errors import BundleError, RequestError
from precast.loader.engine.tokenizer import AnswerText, Tokenizer, check_tokenizer


def tokenizer(data: bytes) -> Tokenizer:
    made = Tokenizer.from_files({"tokenizer.json": data, "tokenizer_config.json": b"{}"})
    assert made is not None
    return made


BYTES, PIECES, LETTERS = tokenizer(byte_level()), tokenizer(sentencepiece()), tokenizer(letters(48))
MUTE = tokenizer(without_text(letters(48), "a"))
BYTE_IDS = [i for i in range(262) if i > 2]


def grown(made: Tokenizer, prompt: list[int], ids: list[int], stop: tuple[str, ...] = ()) -> tuple[list[str], bool]:
    """The text that each token gives out, and last what the end does; whether a stop string ended it."""
    text, given_out = AnswerText(made, prompt, stop), []
    for token in ids:
        text.push(token)
        given_out.append(text.read())
    given_out.append(text.read(final=True))
    return given_out, text.stopped


def test_text_gets_the_special_tokens_of_its_tokenizer() -> None:
    assert BYTES.encode("he")[0] == 0
    assert BYTES.decode(BYTES.encode("hello world")) == "hello world"


def test_a_long_text_is_encoded_as_a_short_one() -> None:
    words = BYTES.encode("hello world", add_special_tokens=False)
    long = BYTES.encode("hello world" * 2000)

    assert long == [0] + words * 2000
    assert BYTES.encode("hello world" * 2000, add_special_tokens=False) == words * 2000


def test_truncation_and_padding_of_the_file_are_not_applied() -> None:
    plain = BYTES.encode("hello world")
    assert tokenizer(with_padding_and_truncation(byte_level())).encode("hello world") == plain
    assert tokenizer(with_padding_and_truncation(byte_level())).encode("h") == BYTES.encode("h")


def test_text_that_is_not_unicode_is_refused() -> None:
    with pytest.raises(RequestError, match="a lone surrogate at character 2") as error:
        BYTES.encode("ab\ud800")
    assert error.value.code == "prompt-invalid"


@pytest.mark.parametrize(
    "data",
    [b"{", b'{"model": {"type": "odd"}}', b'{"model": {"type": "\xff"}}', b'{"x": ' + b"[" * 100_000],
    ids=["no JSON", "an unknown kind", "no UTF-8", "nested too deep"],
)
def test_a_file_that_is_damaged_is_refused_before_the_weights_are_read(data: bytes) -> None:
    with pytest.raises(BundleError) as error:
        check_tokenizer({"tokenizer.json": data})
    assert (error.value.code, error.value.where) == ("tokenizer-invalid", "tokenizer.json")


def odd(model: dict[str, Any], decoder: dict[str, Any] | None) -> Tokenizer:
    """A tokenizer that the library reads, and fails with later."""
    absent = dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor"))
    content = {"version": "1.0", "added_tokens": [], "model": model, "decoder": decoder, **absent}
    return tokenizer(json.dumps(content).encode())


def test_text_that_the_library_cannot_encode_is_the_tokenizers_fault() -> None:
    made = odd({"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "none"}, None)

    assert made.encode("a") == [0]
    with pytest.raises(RequestError, match=r"tokenizer\.json: the tokenizers library .* can't encode with it") as error:
        made.encode("b")
    assert error.value.code == "tokenizer-invalid"


def test_a_panic_of_the_library_is_an_error_as_any_other() -> None:
    strip = {"type": "Strip", "content": " ", "start": 0, "stop": 2}  # of a token that is shorter
    made = odd({"type": "BPE", "vocab": {" ": 0}, "merges": []}, strip)

    with pytest.raises(RequestError, match=r"tokenizer\.json: the tokenizers library .* can't decode with it") as error:
        made.decode([0])
    assert error.value.code == "tokenizer-invalid"


@pytest.mark.parametrize("text", [5, None, b"a", ["a"]])
def test_what_is_no_text_is_not_encoded(text: Any) -> None:
    with pytest.raises(RequestError, match=f"the text is a {type(text).__name__}, expected a string") as error:
        BYTES.encode(text)
    assert error.value.code == "prompt-invalid"
    with pytest.raises(RequestError, match="add_special_tokens is 0, expected True or False"):
        BYTES.encode("a", add_special_tokens=0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ids", "code", "message"),
    [
        ([3, -1], "token-out-of-range", "token 1 of what is decoded is -1, expected 0 to 4294967295"),
        (array("q", [2**32]), "token-out-of-range", "token 0 of what is decoded is 4294967296"),
        ([10**5000], "token-out-of-range", "token 0 of what is decoded is an integer of 16610 bits, no 64-bit id"),
        ([3.0], "prompt-invalid", r"token 0 of what is decoded is 3.0 \(float\), expected an integer token id"),
        ([True], "prompt-invalid", r"token 0 of what is decoded is True \(bool\)"),
        ("ab", "prompt-invalid", "what is decoded is a str, expected a list of token ids"),
        (3, "prompt-invalid", "what is decoded is a int"),
        (None, "prompt-invalid", "what is decoded is a NoneType"),
    ],
)
def test_what_are_no_token_ids_is_not_decoded(ids: Any, code: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as error:
        BYTES.decode(ids)
    assert error.value.code == code


def test_token_ids_of_other_libraries_are_decoded() -> None:
    ids = BYTES.encode("hello")
    for given_ids in (tuple(ids), np.array(ids), torch.tensor(ids), array("q", ids), [*ids, 2**31]):
        assert BYTES.decode(given_ids) == "hello"  # type: ignore[arg-type]


# --- special tokens --------------------------------------------------------------------------------------------

BOS, PAD, EOS = 0, 1, 2
FRONTS = [
    # in front, behind, text, the ids of "hello" put for `...`
    ("<s>", "", "hello", [BOS, ...]),
    ("<s>", "", "<s>hello", [BOS, ...]),
    ("<s>", "", "<s><s>hello", [BOS, BOS, ...]),
    ("<s>", "", "</s>hello", [BOS, EOS, ...]),
    ("<s>", "", "<s>", [BOS]),
    ("<s>", "</s>", "<s>hello</s>", [BOS, ..., EOS, EOS]),
    ("<s> <pad>", "", "<s><pad>hello", [BOS, PAD, ...]),
    ("<s> <pad>", "", "<s>hello", [BOS, PAD, BOS, ...]),
    ("<s> </s>", "</s>", "<s>", [BOS, EOS, BOS, EOS]),
    ("", "</s>", "<s>hello", [BOS, ..., EOS]),
    ("", "", "<s>hello", [BOS, ...]),
]


@pytest.mark.parametrize(("front", "back", "text", "expected"), FRONTS)
def test_what_begins_as_its_tokenizer_would_begin_it_is_not_begun_twice(
    front: str, back: str, text: str, expected: list[Any]
) -> None:
    made = tokenizer(with_front(byte_level(), front, back))
    hello = BYTES.encode("hello")[1:]
    assert made.encode(text) == [each for part in expected for each in (hello if part is ... else [part])]


@pytest.mark.parametrize("text", ["hello", "<s>hello", "<s><s>hello</s>"])
def test_nothing_is_put_around_a_text_that_is_whole(text: str) -> None:
    made = tokenizer(with_front(byte_level(), "<s>", "</s>"))
    ids = made.encode(text, add_special_tokens=False)
    assert (ids.count(BOS), ids.count(EOS)) == (text.count("<s>"), text.count("</s>"))
    assert made.decode(ids) == "hello"


# --- files -----------------------------------------------------------------------------------------------------


def test_no_tokenizer_file_is_no_tokenizer() -> None:
    assert Tokenizer.from_files({"tokenizer_config.json": b"{}"}) is None


@pytest.mark.parametrize("data", [b"", b"{", b'{"model": 3}', b"\xff"])
def test_a_file_that_is_no_tokenizer_is_refused(data: bytes) -> None:
    with pytest.raises(BundleError, match=r"tokenizer\.json: the tokenizers library .* can't read it") as error:
        Tokenizer.from_files({"tokenizer.json": data})
    assert error.value.code == "tokenizer-invalid"


def test_a_character_comes_out_whole() -> None:
    ids = BYTES.encode("a€b")[1:]  # 1, 3 and 1 bytes
    assert grown(BYTES, [], ids)[0] == ["a", "", "", "€", "b", ""]


def test_an_unfinished_character_comes_out_at_the_end() -> None:
    ids = BYTES.encode("a€")[1:-1]
    assert grown(BYTES, [], ids)[0] == ["a", "", "", "\ufffd"]


def test_spaces_between_words_are_kept() -> None:
    he, said, dot = (PIECES._inner.token_to_id(piece) for piece in ("▁he", "▁said", "."))
    assert grown(PIECES, [], [he, said, dot, he])[0] == ["he", " said", ".", " he", ""]
    assert grown(PIECES, [he], [said, he])[0] == [" said", " he", ""]  # the answer goes on after the prompt
    assert grown(PIECES, [1], [said, he])[0] == ["said", " he", ""]  # a special token is no text


def test_a_special_token_is_no_text_and_loses_no_space() -> None:
    he, said = (PIECES._inner.token_to_id(piece) for piece in ("▁he", "▁said"))
    assert grown(PIECES, [], [he, 2, said])[0] == ["he", "", " said", ""]


def test_tokens_without_text_lose_none() -> None:
    for between in (1, 7, 8, 30):
        given_out, _ = grown(MUTE, [], MUTE.encode("b" + "a" * between + "cd"))
        assert given_out == ["b", *[""] * between, "c", "d", ""]


def test_bytes_of_a_fallback_come_out_as_a_character() -> None:
    ids = [byte + 3 for byte in "€".encode()]
    assert grown(PIECES, [], [*ids, PIECES._inner.token_to_id("o")])[0] == ["", "", "€", "o", ""]


@given(st.text(min_size=1, max_size=30), st.integers(0, 12))
def test_joined_texts_are_the_text_of_all_tokens(text: str, split: int) -> None:
    for made in (BYTES, PIECES):
        ids = made.encode(text)
        prompt, answer = ids[:split], ids[split:]
        if made.decode(prompt).endswith("\ufffd") or not made.decode(prompt).strip(" "):
            continue  # the prompt ends within a character, or is no text at all
        whole = made.decode(ids)[len(made.decode(prompt)) :]
        assert "".join(grown(made, prompt, answer)[0]) == whole


@given(st.lists(st.sampled_from(BYTE_IDS), max_size=40))
def test_any_bytes_joined_are_the_text_of_all_tokens(ids: list[int]) -> None:
    assert "".join(grown(BYTES, [], ids)[0]) == BYTES.decode(ids)


@given(st.lists(st.sampled_from(BYTE_IDS), max_size=40), st.sets(st.integers(0, 40)))
def test_when_text_is_read_makes_no_difference(ids: list[int], reads: set[int]) -> None:
    text, joined = AnswerText(BYTES, [], ()), ""
    for place, token in enumerate(ids):
        text.push(token)
        joined += text.read() if place in reads else ""
    assert joined + text.read(final=True) == BYTES.decode(ids)


JUNK = (
    b"\x80\xe2", b"\xe2\x82", b"\xac\xe2", b"\xef\xbf", b"\xbd\xef", b"\xbd\xef\xbf", b"\xef\xbf\xbd", b"\xf0\x9f",
    b"\x98\x80", b"\x80\x80", b"\xff\xff", b" a\xe2",
)  # fmt: skip
PAIRS = tokenizer(byte_pairs(JUNK))
JUNK_IDS = [*range(259, 259 + len(JUNK)), *(byte + 3 for byte in b"\x80\x82\xac\xbd\xbf\xe2\xef\xf0\xff a"), 0, 2, 5000]
"""Bytes of which any may or may not go on to a character, special tokens, and an id that the tokenizer doesn't know."""

runs = st.lists(st.tuples(st.lists(st.sampled_from(JUNK_IDS), min_size=1, max_size=3), st.integers(1, 12)), max_size=5)
places = st.sets(st.integers(0, 60)) | st.none()
"""After which tokens the text is read; None: after each."""


def read_at(made: Tokenizer, ids: Sequence[int], reads: set[int] | None) -> str:
    text, joined = AnswerText(made, [], ()), ""
    for place, token in enumerate(ids):
        text.push(token)
        joined += text.read() if reads is None or place in reads else ""
    return joined + text.read(final=True)


@given(runs, places)
@example([([259], 30)], None)
@example([([261, 260], 20)], None)
@example([([0xE2 + 3], 1), ([2], 12), ([0x82 + 3, 0xAC + 3], 1)], None)
def test_long_runs_of_any_bytes_joined_are_the_text_of_all_tokens(
    runs: list[tuple[list[int], int]], reads: set[int] | None
) -> None:
    ids = [token for some, times in runs for token in some * times]
    assert read_at(PAIRS, ids, reads) == PAIRS.decode(ids)


characters = st.sampled_from(["\ufffd", "€", "😀", "\n", "é", "o"])


@given(st.lists(st.tuples(characters, st.integers(1, 8)), max_size=6), places)
@example([("\ufffd", 12)], None)
@example([("\n", 12), ("€", 1)], {13})
def test_characters_of_a_fallback_to_bytes_come_out_whole(runs: list[tuple[str, int]], reads: set[int] | None) -> None:
    """One byte of no character would spoil all that stand beside it."""
    text = "".join(letter * times for letter, times in runs)
    ids = [byte + 3 for byte in text.encode()]
    assert read_at(PIECES, ids, reads) == text


class Counting(Tokenizer):
    """Counts the ids that it decodes."""

    num_decoded = 0

    def decode(self, token_ids: Sequence[int]) -> str:
        self.num_decoded += len(token_ids)
        return super().decode(token_ids)


@pytest.mark.parametrize(
    ("made", "run"),
    [
        (BYTES, [0x80 + 3]),
        (PAIRS, [259]),
        (PAIRS, [261]),
        (PAIRS, [265]),
        (PAIRS, [0xEF + 3, 0xBF + 3, 0xBD + 3]),
        (PAIRS, [2]),
        (PAIRS, [5000]),
        (PIECES, [0x80 + 3]),
        (PIECES, [0xEF + 3, 0xBF + 3, 0xBD + 3]),
        (PIECES, [2]),
        (MUTE, [3]),
    ],
)
@pytest.mark.parametrize("stop", [(), ("a stop string",)])
def test_work_is_in_proportion_to_the_answer(made: Tokenizer, run: list[int], stop: tuple[str, ...]) -> None:
    counting = Counting(made._inner)
    ids = (run * 3000)[:3000]

    given_out, _ = grown(counting, [], ids, stop)

    assert counting.num_decoded < 30 * len(ids)
    assert "".join(given_out) == made.decode(ids)
    silences = [len(list(tokens)) for text, tokens in groupby(given_out) if text == ""]
    assert max(silences) < 20 or made.decode(ids) == "", "what is no character was kept back"


def test_what_may_become_a_stop_string_is_held_back() -> None:
    given_out, stopped = grown(LETTERS, [], LETTERS.encode("xabaabcy"), stop=("abc",))
    assert given_out == ["x", "", "", "ab", "a", "", "", "", ""]  # x | a, ab -> aba | aa -> a | ab | abc
    assert stopped


def test_what_did_not_become_a_stop_string_comes_out_at_the_end() -> None:
    assert grown(LETTERS, [], LETTERS.encode("xab"), stop=("abc",)) == (["x", "", "", "ab"], False)


def test_the_first_stop_string_counts() -> None:
    assert grown(LETTERS, [], LETTERS.encode("xbcab"), stop=("ab", "c", "bcd")) == (["x", "", "b", "", "", ""], True)
    # one token completes both: the text ends before the one that begins first
    assert grown(LETTERS, [], LETTERS.encode("xab"), stop=("b", "ab")) == (["x", "", "", ""], True)


def test_a_stop_string_that_the_end_completes_is_found() -> None:
    text = AnswerText(BYTES, [], ("\ufffd",))
    for token in BYTES.encode("a€")[1:-1]:
        text.push(token)
    assert (text.read(final=True), text.stopped) == ("a", True)


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3))
def test_stop_strings_cut_like_a_search_of_the_whole_text(text: str, stop: list[str]) -> None:
    given_out, stopped = grown(LETTERS, [], LETTERS.encode(text), tuple(stop))
    found = [text.find(each) for each in stop if each in text]
    # Read token by token, the answer ends when the first stop string is complete, and before where it begins.
    ends = [text.find(each) + len(each) for each in stop if each in text]
    expected = text
    if found:
        read = text[: min(ends)]
        expected = read[: min(read.find(each) for each in stop if each in read)]
    assert "".join(given_out) == expected
    assert stopped == bool(found)
