"""Random numbers at a bundle's real shapes, for benchmarks, as a checkpoint or on the device: nothing is downloaded."""

from __future__ import annotations

import json
import math
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from precast.ir.artifact import Bundle
from precast.ir.graph import symbols
from precast.ir.graph.schema import Dtype, Graph
from precast.ir.graph.stored_parts import StoredPart, stored_parts
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
    parts = stored_parts(bundle.graph)
    reads = ((read, param) for param in bundle.graph.params for read in recipes.each_leaf(param.recipe))
    for read, param in reads:
        if read.tensor in known:
            continue
        known.add(read.tensor)
        shape = tuple(read.shape)
        role = _role(parts.get(param.name), shape)
        # Scales are published as they are held: those of GPTQ in float16, whatever the model's dtype.
        dtype = param.type.dtype if role == "scales" else bundle.manifest.model.dtype
        made = _Tensor(read.tensor, read.dtype or dtype, shape, role)
        if held + made.num_bytes > SHARD_BYTES:
            shards.append([])
            held = 0
        shards[-1].append(made)
        held += made.num_bytes
    kinds = {(each.dtype, each.role) for shard in shards for each in shard}
    blocks = {kind: _drawn(*kind, drawn) for kind in kinds}
    names = [f"model-{number:05}.safetensors" for number in range(len(shards))]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda name, shard: _save(folder / name, shard, blocks), names, shards))
    index = {each.name: name for name, shard in zip(names, shards, strict=True) for each in shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def tensors(graph: Graph, device: torch.device) -> dict[str, torch.Tensor]:
    """Params and constants on a device, by name: matrices small, so that nothing overflows; vectors around 1."""
    found, parts = {}, stored_parts(graph)
    for value in (*graph.params, *graph.constants):
        shape = tuple(symbols.evaluate(size, {"tp": 1, "ep": 1, "rank": 0}) for size in value.type.shape)
        role, dtype = _role(parts.get(value.name), shape), BY_NAME[value.type.dtype]
        made = torch.zeros(shape, dtype=dtype, device=device)
        if value.name in parts:
            made.copy_(_drawn(value.type.dtype, role, torch.randn(made.numel(), device=device) * SCALE).view(shape))
        elif made.is_floating_point():
            made.normal_(1.0 if role == "vector" else 0.0, SCALE)
        found[value.name] = made
    return found


Role = Literal["matrix", "vector", "values", "scales", "groups"]
"""What a tensor is for: the last three are parts of a weight in few bits."""


def _role(part: StoredPart | None, shape: tuple[int, ...]) -> Role:
    if part is None:
        return "vector" if len(shape) == 1 else "matrix"
    if part.part == "groups":
        return "groups"
    return "values" if part.part in ("of", "zeros") else "scales"


def _drawn(dtype: Dtype, role: Role, drawn: torch.Tensor) -> torch.Tensor:
    """Numbers for tensors of this type and role, as many as `drawn`, which are of size `SCALE`."""
    kind = BY_NAME[dtype]
    if role == "scales":
        # exponents of two are counted from 127
        return (121 + drawn.sign() * 2).to(kind) if kind == torch.uint8 else (drawn.abs() + SCALE / 4).to(kind)
    if role == "values" and not kind.is_floating_point:
        bits = torch.randint(0, 256, (drawn.numel() * kind.itemsize,), dtype=torch.uint8, device=drawn.device)
        return bits.view(kind)
    if role == "values":
        return (drawn / SCALE).to(kind)
    return torch.zeros_like(drawn).to(kind) if role == "groups" else (drawn + (role == "vector")).to(kind)


class _Tensor(NamedTuple):
    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    role: Role

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * element_bytes(self.dtype)


def _save(path: Path, shard: list[_Tensor], blocks: dict[tuple[Dtype, Role], torch.Tensor]) -> None:
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
            block = memoryview(blocks[each.dtype, each.role].view(torch.uint8).numpy())
            start = zlib.crc32(each.name.encode()) % BLOCK * element_bytes(each.dtype)
            left = each.num_bytes
            while left:
                written = file.write(block[start : start + left])
                left, start = left - written, (start + written) % len(block)
