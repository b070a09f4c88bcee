"""precast.sample@2 on GPUs that write each other's memory, each of which has the logits of a part of the vocabulary.

The launches of `launches.sample_part`, and between them those of `parts.cu`: what the definition gives for all logits.
Nothing is read back, and the same is launched whatever rows ask for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from precast.kernels.collectives.peers import Peers
from precast.kernels.collectives.ways import MAX_PEERS
from precast.kernels.cuda_launch import At, Kernel, function_of
from precast.kernels.dtypes import NAMES
from precast.kernels.launch import Launched
from precast.kernels.sampling import launches, limits
from precast.kernels.sampling.parts import VocabularyPart

_FILE = "precast.kernels.sampling/parts.cu"
_THREADS, _BLOCKS = 256, 32
_ASKED = ("temperature", "top_k", "top_p", "min_p", "seeds", "steps")


class _Rows(NamedTuple):
    """What is launched for so many rows."""

    scan: Launched
    list: Launched
    finish: Launched
    splits: int
    offsets: dict[str, int]


class PartSampler:
    """Draws tokens for up to `most_rows` rows at a time. All ranks make it, and call it alike."""

    def __init__(self, group: Peers, part: VocabularyPart, dtype: torch.dtype, most_rows: int) -> None:
        """Of logits of this dtype: of 16 bits, or float32."""
        self._part, self._dtype, self._most_rows, self._device = part, dtype, most_rows, group.device
        self._calls = group.counter()
        self._memory = group.memory(memory_bytes(part, dtype, most_rows))
        self._peers = [*self._memory.addresses, *[None] * (MAX_PEERS - group.size)]
        self._limit = group.limit
        self._pdl = group.has_pdl
        self._rows: dict[int, _Rows] = {}
        self._scanned = self._kernel("scanned", 5)
        self._drawn = self._kernel("drawn", 9)

    def __call__(self, *, logits: torch.Tensor, out: torch.Tensor, **asked: torch.Tensor) -> None:
        """A token for each row of `logits` [R, columns] into `out` [R]; `asked` as `precast.sample` is asked."""
        count, part = len(logits), self._part
        assert count <= self._most_rows, f"{count} rows, at most {self._most_rows}"
        if not count:
            return
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        rows = self._rows.get(count) or self._made(count)
        held = torch.empty(limits.row_bytes() * count, dtype=torch.uint8, device=logits.device)
        whole = torch.empty(count, part.size, dtype=self._dtype, device=logits.device)
        tensors: dict[str, Any] = {"logits": logits, "held": held, "whole": whole, "out": out, **asked}
        at = {name: held.data_ptr() + offset for name, offset in rows.offsets.items()}
        stream = torch._C._cuda_getCurrentRawStream(self._device.index)
        rows.scan(**tensors)
        found = (at["tops"], at["least"], at["places"], at["maxima"], rows.splits)
        self._scanned.launch((count, 1, 1), found, stream)
        rows.list(**tensors)
        drawn = (at["scores"], at["drawn"], at["plan"], at["maxima"], logits.data_ptr(), logits.stride(0))
        self._drawn.launch((min(count, _BLOCKS), 1, 1), (*drawn, whole.data_ptr(), count, rows.splits), stream)
        rows.finish(**tensors)

    def _made(self, count: int) -> _Rows:
        part = self._part
        made = launches.sample_part(count, part.size, part.columns, part.group.rank, part.group.size, pdl=self._pdl)
        self._rows[count] = found = _Rows(
            Launched(made.scan), Launched(made.list), Launched(made.finish), made.splits, launches.held_offsets(count)
        )
        return found

    def _kernel(self, name: str, num_given: int) -> Kernel:
        part = self._part
        constants = launches.constants_of(part.group.rank, part.group.size, part.size, part.columns, NAMES[self._dtype])
        with torch.cuda.device(self._device):
            function = function_of(f"{_FILE}:{name}", constants, self._device.index)
        args: Sequence[At | int | None] = (
            *map(At, range(num_given)), self._most_rows, self._calls.data_ptr(), int(self._limit * 1e9), *self._peers,
        )  # fmt: skip
        return Kernel(function, args, num_given=num_given, num_threads=_THREADS, pdl=self._pdl)


def memory_bytes(part: VocabularyPart, dtype: torch.dtype, most_rows: int) -> int:
    """Of each rank: what `parts.cu` writes to the others."""
    ranks = part.group.size
    scan = limits.MAX_SPLITS // ranks * (3 + limits.OWN_GROUPS)
    row = -(-part.columns * dtype.itemsize // 4)
    return 8 * ranks * (most_rows * (2 * scan + 1 + 2 * limits.CAPACITY) + 2 * _BLOCKS * row)
