"""Quantised checkpoints: the params are those that transformers loads from the same values in float32."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import quantised
import torch
from quantised import Stored
from reference import evaluate
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.quantizers.quantizers_utils import should_convert_module

from precast.builder.capture.factory import make_module
from precast.builder.graph.rounding import Rounding
from precast.builder.source.quantised_options import kv_dtype_of, quantisation_of, unquantised
from precast.builder.source.shrink import random_model, shrink
from precast.builder.weights.recipes import ModelCheckpoint
from precast.builder.weights.schemes.chosen import kept_by
from precast.ir.errors import BuildError
from precast.ir.graph.schema import Cast, Graph, Param, TensorType, Tie
from precast.ir.weights.checkpoint import CheckpointFiles
from precast.ir.weights.recipes import leaves
from precast.loader.torch_device import open_device
from precast.loader.weights.stream import load_weights

Tensors = dict[str, torch.Tensor]
Quantise = Callable[[str, torch.Tensor], Stored | None]

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 131,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip


def config_of(model_type: str, **changes: Any) -> Any:
    return AutoConfig.for_model(model_type, **{**SIZES, **changes})


def check(config: Any, entries: dict[str, Any], quantise: Quantise, folder: Path, *, dtype: str = "float32") -> None:
    """Quantises a random model's checkpoint, tensor by tensor, and compares what becomes of it with transformers."""
    plain, stored = folder / "plain", folder / "stored"
    random_model(config).save_pretrained(plain)
    dense = load_file(plain / "model.safetensors")
    files: Tensors = {}
    for name, tensor in dense.items():
        made = quantise(name, tensor)
        files |= {name: tensor} if made is None else made[0]
        dense[name] = tensor if made is None else made[1].contiguous()
    assert files.keys() != dense.keys(), "nothing was quantised"
    save_file(dense, plain / "model.safetensors", metadata={"format": "pt"})
    stored.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in files.items()}, stored / "model.safetensors")
    expected = AutoModelForCausalLM.from_pretrained(plain, dtype=getattr(torch, dtype)).state_dict()
    meta = make_module(config, dtype)

    checkpoint = ModelCheckpoint(meta, entries)
    recipes, rules = checkpoint.recipes(expected), checkpoint.known_names(expected)

    types = {name: TensorType(str(tensor.dtype)[6:], tuple(tensor.shape)) for name, tensor in expected.items()}  # type: ignore[arg-type]
    params = tuple(Param(name, types[name], made) for name, made in recipes.items())
    graph = Graph((), (), params, (), (), (), {})
    loaded = load_weights(graph, rules, CheckpointFiles.open(stored), device=open_device("cpu"))
    for name, recipe in recipes.items():
        assert torch.equal(loaded.tensors[name], expected[name]), name
        if not isinstance(recipe, Tie):
            assert torch.equal(evaluate(recipe, files), expected[name]), name


def linear(name: str) -> bool:
    """Projections inside of layers."""
    return ".layers." in name and name.endswith("_proj.weight")


# --- FP8 ---------------------------------------------------------------------------------------------------------


def fp8(suffix: str, block: tuple[int, int] | None, shape: Callable[[torch.Tensor], tuple[int, ...]]) -> Quantise:
    def quantise(name: str, tensor: torch.Tensor) -> Stored | None:
        return quantised.float8(name, tensor, block, suffix, shape(tensor)) if linear(name) else None

    return quantise


def but(part: str, quantise: Quantise) -> Quantise:
    """Leaves the tensors of this part as they are."""
    return lambda name, tensor: None if part in name else quantise(name, tensor)


def blocks(tensor: torch.Tensor) -> tuple[int, ...]:
    return -(-tensor.shape[0] // 32), -(-tensor.shape[1] // 32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fp8_in_blocks(tmp_path: Path, dtype: str) -> None:
    """DeepSeek's way, with matrices that don't end with a block; the experts are stored one by one."""
    config = shrink(AutoConfig.for_model("deepseek_v3"))
    entries = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}

    def quantise(name: str, tensor: torch.Tensor) -> Stored | None:
        known = ".layers." in name and ("_proj" in name and name.endswith(".weight"))
        return quantised.float8(name, tensor, (32, 32), "_scale_inv", blocks(tensor)) if known else None

    check(config, entries, quantise, tmp_path, dtype=dtype)


KEPT_IN_V4 = ("compressor.wkv", "compressor.wgate", "weights_proj", "ffn.gate.", "embed_tokens", "head.", "norm.")
"""What DeepSeek-V4's checkpoints hold in bfloat16, beside tensors that are no weights of layers."""


NVFP4_EXPERTS = {
    "moe_quant_algo": "NVFP4", "quant_algo": "MIXED_PRECISION", "group_size": 16, "ignore": ["*.attn.*", "head"],
    "quantized_layers": {"layers.1.ffn.experts": {"quant_algo": "NVFP4", "group_size": 16}},
}  # fmt: skip
"""As ModelOpt says it of DeepSeek-V4, in the publisher's names; here of one layer."""


@pytest.mark.parametrize("experts", ["fp4", "fp8", "nvfp4 and fp4"])
def test_experts_of_four_bits_beside_fp8(experts: str, tmp_path: Path) -> None:
    """DeepSeek-V4: scales stand beside the weights, as powers of two; the experts' are of 32 values each. Those that
    ModelOpt lists have its own."""
    config = shrink(AutoConfig.for_model("deepseek_v4", moe_intermediate_size=64, o_lora_rank=32))
    config.moe_intermediate_size = 32
    entries = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [32, 32],
        "scale_fmt": "ue8m0", "expert_dtype": experts[-3:], **(NVFP4_EXPERTS if "nvfp4" in experts else {}),
    }  # fmt: skip
    packed, listed = set(), set()

    def quantise(name: str, tensor: torch.Tensor) -> Stored | None:
        if not name.endswith(".weight") or any(part in name for part in KEPT_IN_V4):
            return None
        if "nvfp4" in experts and "layers.1.ffn.experts." in name:
            listed.add(name)
            return quantised.nvfp4(name, tensor)
        if experts != "fp8" and ".ffn.experts." in name:
            packed.add(name)
            return quantised.fp4_e8m0(name, tensor)
        stored, dense = quantised.float8_e8m0(name, tensor, (32, 32))
        return {name: stored[name], name.removesuffix("weight") + "scale": stored[name + "_scale_inv"]}, dense

    check(config, entries, quantise, tmp_path)

    assert bool(packed) == (experts != "fp8")
    assert bool(listed) == ("nvfp4" in experts)


def test_inputs_of_experts_that_modelopt_lists_are_not_those_of_fp8() -> None:
    """Of these layers' alone; without `scale_fmt`, FP8's are rounded in groups."""
    config = shrink(AutoConfig.for_model("deepseek_v4", moe_intermediate_size=64, o_lora_rank=32))
    config.moe_intermediate_size = 32
    entries = {"quant_method": "fp8", "weight_block_size": [128, 128], **NVFP4_EXPERTS}
    meta = make_module(config, "float32")
    checkpoint = ModelCheckpoint(meta, entries)
    checkpoint.recipes(meta.state_dict())

    found = checkpoint.roundings()

    listed = {tensor: each for tensor, each in found.items() if ".layers.1.ffn.experts." in tensor}
    assert set(listed.values()) == {Rounding(reason="inputs of 4 bits are not made")}
    assert {each for tensor, each in found.items() if tensor not in listed} == {Rounding("fp8_group")}


@pytest.mark.parametrize("size", [48, 80])
def test_experts_of_four_bits_have_whole_groups(size: int) -> None:
    config = shrink(AutoConfig.for_model("deepseek_v4"))
    config.moe_intermediate_size = size
    checkpoint = ModelCheckpoint(
        make_module(config, "float32"), {"quant_method": "fp8", "weight_block_size": [32, 32], "expert_dtype": "fp4"}
    )

    with pytest.raises(BuildError, match="expected rows in groups of 32"):
        checkpoint.recipes(["model.layers.0.mlp.experts.down_proj"])


@pytest.mark.parametrize(
    ("entries", "quantise"),
    [
        ({"quant_method": "fp8", "weight_block_size": None}, fp8("_scale_inv", None, lambda _: ())),
        ({"quant_method": "fp8", "activation_scheme": "static"}, fp8("_scale", None, lambda _: ())),
        ({"quant_method": "fbgemm_fp8"}, fp8("_scale", (1, 1 << 20), lambda tensor: (tensor.shape[0], 1))),
        (
            {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head", "model.layers.0.mlp*"]},
            but("layers.0.mlp", fp8("_scale", None, lambda _: ())),
        ),
        (
            {"quant_algo": "FP8", "ignore": ["lm_head", "model.layers.0.mlp"], "quant_method": "modelopt"},
            but("layers.0.mlp", fp8("_scale", None, lambda _: ())),
        ),
    ],
    ids=["a scale a tensor", "AutoFP8", "FBGEMM", "ModelOpt", "ModelOpt in config.json"],
)
def test_fp8_by_tensor_or_channel(entries: dict[str, Any], quantise: Quantise, tmp_path: Path) -> None:
    check(config_of("llama"), entries, quantise, tmp_path)


def compressed(strategy: str, **weights: Any) -> dict[str, Any]:
    args = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False, **weights}
    group = {"targets": ["Linear"], "weights": args, "input_activations": {"num_bits": 8, "dynamic": True}}
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*down_proj"], "quantization_status": "compressed", "kv_cache_scheme": None,
    }  # fmt: skip


def rotated(*places: str) -> dict[str, Any]:
    """The `transform_config` of rotations at these places."""
    apply = [{"targets": ["Linear"], "location": place, "inverse": False} for place in places]
    return {"config_groups": {"R1": {"type": "hadamard", "apply": apply}}}


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
@pytest.mark.parametrize(
    ("entries", "block", "shape"),
    [
        (compressed("tensor"), None, lambda _: (1,)),
        (compressed("channel"), (1, 1 << 20), lambda tensor: (tensor.shape[0], 1)),
        (compressed("block", block_structure=[32, 32]), (32, 32), blocks),
        ({**compressed("tensor"), "transform_config": rotated("weight_output", "weight_input")}, None, lambda _: (1,)),
    ],
    ids=["tensor", "channel", "block", "rotated weights"],
)
def test_compressed_tensors(model_type: str, entries: dict[str, Any], block: Any, shape: Any, tmp_path: Path) -> None:
    """Names are those of the checkpoint, where each expert is a layer of its own."""

    def quantise(name: str, tensor: torch.Tensor) -> Stored | None:
        chosen = linear(name) and "down_proj" not in name
        return quantised.float8(name, tensor, block, "_scale", shape(tensor)) if chosen else None

    check(config_of(model_type, num_experts=4, moe_intermediate_size=32), entries, quantise, tmp_path)


def test_modules_that_are_left_as_they_are(tmp_path: Path) -> None:
    """By the names of the checkpoint, which transformers renames: Mixtral's `block_sparse_moe`."""
    config = config_of("mixtral", num_local_experts=4)
    skipped = ["lm_head", "model.layers.0.block_sparse_moe", "model.layers.1.self_attn.q_proj"]
    entries = {"quant_method": "fp8", "weight_block_size": [32, 32], "modules_to_not_convert": skipped}

    def quantise(name: str, tensor: torch.Tensor) -> Stored | None:
        experts = name.startswith("model.layers.1.block_sparse_moe.experts")
        projections = "self_attn" in name and not name.startswith("model.layers.1.self_attn.q_proj")
        return (
            quantised.float8(name, tensor, (32, 32), "_scale_inv", blocks(tensor)) if experts or projections else None
        )

    check(config, entries, quantise, tmp_path)


NAMES = (
    "lm_head", "model.layers.1.mlp", "model.layers.11.mlp", "model.layers.1.mlp.gate", "model.layers.1.mlp.gate_proj",
    "model.decoder.layers.23.fc1", "layer", "layer.1.attn", "mlp.gate", "", "xlm_head",
)  # fmt: skip
PATTERNS = (
    "lm_head", "model.layers.1", "model.layers.*", r"model\.layers\.\d+\.mlp.gate", "fc1", "layer.", "mlp.gate",
    "a|layer", "gate_proj", ".*gate", "",
)  # fmt: skip


def test_patterns_keep_what_transformers_keeps() -> None:
    lists = [[one] for one in PATTERNS] + [[one, other] for one in PATTERNS for other in PATTERNS] + [[*PATTERNS], []]
    for patterns in lists:
        is_kept = kept_by(patterns)
        expected = {name: not should_convert_module(name, patterns) for name in NAMES}
        assert {name: is_kept(name) for name in NAMES} == expected, patterns


def test_an_expert_that_is_left_as_it_is(tmp_path: Path) -> None:
    skipped = ["lm_head", "model.layers.0.mlp.experts.2.up_proj"]
    entries = {"quant_method": "fp8", "weight_block_size": [32, 32], "modules_to_not_convert": skipped}

    def quantise(name: str, tensor: torch.Tensor) -> Stored | None:
        chosen = linear(name) and name.removesuffix(".weight") not in skipped
        return quantised.float8(name, tensor, (32, 32), "_scale_inv", blocks(tensor)) if chosen else None

    check(config_of("qwen3_moe", num_experts=4, moe_intermediate_size=32), entries, quantise, tmp_path)


# --- four bits ---------------------------------------------------------------------------------------------------


def test_mxfp4(tmp_path: Path) -> None:
    config = config_of("gpt_oss", num_local_experts=4, intermediate_size=32)
    entries = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}

    def quantise(name: str, tensor: torch.Tensor) -> Stored | None:
        return quantised.mxfp4(name, tensor) if name.endswith(("experts.gate_up_proj", "experts.down_proj")) else None

    check(config, entries, quantise, tmp_path, dtype="bfloat16")


@pytest.mark.parametrize("group_size", [32, -1])
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3_moe"])
def test_awq(model_type: str, group_size: int, tmp_path: Path) -> None:
    entries = {"quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True, "version": "gemm"}

    def quantise(name: str, tensor: torch.Tensor) -> Stored | None:
        size = tensor.shape[-1] if group_size == -1 else group_size
        return quantised.awq(name.removesuffix(".weight"), tensor, size) if linear(name) else None

    check(config_of(model_type, num_experts=4, moe_intermediate_size=32), entries, quantise, tmp_path)


@pytest.mark.parametrize("order", [False, True], ids=["in order", "by activation"])
@pytest.mark.parametrize(("format", "offset"), [("gptq", 1), ("gptq_v2", 0)])
def test_gptq(order: bool, format: str, offset: int, tmp_path: Path) -> None:
    entries = {
        "quant_method": "gptq", "bits": 4, "group_size": 48, "desc_act": order, "sym": False,
        "checkpoint_format": format, "damp_percent": 0.01, "dynamic": {"-:.*o_proj": {}},
    }  # fmt: skip

    def quantise(name: str, tensor: torch.Tensor) -> Stored | None:
        if not linear(name) or "o_proj" in name:
            return None
        return quantised.gptq(name.removesuffix(".weight"), tensor, 48, order=order, offset=offset)

    check(config_of("llama", attention_bias=True), entries, quantise, tmp_path)


@pytest.mark.parametrize(
    ("entries", "sizes"),
    [
        ({"desc_act": False, "group_size": 32}, {"*.g_idx": 32}),
        ({"desc_act": False, "group_size": -1}, {"*.g_idx": 0}),
        ({"desc_act": True, "group_size": 32}, {}),
        ({"desc_act": None, "group_size": 32}, {}),
        ({"group_size": 32}, {}),
    ],
)
def test_groups_of_gptq_are_read_unless_the_config_says_that_they_are_in_order(
    entries: dict[str, Any], sizes: dict[str, int]
) -> None:
    with torch.device("meta"):
        meta = AutoModelForCausalLM.from_config(config_of("llama"))
    name = "model.layers.0.mlp.down_proj.weight"

    checkpoint = ModelCheckpoint(meta, {"quant_method": "gptq", "bits": 4} | entries)

    read = {leaf.tensor.rpartition(".")[2] for leaf in leaves(checkpoint.recipes([name])[name])}
    rules = checkpoint.known_names()
    assert read == {"qweight", "scales", "qzeros"} | (set() if sizes else {"g_idx"})
    assert rules.groups_in_order == sizes
    assert ("*.g_idx" in rules.ignored) == bool(sizes)


def test_biases_of_zeros_that_autogptq_stores_are_ignored() -> None:
    with torch.device("meta"):
        meta = AutoModelForCausalLM.from_config(config_of("qwen2"))

    ignored = ModelCheckpoint(meta, {"quant_method": "gptq", "bits": 4}).known_names().ignored

    assert "model.layers.*.self_attn.o_proj.bias" in ignored
    assert "model.layers.*.self_attn.q_proj.bias" not in ignored


def test_gptq_of_some_modules(tmp_path: Path) -> None:
    kept = [["self_attn.q_proj", "self_attn.k_proj"], ["mlp.down_proj"]]
    entries = {"quant_method": "gptq", "bits": 4, "group_size": 32, "modules_in_block_to_quantize": kept}

    def quantise(name: str, tensor: torch.Tensor) -> Stored | None:
        chosen = name.endswith(("q_proj.weight", "k_proj.weight", "down_proj.weight"))
        return quantised.gptq(name.removesuffix(".weight"), tensor, 32, order=False) if chosen else None

    check(config_of("llama"), entries, quantise, tmp_path)


def projections(stored: Callable[[str, torch.Tensor], Stored]) -> Quantise:
    """Quantises projections inside of layers."""
    return lambda name, tensor: stored(name, tensor) if linear(name) else None


MODELOPT = {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head", "*.layers.0.mlp*"]}


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_modelopts_nvfp4(model_type: str, dtype: str, tmp_path: Path) -> None:
    """Experts are stored one by one; scales of activations and caches are passed over."""
    weights = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}
    entries = MODELOPT | {
        "quant_algo": "NVFP4", "group_size": 16,
        "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}},
    }  # fmt: skip

    def quantise(name: str, tensor: torch.Tensor) -> Stored | None:
        if not linear(name) or "layers.0.mlp" in name:
            return None
        stored, dense = quantised.nvfp4(name, tensor)
        scale = {name.replace("weight", "k_scale"): torch.ones(())} if "k_proj" in name else {}
        return stored | scale, dense

    config = config_of(model_type, num_experts=4, moe_intermediate_size=32)
    check(config, entries, quantise, tmp_path, dtype=dtype)


def gemma4(**changes: Any) -> Any:
    experts = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
    return config_of("gemma4_text", vocab_size_per_layer_input=131, hidden_size_per_layer_input=0, **experts, **changes)


@pytest.mark.parametrize("method", ["modelopt", "compressed-tensors"])
def test_stacked_experts_that_are_stored_one_by_one(method: str, tmp_path: Path) -> None:
    """Gemma 4's, which transformers stores stacked."""
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    entries = {
        "modelopt": {
            "quant_method": method, "quant_algo": "NVFP4", "ignore": ["lm_head", "*.mlp.*", "*_attn*", "*.router*"],
        },
        "compressed-tensors": groups("nvfp4-pack-quantized", weights, targets=["re:.*experts.*"]),
    }  # fmt: skip

    def one(name: str, tensor: torch.Tensor) -> Stored:
        return quantised.nvfp4(name, tensor, divided=method == "compressed-tensors")

    def quantise(name: str, tensor: torch.Tensor) -> Stored | None:
        return quantised.one_by_one(name, tensor, one) if tensor.dim() == 3 and ".experts." in name else None

    check(gemma4(), entries[method], quantise, tmp_path)


def test_modelopts_mixed_precision(tmp_path: Path) -> None:
    """A list says the format of each layer, or of all experts of one; what it doesn't name is kept."""
    names = [f"model.layers.{i}" for i in range(2)]
    layers = {f"{name}.self_attn.q_proj": {"quant_algo": "FP8"} for name in names}
    layers |= {f"{name}.mlp.experts": {"quant_algo": "W4A16_NVFP4", "group_size": 16} for name in names}
    entries = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}

    def quantise(name: str, tensor: torch.Tensor) -> Stored | None:
        if "experts" in name:
            return quantised.nvfp4(name, tensor)
        return quantised.float8(name, tensor, None, "_scale", ()) if "q_proj" in name else None

    check(config_of("qwen3_moe", num_experts=4, moe_intermediate_size=32), entries, quantise, tmp_path)


def groups(format: str, weights: dict[str, Any], targets: list[str] | None = None) -> dict[str, Any]:
    """compressed-tensors' config with one group of layers."""
    return {
        "quant_method": "compressed-tensors", "format": format, "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": targets or ["Linear"], "weights": weights}},
    }  # fmt: skip


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
def test_compressed_nvfp4(model_type: str, tmp_path: Path) -> None:
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}

    def stored(name: str, tensor: torch.Tensor) -> Stored:
        tensors, dense = quantised.nvfp4(name, tensor, divided=True)
        return tensors | {name.replace("weight", "input_global_scale"): torch.ones(1)}, dense

    config = config_of(model_type, num_experts=4, moe_intermediate_size=32)
    check(config, groups("nvfp4-pack-quantized", weights), projections(stored), tmp_path)


EIGHT = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}


def test_mxfp8_of_whole_groups_alone() -> None:
    config = config_of("llama", intermediate_size=48)
    with torch.device("meta"):
        meta = AutoModelForCausalLM.from_config(config)

    with pytest.raises(BuildError, match=r"down_proj\.weight: 48 inputs in groups of 32"):
        ModelCheckpoint(meta, groups("mxfp8-quantized", EIGHT)).recipes(meta.state_dict())


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("method", ["compressed-tensors", "modelopt", "mxfp8"])
def test_mxfp8(method: str, model_type: str, tmp_path: Path) -> None:
    entries = {
        "compressed-tensors": groups("mxfp8-quantized", EIGHT),
        "modelopt": MODELOPT | {"quant_algo": "MXFP8", "exclude_modules": ["lm_head", "*.gate"]},
        "mxfp8": {"quant_method": "mxfp8", "ignored_layers": ["lm_head", "gate"], "activation_scheme": "dynamic"},
    }[method]
    suffix = "_scale_inv" if method == "mxfp8" else "_scale"
    config = config_of(model_type, num_experts=4, moe_intermediate_size=32)

    check(config, entries, projections(functools.partial(quantised.mxfp8, suffix=suffix)), tmp_path)


MX: dict[str, Any] = {
    "qscheme": "per_group", "group_size": 32, "ch_axis": -1, "scale_format": "e8m0", "scale_type": "float",
    "is_dynamic": False, "is_scale_quant": False, "symmetric": None, "round_method": "half_even",
    "scale_calculation_mode": "even", "observer_cls": "PerBlockMXObserver", "mx_element_dtype": None,
}  # fmt: skip


def quark(dtype: str, **entries: Any) -> dict[str, Any]:
    """Quark's config as it exports it, of layers and inputs of an MX format."""
    weight = MX | {"dtype": dtype}
    whole = {"weight": weight, "input_tensors": weight | {"is_dynamic": True}, "output_tensors": None, "bias": None}
    return {
        "quant_method": "quark", "quant_mode": "eager_mode", "algo_config": None, "exclude": ["lm_head", "*.mlp.gate"],
        "export": {"kv_cache_group": [], "pack_method": "reorder", "weight_format": "real_quantized"},
        "global_quant_config": whole, "layer_quant_config": {}, "layer_type_quant_config": {}, "version": "0.12",
        "kv_cache_quant_config": {}, "softmax_quant_spec": None,
    } | entries  # fmt: skip


def quark_mxfp4(name: str, tensor: torch.Tensor) -> Stored:
    """As compressed-tensors packs it, under the weight's own name."""
    made, dense = quantised.packed_mxfp4(name, tensor)
    return {key.removesuffix("_packed"): each for key, each in made.items()}, dense


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
@pytest.mark.parametrize(("dtype", "stored"), [("fp8_e4m3", quantised.mxfp8), ("fp4", quark_mxfp4)])
def test_quark(dtype: str, stored: Callable[[str, torch.Tensor], Stored], model_type: str, tmp_path: Path) -> None:
    config = config_of(model_type, num_experts=4, moe_intermediate_size=32)

    check(config, quark(dtype), projections(stored), tmp_path)


@pytest.mark.parametrize(
    ("qscheme", "ch_axis", "block", "shape"),
    [("per_tensor", None, None, lambda _: ()), ("per_channel", 0, (1, 1 << 20), lambda tensor: (tensor.shape[0],))],
)
@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
def test_quarks_fp8(qscheme: str, ch_axis: int | None, block: Any, shape: Any, model_type: str, tmp_path: Path) -> None:
    weight = {"dtype": "fp8_e4m3", "qscheme": qscheme, "ch_axis": ch_axis, "is_dynamic": False, "symmetric": True}
    entries = quark("fp8_e4m3", global_quant_config={"weight": weight, "input_tensors": weight})
    config = config_of(model_type, num_experts=4, moe_intermediate_size=32)

    check(config, entries, fp8("_scale", block, shape), tmp_path)


def test_layers_of_quark_by_the_first_pattern_that_fits(tmp_path: Path) -> None:
    """What is excluded stays as it is, whatever other patterns say; so does what has no weight's format."""
    eight = {"weight": MX | {"dtype": "fp8_e4m3"}}
    layers = {"*down_proj": eight, "*layers.1.mlp*": {"weight": None}, "*.mlp.*": eight}
    entries = quark("fp4", exclude=["lm_head", "*layers.0*down_proj"], layer_quant_config=layers)

    def stored(name: str, tensor: torch.Tensor) -> Stored:
        eights = name.endswith("1.mlp.down_proj.weight") or "layers.0.mlp" in name
        return quantised.mxfp8(name, tensor) if eights else quark_mxfp4(name, tensor)

    def quantise(name: str, tensor: torch.Tensor) -> Stored | None:
        kept = "layers.0.mlp.down_proj" in name or ("layers.1.mlp" in name and "down_proj" not in name)
        return stored(name, tensor) if linear(name) and not kept else None

    check(config_of("llama"), entries, quantise, tmp_path)


KV = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False, "group_size": None, "symmetric": True}


@pytest.mark.parametrize(
    ("output", "expected"), [(None, (None, None)), (KV, ("float8_e4m3fn", None)), (KV | {"qscheme": "per_head"}, None)]
)
@pytest.mark.parametrize("in_layers", [True, False])
def test_what_quark_says_of_keys_and_values(output: Any, expected: Any, in_layers: bool) -> None:
    """Beside the layers that make them, whose weights it quantises as it does others; scales are the layers' own."""
    layer = quark("fp8_e4m3")["global_quant_config"] | {"output_tensors": output}
    layers = {"*k_proj": layer, "*v_proj": layer}
    kept = {"layer_quant_config": layers, "export": {"kv_cache_group": ["*k_proj", "*v_proj"]}}
    entries = quark("fp8_e4m3", **(kept if in_layers else {"kv_cache_quant_config": layers}))
    meta = make_module(config_of("llama"), "float32")

    dtype, note = kv_dtype_of(entries)

    assert (dtype, note) == (expected or (None, note))
    assert (note is not None and "per_head" in note and "keep the model's dtype" in note) == (expected is None)
    checkpoint = ModelCheckpoint(meta, entries)
    assert "model.layers.0.self_attn.k_proj.output_scale" in checkpoint.scales()["model.layers.0.self_attn"].k
    assert "model.layers.0.self_attn.k_proj.weight_scale" in {
        leaf.tensor for recipe in checkpoint.recipes(["model.layers.0.self_attn.k_proj.weight"]).values()
        for leaf in leaves(recipe)
    }  # fmt: skip


def test_stacked_experts_of_quark_are_refused() -> None:
    meta = make_module(gemma4(), "float32")

    with pytest.raises(BuildError, match=r"by quark, with stacked experts \(.*experts\.down_proj\)"):
        ModelCheckpoint(meta, quark("fp8_e4m3")).recipes(["model.layers.0.experts.down_proj"])


def test_compressed_mxfp4(tmp_path: Path) -> None:
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}

    check(config_of("llama"), groups("mxfp4-pack-quantized", weights), projections(quantised.packed_mxfp4), tmp_path)


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("size", "zeros", "order"),
    [(16, False, None), (32, True, "weight"), (32, False, "group"), (16, True, "group"), (None, False, None),
     (None, True, None)],
)  # fmt: skip
def test_packed_integers(
    model_type: str, bits: int, size: int | None, zeros: bool, order: str | None, tmp_path: Path
) -> None:
    """In groups, or of whole channels; with zero points, and in the order of activations, where `g_idx` is stored."""
    weights = {
        "num_bits": bits, "type": "int", "strategy": "group" if size else "channel", "group_size": size,
        "symmetric": not zeros, "actorder": order,
    }  # fmt: skip

    def stored(name: str, tensor: torch.Tensor) -> Stored:
        return quantised.integers(name, tensor, bits, size, zeros=zeros, order=order == "group", packed=True)

    config = config_of(model_type, num_experts=4, moe_intermediate_size=32)
    check(config, groups("pack-quantized", weights), projections(stored), tmp_path)


@pytest.mark.parametrize("size", [None, 16])
@pytest.mark.parametrize("zeros", [False, True])
def test_integers_of_eight_bits(size: int | None, zeros: bool, tmp_path: Path) -> None:
    weights = {
        "num_bits": 8, "type": "int", "strategy": "group" if size else "channel", "group_size": size,
        "symmetric": not zeros,
    }  # fmt: skip

    def stored(name: str, tensor: torch.Tensor) -> Stored:
        return quantised.integers(name, tensor, 8, size, zeros=zeros, order=False, packed=False)

    check(config_of("llama"), groups("int-quantized", weights), projections(stored), tmp_path)


def test_groups_of_different_formats(tmp_path: Path) -> None:
    """The first that fits counts."""
    four = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16, "symmetric": True}
    eight = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    entries = groups("mixed-precision", four, targets=["re:.*down_proj"])
    entries["config_groups"]["group_0"]["format"] = "pack-quantized"
    entries["config_groups"]["group_1"] = {"targets": ["Linear"], "weights": eight, "format": "float-quantized"}

    def stored(name: str, tensor: torch.Tensor) -> Stored:
        if "down_proj" in name:
            return quantised.integers(name, tensor, 4, 16, zeros=False, order=False, packed=True)
        return quantised.float8(name, tensor, (1, 1 << 20), "_scale", (tensor.shape[0], 1))

    check(config_of("llama"), entries, projections(stored), tmp_path)


@pytest.mark.parametrize(
    "entries",
    [
        {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "ignore": ["lm_head", "model.language_model.layers.0.mlp*"],
        },
        groups("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "channel"})
        | {"ignore": ["lm_head", "model.language_model.layers.0.mlp.down_proj"]},
    ],
    ids=["ModelOpt", "compressed-tensors"],
)
def test_layers_by_the_names_of_a_multimodal_checkpoint(entries: dict[str, Any]) -> None:
    """Which the text model's checkpoint doesn't have, and which transformers reads as well."""
    meta = make_module(shrink(AutoConfig.for_model("qwen3_5_text")), "float32")
    names = [f"model.layers.{i}.mlp.down_proj.weight" for i in range(2)]

    made = ModelCheckpoint(meta, entries).recipes(names)

    read = [[leaf.tensor.rpartition("down_proj.")[2] for leaf in leaves(made[name])] for name in names]
    assert read[0] == ["weight"]
    assert len(read[1]) > 1


# --- MLX ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "bits", "size"),
    [
        (config_of("llama"), 4, 32),
        (config_of("llama", tie_word_embeddings=True), 8, 64),
        (config_of("qwen2"), 4, 64),
        (config_of("qwen3", intermediate_size=128), 8, 32),
    ],
    ids=["llama", "tied", "qwen2", "qwen3"],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mlx(config: Any, bits: int, size: int, dtype: str, tmp_path: Path) -> None:
    """All linear layers and embeddings of whole groups: not the inputs of `down_proj`, 96, in groups of 64."""

    def quantise(name: str, tensor: torch.Tensor) -> Stored | None:
        is_matrix = name.endswith(("_proj.weight", "embed_tokens.weight", "lm_head.weight"))
        return quantised.mlx(name, tensor, bits, size) if is_matrix and tensor.shape[1] % size == 0 else None

    check(config, {"quant_method": "mlx", "group_size": size, "bits": bits}, quantise, tmp_path, dtype=dtype)


def test_models_that_mlx_stores_under_other_names_are_refused() -> None:
    meta = make_module(shrink(AutoConfig.for_model("qwen3_next")), "float32")

    with pytest.raises(BuildError, match="quantised by mlx, with model type qwen3_next") as error:
        ModelCheckpoint(meta, {"quant_method": "mlx", "group_size": 64, "bits": 4})

    assert error.value.code == "feature-unsupported"


# --- what isn't known --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quantised by bitsandbytes; known are fp8, .*, gptq"),
        ({"bits": 4}, "quantised by a method that isn't named"),
        ({"quant_method": "awq", "bits": 3}, "bits = 3"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version = 'gemv'"),
        ({"quant_method": "gptq", "bits": 8}, "bits = 8"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format = 'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {".*": {"bits": 8}}}, "dynamic = "),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size = \[128\]"),
        ({"quant_method": "fp8", "expert_dtype": "fp6"}, "expert_dtype = 'fp6'"),
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
            "64 inputs, 8 in an int32, in groups of 48",
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
            "quantized_layers = ",
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["language_model.model.blocks.0.mlp*"]},
            r"by modelopt, with names of layers that are none of this model \(language_model.model.blocks.0.mlp\*\)",
        ),
        ({**compressed("channel"), "sparsity_config": {"format": "sparse-24"}}, "sparsity_config = "),
        ({**compressed("channel"), "transform_config": {"config_groups": {"u": {"apply": []}}}}, "transform_config = "),
        ({**compressed("channel"), "transform_config": {"config_groups": {"u": {"apply": 5}}}}, "transform_config = "),
        (
            {**compressed("channel"), "transform_config": {"config_groups": {"u": {"apply": [{"location": []}]}}}},
            "transform_config = ",
        ),
        ({**compressed("channel"), "transform_config": rotated("weight_input", "input")}, "transform_config = "),
        ({**compressed("channel"), "transform_config": rotated("k_cache")}, "transform_config = "),
        ({"quant_method": "mxfp4"}, "model type llama"),
        ({"quant_method": "mlx", "group_size": 16, "bits": 4}, "group_size = 16"),
        ({"quant_method": "awq", "bits": 4, "group_size": 48}, "64 inputs in groups of 48"),
    ],
)
def test_what_is_not_known_is_refused_by_name(entries: dict[str, Any], message: str) -> None:
    with torch.device("meta"):
        meta = AutoModelForCausalLM.from_config(config_of("llama"))

    with pytest.raises(BuildError, match=message) as error:
        ModelCheckpoint(meta, entries).recipes(meta.state_dict())

    assert error.value.code == "feature-unsupported"


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
