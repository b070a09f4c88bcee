"""`--quantise`: weights that are brought to 8 bits while they are read. The logits are those of transformers with these
weights rounded beforehand, on one rank and on several; everything else is as it was. Of `fp8-channel`, which rounds
inputs, too, there is more in `test_quantise_by_channels.py`."""

from __future__ import annotations

import re
from math import prod
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from quantised import part_of_fp8
from reference import hf_logits, relative_error
from transformers import GPT2PreTrainedModel

import precast
from precast.builder.named import QUANTISED
from precast.builder.source.shrink import random_model
from precast.check.shards import prove, unsharded
from precast.ir.artifact import Bundle
from precast.ir.errors import BuildError, WeightsError
from precast.ir.graph import symbols
from precast.ir.graph.schema import Quantise, Recipe
from precast.ir.weights import recipes

PROMPT = [5, 9, 70, 33, 12, 88]
BLOCK = (128, 128)
WIDE = {"hidden_size": 192, "intermediate_size": 320}
"""Sizes that end within a block."""
GPT2_LAYERS = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
CASES: dict[str, tuple[str, dict[str, Any], tuple[str, ...], tuple[int, ...]]] = {
    # model: (family, changes of its config, ends of the weights that are rounded, numbers of ranks)
    "llama": ("llama", WIDE, ("_proj.weight",), (2,)),
    "small": ("llama-tied-bias", {}, ("_proj.weight",), (2,)),
    "experts": ("qwen2_moe", {}, ("_proj.weight",), (2, 4)),
    "stacked experts": ("gpt_oss", {}, ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight",
                                        "experts.gate_up_proj", "experts.down_proj"), (2,)),
    "latents": ("deepseek_v3", {}, ("_proj.weight", "_mqa.weight"), (2,)),
    "stored transposed": ("gpt2", {"n_embd": 192, "n_inner": 320}, ("c_attn.weight", "c_proj.weight", "c_fc.weight"),
                          (2,)),
    "a stack for each product": ("jetmoe", {}, ("mlp.input_linear.weight", "mlp.output_linear.weight",
                                                "kv_proj.weight"), (2,)),
}  # fmt: skip


def is_quantised(recipe: Recipe) -> bool:
    return isinstance(recipe, Quantise) or any(map(is_quantised, recipes.parts(recipe)))


def rounded(model: Any, ends: tuple[str, ...], quantise: str) -> list[str]:
    """Round the weights whose names end so, as a load does, in place; their names. Experts count one by one, as the
    checkpoint stores them."""
    names = []
    kind = getattr(model.config, "model_type", "")
    for name, weight in model.named_parameters():
        if name.endswith(ends) and "kv_b_proj" not in name:
            names.append(name)
            parts = [weight.data]
            if name.endswith("experts.gate_up_proj") and kind != "gpt_oss":
                parts = list(weight.data.chunk(2, dim=1))
            for part in parts:
                is_turned = kind == "gpt2" or (kind == "gpt_oss" and part.dim() == 3)  # its outputs are columns
                outputs = (part.shape[-2], 1) if is_turned else (1, part.shape[-1])
                block = outputs if quantise == "fp8-channel" else BLOCK
                values, scales = (part_of_fp8(part, which, block) for which in ("values", "scales"))
                rows, columns = (torch.arange(part.shape[dim]) // block[dim] for dim in (-2, -1))
                part.copy_(values.float() * scales[..., rows, :][..., columns])
    return names


def of_experts(ends: tuple[str, ...], family: str) -> tuple[str, ...]:
    return (*ends, "experts.gate_up_proj", "experts.down_proj") if family != "gpt_oss" else ends


@pytest.mark.parametrize("quantise", QUANTISED)
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_rounded_weights(case: str, quantise: str, tmp_path: Path) -> None:
    family, changes, ends, worlds = CASES[case]
    config = families.make_config(family)
    for name, value in changes.items():
        setattr(config, name, value)
    model = random_model(config)
    model.save_pretrained(tmp_path / "ckpt")
    exact = hf_logits(model, [PROMPT])[0]

    options = {"dtype": "float32", "quantise": quantise, "activations": "none"}
    bundle = precast.build(tmp_path / "ckpt", tmp_path / "b", **options)

    found = precast.load(tmp_path / "b", weights=tmp_path / "ckpt", device="cpu").logits(PROMPT)
    names = rounded(model, of_experts(ends, family), quantise)
    assert relative_error(found, hf_logits(model, [PROMPT])[0]) < 2e-4
    assert relative_error(found, exact) > 1e-3
    assert_stored(bundle, model, names)
    alone = unsharded(bundle, tmp_path / "ckpt")
    for tp in worlds:
        assert prove(bundle, tmp_path / "ckpt", tp=tp, alone=alone).holds


def assert_stored(bundle: Bundle, model: Any, names: list[str]) -> None:
    """As many numbers of 8 bits as the rounded weights have, and no other param of few bits but their scales."""
    made = [param for param in bundle.graph.params if is_quantised(param.recipe)]
    values = [param for param in made if param.type.dtype == "float8_e4m3fn"]
    count = sum(model.get_parameter(name).numel() for name in names)
    assert {param.type.dtype for param in made} == {"float8_e4m3fn", "float32"}
    assert sum(prod(map(int, on_one_rank(param.type.shape))) for param in values) == count


def on_one_rank(shape: tuple[Any, ...]) -> list[int]:
    return [symbols.evaluate(size, {"tp": 1, "ep": 1, "rank": 0}) for size in shape]


def test_a_weight_that_no_op_takes_in_8_bits_is_read_as_it_is(tmp_path: Path) -> None:
    bundle = precast.build(families.make_config("deepseek_v3"), tmp_path / "b", dtype="float32", quantise="fp8")

    kept = {param.name: param for param in bundle.graph.params}["model.layers.0.self_attn.kv_b_proj.weight"]
    assert not is_quantised(kept.recipe)
    assert "precast.paged_latent_attention takes it" in bundle.provenance["not quantised"]


HEAD = {"logits are made with it": ["lm_head.weight"]}
NAMED = {
    "llama": HEAD,
    "llama-tied-bias": {"logits are made with it": ["model.embed_tokens.weight"]},
    "mamba2": HEAD,
    "qwen2_moe": HEAD | {
        "experts are chosen or weighed with it": ["model.layers.*.mlp.gate.weight",
                                                  "model.layers.*.mlp.shared_expert_gate.weight"],
    },
    "dbrx": HEAD | {
        "experts are chosen or weighed with it": ["transformer.blocks.*.ffn.router.layer.weight"],
        "DbrxExpertGLU is none of the linear layers and experts that are known": [
            "transformer.blocks.*.ffn.experts.mlp.w1_v1.reshaped_5_28_48.joined_1",
            "transformer.blocks.*.ffn.experts.mlp.w2.reshaped_5_28_48.transposed_1_2",
        ],
    },
    "jetmoe": HEAD | {
        "experts are chosen or weighed with it": ["model.layers.*.mlp.router.layer.weight",
                                                  "model.layers.*.self_attention.experts.router.layer.weight"],
        "precast.grouped_linear takes it": ["model.layers.*.self_attention.experts.input_linear.weight",
                                            "model.layers.*.self_attention.experts.output_linear.weight"],
    },
    "glm_moe_dsa": HEAD | {
        "experts are chosen or weighed with it": ["model.layers.*.mlp.gate.weight"],
        "precast.paged_sparse_latent_attention takes it": ["model.layers.*.self_attn.kv_b_proj.weight"],
        "transformers keeps it in float32": ["model.layers.*.self_attn.indexer.weights_proj.weight"],
    },
}  # fmt: skip
"""By families, the weights of products that stay as they are, by the reason: not what else has two dimensions, such as
embeddings, convolutions and recurrences."""


@pytest.mark.parametrize("quantise", QUANTISED)
@pytest.mark.parametrize("family", NAMED)
def test_all_other_weights_of_products_are_named(family: str, quantise: str, tmp_path: Path) -> None:
    """Of these no input is rounded, as of any layer of 16 bits: nothing is said of it."""
    bundle = precast.build(families.make_config(family), tmp_path / "b", dtype="float32", quantise=quantise)

    found = bundle.provenance["not quantised"]
    assert "inputs not rounded" not in bundle.provenance
    assert {reason: sorted(names) for reason, names in found.items()} == NAMED[family]


def test_a_build_that_would_quantise_nothing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GPT2PreTrainedModel, "_keep_in_fp32_modules", ["c_attn", "c_proj", "c_fc"])

    with pytest.raises(BuildError) as error:
        precast.build(families.make_config("gpt2"), tmp_path / "b", dtype="float32", quantise="fp8")

    assert error.value.code == "feature-unsupported"
    assert error.value.message.startswith("quantise='fp8', but no weight of this model can be quantised\n  ")
    names = ", ".join(f"transformer.h.*.{name}.weight.transposed" for name in GPT2_LAYERS)
    assert f"\n  {names}: transformers keeps it in float32" in error.value.message
    assert error.value.fix == "leave quantise out"
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("quantise", ["int4", "fp8_e5m2", "fp8-channels", "", 8])
def test_formats_that_are_not_known(quantise: Any, tmp_path: Path) -> None:
    message = f"quantise={quantise!r}: this is not known, expected fp8 or fp8-channel"
    with pytest.raises(BuildError, match=re.escape(message)) as error:
        precast.build(families.make_config("llama"), tmp_path / "b", quantise=quantise)

    assert error.value.code == "option-invalid"


@pytest.mark.parametrize(
    ("changes", "more", "message"),
    [
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 32]}}, {},
         "quantised already, by fp8"),
        ({}, {"dequantise": True}, "quantise='fp8' and dequantise=True: weights can't be in few bits, and in the mod"),
        ({}, {"disabled_passes": ("keep_quantised",)}, "the pass keep_quantised is left out"),
    ],
)  # fmt: skip
def test_what_contradicts_it(changes: dict[str, Any], more: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = families.make_config("llama")
    for name, value in changes.items():
        setattr(config, name, value)

    with pytest.raises(BuildError, match=message) as error:
        precast.build(config, tmp_path / "b", quantise="fp8", **more)

    assert error.value.code == "option-invalid"


def test_snapshots_tell_them_apart(tmp_path: Path) -> None:
    config, options = families.make_config("llama"), {"max_seq_len": 64, "snapshots": tmp_path / "snapshots"}
    plain = precast.build(config, tmp_path / "plain", **options)
    small = precast.build(config, tmp_path / "small", **options, quantise="fp8")
    again = precast.build(config, tmp_path / "again", **options, quantise="fp8")
    other = precast.build(config, tmp_path / "other", **options, quantise="fp8-channel")
    whole = precast.build(config, tmp_path / "whole", max_seq_len=64, quantise="fp8-channel")

    assert [each.provenance["from_snapshot"] for each in (plain, small, again, other)] == [False, False, True, False]
    assert small.digest == again.digest
    assert other.digest == whole.digest
    assert len({each.digest for each in (plain, small, other)}) == 3
    assert small.provenance["not quantised"] == again.provenance["not quantised"] == HEAD
    assert "not quantised" not in plain.provenance


@pytest.mark.parametrize("quantise", QUANTISED)
def test_a_weight_that_is_no_number_is_named(quantise: str, tmp_path: Path) -> None:
    """Of q, k and v, which are one product: not a scale, which no file has."""
    model = random_model(families.make_config("llama"))
    name = "model.layers.1.self_attn.k_proj.weight"
    model.get_parameter(name).data[3, 7] = torch.nan
    model.save_pretrained(tmp_path / "ckpt")
    bundle = precast.build(tmp_path / "ckpt", tmp_path / "b", dtype="float32", quantise=quantise)

    with pytest.raises(WeightsError) as error:
        precast.load(bundle.path, weights=tmp_path / "ckpt", device="cpu")

    assert error.value.message == f"{name}: the weight at [3, 7] is nan, expected a finite number"
    assert error.value.where == str(tmp_path / "ckpt" / "model.safetensors")
