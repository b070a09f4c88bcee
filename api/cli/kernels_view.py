"""`precast inspect --kernels`: which implementation computes each op of a bundle on a target, and why. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from precast.cli.show import Report, table
from precast.ir.artifact import Bundle
from precast.ir.errors import TargetError
from precast.ir.graph.schema import Graph, Node, Steps
from precast.ir.graph.world import unsharded
from precast.ir.native import world_text
from precast.kernels.choices import Case, cases
from precast.kernels.measured import NOTHING
from precast.kernels.rounded.fusing import with_rounded_inputs
from precast.kernels.use import Target, Use, uses_in


def view(target: Target) -> Callable[[Bundle], Report]:
    """The view for a target."""
    return partial(kernels, target=target)


def kernels(bundle: Bundle, target: Target) -> Report:
    """A row for each op, element type and choice, with how many of the graph's nodes it stands for."""
    graph = with_rounded_inputs(unsharded(bundle.graph), target)
    rows = Counter(row for use in uses_in(graph, target) for row in _rows(use))
    names = ("op", "dtype", "implementation", "sizes", "control", "reason")
    found = [dict(zip(names, row, strict=True)) | {"nodes": rows[row]} for row in sorted(rows)]
    has_classes = any(row["sizes"] != "all" for row in found)
    header = ("op", "dtype", "nodes", "implementation", *(("sizes",) if has_classes else ()), "control", "reason")
    lines = [tuple(str(row[name]) for name in header) for row in found]
    gpu = "" if target.table is NOTHING else f"; choices measured on {target.table.machine.gpu}"
    text = f"target {target.text}{gpu}; nodes of a block count once\n\n{table([header, *lines])}"
    fused = _fused(graph)
    if fused:
        shown = [
            (*(str(row[name]) for name in ("operands", "results", "nodes")), ", ".join(row["steps"])) for row in fused
        ]
        text += f"\n\nfused ops:\n{table([('operands', 'results', 'nodes', 'steps'), *shown])}"
    measured = None if target.table is NOTHING else target.table.machine.gpu
    fields = {"target": target.text, "measured_on": measured, "kernels": found, "fused": fused}
    layers = _layers(bundle)
    if layers:
        fields["native"] = layers
        text += f"\n\n{_layers_text(layers)}"
    return Report(fields, text)


def _layers(bundle: Bundle) -> list[dict[str, Any]]:
    """The bundle's native layers: what each holds, and what it needs."""
    stored = {blob.name: blob for blob in bundle.manifest.blobs if blob.role == "native"}
    return [
        {
            "target": target,
            "worlds": [world_text(*world) for world in layer.worlds or ((1, 1),)],
            "digest": stored[target].digest,
            "bytes": stored[target].size,
            "image_bytes": sum(map(len, layer.images.values())),
            "compilers": layer.compilers,
            "cuda": layer.driver,
            "kernels": dict(sorted(Counter(kernel.kernel for kernel in layer.kernels).items())),
        }
        for target, layer in sorted(bundle.native.items())
    ]


def _layers_text(layers: list[dict[str, Any]]) -> str:
    rows = [("native layer", "ranks", "kernels", "bytes", "unpacked", "CUDA of the driver", "compilers", "digest")]
    for layer in layers:
        compilers = ", ".join(f"{name} {version}" for name, version in layer["compilers"].items())
        count, needs = sum(layer["kernels"].values()), f"{layer['cuda'] // 1000}.{layer['cuda'] % 1000 // 10}"
        sizes = (f"{layer['bytes']:,}", f"{layer['image_bytes']:,}")
        rows.append(
            (layer["target"], " and ".join(layer["worlds"]), str(count), *sizes, needs, compilers, layer["digest"])
        )
    return table(rows)


def _fused(graph: Graph) -> list[dict[str, Any]]:
    """A row for each kind of fused op: the names of its steps' ops, its counts, how many nodes there are."""
    rows: Counter[tuple[tuple[str, ...], int, int]] = Counter()
    for node in (step for steps in (graph.main, *(block.nodes for block in graph.blocks)) for step in steps):
        body = node.args.get("steps") if isinstance(node, Node) else None
        if isinstance(body, Steps):
            names = tuple(step.op.removeprefix("aten.").partition(".")[0] for step in body.steps)
            rows[names, len(node.args) - 1, len(body.results)] += 1
    return [
        {"steps": list(steps), "operands": operands, "results": results, "nodes": nodes}
        for (steps, operands, results), nodes in sorted(rows.items())
    ]


def _rows(use: Use) -> list[tuple[str, ...]]:
    op, dtype = f"{use.node.op}@{use.node.version}", use.dtype or "-"
    try:
        return [(op, dtype, *_cells(case)) for case in cases(use)]
    except TargetError as error:
        return [(op, dtype, "none", "all", "-", error.message)]


def _cells(case: Case) -> tuple[str, str, str, str]:
    sizes = ", ".join(
        f"{symbol} {low} to {'any' if high is None else high}" for symbol, (low, high) in case.sizes.items()
    )
    record = case.choice.record
    return record.name, sizes or "all", record.control, case.choice.reason
