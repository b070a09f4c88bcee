"""The passes in their order, and the runner, which checks and records what each of them does.

A pass only rewrites. The runner removes dead nodes, lints, checks that the pass told the truth and that what it relies
on holds, and records which ops it added and removed.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial, update_wrapper
from pathlib import Path
from typing import Any

from precast.builder.graph.context import FxGraph, PassContext
from precast.builder.graph.nodes import eliminate_dead_code, op_counts
from precast.builder.passes.cache.fuse_rotary_write import fuse_rotary_write
from precast.builder.passes.cache.insert_caches import insert_caches, insert_states
from precast.builder.passes.graph_pass import STAGES, Invariant, LoweredPass, Pass
from precast.builder.passes.lower.copy_before_reshape import copy_before_reshape
from precast.builder.passes.lower.fuse_gated_linear import fuse_gated_linear
from precast.builder.passes.lower.fuse_pointwise import fuse_pointwise
from precast.builder.passes.lower.keep_quantised import KEEP_QUANTISED, Dequantised, Unrounded
from precast.builder.passes.lower.spelled_out import spell_out_gates
from precast.builder.passes.match.attention import match_attention
from precast.builder.passes.match.causal_conv import match_causal_conv
from precast.builder.passes.match.latent_attention import match_latent_attention
from precast.builder.passes.match.norms import fuse_norm_residual_norm, fuse_residual_norm, match_norms
from precast.builder.passes.match.outputs import order_outputs
from precast.builder.passes.match.params import fold_param_views, fuse_projections
from precast.builder.passes.match.pointwise import fuse_gated_activation, match_activations, match_embedding
from precast.builder.passes.match.rotary import match_paired_rotary, match_rotary
from precast.builder.passes.match.rotary_tables import match_complex_rotary, match_rotary_tables
from precast.builder.passes.match.routers import match_routers
from precast.builder.passes.match.sparse_attention import match_sparse_attention
from precast.builder.passes.match.spelling import (
    cancel_transposes,
    join_slices,
    keep_heads_apart,
    normalise_spelling,
)
from precast.builder.passes.normalise.arithmetic import normalise_arithmetic, normalise_linear
from precast.builder.passes.normalise.canonical import merge_duplicates, order_nodes
from precast.builder.passes.normalise.fold_constants import fold_constants
from precast.builder.passes.normalise.positions import match_positions
from precast.builder.passes.normalise.views import normalise_views, remove_noops
from precast.builder.passes.normalise.writes import assemble_copies, remove_self_copies, remove_writes
from precast.builder.passes.plan.gather_logits import gather_logits
from precast.builder.passes.plan.plan_pages import plan_pages
from precast.builder.passes.shard.shard import SHARD
from precast.builder.shard.overrides import Overrides
from precast.ir.errors import BuildError
from precast.ir.graph.schema import Call, Dtype, Graph, Node
from precast.ir.graph.text import format_graph
from precast.ir.manifest import PassRecord

PASSES: tuple[Pass, ...] = (
    # normalise
    remove_self_copies, assemble_copies, remove_writes, remove_noops, match_positions, fold_constants,
    normalise_views, normalise_linear, normalise_arithmetic, merge_duplicates, order_nodes,
    # match
    match_attention, match_causal_conv,
    match_rotary_tables, match_rotary, match_paired_rotary, match_complex_rotary,
    normalise_spelling, join_slices, match_latent_attention, match_sparse_attention,
    match_norms, match_activations, match_embedding, match_routers, keep_heads_apart,
    fold_param_views, fuse_gated_activation, order_outputs, fuse_projections, cancel_transposes,
    fuse_residual_norm, fuse_norm_residual_norm,
    # cache, plan
    insert_states, insert_caches, fuse_rotary_write, plan_pages, gather_logits,
)  # fmt: skip
"""THE ordered list."""

LOWERED_PASSES: tuple[LoweredPass, ...] = (
    SHARD, KEEP_QUANTISED, fuse_gated_linear, spell_out_gates, fuse_pointwise, copy_before_reshape,
)  # fmt: skip
"""Those after them, over the graph that the bundle holds."""

_NEEDED = (insert_states, insert_caches, plan_pages, gather_logits)
"""The passes that make what every target needs."""

SNAPSHOT_STAGES = ("export", "normalise", "match", "shard", "cache", "plan")
"""The stages after which the pipeline's state is a graph that a snapshot can hold."""


def passes(disabled: Collection[str] = ()) -> tuple[Pass, ...]:
    """The passes in their order, without the disabled ones; those over the bundle's graph are `lowered_passes`.

    Raises BuildError("option-invalid") for a name that is no pass's, and for a pass that can't be left out.
    """
    known: dict[str, Pass | LoweredPass] = {each.name: each for each in PASSES} | {
        each.name: each for each in LOWERED_PASSES
    }
    for name in disabled:
        if name not in known:
            raise BuildError("option-invalid", f"there is no pass {name}", fix=_nearest(name, sorted(known)))
        if known[name] in _NEEDED:
            message = f"the pass {name} can't be disabled: no target runs a graph without what it makes"
            raise BuildError("option-invalid", message, fix="disable passes that only rewrite")
    left = tuple(each for each in PASSES if each.name not in disabled)
    for name in disabled:
        needing = [each.name for each in left if name in each.requires]
        if needing:
            message = f"the pass {name} can't be disabled: {', '.join(needing)} can't run without it"
            raise BuildError("option-invalid", message, fix="disable these, too, or leave it in")
    return left


def lowered_passes(
    disabled: Collection[str] = (),
    overrides: Overrides = (),
    left: list[Dequantised | Unrounded] | None = None,
    scales: Dtype = "float32",
) -> tuple[LoweredPass, ...]:
    """The passes over the bundle's graph, without the disabled ones; `shard` minds the overrides, and that quantised
    weights are to be kept. `left` gets what `keep_quantised` leaves out; `scales`: of its argument.

    `passes` refuses names that are none. Raises BuildError (option-invalid) for overrides where `shard` is disabled.
    """
    if overrides and SHARD.name in disabled:
        message = f"there is a shard plan, and the pass {SHARD.name} is disabled, which it is for"
        raise BuildError("option-invalid", message, fix="leave out one of them")
    told: dict[str, dict[str, Any]] = {
        SHARD.name: {"overrides": overrides, "in_blocks": KEEP_QUANTISED.name not in disabled},
        KEEP_QUANTISED.name: {"left": left, "scales": scales},
    }
    return tuple(_told(each, told.get(each.name, {})) for each in LOWERED_PASSES if each.name not in disabled)


def with_weights(passes: tuple[LoweredPass, ...], ctx: PassContext) -> tuple[LoweredPass, ...]:
    """The passes of which `keep_quantised` minds what is known of weights once a model is captured."""
    told = {"roundings": ctx.roundings, "wide": ctx.wide}
    return tuple(_told(each, told if each.name == KEEP_QUANTISED.name else {}) for each in passes)


def _told(each: LoweredPass, given: dict[str, Any]) -> LoweredPass:
    """The pass with these arguments."""
    return dataclasses.replace(each, run=update_wrapper(partial(each.run, **given), each.run)) if given else each


def split(todo: tuple[Pass, ...], stage: str) -> tuple[tuple[Pass, ...], tuple[Pass, ...]]:
    """The passes up to the end of `stage`, and those after it. Raises BuildError("option-invalid")."""
    if stage not in SNAPSHOT_STAGES:
        message = f"snapshot_after is {stage!r}, which is no stage with a snapshot"
        raise BuildError("option-invalid", message, fix=_nearest(stage, SNAPSHOT_STAGES))
    count = sum(STAGES.index(each.stage) <= STAGES.index(stage) for each in todo)
    return todo[:count], todo[count:]


def _nearest(name: str, known: Sequence[str]) -> str:
    """What to do about an unknown name: the known ones that are most like it, or all."""
    near = difflib.get_close_matches(name, known, n=3) or known
    return f"name {near[0]}" if len(near) == 1 else f"name one of {', '.join(near)}"


def run(
    graph: FxGraph, ctx: PassContext, todo: tuple[Pass, ...], *, history: tuple[PassRecord, ...] = (),
    dump: Path | None = None, observe: Callable[[Pass, FxGraph], None] | None = None,
) -> tuple[PassRecord, ...]:  # fmt: skip
    """Runs the passes in order, after those in `history`; returns the history with them.

    `dump`: a directory that gets the graph after each as text, numbered. `observe` is called after each (the tests
    compare the graph's results there).

    Raises BuildError("write-failed") when a dump can't be written.
    """
    eliminate_dead_code(graph, ctx)
    for each in todo:
        missing = set(each.requires) - {record.name for record in history}
        needed = ", ".join(sorted(missing))
        assert not missing, f"{each.name} requires {needed}: move it after them in PASSES, or correct `requires`"
        _check(each.before, graph, f"before {each.name}")
        counts, content = op_counts(graph), (_content(graph), ctx.caches)
        changed = each.run(graph, ctx)
        eliminate_dead_code(graph, ctx)
        graph.lint()
        new = op_counts(graph)
        delta = {op: new[op] - counts[op] for op in sorted(new | counts) if new[op] != counts[op]}
        differs = (_content(graph), ctx.caches) != content
        assert changed or not differs, f"{each.name} returned False and changed the graph: return True where it edits"
        assert differs or not changed, f"{each.name} returned True and changed nothing: return True only where it edits"
        _check(each.after, graph, f"after {each.name}")
        if dump is not None:
            _write_dump(dump / f"{len(history):02d}_{each.name}.txt", f"{graph}\n")
        history = (*history, PassRecord(each.name, each.stage, each.version, changed, delta))
        if observe is not None:
            observe(each, graph)
    return history


def run_lowered(
    graph: Graph, todo: tuple[LoweredPass, ...], *, history: tuple[PassRecord, ...] = (), dump: Path | None = None
) -> tuple[Graph, tuple[PassRecord, ...]]:
    """The bundle's graph after these passes, and the history with them. `dump` as in `run`."""
    for each in todo:
        before, after = _lowered_counts(graph), _lowered_counts(made := each.run(graph))
        delta = {op: after[op] - before[op] for op in sorted(after | before) if after[op] != before[op]}
        record = PassRecord(each.name, each.stage, each.version, made != graph, delta)
        if dump is not None:
            _write_dump(dump / f"{len(history):02d}_{each.name}.txt", format_graph(made))
        graph, history = made, (*history, record)
    return graph, history


def _lowered_counts(graph: Graph) -> Counter[str]:
    """How often each op stands in the graph; nodes of a block count once for each call."""
    counts = Counter(step.op for step in graph.main if isinstance(step, Node))
    calls = Counter(step.block for step in graph.main if isinstance(step, Call))
    for block in graph.blocks:
        for node in block.nodes:
            counts[node.op] += calls[block.name]
    return counts


def _check(invariants: tuple[Invariant, ...], graph: FxGraph, when: str) -> None:
    for invariant in invariants:
        found = invariant(graph)
        cure = "rewrite these in an earlier pass, or move the pass after the one that does, or correct its decorator"
        assert not found, f"{when}: {invariant.__doc__} But there is {', '.join(sorted(found))}: {cure}"


def _write_dump(file: Path, text: str) -> None:
    try:
        file.write_text(text)
    except OSError as error:
        message = f"the dump can't be written: {error.strerror}"
        fix = "check the directory's permissions and the room on its disk"
        raise BuildError("write-failed", message, where=str(file), fix=fix) from error


def _content(graph: FxGraph) -> list[tuple[Any, ...]]:
    """What two graphs of the same nodes are compared by."""
    return [(node, node.target, node.args, node.kwargs) for node in graph.nodes]
