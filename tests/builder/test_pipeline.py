"""The list of passes, and the runner: order, truth, history, dumps."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import families
import pytest
import torch
from fx_text import SmallGraph, read_graph, write_graph
from torch import fx

from precast.builder import pipeline
from precast.builder.build import build
from precast.builder.graph.context import PassContext
from precast.builder.graph.nodes import eliminate_dead_code, op_counts
from precast.builder.passes.graph_pass import (
    STAGES,
    Invariant,
    Pass,
    all_have_caches,
    graph_pass,
    one_spelling_of_views,
)
from precast.builder.passes.match.pointwise import match_activations
from precast.builder.passes.normalise.canonical import merge_duplicates
from precast.ir.errors import BuildError
from precast.ir.manifest import PassRecord

aten = torch.ops.aten


@pytest.fixture
def small() -> SmallGraph:
    return read_graph(
        """
        x: input(float32, 1, T, 8)
        a = aten.neg(x)
        b = aten.neg(x)
        y = aten.add.Tensor(a, b)
        return y
        """
    )


def step(function: Callable[[fx.Graph, PassContext], bool]) -> Pass:
    return graph_pass(stage="match", version=1)(function)


def calls(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "call_function"]


# --- the list ----------------------------------------------------------------------------------------------------


def test_every_pass_is_of_a_stage_and_the_stages_are_in_order() -> None:
    stages = [STAGES.index(each.stage) for each in pipeline.passes()]

    assert stages == sorted(stages)


def test_names_are_unique_and_each_module_of_a_stage_has_a_pass() -> None:
    known = (*pipeline.passes(), *pipeline.lowered_passes())
    names = [each.name for each in known]
    places = {(each.stage, each.run.__module__) for each in known}

    assert len(set(names)) == len(names)
    files = Path(pipeline.__file__).parent.joinpath("passes").glob("*/[a-z]*.py")
    assert places == {(file.parent.name, f"precast.builder.passes.{file.parent.name}.{file.stem}") for file in files}


def test_every_pass_of_the_modules_is_in_the_list() -> None:
    modules = [sys.modules[each.run.__module__] for each in pipeline.PASSES]
    written = {value.name for module in modules for value in vars(module).values() if isinstance(value, Pass)}

    assert written == {each.name for each in pipeline.PASSES}


def test_what_a_pass_requires_runs_before_it() -> None:
    done: set[str] = set()
    for each in pipeline.passes():
        assert set(each.requires) <= done, each.name
        done.add(each.name)


def test_a_pass_before_what_it_requires_is_caught(small: SmallGraph) -> None:
    late = Pass("late", "match", 1, lambda graph, ctx: False, requires=("merge_duplicates", "match_norms"))

    with pytest.raises(AssertionError, match=r"late requires match_norms: move it after them in PASSES"):
        pipeline.run(small.graph, small.ctx, (merge_duplicates, late))


def test_passes_of_an_earlier_run_count_as_done(small: SmallGraph) -> None:
    earlier = PassRecord("assemble_copies", "normalise", 1, False, {})
    late = Pass("late", "match", 1, lambda graph, ctx: False, requires=("assemble_copies",))

    history = pipeline.run(small.graph, small.ctx, (late,), history=(earlier,))

    assert history == (earlier, PassRecord("late", "match", 1, False, {}))


def test_a_stage_that_is_none_is_caught() -> None:
    with pytest.raises(AssertionError):
        graph_pass(stage="polish", version=1)


def test_passes_up_to_the_caches_come_first() -> None:
    early, late = pipeline.split(pipeline.passes(), "shard")

    assert (*early, *late) == pipeline.passes()
    assert early[-1].name == "fuse_norm_residual_norm"
    assert late[0].name == "insert_states"


def test_disabled_passes_are_left_out() -> None:
    left = pipeline.passes(("match_activations", "fuse_gated_activation", "fuse_projections"))

    assert len(left) == len(pipeline.PASSES) - 3
    assert "match_activations" not in [each.name for each in left]


@pytest.mark.parametrize(
    ("name", "message", "fix"),
    [
        ("match_norm", "there is no pass match_norm", "name one of match_norms, match_attention, match_rotary"),
        ("xyz", "there is no pass xyz", "name one of assemble_copies, cancel_transposes, copy_before_reshape, "),
        (
            "match_activations",
            "the pass match_activations can't be disabled: fuse_gated_activation can't run without it",
            "disable these, too, or leave it in",
        ),
        ("insert_caches", "the pass insert_caches can't be disabled: no target runs", "disable passes that only"),
        ("plan_pages", "the pass plan_pages can't be disabled: no target runs", "disable passes that only"),
    ],
)
def test_a_pass_that_cannot_be_disabled(name: str, message: str, fix: str) -> None:
    with pytest.raises(BuildError) as error:
        pipeline.passes((name,))

    assert error.value.code == "option-invalid"
    assert error.value.message.startswith(message)
    assert (error.value.fix or "").startswith(fix)


def test_a_disabled_pass_is_not_in_the_manifest(tmp_path: Path) -> None:
    config = families.make_config("llama")

    bundles = [
        build(config, tmp_path / str(number), disabled_passes=disabled, snapshots=tmp_path / "snapshots")
        for number, disabled in enumerate([(), ("fuse_residual_norm",)])
    ]

    ran = [[record.name for record in bundle.manifest.passes] for bundle in bundles]
    assert set(ran[0]) - set(ran[1]) == {"fuse_residual_norm"}
    assert [bundle.provenance["from_snapshot"] for bundle in bundles] == [False, False]
    assert ["precast.residual_rms_norm" in bundle.manifest.ops for bundle in bundles] == [True, False]


def test_what_a_pass_relies_on_is_checked(small: SmallGraph) -> None:
    def no_negation(graph: fx.Graph) -> set[str]:
        """Nothing is negated."""
        return {str(node.target) for node in calls(graph) if node.target is aten.neg.default}

    relying = graph_pass(stage="match", version=1, before=(no_negation,))(lambda graph, ctx: False)
    promising = graph_pass(stage="match", version=1, after=(no_negation,))(lambda graph, ctx: False)

    with pytest.raises(AssertionError, match=r"before <lambda>: Nothing is negated. But there is aten.neg.default"):
        pipeline.run(small.graph, small.ctx, (relying,))
    with pytest.raises(AssertionError, match=r"after <lambda>: Nothing is negated. But there is aten.neg.default"):
        pipeline.run(small.graph, small.ctx, (promising,))


@pytest.mark.parametrize(
    ("text", "invariant", "found"),
    [
        ("y = aten.view(x, [1, -1, 8])", one_spelling_of_views, {"aten.view.default"}),
        ("y = aten.type_as(x, x)", one_spelling_of_views, {"aten.type_as.default"}),
        ("y = aten.reshape(x, [1, -1, 8])", one_spelling_of_views, set()),
        ("y = precast.wkv(x, x, w, w, cu)", all_have_caches, {"precast.wkv"}),
        ("y = precast.rms_norm(x, w, eps=1e-6, cast_before_scale=True)", all_have_caches, set()),
    ],
)
def test_what_passes_rely_on(text: str, invariant: Invariant, found: set[str]) -> None:
    inputs = "x: input(float32, 1, T, 8)\nw: param(float32, 8)\ncu: input(int32, B1)"

    assert invariant(read_graph(f"{inputs}\n{text}\nreturn y").graph) == found


# --- the truth ---------------------------------------------------------------------------------------------------


def test_a_pass_that_hides_a_new_op_is_caught(small: SmallGraph) -> None:
    def secret(graph: fx.Graph, ctx: PassContext) -> bool:
        last = calls(graph)[-1]
        with ctx.before(last):
            last.replace_input_with(last.args[0], ctx.call(aten.tanh.default, last.args[0]))
        return False

    with pytest.raises(AssertionError, match=r"secret returned False and changed the graph: return True"):
        pipeline.run(small.graph, small.ctx, (step(secret),))


def test_a_pass_that_hides_another_argument_is_caught(small: SmallGraph) -> None:
    def swapped(graph: fx.Graph, ctx: PassContext) -> bool:
        last = calls(graph)[-1]
        last.args = last.args[::-1]
        return False

    with pytest.raises(AssertionError, match="swapped returned False and changed the graph: return True"):
        pipeline.run(small.graph, small.ctx, (step(swapped),))


def test_a_pass_that_boasts_is_caught(small: SmallGraph) -> None:
    with pytest.raises(AssertionError, match="match_nothing returned True and changed nothing"):
        pipeline.run(small.graph, small.ctx, (Pass("match_nothing", "match", 1, lambda graph, ctx: True),))


def test_a_pass_that_breaks_the_graph_is_caught(small: SmallGraph) -> None:
    def reordered(graph: fx.Graph, ctx: PassContext) -> bool:
        first, *_, last = calls(graph)
        last.append(first)
        return True

    with pytest.raises(RuntimeError, match=r"not been defined|before it has been defined"):
        pipeline.run(small.graph, small.ctx, (step(reordered),))


# --- dead code ---------------------------------------------------------------------------------------------------


def test_dead_code_goes_with_its_params() -> None:
    source = read_graph(
        """
        x: input(float32, 1, T, 8)
        unused: input(float32, 1, T, 8)
        w: param(float32, 8)
        c: constant(float32, [1.0])
        a = aten.mul.Tensor(x, w)
        b = aten.mul.Tensor(a, c)
        check = aten._assert_tensor_metadata(x, None, None, float32)
        y = aten.neg(x)
        return y
        """
    )

    eliminate_dead_code(source.graph, source.ctx)

    assert write_graph(source.graph, source.ctx) == "v0 = aten.neg.default(x)\nreturn v0"
    assert source.ctx.params == {}
    assert source.ctx.constants == {}
    assert [node.name for node in source.graph.nodes if node.op == "placeholder"] == ["x", "unused"]


def test_what_writes_into_an_argument_is_no_dead_code() -> None:
    source = read_graph(
        """
        k: input(float32, 1, T, 2, 4)
        k_cache: input(float32, 4, 16, 2, 4)
        slot_mapping: input(int64, T)
        precast.write_kv(k, k, k_cache, k_cache, slot_mapping)
        return k
        """
    )

    eliminate_dead_code(source.graph, source.ctx)

    assert [str(node.target) for node in calls(source.graph)] == ["precast.write_kv.default"]


def test_dead_code_of_the_tracer_is_no_passs_doing() -> None:
    source = read_graph("x: input(float32, 1, T, 8)\na = aten.neg(x)\ny = aten.tanh(x)\nreturn y")

    (record,) = pipeline.run(source.graph, source.ctx, (match_activations,))

    assert record == PassRecord("match_activations", "match", 1, False, {})


# --- history and dumps -------------------------------------------------------------------------------------------


def test_history_says_what_was_added_and_removed(small: SmallGraph) -> None:
    def double(graph: fx.Graph, ctx: PassContext) -> bool:
        last = calls(graph)[-1]
        with ctx.before(last):
            ctx.replace(last, ctx.call(aten.mul.Tensor, last.args[0], 2.0))
        return True

    records = pipeline.run(small.graph, small.ctx, (merge_duplicates, step(double), match_activations))

    assert records == (
        PassRecord("merge_duplicates", "normalise", 1, True, {"aten.neg.default": -1}),
        PassRecord("double", "match", 1, True, {"aten.add.Tensor": -1, "aten.mul.Tensor": 1}),
        PassRecord("match_activations", "match", 1, False, {}),
    )


def test_results_of_an_op_are_not_counted() -> None:
    source = read_graph(
        """
        positions: input(int64, 1, T)
        inv_freq: constant(float32, [1.0])
        c, s = precast.rotary_tables(positions, inv_freq, scale=1.0, dtype=float32)
        y = aten.add.Tensor(c, s)
        return y
        """
    )

    assert op_counts(source.graph) == {"precast.rotary_tables": 1, "aten.add.Tensor": 1}


def test_a_dump_has_a_file_for_each_pass(small: SmallGraph, tmp_path: Path) -> None:
    earlier = tuple(PassRecord(f"pass{number}", "normalise", 1, False, {}) for number in range(3))

    pipeline.run(small.graph, small.ctx, (merge_duplicates, match_activations), history=earlier, dump=tmp_path)

    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["03_merge_duplicates.txt", "04_match_activations.txt"]
    assert (tmp_path / files[0]).read_text().count("aten.neg.default") == 1


def test_an_observer_sees_the_graph_after_each_pass(small: SmallGraph) -> None:
    seen: list[tuple[str, int]] = []

    pipeline.run(
        small.graph,
        small.ctx,
        (match_activations, merge_duplicates),
        observe=lambda each, graph: seen.append((each.name, len(calls(graph)))),
    )

    assert seen == [("match_activations", 3), ("merge_duplicates", 2)]
