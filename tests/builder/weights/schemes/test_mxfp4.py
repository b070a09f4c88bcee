"""gpt-oss's experts."""

from __future__ import annotations

from pathlib import Path

import pytest
import quantised
import torch
from quantised import Stored
from stored_weights import check, config_of
from transformers import AutoModelForCausalLM

from precast.builder.weights.recipes import ModelCheckpoint
from precast.ir.errors import BuildError


def test_mxfp4(tmp_path: Path) -> None:
    config = config_of("gpt_oss", num_local_experts=4, intermediate_size=32)
    entries = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}

    def quantise(name: str, tensor: torch.Tensor) -> Stored | None:
        return quantised.mxfp4(name, tensor) if name.endswith(("experts.gate_up_proj", "experts.down_proj")) else None

    check(config, entries, quantise, tmp_path, dtype="bfloat16")


def test_inputs_that_are_no_multiple_of_32() -> None:
    with torch.device("meta"):
        meta = AutoModelForCausalLM.from_config(config_of("gpt_oss", num_local_experts=4, intermediate_size=40))

    with pytest.raises(BuildError, match=r"experts.down_proj has 40 inputs, which they don't divide"):
        ModelCheckpoint(meta, {"quant_method": "mxfp4"}).recipes(meta.state_dict())
