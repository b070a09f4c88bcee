"""Every refusal of the builder says what to do about it."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import families
import pytest

from precast import builder
from precast.builder.build import build
from precast.ir.errors import FIXES, BuildError

SOURCES = sorted(Path(builder.__file__).parent.rglob("*.py"))


def without_fix(source: str) -> list[str]:
    """The calls of `BuildError` that name no fix, and whose code has none of its own."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    errors = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "BuildError"]
    return [
        ast.unparse(call)
        for call in errors
        if not any(keyword.arg == "fix" for keyword in call.keywords)
        and not (isinstance(call.args[0], ast.Constant) and call.args[0].value in FIXES)
    ]


def test_an_error_without_a_fix_is_found() -> None:
    assert without_fix("raise BuildError('option-invalid', message)") == ["BuildError('option-invalid', message)"]
    assert without_fix("raise BuildError('option-invalid', message, fix='do so')") == []
    assert without_fix("raise BuildError('model-unsupported', message)") == []


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: file.stem)
def test_every_error_has_a_fix(file: Path) -> None:
    assert without_fix(file.read_text(encoding="utf-8")) == []


def config_file(folder: Path, text: str) -> Path:
    (folder / "config.json").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("text", "message", "fix"),
    [
        ("{", "config.json is no JSON", "correct the file, or download it again"),
        ("[]", "config.json is no JSON object", "correct the file, or download it again"),
        ("{}", "the config's model_type is missing", "correct it in config.json: it says of what kind the model is"),
        (
            json.dumps({"model_type": "llama", "hidden_size": "wide"}),
            "transformers refuses the config",
            "correct the config: compare it with that of a published llama model",
        ),
        (
            json.dumps({"model_type": "llama", "vocab_size": 0}),
            "the config's vocab_size is 0",
            "correct vocab_size in the config",
        ),
        (
            json.dumps({"model_type": "t5"}),
            "t5 is an encoder-decoder",
            "name a decoder: a causal language model, or a multimodal model with one in it",
        ),
    ],
)
def test_what_to_do_about_a_config(text: str, message: str, fix: str, tmp_path: Path) -> None:
    with pytest.raises(BuildError) as error:
        build(config_file(tmp_path, text), tmp_path / "bundle")

    assert message in error.value.message
    assert error.value.fix == fix


@pytest.mark.parametrize(
    ("options", "fix"),
    [
        ({"page_size": 0}, "leave page_size out, to have it chosen for each group of layers"),
        ({"max_seq_len": -1}, "leave max_seq_len out, for the config's limit"),
        ({"dtype": "int8"}, "leave dtype out, for the config's"),
        ({"disabled_passes": ("match_norm",)}, "name one of match_norms, match_attention, match_rotary"),
    ],
)
def test_what_to_do_about_an_option(options: dict[str, Any], fix: str, tmp_path: Path) -> None:
    with pytest.raises(BuildError) as error:
        build(families.make_config("llama"), tmp_path / "bundle", **options)

    assert error.value.code == "option-invalid"
    assert error.value.fix == fix
