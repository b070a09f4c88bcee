"""What `precast diff` shows: where two bundles differ, from the manifest down to the blocks. No torch."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from precast.cli.show import Report
from precast.ir.artifact import Bundle
from precast.ir.errors import shown
from precast.ir.graph.schema import Block, Graph
from precast.ir.graph.text import format_recipe, format_step, format_type, format_value
from precast.ir.memory import caches


def difference(first: Bundle, second: Bundle) -> Report:
    """Entries of the manifest, params, cache groups, blocks and files that differ; equal digests are equal bundles."""
    if first.digest == second.digest:
        return Report({"equal": True, "differences": []}, f"equal: {first.digest}")
    lines = [
        *_differing("manifest", _manifest(first), _manifest(second)),
        *_differing("config", _config(first), _config(second)),
        *_differing("pass", _passes(first), _passes(second)),
        *_of_all_layers(_params(first.graph), _params(second.graph)),
        *_differing("cache group", _groups(first.graph), _groups(second.graph)),
        *_differing("graph", _parts(first.graph), _parts(second.graph)),
        *_differing("block", _blocks(first.graph), _blocks(second.graph)),
        *_differing("file", _files(first), _files(second)),
    ]
    return Report({"equal": False, "differences": lines}, "\n".join(lines))


def _manifest(bundle: Bundle) -> dict[str, str]:
    """The manifest's entries by dotted name, without those that are compared one by one."""
    flat: dict[str, str] = {}
    for key, value in msgspec.to_builtins(bundle.manifest).items():
        if key in ("blobs", "config", "passes"):
            continue
        entries: dict[str, Any] = {key: value}
        if isinstance(value, dict):
            entries = {f"{key}.{name}": item for name, item in value.items()}
        flat |= {name: msgspec.json.encode(item).decode() for name, item in entries.items()}
    return flat


def _config(bundle: Bundle) -> dict[str, str]:
    """What the build read of the model's config."""
    facts = bundle.manifest.config
    return {} if facts is None else {name: msgspec.json.encode(fact).decode() for name, fact in facts.values.items()}


def _passes(bundle: Bundle) -> dict[str, str]:
    """What each pass did, and which one is the next where that is another."""
    records = bundle.manifest.passes
    after = [*(record.name for record in records[1:]), "the end"]
    return {
        record.name: msgspec.json.encode({"version": record.version, "ops": record.delta, "next": following}).decode()
        for record, following in zip(records, after, strict=True)
    }


def _params(graph: Graph) -> dict[str, str]:
    return {param.name: f"{format_type(param.type)} = {format_recipe(param.recipe)}" for param in graph.params}


def _groups(graph: Graph) -> dict[str, str]:
    return {
        group.name: f"{len(group.slots)} layers, {msgspec.json.encode(group.spec).decode()}"
        for group in caches.groups(graph.caches)
    }


def _parts(graph: Graph) -> dict[str, list[str]]:
    """What stands outside of blocks, line by line; params and cache groups are compared one by one."""
    return {
        "symbols": [f"{each.name}: {each.min}..{'' if each.max is None else each.max}" for each in graph.symbols],
        "inputs": list(map(format_value, graph.inputs)),
        "constants": list(map(format_value, graph.constants)),
        "pools": [msgspec.json.encode(pool).decode() for pool in graph.caches.pools],
        "capture": [", ".join(map(str, graph.capture.sizes)) or "no sizes"],
        "worlds": [f"tp {world.tp}, ep {', '.join(map(str, world.ep))}" for world in graph.shards.worlds],
        "shards": [msgspec.json.encode(row).decode() for row in graph.shards.rows],
        "main": list(map(format_step, graph.main)),
        "outputs": [f"{name}={value}" for name, value in sorted(graph.outputs.items())],
    }


def _blocks(graph: Graph) -> dict[str, list[str]]:
    """Each block's nodes, line by line, then what it takes and gives."""
    return {block.name: [*map(format_step, block.nodes), *_signature(block)] for block in graph.blocks}


def _signature(block: Block) -> Iterator[str]:
    for kind, values in (("input", block.inputs), ("param", block.params), ("cache", block.caches)):
        yield from (f"{kind} {format_value(value)}" for value in values)
    yield f"return {', '.join(block.outputs)}"


def _files(bundle: Bundle) -> dict[str, str]:
    return {blob.name: f"{blob.digest}, {blob.size} bytes" for blob in bundle.manifest.blobs}


def _of_all_layers(a: Mapping[str, str], b: Mapping[str, str]) -> Iterator[str]:
    """Params that differ; those that differ alike but for a number in their names (a layer, an expert) in one line."""
    alike: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for name in dict.fromkeys((*a, *b)):
        if a.get(name) != b.get(name):
            said = (name, _text(a.get(name)), _text(b.get(name)))
            alike.setdefault(tuple(re.sub(r"\.\d+\.", ".*.", each) for each in said), []).append(said)
    for folded, several in alike.items():
        name, one, two = folded if len(several) > 1 else several[0]
        count = f" ({len(several)} alike)" if len(several) > 1 else ""
        yield f"{shown(f'param {name}')}{count}: {one} -> {two}"


def _differing(kind: str, a: Mapping[str, object], b: Mapping[str, object]) -> Iterator[str]:
    for name in sorted({*a, *b}):
        one, two = a.get(name), b.get(name)
        if isinstance(one, list) and isinstance(two, list) and one != two:
            yield f"{shown(f'{kind} {name}')}: {_first_difference(one, two)}"
        elif one != two:
            yield f"{shown(f'{kind} {name}')}: {_text(one)} -> {_text(two)}"


def _first_difference(one: list[str], two: list[str]) -> str:
    """How many lines differ, and the first that do."""
    pairs = [(x, y) for x, y in itertools.zip_longest(one, two, fillvalue="absent") if x != y]
    lines = f"{len(pairs)} lines differ" if len(pairs) > 1 else "1 line differs"
    return f"{lines}: {' -> '.join(map(shown, pairs[0]))}"


def _text(item: object) -> str:
    if item is None:
        return "absent"
    return f"{len(item)} lines" if isinstance(item, list) else shown(str(item))
