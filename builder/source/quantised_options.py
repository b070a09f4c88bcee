"""The options of `quantization_config` that are known, method by method, and what they may be.

Configs carry what their quantiser was told beside what a reader needs. Options that say nothing about the stored
tensors are listed as such; any other must have a value that is known here, or the build is refused.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedConfig

from precast.builder.source import compressed_options, quark_options
from precast.ir.errors import BuildError
from precast.ir.graph.schema import Dtype


class Quantised(NamedTuple):
    """How a checkpoint is quantised: the method, and the entries of its config."""

    method: str
    entries: Mapping[str, Any]

    def get(self, name: str, default: Any) -> Any:
        """The entry of this name."""
        return self.entries.get(name, default)


_NAMES = {"quantization_config": None, "compression_config": "compressed-tensors", "quantization": "mlx"}
"""What publishers call the entry that says how a checkpoint is quantised, and the method where it names none."""


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


def kv_dtype_of(entries: Mapping[str, Any] | None) -> tuple[Dtype | None, str | None]:
    """The dtype of keys and values that a checkpoint was quantised for, None for that of the activations; and what to
    tell the user where it says something else, which is not known.

    ModelOpt says `kv_cache_quant_algo`, and as compressed-tensors `kv_cache_scheme`; Quark says it of the outputs of
    layers.
    """
    said = entries or {}
    outputs = quark_options.kv_outputs(said) if said.get("quant_method") == "quark" else []
    if outputs and all(map(quark_options.is_float8, outputs)):
        return "float8_e4m3fn", None
    if outputs:
        return None, _kept_kv(f"output_tensors of keys and values are {outputs[0]!r}")
    algorithm, scheme = said.get("kv_cache_quant_algo"), said.get("kv_cache_scheme")
    if "FP8" in (algorithm, scheme) or (isinstance(scheme, Mapping) and _is_float8(scheme)):
        return "float8_e4m3fn", None
    if algorithm is None and scheme is None:
        return None, None
    name = "kv_cache_quant_algo" if algorithm is not None else "kv_cache_scheme"
    return None, _kept_kv(f"{name} is {said[name]!r}")


def _kept_kv(found: str) -> str:
    return f"{cut(found)}, which is not known: keys and values keep the model's dtype (--kv-dtype)"


def ignored_outputs(entries: Mapping[str, Any] | None) -> list[str]:
    """What to tell the user of outputs of layers that compressed-tensors says are rounded, and are not."""
    groups = (entries or {}).get("config_groups")
    found = groups.items() if isinstance(groups, Mapping) else ()
    named = [str(name) for name, group in found if isinstance(group, Mapping) and group.get("output_activations")]
    return [f"config_groups.{cut(name)}.output_activations: outputs of layers are not rounded" for name in named]


def _is_float8(scheme: Mapping[str, Any]) -> bool:
    """One scale, for all of a layer's keys or values, known beforehand."""
    wanted = {"num_bits": 8, "strategy": "tensor", "symmetric": True, "dynamic": False}
    return scheme.get("type") == "float" and all(scheme.get(name, value) == value for name, value in wanted.items())


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
            fix=f"{_OTHER}, or of one of these formats",
        )
    if method == "compressed-tensors":
        entries = compressed_options.spelled_out(entries)
    if found := list(_unknown(method, entries)):
        raise _refuse_all(method, found, where)
    entries = in_one_spelling(method, entries, where)
    if method == "modelopt":
        _check_modelopt(entries, where)
    if method == "fp8":
        _check_tensors(entries, where)
        _check_mixed(entries, where)
    if method == "mlx" and not {"group_size", "bits"} <= set(entries):
        raise refuse(method, "no group_size, or no bits", where)
    if method == "auto-round" and not {"bits", "group_size", "packing_format"} <= set(entries):
        raise refuse(method, "no bits, no group_size, or no packing_format", where)
    if method == "gptq" and "bits" not in entries:
        raise refuse(method, "no bits", where, why="4 or 8 are known")
    if method == "compressed-tensors" and "config_groups" not in entries:
        raise refuse(method, "no config_groups", where)
    for name, pattern in _patterns(method, entries):
        try:
            re.compile(pattern)
        except re.error as error:
            what = f"{cut(f'{pattern!r} in {name}')}, which is no regular expression ({error})"
            raise refuse(method, what, where, "correct the pattern, as the checkpoint's publisher means it") from None
    return Quantised(method, entries)


_SPELLINGS = {
    "fp8": {"ignored_layers": "modules_to_not_convert"},
    "mxfp8": {"ignored_layers": "modules_to_not_convert"},
    "awq": {
        "q_group_size": "group_size", "w_bit": "bits", "version": "checkpoint_format", "format": "checkpoint_format",
    },
    "gptq": {"format": "checkpoint_format"},
    "modelopt": {"exclude_modules": "ignore"},
}  # fmt: skip
"""Other names of options, and the one that schemes read."""


def in_one_spelling(method: str, entries: Mapping[str, Any], where: str | None = None) -> dict[str, Any]:
    """The entries with one name for each option. Raises BuildError where two names of one say different things.

    Of `fp8` an empty list says nothing, as readers of such checkpoints take it. ModelOpt's library writes the name of
    FP8 in blocks in small letters, and AutoAWQ its formats' in large ones, too.
    """
    names = _SPELLINGS.get(method, {})
    if method == "awq":
        entries = {name: _word(value) if name in _AWQ_FORMATS else value for name, value in entries.items()}
    nothing: tuple[Any, ...] = (None, []) if method in ("fp8", "mxfp8") else (None,)
    made = {name: value for name, value in entries.items() if name not in names}
    for name, value in entries.items():
        known = names.get(name)
        if known is None:
            continue
        if made.get(known) in nothing:
            made[known] = value
        elif value not in nothing and not _says_same(made[known], value):
            what = cut(f"{known} = {made[known]!r} and {name} = {value!r}")
            fix = "remove the one that doesn't describe the checkpoint's tensors"
            raise refuse(method, what, where, fix, why="both are names of one option")
    if method == "modelopt":
        return _named_in_blocks(made)
    return made


def _named_in_blocks(entries: dict[str, Any]) -> dict[str, Any]:
    """The entries, or a layer's, with ModelOpt's FP8 in blocks under one name."""
    made = entries | ({"quant_algo": IN_BLOCKS} if entries.get("quant_algo") == IN_BLOCKS.lower() else {})
    layers = entries.get("quantized_layers")
    if isinstance(layers, Mapping):
        named = {name: _named_in_blocks(dict(said)) if isinstance(said, Mapping) else said
                 for name, said in layers.items()}  # fmt: skip
        made["quantized_layers"] = named
    return made


_AWQ_FORMATS = frozenset(("version", "format", "checkpoint_format"))
"""The names that AWQ's format goes by."""


def _word(value: Any) -> str | None:
    """A value, which may be one of an enumeration, in small letters; None: nothing is said."""
    return None if value is None else str(getattr(value, "value", value)).lower()


def _says_same(one: Any, other: Any) -> bool:
    """Whether two values are equal; of lists of names, in any order."""
    if _names(one) and _names(other) and None not in (one, other):
        return set(one) == set(other)
    return bool(one == other)


class _Unknown(NamedTuple):
    """What a config says that isn't known, and why not."""

    what: str
    why: str


def _unknown(method: str, entries: Mapping[str, Any]) -> Iterator[_Unknown]:
    """All options, and all layers and groups of them, that say what isn't known of a method."""
    allowed = _KNOWN[method]
    for name, value in entries.items():
        if name == "quant_method" or ((name in _SAYS_NOTHING or value is None) and name not in allowed):
            continue
        if name not in allowed:
            known = f"known options are {', '.join(sorted(allowed))}"
            yield _Unknown(_described(str(name), value), f"this is not known ({known})")
        elif name == "quantized_layers" and isinstance(value, Mapping):
            # of `modelopt` the scheme looks at formats (`check_layers`): it knows which of the layers are the model's
            later = Mapping if method == "modelopt" else ()
            yield from _unknown_layers({layer: said for layer, said in value.items() if not isinstance(said, later)})
        elif not allowed[name](value):
            yield _Unknown(_described(str(name), value), _not_known(allowed[name].expected))
    if method == "quark":
        for what in quark_options.unknown_layers(entries):
            yield _Unknown(cut(what), _not_known(quark_options.KNOWN))
    groups = entries.get("config_groups")
    if method == "compressed-tensors" and isinstance(groups, Mapping):
        for name, group in groups.items():
            if isinstance(group, Mapping) and not _has_targets(group):
                what = _described(f"config_groups.{name}.targets", group.get("targets"))
                yield _Unknown(what, _not_known("a list of names, one at least"))
            elif stored_as(group, entries.get("format")) is None:
                yield _Unknown(_described_group(str(name), group, entries.get("format")), _not_known(_COMPRESSED))


def _unknown_layers(layers: Mapping[str, Any]) -> Iterator[_Unknown]:
    """Those of ModelOpt's `quantized_layers` whose format isn't known."""
    for layer, said in layers.items():
        if not is_known_layer(said):
            yield _Unknown(_described(f"quantized_layers.{layer}", said), _not_known(_modelopt_layers.expected))


def is_known_layer(said: Any) -> bool:
    """Whether one of ModelOpt's `quantized_layers` says a format that is known, and no more."""
    return isinstance(said, Mapping) and _is_modelopt(said)


def check_layers(method: str, layers: Mapping[str, Any]) -> None:
    """Refuse those of ModelOpt's `quantized_layers` whose format isn't known."""
    if found := list(_unknown_layers(layers)):
        raise _refuse_all(method, found, None)


def _refuse_all(method: str, found: Sequence[_Unknown], where: str | None) -> BuildError:
    if len(found) == 1:
        return refuse(method, found[0].what, where, why=found[0].why)
    lines = in_all_layers(f"{each.what}: {each.why}" for each in found)
    head = f"the checkpoint is quantised by {method}, with {len(found)} things that are not known:"
    return BuildError("feature-unsupported", "\n  ".join((head, *lines)), where=where, fix=_USE_OTHER)


def in_all_layers(lines: Iterable[str]) -> list[str]:
    """Lines that differ in the numbers of layers alone as one, with `*` for these, and how many it was."""
    kinds = Counter(re.sub(r"(?<=[^\W\d])\.\d+(?=\.)", ".*", line) for line in lines)
    return [kind + (f" (of {count})" if count > 1 else "") for kind, count in kinds.items()]


def _patterns(method: str, entries: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The regular expressions for layers' names, each with the option that has it."""
    if method == "compressed-tensors":
        lists = [("ignore", entries.get("ignore") or ())]
        lists += [(f"config_groups.{name}.targets", each["targets"]) for name, each in entries["config_groups"].items()]
        listed = ((name, pattern) for name, patterns in lists for pattern in patterns if pattern.startswith("re:"))
        yield from ((name, pattern.removeprefix("re:")) for name, pattern in listed)
    for pattern in entries.get("dynamic") or () if method == "gptq" else ():
        yield "dynamic", pattern_of(pattern)
    yield from (("extra_config", pattern) for pattern in entries.get("extra_config") or ())
    yield from (("modules_to_not_convert", pattern) for pattern in entries.get("modules_to_not_convert") or ())


def _check_modelopt(entries: Mapping[str, Any], where: str | None) -> None:
    """What is quantised must be said: by a list of what is not, or of each layer with its format, where they differ."""
    algorithm, layers = entries.get("quant_algo"), entries.get("quantized_layers")
    if (algorithm == "MIXED_PRECISION") != bool(layers):
        raise refuse("modelopt", f"quant_algo = {algorithm!r} and {len(layers or ())} quantized_layers", where)
    if algorithm and not layers and "ignore" not in entries:
        fix = f"take hf_quant_config.json whole, with its exclude_modules, from the publisher; or {_OTHER}"
        raise refuse("modelopt", "no list of the modules that are not (ignore, exclude_modules)", where, fix)
    known = tuple(_MODELOPT) if layers else tuple(each for each in _MODELOPT if each == algorithm)
    _check_modelopt_groups("modelopt", entries, known, where)
    size = entries.get("group_size")
    if size is not None and algorithm in _MODELOPT and size != _MODELOPT[algorithm][1]:
        raise refuse("modelopt", f"group_size = {size!r} and quant_algo = {algorithm!r}", where)


def _check_tensors(entries: Mapping[str, Any], where: str | None) -> None:
    """Scales of tensors and of blocks exclude each other; inputs with one scale have it beforehand."""
    said, blocks = entries.get("weight_per_tensor"), entries.get("weight_block_size")
    if said is not None and said is (blocks is not None):
        raise refuse("fp8", f"weight_per_tensor = {said!r} and weight_block_size = {blocks!r}", where)


def _check_mixed(entries: Mapping[str, Any], where: str | None) -> None:
    """FP8 of which ModelOpt made the experts NVFP4: what it says of layers must be said of experts alone."""
    said = sorted(_MODELOPTS & set(entries))
    if "moe_quant_algo" not in entries:
        if said:
            raise refuse("fp8", _described(said[0], entries[said[0]]), where)
        return
    layers = entries.get("quantized_layers")
    if entries.get("quant_algo") != "MIXED_PRECISION" or not layers:
        raise refuse("fp8", "moe_quant_algo, and no quantized_layers of MIXED_PRECISION", where)
    found = [
        _Unknown(f"quantized_layers.{_described(name, layer)}", "this is not known") for name, layer in layers.items()
        if not name.endswith(".experts") or layer["quant_algo"] != entries["moe_quant_algo"]
    ]  # fmt: skip
    if found:
        raise _refuse_all("fp8", found, where)
    _check_modelopt_groups("fp8", entries, [entries["moe_quant_algo"]], where)


def _check_modelopt_groups(
    method: str, entries: Mapping[str, Any], algorithms: Iterable[str], where: str | None
) -> None:
    """The weights of all of ModelOpt's `config_groups` must be those of one of its formats. Of groups of layers that
    `quantized_layers` lists, that counts, which the scheme looks at."""
    known, unknown = {_MODELOPT[each] for each in algorithms}, list[_Unknown]()
    listed = (entries.get("quantized_layers") or {}) if method == "modelopt" else {}
    for name, group in (entries.get("config_groups") or {}).items():
        if isinstance(group, Mapping) and _has_targets(group) and set(group["targets"]) <= set(listed):
            continue
        weights = group.get("weights") if isinstance(group, Mapping) else None
        found = _modelopt_weights(weights) if isinstance(weights, Mapping) else None
        if found is None or not any(found == each for each in known):
            formats = ", ".join(f"{each} ({bits} bits{f', groups of {size}' if size else ''})"
                                for each, (bits, size) in _MODELOPT.items() if (bits, size) in known)  # fmt: skip
            why = _not_known(f"floats as in {formats}")
            unknown.append(_Unknown(_described_group(str(name), group), why))
    if unknown:
        raise _refuse_all(method, unknown, where)


_MODELOPTS = frozenset(("quant_algo", "quantized_layers", "config_groups", "ignore", "group_size"))
"""What ModelOpt says in a config of `fp8` whose experts it made NVFP4."""


def _modelopt_weights(weights: Mapping[str, Any]) -> tuple[Any, Any] | None:
    """The bits and the group of ModelOpt's weights of floating point; None: they are something else."""
    is_float = weights.get("type") == "float" and weights.get("symmetric", True) is True
    return (weights.get("num_bits"), weights.get("group_size") or None) if is_float else None


_MODELOPT = {"FP8": (8, None), "MXFP8": (8, 32), "NVFP4": (4, 16), "W4A16_NVFP4": (4, 16)}
"""The formats of ModelOpt that are known: the bits of a value, and how many of a row share a scale; None: all."""


IN_BLOCKS = "FP8_PB_WO"
"""ModelOpt's FP8 in blocks of 128 x 128, of which `config_groups` say nothing."""

_OF_LAYERS: dict[str, tuple[int, int | None]] = {**_MODELOPT, IN_BLOCKS: (8, 128)}
"""The formats that single layers may have (`quantized_layers`)."""


def stored_as(group: Any, format: str | None) -> str | None:
    """What compressed-tensors makes of the weights of a group of layers: fp8, mxfp8, int8, packed4, packed8, nvfp4 or
    mxfp4.

    `format` is what the config says of groups that name no format of their own. None: it isn't known.
    """
    weights = group.get("weights") if isinstance(group, Mapping) and _has_targets(group) else None
    if not isinstance(weights, Mapping) or type(weights.get("symmetric", True)) is not bool:
        return None
    format = group.get("format") or format or "float-quantized"
    strategy, size = weights.get("strategy"), weights.get("group_size")
    bits, symmetric = weights.get("num_bits"), weights.get("symmetric", True)
    kind = (bits if type(bits) is int else None, weights.get("type", "int"))
    in_groups = strategy == "group" and _is_size(size)
    if kind == (8, "float") and symmetric and format in ("float-quantized", "naive-quantized"):
        block = weights.get("block_structure")
        return "fp8" if strategy in ("tensor", "channel") or (strategy == "block" and block and _block(block)) else None
    if kind == (8, "float") and symmetric and format == "mxfp8-quantized":
        return "mxfp8" if in_groups and size == 32 else None
    if kind == (8, "int") and format in ("int-quantized", "naive-quantized"):
        return "int8" if strategy in ("tensor", "channel") or in_groups else None
    if kind in ((4, "int"), (8, "int")) and format == "pack-quantized":
        return f"packed{kind[0]}" if strategy == "channel" or in_groups else None
    if kind == (4, "float") and symmetric and format == "nvfp4-pack-quantized":
        return "nvfp4" if strategy == "tensor_group" and _is(size, 16) else None
    if kind == (4, "float") and symmetric and format == "mxfp4-pack-quantized":
        return "mxfp4" if in_groups and size == 32 else None
    return None


def _has_targets(group: Mapping[str, Any]) -> bool:
    return bool(group.get("targets")) and _names(group["targets"])


_OTHER = "use a checkpoint of float32, bfloat16 or float16 weights"
_USE_OTHER = f"take quantization_config as the checkpoint's publisher has it; or {_OTHER}"


_COMPRESSED = (
    "float of 8 bits, symmetric, by tensor, channel or block (float-quantized) or in groups of 32 (mxfp8-quantized), "
    "of 4 bits in groups of 16 (nvfp4-pack-quantized, tensor_group) or of 32 (mxfp4-pack-quantized); int of 4 or 8 "
    "bits by channel or in groups (pack-quantized), of 8 bits by tensor, too (int-quantized)"
)
"""What is known of compressed-tensors' weights."""


def _not_known(expected: str) -> str:
    return f"this is not known, expected {expected}"


def refuse(
    method: str, what: str, where: str | None = None, fix: str = _USE_OTHER, *, why: str = "this is not known"
) -> BuildError:
    """The error for something in a known method that isn't known; `why` may say what is."""
    return BuildError(
        "feature-unsupported",
        f"the checkpoint is quantised by {method}, with {what}: {why}",
        where=where,
        fix=fix,
    )


def refuse_groups(method: str, weight: str, inputs: int, size: int) -> BuildError:
    """The error for a weight that its groups don't divide."""
    return refuse(method, f"groups of {size}", why=f"{weight} has {inputs} inputs, which they don't divide")


def _described(name: str, value: Any) -> str:
    """An option that isn't known, in few words."""
    return cut(f"{name} = {value!r}")


def _described_group(name: str, group: Any, format: str | None = None) -> str:
    """A group of layers that isn't known, in few words."""
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        return _described(f"config_groups.{name}", group)
    told = ("num_bits", "type", "strategy", "symmetric", "group_size", "block_structure")
    said = [f"{key} = {weights[key]!r}" for key in told if weights.get(key) is not None]
    format = group.get("format") or format
    said += [f"format = {format!r}"] if format else []
    return cut(f"config_groups.{name}.weights: {', '.join(said)}")


def cut(text: str) -> str:
    """The text, or where it is long its beginning: options can be anything."""
    return text if len(text) <= 160 else f"{text[:157]}..."


class Check(NamedTuple):
    """Whether a value is known, and what messages say is."""

    is_known: Callable[[Any], bool]
    expected: str

    def __call__(self, value: Any) -> bool:
        """Whether it is known; one of another type than the check takes for granted is not."""
        try:
            return self.is_known(value)
        except (AttributeError, TypeError):
            return False


def _expects(expected: str) -> Callable[[Callable[[Any], bool]], Check]:
    return lambda is_known: Check(is_known, expected)


def _is(value: Any, known: Any) -> bool:
    """Whether it is this value, of its type: what reads it takes no 4.0 for 4, and no 1 for True."""
    if isinstance(value, list) and isinstance(known, list):
        return len(value) == len(known) and all(map(_is, value, known))
    return value == known and isinstance(value, type(known)) and isinstance(value, bool) == isinstance(known, bool)


def _one_of(*values: Any) -> Check:
    *most, last = ("nothing" if value is None else repr(value) for value in values)
    expected = f"{', '.join(most)} or {last}" if most else last
    return Check(lambda value: any(_is(value, each) for each in values), expected)


@_expects("a list of names")
def _names(value: Any) -> bool:
    return value is None or (isinstance(value, (list, tuple)) and all(isinstance(name, str) for name in value))


@_expects("two sizes above 0 and below 2 ** 31, or nothing")
def _block(value: Any) -> bool:
    fits = isinstance(value, (list, tuple)) and len(value) == 2
    return value is None or (fits and all(map(_is_size, value)))


def _is_size(value: Any) -> bool:
    """A size above 0, as an int32 can have it: no layer has more."""
    return type(value) is int and 0 < value < 1 << 31


@_expects("a size above 0 and below 2 ** 31, or -1 for one group of all inputs")
def _group_size(value: Any) -> bool:
    return _is_size(value) or _is(value, -1)


def pattern_of(override: str) -> str:
    """The regular expression of a key of GPTQModel's `dynamic`: `-:` in front leaves layers out, `+:` says nothing."""
    return override[2:] if override.startswith(("-:", "+:")) else override


@_expects("patterns of layers that are left out (-:), or have 4 or 8 bits, a group_size or desc_act of their own")
def _by_layer(value: Any) -> bool:
    """GPTQModel's overrides: the first pattern that a layer fits counts."""
    if not value:
        return True
    own = {"bits": _one_of(4, 8), "group_size": _group_size, "desc_act": _one_of(True, False, None)}
    return isinstance(value, Mapping) and all(
        str(pattern).startswith("-:")
        or (isinstance(said, Mapping)
            and all(own[name](each) if name in own else name in _SAYS_NOTHING for name, each in said.items()))
        for pattern, said in value.items()
    )  # fmt: skip


_INTEGERS: dict[str, Check] = {
    "data_type": _one_of("int", None), "act_bits": _one_of(16, 32, None), "super_bits": _one_of(None),
    "super_group_size": _one_of(None), "rotation_config": _one_of(None, {}), "sym": _one_of(True, False, None),
}  # fmt: skip
"""What AutoRound says of all layers, or of one, beside bits and groups: weights are integers, inputs as they are."""
_ANYTHING = Check(lambda value: True, "anything")
_OF_INPUTS = frozenset(("act_data_type", "act_group_size", "act_sym", "act_dynamic"))
"""What it says of inputs, which is nothing where these stay as they are."""


@_expects("layers, or patterns of them, with 16 bits, or with 4 or 8 and a group_size of their own")
def _integers_by_layer(value: Any) -> bool:
    """AutoRound's `extra_config`: what differs of some layers."""
    own = _INTEGERS | {"bits": _one_of(4, 8), "group_size": _group_size}

    def is_known(said: Mapping[str, Any]) -> bool:
        bits = said.get("bits")
        few = ((name, each) for name, each in said.items() if name not in _OF_INPUTS and each is not None)
        return (type(bits) is int and bits >= 16) or all(name in own and own[name](each) for name, each in few)

    return value is None or all(map(is_known, value.values()))


@_expects("names, in a list or with commas between them")
def _begins(value: Any) -> bool:
    return isinstance(value, str) or _names(value)


AUTO_ROUND = {
    "auto_round:auto_gptq": "gptq", "auto_round:gptq": "gptq", "auto_round:auto_awq": "awq", "auto_round:awq": "awq",
}  # fmt: skip
"""AutoRound's names of how it packs integers, and the methods that pack them so."""


@_expects("a list of names, or of lists of names")
def _modules(value: Any) -> bool:
    listed = value if isinstance(value, list) else []
    flat = [name for each in listed for name in (each if isinstance(each, (list, tuple)) else [each])]
    return value is None or (isinstance(value, list) and _names(flat))


@_expects("an object with a group at least")
def _groups(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value)


@_expects("an object, or nothing")
def _layers(value: Any) -> bool:
    return value is None or isinstance(value, Mapping)


@_expects("weight_format = 'real_quantized'")
def _real_weights(value: Any) -> bool:
    """Quark's `export`: weights are stored in few bits, not rounded and stored in 16."""
    return value is None or (isinstance(value, Mapping) and value.get("weight_format", "real_quantized") == _REAL)


_REAL = "real_quantized"


@_expects("layers, each with a known quant_algo and its group_size, and no more")
def _modelopt_layers(value: Any) -> bool:
    """ModelOpt's list of layers whose formats differ, or none."""
    if value is None or not isinstance(value, Mapping):
        return value is None
    return all(isinstance(each, Mapping) and _is_modelopt(each) for each in value.values())


def _is_modelopt(layer: Mapping[str, Any]) -> bool:
    known = _OF_LAYERS.get(str(layer.get("quant_algo")))
    return known is not None and _is(layer.get("group_size", known[1]), known[1]) and set(layer) <= _LAYER


@_expects("rotations of weights alone (weight_input, weight_output)")
def _only_weights(value: Any) -> bool:
    """No rotations, or those by which the weights were multiplied before they were stored: nothing is left of these."""
    groups = value.get("config_groups") if isinstance(value, Mapping) else None
    if not value or not isinstance(groups, Mapping):
        return not value
    applied = [each.get("apply") if isinstance(each, Mapping) else None for each in groups.values()]
    listed = [at for each in applied for at in (each if isinstance(each, list) else [None])]
    places = [at.get("location") if isinstance(at, Mapping) else None for at in listed]
    return bool(places) and all(place in ("weight_input", "weight_output") for place in places)


_LAYER = {"quant_algo", "group_size"}
_NO_SPARSITY = Check(
    lambda value: not value or value.get("format", "dense") == "dense", "nothing, or the format 'dense'"
)
_AWQ_FORMAT = Check(lambda value: _word(value) in ("gemm", "gemv"), "'gemm' or 'gemv'")

_FOLDED = Check(quark_options.is_folded, quark_options.FOLDED)

_SAYS_NOTHING = frozenset(
    # of how a checkpoint was made, how it is computed with, and what becomes of activations and caches
    ("act_group_aware", "activation_scale_ub", "activation_scheme", "amp", "autoround_version", "backend", "batch_size",
     "block_name_to_quantize", "cache_block_outputs", "damp_auto_increment", "damp_percent", "dataset", "dequantize",
     "desc_act", "disable_exllama", "do_fuse", "enable_minmax_tuning", "enable_norm_bias_tuning",
     "enable_quanted_input", "exllama_config", "fuse_max_seq_len", "global_compression_ratio",
     "gradient_accumulate_steps", "is_marlin_format", "iters", "kv_cache_post_rope", "kv_cache_quant_algo",
     "kv_cache_quant_config", "kv_cache_scheme", "low_gpu_mem_usage", "lr", "max_input_length", "meta", "minmax_lr",
     "model_file_base_name", "model_free", "model_name_or_path", "model_seqlen", "module_name_preceding_first_block",
     "modules_in_block_to_quantize", "modules_to_fuse", "mse", "nsamples",
     "pad_token_id", "parallel_packing", "producer", "provider", "quant_mode", "quantization_status", "quantized_by",
     "quantizer", "run_compressed", "seqlen", "static_groups", "supported_types", "sym", "tokenizer", "true_sequential",
     "uri", "use_cuda_fp16", "use_exllama", "use_optimized_inference", "version")
)  # fmt: skip
"""Options that say nothing about the stored tensors, in methods that don't list them as their own."""

_KNOWN: dict[str, dict[str, Check]] = {
    "fp8": {
        "weight_block_size": _block, "weight_per_tensor": _one_of(True, False, None),
        "act_per_tensor": _one_of(True, False, None), "modules_to_not_convert": _names, "ignored_layers": _names,
        "modules_to_convert": _names, "scale_fmt": _one_of(None, "float", "ue8m0"),
        "fmt": _one_of("e4m3", "e4m3fn", "float8_e4m3fn"), "expert_dtype": _one_of(None, "fp8", "fp4"),
        "moe_quant_algo": _one_of("NVFP4"), "quant_algo": _one_of("MIXED_PRECISION"), "ignore": _names,
        "config_groups": _groups, "group_size": _one_of(None, 16), "quantized_layers": _modelopt_layers,
    },
    "mxfp8": {
        "weight_block_size": _one_of(None, [1, 32]), "modules_to_not_convert": _names, "ignored_layers": _names,
        "scale_fmt": _one_of(None, "ue8m0"), "fmt": _one_of("e4m3", "e4m3fn", "float8_e4m3fn"),
    },
    "fbgemm_fp8": {"modules_to_not_convert": _names},
    "compressed-tensors": {
        "config_groups": _groups, "ignore": _names, "format": _one_of(
            "float-quantized", "naive-quantized", "int-quantized", "pack-quantized", "nvfp4-pack-quantized",
            "mxfp4-pack-quantized", "mxfp8-quantized", "mixed-precision",
        ),
        "sparsity_config": _NO_SPARSITY, "moe_sparsity_config": _one_of(None), "transform_config": _only_weights,
    },
    "modelopt": {
        "quant_algo": _one_of(*_MODELOPT, IN_BLOCKS, IN_BLOCKS.lower(), "MIXED_PRECISION", None),
        "ignore": _names, "exclude_modules": _names,
        "config_groups": _groups, "group_size": _one_of(None, 16, 32), "quantized_layers": _modelopt_layers,
    },
    "quark": {
        "global_quant_config": _groups, "layer_quant_config": _layers, "exclude": _names, "export": _real_weights,
        "algo_config": _FOLDED, "layer_type_quant_config": _one_of(None, {}),
        "softmax_quant_spec": _one_of(None),
    },
    "mxfp4": {"modules_to_not_convert": _names},
    "awq": {
        "bits": _one_of(4), "w_bit": _one_of(4), "group_size": _group_size, "q_group_size": _group_size,
        "zero_point": _one_of(True), "modules_to_not_convert": _names, "method": _one_of("awq"),
        "pack_dtype": _one_of("int32"), "lm_head": _one_of(False), "data_type": _one_of("int"),
        **dict.fromkeys(_AWQ_FORMATS, _AWQ_FORMAT),
    },
    "gptq": {
        "bits": _one_of(4, 8), "group_size": _group_size, "checkpoint_format": _one_of("gptq", "gptq_v2"),
        "format": _one_of("gptq", "gptq_v2"), "lm_head": _one_of(True, False), "dynamic": _by_layer,
        "modules_in_block_to_quantize": _modules, "pack_dtype": _one_of("int32"),
        "desc_act": _one_of(True, False, None), "method": _one_of("gptq"), "data_type": _one_of("int"),
    },
    "auto-round": {
        "packing_format": _one_of(*AUTO_ROUND), "bits": _one_of(4, 8), "group_size": _group_size,
        "block_name_to_quantize": _begins, "extra_config": _integers_by_layer, **_INTEGERS,
        "modules_in_block_to_quantize": _one_of(None, []), "quant_lm_head": _one_of(False, None),
        "regex_config": _one_of(None, {}), "scale_dtype": _one_of(None, "fp16", "float16", "torch.float16"),
        **dict.fromkeys(_OF_INPUTS, _ANYTHING),
    },
    "mlx": {"bits": _one_of(4, 8), "group_size": _one_of(32, 64, 128), "mode": _one_of("affine")},
}  # fmt: skip
"""The options of each method that say what is stored, and whether a value of theirs is known."""
