"""What the manifest keeps of a config, so that a checkpoint's can be compared with it without transformers.

The config's class is asked, by reading changed copies of the config: what does it make of an entry that is left out, of
`null`, of a name from an older version? `precast.ir.weights.config_facts` compares.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Mapping
from typing import Any

import transformers
from transformers import PreTrainedConfig

from precast.builder.replaced import replaced
from precast.builder.source.facts import decoder_way
from precast.builder.source.source import CONFIG_ERRORS, Source
from precast.ir.manifest import ConfigFacts, Fact
from precast.ir.weights.config_facts import ROPE, decoder_entries, differences, entries, quantisation_entries

_OLD_ROPE = (
    "rope_theta", "rope_local_base_freq", "global_rope_theta", "local_rope_theta", "partial_rotary_factor",
    "rotary_pct", "rotary_emb_base",
)  # fmt: skip
"""What entries of `rope_parameters` were called before there was such an object."""

_PROBE = 1.4375
"""A number that no config has: where it turns up, there an old name leads."""


def config_facts(source: Source) -> ConfigFacts:
    """The facts of a source, before anything in its config is changed."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # about the changed copies
    try:
        with replaced((PreTrainedConfig, "__repr__", object.__repr__)):  # which it makes for its log all the same
            return _facts(source)
    finally:
        transformers.logging.set_verbosity(verbosity)


def _facts(source: Source) -> ConfigFacts:
    """Entries that the class does not declare are compared where both configs have them: some model code reads them."""
    text = source.config.get_text_config()
    part = decoder_way(source.config)
    plain = text.to_dict()
    known = entries(plain)
    declared = _declared(type(text))
    spellings = _spellings(type(text), plain)
    quantisation = quantisation_entries(source.entries or source.config.to_dict(), part)
    if not quantisation and (source.facts.quantisation or {}).get("quant_method") == "gptq":  # by its own file
        quantisation = quantisation_entries({"quantization_config": source.facts.quantisation}, ())
    facts = ConfigFacts(known | quantisation, spellings=spellings, part=part)
    for name, value in known.items():
        outer, dot, _ = name.partition(".")
        if outer not in declared:
            continue
        for way, absent in (([outer], facts.absent_objects), (name.split("."), facts.absent))[0 if dot else 1 :]:
            meant = _read(type(text), _without(plain, way))
            if meant is not None and meant.get(name) != value:
                absent[name] = meant.get(name)
        if not dot and declared[name] is None and value is not None and name not in facts.absent:
            facts.same[name] = (None,)
    if source.entries:
        _reconcile(facts, source.entries)
    return facts


def _reconcile(facts: ConfigFacts, written: Mapping[str, Any]) -> None:
    """Make the facts agree with the file that they come from: what the class makes of an entry, and what it ignores."""
    for name, value in decoder_entries(written, facts.part).items():
        if name.partition(".")[0] not in facts.spellings and facts.values.setdefault(name, value) != value:
            facts.same[name] = (*facts.same.get(name, ()), value)
    for each in differences(facts, written):  # what the file leaves out is what the class made of it
        facts.absent.pop(each.name, None)
        facts.absent_objects.pop(each.name, None)
    for each in differences(facts, written):
        if facts.values.pop(each.name.partition("[")[0], None) is None:
            facts.values[each.name] = each.checkpoint


def _declared(config_class: type[PreTrainedConfig]) -> dict[str, Any]:
    """The entries that a class knows, with their defaults."""
    return {name: each.default for name, each in inspect.signature(config_class.__init__).parameters.items()}


def _spellings(config_class: type[PreTrainedConfig], plain: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    """Other names that the class reads entries under, with the names that it keeps them under."""
    found: dict[str, tuple[str, ...]] = {
        name: (own,) for name, own in config_class.attribute_map.items() if name not in plain
    }
    without = {name: value for name, value in plain.items() if name != ROPE}
    probes = dict.fromkeys(_OLD_ROPE, _PROBE) | {"rope_scaling": {"rope_type": "linear", "factor": _PROBE}}
    for name, probe in probes.items():
        read = None if name in plain else _read(config_class, without | {name: probe})
        places = [place for place, fact in (read or {}).items() if fact == _PROBE and place.startswith(ROPE)]
        if places:
            found[name] = tuple(place.removesuffix(".factor") for place in places)
    return found


def _without(plain: dict[str, Any], way: list[str]) -> dict[str, Any]:
    """The config without the entry at the end of this way."""
    changed = copy.deepcopy(plain)
    inner: Any = changed
    for name in way[:-1]:
        inner = inner.get(name, {}) if isinstance(inner, dict) else {}
    if isinstance(inner, dict):
        inner.pop(way[-1], None)
    return changed


def _read(config_class: type[PreTrainedConfig], plain: dict[str, Any]) -> dict[str, Fact] | None:
    """What the class makes of these entries; None where it refuses them."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of old names
            return entries(config_class.from_dict(copy.deepcopy(plain)).to_dict())
    except CONFIG_ERRORS:
        return None
