"""What configs of quantised checkpoints say, as their publishers write it."""

from __future__ import annotations

from typing import Any

NVFP4_EXPERTS = {
    "moe_quant_algo": "NVFP4", "quant_algo": "MIXED_PRECISION", "group_size": 16, "ignore": ["*.attn.*", "head"],
    "quantized_layers": {"layers.1.ffn.experts": {"quant_algo": "NVFP4", "group_size": 16}},
}  # fmt: skip
"""As ModelOpt says it of DeepSeek-V4, in the publisher's names; here of one layer."""


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


def groups(format: str, weights: dict[str, Any], targets: list[str] | None = None) -> dict[str, Any]:
    """compressed-tensors' config with one group of layers."""
    return {
        "quant_method": "compressed-tensors", "format": format, "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": targets or ["Linear"], "weights": weights}},
    }  # fmt: skip


MODELOPT = {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head", "*.layers.0.mlp*"]}


EIGHT = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}


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
