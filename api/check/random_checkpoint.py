"""A checkpoint of random numbers for a graph: every tensor that its recipes read, in one safetensors file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from precast.ir.graph.schema import Dequantise, Dtype, Each, Graph, Read, Recipe
from precast.ir.graph.stored_parts import groups_dim, stored_parts
from precast.ir.weights import recipes
from precast.ir.weights.quantised import PACKED
from precast.ir.weights.tensorfile import FILE_DTYPES, element_bytes
from precast.kernels.dtypes import BY_NAME

_ANY_FLOAT: Dtype = "bfloat16"
"""What is stored where any floating type is taken: the smallest of them that every number here fits."""


_SCALES = {("awq", "gptq", "packed4"): 0.005, ("packed8", "int8"): 0.0003, ("nvfp4", "nvfp4_divided"): 1.0}
"""The size of scales, by the formats whose numbers aren't about 1."""


class _Stored(NamedTuple):
    """A tensor of the file, what it is for, and, for the groups of inputs, how many there are."""

    read: Read
    role: str = "weight"
    num_groups: int = 0

    @property
    def dtype(self) -> Dtype:
        if self.read.dtype == "float8_e8m0fnu":
            return "uint8"  # as most checkpoints store exponents
        return self.read.dtype or _ANY_FLOAT

    @property
    def nbytes(self) -> int:
        return math.prod(self.read.shape) * element_bytes(self.dtype)


def random_checkpoint(graph: Graph, folder: Path, seed: int = 0) -> Path:
    """Write the tensors that a graph of one rank reads into `folder`; what they stand for is small, and none is 0."""
    roles = _roles(graph)
    tensors = {each.read.tensor: each for param in graph.params for each in _stored(param.recipe, *roles[param.name])}
    header, end = {}, 0
    for name, each in tensors.items():
        header[name] = {
            "dtype": FILE_DTYPES[each.dtype],
            "shape": each.read.shape,
            "data_offsets": (end, end + each.nbytes),
        }
        end += each.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path, drawn = folder / "model.safetensors", torch.Generator().manual_seed(seed)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for each in tensors.values():
            file.write(_content(each, drawn).contiguous().view(-1).view(torch.uint8).numpy().data)
    return path


def _roles(graph: Graph) -> dict[str, tuple[str, int]]:
    """What each param is for, and, of groups of inputs, how many there are."""
    found, shapes = stored_parts(graph), {param.name: param.type.shape for param in graph.params}
    roles: dict[str, tuple[str, int]] = dict.fromkeys(shapes, ("weight", 0))
    for name, (format, part, scales) in found.items():
        count = shapes[scales][groups_dim(format)]
        kinds = {"scales": f"scales of {format}", "global_scale": f"global scale of {format}", "groups": "groups"}
        roles[name] = kinds.get(part, "bits"), count if isinstance(count, int) else 1
    return roles


def checkpoint_numbers(graph: Graph) -> int:
    """How many numbers the params of a graph of one rank have."""
    sizes = (math.prod(size for size in param.type.shape if isinstance(size, int)) for param in graph.params)
    return sum(sizes)


def _stored(recipe: Recipe, role: str = "weight", num_groups: int = 0) -> Iterator[_Stored]:
    if isinstance(recipe, Read):
        yield _Stored(recipe, role, num_groups)
    elif isinstance(recipe, Each):
        for index in range(recipe.count):
            yield from _stored(recipes.nth(recipe, index), role, num_groups)
    elif isinstance(recipe, Dequantise):
        groups = recipes.shape(recipe.scales)[1 if recipe.format in PACKED else 0]
        yield from _stored(recipe.of, "bits")
        yield from _stored(recipe.scales, f"scales of {recipe.format}")
        if recipe.zeros is not None:
            yield from _stored(recipe.zeros, "bits")
        if recipe.global_scale is not None:
            yield from _stored(recipe.global_scale, f"global scale of {recipe.format}")
        if recipe.biases is not None:
            yield from _stored(recipe.biases)
        if recipe.groups is not None:
            yield from _stored(recipe.groups, "groups", groups if isinstance(groups, int) else 1)
    else:
        for part in recipes.parts(recipe):
            yield from _stored(part, role, num_groups)


def _content(stored: _Stored, drawn: torch.Generator) -> torch.Tensor:
    """What the tensor holds, by its role; weights are small enough that sums over their inputs are about 1."""
    shape, dtype = stored.read.shape, BY_NAME[stored.dtype]
    if stored.role == "groups":
        return (torch.arange(shape[0]) * stored.num_groups // shape[0]).to(dtype)
    if stored.role.startswith("scales"):
        if dtype == torch.uint8:  # powers of two, counted from 127
            return torch.randint(118, 124, shape, generator=drawn).to(dtype)
        size = next((each for ends, each in _SCALES.items() if stored.role.endswith(ends)), 0.02)
        return ((torch.rand(shape, generator=drawn) + 0.5) * size).to(dtype)
    if stored.role.startswith("global scale"):
        return torch.full(shape, 50.0 if stored.role.endswith("divided") else 0.02).to(dtype)
    if stored.role == "bits" and not dtype.is_floating_point:
        ends = torch.iinfo(dtype)
        return torch.randint(ends.min, ends.max + 1, shape, generator=drawn, dtype=torch.int64).to(dtype)
    numbers = torch.randn(shape, generator=drawn)
    if stored.role == "bits":
        return numbers.to(dtype)
    if len(shape) == 1:
        name = stored.read.tensor
        centre = -1.0 if name.endswith("A_log") else 1.0 if name.endswith("weight") else 0.0
        return (centre + 0.3 * numbers).to(dtype)
    return (min(0.15, 1.5 / math.sqrt(max(1, shape[-1] if shape else 1))) * numbers).to(dtype)
