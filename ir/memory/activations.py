"""How many bytes of activations a step holds at most, as an expression of the graph's symbols; without running it.

At each op there is a sum: what is alive (`precast.ir.memory.liveness`), what the op makes, and its workspace
(`precast.ir.memory.workspace`). The peak is the largest of the sums, of which those that others exceed for all sizes
are left out. Inputs, params, constants and caches are no activations, and what allocators and libraries keep for
themselves isn't in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from precast.ir.graph import symbols
from precast.ir.graph.schema import Expr, Graph
from precast.ir.memory.liveness import Moment, Run, runs
from precast.ir.memory.operands import LONGEST
from precast.ir.memory.workspace import drawing


def peak(graph: Graph, device: str) -> Expr:
    """Bytes that a run of a verified graph holds at most on a `device` of this kind, "cpu" or "cuda".

    Never less than the true peak for sizes within the symbols' ranges. Its symbols are the graph's and `LONGEST`.
    """
    return _peak(runs(graph, device))


def step_peak(graph: Graph, device: str) -> Expr:
    """As `peak`, for a step of an engine, which draws tokens from the logits while it holds them."""
    found = runs(graph, device)
    made = {value.name: value.type for step in graph.main for value in step.outputs}
    logits = made.get(graph.outputs.get("logits", ""))
    drawn: Expr = 0 if logits is None else drawing(logits, device)
    return symbols.largest((_peak(found), *(symbols.add(_sum(run.kept), drawn) for run in found)))


def step_sizes(
    graph: Graph, *, max_num_tokens: int, max_num_seqs: int, max_seq_len: int, num_pages: Mapping[str, int]
) -> dict[str, int]:
    """The largest sizes of a step, by symbol, for `symbols.evaluate`; `num_pages` are the pages of page lists by group.

    One token at least belongs to each sequence, and one row of logits at most; none is longer than `max_seq_len`.
    """
    sequences = min(max_num_seqs, max_num_tokens)
    sizes = {symbol.name: symbol.max or 0 for symbol in graph.symbols}
    sizes |= {"tp": 1, "rank": 0, "T": max_num_tokens, "B": sequences, "R": sequences, LONGEST: max_seq_len}
    types = {value.name: value.type for value in graph.inputs}
    for group in graph.caches.groups:
        count = types[group.inputs.page_indices].shape[0]
        if isinstance(count, str):
            sizes[count] = num_pages.get(group.name, 0)
    return sizes


def largest_moments(graph: Graph, device: str, sizes: Mapping[str, int], count: int) -> list[tuple[int, Moment]]:
    """The ops at which a run of these sizes holds most, with the bytes that it then holds; the largest first."""
    run, _ = runs(graph, device)
    found = [(moment_bytes(moment, sizes), moment) for moment in run.moments]
    return sorted(found, key=lambda each: -each[0])[:count]


def moment_bytes(moment: Moment, sizes: Mapping[str, int]) -> int:
    """What is held at an op, in bytes."""
    return sum(symbols.evaluate(part, sizes) for part in (_sum(moment.held), _sum(moment.made), moment.workspace))


def _peak(found: Iterable[Run]) -> Expr:
    sums = {
        (frozenset((Counter(dict(moment.held)) + Counter(dict(moment.made))).items()), moment.workspace)
        for run in found
        for moment in run.moments
    }
    return symbols.largest(symbols.add(workspace, _sum(alive)) for alive, workspace in sums)


def _sum(counted: Iterable[tuple[Expr, int]]) -> Expr:
    return symbols.add(*(symbols.mul(size, count) for size, count in counted))
