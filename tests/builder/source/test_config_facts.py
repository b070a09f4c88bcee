"""What the manifest keeps of a config: a config agrees with itself however it is written, and with no other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import families
import pytest
import transformers

from precast.builder.source.config_facts import config_facts
from precast.builder.source.source import open_source
from precast.ir.errors import WeightsError
from precast.ir.weights.config_facts import check, differences


def raw(config: Any) -> dict[str, Any]:
    """What a checkpoint's config.json says."""
    found: dict[str, Any] = json.loads(config.to_json_string())
    return found


@pytest.mark.parametrize("variant", sorted(families.VARIANTS))
def test_a_config_does_not_differ_from_itself(variant: str, tmp_path: Path) -> None:
    config = families.make_config(variant)
    config.save_pretrained(tmp_path)
    whole = json.loads(config.to_json_string(use_diff=False))

    for source in (config, tmp_path):
        facts = config_facts(open_source(source))
        assert differences(facts, raw(config)) == []
        assert differences(facts, whole) == []


LLAMA = {
    "model_type": "llama", "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 131, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
}  # fmt: skip
NEW = LLAMA | {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}}
OLD = LLAMA | {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 500000}


def names(built_from: dict[str, Any], checkpoint: dict[str, Any], folder: Path) -> list[str]:
    """The entries in which a checkpoint's config differs from the one that was built from."""
    (folder / "config.json").write_text(json.dumps(built_from))
    return [each.name for each in differences(config_facts(open_source(folder)), checkpoint)]


def test_the_format_of_gptq_in_a_file_of_its_own(tmp_path: Path) -> None:
    """Of a checkpoint whose `config.json` says nothing of quantisation."""
    said = {"bits": 4, "group_size": 16, "desc_act": False}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "quantize_config.json").write_text(json.dumps(said))
    facts = config_facts(open_source(tmp_path))
    check(facts, tmp_path)
    (tmp_path / "quantize_config.json").write_text(json.dumps(said | {"checkpoint_format": "gptq_v2"}))

    with pytest.raises(WeightsError, match='checkpoint_format: "gptq" in the bundle, "gptq_v2" here'):
        check(facts, tmp_path)


@pytest.mark.parametrize("built_from", [NEW, OLD], ids=["new", "old"])
@pytest.mark.parametrize("checkpoint", [NEW, OLD], ids=["new", "old"])
def test_old_and_new_names_of_rope(built_from: dict[str, Any], checkpoint: dict[str, Any], tmp_path: Path) -> None:
    def other(entry: str, value: float) -> dict[str, Any]:
        changed: dict[str, Any] = json.loads(json.dumps(checkpoint))
        place = next(
            place
            for place in (changed.get("rope_parameters"), changed.get("rope_scaling"), changed)
            if place and entry in place
        )
        place[entry] = value
        return changed

    assert names(built_from, checkpoint, tmp_path) == []
    assert names(built_from, other("rope_theta", 1e4), tmp_path) == ["rope_parameters.rope_theta"]
    assert names(built_from, other("factor", 8.0), tmp_path) == ["rope_parameters.factor"]
    assert names(built_from, LLAMA, tmp_path) == [
        "rope_parameters.factor",
        "rope_parameters.rope_theta",
        "rope_parameters.rope_type",
    ]
    assert names(LLAMA, checkpoint, tmp_path) == [
        "rope_parameters.factor",
        "rope_parameters.rope_theta",
        "rope_parameters.rope_type",
    ]


GEMMA = {
    "model_type": "gemma3_text", "hidden_size": 48, "num_hidden_layers": 6, "vocab_size": 131, "head_dim": 12,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 80,
}  # fmt: skip


def test_a_rope_for_each_kind_of_layer(tmp_path: Path) -> None:
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = GEMMA | {"rope_theta": 3e5, "rope_local_base_freq": 2e4, "rope_scaling": scaling}
    ropes = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 3e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    new = GEMMA | {"rope_parameters": ropes}

    assert names(old, new, tmp_path) == names(new, old, tmp_path) == []
    local = ["rope_parameters.sliding_attention.rope_theta"]
    assert names(new, old | {"rope_local_base_freq": 1e4}, tmp_path) == local
    assert names(old, old | {"rope_local_base_freq": 1e4}, tmp_path) == local


@pytest.mark.parametrize(
    ("entry", "value"),
    [("rms_norm_eps", 1e-5), ("sliding_window", 8), ("final_logit_softcapping", 30.0), ("query_pre_attn_scalar", 99)],
)
def test_numbers_that_change_results_and_no_shape(entry: str, value: float, tmp_path: Path) -> None:
    assert names(GEMMA, GEMMA | {entry: value}, tmp_path) == [entry]
    assert names(GEMMA | {entry: value}, GEMMA, tmp_path) == [entry]
    whole = {"model_type": "gemma3", "text_config": GEMMA | {entry: value}}
    assert names(GEMMA | {entry: value}, whole, tmp_path) == []


def test_what_follows_from_other_entries_may_be_left_out(tmp_path: Path) -> None:
    """transformers fills in head_dim and num_key_value_heads where they are missing or null."""
    short = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"}
    filled = short | {"num_key_value_heads": 4, "head_dim": 12}

    for one, other in ((short, filled), (filled, short), (filled, short | {"head_dim": None})):
        assert names(one, other, tmp_path) == []


def test_the_decoder_in_a_larger_model(tmp_path: Path) -> None:
    whole = transformers.Gemma3Config(text_config=GEMMA)
    whole.save_pretrained(tmp_path)

    facts = config_facts(open_source(tmp_path))

    assert facts.part == ("text_config",)
    other = raw(whole)
    assert differences(facts, other) == []
    other["text_config"]["rms_norm_eps"] = 1e-5
    assert [each.name for each in differences(facts, other)] == ["rms_norm_eps"]


def test_what_a_config_says_that_its_class_does_not_know(tmp_path: Path) -> None:
    """Some model code reads such entries all the same; a checkpoint without them says nothing against it."""
    assert names(LLAMA | {"logit_soft_cap": 20.0}, LLAMA | {"logit_soft_cap": 30.0}, tmp_path) == ["logit_soft_cap"]
    assert names(LLAMA | {"logit_soft_cap": 20.0}, LLAMA, tmp_path) == []
    assert names(LLAMA, LLAMA | {"made_by": "somebody"}, tmp_path) == []
    assert names(LLAMA | {"temperature": 0.5}, LLAMA | {"temperature": 0.7}, tmp_path) == []


def test_the_log_of_transformers_is_as_it_was() -> None:
    before = transformers.logging.get_verbosity()
    config_facts(open_source(families.make_config("llama")))
    assert transformers.logging.get_verbosity() == before
