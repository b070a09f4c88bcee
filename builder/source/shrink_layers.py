"""Chooses the layers that a shrunk config keeps, one or two of each kind, and shortens all lists by layer.

Configs say what a layer is in five ways: a list with an entry for each layer (`layer_types`), a list of layers'
numbers (`moe_layers`), a count of first or of last layers (`first_k_dense_replace`), a period (`attn_layer_period`),
and a pattern that repeats (`block_types`). Two layers of which all of these say the same are of one kind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

COUNTS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers", "num_blocks",
    "depth", "encoder_layers", "num_encoder_layers", "num_layers_per_stack",
)  # fmt: skip
"""Names of the number of layers. The first that a config has counts its lists' entries."""

_FEWEST = 3
"""Layers that are kept where there are as many, so that something lies between a first and a last one."""

_TWICE = 6
"""Two layers of each kind are kept where they aren't more than this: layers of one kind may share weights."""

_MANY_KINDS = 8
"""A list of more different entries than this says something of each layer by itself, and makes no kinds."""

_Rule = Callable[[int, int, int], bool]
_first: _Rule = lambda layer, count, total: layer < count  # noqa: E731
_through: _Rule = lambda layer, last, total: layer <= (last if last >= 0 else total + last)  # noqa: E731
_last: _Rule = lambda layer, count, total: layer >= total - count  # noqa: E731
_ENDS: dict[str, tuple[_Rule, int]] = {
    # counts of first or of last layers: which layers are meant, and how many less than there are is said
    **dict.fromkeys(
        ("first_k_dense_replace", "num_dense_layers", "max_window_layers", "moe_layer_start_index"), (_first, 0)
    ),
    "moe_layer_end_index": (_through, 1),
    "num_kv_shared_layers": (_last, 0),
}

# every so many layers, and the number of the first such one
_PERIODS: dict[str, str | None] = {
    "attn_layer_period": "attn_layer_offset", "expert_layer_period": "expert_layer_offset",
    "global_attn_every_n_layers": None, "sliding_window_pattern": None, "layer_group_size": None,
    "no_rope_layer_interval": None, "decoder_sparse_step": None, "moe_layer_interval": None,
    "interleave_moe_layer_step": None, "n_layers_per_attn_res_block": None, "rescale_every": None,
}  # fmt: skip
_LONGEST_PERIOD = 4

_PATTERNS = ("block_types",)


def cut_layers(entries: dict[str, Any]) -> None:
    """Rewrites a config's entries, in place, to those of a model with few layers of all its kinds."""
    total = next((entries[name] for name in COUNTS if _is_count(entries.get(name))), None)
    if total is None:
        return
    numbered = {name: value for name, value in entries.items() if _is_numbers(name, value, total)}
    by_layer: dict[str, Any] = {
        name: value
        for name, value in entries.items()
        if isinstance(value, (list, tuple)) and len(value) == total and name not in numbered
    }
    kept = _kept(total, _kinds(entries, total, by_layer, numbered), _fewest(entries, bool(by_layer)))
    for name, value in by_layer.items():
        entries[name] = type(value)(value[layer] for layer in kept)
    for name, value in numbered.items():
        entries[name] = type(value)(place for place, layer in enumerate(kept) if layer in value)
    _count_ends(entries, total, kept)
    _shorten_periods(entries)
    if "attention_types" in entries and "attention_layers" in by_layer:  # GPT-Neo's [[kinds, times], ...]
        entries["attention_types"] = [[list(entries["attention_layers"]), 1]]
    for name in COUNTS:
        if _is_count(entries.get(name)):
            entries[name] = len(kept) if entries[name] == total else min(entries[name], len(kept))


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_numbers(name: str, value: Any, total: int) -> bool:
    """Whether this is a list of layers' numbers: integers that rise. A list by layer hardly does."""
    if not isinstance(value, (list, tuple)) or not name.endswith(("layers", "ids", "idxs", "indices", "indexes")):
        return False
    rising = all(type(item) is int and 0 <= item < total for item in value) and list(value) == sorted(set(value))
    return rising and not (len(value) == total and set(value) <= {0, 1})


def _kinds(
    entries: dict[str, Any], total: int, by_layer: dict[str, Any], numbered: dict[str, Any]
) -> list[tuple[Any, ...]]:
    """What is said of each layer."""
    said: list[Callable[[int], Any]] = []
    for value in by_layer.values():
        words = [repr(item) for item in value]
        if len(set(words)) <= _MANY_KINDS:
            said.append(words.__getitem__)
    said += [lambda layer, value=value: layer in value for value in numbered.values()]  # type: ignore[misc]
    for name, (is_meant, _) in _ENDS.items():
        if type(entries.get(name)) is int:
            said.append(lambda layer, n=entries[name], is_meant=is_meant: is_meant(layer, n, total))  # type: ignore[misc]
    return [tuple(say(layer) for say in said) for layer in range(total)]


def _fewest(entries: dict[str, Any], listed: bool) -> int:
    """How many layers there must be for periods and patterns to come round; lists by layer go before periods."""
    patterns = [len(entries[name]) for name in _PATTERNS if isinstance(entries.get(name), (list, tuple))]
    periods = [min(entries[name], _LONGEST_PERIOD) for name in _PERIODS if _is_count(entries.get(name))]
    return max([_FEWEST, *patterns, *([] if listed else periods)])


def _kept(total: int, kinds: Sequence[tuple[Any, ...]], fewest: int) -> list[int]:
    """The first one or two layers of each kind, then layers from the front until there are enough."""
    layers: dict[tuple[Any, ...], list[int]] = {}
    for layer, kind in enumerate(kinds):
        layers.setdefault(kind, []).append(layer)
    copies = 2 if 2 * len(layers) <= _TWICE else 1
    kept = {layer for same in layers.values() for layer in same[:copies]}
    for layer in range(total):
        if len(kept) >= fewest:
            break
        kept.add(layer)
    return sorted(kept)


def _count_ends(entries: dict[str, Any], total: int, kept: Sequence[int]) -> None:
    for name, (is_meant, less) in _ENDS.items():
        if type(entries.get(name)) is int:
            entries[name] = sum(is_meant(layer, entries[name], total) for layer in kept) - less


def _shorten_periods(entries: dict[str, Any]) -> None:
    for name, offset in _PERIODS.items():
        if not _is_count(entries.get(name)):
            continue
        period = min(entries[name], _LONGEST_PERIOD)
        if offset is not None and type(entries.get(offset)) is int:
            entries[offset] = entries[offset] * period // entries[name]
        entries[name] = period
