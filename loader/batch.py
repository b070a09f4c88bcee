"""A step's inputs: from chunks of sequences to the tensors that the graph takes, by name.

Tokens are packed: `[1, T]`, sequences are told apart by `cu_seqlens`. The host makes flat arrays, which go into one
pinned staging buffer and to the device in one copy; the tensors are views of that copy. Positions and lengths are
absolute; page lists are cut to the window or chunk here, and `page_start` says where they begin.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
import torch

from precast.ir import caches
from precast.ir.errors import BundleError
from precast.ir.schema import Graph, Group
from precast.loader.pools import SequencePages

Arrays = dict[str, "array[int] | array[float]"]

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
_TORCH_DTYPES = {"i": torch.int32, "q": torch.int64, "f": torch.float32}


class Chunk(msgspec.Struct, frozen=True):
    """The part of one sequence that a step computes.

    `token_ids` are int64 and stand at the absolute positions `start ..`. `prefill_length` counts the
    tokens that were known when the computation of the sequence began: the prompt, or more if it began anew.
    `logits` says of which tokens the logits are wanted.
    """

    token_ids: array[int]
    start: int
    prefill_length: int
    pages: SequencePages
    logits: Literal["none", "last", "all"]

    @property
    def end(self) -> int:
        """One past the last position."""
        return self.start + len(self.token_ids)


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

    def arrays(self, chunks: Sequence[Chunk]) -> Arrays:
        """The host arrays of a step over `chunks`, flat, by input name.

        `logit_rows` has at least one entry: where no chunk wants logits it is row 0, to be ignored.
        """
        ids, positions, lengths = array("q"), array("q"), array("q")
        bounds, kv_lens, rows = array("i", [0]), array("i"), array("q")
        for chunk in chunks:
            ids.extend(chunk.token_ids)
            positions.extend(range(chunk.start, chunk.end))
            if "rope_lengths" in self._dimensions:
                lengths.extend(max(chunk.prefill_length, at + 1) for at in range(chunk.start, chunk.end))
            bounds.append(len(ids))
            kv_lens.append(chunk.end)
            if chunk.logits != "none":
                rows.extend(range(bounds[-2] if chunk.logits == "all" else len(ids) - 1, len(ids)))
        made: Arrays = {
            "input_ids": ids,
            "positions": positions,
            "rope_lengths": lengths,
            "cu_seqlens": bounds,
            "kv_lens": kv_lens,
            "logit_rows": rows or array("q", [0]),
        }
        for group in self._groups:
            made |= _group_arrays(group, chunks)
        for states in self._states:
            made[states.slot_ids] = array("i", [chunk.pages[states.name][0] for chunk in chunks])
        return {name: values for name, values in made.items() if name in self._dimensions}

    def shaped(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The graph's inputs among the flat `tensors`, with their dimensions."""
        return {
            name: tensors[name].view(1, -1) if dimensions == 2 else tensors[name]
            for name, dimensions in self._dimensions.items()
        }

    def max_bytes(self, *, max_num_seqs: int, max_num_tokens: int, num_pages: Mapping[str, int]) -> int:
        """Bytes that a step's arrays take at most: a page stands in one sequence's list only. `num_pages` by pool."""
        total = 0
        for name in self._dimensions:
            counts_tokens = name in ("input_ids", "positions", "rope_lengths", "logit_rows")
            total += 8 * max_num_tokens if counts_tokens else 4 * (max_num_seqs + 1)
            total += ALIGNMENT
        for group in self._groups:
            total += 8 * max_num_tokens + 4 * num_pages[group.pool]
        return total


def _group_arrays(group: Group, chunks: Sequence[Chunk]) -> Arrays:
    """Page lists, each cut to what the chunk's queries can see, and the slots that its tokens are written to."""
    size, names = group.spec.page_size, group.inputs
    indices, bounds, starts, slots = array("i"), array("i", [0]), array("i"), array("q")
    for chunk in chunks:
        pages = chunk.pages[group.name]
        first = caches.first_visible(group.spec, chunk.start) // size
        indices.extend(pages[first : -(-chunk.end // size)])
        bounds.append(len(indices))
        starts.append(first * size)
        for page in range(chunk.start // size, -(-chunk.end // size)):
            shift = (pages[page] - page) * size
            slots.extend(range(max(chunk.start, page * size) + shift, min(chunk.end, (page + 1) * size) + shift))
    return {names.page_indices: indices, names.page_indptr: bounds, names.page_start: starts, names.slot_mapping: slots}


class Staging:
    """One host buffer, pinned for a GPU, and its copy on the device. Each step overwrites the step before."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._device = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    def to_device(self, arrays: Arrays) -> dict[str, torch.Tensor]:
        """The arrays as tensors `[len]` on the device, by name: int32, int64 or float32, views of one buffer.

        They hold until the next call.
        """
        if self._copied is not None:
            self._copied.synchronize()  # the copy of the step before may still read the host's side
        places, end = {}, 0
        for name, values in arrays.items():
            start = -(-end // ALIGNMENT) * ALIGNMENT
            end = start + len(values) * values.itemsize
            places[name] = (start, end, _TORCH_DTYPES[values.typecode])
        assert end <= len(self._host), f"{end} bytes of inputs, room for {len(self._host)}"
        for name, values in arrays.items():
            start, stop, _ = places[name]
            if values:
                self._host[start:stop].copy_(torch.frombuffer(values, dtype=torch.uint8))
        self._device[:end].copy_(self._host[:end], non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._device.device))
        return {name: self._device[start:stop].view(dtype) for name, (start, stop, dtype) in places.items()}
