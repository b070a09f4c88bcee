"""ModelOpt's NVFP4, and its lists of layers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import quantised
import torch
from published_configs import MODELOPT
from quantised import Stored
from stored_weights import check, config_of, linear
from transformers import AutoConfig

from precast.builder.capture.factory import make_module, make_whole
from precast.builder.source.quantised_options import check_options
from precast.builder.source.shrink import shrink
from precast.builder.weights.recipes import ModelCheckpoint
from precast.ir.errors import BuildError
from precast.ir.weights.recipes import leaves


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


@pytest.mark.parametrize("algorithm", ["FP8_PB_WO", "fp8_pb_wo"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
def test_modelopts_blocks(model_type: str, algorithm: str, tmp_path: Path) -> None:
    """Scales have four dimensions, or none where a matrix is one block; the last blocks may be smaller."""
    sizes = {"hidden_size": 192, "intermediate_size": 320, "moe_intermediate_size": 160}

    def quantise(name: str, tensor: torch.Tensor) -> Stored | None:
        if not linear(name):
            return None
        rows, columns = (-(-size // 128) for size in tensor.shape)
        shape = () if rows == columns == 1 else (rows, 1, columns, 1)
        return quantised.float8(name, tensor, (128, 128), "_scale", shape)

    entries = {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"]}
    check(config_of(model_type, num_experts=4, **sizes), entries, quantise, tmp_path)


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        ({"group_size": 64}, "group_size"),
        ({"config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}}}},
         "config_groups"),
        ({"quant_algo": "FP8_PB_REAL"}, "quant_algo"),
    ],
)  # fmt: skip
def test_blocks_of_another_kind_are_refused(entries: dict[str, Any], told: str) -> None:
    with pytest.raises(BuildError, match=told):
        recipes_of("llama", **{"quant_algo": "FP8_PB_WO", "ignore": ["lm_head"], **entries})


def in_four(rows: int, columns: int) -> tuple[int, ...]:
    return rows, 1, columns, 1


def in_two(rows: int, columns: int) -> tuple[int, ...]:
    return rows, columns


@pytest.mark.parametrize(
    ("said", "suffix", "shape"),
    [
        ({"quant_algo": "fp8_pb_wo"}, "_scale", in_four),
        ({"quant_algo": "FP8_PB_WO"}, "_scale", in_four),
        ({"quant_algo": "FP8_PB_WO", "group_size": 128}, "_scale_inv", in_two),
        ({"quant_algo": "FP8_PB_WO"}, "_scale", in_two),
    ],
    ids=["as ModelOpt's library", "as its examples", "as DeepSeek", "with two dimensions"],
)
@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
def test_modelopts_blocks_of_single_layers(
    model_type: str, said: dict[str, Any], suffix: str, shape: Callable[[int, int], tuple[int, ...]], tmp_path: Path
) -> None:
    """Attention in blocks beside NVFP4, and experts the other way around."""
    sizes = {"hidden_size": 192, "intermediate_size": 320, "moe_intermediate_size": 160}
    is_dense = model_type == "llama"

    def in_blocks(name: str) -> bool:
        return ("self_attn" in name) == is_dense

    def quantise(name: str, tensor: torch.Tensor) -> Stored | None:
        if not linear(name):
            return None
        if not in_blocks(name):
            return quantised.nvfp4(name, tensor)
        return quantised.float8(name, tensor, (128, 128), suffix, shape(*(-(-size // 128) for size in tensor.shape)))

    nvfp4 = {"quant_algo": "NVFP4", "group_size": 16}
    feeding = "mlp" if is_dense else "mlp.experts"
    names = [f"model.layers.{i}.{part}" for i in range(2) for part in ("self_attn", feeding)]
    layers = {name: said if in_blocks(name) else nvfp4 for name in names}
    entries = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers, "ignore": []}
    check(config_of(model_type, num_experts=4, **sizes), check_options(entries).entries, quantise, tmp_path)


def test_scales_of_blocks_have_one_other_name() -> None:
    def endings(algorithm: str) -> dict[str, str]:
        entries = {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": []}
        return ModelCheckpoint(make_module(config_of("llama"), "float32"), entries).known_names().endings

    assert endings("FP8_PB_WO") == {".weight_scale": ".weight_scale_inv"}
    assert endings("FP8") == {}


DOWN = "model.language_model.layers.0.mlp.down_proj"
UNKNOWN = {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}
"""A format that is not known."""


def recipes_of(model_type: str, **entries: Any) -> dict[str, Any]:
    """The recipes of a model, or of the decoder of one, whose layers ModelOpt lists."""
    config = shrink(AutoConfig.for_model(model_type))
    meta = make_module(config, "float32")
    checkpoint = ModelCheckpoint(meta, {"quant_method": "modelopt", **entries}, make_whole(config, meta))
    return checkpoint.recipes(meta.state_dict())


def scales(recipes: dict[str, Any]) -> list[str]:
    """The tensors of scales that these read."""
    read = [leaf.tensor for recipe in recipes.values() for leaf in leaves(recipe)]
    return [tensor for tensor in read if tensor.endswith("_scale")]


@pytest.mark.parametrize(
    "name", ["mtp.layers.0.mlp.experts", "model.visual.blocks.0.attn.qkv", "model.visual.blocks.0"]
)
def test_layers_that_are_not_read_may_have_any_format(name: str) -> None:
    """Of drafts, and of what sees images."""
    layers = {DOWN: {"quant_algo": "FP8"}, name: UNKNOWN}
    groups = {said["quant_algo"]: {"quant_algo": said["quant_algo"], "targets": [at]} for at, said in layers.items()}

    made = recipes_of("qwen3_5", quant_algo="MIXED_PRECISION", quantized_layers=layers, config_groups=groups)

    assert scales(made) == ["model.layers.0.mlp.down_proj.weight_scale"]


@pytest.mark.parametrize(
    "entries",
    [
        {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"mtp.layers.0.mlp.up_proj": {"quant_algo": "FP8"}}},
        {"quant_algo": "FP8", "ignore": ["mtp.layers.0*"]},
    ],
    ids=["layers", "ignore"],
)
def test_a_list_that_names_layers_that_are_not_read_alone(entries: dict[str, Any]) -> None:
    assert bool(scales(recipes_of("qwen3_5", **entries))) == (entries["quant_algo"] == "FP8")


@pytest.mark.parametrize(
    "name", [DOWN, "model.layers.0.mlp", "lm_head", "model.language_model.layers.99.mlp", "mpt.layers.0"]
)
def test_layers_of_the_model_and_names_of_none_must_have_a_known_format(name: str) -> None:
    layers = {"model.layers.1.mlp.down_proj": {"quant_algo": "FP8"}, "mtp.layers.0": UNKNOWN, name: UNKNOWN}

    with pytest.raises(BuildError, match=rf"with quantized_layers\.{name} = .*FP8_PER_CHANNEL.*a known quant_algo"):
        recipes_of("qwen3_5", quant_algo="MIXED_PRECISION", quantized_layers=layers)


def test_a_layer_of_the_model_that_others_of_its_type_leave_out() -> None:
    """GLM-4.5's class leaves out layers 46 and 92, which are drafts in one size each; in the other, 46 is a layer."""
    config = config_of("glm4_moe", num_hidden_layers=48, first_k_dense_replace=48)
    layers = {"model.layers.0.mlp.down_proj": {"quant_algo": "FP8"}, "model.layers.92.mlp.experts": UNKNOWN}
    entries = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    meta = make_module(config, "float32")

    ModelCheckpoint(meta, entries)
    layers["model.layers.46.mlp.down_proj"] = UNKNOWN
    with pytest.raises(BuildError, match=r"quantized_layers\.model\.layers\.46\.mlp\.down_proj = "):
        ModelCheckpoint(meta, entries)
