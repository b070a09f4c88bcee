"""Recipes to reads, as data: which bytes, in which order, and where to. No file is opened."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import FrameType

import msgspec
import pytest
import torch
from hypothesis import given
from recipe_cases import Tensors, evaluate, params_graph, read, recipe_sets
from support import hostile

from precast.ir.errors import BundleError
from precast.ir.graph.schema import Apply, Cast, Concat, Recipe, Reshape, Slice, Stack, Tie, Transpose
from precast.ir.manifest import Checkpoint
from precast.ir.weights.checkpoint import CheckpointFiles, StoredTensor
from precast.ir.weights.fit import require
from precast.kernels import dtypes
from precast.loader.placement import Placement, bind_world
from precast.loader.torch_device import CpuDevice
from precast.loader.weights.parts import param_parts
from precast.loader.weights.read_plan import Granularity, Job, Plan, plan_reads

FIRST, SECOND = "a.safetensors", "b.safetensors"
SMALL = Granularity(job=256, direct=64, gap=0)


def stored(tensors: Tensors, files: Mapping[str, str] | None = None) -> dict[str, StoredTensor]:
    """The tensors one behind the other from byte 100 of their files on; by default there is one file."""
    ends: dict[str, int] = {}
    found = {}
    for name, tensor in tensors.items():
        file = (files or {}).get(name, FIRST)
        start = ends.get(file, 100)
        ends[file] = start + tensor.nbytes
        found[name] = StoredTensor(file, dtypes.NAMES[tensor.dtype], tuple(tensor.shape), start, tensor.nbytes)
    return found


def plan(
    recipes: Mapping[str, Recipe],
    tensors: Tensors,
    sizes: Granularity = SMALL,
    *,
    files: Mapping[str, str] | None = None,
) -> Plan:
    """The plan of params that are made by `recipes`."""
    found = stored(tensors, files)
    assembly = param_parts(params_graph(recipes, tensors).params, lambda name: found[name].dtype)
    return plan_reads(assembly, found.__getitem__, sizes)


def places(jobs: tuple[Job, ...]) -> list[tuple[str, int, int]]:
    """(file, first byte, one past the last) of each range that the jobs read, in their order."""
    return [
        (job.file, start, start + length) for job in jobs for ranges in job.ranges for start, length, _ in ranges.each()
    ]


def bytes_read(made: Plan) -> int:
    return sum(ranges.num_bytes for job in made.jobs for ranges in job.ranges)


# --- into place --------------------------------------------------------------------------------------------------


def test_a_whole_tensor_is_one_read_into_place() -> None:
    made = plan({"p": read("w", {"w": torch.zeros(4, 8)})}, {"w": torch.zeros(4, 8)})

    (job,) = made.jobs
    (ranges,) = job.ranges
    assert (ranges.start, ranges.length, ranges.repeat, ranges.target, ranges.offset) == (100, 128, (), 0, 0)
    assert job.copies == ()
    assert job.buffer_bytes == 0
    assert made.bytes_needed == bytes_read(made) == 128


def test_parts_of_a_fused_param_are_read_to_their_rows() -> None:
    tensors = {name: torch.zeros(rows, 8) for name, rows in (("q", 4), ("k", 2), ("v", 2))}
    fused = Concat(tuple(read(name, tensors) for name in tensors), 0)

    made = plan({"qkv": fused}, tensors)

    (job,) = made.jobs
    assert [(each.start, each.length, each.offset) for each in job.ranges] == [
        (100, 128, 0),
        (228, 64, 128),
        (292, 64, 192),
    ]
    assert job.copies == ()


def test_reads_follow_the_files_whatever_the_order_of_the_params() -> None:
    tensors = {name: torch.zeros(16) for name in "abcd"}
    files = {"a": SECOND, "b": FIRST, "c": SECOND, "d": FIRST}

    made = plan({name: read(name, tensors) for name in "cadb"}, tensors, files=files)

    assert [job.file for job in made.jobs] == [FIRST, SECOND]
    assert places(made.jobs) == [(FIRST, 100, 164), (FIRST, 164, 228), (SECOND, 100, 164), (SECOND, 164, 228)]


def test_no_job_is_larger_than_what_it_is_allowed() -> None:
    tensors = {"large": torch.zeros(1000), "small": torch.zeros(8)}

    made = plan({name: read(name, tensors) for name in tensors}, tensors)

    assert max(job.size for job in made.jobs) == SMALL.job
    assert bytes_read(made) == 4032
    assert len(made.jobs) == 16


def test_a_reshape_changes_nothing_about_the_bytes() -> None:
    tensors = {"w": torch.zeros(6, 8)}

    made = plan({"p": Reshape(read("w", tensors), (2, 3, 4, 2))}, tensors)

    (job,) = made.jobs
    assert len(job.ranges) == 1
    assert job.copies == ()


def test_a_cast_to_the_stored_type_is_no_cast() -> None:
    tensors = {"w": torch.zeros(6, 8, dtype=torch.bfloat16)}

    made = plan({"p": Cast(read("w", tensors, any_float=True), "bfloat16")}, tensors)

    assert made.jobs[0].copies == ()


def test_one_part_of_interleaved_heads_is_read_head_by_head() -> None:
    tensors = {"qkv": torch.zeros(3 * 3 * 4, 8)}
    heads = Reshape(read("qkv", tensors), (3, 3, 4, 8))

    made = plan({"k": Reshape(Slice(heads, 1, 1, 1), (12, 8))}, tensors)

    # 3 heads; of each, q, k and v one behind the other, 128 bytes each
    assert places(made.jobs) == [(FIRST, 228, 356), (FIRST, 612, 740), (FIRST, 996, 1124)]
    assert all(job.copies == () for job in made.jobs)
    assert bytes_read(made) == made.bytes_needed == 384


def test_long_rows_are_read_into_place_and_short_ones_through_a_buffer() -> None:
    tensors = {"a": torch.zeros(3, 16), "b": torch.zeros(3, 15)}

    made = plan({"p": Concat((read("a", tensors), read("b", tensors)), 1)}, tensors, Granularity(512, 64, 0))

    long, short = made.jobs[0].ranges[:-1], made.jobs[0].ranges[-1]
    assert [(each.target, each.length, each.offset) for each in long] == [(0, 64, 0), (0, 64, 124), (0, 64, 248)]
    assert (short.target, short.length) == (None, 180)
    (copy,) = made.jobs[0].copies
    assert (copy.source.shape, copy.destination.offset, copy.destination.strides) == ((3, 15), 16, (31, 1))


# --- through a buffer --------------------------------------------------------------------------------------------


def test_a_transposed_tensor_is_read_in_order_and_copied() -> None:
    tensors = {"w": torch.zeros(5, 7)}

    made = plan({"p": Transpose(read("w", tensors), 0, 1)}, tensors)

    (job,) = made.jobs
    (ranges,), (copy,) = job.ranges, job.copies
    assert (ranges.start, ranges.length, ranges.target) == (100, 140, None)
    assert (copy.source.shape, copy.source.strides, copy.destination.strides) == ((5, 7), (7, 1), (1, 5))
    assert copy.casts == ()


def test_buffers_of_casts_and_transposes_are_bounded_by_the_job() -> None:
    tensors = {"w": torch.zeros(100, 50), "v": torch.zeros(10_000)}

    made = plan({"t": Transpose(read("w", tensors), 0, 1), "c": Cast(read("v", tensors), "bfloat16")}, tensors)

    assert max(job.size for job in made.jobs) <= SMALL.job
    assert all(target.name is not None for target in made.targets)
    assert bytes_read(made) == made.bytes_needed == 60_000


def test_casts_are_made_one_after_the_other() -> None:
    tensors = {"w": torch.zeros(4)}

    made = plan({"p": Cast(Cast(Cast(read("w", tensors), "float16"), "float16"), "float64")}, tensors)

    assert made.jobs[0].copies[0].casts == ("float16", "float64")


def test_of_short_rows_only_what_is_needed_is_read() -> None:
    tensors = {"w": torch.zeros(6, 32)}

    made = plan({"p": Slice(read("w", tensors), 1, 8, 4)}, tensors)

    assert places(made.jobs) == [(FIRST, 132 + 128 * row, 148 + 128 * row) for row in range(6)]
    assert bytes_read(made) == made.bytes_needed == 96


def test_a_gap_too_short_for_a_read_of_its_own_is_read_along() -> None:
    tensors = {"w": torch.zeros(6, 32)}
    recipes = {"p": Slice(read("w", tensors), 1, 8, 4)}

    bridged = plan(recipes, tensors, Granularity(job=1024, direct=64, gap=112))
    skipped = plan(recipes, tensors, Granularity(job=1024, direct=64, gap=111))

    assert places(bridged.jobs) == [(FIRST, 132, 132 + 5 * 128 + 16)]
    assert bridged.bytes_needed == skipped.bytes_needed == bytes_read(skipped) == 96


# --- shared reads ------------------------------------------------------------------------------------------------


def test_a_tensor_that_two_params_need_is_read_once() -> None:
    tensors = {"w": torch.zeros(20, 32)}

    made = plan({"p": read("w", tensors), "t": Cast(read("w", tensors), "float16")}, tensors)

    assert bytes_read(made) == made.bytes_needed == 2560
    assert sorted({copy.target for job in made.jobs for copy in job.copies}) == [0, 1]
    assert max(job.size for job in made.jobs) <= SMALL.job


def test_columns_that_go_to_two_params_are_read_as_rows() -> None:
    tensors = {"w": torch.zeros(8, 6)}
    left, right = (Slice(read("w", tensors), 1, start, 3) for start in (0, 3))

    made = plan({"left": left, "right": right}, tensors, Granularity(job=192, direct=64, gap=0))

    assert places(made.jobs) == [(FIRST, 100, 292)]
    assert made.bytes_needed == 192
    assert len(made.jobs[0].copies) == 2


def test_what_overlaps_is_needed_once() -> None:
    tensors = {"w": torch.zeros(10, 4)}
    rows = {name: Slice(read("w", tensors), 0, start, 5) for name, start in (("a", 0), ("b", 3))}

    made = plan(rows, tensors)

    assert bytes_read(made) == made.bytes_needed == 8 * 16


def test_what_lies_within_a_larger_read_is_read_with_it() -> None:
    tensors = {"w": torch.zeros(10, 4)}
    whole = read("w", tensors)

    made = plan({"w": whole, "b": Slice(whole, 0, 1, 2), "c": Slice(whole, 0, 5, 2)}, tensors)

    assert places(made.jobs) == [(FIRST, 100, 260)]


def test_params_that_begin_at_other_rows_are_cut_at_the_same_ones() -> None:
    tensors = {"w": torch.zeros(100, 8)}
    whole = read("w", tensors)
    recipes = {f"from_{row}": Transpose(Slice(whole, 0, row, 100 - row), 0, 1) for row in (0, 3, 5)}

    made = plan(recipes, tensors)

    assert max(job.size for job in made.jobs) <= SMALL.job
    assert bytes_read(made) == 3200


def test_gaps_between_shared_reads_are_not_needed() -> None:
    tensors = {"w": torch.zeros(6, 8)}
    columns = {f"from_{column}": Slice(read("w", tensors), 1, column, 2) for column in (0, 4)}

    made = plan(columns, tensors, Granularity(job=1024, direct=64, gap=8))

    assert made.bytes_needed == 6 * 16
    assert bytes_read(made) == 6 * 32 - 8


def test_a_tied_param_reads_nothing() -> None:
    tensors = {"w": torch.zeros(4, 4)}

    recipes = {"head": Tie("embed"), "embed": read("w", tensors)}

    made = plan(recipes, tensors)

    assert [target.name for target in made.targets] == ["embed"]
    assert bytes_read(made) == 64


def test_an_empty_param_reads_nothing() -> None:
    tensors = {"w": torch.zeros(0, 4), "v": torch.zeros(2, 4)}

    made = plan({"p": read("w", tensors), "q": Slice(read("v", tensors), 0, 1, 0)}, tensors)

    assert made.jobs == ()
    assert [target.shape for target in made.targets] == [(0, 4), (0, 4)]


# --- temporary tensors -------------------------------------------------------------------------------------------


def test_joins_under_a_reshape_fill_the_param_without_a_temporary_tensor() -> None:
    tensors = {"a": torch.zeros(6, 4), "b": torch.zeros(6, 4)}
    interleaved = Reshape(Stack((read("a", tensors), read("b", tensors)), 1), (12, 4))

    made = plan({"p": interleaved, "t": Transpose(interleaved, 0, 1)}, tensors)

    assert [target.name for target in made.targets] == ["p", "t"]
    assert made.moves == ()


def test_a_join_under_a_reshape_without_strides_is_made_in_a_temporary_tensor() -> None:
    tensors = {"a": torch.zeros(6, 2), "b": torch.zeros(6, 2)}
    joined = Concat((read("a", tensors), read("b", tensors)), 1)

    made = plan({"p": Slice(Reshape(joined, (3, 8)), 1, 3, 2)}, tensors)

    assert [(target.name, target.shape) for target in made.targets] == [("p", (3, 2)), (None, (6, 4))]
    (move,) = made.moves
    assert (move.source, move.target, move.view.offset, move.view.strides) == (1, 0, 3, (8, 1))


# --- symbols -----------------------------------------------------------------------------------------------------

SHARD = Apply("floordiv", (8, "tp"))


def test_a_shard_reads_its_rows_alone() -> None:
    tensors = {"w": torch.zeros(8, 16)}
    shard = Slice(read("w", tensors), 0, Apply("mul", ("rank", SHARD)), SHARD)

    for rank in range(4):
        graph = params_graph({"p": shard}, tensors, {"rank": rank, "tp": 4})
        bound = bind_world(graph, Placement(rank, 4, 1, CpuDevice()))
        assembly = param_parts(bound.params, lambda name: "float32")
        made = plan_reads(assembly, stored(tensors).__getitem__, SMALL)
        assert places(made.jobs) == [(FIRST, 100 + 128 * rank, 228 + 128 * rank)]


def test_a_symbol_without_a_value_is_refused() -> None:
    tensors = {"w": torch.zeros(8, 16)}
    params = params_graph({"p": Slice(read("w", tensors), 0, 0, SHARD)}, tensors, {"tp": 2}).params

    with pytest.raises(BundleError, match=r"param p: floordiv\(8, tp\) has no value") as caught:
        param_parts(params, lambda name: "float32")
    assert caught.value.code == "symbol-unbound"


def test_a_shard_outside_of_its_tensor_is_refused() -> None:
    tensors = {"w": torch.zeros(8, 16)}
    param = params_graph({"p": Slice(read("w", tensors), 0, 0, 2)}, tensors).params[0]
    outside = msgspec.structs.replace(param, recipe=Slice(read("w", tensors), 0, 8, 2))

    with pytest.raises(BundleError, match="param p: slice: 8 and 2 more are past the 8 of dimension 0") as caught:
        param_parts([outside], lambda name: "float32")
    assert caught.value.code == "graph-invalid"


def test_a_recipe_that_makes_another_shape_than_its_param_is_refused() -> None:
    tensors = {"w": torch.zeros(8, 16)}
    param = params_graph({"p": Slice(read("w", tensors), 0, 0, 2)}, tensors).params[0]
    other = msgspec.structs.replace(param, recipe=read("w", tensors))

    with pytest.raises(BundleError, match=r"param p: its recipe makes \[8, 16\], expected \[2, 16\]") as caught:
        param_parts([other], lambda name: "float32")
    assert caught.value.code == "graph-invalid"


# --- any recipes -------------------------------------------------------------------------------------------------


def needed_bytes(recipes: Mapping[str, Recipe], tensors: Tensors) -> set[int]:
    """The bytes of the file that the recipes use, found by sending each element's place through the recipes."""
    places = {}
    for name, entry in stored(tensors).items():
        itemsize = tensors[name].element_size()
        first = torch.arange(entry.offset, entry.offset + entry.nbytes, itemsize, dtype=torch.float64)
        places[name] = first.reshape(entry.shape)
    needed: set[int] = set()
    for recipe in recipes.values():
        for first_byte in evaluate(without_casts(recipe), places).flatten().long().tolist():
            needed.update(range(first_byte, first_byte + element_bytes(first_byte, tensors)))
    return needed


def element_bytes(place: int, tensors: Tensors) -> int:
    """The size of the element that is stored at this byte."""
    return next(
        tensors[name].element_size()
        for name, entry in stored(tensors).items()
        if entry.offset <= place < entry.offset + entry.nbytes
    )


def without_casts(recipe: Recipe) -> Recipe:
    """The recipe with its casts taken out."""
    match recipe:
        case Cast():
            return without_casts(recipe.of)
        case Slice():
            return Slice(without_casts(recipe.of), recipe.dim, recipe.start, recipe.length)
        case Transpose():
            return Transpose(without_casts(recipe.of), recipe.dim0, recipe.dim1)
        case Reshape():
            return Reshape(without_casts(recipe.of), recipe.shape)
        case Concat():
            return Concat(tuple(map(without_casts, recipe.parts)), recipe.dim)
        case Stack():
            return Stack(tuple(map(without_casts, recipe.parts)), recipe.dim)
        case _:
            return recipe


@given(recipe_sets(repacked=False))  # of which words no longer tell where they lay
def test_exactly_the_needed_bytes_are_read_once_and_in_order(case: tuple[dict[str, Recipe], Tensors]) -> None:
    recipes, tensors = case
    made = plan(recipes, tensors, Granularity(job=64, direct=16, gap=0))

    covered = [place for _, start, end in places(made.jobs) for place in range(start, end)]

    assert covered == sorted(set(covered))
    assert bytes_read(made) == len(covered)
    if not made.moves:
        assert set(covered) == needed_bytes(recipes, tensors)
        assert made.bytes_needed == len(covered)


def plan_calls(count: int) -> int:
    """The calls of Python functions in which a param of so many reads of one tensor is planned."""
    stored = StoredTensor(FIRST, "float32", (1,), 8, 4)
    graph = hostile.one_read(1, count)
    files = CheckpointFiles(FIRST, {"w": stored})
    calls = 0

    def counted(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(counted)
    try:
        found = require(graph, Checkpoint(), files)
        plan_reads(param_parts(graph.params, lambda name: found[name].dtype), found.__getitem__)
    finally:
        sys.setprofile(None)
    return calls


def test_planning_takes_work_in_proportion_to_the_reads() -> None:
    """A bundle may read one tensor `MAX_REPEATED_READS` times; whatever else it reads is in the checkpoint."""
    few, many = plan_calls(200), plan_calls(2000)

    assert many <= 10 * few
    assert many <= 150 * 2000
