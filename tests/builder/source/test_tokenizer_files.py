"""The files beside a config: taken as they are, and a tokenizer of an older form converted."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import families
import pytest
import tokenizers
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from precast.builder.source.source import open_source
from precast.builder.source.tokenizer_files import read_files
from precast.ir.errors import BuildError

TEXT = "hello, hell  hé\n\N{GRINNING FACE}!"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model directory with a config and nothing else."""
    families.make_config("gpt2").save_pretrained(tmp_path)
    return tmp_path


def write_gpt2(folder: Path) -> None:
    """A tokenizer as GPT-2's repository has it: all bytes, and two merges."""
    vocabulary = {letter: index for index, letter in enumerate(bytes_to_unicode().values())}
    vocabulary |= {"he": 256, "hel": 257, "<|endoftext|>": 258}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\nh e\nhe l\n")


def test_files_are_taken_as_they_are(folder: Path) -> None:
    expected = {
        "tokenizer_config.json": b'{ "model_max_length":  7 }',
        "special_tokens_map.json": b"{}",
        "chat_template.jinja": b"{{ messages }}",
        "chat_template.json": b"{}",
        "generation_config.json": b'{"eos_token_id": 5}',
    }
    for name, content in expected.items():
        (folder / name).write_bytes(content)
    (folder / "README.md").write_text("not for the bundle")
    (folder / "model.safetensors").write_bytes(b"nor is this")

    assert read_files(folder, "model") == expected
    assert open_source(folder).files == expected


def test_a_directory_without_a_tokenizer(folder: Path) -> None:
    assert read_files(folder, "model") == {}


def test_a_tokenizer_json_goes_before_older_forms(folder: Path) -> None:
    write_gpt2(folder)
    content = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).to_str().encode()
    (folder / "tokenizer.json").write_bytes(content)

    assert read_files(folder, "model") == {"tokenizer.json": content}


def test_a_vocabulary_with_merges_is_converted(folder: Path) -> None:
    write_gpt2(folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")

    files = read_files(folder, "model")

    assert sorted(files) == ["chat_template.jinja", "tokenizer.json"]
    found = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
    expected = AutoTokenizer.from_pretrained(folder)
    assert found.encode(TEXT).ids == expected(TEXT)["input_ids"]
    assert found.encode("hello").ids[0] == 257
    assert found.decode(found.encode(TEXT).ids) == TEXT


def test_the_conversion_reads_no_other_files(folder: Path) -> None:
    """transformers would: nobody checked what they are."""
    write_gpt2(folder)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_bytes(b"\xff")
    with pytest.raises(UnicodeDecodeError):
        AutoTokenizer.from_pretrained(folder)

    assert sorted(read_files(folder, "model")) == ["tokenizer.json"]


def test_the_conversion_gives_the_same_bytes_each_time(folder: Path) -> None:
    write_gpt2(folder)

    assert read_files(folder, "model") == read_files(folder, "model")


@pytest.mark.parametrize("file", ["vocab.json", "merges.txt"])
def test_half_a_tokenizer_is_none(file: str, folder: Path) -> None:
    write_gpt2(folder)
    (folder / file).unlink()

    assert read_files(folder, "model") == {}


def test_an_older_form_that_cannot_be_read(folder: Path) -> None:
    write_gpt2(folder)
    (folder / "merges.txt").write_text("h e l l o\n")

    with pytest.raises(
        BuildError, match=r"transformers can't read the tokenizer in vocab.json and merges.txt"
    ) as error:
        read_files(folder, "my-model")

    assert error.value.code == "tokenizer-invalid"
    assert error.value.where == "my-model"
    assert "save the tokenizer as a tokenizer.json" in str(error.value)


@pytest.mark.parametrize("file", ["vocab.json", "added_tokens.json"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is no JSON"),
        ("[]", "is no JSON object but a list"),
        ('{"a": 0, "b": 16777216}', "the id of 'b' is 16777216, expected 0 to 16777215"),
        ('{"a": -1}', "the id of 'a' is -1, expected 0 to"),
        ('{"a": "1"}', "the id of 'a' is '1', expected 0 to"),
    ],
)
def test_ids_are_checked_before_a_reader_keeps_a_place_for_each(
    file: str, content: str, message: str, folder: Path
) -> None:
    write_gpt2(folder)
    (folder / file).write_text(content)

    with pytest.raises(BuildError, match=rf"my-model/{file}:? {message}") as error:
        read_files(folder, "my-model")

    assert error.value.code == "tokenizer-invalid"


def test_code_of_the_repository_is_not_run(folder: Path) -> None:
    write_gpt2(folder)
    (folder / "tokenization_mine.py").write_text("raise SystemExit('this must not run')")
    code = {"auto_map": {"AutoTokenizer": ["tokenization_mine.Tokenizer", None]}, "tokenizer_class": "MyTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(code))

    with pytest.raises(BuildError, match="transformers can't read the tokenizer") as error:
        read_files(folder, "model")

    assert error.value.code == "tokenizer-invalid"


def test_a_tokenizer_without_a_json_form(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow:
        @classmethod
        def from_pretrained(cls, *args: Any, **kwargs: Any) -> Slow:
            return cls()

    write_gpt2(folder)
    monkeypatch.setattr("transformers.AutoTokenizer", Slow)

    with pytest.raises(
        BuildError, match=r"vocab.json and merges.txt is a Slow, which has no tokenizer.json form"
    ) as error:
        read_files(folder, "model")

    assert error.value.code == "tokenizer-invalid"


# --- sentencepiece -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["sentencepiece", "google.protobuf"])
def test_a_package_that_the_conversion_needs(module: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "tokenizer.model").write_bytes(b"")
    monkeypatch.setitem(sys.modules, module, None)

    with pytest.raises(BuildError, match=r"stored as a tokenizer.model, which can't be read without") as error:
        read_files(folder, "model")

    assert error.value.code == "dependency-missing"
    assert module.rpartition(".")[2] in str(error.value.fix)


def test_a_sentencepiece_model_is_converted(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("google.protobuf", reason="transformers reads tokenizer.model with protobuf")
    sentencepiece = pytest.importorskip("sentencepiece")
    families.make_config("llama").save_pretrained(folder)
    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["hello hell he help"] * 20), model_writer=trained, vocab_size=20, model_type="bpe",
        minloglevel=2,
    )  # fmt: skip
    (folder / "tokenizer.model").write_bytes(trained.getvalue())

    files = read_files(folder, "model")

    found = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
    assert found.encode("hello help").ids == AutoTokenizer.from_pretrained(folder)("hello help")["input_ids"]
