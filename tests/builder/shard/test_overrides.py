"""A user's plan file: what it changes, and all the ways in which it can contradict itself or the model."""

from __future__ import annotations

import json
from pathlib import Path

import families
import pytest
from graph_text import parse_graph

import precast
from precast.builder.passes.shard.shard import shard
from precast.builder.shard.overrides import overrides_of, read_overrides
from precast.check.shards import prove
from precast.ir.errors import BuildError
from precast.ir.graph.schema import Call, Graph, ShardOverride
from precast.ir.graph.text import format_graph
from precast.ir.graph.world import unsharded
from precast.ir.verify.verifier import verify

LAYERS = """
symbols { T: 1.. }
inputs { %x: float32[1, T, 16] }
params {
  %layers.0.up.weight: float32[24, 16] = read("layers.0.up.weight", [24, 16], float32)
  %layers.0.down.weight: float32[16, 24] = read("layers.0.down.weight", [16, 24], float32)
  %layers.1.up.weight: float32[24, 16] = read("layers.1.up.weight", [24, 16], float32)
  %layers.1.down.weight: float32[16, 24] = read("layers.1.down.weight", [16, 24], float32)
}
block layer {
  inputs { %x: float32[1, T, 16] }
  params { %up: float32[24, 16] %down: float32[16, 24] }
  %h: float32[1, T, 24] = aten.linear.default(input=%x, weight=%up)
  %g: float32[1, T, 24] = aten.silu.default(self=%h)
  %y: float32[1, T, 16] = aten.linear.default(input=%g, weight=%down)
  return %y
}
main {
  %a: float32[1, T, 16] = call layer(x=%x, up=%layers.0.up.weight, down=%layers.0.down.weight)
  %b: float32[1, T, 16] = call layer(x=%a, up=%layers.1.up.weight, down=%layers.1.down.weight)
  return hidden=%b
}
"""


def split(**entries: str) -> Graph:
    """Two feed-forward layers of one block, with entries whose `_` stands for a dot."""
    return shard(parse_graph(LAYERS), overrides_of({name.replace("_", "."): each for name, each in entries.items()}))


def rows(graph: Graph) -> set[tuple[str, str, tuple[str, ...]]]:
    return {(row.block, row.mode, row.params) for row in graph.shards.rows}


def refusal(**entries: str) -> str:
    with pytest.raises(BuildError) as error:
        split(**entries)
    assert error.value.code == "shard-plan-invalid"
    return error.value.message


# --- what it changes -------------------------------------------------------------------------------------------------


def test_one_layer_of_several_that_are_stored_once_stays_whole() -> None:
    graph = split(layers_1="replicate")

    assert [step.block for step in graph.main if isinstance(step, Call)] == ["layer", "layer_1"]
    assert rows(graph) == {
        ("layer", "column", ("up",)), ("layer", "row", ("down",)), ("layer_1", "replicated", ("up", "down")),
    }  # fmt: skip
    reasons = {row.reason for row in graph.shards.rows if row.block == "layer_1"}
    assert reasons == {'the plan file says replicate: "layers.1"'}
    assert verify(graph) == ()


def test_with_one_param_what_can_not_be_split_without_it_stays_whole() -> None:
    graph = shard(parse_graph(LAYERS), (ShardOverride("layers.*.down", "replicate"),))

    assert {mode for _, mode, _ in rows(graph)} == {"replicated"}
    assert graph.shards.overrides == (ShardOverride("layers.*.down", "replicate"),)
    assert [world.tp for world in graph.shards.worlds] == [1]
    assert verify(graph) == ()


def test_expectations_that_are_met_change_nothing_but_the_plan() -> None:
    graph = split(layers_0_up="column", layers_1_down="row", layers_0="split")

    assert graph.main == split().main
    assert graph.shards.rows == split().shards.rows
    assert len(graph.shards.overrides) == 3


def test_names_of_checkpoint_tensors_stand_for_the_params_that_are_made_of_them() -> None:
    graph = parse_graph(LAYERS.replace('read("layers.0.up.weight"', 'read("stored.up"'))

    made = shard(graph, (ShardOverride("stored.up", "replicate"),))

    assert ("layer", "replicated", ("up",)) in rows(made)


def test_entries_are_in_the_text_of_the_graph() -> None:
    graph = split(layers_1="replicate")

    assert parse_graph(format_graph(graph)) == graph


# --- what is refused -------------------------------------------------------------------------------------------------


def test_names_that_nothing_has_are_told_with_those_that_are_like_them() -> None:
    assert refusal(layer_0_up="replicate") == (
        'the plan file doesn\'t fit the model: "layer.0.up" names nothing (there is layers.0.up or layers.1.up)'
    )
    assert '"layers.0.u" names nothing' in refusal(layers_0_u="replicate")  # not a whole part of a name
    assert "names nothing" in refusal(up="replicate")  # not the begin of a name


@pytest.mark.parametrize(("one", "other"), [("replicate", "split"), ("replicate", "column"), ("row", "column")])
def test_two_entries_that_want_one_param_otherwise(one: str, other: str) -> None:
    message = refusal(layers_0=one, layers_0_up=other)

    assert f'"layers.0" says {one} and "layers.0.up" {other} of layers.0.up.weight' in message


def test_choices_that_the_plan_does_not_come_to_are_told_all_at_once() -> None:
    message = refusal(layers_0_up="row", layers_1_down="vocab")

    assert '"layers.0.up" says row, and layers.0.up.weight is column' in message
    assert '"layers.1.down" says vocab, and layers.1.down.weight is row' in message


def test_attention_that_would_be_whole_with_that_of_other_layers(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"caches are one group .*: attention layers .*model\.layers\.1") as error:
        built("llama", tmp_path, {"model.layers.0.self_attn": "replicate"})

    assert error.value.code == "shard-plan-invalid"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "no JSON object but a list"),
        ("{", "no JSON object"),
        ('{"a": "split", "a": "row"}', "says a twice"),
        ('{"a": "colwise"}', "choices of replicate, split, column, row, vocab, expert; found 'a': 'colwise'"),
        ('{"a": ["row"]}', "found 'a': "),
        ('{"": "row"}', "found '': 'row'"),
        ('{"\\ud800": "row"}', "found "),
        (10_000 * "[", "no JSON object"),
        (json.dumps(dict.fromkeys(map(str, range(1025)), "row")), "1025 entries, expected at most 1024"),
    ],
)
def test_files_that_are_none(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(text)

    with pytest.raises(BuildError) as error:
        read_overrides(file)

    assert error.value.code == "shard-plan-invalid"
    assert message in error.value.message
    assert error.value.where == str(file)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="can't be read: No such file"):
        read_overrides(tmp_path / "plan.json")


def test_a_plan_for_a_pass_that_is_disabled(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="shard is disabled") as error:
        built("llama", tmp_path, {"model.layers.*.mlp": "replicate"}, disabled_passes=("shard",))

    assert error.value.code == "option-invalid"


# --- builds ----------------------------------------------------------------------------------------------------------


def built(variant: str, folder: Path, entries: dict[str, str], **options: object) -> precast.Bundle:
    folder.mkdir(exist_ok=True)
    (folder / "plan.json").write_text(json.dumps(entries))
    config = families.make_config(variant)
    return precast.build(config, folder / "b", dtype="float32", shard_plan=folder / "plan.json", **options)  # type: ignore[arg-type]


def test_the_plan_is_in_the_digest_and_snapshots_do_not_mix_plans_up(tmp_path: Path) -> None:
    entries = {"model.layers.*.mlp": "replicate", "lm_head": "split"}
    turned = dict(reversed(entries.items()))
    kept = tmp_path / "snapshots"

    first = built("llama", tmp_path / "1", entries, snapshots=kept)
    other = built("llama", tmp_path / "2", {"lm_head": "split"}, snapshots=kept)
    again = built("llama", tmp_path / "3", turned, snapshots=kept)

    assert first.digest == again.digest != other.digest
    assert [each.provenance["from_snapshot"] for each in (first, other, again)] == [False, False, True]
    assert unsharded(first.graph) == unsharded(other.graph)


def test_ranks_of_a_plan_give_the_logits_of_one(tmp_path: Path) -> None:
    families.make_model("llama").save_pretrained(tmp_path / "ckpt")

    bundle = built("llama", tmp_path / "b", {"model.layers.1.mlp": "replicate", "model.embed_tokens": "replicate"})

    assert prove(bundle, tmp_path / "ckpt", tp=2).holds
