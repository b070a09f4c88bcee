"""How params are made from a checkpoint, by what transformers says of its models."""

from __future__ import annotations

from typing import Any

import families
import pytest
import transformers
from transformers import conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter, revert_weight_conversion

from precast.builder.capture.factory import make_module
from precast.builder.weights.recipes import ModelCheckpoint
from precast.ir.errors import BuildError
from precast.ir.graph.schema import Cast, Read, Recipe, Tie
from precast.ir.weights.recipes import leaves


def recipes_of(model: transformers.PreTrainedModel) -> dict[str, Recipe]:
    """A recipe for each entry of the model's state dict."""
    return ModelCheckpoint(model).recipes(model.state_dict())


def module(variant: str, dtype: str = "float32") -> Any:
    return make_module(families.make_config(variant), dtype)


@pytest.mark.parametrize("variant", ["llama", "gpt2-inverse-layer", "gpt_neox", "phi3", "gemma3"])
def test_recipes_read_what_save_pretrained_writes(variant: str) -> None:
    model = families.make_model(variant)
    written = revert_weight_conversion(model, dict(model.state_dict()))

    recipes = recipes_of(module(variant))

    reads = {read.tensor: read.shape for recipe in recipes.values() for read in leaves(recipe)}
    tied = set(model.all_tied_weights_keys)
    assert reads == {name: tuple(tensor.shape) for name, tensor in written.items() if name not in tied}


def test_a_renamed_tensor() -> None:
    """GPT-NeoX keeps its head as embed_out in checkpoints, and transformers calls it lm_head."""
    recipes = recipes_of(module("gpt_neox", "bfloat16"))

    assert recipes["lm_head.weight"] == Cast(Read("embed_out.weight", (131, 48)), "bfloat16")
    assert "embed_out.weight" not in recipes


def test_a_tied_param() -> None:
    recipes = recipes_of(module("llama-tied-bias"))

    assert recipes["lm_head.weight"] == Tie("model.embed_tokens.weight")
    assert recipes["model.embed_tokens.weight"] == Cast(Read("model.embed_tokens.weight", (131, 48)), "float32")


def test_untied_params_are_read() -> None:
    assert not any(isinstance(recipe, Tie) for recipe in recipes_of(module("llama")).values())


def test_integers_keep_their_type() -> None:
    model = module("llama", "bfloat16")
    model.model.register_buffer("steps", model.model.norm.weight.new_empty(3).long())

    assert recipes_of(model)["model.steps"] == Read("model.steps", (3,), "int64")


class Doubled(ConversionOps):
    """A conversion that computes, which no recipe does."""

    def convert(self, input_dict: Any, source_patterns: Any, target_patterns: Any, **kwargs: Any) -> Any:
        (tensors,) = input_dict.values()
        return {target_patterns[0]: tensors[0] * 2}

    @property
    def reverse_op(self) -> ConversionOps:
        return Doubled()


def test_a_conversion_that_no_recipe_can_say_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    conversion_mapping.get_checkpoint_conversion_mapping("llama")  # fills the table
    doubled = WeightConverter("q_proj.weight", "q_proj.weight", [Doubled()])
    table = conversion_mapping._checkpoint_conversion_mapping_cache
    monkeypatch.setitem(table, "llama", [doubled])

    with pytest.raises(
        BuildError, match=r"layers\.0\.self_attn\.q_proj\.weight is made by Doubled: .* torch's mul"
    ) as error:
        recipes_of(module("llama"))

    assert error.value.code == "recipe-unsupported"


# --- rules -------------------------------------------------------------------------------------------------------


def ignored(*patterns: str) -> set[str]:
    """What becomes of the patterns of tensors that transformers ignores."""
    model = module("llama")
    model._keys_to_ignore_on_load_unexpected = set(patterns)
    return set(ModelCheckpoint(model).known_names().ignored) - {"*rotary_emb.inv_freq"}


@pytest.mark.parametrize(
    ("pattern", "glob"),
    [
        ("attn.bias", "*attn.bias*"),
        (r"attn\.bias", "*attn.bias*"),
        (r"^model\.old", "model.old*"),
        (r"masked_bias$", "*masked_bias"),
        (r"^lm_head$", "lm_head"),
        (r"layers\.\d+\.attn", "*layers.*.attn*"),
        (r"^mtp.*weight$", "mtp*weight"),
    ],
)
def test_a_pattern_of_transformers_becomes_a_glob(pattern: str, glob: str) -> None:
    assert ignored(pattern) == {glob}


def test_a_pattern_for_where_a_part_of_a_name_begins() -> None:
    assert ignored(r"(^|\.)layers\.45\.") == {"layers.45.*", "*.layers.45.*"}


@pytest.mark.parametrize("pattern", [r"(a|b)\.bias", "h[0-9]", "a+", "a?", r"\w+", "a{2}", "layer*"])
def test_a_pattern_that_no_glob_can_say_is_left_out(pattern: str) -> None:
    assert ignored(pattern, "kept") == {"*kept*"}


def test_frequencies_that_old_checkpoints_hold_are_ignored() -> None:
    assert ModelCheckpoint(module("llama")).known_names().ignored == ("*rotary_emb.inv_freq",)


@pytest.mark.parametrize(
    ("variant", "prefix"), [("llama", "model."), ("gpt2", "transformer."), ("gpt_neox", "gpt_neox.")]
)
def test_the_base_models_prefix_is_optional(variant: str, prefix: str) -> None:
    assert ModelCheckpoint(module(variant)).known_names().optional_prefixes == (prefix,)


def test_tied_names_are_known() -> None:
    tied = ModelCheckpoint(module("llama-tied-bias")).known_names().tied

    assert tied == {"lm_head.weight": "model.embed_tokens.weight"}
    assert ModelCheckpoint(module("llama")).known_names().tied == {}
