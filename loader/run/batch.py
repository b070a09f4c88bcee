"""A step's inputs: from the sequences that decode, and chunks of others, to the tensors that the graph takes, by name.

Tokens are packed: `[1, T]`, sequences are told apart by `cu_seqlens`, those that decode come first. The host makes flat
arrays, which go into one pinned staging buffer and to the device in one copy; the tensors are views of that copy.
Positions and lengths are absolute; page lists are cut to the window or chunk here, and `page_start` says where they
begin.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec
import numpy as np
import torch

from precast.ir.errors import BundleError
from precast.ir.graph.schema import Graph, Group
from precast.ir.memory import caches
from precast.loader.cache.tables import SequenceTable

if TYPE_CHECKING:
    import numpy.typing as npt

    from precast.loader.schedule.rows import DecodeRows

Array: TypeAlias = "npt.NDArray[Any]"
Arrays = dict[str, Array]

ALIGNMENT = 16
"""Bytes to which each array in the staging buffer is aligned: the widest load that a kernel issues."""

_INPUTS: dict[str, tuple[str, int]] = {
    # name: (dtype, dimensions)
    "input_ids": ("int64", 2),
    "positions": ("int64", 2),
    "rope_lengths": ("int64", 2),
    "cu_seqlens": ("int32", 1),
    "kv_lens": ("int32", 1),
    "logit_rows": ("int64", 1),
}
_GROUP_INPUTS = {"page_indices": "int32", "page_indptr": "int32", "page_start": "int32", "slot_mapping": "int64"}
_TORCH_DTYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
}


class Chunk(msgspec.Struct, frozen=True):
    """The part of one sequence that a step computes.

    `token_ids` are int64 and stand at the absolute positions `start ..`. `prefill_length` counts the
    tokens that were known when the computation of the sequence began: the prompt, or more if it began anew.
    `logits` says of which tokens the logits are wanted.
    """

    token_ids: array[int]
    start: int
    prefill_length: int
    pages: SequenceTable
    logits: Literal["none", "last", "all"]

    @property
    def end(self) -> int:
        """One past the last position."""
        return self.start + len(self.token_ids)


class _Part(msgspec.Struct):
    """What one chunk, or all sequences that decode, give to a group's arrays."""

    indices: Array
    counts: Array
    starts: Array
    slots: Array


class BatchInputs:
    """Makes the inputs of one graph: exactly those that it has, as its cache plan names them."""

    def __init__(self, graph: Graph) -> None:
        """Raises BundleError for an input that this release can't feed."""
        known = dict(_INPUTS)
        for group in graph.caches.groups:
            known |= {getattr(group.inputs, role): (dtype, 1) for role, dtype in _GROUP_INPUTS.items()}
        known |= {states.slot_ids: ("int32", 1) for states in graph.caches.states}
        found = {value.name: (value.type.dtype, len(value.type.shape)) for value in graph.inputs}
        unknown = [name for name, kind in found.items() if known.get(name) != kind]
        if unknown:
            raise BundleError(
                "input-mismatch",
                f"the graph takes {', '.join(f'{name} ({found[name][0]}, {found[name][1]}d)' for name in unknown)}, "
                f"which this release doesn't feed; it feeds {', '.join(sorted(known))}",
                where="graph inputs",
                fix="load the bundle with the release of precast that built it, or build it again",
            )
        self._groups = graph.caches.groups
        self._states = graph.caches.states
        self._dimensions = {name: kind[1] for name, kind in found.items()}
        self._bounds = {"cu_seqlens", *(group.inputs.page_indptr for group in self._groups)}

    def arrays(self, chunks: Sequence[Chunk], rows: DecodeRows | None = None) -> Arrays:
        """The host arrays of a step over the `rows` that decode and `chunks`, flat, by input name.

        `logit_rows` has at least one entry: where nothing wants logits it is row 0, to be ignored. The arrays hold
        until the rows advance.
        """
        if rows is None or not len(rows):
            made = self._chunk_arrays(chunks)
        elif not chunks:
            made = self._decode_arrays(rows)
        else:
            made = self._joined(self._decode_arrays(rows), self._chunk_arrays(chunks))
        if not len(made["logit_rows"]):
            made["logit_rows"] = np.zeros(1, np.int64)
        return {name: made[name] for name in self._dimensions}

    def _decode_arrays(self, rows: DecodeRows) -> Arrays:
        positions, bounds = rows.positions(), rows.bounds()
        ends = positions + 1
        made: Arrays = {
            "input_ids": rows.token_ids(),
            "positions": positions,
            "rope_lengths": ends,
            "cu_seqlens": bounds,
            "kv_lens": ends.astype(np.int32),
            "logit_rows": bounds[:-1].astype(np.int64),
        }
        for group, (indices, counts, starts, slots) in zip(self._groups, rows.group_arrays(), strict=True):
            made |= _named(group, _Part(indices, counts, starts, slots))
        for states, slot_ids in zip(self._states, rows.slot_ids(), strict=True):
            made[states.slot_ids] = slot_ids
        return made

    def _chunk_arrays(self, chunks: Sequence[Chunk]) -> Arrays:
        ids = [np.frombuffer(chunk.token_ids, np.int64) for chunk in chunks]
        positions = [np.arange(chunk.start, chunk.end) for chunk in chunks]
        bounds = _bounds([len(values) for values in ids])
        logit_rows = [
            np.arange(first if chunk.logits == "all" else end - (chunk.logits == "last"), end)
            for chunk, first, end in zip(chunks, bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
        ]
        made: Arrays = {
            "input_ids": _flat(ids),
            "positions": _flat(positions),
            "rope_lengths": _flat(
                [np.maximum(at + 1, chunk.prefill_length) for chunk, at in zip(chunks, positions, strict=True)]
            ),
            "cu_seqlens": bounds,
            "kv_lens": np.array([chunk.end for chunk in chunks], np.int32),
            "logit_rows": _flat(logit_rows),
        }
        for group in self._groups:
            parts = [_group_part(group, chunk, at) for chunk, at in zip(chunks, positions, strict=True)]
            whole = _Part(*(_flat([getattr(part, name) for part in parts]) for name in _Part.__struct_fields__))
            made |= _named(group, whole)
        for states in self._states:
            made[states.slot_ids] = np.array([chunk.pages.pages[states.name][0] for chunk in chunks], np.int32)
        return made

    def _joined(self, first: Arrays, second: Arrays) -> Arrays:
        """The arrays of a step from those of its sequences that decode and of its chunks."""
        made = {}
        for name, left in first.items():
            right = second[name]
            if name == "logit_rows":
                right = right + len(first["input_ids"])
            elif name in self._bounds:
                left, right = left[:-1], right + left[-1]
            made[name] = np.concatenate((left, right))
        return made

    def shaped(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The graph's inputs among the flat `tensors`, with their dimensions."""
        return {
            name: tensors[name].view(1, -1) if dimensions == 2 else tensors[name]
            for name, dimensions in self._dimensions.items()
        }

    def max_bytes(self, *, max_num_seqs: int, max_num_tokens: int, num_pages: Mapping[str, int]) -> int:
        """Bytes that a step's arrays take as long as no two sequences share pages. `num_pages` by pool."""
        total = 0
        for name in self._dimensions:
            counts_tokens = name in ("input_ids", "positions", "rope_lengths", "logit_rows")
            total += 8 * max_num_tokens if counts_tokens else 4 * (max_num_seqs + 1)
            total += ALIGNMENT
        for group in self._groups:
            total += 8 * max_num_tokens + 4 * num_pages[group.pool]
        return total


def _group_part(group: Group, chunk: Chunk, positions: Array) -> _Part:
    """The chunk's page list, cut to what its queries can see, and the slots that its tokens are written to."""
    size = group.spec.page_size
    pages, evicted = chunk.pages.pages[group.name], chunk.pages.first[group.name]
    first = caches.first_visible(group.spec, chunk.start) // size
    assert first >= evicted, f"group {group.name}: pages from {first} on are seen, {evicted} were evicted"
    # Of a copy: a table can't change while an array shows its memory, and a traceback would keep that alive.
    indices = np.frombuffer(pages[first - evicted : -(-chunk.end // size) - evicted], np.int32)
    slots = indices[positions // size - first].astype(np.int64) * size + positions % size
    return _Part(indices, np.array([len(indices)]), np.array([first * size]), slots)


def _named(group: Group, part: _Part) -> Arrays:
    names = group.inputs
    return {
        names.page_indices: part.indices,
        names.page_indptr: _bounds(part.counts),
        names.page_start: part.starts.astype(np.int32),
        names.slot_mapping: part.slots,
    }


def _flat(parts: Sequence[Array]) -> Array:
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _bounds(lengths: Sequence[int] | Array) -> Array:
    """Where each of consecutive spans begins, and where the last one ends: `[len + 1]` int32."""
    bounds = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=bounds[1:])
    return bounds


class Staging:
    """One host buffer, pinned for a GPU, and its copy on the device. Each step overwrites the step before.

    Both grow when a step needs more than any before: pages that sequences share stand in the lists of all of them.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._place = device
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        self._reserve(num_bytes)

    def to_device(self, arrays: Arrays) -> dict[str, torch.Tensor]:
        """The arrays as tensors `[len]` on the device, by name: int32, int64 or float32, views of one buffer.

        They hold until the next call.
        """
        if self._copied is not None:
            self._copied.synchronize()  # the copy of the step before may still read the host's side
        places, end = {}, 0
        for name, values in arrays.items():
            start = -(-end // ALIGNMENT) * ALIGNMENT
            end = start + values.nbytes
            places[name] = (start, end, _TORCH_DTYPES[values.dtype])
        if end > len(self._bytes):
            self._reserve(2 * end)
        for name, values in arrays.items():
            start, stop, _ = places[name]
            self._bytes[start:stop].view(values.dtype)[:] = values
        self._device[:end].copy_(self._host[:end], non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._place))
        return {name: self._device[start:stop].view(dtype) for name, (start, stop, dtype) in places.items()}

    def _reserve(self, num_bytes: int) -> None:
        self._host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._place.type == "cuda")
        self._device = torch.empty(num_bytes, dtype=torch.uint8, device=self._place)
        self._bytes: npt.NDArray[np.uint8] = self._host.numpy()
