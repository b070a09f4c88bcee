"""A step's inputs: packed tokens, absolute positions, page lists that are cut to the window or chunk."""

from __future__ import annotations

from array import array

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_graph

from precast.ir.errors import BundleError
from precast.ir.graph.schema import Graph, StateGroup, StateSpec, TensorType, Value
from precast.loader.cache.tables import SequenceTable
from precast.loader.run.batch import BatchInputs
from precast.loader.schedule.decoding import DecodeBatch
from precast.loader.schedule.requests import Chunk, Request, Sizes

GRAPH = tiny_graph()


def chunk(
    start: int,
    tokens: list[int],
    *,
    near: list[int],
    far: list[int],
    logits: str = "last",
    prompt: int = 0,
    **states: int,
) -> Chunk:
    """A chunk of a sequence that has these pages and states, and had `prompt` tokens when it started."""
    end = start + len(tokens)
    request = Request(0, array("q", [0] * start + tokens), end + 1)
    request.prefill_length = prompt or end
    request.num_computed = start
    request.table = table_of({"near": near, "far": far, **{name: [slot] for name, slot in states.items()}})
    return Chunk(request, len(tokens), logits)  # type: ignore[arg-type]


def table_of(pages: dict[str, list[int]], **evicted: int) -> SequenceTable:
    table = SequenceTable(pages)
    table.pages.update({name: array("i", some) for name, some in pages.items()})
    table.first.update(evicted)
    return table


def lists(chunks: list[Chunk], graph: Graph = GRAPH) -> dict[str, list[float]]:
    return {name: values.tolist() for name, values in BatchInputs(graph).arrays(chunks).items()}


def test_a_mixed_step() -> None:
    found = lists(
        [
            chunk(9, [40], near=[5, 3, 8], far=[1, 2]),  # decode: position 9 of a sequence
            chunk(0, [11, 12, 13], near=[0], far=[4], logits="none", prompt=7),  # the first chunk of a prompt
            chunk(6, [21, 22], near=[7, 6], far=[9], logits="all"),
        ]
    )
    assert found == {
        "input_ids": [40, 11, 12, 13, 21, 22],
        "positions": [9, 0, 1, 2, 6, 7],
        "cu_seqlens": [0, 1, 4, 6],
        "kv_lens": [10, 3, 8],
        "logit_rows": [0, 4, 5],
        # near: pages of 4. The query at 9 sees 4..9: pages 1 and 2. The one at 6 sees 1..6: from page 0 on.
        "page_indices_near": [3, 8, 0, 7, 6],
        "page_indptr_near": [0, 2, 3, 5],
        "page_start_near": [4, 0, 0],
        "slot_mapping_near": [8 * 4 + 1, 0, 1, 2, 6 * 4 + 2, 6 * 4 + 3],
        # far: pages of 8, all of them
        "page_indices_far": [1, 2, 4, 9],
        "page_indptr_far": [0, 2, 3, 4],
        "page_start_far": [0, 0, 0],
        "slot_mapping_far": [2 * 8 + 1, 4 * 8, 4 * 8 + 1, 4 * 8 + 2, 9 * 8 + 6, 9 * 8 + 7],
    }


def test_reserved_pages_behind_the_context_are_not_listed() -> None:
    found = lists([chunk(3, [1], near=[5, 6, 7], far=[8, 9])])
    assert found["page_indices_near"] == [5]
    assert found["page_indices_far"] == [8]


def decoding(*tables: SequenceTable, lengths: list[int], graph: Graph = GRAPH) -> DecodeBatch:
    """Rows of sequences of so many tokens, the last of which is to be computed: token 70 + its index."""
    rows = DecodeBatch(graph.caches, 8)
    for i, (table, length) in enumerate(zip(tables, lengths, strict=True)):
        request = Request(i, array("q", [*range(length - 1), 70 + i]), length + 9)
        request.table = table
        request.num_computed = length - 1
        rows.add(request)
    return rows


def test_sequences_that_decode_come_before_chunks() -> None:
    rows = decoding(
        table_of({"near": [3, 8], "far": [1, 2]}, near=1), table_of({"near": [6], "far": [5]}), lengths=[10, 3]
    )
    chunks = [chunk(0, [11, 12, 13], near=[0], far=[4], logits="none", prompt=7), chunk(6, [21], near=[7, 9], far=[9])]
    inputs = BatchInputs(GRAPH)

    alone = {name: values.tolist() for name, values in inputs.arrays([], rows).items()}
    mixed = {name: values.tolist() for name, values in inputs.arrays(chunks, rows).items()}

    assert alone == {
        "input_ids": [70, 71], "positions": [9, 2], "cu_seqlens": [0, 1, 2], "kv_lens": [10, 3], "logit_rows": [0, 1],
        "page_indices_near": [3, 8, 6], "page_indptr_near": [0, 2, 3], "page_start_near": [4, 0],
        "slot_mapping_near": [8 * 4 + 1, 6 * 4 + 2],
        "page_indices_far": [1, 2, 5], "page_indptr_far": [0, 2, 3], "page_start_far": [0, 0],
        "slot_mapping_far": [2 * 8 + 1, 5 * 8 + 2],
    }  # fmt: skip
    assert mixed == {
        "input_ids": [70, 71, 11, 12, 13, 21], "positions": [9, 2, 0, 1, 2, 6], "cu_seqlens": [0, 1, 2, 5, 6],
        "kv_lens": [10, 3, 3, 7], "logit_rows": [0, 1, 5],
        "page_indices_near": [3, 8, 6, 0, 7, 9], "page_indptr_near": [0, 2, 3, 4, 6], "page_start_near": [4, 0, 0, 0],
        "slot_mapping_near": [33, 26, 0, 1, 2, 9 * 4 + 2],
        "page_indices_far": [1, 2, 5, 4, 9], "page_indptr_far": [0, 2, 3, 4, 5], "page_start_far": [0, 0, 0, 0],
        "slot_mapping_far": [17, 42, 32, 33, 34, 9 * 8 + 6],
    }  # fmt: skip


@given(st.integers(0, 60), st.integers(1, 30))
def test_the_cut_list_holds_exactly_what_the_window_reaches(start: int, length: int) -> None:
    end, window, size = start + length, 6, 4
    near = list(range(100, 100 + -(-end // size)))
    found = lists([chunk(start, [1] * length, near=near, far=list(range(99)))])
    first_seen = max(0, start - window + 1)
    assert found["page_start_near"] == [first_seen // size * size]
    assert found["page_indices_near"] == near[first_seen // size :]
    assert found["slot_mapping_near"] == [near[at // size] * size + at % size for at in range(start, end)]


@given(st.integers(0, 60), st.integers(1, 30), st.integers(1, 13))
def test_the_cut_list_begins_with_the_page_of_the_chunk(start: int, length: int, chunk_size: int) -> None:
    end, size = start + length, 4
    near = list(range(100, 100 + -(-end // size)))
    found = lists([chunk(start, [1] * length, near=near, far=list(range(99)))], with_chunks(chunk_size))
    first_seen = max(at for at in range(0, start + 1, chunk_size))
    assert found["page_start_near"] == [first_seen // size * size]
    assert found["page_indices_near"] == near[first_seen // size :]
    assert found["page_start_far"] == [0]


def with_chunks(size: int) -> Graph:
    """The graph with chunks in the place of the window."""
    near, far = GRAPH.caches.groups
    spec = msgspec.structs.replace(near.spec, window=None, chunk=size)
    plan = msgspec.structs.replace(GRAPH.caches, groups=(msgspec.structs.replace(near, spec=spec), far))
    return msgspec.structs.replace(GRAPH, caches=plan)


def test_each_sequence_names_its_state() -> None:
    state = StateGroup("state", "states", StateSpec("state", (3,), "float32"), "ids", ())
    conv = StateGroup("conv", "convs", StateSpec("conv", (3,), "float32"), "conv_ids", ())
    slot_ids = (Value("ids", TensorType("int32", ("B",))), Value("conv_ids", TensorType("int32", ("B",))))
    plan = msgspec.structs.replace(GRAPH.caches, states=(state, conv))
    graph = msgspec.structs.replace(GRAPH, inputs=(*GRAPH.inputs, *slot_ids), caches=plan)
    chunks = [
        chunk(9, [40], near=[5, 3, 8], far=[1, 2], state=4, conv=7),
        chunk(0, [11, 12, 13], near=[0], far=[4], state=0, conv=2),
    ]

    found = lists(chunks, graph)

    assert (found["ids"], found["conv_ids"]) == ([4, 0], [7, 2])
    assert BatchInputs(graph).arrays(chunks)["ids"].dtype == np.int32


def test_slot_ids_of_another_type_are_refused() -> None:
    state = StateGroup("state", "states", StateSpec("state", (3,), "float32"), "ids", ())
    plan = msgspec.structs.replace(GRAPH.caches, states=(state,))
    graph = with_input(Value("ids", TensorType("int64", ("B",))))

    with pytest.raises(BundleError, match=r"the graph takes ids \(int64, 1d\)"):
        BatchInputs(msgspec.structs.replace(graph, caches=plan))


def test_a_table_can_change_while_a_traceback_holds_what_was_made_of_it() -> None:
    broken = chunk(0, [1, 2], near=[0], far=[4])
    del broken.request.table.pages["far"]
    with pytest.raises(KeyError, match="far") as error:
        BatchInputs(GRAPH).arrays([broken])
    assert error.value.__traceback__ is not None
    del broken.request.table.pages["near"][:]  # what `release` does


def test_padding_is_empty_slots_and_tokens_of_no_sequence() -> None:
    """Whatever is added has no tokens, no length and no state, and is written nowhere; page lists are left out."""
    inputs = BatchInputs(tiny_graph(state=True))
    arrays = inputs.arrays([chunk(3, [7, 8], near=[4, 5], far=[2], state=6)])
    padded = {
        name: [*arrays[name].tolist(), *[arrays[name][-1] if fill is None else fill] * (length - len(arrays[name]))]
        for name, (length, fill) in inputs.padding(4, 3).items()
    }
    slots = {name: arrays[name].tolist() for name in ("slot_mapping_near", "slot_mapping_far")}
    assert padded == {
        "input_ids": [7, 8, 0, 0], "positions": [3, 4, 0, 0], "cu_seqlens": [0, 2, 2, 2], "kv_lens": [5, 0, 0],
        "logit_rows": [1, 0, 0], "slot_ids": [6, -1, -1],
        "page_indptr_near": [0, 2, 2, 2], "page_start_near": [0, 0, 0],
        "slot_mapping_near": [*slots["slot_mapping_near"], -1, -1],
        "page_indptr_far": [0, 1, 1, 1], "page_start_far": [0, 0, 0],
        "slot_mapping_far": [*slots["slot_mapping_far"], -1, -1],
    }  # fmt: skip


def test_a_step_is_made_as_large_as_those_of_other_ranks() -> None:
    inputs = BatchInputs(GRAPH)
    arrays = inputs.arrays([chunk(3, [7, 8], near=[4, 5], far=[2])])

    padded = inputs.padded(arrays, Sizes(num_tokens=4, num_seqs=3, num_rows=2))

    assert {name: len(padded[name]) for name in ("input_ids", "slot_mapping_far", "cu_seqlens", "logit_rows")} == {
        "input_ids": 4, "slot_mapping_far": 4, "cu_seqlens": 4, "logit_rows": 2,
    }  # fmt: skip
    assert padded["slot_mapping_near"].tolist()[2:] == [-1, -1]
    assert padded["cu_seqlens"].tolist() == [0, 2, 2, 2]
    assert padded["page_indices_near"] is arrays["page_indices_near"]
    assert all(padded[name].dtype == values.dtype for name, values in arrays.items())
    assert inputs.padded(arrays, Sizes(2, 1, 1)) == arrays


def test_without_wanted_logits_there_is_one_row_to_ignore() -> None:
    assert lists([chunk(0, [1, 2], near=[0], far=[0], logits="none")])["logit_rows"] == [0]


def test_rope_lengths_are_those_of_the_whole_sequence() -> None:
    graph = with_input(Value("rope_lengths", TensorType("int64", (1, "T"))))
    prompt = chunk(2, [1, 2], near=[0], far=[0], prompt=9)
    answer = chunk(9, [1, 2], near=[0, 1, 2], far=[0, 1], prompt=9)
    assert lists([prompt, answer], graph)["rope_lengths"] == [9, 9, 10, 11]
    assert "rope_lengths" not in lists([prompt])


def with_input(value: Value) -> Graph:
    fields = {name: getattr(GRAPH, name) for name in GRAPH.__struct_fields__}
    return Graph(**{**fields, "inputs": (*GRAPH.inputs, value)})


@pytest.mark.parametrize(
    "value",
    [
        Value("expert_rows", TensorType("int64", ("T",))),
        Value("rope_lengths", TensorType("int64", ("T",))),
        Value("rope_lengths", TensorType("int32", (1, "T"))),
    ],
)
def test_an_input_that_is_not_fed_is_refused(value: Value) -> None:
    with pytest.raises(BundleError, match=f"the graph takes {value.name} .*, which this release doesn't feed") as error:
        BatchInputs(with_input(value))
    assert error.value.code == "input-mismatch"


@pytest.mark.parametrize(("seqs", "tokens"), [(1, 1), (1, 24), (5, 9), (24, 24)])
def test_no_array_is_longer_than_its_capacity(seqs: int, tokens: int) -> None:
    """As many sequences as may be, each with its share of the tokens, all of them listing the same pages."""
    inputs = BatchInputs(with_input(Value("rope_lengths", TensorType("int64", (1, "T")))))
    share = tokens // seqs
    one = chunk(24 * 8 - share, [1] * share, near=[0] * 48, far=[0] * 24, logits="all")

    arrays = inputs.arrays([one] * seqs)
    capacities = inputs.capacities(num_seqs=seqs, num_tokens=tokens, num_pages={"near": 48, "far": 24})

    assert {name: values.dtype for name, values in arrays.items()} == {
        name: dtype for name, (dtype, _) in capacities.items()
    }
    assert all(len(values) <= capacities[name][1] for name, values in arrays.items())
    assert len(arrays["page_indices_far"]) == capacities["page_indices_far"][1]


def test_inputs_have_the_graphs_dimensions() -> None:
    assert BatchInputs(GRAPH).dimensions == {value.name: len(value.type.shape) for value in GRAPH.inputs}
