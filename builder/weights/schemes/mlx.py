"""MLX: affine groups of linear layers and embeddings."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from precast.builder.source.quantised_options import Quantised, refuse
from precast.builder.weights.schemes.scheme import Scheme, Weight
from precast.ir.graph.schema import Dequantise, Read, Recipe

_AS_IN_MLX = ("llama", "mistral", "qwen2", "qwen3")
"""Types of models whose tensors MLX stores under transformers' names, with the same values: in mlx_lm.models, the
`sanitize` of llama (which mistral is read as, too), qwen2 and qwen3 only leaves some out. That of others renames and
stacks tensors, or adds 1 to norms."""


def mlx(model: PreTrainedModel, options: Quantised) -> Scheme:
    """MLX's affine groups, of all linear layers and embeddings that whole groups fit into: `quantize_model` of mlx_lm.

    Where a publisher chose layers, the config has entries by their names, which are refused, or the checkpoint lacks
    scales.
    """
    if model.config.model_type not in _AS_IN_MLX:
        raise refuse("mlx", f"model type {model.config.model_type}")
    bits, size = options.entries["bits"], options.entries["group_size"]

    def holds(weight: Weight) -> bool:
        module = model.get_submodule(weight.module)
        has_groups = isinstance(module, (torch.nn.Linear, torch.nn.Embedding)) and weight.param.endswith(".weight")
        return has_groups and weight.shape[-1] % size == 0

    def recipe(weight: Weight) -> Recipe:
        outputs, inputs = weight.shape
        values = Read(weight.name, (outputs, inputs * bits // 32), "int32")
        scales, biases = (Read(f"{weight.stem}.{part}", (outputs, inputs // size)) for part in ("scales", "biases"))
        return Dequantise(values, scales, "packed4" if bits == 4 else "packed8", biases=biases)

    return Scheme("mlx", holds, recipe, ())
