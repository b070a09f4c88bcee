"""Quantised checkpoints of any method: what is refused by name, and what is read as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from published_configs import EIGHT, MX, NVFP4_EXPERTS, compressed, groups, quark, rotated
from stored_weights import config_of
from transformers import AutoModelForCausalLM

from precast.builder.source.quantised_options import quantisation_of, unquantised
from precast.builder.weights.recipes import ModelCheckpoint
from precast.ir.errors import BuildError
from precast.ir.graph.schema import Cast


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quantised by bitsandbytes; known are fp8, .*, gptq"),
        ({"bits": 4}, "quantised by a method that isn't named"),
        ({"quant_method": "awq", "bits": 3}, "bits = 3"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv_fast"}, "version = 'gemv_fast'"),
        ({"quant_method": "awq", "bits": 4, "checkpoint_format": "gemv_fast"}, "checkpoint_format = 'gemv_fast'"),
        ({"quant_method": "awq", "bits": 4, "lm_head": True}, "lm_head = True"),
        ({"quant_method": "gptq", "bits": 3}, "bits = 3"),
        ({"quant_method": "gptq", "group_size": 128}, "by gptq, with no bits: 4 or 8 are known"),
        ({"quant_method": "gptq", "bits": 4.0}, r"bits = 4\.0: .* expected 4 or 8"),
        ({"quant_method": "gptq", "dynamic": {".*": {"bits": 8.0}}}, r"dynamic = .*8\.0"),
        ({"quant_method": "gptq", "desc_act": 0}, "desc_act = 0: .* expected True, False or nothing"),
        ({"quant_method": "gptq", "group_size": 10**30}, "group_size = 1000.* expected a size above 0"),
        ({"quant_method": "gptq", "modules_in_block_to_quantize": [None]}, r"to_quantize = \[None\]"),
        ({"quant_method": "mlx", "group_size": 32.0, "bits": 4}, r"group_size = 32\.0"),
        ({"quant_method": "mlx", "group_size": 32, "bits": 4.0}, r"bits = 4\.0"),
        ({"quant_method": "mxfp8", "weight_block_size": [1.0, 32]}, r"weight_block_size = \[1\.0, 32\]"),
        ({**compressed("channel", num_bits=8.0)}, r"num_bits = 8\.0"),
        ({**compressed("channel", symmetric=1)}, "symmetric = 1"),
        (groups("pack-quantized", {"num_bits": 4, "strategy": "channel"}, [5]), r"targets = \[5\]: .* a list of names"),  # type: ignore[list-item]
        ({"quant_method": "gptq", "bits": 4, "pack_dtype": "int8"}, "pack_dtype = 'int8'"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format = 'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {".*": {"bits": 3}}}, "dynamic = .*4 or 8 bits"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*": {"rotation": "hadamard"}}}, "dynamic = "),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:(": {"bits": 8}}}, "no regular expression"),
        ({"quant_method": "gptq", "bits": 4, "method": "gptq_pro"}, "method = 'gptq_pro'"),
        (
            {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq", "format": "gptq_v2"},
            "checkpoint_format = 'gptq' and format = 'gptq_v2': both are names of one option",
        ),
        ({"quant_method": "awq", "group_size": 32, "q_group_size": 64}, "group_size = 32 and q_group_size = 64"),
        (
            {"quant_method": "awq", "version": "GEMV", "checkpoint_format": "gemm"},
            "checkpoint_format = 'gemm' and version = 'gemv'",
        ),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size = \[128\]"),
        ({"quant_method": "fp8", "expert_dtype": "fp6"}, "expert_dtype = 'fp6'"),
        (
            {"quant_method": "fp8", "weight_per_tensor": True, "weight_block_size": [128, 128]},
            r"weight_per_tensor = True and weight_block_size = \[128, 128\]",
        ),
        ({"quant_method": "fp8", "weight_per_tensor": False}, "weight_per_tensor = False and weight_block_size = None"),
        (
            {"quant_method": "fp8", "modules_to_not_convert": ["lm_head"], "ignored_layers": ["a"]},
            r"modules_to_not_convert = \['lm_head'\] and ignored_layers = \['a'\]: both are names of one option",
        ),
        ({"quant_method": "gptq", "bits": 4, "data_type": "fp4"}, "data_type = 'fp4'"),
        ({"quant_method": "fp8", "rotation": "hadamard"}, "rotation = 'hadamard'"),
        ({**compressed("group"), "format": "float-quantized"}, "config_groups.group_0.weights: num_bits = "),
        ({**compressed("channel", num_bits=4)}, "config_groups.group_0.weights: num_bits = "),
        ({**compressed("channel"), "format": "pack-quantized"}, "type = 'float', .* format = 'pack-quantized'"),
        ({**compressed("channel"), "format": "marlin-24"}, "format = 'marlin-24'"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "no config_groups"),
        (groups("pack-quantized", {"num_bits": 3, "type": "int", "strategy": "channel"}), "num_bits = 3"),
        (groups("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "tensor"}), "strategy = 'tensor'"),
        (
            groups("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 48}),
            "by compressed-tensors, with groups of 48: .* so\n  .*weight has 64 inputs, which they don't divide",
        ),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ", "ignore": []}, "quant_algo = 'NVFP4_AWQ'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "no list of the modules"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": [], "group_size": 32}, "group_size = 32"),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": [], "group_size": 16}, "group_size = 16"),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": [], "group_size": 16}, "group_size = 16"),
        ({"quant_method": "fp8", "quant_algo": "MIXED_PRECISION"}, "quant_algo = 'MIXED_PRECISION'"),
        ({"quant_method": "fp8", "moe_quant_algo": "NVFP4"}, "no quantized_layers of MIXED_PRECISION"),
        (
            {"quant_method": "fp8", **NVFP4_EXPERTS},
            r"by fp8, with names of layers that are none of this model \(layers\.1\.f",
        ),
        (
            {"quant_method": "fp8", **NVFP4_EXPERTS, "quantized_layers": {"layers.0.attn": {"quant_algo": "NVFP4"}}},
            "quantized_layers.layers.0.attn = ",
        ),
        (
            {"quant_method": "fp8", **NVFP4_EXPERTS, "config_groups": {"g": {"weights": EIGHT, "targets": ["Linear"]}}},
            "quantised by fp8, with config_groups.g.weights: num_bits = 8, type = 'float', .* group_size = 32",
        ),
        (quark("fp6_e2m3"), r"by quark, with global_quant_config.weight: dtype = 'fp6_e2m3', qscheme = 'per_group'"),
        (quark("fp8_e4m3", global_quant_config={"weight": MX | {"dtype": "fp4", "group_size": 16}}), "group_size = 16"),
        (
            quark("fp8_e4m3", global_quant_config={"weight": {"dtype": "int8", "qscheme": "per_tensor"}}),
            "dtype = 'int8'",
        ),
        (quark("fp8_e4m3", global_quant_config={"weight": [MX, MX]}), r"global_quant_config.weight: \["),
        (quark("fp8_e4m3", layer_quant_config={"*q_proj": {"output_tensors": MX}}), r"\*q_proj.output_tensors = "),
        (quark("fp8_e4m3", layer_quant_config={"*q_proj": {"bias": MX}}), r"\*q_proj.bias = "),
        (quark("fp8_e4m3", layer_quant_config={"*q_proj": 8}), r"\*q_proj = 8"),
        (quark("fp8_e4m3", layer_type_quant_config={"Linear": {}}), "layer_type_quant_config = "),
        (quark("fp8_e4m3", algo_config=[{"name": "rotation"}]), "algo_config = "),
        (quark("fp8_e4m3", export={"weight_format": "fake_quantized"}), "export = "),
        ({"quant_method": "quark"}, "global_quant_config = None"),
        (quark("fp8_e4m3", layer_quant_config=5), "layer_quant_config = 5"),
        (quark("fp8_e4m3", layer_quant_config={"k": {"bias": 5}}, export={"kv_cache_group": 5}), "k.bias = 5"),
        (quark("fp8_e4m3", algo_config=5), "algo_config = 5"),
        ({"quant_method": "mxfp8", "weight_block_size": [128, 128]}, r"weight_block_size = \[128, 128\]"),
        (groups("mxfp8-quantized", EIGHT | {"group_size": 16}), "group_size = 16, format = 'mxfp8-quantized'"),
        (groups("mxfp8-quantized", EIGHT | {"symmetric": False}), "symmetric = False"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "ignore": []}, "and 0 quantized_layers"),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {"a": {"quant_algo": "INT4"}},
            },
            "quantized_layers.a = ",
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["language_model.model.blocks.0.mlp*"]},
            r"by modelopt, with names of layers that are none of this model \(language_model.model.blocks.0.mlp\*\)",
        ),
        ({**compressed("channel"), "sparsity_config": {"format": "sparse-24"}}, "sparsity_config = "),
        ({**compressed("channel"), "moe_sparsity_config": {"layers": {}}}, "moe_sparsity_config = "),
        ({**compressed("channel"), "transform_config": {"config_groups": {"u": {"apply": []}}}}, "transform_config = "),
        ({**compressed("channel"), "transform_config": {"config_groups": {"u": {"apply": 5}}}}, "transform_config = "),
        (
            {**compressed("channel"), "transform_config": {"config_groups": {"u": {"apply": [{"location": []}]}}}},
            "transform_config = ",
        ),
        ({**compressed("channel"), "transform_config": rotated("weight_input", "input")}, "transform_config = "),
        ({**compressed("channel"), "transform_config": rotated("k_cache")}, "transform_config = "),
        ({"quant_method": "gptq", "bits": 3}, "bits = 3: this is not known, expected 4 or 8"),
        ({"quant_method": "fp8", "scale_fmt": "e5"}, "scale_fmt = 'e5': .* expected nothing, 'float' or 'ue8m0'"),
        ({"quant_method": "gptq", "rotation": "x"}, r"rotation = 'x': this is not known \(known options are bits, "),
        ({"quant_method": "gptq", "group_size": 0}, "expected a size above 0 .*, or -1 for one group of all inputs"),
        ({**compressed("channel", num_bits=4)}, "this is not known, expected float of 8 bits, .*; int of 4 or 8 bits"),
        ({"quant_method": "mxfp4"}, "model type llama"),
        ({"quant_method": "mlx", "group_size": 16, "bits": 4}, "group_size = 16"),
        (
            {"quant_method": "awq", "bits": 4, "group_size": 48},
            r"by awq, with groups of 48: 12 weights .* so\n  model.layers.*.mlp.gate_proj.weight has 64 inputs, which",
        ),
        (
            {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemv"},
            r"groups of 16 in gemv: 14 weights .* so\n  model.layers.*.mlp.down_proj.weight: expected 32, 64, or 128",
        ),
    ],
)
def test_what_is_not_known_is_refused_by_name(entries: dict[str, Any], message: str) -> None:
    with torch.device("meta"):
        meta = AutoModelForCausalLM.from_config(config_of("llama"))

    with pytest.raises(BuildError, match=message) as error:
        ModelCheckpoint(meta, entries).recipes(meta.state_dict())

    assert error.value.code == "feature-unsupported"


def refused(entries: dict[str, Any]) -> list[str]:
    """The lines of the message."""
    with torch.device("meta"):
        meta = AutoModelForCausalLM.from_config(config_of("llama"))
    with pytest.raises(BuildError) as error:
        ModelCheckpoint(meta, entries).recipes(meta.state_dict())
    return error.value.message.splitlines()


def test_all_that_is_not_known_is_listed() -> None:
    """Options, and groups of layers."""
    entries = compressed("channel", num_bits=3)
    (group,) = entries["config_groups"].values()
    told = refused({**entries, "config_groups": {"a": group, "b": group}, "rotation": "x"})

    assert told[0] == "the checkpoint is quantised by compressed-tensors, with 3 things that are not known:"
    assert [line.split()[0] for line in told[1:]] == [
        "rotation",
        "config_groups.a.weights:",
        "config_groups.b.weights:",
    ]


def test_all_layers_of_an_unknown_format_are_listed() -> None:
    """Those that differ in their numbers alone in one line."""
    bad, good = {"quant_algo": "INT3"}, {"quant_algo": "FP8"}
    layers = {f"model.layers.{i}.mlp.{name}": bad for i in range(30) for name in ("up_proj", "down_proj")}
    layers |= {"model.layers.1.self_attn.q_proj": good, "lm_head": bad}
    told = refused({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers})

    assert told[0].endswith("with 61 things that are not known:")
    assert [line.split()[0] for line in told[1:]] == [
        "quantized_layers.model.layers.*.mlp.up_proj", "quantized_layers.model.layers.*.mlp.down_proj",
        "quantized_layers.lm_head",
    ]  # fmt: skip
    assert told[1].endswith(" (of 30)")


def test_values_are_told_as_they_are() -> None:
    """However much they look like the number of a layer."""
    told = refused({"quant_method": "gptq", "bits": 4, "tool": "0.5.1", "made": "model.layers.7.mlp"})

    assert told[1].strip().startswith("tool = '0.5.1': this is not known")
    assert told[2].strip().startswith("made = 'model.layers.*.mlp': this is not known")


def test_what_is_nothing_says_nothing() -> None:
    """What a quantiser writes of options that were not used, and of how it was called."""
    said = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
    made = {"adapter": None, "data_type": "int", "iters": 200, "nsamples": 128, "seqlen": 2048,
            "low_gpu_mem_usage": True, "autoround_version": "0.5.1"}  # fmt: skip

    assert recipes_of(said | made) == recipes_of(said)


@pytest.mark.parametrize("first", [None, []])
@pytest.mark.parametrize("method", ["fp8", "mxfp8"])
def test_an_empty_list_does_not_hide_the_other_one(method: str, first: list[str] | None) -> None:
    said = {"quant_method": method, "ignored_layers": ["model.layers.0"]}

    found = recipes_of(said | {"modules_to_not_convert": first})

    assert found == recipes_of(said)
    assert isinstance(found["model.layers.0.mlp.down_proj.weight"], Cast)


def recipes_of(entries: dict[str, Any]) -> dict[str, Any]:
    with torch.device("meta"):
        meta = AutoModelForCausalLM.from_config(config_of("llama"))
    return dict(ModelCheckpoint(meta, entries).recipes(meta.state_dict()))


def test_all_weights_that_groups_do_not_divide_are_listed() -> None:
    told = refused({"quant_method": "awq", "bits": 4, "group_size": 48})

    projections = [f"mlp.{name}" for name in ("gate_proj", "up_proj")]
    projections += [f"self_attn.{name}_proj" for name in "koqv"]
    expected = [f"model.layers.*.{name}.weight has 64 inputs, which they don't divide (of 2)" for name in projections]
    assert told[0] == "the checkpoint is quantised by awq, with groups of 48: 12 weights can't be stored so"
    assert [line.strip() for line in told[1:]] == expected


def test_a_config_without_its_quantisation() -> None:
    entries = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config = config_of("llama")
    config.quantization_config = entries

    plain = unquantised(config)

    assert quantisation_of(config) == entries
    assert quantisation_of(plain) is None
    assert config.quantization_config == entries


def test_what_is_not_quantised_is_cast() -> None:
    with torch.device("meta"):
        meta = AutoModelForCausalLM.from_config(config_of("llama"), dtype=torch.bfloat16)

    recipe = ModelCheckpoint(meta, {"quant_method": "fp8"}).recipes(["model.norm.weight"])["model.norm.weight"]

    assert isinstance(recipe, Cast)
    assert recipe.dtype == "bfloat16"
