"""Configs as their publishers have them: which open, with which facts, and which are refused, by which code.

Nothing is built here: `benchmarks/bench_published_configs.py` does that, at full size.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from precast.builder.source.facts import limit
from precast.builder.source.source import Source, open_source
from precast.ir.errors import BuildError

CONFIGS = Path(__file__).parents[2] / "configs"
EXPECTED: dict[str, dict[str, Any]] = json.loads((CONFIGS / "expected.json").read_text(encoding="utf-8"))
NAMES = sorted(path.name for path in CONFIGS.iterdir() if path.is_dir())


def facts(source: Source) -> dict[str, Any]:
    """What the builder reads from a config."""
    return {
        "dtype": source.facts.dtype,
        "quantisation": (source.facts.quantisation or {}).get("quant_method"),
        "eos": list(source.facts.eos_token_ids),
        "bos": source.facts.bos_token_id,
        "max_seq_len": limit(source.config, None),
        "tied": source.facts.tied,
    }


def come_to(name: str) -> tuple[str, dict[str, Any] | None]:
    """What a config comes to before anything is traced: `builds` and its facts, or the code of the refusal."""
    try:
        return "builds", facts(open_source(CONFIGS / name))
    except BuildError as error:
        return error.code, None


@pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning")  # transformers, of old configs
@pytest.mark.parametrize("name", NAMES)
def test_a_published_config_comes_to_what_it_must(name: str) -> None:
    expected = {entry: value for entry, value in EXPECTED[name].items() if entry != "full_build"}
    outcome = expected.pop("outcome")

    found, read = come_to(name)

    assert found == outcome
    assert read is None or read == expected


def test_each_config_has_its_expectation_and_its_source() -> None:
    readme = (CONFIGS / "README.md").read_text(encoding="utf-8")

    assert sorted(EXPECTED) == NAMES
    assert [name for name in NAMES if f"| `{name}` |" not in readme] == []


def test_whoever_names_no_dtype_is_quantised_or_of_float32() -> None:
    """If others come, what such a config is built in (`docs/capture.md`) has to be thought over."""
    texts = {name: json.loads((CONFIGS / name / "config.json").read_text(encoding="utf-8")) for name in NAMES}
    named = {name: json.dumps(text) for name, text in texts.items()}
    silent = [name for name, text in named.items() if '"dtype"' not in text and '"torch_dtype"' not in text]

    unquantised = [texts[name]["model_type"] for name in silent if EXPECTED[name]["quantisation"] is None]

    assert sorted(unquantised) == ["gpt2", "gpt_neo"]
