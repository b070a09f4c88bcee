"""The bytes of activations that a step holds at most, without running it: where values lie, and what else is alive.

A value that is written where it is told has an address in one memory (`precast.ir.memory.addresses`). Of all others
there is an expression over symbols. At each op there is a sum: what is alive (`precast.ir.memory.liveness`),
what the op makes, and the workspace of what computes it (`precast.kernels.choices`). The peak is the largest of the
sums, of which those that others exceed for all sizes are left out. Inputs, params, constants and caches are no
activations, and what allocators and libraries keep for themselves isn't in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from precast.ir.graph import symbols
from precast.ir.graph.schema import Block, Dtype, Expr, Graph, Node, Ref, TensorType, Value
from precast.ir.memory import addresses as plans
from precast.ir.memory import liveness
from precast.ir.memory.addresses import Addresses
from precast.ir.memory.liveness import Moment, Operand, Run
from precast.ir.ops.checks import WORLD
from precast.kernels.choices import cases, fastest, workspace
from precast.kernels.sampling.limits import SAMPLE_VERSION
from precast.kernels.sampling.records import greedy_workspace
from precast.kernels.use import LONGEST, Target, Use, statics_in, type_bytes, types_in, use_of

_OF_VALUES = ("T", "B", "R", *sorted(WORLD))
"""The symbols in the sizes of a value that has an address; page lists have others."""


def addresses_of(graph: Graph, target: Target, sizes: Mapping[str, int]) -> Addresses:
    """Addresses of the values of a verified graph that implementations for a target write where they are told.

    `sizes` are the largest of a step (`step_sizes`).
    """
    placed = {block.name: _written(block, block.nodes, target) for block in graph.blocks}
    placed[""] = _written(graph, [step for step in graph.main if isinstance(step, Node)], target)
    return addresses_of_written(graph, placed, sizes)


@liveness.computed()
def addresses_of_written(graph: Graph, written: Mapping[str, frozenset[str]], sizes: Mapping[str, int]) -> Addresses:
    """As `addresses_of`, of the values that are `written` so: by block, and by "" those of `main`."""
    return plans.plan(graph, written, {name: sizes[name] for name in _OF_VALUES if name in sizes})


def _written(function: Graph | Block, nodes: Sequence[Node], target: Target) -> frozenset[str]:
    """The results that the implementations of these nodes write where they are told."""
    types, statics = types_in(function), statics_in(function)
    uses = ((node, use_of(node, types, target, statics)) for node in nodes)
    told = [node for node, use in uses if any(not case.choice.record.allocates for case in cases(use))]
    return frozenset(value.name for node in told for value in node.outputs)


def runs(graph: Graph, target: Target, addresses: Addresses | None = None) -> list[Run]:
    """The runs of `precast.ir.memory.liveness`, with the workspaces of the implementations for a target."""
    return liveness.runs(graph, lambda node, operands: workspace(Use(node, operands, target)), addresses)


@liveness.computed()
def peak(graph: Graph, target: Target, addresses: Addresses | None = None) -> Expr:
    """Bytes that a run of a verified graph holds at most on a target, those at `addresses` left out.

    On a GPU never less than the true peak for sizes within the symbols' ranges; on a CPU a bound, and no promise
    (`precast.kernels.choices.workspace`). Its symbols are the graph's and `LONGEST`.
    """
    return _peak(runs(graph, target, addresses))


@liveness.computed()
def step_peak(graph: Graph, target: Target, addresses: Addresses | None = None, *, captured: bool = False) -> Expr:
    """As `peak`, for a step of an engine, which draws tokens from the logits while it holds them."""
    found = runs(graph, target, addresses)
    made = {value.name: value.type for step in graph.main for value in step.outputs}
    logits = made.get(graph.outputs.get("logits", ""))
    drawn: Expr = 0 if logits is None else drawing(logits, target, captured=captured)
    return symbols.largest((_peak(found), *(symbols.add(_sum(run.kept), drawn) for run in found)))


def drawing(logits: TensorType, target: Target, *, captured: bool) -> Expr:
    """Bytes that drawing a token for each row of `logits` [..., V] holds at most, beside them.

    A `captured` step draws by the fastest implementation that can be captured. Another one does by the fastest of all,
    or, where all rows want their likeliest token, takes that (`precast.kernels.sampling.sample.greedy`).
    """
    tokens = Value("tokens", TensorType("int64", logits.shape[:-1]))
    node = Node("precast.sample", {"logits": Ref("logits")}, (tokens,), version=SAMPLE_VERSION)
    use = Use(node, {"logits": Operand(logits, True)}, target)
    if target.device == "cpu":
        return workspace(use)
    dtypes: dict[str, Dtype] = {"logits": logits.dtype}
    record = fastest(node.op, node.version, target, control="static" if captured else None, dtypes=dtypes)
    held = record.workspace(use)
    if target.tp > 1:  # the logits may be a rank's part, and rows are put together
        held = symbols.add(held, symbols.mul(target.tp, type_bytes(logits)))
    return held if captured else symbols.largest((held, greedy_workspace(use)))


def step_sizes(
    graph: Graph, *, max_num_tokens: int, max_num_seqs: int, max_seq_len: int, num_pages: Mapping[str, int]
) -> dict[str, int]:
    """The largest sizes of a step, by symbol, for `symbols.evaluate`; `num_pages` are the pages of page lists by group.

    One token at least belongs to each sequence, and one row of logits at most; none is longer than `max_seq_len`.
    A pool counts the pages that are in use.
    """
    sequences = min(max_num_seqs, max_num_tokens)
    sizes = {symbol.name: symbol.max or 0 for symbol in graph.symbols}
    sizes |= {"T": max_num_tokens, "B": sequences, "R": sequences, LONGEST: max_seq_len}
    types = {value.name: value.type for value in graph.inputs}
    for group in graph.caches.groups:
        count = types[group.inputs.page_indices].shape[0]
        if isinstance(count, str):
            sizes[count] = num_pages.get(group.name, 0)
    in_use = Counter({group.pool: sequences for group in graph.caches.states})
    in_use.update({group.pool: num_pages.get(group.name, 0) for group in graph.caches.groups})
    sizes |= {pool.pages: in_use[pool.name] for pool in graph.caches.pools}
    return sizes


@liveness.computed()
def largest_moments(graph: Graph, target: Target, sizes: Mapping[str, int], count: int) -> list[tuple[int, Moment]]:
    """The ops at which a run of these sizes holds most, with the bytes that it then holds; the largest first."""
    run, _ = runs(graph, target)
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
