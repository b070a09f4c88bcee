"""Graphs as programs with random weights, and the inputs of a step over given sequences; no checkpoint, no engine."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from precast.ir.graph import symbols
from precast.ir.graph.schema import Graph, Group
from precast.ir.memory import caches
from precast.kernels.dtypes import BY_NAME
from precast.loader.program.restore import Program, restore

Sequences = Sequence[tuple[int, int]]
"""(tokens of this step, context with them) for each."""


def random_program(graph: Graph, device: torch.device, num_pages: int) -> Program:
    """The graph bound to random params, constants and caches of `num_pages` pages a pool."""
    program = restore(graph, device=device)
    sizes = {"tp": 1, "rank": 0} | {pool.pages: num_pages for pool in graph.caches.pools}
    params = [(param.name, param.type) for param in graph.params]
    values = [(value.name, value.type) for value in (*graph.constants, *caches.tensors(graph.caches))]
    tensors = {}
    for name, kind in (*params, *values):
        shape, dtype = [symbols.evaluate(size, sizes) for size in kind.shape], BY_NAME[kind.dtype]
        small = torch.zeros(shape, dtype=dtype, device=device)
        is_drawn = dtype.is_floating_point and dtype.itemsize > 1  # torch draws no 8-bit floats
        tensors[name] = small.normal_(std=0.05) if is_drawn else small
    program.bind(tensors)
    return program


def step_inputs(graph: Graph, sequences: Sequences, device: torch.device) -> dict[str, torch.Tensor]:
    """A step over the sequences, each of which wants the logits of its last token. Caches hold anything."""
    bounds = [0, *itertools.accumulate(tokens for tokens, _ in sequences)]
    positions = [at for tokens, context in sequences for at in range(context - tokens, context)]
    made = {
        "input_ids": torch.zeros(1, bounds[-1], dtype=torch.int64),
        "positions": torch.tensor([positions]),
        "rope_lengths": torch.full((1, bounds[-1]), max(context for _, context in sequences)),
        "cu_seqlens": _int32(bounds),
        "kv_lens": _int32([context for _, context in sequences]),
        "logit_rows": torch.tensor(bounds[1:]) - 1,
    }
    for group in graph.caches.groups:
        made |= _pages(group, sequences)
    for states in graph.caches.states:
        made[states.slot_ids] = _int32(range(len(sequences)))
    return {value.name: made[value.name].to(device) for value in graph.inputs}


def _pages(group: Group, sequences: Sequences) -> dict[str, torch.Tensor]:
    """Page lists cut to the window, on pages in their order."""
    size, names = group.spec.page_size, group.inputs
    bounds, starts, slots = [0], [], []
    for tokens, context in sequences:
        first = caches.first_visible(group.spec, context - tokens) // size
        base = bounds[-1] - first
        bounds.append(base + -(-context // size))
        starts.append(first * size)
        slots += [(base + at // size) * size + at % size for at in range(context - tokens, context)]
    return {
        names.page_indices: _int32(range(bounds[-1])),
        names.page_indptr: _int32(bounds),
        names.page_start: _int32(starts),
        names.slot_mapping: torch.tensor(slots),
    }


def _int32(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int32)
