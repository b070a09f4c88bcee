"""Random numbers at a bundle's real shapes, for benchmarks, as a checkpoint or on the device: nothing is downloaded."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from precast.ir.artifact import Bundle
from precast.ir.graph import symbols
from precast.ir.graph.schema import Graph
from precast.ir.weights import recipes
from precast.kernels.dtypes import BY_NAME

SHARD_BYTES = 5 << 30
SCALE = 0.02


def write(bundle: Bundle, folder: Path, *, device: str = "cuda") -> None:
    """All tensors that the bundle's params read, normally distributed, norms' weights about 1, in shards of 5 GiB."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator(device).manual_seed(0)
    held: dict[str, torch.Tensor] = {}
    index: dict[str, str] = {}
    number = 0
    reads = (read for param in bundle.graph.params for read in recipes.each_leaf(param.recipe))
    for read in reads:
        if read.tensor in index or read.tensor in held:
            continue
        made = torch.empty(read.shape, dtype=BY_NAME[read.dtype or bundle.manifest.model.dtype], device=device)
        made.normal_(1.0 if len(read.shape) == 1 else 0.0, SCALE, generator=generator)
        held[read.tensor] = made.cpu()
        if sum(each.nbytes for each in held.values()) > SHARD_BYTES:
            number = _save(held, index, folder, number)
    _save(held, index, folder, number)
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


def _save(held: dict[str, torch.Tensor], index: dict[str, str], folder: Path, number: int) -> int:
    name = f"model-{number:05}.safetensors"
    save_file(held, folder / name)
    index |= dict.fromkeys(held, name)
    held.clear()
    return number + 1
