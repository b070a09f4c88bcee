"""Checkpoints of models with parts for pictures: their text decoder builds from the config alone, and answers text."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import quantised
import torch
from click.testing import CliRunner
from reference import hf_greedy
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

import precast
from precast.builder.source.shrink import random_model
from precast.check.agreement import PROMPTS, agreement
from precast.check.check import compare
from precast.check.shards import prove
from precast.cli.main import main
from precast.ir.artifact import Bundle
from precast.ir.errors import WeightsError

TEXT: dict[str, Any] = {
    "vocab_size": 131, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 256,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": {**TEXT, "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"] * 2,
                        "num_hidden_layers": 4, "query_pre_attn_scalar": 16},
        "vision_config": {"model_type": "siglip_vision_model", **VISION},
        "image_token_index": 130, "boi_token_index": 128, "eoi_token_index": 129, "mm_tokens_per_image": 4,
    },
    "llava": {
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": {"model_type": "clip_vision_model", **VISION},
        "image_token_index": 130,
    },
    "step3p7": {
        "text_config": {
            "vocab_size": 131, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 4, "head_dim": 16,
            "num_attention_heads": 8, "num_attention_groups": 2, "max_position_embeddings": 256, "sliding_window": 9,
            "layer_types": ["full_attention", "sliding_attention"] * 3, "num_nextn_predict_layers": 2,
            "attention_other_setting": {"num_attention_heads": 16, "num_attention_groups": 2, "head_dim": 16},
            "rope_theta": [5e6, 1e4] * 3, "partial_rotary_factors": [0.5, 1.0] * 3,
            "rope_scaling": {"rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 64,
                             "low_freq_factor": 1.0, "high_freq_factor": 32.0},
            "moe_layers_enum": "1,2,3", "moe_num_experts": 8, "moe_top_k": 2, "moe_intermediate_size": 32,
            "share_expert_dim": 32, "moe_router_scaling_factor": 3.0, "swiglu_limits": [0.0] * 3 + [0.05] + [0.0] * 2,
            "swiglu_limits_shared": [0.0] * 2 + [0.02] * 2 + [0.0] * 2,
        },
        "vision_config": {"width": 32, "layers": 1, "heads": 2, "image_size": 28, "patch_size": 14},
        "image_token_id": 130,
    },
    "qwen2_vl": {
        "text_config": {**TEXT, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 2, 2],
                                                    "rope_theta": 1e4}, "bos_token_id": 1, "eos_token_id": 2},
        "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 48, "num_heads": 2, "mlp_ratio": 2},
        "image_token_id": 130, "video_token_id": 129, "vision_start_token_id": 128, "vision_end_token_id": 127,
    },
}  # fmt: skip


def make_model(model_type: str) -> Any:
    return random_model(AutoConfig.for_model(model_type, **MODELS[model_type]))


def saved(model: Any, folder: Path) -> tuple[Path, Path]:
    """The model's checkpoint, and a directory with its config alone."""
    model.save_pretrained(folder / "checkpoint")
    (folder / "config").mkdir()
    shutil.copy(folder / "checkpoint" / "config.json", folder / "config")
    return folder / "checkpoint", folder / "config"


def command(*arguments: Any) -> str:
    ran = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert ran.exit_code == 0, ran.output
    return ran.stdout


@pytest.mark.parametrize("model_type", MODELS)
def test_text_is_answered_as_by_transformers(model_type: str, tmp_path: Path) -> None:
    model = make_model(model_type)
    checkpoint, config = saved(model, tmp_path)

    bundle = precast.build(config, tmp_path / "bundle", dtype="float32")
    found = agreement(bundle, checkpoint, model)

    assert found.logits_error < 1e-4
    assert found.tokens_equal


def test_the_commands(tmp_path: Path) -> None:
    """What is for pictures is listed, and a checkpoint with all of it is taken without complaint."""
    model = make_model("gemma3")
    checkpoint, config = saved(model, tmp_path)
    bundle = tmp_path / "bundle"

    command("build", config, "-o", bundle, "--dtype", "float32")
    weights = json.loads(command("inspect", bundle, "--weights", "--json"))
    as_text = command("inspect", bundle, "--weights")
    verified = command("verify", bundle, "--weights", checkpoint)
    ids = ",".join(map(str, PROMPTS[0]))
    ran = command(
        "run", bundle, "--weights", checkpoint, "--device", "cpu", "--token-ids", ids, "--max-tokens", 8,
        "--ignore-eos", "--json",
    )  # fmt: skip

    assert weights["unused"] == ["multi_modal_projector.*", "vision_tower.*"]
    assert "vision_tower.*" in as_text
    with safe_open(checkpoint / "model.safetensors", "pt") as file:
        assert any("vision_tower." in name for name in file.keys())  # noqa: SIM118 - it is no mapping
    assert "params can be made" in verified
    assert json.loads(ran)["outputs"][0]["token_ids"] == hf_greedy(model, PROMPTS[0], 8)


def test_a_tensor_of_the_text_model_must_not_be_missing(tmp_path: Path) -> None:
    """The parts that are unused are those, and no others."""
    bundle = precast.build(AutoConfig.for_model("gemma3", **MODELS["gemma3"]), tmp_path / "bundle")

    assert not any("language" in pattern for pattern in Bundle.open(bundle.path).manifest.checkpoint.unused)


@pytest.mark.parametrize("model_type", ["llava", "gemma3"])
def test_it_is_checked_as_any_other(model_type: str) -> None:
    compare(AutoConfig.for_model(model_type, **MODELS[model_type]))


def test_step_3_7_in_fp8(tmp_path: Path) -> None:
    """As published: experts are stacked, gates and values apart, with a scale for each block; layers that draft tokens
    stand behind the others, and are not read. Only layers that clamp have no op for experts. The gates of heads, fewer
    rows than a block has, are made in the product of queries, keys and values."""
    model = make_model("step3p7")
    plain, stored = tmp_path / "plain", tmp_path / "stored"
    model.save_pretrained(plain)
    shutil.copytree(plain, stored)
    dense, files = load_file(plain / "model.safetensors"), {"model.layers.4.eh_proj.weight": torch.ones(3)}
    for name, tensor in dense.items():
        if not re.fullmatch(r"model\.layers\..*_proj\.weight", name):
            files[name] = tensor
            continue
        shape = (*tensor.shape[:-2], *(-(-size // 16) for size in tensor.shape[-2:]))
        made, values = quantised.float8(name, tensor, (16, 16), "_scale_inv", shape)
        made[f"{name}_scale_inv"] /= 128  # of the size that the weight has
        files, dense[name] = files | made, values / 128
    save_file(dense, plain / "model.safetensors", {"format": "pt"})
    save_file(files, stored / "model.safetensors", {"format": "pt"})
    entries = json.loads((stored / "config.json").read_text(encoding="utf-8"))
    entries["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    (stored / "config.json").write_text(json.dumps(entries), encoding="utf-8")

    bundle = precast.build(stored, tmp_path / "bundle", dtype="float32")
    found = agreement(bundle, stored, type(model).from_pretrained(plain, dtype=torch.float32))

    assert found.logits_error < 1e-4
    assert found.tokens_equal
    ops = [Counter(node.op for node in block.nodes) for block in bundle.graph.blocks]
    experts = {(each["precast.quantised_experts"], each["precast.grouped_linear"]) for each in ops}
    assert experts == {(0, 0), (1, 0), (0, 2)}
    assert prove(bundle, stored, tp=2).holds
    assert any(param.name.endswith("q_proj_k_proj_v_proj_g_proj.weight.scales") for param in bundle.graph.params)


LLAVA = Path(__file__).parents[1] / "configs" / "liuhaotian--llava-v1.5-7b" / "config.json"
OF_PICTURES = {
    "model.image_newline": (48,),
    "model.mm_projector.0.weight": (48, 32),
    "model.mm_projector.2.bias": (48,),
    "model.vision_tower.vision_tower.vision_model.post_layernorm.weight": (32,),
}


def published_llava(folder: Path, others: dict[str, tuple[int, ...]]) -> Any:
    """A checkpoint as LLaVA's authors have it, small: the published config with these sizes, a Llama's tensors under
    their own names, and others beside them. Gives the Llama."""
    small = {name: value for name, value in TEXT.items() if name != "head_dim"}
    entries = json.loads(LLAVA.read_text(encoding="utf-8")) | small | {"mm_hidden_size": 32}
    model = random_model(AutoConfig.for_model("llama", **small, rms_norm_eps=entries["rms_norm_eps"]))
    model.save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    save_file(stored | {name: torch.ones(shape) for name, shape in others.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(entries), encoding="utf-8")
    return model


def test_a_flat_llava_config_is_a_llamas(tmp_path: Path) -> None:
    model = published_llava(tmp_path / "checkpoint", OF_PICTURES)

    bundle = precast.build(tmp_path / "checkpoint", tmp_path / "bundle", dtype="float32")
    found = agreement(bundle, tmp_path / "checkpoint", model)

    assert found.logits_error < 1e-4
    assert found.tokens_equal
    assert bundle.manifest.checkpoint.unused == ("model.image_newline", "model.mm_projector.*", "model.vision_tower.*")


def test_what_nobody_knows_of_in_a_llava_checkpoint_is_refused(tmp_path: Path) -> None:
    published_llava(tmp_path / "checkpoint", {"model.audio_tower.weight": (3,)})
    bundle = precast.build(tmp_path / "checkpoint", tmp_path / "bundle", dtype="float32")

    with pytest.raises(WeightsError, match=r"model\.audio_tower\.weight"):
        precast.load(bundle, weights=tmp_path / "checkpoint", device="cpu")
