"""From what the user names to a module on the meta device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from transformers import AutoConfig

from precast.builder.factory import Source, limit, make_module, open_source
from precast.builder.routing import IMPLEMENTATION
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


def test_the_generation_config_may_be_missing() -> None:
    config = families.make_config("llama")

    assert Source("model", config, {}).generation_config() == {}
    assert Source("model", config, {"generation_config.json": b'{"eos_token_id": 3}'}).generation_config() == {
        "eos_token_id": 3
    }


# --- modules -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_module_takes_no_memory(dtype: str) -> None:
    module = make_module(families.make_config("qwen2"), dtype)

    assert all(parameter.is_meta for parameter in module.parameters())
    assert {parameter.dtype for parameter in module.parameters()} == {getattr(torch, dtype)}
    assert module.config._attn_implementation == IMPLEMENTATION
    assert not module.training


def test_the_default_dtype_stays() -> None:
    make_module(families.make_config("qwen2"), "bfloat16")

    assert torch.get_default_dtype() == torch.float32


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
