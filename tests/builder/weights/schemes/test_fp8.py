"""FP8 as DeepSeek, AutoFP8, FBGEMM and ModelOpt store it, and experts of four bits beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import quantised
import torch
from model_sweep import COMPLETIONS
from published_configs import NVFP4_EXPERTS
from quantised import Stored
from stored_weights import Quantise, blocks, but, check, config_of, fp8
from transformers import AutoConfig

from precast.builder.capture.factory import make_module
from precast.builder.graph.rounding import Rounding
from precast.builder.source.shrink import shrink
from precast.builder.weights.recipes import ModelCheckpoint
from precast.ir.errors import BuildError


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fp8_in_blocks(tmp_path: Path, dtype: str) -> None:
    """DeepSeek's way, with matrices that don't end with a block; the experts are stored one by one."""
    config = shrink(AutoConfig.for_model("deepseek_v3"))
    entries = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}

    def quantise(name: str, tensor: torch.Tensor) -> Stored | None:
        known = ".layers." in name and ("_proj" in name and name.endswith(".weight"))
        return quantised.float8(name, tensor, (32, 32), "_scale_inv", blocks(tensor)) if known else None

    check(config, entries, quantise, tmp_path, dtype=dtype)


@pytest.mark.parametrize(
    ("model_type", "table"), [("qwen4_exp_text", "ngram_embedding"), ("llama", "embed_tokens"), ("llama", None)]
)
def test_embeddings_that_a_config_names(model_type: str, table: str | None, tmp_path: Path) -> None:
    """They have one scale, beside blocks of layers; of a table that is left out, nothing changes."""
    config = shrink(AutoConfig.for_model(model_type, **COMPLETIONS.get(model_type, {})))
    entries = {
        "quant_method": "fp8", "weight_block_size": [32, 32], "modules_to_convert": [table or "embed_tokens"],
        "modules_to_not_convert": ["lm_head", "experts", *([] if table else ["embed_tokens"])],
    }  # fmt: skip
    tables = set()

    def quantise(name: str, tensor: torch.Tensor) -> Stored | None:
        if table is not None and f"{table}." in name:
            tables.add(name)
            values = (tensor * 100).to(torch.float8_e4m3fn)
            scale = name[: name.index(table)] + f"{table}.weight_scale"  # of all parts of a table, which are tensors
            return {name: values, scale: torch.tensor([0.3])}, values.float() * 0.3
        known = name.endswith("self_attn.o_proj.weight")
        return quantised.float8(name, tensor, (32, 32), "_scale_inv", blocks(tensor)) if known else None

    only = [n for n, m in make_module(config, "float32").named_modules() if isinstance(m, torch.nn.Linear)]
    entries["modules_to_not_convert"] += [name for name in only if not name.endswith("self_attn.o_proj")]
    check(config, entries, quantise, tmp_path)

    assert len(tables) == {"ngram_embedding": 8, "embed_tokens": 1, None: 0}[table]


KEPT_IN_V4 = ("compressor.wkv", "compressor.wgate", "weights_proj", "ffn.gate.", "embed_tokens", "head.", "norm.")
"""What DeepSeek-V4's checkpoints hold in bfloat16, beside tensors that are no weights of layers."""


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


def test_inputs_of_deepseek_v4_have_scales_that_are_powers_of_two() -> None:
    """But for the experts of FP4, which are multiplied with numbers of 16 bits."""
    config = shrink(AutoConfig.for_model("deepseek_v4", moe_intermediate_size=64, o_lora_rank=32))
    config.moe_intermediate_size = 32
    entries = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0", "expert_dtype": "fp4"}
    meta = make_module(config, "float32")
    checkpoint = ModelCheckpoint(meta, entries)
    checkpoint.recipes(meta.state_dict())

    found = checkpoint.roundings()

    experts = {tensor: each for tensor, each in found.items() if ".ffn.experts." in tensor}
    assert set(experts.values()) == {Rounding(reason="weights of 4 bits are multiplied with numbers of 16")}
    assert {each for tensor, each in found.items() if tensor not in experts} == {Rounding("fp8_group_e8m0")}


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
