"""What `inspect` and `diff` show of a bundle: as fields for scripts, as text for people. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from precast.ir import symbols
from precast.ir.bundle import Bundle
from precast.ir.schema import Call, Graph, Group, Node
from precast.ir.text import format_graph, format_recipe, format_type

LENGTHS = (128, 2048, 8192, 32768, 131072)
_ITEM_BYTES = {"bool": 1, "int8": 1, "uint8": 1, "float8_e4m3fn": 1, "float16": 2, "bfloat16": 2, "float32": 4}


@dataclasses.dataclass(frozen=True)
class Report:
    """One answer in two forms."""

    fields: dict[str, Any]
    text: str


def summary(bundle: Bundle) -> Report:
    """The model, the graph's size, the caches, the bundle's bytes and what built it."""
    manifest, graph = bundle.manifest, bundle.graph
    model = manifest.model
    calls = sum(isinstance(step, Call) for step in graph.main)
    nodes = sum(isinstance(step, Node) for step in graph.main) + sum(len(block.nodes) for block in graph.blocks)
    size = sum(blob.size for blob in manifest.blobs)
    without_tokenizer = sum(blob.size for blob in manifest.blobs if blob.role != "tokenizer")
    fields = {
        "digest": bundle.digest,
        "format": ".".join(map(str, manifest.format)),
        "model": msgspec.to_builtins(model),
        "graph": {"blocks": len(graph.blocks), "calls": calls, "nodes": nodes, "params": len(graph.params)},
        "ops": manifest.ops,
        "cache_groups": {group.name: len(group.slots) for group in graph.caches.groups},
        "bytes": {"total": size, "without_tokenizer": without_tokenizer},
        "files": [blob.name for blob in manifest.blobs],
        "built_with": manifest.built_with,
        "provenance": bundle.provenance,
    }
    groups = ", ".join(f"{group.name} x {len(group.slots)}" for group in graph.caches.groups) or "none"
    rows = [
        ("bundle", str(bundle.path)),
        ("digest", bundle.digest),
        ("model", f"{model.architecture}, {model.num_layers} layers, {model.num_parameters:,} parameters, {model.dtype}"),
        ("limits", f"{model.max_seq_len:,} tokens a sequence, vocabulary {model.vocab_size:,}"),
        ("graph", f"{len(graph.blocks)} blocks in {calls} calls, {nodes} nodes, {len(manifest.ops)} ops"),
        ("caches", groups),
        ("tokenizer", ", ".join(blob.name for blob in manifest.blobs if blob.role == "tokenizer") or "none"),
        ("size", f"{without_tokenizer:,} bytes, with tokenizer {size:,}"),
        ("built with", ", ".join(f"{name} {version}" for name, version in manifest.built_with.items())),
    ]
    return Report(fields, _table(rows))


def graph(bundle: Bundle) -> Report:
    """The graph in the text form of `docs/format/v1.md`."""
    text = format_graph(bundle.graph)
    return Report({"graph": text}, text.rstrip("\n"))


def passes(bundle: Bundle) -> Report:
    """Each pass with its stage, and the ops that it added and removed."""
    records = bundle.manifest.passes
    rows = [("stage", "pass", "version", "ops")]
    for record in records:
        delta = ", ".join(f"{op} {count:+d}" for op, count in record.delta.items())
        rows.append((record.stage, record.name, str(record.version), delta or ("edited" if record.changed else "-")))
    return Report({"passes": [msgspec.to_builtins(record) for record in records]}, _table(rows))


def weights(bundle: Bundle) -> Report:
    """Each param with its type and recipe, and which tensors are ignored."""
    rows = [("param", "type", "recipe")]
    rows += [(param.name, format_type(param.type), format_recipe(param.recipe)) for param in bundle.graph.params]
    rules = bundle.manifest.checkpoint
    text = _table(rows) + f"\nignored tensors: {', '.join(rules.ignored) or 'none'}"
    fields = {
        "params": [msgspec.to_builtins(param) for param in bundle.graph.params],
        "checkpoint": msgspec.to_builtins(rules),
    }
    return Report(fields, text)


def cache(bundle: Bundle) -> Report:
    """Each group's geometry, and the bytes that a sequence of given lengths keeps."""
    groups = bundle.graph.caches.groups
    limit = bundle.manifest.model.max_seq_len
    lengths = [length for length in LENGTHS if length <= limit] or [limit]
    rows = [("group", "pool", "layers", "kv heads", "head", "value", "dtype", "page", "window", "bytes/token")]
    for group in groups:
        spec = group.spec
        rows.append(
            (
                group.name, group.pool, str(len(group.slots)), symbols.text(spec.num_kv_heads), str(spec.head_size),
                str(spec.value_size), spec.dtype, str(spec.page_size), str(spec.window or "-"), f"{_token_bytes(group):,}",
            )
        )  # fmt: skip
    costs = [("tokens", "bytes a sequence", "of which useful")]
    for length in lengths:
        paged = sum(_page_bytes(group, length) for group in groups)
        useful = sum(min(length, group.spec.window or length) * _token_bytes(group) for group in groups)
        costs.append((f"{length:,}", f"{paged:,}", f"{100 * useful / paged:.1f} %" if paged else "-"))
    fields = {
        "groups": [
            {
                "name": group.name, "pool": group.pool, "layers": len(group.slots),
                "spec": msgspec.to_builtins(group.spec), "bytes_per_token": _token_bytes(group),
            }
            for group in groups
        ],
        "bytes_per_sequence": {length: sum(_page_bytes(group, length) for group in groups) for length in lengths},
    }  # fmt: skip
    if not groups:
        return Report(fields, "no caches")
    return Report(fields, _table(rows) + "\n\n" + _table(costs))


def difference(first: Bundle, second: Bundle) -> Report:
    """What differs: manifest entries, ops, params, blocks, files."""
    if first.digest == second.digest:
        return Report({"equal": True, "differences": []}, f"equal: {first.digest}")
    lines = [*_entries("manifest", _manifest(first), _manifest(second)), *_graph_lines(first.graph, second.graph)]
    a, b = ({blob.name: blob.digest for blob in bundle.manifest.blobs} for bundle in (first, second))
    lines += _entries("file", a, b)
    return Report({"equal": False, "differences": lines}, "\n".join(lines))


def _manifest(bundle: Bundle) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in msgspec.to_builtins(bundle.manifest).items():
        if key in ("blobs", "passes"):
            continue
        if isinstance(value, dict):
            flat |= {f"{key}.{name}": item for name, item in value.items()}
        else:
            flat[key] = value
    return flat | {f"passes.{record.name}": record.delta for record in bundle.manifest.passes}


def _graph_lines(a: Graph, b: Graph) -> Iterable[str]:
    yield from _entries("param", *({p.name: f"{format_type(p.type)} {format_recipe(p.recipe)}" for p in g.params} for g in (a, b)))
    yield from _entries("cache group", *({x.name: msgspec.to_builtins(x.spec) for x in g.caches.groups} for g in (a, b)))
    for name, one, two in _pairs({x.name: x for x in a.blocks}, {x.name: x for x in b.blocks}):
        if one is None or two is None:
            yield f"block {name}: only in the {'second' if one is None else 'first'}"
        elif one != two:
            yield f"block {name}: {len(one.nodes)} and {len(two.nodes)} nodes, not equal"


def _entries(kind: str, a: dict[str, Any], b: dict[str, Any]) -> Iterable[str]:
    for name, one, two in _pairs(a, b):
        if one != two:
            yield f"{kind} {name}: {'absent' if one is None else one} -> {'absent' if two is None else two}"


def _pairs(a: dict[str, Any], b: dict[str, Any]) -> Iterable[tuple[str, Any, Any]]:
    for name in sorted({*a, *b}):
        yield name, a.get(name), b.get(name)


def _token_bytes(group: Group) -> int:
    """Bytes that one token keeps in all layers of the group, on one rank of one."""
    heads = symbols.evaluate(group.spec.num_kv_heads, {"tp": 1, "rank": 0})
    size = _ITEM_BYTES[group.spec.dtype]
    return len(group.slots) * heads * (group.spec.head_size + group.spec.value_size) * size


def _page_bytes(group: Group, length: int) -> int:
    pages = -(-length // group.spec.page_size)
    return pages * group.spec.page_size * _token_bytes(group)


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines)
