"""A model that hashes: the tiny model's graph computed in integers, where any key read wrongly changes what follows.

A token's hash goes through the layers. Each layer keeps it in its cache, as the tiny model keeps keys and values, and
adds the hashes of all tokens that it sees, with their positions. What a layer keeps so depends on the whole context
below it. The likeliest token is the last hash modulo the size of the vocabulary. `reference_tokens` is the same without
a cache. It is fast, and it is exact: no tolerance lets a wrong page pass.

With a rope a token's hash depends on the length by which its key would be rotated, as in
`precast.loader.cache.rotation`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from tiny import VOCAB, Groups, rule_of

from precast.ir.graph.schema import Arg, Const, Graph, Node, TensorType, Value
from precast.loader.program.instructions import HostCall

Hashes = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]

_MASK = (1 << 64) - 1
_FACTOR, _PLACE = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F


class Rope(NamedTuple):
    """What rotates tokens: "longrope" or "dynamic", and the length up to which they don't differ from others."""

    kind: str
    limit: int


def with_rope(graph: Graph, rope: Rope) -> Graph:
    """The graph with the op that the loader looks for, and the input that it then feeds."""
    args: dict[str, Arg] = {"kind": Const(rope.kind), "original_length": Const(rope.limit)}
    lengths = Value("rope_lengths", TensorType("int64", (1, "T")))
    main = (Node("precast.rope_frequencies", args, ()), *graph.main)
    return msgspec.structs.replace(graph, inputs=(*graph.inputs, lengths), main=main)


class HashingProgram:
    """A stand-in for the restored graph: it takes the graph's inputs and reads and writes the cache tensors."""

    num_binds = 1

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        groups: Groups,
        layers: Sequence[str],
        *,
        state: bool,
        rope: Rope | None = None,
    ) -> None:
        self._groups, self._layers, self._rope = groups, layers, rope
        self._keys = [_words(tensors[f"layers.{i}.cache.k"])[:, :, 0, 0] for i in range(len(layers))]
        self._values = [_words(tensors[f"layers.{i}.cache.v"])[:, :, -1, -1] for i in range(len(layers))]
        self._state = _words(tensors["mix.state"])[:, 0] if state else None

    def __call__(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        given = {name: tensor.numpy() for name, tensor in inputs.items()}
        bounds, ends = given["cu_seqlens"].tolist(), given["kv_lens"].tolist()
        positions = given["positions"][0]
        lengths = positions if self._rope is None else given["rope_lengths"][0]
        x = _embedded(given["input_ids"][0], positions, lengths, self._rope)
        spans = [slice(first, end) for first, end in pairwise(bounds)]
        if self._state is not None:
            for rows, slot, end in zip(spans, given["slot_ids"].tolist(), ends, strict=True):
                if slot < 0:  # empty: it has no state
                    assert rows.start == rows.stop
                    continue
                begins = end == rows.stop - rows.start
                x[rows], after = _mixed(x[rows], 0 if begins else int(self._state[slot]))
                self._state[slot] = after
        for i, name in enumerate(self._layers):
            self._write(i, given[f"slot_mapping_{name}"], x)
            seen = np.empty_like(x)
            for b, rows in enumerate(spans):
                pages, start = _listed(given, name, b)
                keys = self._keys[i][pages].reshape(-1)[: ends[b] - start]
                values = self._values[i][pages].reshape(-1)[: ends[b] - start]
                seen[rows] = _seen(keys ^ values, positions[rows], start, name, self._groups)
            x = _hashed(x + seen + np.uint64(i))
        chosen = x[given["logit_rows"]] % np.uint64(VOCAB)
        logits = torch.zeros(1, len(chosen), VOCAB)
        logits[0, torch.arange(len(chosen)), torch.from_numpy(chosen.astype(np.int64))] = 1
        return {"logits": logits}

    def cut(self, outputs: dict[str, torch.Tensor], **inputs: torch.Tensor) -> Iterator[HostCall]:
        """The whole step as one call that reads the host, as a restored program is cut."""
        outputs["logits"] = logits = torch.empty(1, len(inputs["logit_rows"]), VOCAB)
        yield HostCall(lambda **given: self(**given)["logits"], inputs, (logits,), allocates=True)

    warm_up = cut

    def _write(self, layer: int, slots: Ints, x: Hashes) -> None:
        kept = slots >= 0
        slots, x = slots[kept], x[kept]
        assert len(set(slots.tolist())) == len(slots), "two tokens have one place"
        page, offset = np.divmod(slots, self._keys[layer].shape[1])
        self._keys[layer][page, offset] = x + np.uint64(1)
        self._values[layer][page, offset] = np.uint64(1)


def reference_tokens(
    token_ids: Sequence[int],
    groups: Groups,
    layers: Sequence[str],
    *,
    state: bool,
    rope: Rope | None = None,
    prompt_length: int = 0,
) -> list[int]:
    """The token that follows each one of a whole sequence, of which `prompt_length` tokens were known at first."""
    if rope is not None and rope.kind == "longrope" and prompt_length <= rope.limit < len(token_ids):
        # Behind the limit all that came before is rotated anew.
        rest: dict[str, Any] = {"state": state, "rope": rope}
        begun = reference_tokens(token_ids[: rope.limit], groups, layers, **rest, prompt_length=prompt_length)
        whole = reference_tokens(token_ids, groups, layers, **rest, prompt_length=len(token_ids))
        return [*begun, *whole[rope.limit :]]
    positions = np.arange(len(token_ids))
    x = _embedded(np.array(token_ids), positions, np.maximum(positions + 1, prompt_length), rope)
    if state:
        x, _ = _mixed(x, 0)
    for i, name in enumerate(layers):
        x = _hashed(x + _seen((x + np.uint64(1)) ^ np.uint64(1), positions, 0, name, groups) + np.uint64(i))
    found: list[int] = (x % np.uint64(VOCAB)).tolist()
    return found


def _words(tensor: torch.Tensor) -> Hashes:
    words: Hashes = tensor.view(torch.int64).numpy().view(np.uint64)
    return words


def _hashed(x: Hashes) -> Hashes:
    x = (x ^ (x >> np.uint64(31))) * np.uint64(_FACTOR)
    return x ^ (x >> np.uint64(29))


def _embedded(ids: Ints, positions: Ints, lengths: Ints, rope: Rope | None) -> Hashes:
    x = _hashed(ids.astype(np.uint64) + np.uint64(_PLACE) * (positions.astype(np.uint64) + np.uint64(1)))
    if rope is None:
        return x
    turned = lengths > rope.limit
    return _hashed(x + (turned if rope.kind == "longrope" else turned * lengths).astype(np.uint64))


def _mixed(x: Hashes, held: int) -> tuple[Hashes, int]:
    """What a state adds to each token, and the state after the last."""
    found = []
    for one in x.tolist():
        held = (held * _FACTOR + one) & _MASK
        held ^= held >> 32
        found.append(held)
    return x + np.array(found, np.uint64), held


def _seen(keys: Hashes, positions: Ints, start: int, name: str, groups: Groups) -> Hashes:
    """What the queries at `positions` see of the keys from position `start` on."""
    places = np.arange(start, start + len(keys)).astype(np.uint64)
    sums = np.zeros(len(keys) + 1, np.uint64)
    np.cumsum(_hashed(keys + np.uint64(_PLACE) * places), out=sums[1:])
    window, chunk = rule_of(name, groups)
    first = np.zeros_like(positions)
    if window is not None:
        first = np.maximum(positions - window + 1, 0)
    elif chunk is not None:
        first = positions // chunk * chunk
    assert len(positions) == 0 or first[0] >= start, "keys that are seen are not listed"
    return sums[positions + 1 - start] - sums[first - start]


def _listed(given: Mapping[str, Ints], name: str, b: int) -> tuple[Ints, int]:
    """The pages of a sequence, and the position of their first place."""
    indptr = given[f"page_indptr_{name}"]
    return given[f"page_indices_{name}"][indptr[b] : indptr[b + 1]], int(given[f"page_start_{name}"][b])
