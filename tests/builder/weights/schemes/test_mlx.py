"""MLX's groups, with biases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import quantised
import torch
from quantised import Stored
from stored_weights import check, config_of
from transformers import AutoConfig

from precast.builder.capture.factory import make_module
from precast.builder.source.shrink import shrink
from precast.builder.weights.recipes import ModelCheckpoint
from precast.ir.errors import BuildError


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
