"""Attention over entries gets its caches: a group for each kind of entry, and a state for the block in progress."""

from __future__ import annotations

import dataclasses

from fx_text import SmallGraph, read_graph, write_graph

from precast.builder import pipeline
from precast.builder.graph.context import Options
from precast.builder.passes.cache.insert_caches import insert_caches, insert_states
from precast.builder.passes.plan.plan_pages import plan_pages
from precast.ir.graph.schema import EntrySpec, StateSpec

TEXT = """
input_ids: input(int64, 1, T)
cu_seqlens: input(int32, B1)
q: input(bfloat16, 1, T, 4, 12)
own: input(bfloat16, 1, T, 12)
kv: input(bfloat16, 1, T, 24)
gate: input(bfloat16, 1, T, 24)
iq: input(bfloat16, 1, T, 3, 6)
ientries: input(bfloat16, 1, T, 6)
iw: input(float32, 1, T, 3)
bias: param(float32, 8, 12)
y0, lse0 = precast.entry_attention(q, own, None, cu_seqlens, scale=0.5, rate=1, window=9)
entries = precast.compress(kv, gate, bias, cu_seqlens)
selected = precast.select_entries(iq, ientries, iw, cu_seqlens, scale=0.5, rate=4, count=5)
y1, lse1 = precast.entry_attention(q, entries, selected, cu_seqlens, scale=0.5, rate=4)
return y0, y1
"""


def planned(options: Options, *, pages: bool = False) -> SmallGraph:
    source = read_graph(TEXT, options=options)
    steps = (insert_states, insert_caches, *((plan_pages,) if pages else ()))
    pipeline.run(source.graph, source.ctx, tuple(dataclasses.replace(step, requires=()) for step in steps))
    return source


def test_each_kind_of_entry_has_a_cache() -> None:
    source = planned(Options("bfloat16", 64, 6))

    plan = source.ctx.caches
    assert [(group.name, [slot.name for slot in group.slots], group.spec) for group in plan.groups] == [
        ("entries_window9", ["layers.0"], EntrySpec(12, "bfloat16", 6, 1, 9)),
        ("entries4_6", ["indexers.0"], EntrySpec(6, "bfloat16", 8, 4)),
        ("entries4_12", ["layers.1"], EntrySpec(12, "bfloat16", 8, 4)),
    ]
    assert [(group.name, group.spec) for group in plan.states] == [
        ("conv_2x8x24", StateSpec("conv", (2, 8, 24), "bfloat16"))
    ]
    text = write_graph(source.graph, source.ctx)
    assert "precast.write_entries(own, cache_layers_0_entries, slot_mapping_entries_window9, rate=1)" in text
    assert "precast.write_entries(ientries, cache_indexers_0_index, slot_mapping_entries4_6, rate=4)" in text
    assert "precast.stateful_compress(kv, gate, bias, " in text
    assert text.count("precast.paged_entry_attention(q, ") == 2


def test_pages_are_chosen_that_hold_whole_blocks() -> None:
    specs = [group.spec for group in planned(Options("bfloat16", 64), pages=True).ctx.caches.groups]

    assert {spec.page_size % spec.rate for spec in specs if isinstance(spec, EntrySpec)} == {0}
    assert all(spec.page_size in (8, 16, 32, 64) for spec in specs)
