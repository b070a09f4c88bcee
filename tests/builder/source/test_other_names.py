"""Models under other names than transformers': which config is taken for which model, and which isn't."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from precast.builder.source.other_names import OTHER_NAMES, differences, known_as, republished
from precast.builder.source.source import open_source
from precast.ir.errors import BuildError

CONFIGS = Path(__file__).parents[2] / "configs"
PUBLISHED = {
    "kimi_k2": "moonshotai--Kimi-K2-Instruct", "minimax_m3": "MiniMaxAI--MiniMax-M3",
    "llava": "liuhaotian--llava-v1.5-7b",
}  # fmt: skip


def published(model_type: str, **changes: Any) -> dict[str, Any]:
    text = (CONFIGS / PUBLISHED[model_type] / "config.json").read_text(encoding="utf-8")
    return {**json.loads(text), **changes}


def test_each_row_has_a_published_config() -> None:
    assert OTHER_NAMES.keys() == PUBLISHED.keys()


@pytest.mark.parametrize("model_type", PUBLISHED)
def test_a_published_config_is_read_as_that_of_transformers(model_type: str) -> None:
    source = open_source(CONFIGS / PUBLISHED[model_type])

    assert source.config.model_type == OTHER_NAMES[model_type].model_type
    assert not source.has_code
    assert source.facts.notes == (
        f"its {model_type} decoder is transformers' {source.config.model_type} under another name, "
        "and is built as that",
    )
    assert source.entries["model_type"] == model_type


@pytest.mark.parametrize(
    ("model_type", "changes", "unlike"),
    [
        ("kimi_k2", {"scoring_func": "softmax"}, ("scoring_func",)),
        ("kimi_k2", {"moe_layer_freq": 2, "topk_method": "greedy"}, ("moe_layer_freq", "topk_method")),
        ("kimi_k2", {"architectures": ["KimiForCausalLM"]}, ("architectures",)),
        ("kimi_k2", {"index_topk": 2048}, ("index_topk",)),
        ("minimax_m3", {"attention_output_gate": True}, ("attention_output_gate",)),
        ("minimax_m3", {"sparse_attention_config": {"sparse_init_block": 1}}, ("sparse_attention_config",)),
        ("llava", {"architectures": ["LlavaForConditionalGeneration"]}, ("architectures",)),
        ("llava", {"text_config": {"model_type": "llama"}}, ("text_config",)),
        ("llava", {"use_alibi": True}, ("use_alibi",)),
    ],
)
def test_a_config_that_says_something_else_is_another_model(
    model_type: str, changes: dict[str, Any], unlike: tuple[str, ...]
) -> None:
    entries = published(model_type, **changes)

    assert differences(entries) == unlike
    assert known_as(entries) is None


def test_types_that_are_not_in_the_table_are_not_compared() -> None:
    assert known_as({"model_type": "llama", "anything": 1}) is None
    assert differences({"model_type": "llama", "anything": 1}) == ()


def test_sizes_and_quantisation_may_be_others() -> None:
    entries = published("kimi_k2", num_hidden_layers=2, quantization_config={"quant_method": "compressed-tensors"})

    assert known_as(entries) == OTHER_NAMES["kimi_k2"]


def test_a_refusal_names_the_entries_that_nobody_compared(tmp_path: Path) -> None:
    entries = published("kimi_k2", index_topk=2048, scoring_func="softmax")
    (tmp_path / "config.json").write_text(json.dumps(entries), encoding="utf-8")

    with pytest.raises(BuildError) as refused:
        open_source(tmp_path)

    assert refused.value.code == "remote-code"
    assert "but for index_topk, scoring_func, which nobody has compared with it" in str(refused.value)
    assert "--model-type deepseek_v3" in str(refused.value)


@pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning")  # transformers, of an old config
@pytest.mark.parametrize(
    ("name", "changes", "instead"),
    [
        ("liuhaotian--llava-v1.5-7b", {"use_alibi": True}, "llava-hf/llava-1.5-7b-hf"),
        ("THUDM--glm-4-9b", {}, "THUDM/glm-4-9b-hf"),
    ],
)
def test_a_refusal_names_where_the_model_is_published_for_transformers(
    name: str, changes: dict[str, Any], instead: str, tmp_path: Path
) -> None:
    entries = json.loads((CONFIGS / name / "config.json").read_text(encoding="utf-8")) | changes
    (tmp_path / "config.json").write_text(json.dumps(entries), encoding="utf-8")

    with pytest.raises(BuildError) as refused:
        open_source(tmp_path)

    assert instead in str(refused.value.fix)


@pytest.mark.parametrize("architectures", [None, [], "ChatGLMModel", ["LlamaForCausalLM"]])
def test_other_architectures_are_published_nowhere_else(architectures: Any) -> None:
    assert republished(architectures) is None
