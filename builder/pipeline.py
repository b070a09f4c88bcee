"""The ordered list of passes, and the runner that knows everything a pass need not.

A pass is a plain function `(graph, ctx) -> bool`: it edits the graph and says whether it changed anything. The
runner removes dead nodes, lints, checks that the pass told the truth, and records what each pass added and removed.
"""

from __future__ import annotations

import dataclasses
import operator
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from precast.builder.graph.context import PassContext
from precast.builder.graph.fx_types import FxGraph, FxNode
from precast.ir.errors import BuildError
from precast.ir.manifest import PassRecord

STAGES = ("factory", "export", "normalise", "match", "shard", "cache", "plan", "lower", "pack")

PassFunction = Callable[[FxGraph, PassContext], bool]


@dataclasses.dataclass(frozen=True)
class Pass:
    """A registered pass. A change of what it does is a new version: snapshots and manifests name it."""

    name: str
    stage: str
    version: int
    run: PassFunction
    requires: tuple[str, ...] = ()


def graph_pass(*, stage: str, version: int, requires: tuple[str, ...] = ()) -> Callable[[PassFunction], Pass]:
    """Makes a `Pass` of a function; its name is the function's. `requires` names passes that must run before it."""
    assert stage in STAGES

    def register(function: PassFunction) -> Pass:
        return Pass(function.__name__, stage, version, function, requires)

    return register


def passes() -> tuple[Pass, ...]:
    """THE ordered list."""
    from precast.builder.passes.cache.insert_caches import insert_caches
    from precast.builder.passes.cache.insert_states import insert_states
    from precast.builder.passes.match.cancel_transposes import cancel_transposes
    from precast.builder.passes.match.fold_param_views import fold_param_views
    from precast.builder.passes.match.fuse_gated_activation import fuse_gated_activation
    from precast.builder.passes.match.fuse_projections import fuse_projections
    from precast.builder.passes.match.fuse_residual_norm import fuse_residual_norm
    from precast.builder.passes.match.match_activations import match_activations
    from precast.builder.passes.match.match_attention import match_attention
    from precast.builder.passes.match.match_causal_conv import match_causal_conv
    from precast.builder.passes.match.match_complex_rotary import match_complex_rotary
    from precast.builder.passes.match.match_embedding import match_embedding
    from precast.builder.passes.match.match_latent_attention import match_latent_attention
    from precast.builder.passes.match.match_norms import match_norms
    from precast.builder.passes.match.match_paired_rotary import match_paired_rotary
    from precast.builder.passes.match.match_rotary import match_rotary
    from precast.builder.passes.match.match_rotary_tables import match_rotary_tables
    from precast.builder.passes.match.match_routers import match_routers
    from precast.builder.passes.match.normalise_spelling import normalise_spelling
    from precast.builder.passes.normalise.assemble_copies import assemble_copies
    from precast.builder.passes.normalise.fold_constants import fold_constants
    from precast.builder.passes.normalise.match_positions import match_positions
    from precast.builder.passes.normalise.merge_duplicates import merge_duplicates
    from precast.builder.passes.normalise.normalise_arithmetic import normalise_arithmetic
    from precast.builder.passes.normalise.normalise_linear import normalise_linear
    from precast.builder.passes.normalise.normalise_views import normalise_views
    from precast.builder.passes.normalise.order_nodes import order_nodes
    from precast.builder.passes.normalise.remove_noops import remove_noops
    from precast.builder.passes.normalise.remove_self_copies import remove_self_copies
    from precast.builder.passes.normalise.remove_writes import remove_writes
    from precast.builder.passes.plan.gather_logits import gather_logits
    from precast.builder.passes.plan.plan_pages import plan_pages

    return (
        remove_self_copies,
        assemble_copies,
        remove_writes,
        remove_noops,
        match_positions,
        fold_constants,
        normalise_views,
        normalise_linear,
        normalise_arithmetic,
        merge_duplicates,
        order_nodes,
        match_attention,
        match_causal_conv,
        match_rotary_tables,
        match_rotary,
        match_paired_rotary,
        match_complex_rotary,
        normalise_spelling,
        match_latent_attention,
        match_norms,
        match_activations,
        match_embedding,
        match_routers,
        fold_param_views,
        fuse_gated_activation,
        fuse_projections,
        cancel_transposes,
        fuse_residual_norm,
        insert_states,
        insert_caches,
        plan_pages,
        gather_logits,
    )


def run(
    graph: FxGraph,
    ctx: PassContext,
    todo: tuple[Pass, ...],
    *,
    dump: Path | None = None,
    first: int = 0,
    observe: Callable[[Pass, FxGraph], None] | None = None,
) -> tuple[PassRecord, ...]:
    """Runs the passes in order.

    `dump`: a directory that gets the graph after each as text, numbered from `first`. `observe` is called after each
    (the tests compare the graph's results there).

    Raises BuildError("write-failed") when a dump can't be written.
    """
    records: list[PassRecord] = []
    done = {step.name for step in passes()[:first]}
    eliminate_dead_code(graph, ctx)
    for number, step in enumerate(todo, first):
        missing = set(step.requires) - done
        assert not missing, f"{step.name} runs before {missing}"
        before, content = op_counts(graph), (_content(graph), ctx.caches)
        changed = step.run(graph, ctx)
        eliminate_dead_code(graph, ctx)
        graph.lint()
        delta = {op: n for op, n in sorted(_difference(op_counts(graph), before).items()) if n}
        differs = (_content(graph), ctx.caches) != content
        assert changed or not differs, f"{step.name} changed the graph and said that it didn't: {delta}"
        assert differs or not changed, f"{step.name} said that it changed the graph, and didn't"
        records.append(PassRecord(step.name, step.stage, step.version, changed, delta))
        done.add(step.name)
        if dump is not None:
            _write_dump(dump / f"{number:02d}_{step.name}.txt", graph)
        if observe is not None:
            observe(step, graph)
    return tuple(records)


def _write_dump(file: Path, graph: FxGraph) -> None:
    try:
        file.write_text(str(graph) + "\n")
    except OSError as error:
        message = f"the dump can't be written: {error.strerror}"
        raise BuildError("write-failed", message, where=str(file)) from error


def eliminate_dead_code(graph: FxGraph, ctx: PassContext) -> None:
    """Removes nodes that nothing needs, and the params, constants and inputs that no node uses any more.

    A node that writes into an argument (its op's schema says so) is needed. The tracer's assertions, which return
    nothing, are not: what they state holds for every graph.
    """
    for node in reversed(list(graph.nodes)):
        if node.users or node.op == "output" or _writes(node):
            continue
        if node.op == "placeholder":
            if node.name in ctx.params or node.name in ctx.constants:
                ctx.params.pop(node.name, None)
                ctx.constants.pop(node.name, None)
                graph.erase_node(node)
            continue
        graph.erase_node(node)


def _content(graph: FxGraph) -> list[tuple[Any, ...]]:
    """What two graphs of the same nodes are compared by."""
    return [(node, node.target, node.args, node.kwargs) for node in graph.nodes]


def op_counts(graph: FxGraph) -> Counter[str]:
    """How often each op stands in the graph. Picking one of several results is no operation."""
    calls = (node.target for node in graph.nodes if node.op == "call_function")
    return Counter(op_name(target) for target in calls if target is not operator.getitem)


def op_name(target: Any) -> str:
    """`aten.add.Tensor`, `precast.rms_norm`, or the name of a Python operator."""
    name = str(target) if hasattr(target, "_schema") else getattr(target, "__name__", str(target))
    return name.removesuffix(".default") if name.startswith("precast.") else name


def _writes(node: FxNode) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def _difference(after: Counter[str], before: Counter[str]) -> dict[str, int]:
    return {op: after[op] - before[op] for op in after.keys() | before.keys()}


def before_caches(step: Pass) -> bool:
    """Whether the pass runs before caches are planned: there the pipeline's snapshot is taken."""
    return STAGES.index(step.stage) <= STAGES.index("shard")
