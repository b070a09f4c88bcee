"""Quantised checkpoints in the folders that publishers have: built and loaded, with the logits of the same values in
float32.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import pytest
import quantised
import torch
from quantised import Stored
from reference import hf_logits, relative_error
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import precast
from precast.builder.source.shrink import random_model

PROMPT = [5, 9, 70, 33, 12, 88]

FOUR = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16, "symmetric": False}
EIGHT = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}


def compressed(format: str, weights: dict[str, Any]) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": groups, "ignore": ["lm_head"]}


def packed(name: str, weight: torch.Tensor) -> Stored:
    return quantised.integers(name, weight, 4, 16, zeros=True, order=False, packed=True)


def integers(name: str, weight: torch.Tensor) -> Stored:
    return quantised.integers(name, weight, 8, None, zeros=False, order=False, packed=False)


CASES: dict[str, tuple[str, str, dict[str, Any], Callable[[str, torch.Tensor], Stored]]] = {
    # the model, the file that says how it is quantised, what it says, and what a layer's weight becomes
    "ModelOpt NVFP4": (
        "llama",
        "hf_quant_config.json",
        {
            "producer": {"name": "modelopt"},
            "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16,
                             "exclude_modules": ["lm_head"]},
        },
        quantised.nvfp4,
    ),
    "compressed NVFP4": (
        "qwen3_moe",
        "config.json",
        compressed(
            "nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
        ),
        lambda name, weight: quantised.nvfp4(name, weight, divided=True),
    ),
    "INT4": ("llama", "config.json", compressed("pack-quantized", FOUR), packed),
    "INT8": ("llama", "config.json", compressed("int-quantized", EIGHT), integers),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_dequantised_model(case: str, tmp_path: Path) -> None:
    family, file, entries, quantise = CASES[case]
    plain, stored = tmp_path / "plain", tmp_path / "stored"
    config = families.make_config(family)
    config.moe_intermediate_size = 32  # of the experts, whose rows NVFP4 stores in blocks of 16
    random_model(config).save_pretrained(plain)
    dense, files = load_file(plain / "model.safetensors"), {}
    for name, tensor in dense.items():
        if ".layers." in name and name.endswith("_proj.weight"):
            made, dense[name] = quantise(name, tensor)
            files |= made
        else:
            files[name] = tensor
    save_file({name: each.contiguous() for name, each in dense.items()}, plain / "model.safetensors", {"format": "pt"})
    stored.mkdir()
    save_file(files, stored / "model.safetensors")
    written = json.loads((plain / "config.json").read_text())
    (stored / file).write_text(json.dumps(entries))
    both = written | {"quantization_config": entries} if file == "config.json" else written
    (stored / "config.json").write_text(json.dumps(both))
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)

    precast.build(stored, stored / "b", dtype="float32")
    with precast.load(stored / "b", weights=stored, device="cpu", cache_bytes=1 << 20) as engine:
        found = engine.logits(PROMPT)

    assert relative_error(found, hf_logits(model, [PROMPT])[0]) < 1e-5
