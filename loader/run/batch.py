"""A step's inputs: from the sequences that decode, and chunks of others, to the arrays that the graph takes, by name.

Tokens are packed: `[1, T]`, sequences are told apart by `cu_seqlens`, those that decode come first. Positions and
lengths are absolute; page lists are cut to the window or chunk here, and `page_start` says where they begin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from precast.ir.errors import BundleError
from precast.ir.graph.schema import Dtype, Graph, Group
from precast.ir.memory import caches
from precast.ir.memory.step_inputs import STEP_INPUTS, group_inputs
from precast.loader.schedule.decoding import DecodeBatch
from precast.loader.schedule.requests import Chunk, Sizes

if TYPE_CHECKING:
    import numpy.typing as npt

Array: TypeAlias = "npt.NDArray[Any]"
Arrays = dict[str, Array]


Listed: TypeAlias = "tuple[Array, Array, Array, Array]"
"""What one chunk gives to a group's arrays: indices and counts of pages, the positions at which they start, and the
slots that are written to."""


class Padding(NamedTuple):
    """How an array is made `length` long: with `fill`, or with its own last value where that is None."""

    length: int
    fill: float | None


class BatchInputs:
    """Makes the inputs of one graph: exactly those that it has, as its cache plan names them.

    `dimensions` says how many each has: 1, or 2 for `[1, T]`.
    """

    def __init__(self, graph: Graph) -> None:
        """Raises BundleError for a graph without logits, or with an input that this release can't feed."""
        if graph.outputs and "logits" not in graph.outputs:  # a stage of several before the last one has no outputs
            raise BundleError("graph-invalid", "the graph has no output logits: the engine can't decode")
        known: dict[str, tuple[Dtype, int]] = {
            name: (kind.dtype, len(kind.shape)) for name, kind in STEP_INPUTS.items()
        }
        for group in caches.groups(graph.caches):
            known |= {name: (dtype, 1) for name, (dtype, _) in group_inputs(group).items()}
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
        self._kinds = {name: known[name] for name in found}
        self.dimensions = {name: dimensions for name, (_, dimensions) in self._kinds.items()}
        self._bounds = {"cu_seqlens", *(group.inputs.page_indptr for group in self._groups)}
        self._page_lists = {group.inputs.page_indices for group in self._groups}
        slot_mappings = {group.inputs.slot_mapping for group in self._groups}
        self._of_tokens = {"input_ids", "positions", "rope_lengths", *slot_mappings}
        self._nowhere = slot_mappings | {states.slot_ids for states in self._states}

    def arrays(self, chunks: Sequence[Chunk], rows: DecodeBatch | None = None) -> Arrays:
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
        return {name: made[name] for name in self._kinds}

    def padding(self, num_tokens: int, num_seqs: int) -> dict[str, Padding]:
        """What makes a step's arrays as long as those of `num_tokens` tokens in `num_seqs` slots, page lists left out.

        Slots without a sequence have no tokens and no state. Tokens of no sequence are written nowhere, and whatever is
        computed of them is looked at by nobody.
        """
        made = {}
        for name in self._kinds.keys() - self._page_lists:
            length = num_tokens if name in self._of_tokens else num_seqs + (name in self._bounds)
            made[name] = Padding(length, None if name in self._bounds else -1 if name in self._nowhere else 0)
        return made

    def padded(self, arrays: Arrays, sizes: Sizes) -> Arrays:
        """A step's arrays, made as long as those of a step of these sizes: see `padding`."""
        padding = self.padding(sizes.num_tokens, sizes.num_seqs)
        if "logit_rows" in padding:
            padding["logit_rows"] = Padding(sizes.num_rows, 0)
        return {name: longer(values, padding[name]) if name in padding else values for name, values in arrays.items()}

    def _decode_arrays(self, rows: DecodeBatch) -> Arrays:
        token_ids, positions, bounds, numbers = rows.tokens()
        ends = positions + 1
        made: Arrays = {
            "input_ids": token_ids,
            "positions": positions,
            "rope_lengths": ends,
            "cu_seqlens": bounds,
            "kv_lens": ends.astype(np.int32),
            "logit_rows": numbers,
        }
        for group, lists, slots in zip(self._groups, rows.page_lists(), rows.slots(), strict=True):
            names = group.inputs
            made[names.page_indices], made[names.page_indptr], made[names.page_start] = lists
            made[names.slot_mapping] = slots
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
                [np.maximum(at + 1, chunk.request.prefill_length) for chunk, at in zip(chunks, positions, strict=True)]
            ),
            "cu_seqlens": bounds,
            "kv_lens": np.array([chunk.end for chunk in chunks], np.int32),
            "logit_rows": _flat(logit_rows),
        }
        for group in self._groups:
            each = [_listed(group, chunk, at) for chunk, at in zip(chunks, positions, strict=True)]
            indices, counts, starts, slots = map(_flat, zip(*each, strict=True) if each else [()] * 4)
            made |= _named(group, (indices, counts, starts, slots))
        for states in self._states:
            made[states.slot_ids] = np.array([chunk.request.table.pages[states.name][0] for chunk in chunks], np.int32)
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

    def capacities(
        self, *, num_seqs: int, num_tokens: int, num_pages: Mapping[str, int]
    ) -> dict[str, tuple[Dtype, int]]:
        """The dtype of each array, and how long it can become.

        A step has at most `num_tokens` tokens of `num_seqs` sequences, each with at most `num_pages` pages of a group.
        """
        lists = {group.inputs.page_indices: num_seqs * num_pages[group.name] for group in self._groups}
        lengths = lists | dict.fromkeys({"logit_rows", *self._of_tokens}, num_tokens)
        return {name: (dtype, lengths.get(name, num_seqs + 1)) for name, (dtype, _) in self._kinds.items()}


def longer(values: Array, padding: Padding) -> Array:
    """The array with its padding; the same one if it is long enough."""
    length, fill = padding
    missing = length - len(values)
    if not missing:
        return values
    return np.concatenate((values, np.full(missing, values[-1] if fill is None else fill, values.dtype)))


def _listed(group: Group, chunk: Chunk, positions: Array) -> Listed:
    """The chunk's page list, cut to what its queries can see, and the slots that its tokens are written to."""
    size = group.spec.page_size
    pages, evicted = chunk.request.table.pages[group.name], chunk.request.table.first[group.name]
    first = caches.first_visible(group.spec, chunk.start) // size
    assert first >= evicted, f"group {group.name}: pages from {first} on are seen, {evicted} were evicted"
    # Of a copy: a table can't change while an array shows its memory, and a traceback would keep that alive.
    indices = np.frombuffer(pages[first - evicted : -(-chunk.end // size) - evicted], np.int32)
    slots = indices[positions // size - first].astype(np.int64) * size + positions % size
    return indices, np.array([len(indices)]), np.array([first * size]), slots


def _named(group: Group, listed: Listed) -> Arrays:
    names, (indices, counts, starts, slots) = group.inputs, listed
    return {
        names.page_indices: indices,
        names.page_indptr: _bounds(counts),
        names.page_start: starts.astype(np.int32),
        names.slot_mapping: slots,
    }


def _flat(parts: Sequence[Array]) -> Array:
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _bounds(lengths: Sequence[int] | Array) -> Array:
    """Where each of consecutive rows of items begins, and where the last one ends: `[len + 1]` int32."""
    bounds = np.zeros(len(lengths) + 1, np.int32)
    bounds[1:] = np.add.accumulate(lengths)
    return bounds
