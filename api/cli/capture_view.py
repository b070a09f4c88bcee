"""`precast inspect --capture`: which steps are captured as CUDA graphs, and where a target cuts them. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from precast.cli.show import Report, table
from precast.ir.artifact import Bundle
from precast.ir.errors import TargetError
from precast.ir.graph.schema import Call, Graph, Node
from precast.ir.graph.world import unsharded
from precast.ir.memory.capture import LEAST_TOKENS, MOST_TOKENS, capture_plan, step_cost
from precast.ir.memory.liveness import computed
from precast.kernels.choices import cases
from precast.kernels.records import Ranges
from precast.kernels.use import Target, Use, types_in, use_of


class _Cut(NamedTuple):
    """An op that reads the host in steps of these sizes, or that nothing computes on the target."""

    op: str
    implementation: str
    reason: str
    sizes: tuple[int, ...]


def view(target: Target) -> Callable[[Bundle], Report]:
    """The view for a target."""
    return partial(capture, target=target)


def capture(bundle: Bundle, target: Target) -> Report:
    """The sizes in their order, the figures that they follow from, and of each size the pieces and what cuts them."""
    graph = unsharded(bundle.graph)
    with computed():
        cost, sizes = step_cost(graph), graph.capture.sizes or capture_plan(graph).sizes
        figures = {
            "nodes": cost.nodes,
            "flop_per_token": round(cost.work_per_token),
            "launch_seconds": round(cost.launch_seconds, 6),
            "hidden_from_tokens": round(cost.hidden_from),
        }
    cuts = _cuts(graph, target, sizes)
    found = {
        "sizes": sizes,
        "planned_by": "builder" if graph.capture.sizes else "loader",
        **figures,
        "pieces": {size: 1 + sum(count for cut, count in cuts.items() if size in cut.sizes) for size in sizes},
        "reads_host": [cut._asdict() | {"nodes": count} for cut, count in sorted(cuts.items())],
    }
    return Report({"target": target.text, "capture": found}, _text(target.text, found))


def _text(target: Any, found: Any) -> str:
    nodes, flop, hidden = found["nodes"], found["flop_per_token"], found["hidden_from_tokens"]
    seconds = f"{1000 * found['launch_seconds']:,.1f} ms"
    origin = "" if found["planned_by"] == "builder" else "; the bundle has no plan, the loader makes this one"
    rows = [
        ("sizes", ", ".join(map(str, found["sizes"]))),
        ("order", f"as they are captured, but for the largest, which is first{origin}"),
        ("launches", f"{nodes:,} nodes run, which takes a host {seconds} op by op"),
        ("work", f"{flop / 1e6:,.1f} MFLOP a token: a GPU takes longer than that from {hidden:,} tokens on"),
        ("planned", f"up to the next size from there, at least {LEAST_TOKENS} and at most {MOST_TOKENS:,} tokens"),
        ("target", target),
        ("pieces", _pieces(found["pieces"])),
    ]
    if not found["reads_host"]:
        return table(rows)
    header = ("op", "nodes", "implementation", "sizes", "reason")
    cuts = [
        (row["op"], str(row["nodes"]), row["implementation"], _spans(row["sizes"], found["sizes"]), row["reason"])
        for row in found["reads_host"]
    ]
    return f"{table(rows)}\n\nreads the host, so that steps are cut in front of it:\n{table([header, *cuts])}"


def _pieces(pieces: dict[int, int]) -> str:
    """`1: steps are captured whole`, or how many at which sizes."""
    by_count: dict[int, list[int]] = {}
    for size, count in pieces.items():
        by_count.setdefault(count, []).append(size)
    parts = [
        f"{count}{': steps are captured whole' if count == 1 else ''}"
        + (f" (sizes {_spans(sizes, list(pieces))})" if len(by_count) > 1 else "")
        for count, sizes in sorted(by_count.items())
    ]
    return "; ".join(parts)


def _spans(sizes: Sequence[int], every: Sequence[int]) -> str:
    """`all`, or from which of these sizes to which: classes of sizes are ranges."""
    return "all" if len(sizes) == len(every) else f"{min(sizes)} to {max(sizes)}"


def _cuts(graph: Graph, target: Target, sizes: Sequence[int]) -> Counter[_Cut]:
    """What reads the host in steps of these sizes, and how often over all calls."""
    calls = Counter(step.block for step in graph.main if isinstance(step, Call))
    functions = [(graph.main, types_in(graph), 1)]
    functions += [(block.nodes, types_in(block), calls[block.name]) for block in graph.blocks if calls[block.name]]
    found: Counter[_Cut] = Counter()
    for steps, types, times in functions:
        for node in steps:
            if isinstance(node, Node):
                found.update(dict.fromkeys(_cuts_of(use_of(node, types, target), sizes), times))
    return found


def _cuts_of(use: Use, sizes: Sequence[int]) -> Iterator[_Cut]:
    op = f"{use.node.op}@{use.node.version}"
    try:
        found = cases(use)
    except TargetError as error:
        yield _Cut(op, "none", error.message, tuple(sizes))
        return
    for case in found:
        inside = tuple(size for size in sizes if _within(case.sizes, size))
        if case.choice.record.control == "host" and inside:
            yield _Cut(op, case.choice.record.name, case.choice.reason, inside)


def _within(ranges: Ranges, size: int) -> bool:
    return all(low <= size and (high is None or size <= high) for low, high in ranges.values())
