"""From what the user names to a config of a decoder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import families
import pytest
from transformers import CONFIG_MAPPING, AutoConfig

from precast.builder.source.facts import limit
from precast.builder.source.model_class import model_class
from precast.builder.source.source import open_source
from precast.ir.errors import BuildError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    families.make_config("llama").save_pretrained(tmp_path)
    return tmp_path


# --- sources -----------------------------------------------------------------------------------------------------


def test_a_directory_and_its_config_name_the_same_model(folder: Path) -> None:
    from_folder, from_file = open_source(folder), open_source(str(folder / "config.json"))

    assert from_folder.config.to_dict() == from_file.config.to_dict()
    assert from_folder.config.hidden_size == 48
    assert from_folder.name == str(folder)


def test_a_config_object_is_copied() -> None:
    config = families.make_config("llama")

    source = open_source(config)
    source.config.hidden_size = 7

    assert config.hidden_size == 48
    assert source.name == "LlamaConfig"
    assert source.files == {}


def test_a_hub_id_in_the_cache(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No network: what huggingface_hub has downloaded before is found by its id."""
    cache = tmp_path / "hub"
    snapshot = cache / "models--somebody--tiny" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (cache / "models--somebody--tiny" / "refs").mkdir()
    (cache / "models--somebody--tiny" / "refs" / "main").write_text("abc")
    (snapshot / "config.json").write_bytes((folder / "config.json").read_bytes())
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))

    source = open_source("somebody/tiny")

    assert source.name == "somebody/tiny"
    assert source.config.hidden_size == 48

    (snapshot / "config.json").unlink()
    with pytest.raises(BuildError, match=r"somebody/tiny on the hub has no config.json") as error:
        open_source("somebody/tiny")
    assert error.value.code == "config-missing"


def test_a_model_that_transformers_took_over(folder: Path) -> None:
    """Its config still names the code that it came with; transformers has the architecture itself."""
    entries = json.loads((folder / "config.json").read_text())
    code = {"AutoConfig": "configuration_llama.LlamaConfig", "AutoModelForCausalLM": "modeling_llama.LlamaForCausalLM"}
    (folder / "config.json").write_text(
        json.dumps({**entries, "architectures": ["LlamaForCausalLM"], "auto_map": code})
    )

    assert type(open_source(folder).config).__name__ == "LlamaConfig"


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [("emu3", "Emu3ForCausalLM"), ("mllama", "MllamaForCausalLM"), ("gemma3", "Gemma3ForConditionalGeneration")],
)
def test_a_part_of_a_config_that_a_decoder_is_made_of_alone(model_type: str, architecture: str) -> None:
    """Its checkpoints are saved with that part as their config."""
    whole = CONFIG_MAPPING[model_type]()
    found = model_class(whole)
    assert found is not None

    assert found.__name__ == architecture
    assert model_class(found.config_class()) is found


@pytest.mark.parametrize("model_type", ["vit", "clip_text_model", "siglip_vision_model"])
def test_a_part_of_a_model_that_is_no_decoder(model_type: str) -> None:
    assert model_class(CONFIG_MAPPING[model_type]()) is None


# --- limits ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("wanted", "expected"), [(None, 256), (1, 1), (256, 256)])
def test_the_limit_is_the_models_or_less(wanted: int | None, expected: int) -> None:
    assert limit(families.make_config("llama"), wanted) == expected


def test_a_model_that_names_its_limit_otherwise() -> None:
    assert limit(families.make_config("gpt2-inverse-layer"), None) == 128


@pytest.mark.parametrize(("wanted", "expected"), [(None, 8192), (50_000, 50_000)])
def test_a_model_without_a_limit(wanted: int | None, expected: int) -> None:
    config: Any = AutoConfig.for_model("bloom")
    assert not hasattr(config, "max_position_embeddings")

    assert limit(config, wanted) == expected
