"""The options of `quantization_config` that are known, method by method, and what they may be.

Configs carry what their quantiser was told beside what a reader needs. Options that say nothing about the stored
tensors are listed as such; any other must have a value that is known here, or the build is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from transformers import PreTrainedConfig

from precast.ir.errors import BuildError


class Quantised(NamedTuple):
    """How a checkpoint is quantised: the method, and the entries of its config."""

    method: str
    entries: Mapping[str, Any]

    def get(self, name: str, default: Any) -> Any:
        """The entry of this name."""
        return self.entries.get(name, default)


def quantisation_of(config: PreTrainedConfig) -> dict[str, Any] | None:
    """The config's `quantization_config`, or that of its text model; None without one."""
    found = getattr(config, "quantization_config", None)
    if found is None:
        found = getattr(config.get_text_config(), "quantization_config", None)
    return dict(found if isinstance(found, dict) else found.to_dict()) if found else None


def unquantised(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy of the config that says nothing of quantisation."""
    plain = copy.deepcopy(config)
    for part in (plain, plain.get_text_config()):
        if hasattr(part, "quantization_config"):
            delattr(part, "quantization_config")
    return plain


def check_options(entries: Mapping[str, Any], where: str | None = None) -> Quantised:
    """The method and its options. Raises BuildError (`feature-unsupported`), naming what isn't known.

    `where`: what the config was read from, for the message.
    """
    method = str(getattr(entries.get("quant_method"), "value", entries.get("quant_method")))
    if method not in _KNOWN:
        known = ", ".join(_KNOWN)
        raise BuildError(
            "feature-unsupported",
            f"the checkpoint is quantised by {method}; known are {known}",
            where=where,
            fix="use a checkpoint of float32, bfloat16 or float16 weights, or of one of these formats",
        )
    allowed = _KNOWN[method]
    for name, value in entries.items():
        if name == "quant_method" or (name in _SAYS_NOTHING and name not in allowed):
            continue
        if name not in allowed or not allowed[name](value):
            raise refuse(method, f"{name} = {value!r}", where)
    return Quantised(method, entries)


def refuse(method: str, what: str, where: str | None = None) -> BuildError:
    """The error for something in a known method that isn't known."""
    return BuildError(
        "feature-unsupported",
        f"the checkpoint is quantised by {method}, with {what}: this is not known",
        where=where,
        fix="use a checkpoint of float32, bfloat16 or float16 weights",
    )


Check = Callable[[Any], bool]


def _one_of(*values: Any) -> Check:
    return lambda value: value in values


def _names(value: Any) -> bool:
    return value is None or (isinstance(value, (list, tuple)) and all(isinstance(name, str) for name in value))


def _block(value: Any) -> bool:
    fits = isinstance(value, (list, tuple)) and len(value) == 2
    return value is None or (fits and all(type(size) is int and size > 0 for size in value))


def _group_size(value: Any) -> bool:
    return type(value) is int and (value == -1 or value > 0)


def _only_skips(value: Any) -> bool:
    """GPTQModel's overrides by module: `-:` leaves one as it is, anything else changes its format."""
    return not value or (isinstance(value, Mapping) and all(str(name).startswith("-:") for name in value))


def _modules(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(isinstance(each, str) or _names(each) for each in value))


def _float8_groups(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value) and all(_float8_group(group) for group in value.values())


def _float8_group(group: Any) -> bool:
    if not isinstance(group, Mapping) or not _names(group.get("targets")) or not group.get("targets"):
        return False
    weights = group.get("weights")
    if group.get("format") not in (None, *_FLOAT8_FORMATS) or not isinstance(weights, Mapping):
        return False
    known = (weights.get("num_bits"), weights.get("type"), weights.get("symmetric", True)) == (8, "float", True)
    strategy = weights.get("strategy")
    has_block = strategy != "block" or (_block(weights.get("block_structure")) and weights.get("block_structure"))
    return known and strategy in ("tensor", "channel", "block") and bool(has_block)


_FLOAT8_FORMATS = ("float-quantized", "naive-quantized")
_NO_SPARSITY: Check = lambda value: not value or value.get("format", "dense") == "dense"  # noqa: E731
_EMPTY: Check = lambda value: not value  # noqa: E731
_gemm: Check = lambda value: str(getattr(value, "value", value)).lower() == "gemm"  # noqa: E731

_SAYS_NOTHING = frozenset(
    # of how a checkpoint was made, how it is computed with, and what becomes of activations and caches
    ("act_group_aware", "activation_scale_ub", "activation_scheme", "backend", "batch_size", "block_name_to_quantize",
     "cache_block_outputs", "damp_auto_increment", "damp_percent", "dataset", "dequantize", "desc_act",
     "disable_exllama", "do_fuse", "exllama_config", "fuse_max_seq_len", "global_compression_ratio",
     "is_marlin_format", "kv_cache_scheme", "max_input_length", "meta", "model_file_base_name", "model_name_or_path",
     "model_seqlen", "module_name_preceding_first_block", "modules_in_block_to_quantize", "modules_to_fuse", "mse",
     "pad_token_id", "parallel_packing", "quantization_status", "quantized_by", "quantizer", "run_compressed",
     "static_groups", "sym", "tokenizer", "true_sequential", "uri", "use_cuda_fp16", "use_exllama",
     "use_optimized_inference", "version")
)  # fmt: skip
"""Options that say nothing about the stored tensors, in methods that don't list them as their own."""

_KNOWN: dict[str, dict[str, Check]] = {
    "fp8": {
        "weight_block_size": _block, "modules_to_not_convert": _names, "ignored_layers": _names,
        "modules_to_convert": _one_of(None), "scale_fmt": _one_of(None, "float", "ue8m0"), "fmt": _one_of("e4m3"),
        "expert_dtype": _one_of(None, "fp8"),
    },
    "fbgemm_fp8": {"modules_to_not_convert": _names},
    "compressed-tensors": {
        "config_groups": _float8_groups, "format": _one_of(*_FLOAT8_FORMATS), "ignore": _names,
        "sparsity_config": _NO_SPARSITY, "transform_config": _EMPTY,
    },
    "mxfp4": {"modules_to_not_convert": _names},
    "awq": {
        "bits": _one_of(4), "w_bit": _one_of(4), "group_size": _group_size, "q_group_size": _group_size,
        "zero_point": _one_of(True), "version": _gemm, "format": _gemm, "modules_to_not_convert": _names,
    },
    "gptq": {
        "bits": _one_of(4), "group_size": _group_size, "checkpoint_format": _one_of("gptq", "gptq_v2"),
        "format": _one_of("gptq", "gptq_v2"), "lm_head": _one_of(True, False), "dynamic": _only_skips,
        "modules_in_block_to_quantize": _modules, "pack_dtype": _one_of("int32"),
    },
}  # fmt: skip
"""The options of each method that say what is stored, and whether a value of theirs is known."""
