"""Random numbers at a bundle's real shapes, for benchmarks, as a checkpoint or on the device: nothing is downloaded."""

from __future__ import annotations

import json
import math
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from precast.ir.artifact import Bundle
from precast.ir.graph import symbols
from precast.ir.graph.schema import Dtype, Graph
from precast.ir.weights import recipes
from precast.ir.weights.tensorfile import FILE_DTYPES, element_bytes
from precast.kernels.dtypes import BY_NAME

SHARD_BYTES = 1 << 30
BLOCK = (1 << 24) + 43
"""Numbers that are drawn: tensors take them again and again, from other places on."""
SCALE = 0.02


def write(bundle: Bundle, folder: Path) -> None:
    """All tensors that the bundle's params read, normally distributed, norms' weights about 1, in shards of 1 GiB.

    Shards are written side by side, as fast as memory takes them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    drawn = torch.randn(BLOCK, generator=torch.Generator().manual_seed(0)) * SCALE
    shards: list[list[_Tensor]] = []
    known: set[str] = set()
    held = SHARD_BYTES
    for read in (read for param in bundle.graph.params for read in recipes.each_leaf(param.recipe)):
        if read.tensor in known:
            continue
        known.add(read.tensor)
        made = _Tensor(read.tensor, read.dtype or bundle.manifest.model.dtype, tuple(read.shape))
        if held + made.num_bytes > SHARD_BYTES:
            shards.append([])
            held = 0
        shards[-1].append(made)
        held += made.num_bytes
    kinds = {each.dtype for shard in shards for each in shard}
    blocks = {kind: {False: drawn.to(BY_NAME[kind]), True: (1 + drawn).to(BY_NAME[kind])} for kind in kinds}
    names = [f"model-{number:05}.safetensors" for number in range(len(shards))]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda name, shard: _save(folder / name, shard, blocks), names, shards))
    index = {each.name: name for name, shard in zip(names, shards, strict=True) for each in shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def tensors(graph: Graph, device: torch.device) -> dict[str, torch.Tensor]:
    """Params and constants on a device, by name: matrices small, so that nothing overflows; vectors around 1."""
    found = {}
    for value in (*graph.params, *graph.constants):
        shape = [symbols.evaluate(size, {"tp": 1, "rank": 0}) for size in value.type.shape]
        made = torch.zeros(shape, dtype=BY_NAME[value.type.dtype], device=device)
        if made.is_floating_point():
            made.normal_(1.0 if made.dim() == 1 else 0.0, SCALE)
        found[value.name] = made
    return found


class _Tensor(NamedTuple):
    name: str
    dtype: Dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * element_bytes(self.dtype)


def _save(path: Path, shard: list[_Tensor], blocks: dict[Dtype, dict[bool, torch.Tensor]]) -> None:
    """A safetensors file of these."""
    header, at = {}, 0
    for each in shard:
        offsets = [at, at := at + each.num_bytes]
        header[each.name] = {"dtype": FILE_DTYPES[each.dtype], "shape": each.shape, "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb", buffering=0) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for each in shard:
            block = memoryview(blocks[each.dtype][len(each.shape) == 1].view(torch.uint8).numpy())
            start = zlib.crc32(each.name.encode()) % BLOCK * element_bytes(each.dtype)
            left = each.num_bytes
            while left:
                written = file.write(block[start : start + left])
                left, start = left - written, (start + written) % len(block)
