"""The files beside a `config.json` that say how a checkpoint is quantised, in its stead or once more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from precast.builder.source.quantised_options import cut, in_one_spelling, kv_dtype_of, quantisation_of
from precast.ir.errors import BuildError

FILES = {
    "hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq",
}  # fmt: skip
"""Files beside a `config.json` that say it instead, or once more, and the method of each."""

_SAYS_IT = {
    "hf_quant_config.json": ("quant_algo", "quantized_layers", "kv_cache_quant_algo"),
    "quantize_config.json": ("bits",), "quant_config.json": ("w_bit", "bits"),
}  # fmt: skip
"""What says in these files how a checkpoint is quantised, if any of it is there."""


def add_quantisation(config: PreTrainedConfig, files: Mapping[str, Mapping[str, Any]], name: str) -> None:
    """Add to the config what the files beside it say of quantisation: `files` are those of `FILES` that there are.

    Where the config says it too, but nothing of keys and values, or not which layers stay as they are, what ModelOpt's
    file says of these counts.

    Raises BuildError: `feature-unsupported` for one that contradicts the config, `config-invalid` for one that says
    nothing, where the config doesn't either.
    """
    for file, entries in files.items():
        method = FILES[file]
        inner = entries.get("quantization")
        added = {"quant_method": method} | dict(inner if isinstance(inner, Mapping) else entries)
        said = quantisation_of(config)
        if said is None:
            if not set(_SAYS_IT[file]) & set(added):
                message = f"{name}: {file} doesn't say how the checkpoint is quantised: it has no {_SAYS_IT[file][0]}"
                fix = "take the file whole from the publisher, or remove it if nothing is quantised"
                raise BuildError("config-invalid", message, fix=fix)
            config.quantization_config = added
        elif method != "modelopt":
            _check_same(file, added, said, name)
        else:
            _check_modelopt(file, added, said, name)
            if more := _only_in_file(added, said, name):
                config.quantization_config = said | more


def _only_in_file(added: Mapping[str, Any], said: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What ModelOpt's file says and the config doesn't: of keys and values, and the layers that stay as they are."""
    found = {name: added[name] for name in sorted(_KV & added.keys())} if _KV.isdisjoint(said) else {}
    kept, known = (in_one_spelling("modelopt", each, where).get("ignore") for each in (added, said))
    is_modelopts = said.get("quant_method") == "modelopt"
    return found | ({"ignore": kept} if is_modelopts and known is None and kept is not None else {})


def _check_modelopt(file: str, added: Mapping[str, Any], said: Mapping[str, Any], where: str) -> None:
    """Refuse what ModelOpt's file says otherwise than the config: how, of which layers, and of keys and values."""
    if _algorithm(added) not in (None, _algorithm(said)):
        raise _contradicts(f"by {_algorithm(added)} in {file}, and by {_algorithm(said)}", where)
    kept = [in_one_spelling("modelopt", each, where).get("ignore") for each in (said, added)]
    listed = [set(map(str, each if isinstance(each, list) else [each])) for each in kept]
    if None not in kept and listed[0] != listed[1]:
        raise _contradicts(f"but for other layers in {file} (such as {min(listed[0] ^ listed[1])}) than", where)
    formats = [_formats(each.get("quantized_layers")) for each in (said, added)]
    if all(formats) and formats[0] != formats[1]:
        layer = min(name for name, _ in formats[0] ^ formats[1])
        raise _contradicts(f"with other formats of layers in {file} (such as of {layer}) than", where)
    one, other = _of_keys(said), _of_keys(added)
    if None not in (one, other) and one != other:
        raise _contradicts(f"with keys and values of {other} in {file}, and of {one}", where)


def _formats(layers: object) -> set[tuple[str, str]]:
    """What ModelOpt says of each layer, where their formats differ: its name, and the format."""
    if not isinstance(layers, Mapping):
        return set()
    of_each = {str(name): each.get("quant_algo") for name, each in layers.items() if isinstance(each, Mapping)}
    return {(name, str(format)) for name, format in of_each.items()}


_TWICE = ("bits", "group_size", "desc_act", "zero_point", "checkpoint_format")
"""What a file and the config may both say of AWQ and GPTQ."""

_MEANT = {"gptq": {"checkpoint_format": "gptq"}, "awq": {"checkpoint_format": "gemm"}}
"""What a config means that leaves an entry out, where libraries that read the config alone take it for that."""


def _check_same(file: str, added: Mapping[str, Any], said: Mapping[str, Any], where: str) -> None:
    """Refuse a file that says something else than the config."""
    method = str(_algorithm(said))
    if _algorithm(added) != method:
        raise _contradicts(f"by {_algorithm(added)} in {file}, and by {method}", where)
    inside, outside = in_one_spelling(method, said, where), in_one_spelling(method, added, f"{where}: {file}")
    for name in _TWICE:
        other = outside.get(name)
        one = inside[name] if inside.get(name) is not None else _MEANT.get(method, {}).get(name)
        if None not in (one, other) and one != other:
            raise _contradicts(f"with {name} = {other!r} in {file}, and with {name} = {one!r}", where)


def _contradicts(what: str, where: str) -> BuildError:
    message, fix = (
        f"it is quantised {cut(what)} in config.json",
        "remove what doesn't describe the checkpoint's tensors",
    )
    return BuildError("feature-unsupported", message, where=where, fix=fix)


_KV = frozenset(("kv_cache_quant_algo", "kv_cache_scheme"))
"""What says how keys and values are quantised."""


def _of_keys(entries: Mapping[str, Any]) -> str | None:
    """How keys and values are quantised, by a name; None: nothing is said of it."""
    said = next((entries[name] for name in sorted(_KV) if entries.get(name) is not None), None)
    return said and (kv_dtype_of(entries)[0] or cut(str(said)))


def _algorithm(entries: Mapping[str, Any]) -> str | None:
    """What ModelOpt calls a method; of other methods, of which it made no part, their name."""
    method = entries.get("quant_method")
    is_modelopts = method == "modelopt" or "moe_quant_algo" in entries
    return entries.get("quant_algo") if is_modelopts else str(getattr(method, "value", method))
