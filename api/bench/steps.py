"""Steps of a graph over random params and caches, without a checkpoint and an engine."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from precast.ir.graph import symbols
from precast.ir.graph.schema import Dtype, Graph, Group, TensorType, Value
from precast.ir.memory import caches
from precast.kernels.dtypes import BY_NAME
from precast.kernels.records import Ranges


class Step(NamedTuple):
    """So many sequences that compute so many tokens each, at the end of a context; and the steps that it stands for.

    A symbol of a step that `sizes` doesn't name is another one in these.
    """

    num_seqs: int
    num_tokens: int
    context: int
    sizes: Ranges


CONTEXT = 1024
"""Tokens of a sequence that decodes."""
_MOST_SEQS = (1, 8, 16, 32, 64, 128, 256)
_MOST_TOKENS = (1024, 4096, 8192)


def steps_of(max_seq_len: int) -> list[Step]:
    """Steps that decode, of up to 256 sequences, and of a prompt, of up to 8,192 tokens; none longer than the limit."""
    decode = [
        Step(most, 1, min(CONTEXT, max_seq_len), dict.fromkeys(("T", "B", "R"), (less + 1, most)))
        for less, most in itertools.pairwise((0, *_MOST_SEQS))
    ]
    prefill = [
        Step(1, most, most, {"T": (less + 1, most)})
        for less, most in itertools.pairwise((_MOST_SEQS[-1], *_MOST_TOKENS))
        if most <= max_seq_len
    ]
    return decode + prefill


def random_tensors(graph: Graph, steps: Sequence[Step], device: torch.device) -> dict[str, torch.Tensor]:
    """Params, constants and caches for these steps by name. Those of one type are one tensor: layers share it."""
    sizes = {pool.pages: _num_pages(graph, pool.name, steps) for pool in graph.caches.pools}
    params = [Value(param.name, param.type) for param in graph.params]
    made: dict[tuple[Dtype, tuple[int, ...]], torch.Tensor] = {}
    found = {}
    for value in (*params, *graph.constants, *caches.tensors(graph.caches)):
        shape = tuple(symbols.evaluate(size, sizes) for size in value.type.shape)
        key = value.type.dtype, shape
        if key not in made:
            made[key] = _random(value.type, shape, device)
        found[value.name] = made[key]
    return found


def step_inputs(graph: Graph, step: Step, device: torch.device) -> dict[str, torch.Tensor]:
    """The inputs of a step that wants the logits of each sequence's last token."""
    bounds = range(0, step.num_seqs * step.num_tokens + 1, step.num_tokens)
    first = step.context - step.num_tokens
    positions = torch.arange(first, step.context).repeat(step.num_seqs)[None]
    made = {
        "input_ids": torch.zeros_like(positions),
        "positions": positions,
        "rope_lengths": torch.full_like(positions, step.context),
        "cu_seqlens": _int32(bounds),
        "kv_lens": _int32([step.context] * step.num_seqs),
        "logit_rows": torch.tensor(bounds[1:]) - 1,
    }
    for group in graph.caches.groups:
        made |= _pages(group, step)
    for states in graph.caches.states:
        made[states.slot_ids] = _int32(range(step.num_seqs))
    return {value.name: made[value.name].to(device) for value in graph.inputs}


def sizes_of(values: Sequence[Value], tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The values of the symbols that stand alone in the shapes of tensors."""
    return {
        size: tensors[value.name].shape[axis]
        for value in values
        for axis, size in enumerate(value.type.shape)
        if isinstance(size, str)
    }


def _num_pages(graph: Graph, pool: str, steps: Sequence[Step]) -> int:
    """What the largest step has of a pool: pages of all its groups, and states of its sequences."""
    groups = [group.spec.page_size for group in graph.caches.groups if group.pool == pool]
    num_states = sum(group.pool == pool for group in graph.caches.states)
    return max(
        step.num_seqs * (num_states + sum(-(-step.context // page_size) for page_size in groups)) for step in steps
    )


def _random(kind: TensorType, shape: Sequence[int], device: torch.device) -> torch.Tensor:
    dtype = BY_NAME[kind.dtype]
    zeros = torch.zeros(shape, dtype=dtype, device=device)
    is_drawn = dtype.is_floating_point and dtype.itemsize > 1  # torch draws no floats of 8 bits
    return zeros.normal_(std=0.02) if is_drawn else zeros


def _pages(group: Group, step: Step) -> dict[str, torch.Tensor]:
    """Page lists cut to the window, each sequence on pages of its own, in their order."""
    size, names = group.spec.page_size, group.inputs
    begin = caches.first_visible(group.spec, step.context - step.num_tokens) // size
    num_pages = -(-step.context // size) - begin
    slots = torch.arange(step.context - step.num_tokens, step.context) - begin * size
    of_sequences = torch.arange(step.num_seqs)[:, None] * num_pages * size
    return {
        names.page_indices: _int32(range(step.num_seqs * num_pages)),
        names.page_indptr: _int32(range(0, step.num_seqs * num_pages + 1, num_pages)),
        names.page_start: _int32([begin * size] * step.num_seqs),
        names.slot_mapping: (of_sequences + slots).reshape(-1),
    }


def _int32(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int32)
