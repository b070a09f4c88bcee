"""What `precast diff` shows: where two bundles differ, from the manifest down to the blocks. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from precast.cli.show import Report
from precast.ir.artifact import Bundle
from precast.ir.graph.schema import Block, Graph
from precast.ir.graph.text import format_recipe, format_type
from precast.ir.memory import caches


def difference(first: Bundle, second: Bundle) -> Report:
    """Entries of the manifest, params, cache groups, blocks and files that differ; equal digests are equal bundles."""
    if first.digest == second.digest:
        return Report({"equal": True, "differences": []}, f"equal: {first.digest}")
    lines = [
        *_differing("manifest", _manifest(first), _manifest(second)),
        *_differing("config", _config(first), _config(second)),
        *_differing("pass", _passes(first), _passes(second)),
        *_differing("param", _params(first.graph), _params(second.graph)),
        *_differing("cache group", _groups(first.graph), _groups(second.graph)),
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
    return {
        f"{place} {record.name}": msgspec.json.encode({"version": record.version, "ops": record.delta}).decode()
        for place, record in enumerate(bundle.manifest.passes)
    }


def _params(graph: Graph) -> dict[str, str]:
    return {param.name: f"{format_type(param.type)} = {format_recipe(param.recipe)}" for param in graph.params}


def _groups(graph: Graph) -> dict[str, str]:
    return {
        group.name: f"{len(group.slots)} layers, {msgspec.json.encode(group.spec).decode()}"
        for group in caches.groups(graph.caches)
    }


def _blocks(graph: Graph) -> dict[str, Block]:
    return {block.name: block for block in graph.blocks}


def _files(bundle: Bundle) -> dict[str, str]:
    return {blob.name: f"{blob.digest}, {blob.size} bytes" for blob in bundle.manifest.blobs}


def _differing(kind: str, a: Mapping[str, object], b: Mapping[str, object]) -> Iterator[str]:
    for name in sorted({*a, *b}):
        one, two = a.get(name), b.get(name)
        if one != two:
            yield f"{kind} {name}: {_text(one)} -> {_text(two)}"


def _text(item: object) -> str:
    if item is None:
        return "absent"
    return f"{len(item.nodes)} nodes" if isinstance(item, Block) else str(item)
