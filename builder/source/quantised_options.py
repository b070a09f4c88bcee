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


_NAMES = {"quantization_config": None, "compression_config": "compressed-tensors", "quantization": "mlx"}
"""What publishers call the entry that says how a checkpoint is quantised, and the method where it names none."""

FILES = {
    "hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq",
}  # fmt: skip
"""Files beside a `config.json` that say it instead, or once more, and the method of each."""


def quantisation_of(config: PreTrainedConfig) -> dict[str, Any] | None:
    """What the config, or its decoder's part, says of how its checkpoint is quantised; None: it says nothing."""
    parts = (config, config.get_text_config())
    said = [(name, getattr(part, name, None)) for name in _NAMES for part in parts]
    found = [(name, entries) for name, entries in said if entries]
    if not found:
        return None
    entries = found[0][1]
    if not hasattr(entries, "to_dict") and not isinstance(entries, Mapping):
        return {"quant_method": str(entries)}
    entries = dict(entries if isinstance(entries, Mapping) else entries.to_dict())
    method = next((_NAMES[name] for name, _ in found if _NAMES[name]), "modelopt" if "quant_algo" in entries else None)
    return entries if "quant_method" in entries or method is None else {"quant_method": method} | entries


def add_quantisation(config: PreTrainedConfig, files: Mapping[str, Mapping[str, Any]], name: str) -> None:
    """Add to the config what the files beside it say of quantisation: `files` are those of `FILES` that there are.

    Raises BuildError (`feature-unsupported`) for one that contradicts the config.
    """
    for file, entries in files.items():
        method = FILES[file]
        inner = entries.get("quantization")
        added = {"quant_method": method} | dict(inner if isinstance(inner, Mapping) else entries)
        said = quantisation_of(config)
        if said is None:
            config.quantization_config = added
        elif method == "modelopt" and _algorithm(added) not in (None, _algorithm(said)):
            raise BuildError(
                "feature-unsupported",
                f"it is quantised by {_algorithm(added)} in {file}, and by {_algorithm(said)} in config.json",
                where=name,
                fix="remove what doesn't describe the checkpoint's tensors",
            )


def _algorithm(entries: Mapping[str, Any]) -> str | None:
    """What ModelOpt calls a method; of other methods, their name."""
    method = entries.get("quant_method")
    return entries.get("quant_algo") if method == "modelopt" else str(getattr(method, "value", method))


def unquantised(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy of the config that says nothing of quantisation."""
    plain = copy.deepcopy(config)
    for part in (plain, plain.get_text_config()):
        for name in _NAMES:
            if hasattr(part, name):
                delattr(part, name)
    return plain


def check_options(entries: Mapping[str, Any], where: str | None = None) -> Quantised:
    """The method and its options. Raises BuildError (`feature-unsupported`), naming what isn't known.

    `where`: what the config was read from, for the message.
    """
    said = entries.get("quant_method")
    method = str(getattr(said, "value", said))
    if method not in _KNOWN:
        what = method if said is not None else f"a method that isn't named ({', '.join(map(str, entries))})"
        raise BuildError(
            "feature-unsupported",
            f"the checkpoint is quantised by {cut(what)}; known are {', '.join(_KNOWN)}",
            where=where,
            fix="use a checkpoint of float32, bfloat16 or float16 weights, or of one of these formats",
        )
    allowed = _KNOWN[method]
    for name, value in entries.items():
        if name == "quant_method" or (name in _SAYS_NOTHING and name not in allowed):
            continue
        if name not in allowed or not allowed[name](value):
            raise refuse(method, _described(str(name), value), where)
    if method == "modelopt" and entries.get("quant_algo") and not {"ignore", "exclude_modules"} & set(entries):
        raise refuse(method, "no list of the modules that are not (ignore, exclude_modules)", where)
    return Quantised(method, entries)


def refuse(method: str, what: str, where: str | None = None) -> BuildError:
    """The error for something in a known method that isn't known."""
    return BuildError(
        "feature-unsupported",
        f"the checkpoint is quantised by {method}, with {what}: this is not known",
        where=where,
        fix="use a checkpoint of float32, bfloat16 or float16 weights",
    )


def _described(name: str, value: Any) -> str:
    """An option that isn't known, in few words: of groups of layers, the first that isn't."""
    if name == "config_groups" and isinstance(value, Mapping):
        group = next((f"{name}.{key}" for key, each in value.items() if not _float8_group(each)), name)
        value = value.get(group.partition(".")[2])
        weights = value.get("weights") if isinstance(value, Mapping) else None
        told = ("num_bits", "type", "strategy", "symmetric", "group_size", "block_structure")
        if isinstance(weights, Mapping):
            said = ", ".join(f"{key} = {weights[key]!r}" for key in told if weights.get(key) is not None)
            return cut(f"{group}.weights: {said}")
        name = group
    return cut(f"{name} = {value!r}")


def cut(text: str) -> str:
    """The text, or where it is long its beginning: options can be anything."""
    return text if len(text) <= 160 else f"{text[:157]}..."


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
    strategy = weights.get("strategy")
    has_block = strategy != "block" or (_block(weights.get("block_structure")) and weights.get("block_structure"))
    return _float8(weights) and strategy in ("tensor", "channel", "block") and bool(has_block)


def _per_tensor_groups(groups: Any) -> bool:
    """ModelOpt's, which name no strategy: one scale a tensor."""
    each = groups.values() if isinstance(groups, Mapping) else [None]
    weights = [group.get("weights") if isinstance(group, Mapping) else None for group in each]
    return all(isinstance(one, Mapping) and _float8(one) and not one.get("group_size") for one in weights)


def _float8(weights: Mapping[str, Any]) -> bool:
    return (weights.get("num_bits"), weights.get("type"), weights.get("symmetric", True)) == (8, "float", True)


_FLOAT8_FORMATS = ("float-quantized", "naive-quantized")
_NO_SPARSITY: Check = lambda value: not value or value.get("format", "dense") == "dense"  # noqa: E731
_EMPTY: Check = lambda value: not value  # noqa: E731
_gemm: Check = lambda value: str(getattr(value, "value", value)).lower() == "gemm"  # noqa: E731

_SAYS_NOTHING = frozenset(
    # of how a checkpoint was made, how it is computed with, and what becomes of activations and caches
    ("act_group_aware", "activation_scale_ub", "activation_scheme", "backend", "batch_size", "block_name_to_quantize",
     "cache_block_outputs", "damp_auto_increment", "damp_percent", "dataset", "dequantize", "desc_act",
     "disable_exllama", "do_fuse", "exllama_config", "fuse_max_seq_len", "global_compression_ratio", "is_marlin_format",
     "kv_cache_quant_algo", "kv_cache_scheme", "max_input_length", "meta", "model_file_base_name", "model_name_or_path",
     "model_seqlen", "module_name_preceding_first_block", "modules_in_block_to_quantize", "modules_to_fuse", "mse",
     "pad_token_id", "parallel_packing", "producer", "quantization_status", "quantized_by", "quantizer",
     "run_compressed", "static_groups", "sym", "tokenizer", "true_sequential", "uri", "use_cuda_fp16", "use_exllama",
     "use_optimized_inference", "version")
)  # fmt: skip
"""Options that say nothing about the stored tensors, in methods that don't list them as their own."""

_KNOWN: dict[str, dict[str, Check]] = {
    "fp8": {
        "weight_block_size": _block, "modules_to_not_convert": _names, "ignored_layers": _names,
        "modules_to_convert": _one_of(None), "scale_fmt": _one_of(None, "float", "ue8m0"),
        "fmt": _one_of("e4m3", "e4m3fn", "float8_e4m3fn"), "expert_dtype": _one_of(None, "fp8"),
    },
    "fbgemm_fp8": {"modules_to_not_convert": _names},
    "compressed-tensors": {
        "config_groups": _float8_groups, "format": _one_of(*_FLOAT8_FORMATS), "ignore": _names,
        "sparsity_config": _NO_SPARSITY, "transform_config": _EMPTY,
    },
    "modelopt": {
        "quant_algo": _one_of("FP8", None), "ignore": _names, "exclude_modules": _names,
        "config_groups": _per_tensor_groups, "group_size": _one_of(None),
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
