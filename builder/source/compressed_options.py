"""What compressed-tensors' configs leave out, or spell otherwise, said as the library that reads them takes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def spelled_out(entries: Mapping[str, Any]) -> dict[str, Any]:
    """The entries with each group's format of weights and inputs in full.

    As `QuantizationArgs` of compressed-tensors: words in any case; 8 bits and int where nothing is said; the strategy
    by the group's size; blocks also as "128x128"; an order of activations by True. A group without weights
    beside others says nothing of what is stored.
    """
    made = {name: value for name, value in entries.items() if name != "format" or value is not None}
    groups = entries.get("config_groups")
    if not isinstance(groups, Mapping):
        return made
    stored = {name: group for name, group in groups.items() if not (isinstance(group, Mapping) and _is_empty(group))}
    made["config_groups"] = {
        name: {key: _spelled(value) if key in _ARGUMENTS else value for key, value in group.items()}
        if isinstance(group, Mapping) else group
        for name, group in (stored or groups).items()
    }  # fmt: skip
    return made


_ARGUMENTS = ("weights", "input_activations")
_WORDS = ("type", "strategy", "actorder")
_DEFAULTS = {"num_bits": 8, "type": "int"}


def _is_empty(group: Mapping[str, Any]) -> bool:
    """Whether nothing of its layers is in few bits."""
    return "weights" in group and all(group.get(name) is None for name in _ARGUMENTS)


def _spelled(said: Any) -> Any:
    """What is said of weights or inputs, if it is an object."""
    if not isinstance(said, Mapping):
        return said
    made = {name: value for name, value in said.items() if value is not None or name not in _DEFAULTS}
    made |= {name: word.lower() for name in _WORDS if isinstance(word := made.get(name), str)}
    made = _DEFAULTS | made
    if made.get("strategy") is None:
        size = made.get("group_size")
        made["strategy"] = "tensor" if size is None else "channel" if size == -1 else "group"
    if made.get("actorder") is True:
        made["actorder"] = "group"
    block = made.get("block_structure")
    if isinstance(block, str) and all(each.isdecimal() for each in block.split("x")):
        made["block_structure"] = [int(each) for each in block.split("x")]
    return made
