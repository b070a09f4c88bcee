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

# the number of first layers (`i < n`), of first layers less one (`i <= n`), and of last layers (`i >= N - n`)
_FIRST = ("first_k_dense_replace", "num_dense_layers", "max_window_layers", "moe_layer_start_index")
_THROUGH = ("moe_layer_end_index",)
_LAST = ("num_kv_shared_layers",)

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
    _write_out_nested(entries, by_layer)
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
    for names, rule in ((_FIRST, _is_first), (_THROUGH, _is_through), (_LAST, _is_last)):
        for name in names:
            if type(entries.get(name)) is int:
                said.append(lambda layer, n=entries[name], rule=rule: rule(layer, n, total))  # type: ignore[misc]
    return [tuple(rule(layer) for rule in said) for layer in range(total)]


def _is_first(layer: int, count: int, total: int) -> bool:
    return layer < count


def _is_through(layer: int, last: int, total: int) -> bool:
    return layer <= (last if last >= 0 else total + last)


def _is_last(layer: int, count: int, total: int) -> bool:
    return layer >= total - count


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
    for names, rule, less in ((_FIRST, _is_first, 0), (_THROUGH, _is_through, 1), (_LAST, _is_last, 0)):
        for name in names:
            if type(entries.get(name)) is int:
                entries[name] = sum(rule(layer, entries[name], total) for layer in kept) - less


def _shorten_periods(entries: dict[str, Any]) -> None:
    for name, offset in _PERIODS.items():
        if not _is_count(entries.get(name)):
            continue
        period = min(entries[name], _LONGEST_PERIOD)
        if offset is not None and type(entries.get(offset)) is int:
            entries[offset] = entries[offset] * period // entries[name]
        entries[name] = period


def _write_out_nested(entries: dict[str, Any], by_layer: dict[str, Any]) -> None:
    """`attention_types` of GPT-Neo, [[kinds, times], ...], stands beside the list by layer that it makes."""
    if "attention_types" in entries and "attention_layers" in by_layer:
        entries["attention_types"] = [[list(entries["attention_layers"]), 1]]
