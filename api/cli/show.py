"""What `precast inspect` shows of a bundle: as fields for scripts, as text for people. No torch."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from precast.cli.few_bits import stored_weights
from precast.ir import limits
from precast.ir.artifact import Bundle
from precast.ir.bundle import oci
from precast.ir.errors import shown, some
from precast.ir.graph import symbols
from precast.ir.graph.schema import (
    CacheGroup,
    CacheSpec,
    Call,
    Const,
    EntrySpec,
    Expr,
    Graph,
    IndexSpec,
    LatentSpec,
    Node,
    PagedSpec,
    StateSpec,
    Tie,
)
from precast.ir.graph.text import format_graph, format_recipe, format_type
from precast.ir.graph.world import unsharded
from precast.ir.memory import caches
from precast.ir.memory.liveness import computed
from precast.ir.ops.flops import precast_share
from precast.ir.weights.tensorfile import element_bytes
from precast.kernels import step_memory
from precast.kernels.use import GPU

STEPS = ((8192, 256), (256, 256))
"""The steps, as tokens and sequences, for which the summary says what activations take: prefill, and decoding."""
_MOST_NOTES = 5
LENGTHS = (128, 2048, 8192, 32768, 131072)
"""The lengths, in tokens, for which `cache` says what a sequence costs; and the bundle's limit."""


@dataclasses.dataclass(frozen=True)
class Report:
    """One answer in two forms. The fields are documented in `docs/command_line.md`."""

    fields: dict[str, Any]
    text: str


def together(reports: Sequence[Report]) -> Report:
    """Several parts in one answer."""
    fields = {name: value for report in reports for name, value in report.fields.items()}
    return Report(fields, "\n\n".join(report.text for report in reports))


def summary(bundle: Bundle, address: str | None = None) -> Report:
    """The model, the graph's size, the caches, the bundle's bytes and what built it.

    `address` is where the bundle was found, if that is no path.
    """
    manifest, graph = bundle.manifest, unsharded(bundle.graph)
    model = manifest.model
    calls = sum(isinstance(step, Call) for step in graph.main)
    nodes = sum(isinstance(step, Node) for step in graph.main) + sum(len(block.nodes) for block in graph.blocks)
    tokenizer = [blob for blob in manifest.blobs if blob.role == "tokenizer"]
    groups = caches.groups(graph.caches)
    total = _bytes_of(bundle)
    others = [extra for extra in bundle.attached if extra.artifact_type != oci.PROVENANCE]
    without_tokenizer = total - sum(blob.size for blob in tokenizer)
    held, rounded, rounded_experts = _weights_bytes(graph), _activations(graph), _expert_activations(graph)
    stored = stored_weights(graph)
    with computed():
        share = precast_share(graph)
        peaks = _activation_peaks(graph)
    fields = {
        "digest": bundle.digest,
        "format": ".".join(map(str, manifest.format)),
        "model": msgspec.to_builtins(model),
        "graph": {"blocks": len(graph.blocks), "calls": calls, "nodes": nodes, "params": len(graph.params)},
        "ops": manifest.ops,
        "cache_groups": {group.name: len(group.slots) for group in groups},
        "cache_dtypes": {group.name: group.spec.dtype for group in groups},
        "bytes": {"total": total, "without_tokenizer": without_tokenizer},
        "native_layers": sorted(bundle.native),
        "files": [blob.name for blob in manifest.blobs],
        "built_with": manifest.built_with,
        "checked": manifest.checked,
        "precast_share": round(share, 4),
        "weights_bytes": held,
        "few_bits": stored,
        "activations": rounded,
        "expert_activations": rounded_experts,
        "activation_bytes": [
            {"tokens": tokens, "sequences": sequences, "bytes": peak} for (tokens, sequences), peak in peaks.items()
        ],
        "provenance": bundle.provenance,
        "attached": {extra.digest: extra.artifact_type for extra in others},
    }
    program = f"{_counted(len(graph.blocks), 'block')} in {_counted(calls, 'call')}, {nodes} nodes"
    layers = f"{_counted(model.num_layers, 'layer')}, {model.num_parameters:,} parameters"
    rows = [
        ("bundle", address or str(bundle.path)),
        ("digest", bundle.digest),
        ("model", f"{model.architecture}, {layers}, {model.dtype}"),
        ("limits", f"{model.max_seq_len:,} tokens a sequence, vocabulary {model.vocab_size:,}"),
        ("graph", f"{program}, {len(manifest.ops)} ops"),
        ("caches", ", ".join(_cache_text(group, model.dtype) for group in groups) or "none"),
        ("weights", "; ".join(f"{size:,} bytes of {dtype}" for dtype, size in held.items()) or "none"),
        *([("few bits", "; ".join(f"{way}: {count}" for way, count in stored.items()))] if stored else []),
        *([("inputs", rounded_text(rounded, rounded_experts))] if rounded or rounded_experts else []),
        *([("native", f"layers for {', '.join(sorted(bundle.native))}")] if bundle.native else []),
        ("tokenizer", ", ".join(blob.name for blob in tokenizer) or "none"),
        ("size", f"{total:,} bytes, {without_tokenizer:,} without tokenizer files"),
        ("activations", "; ".join(f"{peak / 2**20:,.0f} MiB for {_step_text(*step)}" for step, peak in peaks.items())),
        ("precast ops", f"{100 * share:.1f} % of the floating-point work"),
        ("checked", "yes: equal to transformers, made tiny" if manifest.checked else "no"),
        ("built with", _pairs(manifest.built_with)),
        *_provenance(bundle.provenance),
        *(("attached", text) for text in some([extra.artifact_type for extra in others])),
    ]
    return Report(fields, table(rows))


def _cache_text(group: CacheGroup, dtype: str) -> str:
    """A group with its layers, and with its dtype where that is another than the model's."""
    of_its_own = f" in {group.spec.dtype}" if group.spec.dtype != dtype else ""
    return f"{group.name}: {_counted(len(group.slots), 'layer')}{of_its_own}"


def _bytes_of(bundle: Bundle) -> int:
    """What the bundle's directory takes; of one that shares a store with others, its blobs."""
    if (bundle.path / oci.INDEX_FILE).is_file():
        return sum(file.stat().st_size for file in bundle.path.rglob("*") if file.is_file())
    blobs = {layer.digest: layer.size for layer in bundle.layers}
    for extra in bundle.attached:
        blobs |= {digest: len(data) for digest, data in extra.blobs().items()}
    return bundle.descriptor.size + sum(blobs.values())


def _provenance(record: Mapping[str, object]) -> list[tuple[str, str]]:
    """What the builder says of the build, and in rows of their own what it wants the user to know."""
    noted = record.get("notes")
    notes = some(list(map(str, noted)), _MOST_NOTES) if isinstance(noted, list) else []
    rows = {"notes": [("note", note) for note in notes]}
    for kind in ("dequantised", "not quantised", "inputs not rounded"):
        reasons = record.get(kind)
        left = [f"{_names(names)}: {why}" for why, names in reasons.items()] if isinstance(reasons, dict) else []
        rows[kind] = [(kind, each) for each in some(left)]
    # `inspect --shards` shows the comparison with transformers' plan
    others = {name: value for name, value in record.items() if name != "tp_plan" and not rows.get(name)}
    return [("provenance", _pairs(others) or "none"), *(row for each in rows.values() for row in each)]


def _names(names: object) -> str:
    return ", ".join(map(str, names)) if isinstance(names, list) else str(names)


def _weights_bytes(graph: Graph) -> dict[str, int]:
    """What the params of a graph of one rank take, by their dtypes, the largest first."""
    found: Counter[str] = Counter()
    for param in graph.params:
        sizes = [size for size in param.type.shape if isinstance(size, int)]
        if not isinstance(param.recipe, Tie):
            found[param.type.dtype] += math.prod(sizes) * element_bytes(param.type.dtype)
    return dict(found.most_common())


def _activations(graph: Graph) -> dict[str, int]:
    """How the inputs of linear layers are rounded whose weights are in few bits: how many layers, by `activation`."""
    return _counted_by(graph, "precast.quantised_linear", "activation")


def _expert_activations(graph: Graph) -> dict[str, int]:
    """How experts in few bits round the rows that they multiply: how many layers of experts, by `rounding`."""
    return _counted_by(graph, "precast.quantised_experts", "rounding")


def _counted_by(graph: Graph, op: str, arg: str) -> dict[str, int]:
    """How often an op is computed in a step, by the values of an argument that is `none` where it isn't given."""
    blocks = {block.name: block.nodes for block in graph.blocks}
    steps = (blocks[step.block] if isinstance(step, Call) else (step,) for step in graph.main)
    nodes = (node for part in steps for node in part if node.op == op)
    given = (node.args.get(arg) for node in nodes)
    return dict(Counter(str(each.value) if isinstance(each, Const) else "none" for each in given).most_common())


def rounded_text(rounded: Mapping[str, int], experts: Mapping[str, int] = MappingProxyType({})) -> str:
    """The layers that `_activations` and `_expert_activations` count, in words."""
    found: dict[str, list[str]] = {}
    for counts, noun in ((rounded, "linear layer"), (experts, "MoE layer")):
        for kind, count in counts.items():
            found.setdefault(kind, []).append(_counted(count, noun))
    how = {kind: "as they are" if kind == "none" else f"rounded by {kind}" for kind in found}
    return "; ".join(f"{how[kind]} in {' and '.join(layers)}" for kind, layers in found.items())


def _activation_peaks(graph: Graph) -> dict[tuple[int, int], int]:
    """Bytes that steps of so many tokens and sequences hold at most on a GPU, all sequences beginning there."""
    found: dict[tuple[int, int], int] = {}
    peak: Expr | None = None
    for tokens, sequences in STEPS:
        pages = {group.name: -(-tokens // group.spec.page_size) + sequences for group in graph.caches.groups}
        sizes = step_memory.step_sizes(
            graph, max_num_tokens=tokens, max_num_seqs=sequences, max_seq_len=tokens, num_pages=pages
        )
        addresses = step_memory.addresses_of(graph, GPU, sizes)
        peak = step_memory.step_peak(graph, GPU, addresses) if peak is None else peak
        found[tokens, sequences] = addresses.num_bytes + symbols.evaluate(peak, sizes)
    return found


def _step_text(tokens: int, sequences: int) -> str:
    return f"{tokens:,} tokens of {sequences} sequences"


def graph(bundle: Bundle) -> Report:
    """The graph in the text form of `precast.ir.graph.text`."""
    text = format_graph(bundle.graph)
    return Report({"graph": text}, text.rstrip("\n"))


def passes(bundle: Bundle) -> Report:
    """Each pass with its stage, and the ops that it added and removed."""
    records = bundle.manifest.passes
    rows = [("stage", "pass", "version", "ops")]
    for record in records:
        delta = ", ".join(f"{op} {count:+d}" for op, count in record.delta.items())
        rows.append((record.stage, record.name, str(record.version), delta or ("edited" if record.changed else "-")))
    return Report({"passes": [msgspec.to_builtins(record) for record in records]}, table(rows))


def weights(bundle: Bundle) -> Report:
    """Each param with its type and recipe, which tensors are ignored, and what the build read of the config."""
    rules = bundle.manifest.checkpoint
    params = [
        {"name": param.name, "type": format_type(param.type), "recipe": format_recipe(param.recipe)}
        for param in bundle.graph.params
    ]
    rows = [("param", "type", "recipe"), *(tuple(param.values()) for param in params)]
    notes = [
        ("unused tensors", ", ".join(rules.unused) or "none"),
        ("ignored tensors", ", ".join(rules.ignored) or "none"),
        ("optional prefixes", ", ".join(rules.optional_prefixes) or "none"),
    ]
    config = {} if bundle.manifest.config is None else bundle.manifest.config.values
    facts = [("entry of the config", "value"), *((name, _short(msgspec.json.encode(config[name]))) for name in config)]
    fields = {
        "params": params,
        "unused": list(rules.unused),
        "ignored": list(rules.ignored),
        "optional_prefixes": list(rules.optional_prefixes),
        "config": msgspec.to_builtins(config),
    }
    return Report(fields, f"{table(rows)}\n\n{table(notes)}\n\n{table(facts)}")


def cache(bundle: Bundle) -> Report:
    """Each group's geometry, how its pages lie in slabs, and the bytes that a sequence of given lengths keeps.

    For a bundle without slabs they are those that the loader chooses.
    """
    plan = caches.with_slabs(unsharded(bundle.graph).caches)
    groups = caches.groups(plan)
    limit = bundle.manifest.model.max_seq_len
    lengths = [*(length for length in LENGTHS if length < limit), limit]
    strides = {group.name: caches.page_stride(plan, group.pool) for group in groups}
    costs = {
        length: sum(caches.kept_pages(group, length) * strides[group.name] for group in groups) for length in lengths
    }
    per_slab = {pool.name: pool.pages_per_slab for pool in plan.pools}
    fields = {
        "slab_bytes": plan.slab_bytes,
        "groups": [
            {
                "name": group.name,
                "pool": group.pool,
                "layers": len(group.slots),
                "spec": _spec_fields(group.spec),
                "bytes_per_token": caches.token_bytes(group),
                "bytes_per_sequence": caches.state_bytes(group),
                "page_bytes": caches.filled_bytes(group),
                "page_stride": strides[group.name],
                "pages_per_slab": per_slab[group.pool],
            }
            for group in groups
        ],
        "bytes_per_sequence": costs,
    }
    if not groups:
        return Report(fields, "no caches")
    names = ("group", "pool", "layers", "kind", "geometry", "dtype", "page", "window", "bytes/token", "bytes/seq")
    geometry = [names, *map(_geometry, groups)]
    pages = [("group", "bytes a page", "stride", "pages a slab", "padding")]
    pages += [_pages(group, strides[group.name], per_slab[group.pool]) for group in groups]
    prices = [("tokens", "bytes a sequence", "of which visible to the next token")]
    for length, held in costs.items():
        seen = (min(caches.visible_bytes(group, length), caches.sequence_bytes(group, length)) for group in groups)
        prices.append((f"{length:,}", f"{held:,}", _percent(sum(seen), held)))
    slabs = f"slabs of {plan.slab_bytes:,} bytes"
    return Report(fields, f"{table(geometry)}\n\n{slabs}\n{table(pages)}\n\n{table(prices)}")


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of equal length as text, each cell in one line, each column but the last as wide as its longest cell."""
    cells = [[*map(shown, row[:-1]), shown(row[-1], limits.MAX_MESSAGE)] for row in rows]
    widths = [*(max(map(len, column)) for column in list(zip(*cells, strict=True))[:-1]), 0]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    return "\n".join(lines)


def _pairs(record: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in record.items())


def _spec_fields(spec: CacheSpec) -> dict[str, Any]:
    """The spec's kind (paged, latent, state or conv) and all of its fields, also those that have their defaults."""
    fields = {name: msgspec.to_builtins(getattr(spec, name)) for name in spec.__struct_fields__}
    return {"kind": spec.__struct_config__.tag, **fields}


def _geometry(group: CacheGroup) -> tuple[str, ...]:
    spec = group.spec
    layers, token, state = str(len(group.slots)), f"{caches.token_bytes(group):,}", f"{caches.state_bytes(group):,}"
    if isinstance(spec, StateSpec):
        shape = "x".join(map(symbols.text, spec.shape))
        return (group.name, group.pool, layers, spec.kind, shape, spec.dtype, "-", "-", "-", state)
    if isinstance(spec, IndexSpec):
        row = (group.name, group.pool, layers, "index", str(spec.key_size), spec.dtype, str(spec.page_size), "-")
        return (*row, token, "-")
    if isinstance(spec, EntrySpec):
        kind, shape = "entries", str(spec.entry_size) + (f" of {spec.rate} tokens" if spec.rate > 1 else "")
    elif isinstance(spec, LatentSpec):
        kind, shape = "latent", f"{spec.latent_size} + {spec.rope_size}"
    else:
        kind, shape = "kv", f"{symbols.text(spec.num_kv_heads)} x ({spec.head_size} + {spec.value_size})"
    chunk = spec.chunk if isinstance(spec, PagedSpec) else None
    window = str(spec.window) if spec.window is not None else "-" if chunk is None else f"chunks of {chunk}"
    return (group.name, group.pool, layers, kind, shape, spec.dtype, str(spec.page_size), window, token, "-")


def _pages(group: CacheGroup, stride: int, per_slab: int) -> tuple[str, str, str, str, str]:
    size = caches.filled_bytes(group)
    return (group.name, f"{size:,}", f"{stride:,}", f"{per_slab:,}", _percent(stride - size, stride))


def _short(encoded: bytes) -> str:
    text = encoded.decode()
    return text if len(text) <= 100 else f"{text[:97]}..."


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
