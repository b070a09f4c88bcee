"""precast.sample@2 on GPUs that write each other's memory, each of which has the logits of a part of the vocabulary.

The launches of `launches.sample_part`, and between them those of `parts.cu`: what the definition gives for all logits.
Nothing is read back, and the same is launched whatever rows ask for.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from precast.kernels.collectives.launches import Among
from precast.kernels.collectives.peers import Peers, kernel_of
from precast.kernels.cuda_launch import Kernel
from precast.kernels.dtypes import NAMES
from precast.kernels.launch import Launched
from precast.kernels.records import Pointer
from precast.kernels.sampling import launches, limits
from precast.kernels.sampling.parts import VocabularyPart

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
        self._native = group.native
        self._same = {"most_rows": most_rows, "calls": self._calls.data_ptr(), "limit": int(group.limit * 1e9)}
        self._same |= self._memory.by_name
        self._pdl = group.has_pdl
        self._rows: dict[int, _Rows] = {}
        self._scanned, self._drawn = self._kernel("scanned"), self._kernel("drawn")

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
        lists = (at["scores"], at["drawn"], at["plan"], at["maxima"], logits.data_ptr(), logits.stride(0))
        drawn = (*lists, whole.data_ptr(), count, rows.splits)
        self._drawn.launch((min(count, launches.PARTS_BLOCKS), 1, 1), drawn, stream)
        rows.finish(**tensors)

    def _made(self, count: int) -> _Rows:
        part = self._part
        made = launches.sample_part(count, part.size, part.columns, part.group.rank, part.group.size, pdl=self._pdl)
        scan, lists, finish = (Launched(each, native=self._native) for each in (made.scan, made.list, made.finish))
        self._rows[count] = found = _Rows(scan, lists, finish, made.splits, launches.held_offsets(count))
        return found

    def _kernel(self, name: str) -> Kernel:
        part = self._part
        among = Among(part.group.rank, part.group.size)
        launch = launches.told(name, among, part.size, part.columns, NAMES[self._dtype], pdl=self._pdl)
        names = [arg.tensor if isinstance(arg, Pointer) else str(arg) for arg in launch.args]
        assert self._device.index is not None
        given = names[: names.index("splits") + 1]
        return kernel_of(launch, given, self._same, self._native, self._device.index)


def memory_bytes(part: VocabularyPart, dtype: torch.dtype, most_rows: int) -> int:
    """Of each rank: what `parts.cu` writes to the others."""
    return launches.told_bytes(part.group.size, part.columns, dtype.itemsize, most_rows)
