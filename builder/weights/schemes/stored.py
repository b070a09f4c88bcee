"""Recipes of weights as several methods store them: float8 and its scales, NVFP4, experts one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from transformers import PreTrainedModel

from precast.builder.source.quantised_options import refuse, refuse_groups
from precast.builder.weights.schemes.scheme import Weight
from precast.ir.graph.schema import Concat, Dequantise, Each, Read, Recipe, Reshape
from precast.ir.weights.quantised import MX_BLOCK, NVFP4_BLOCK


class Scales(NamedTuple):
    """What makes the scales of a matrix, and the rows and columns that share one."""

    recipe: Recipe
    tile: tuple[int, int]


def scaled(weight: Weight, scales: Scales) -> Recipe:
    """Values of float8_e4m3fn."""
    return Dequantise(Read(weight.name, weight.shape, "float8_e4m3fn"), scales.recipe, "fp8", scales.tile)


def per_tensor(weight: Weight, name: str, stored: tuple[int, ...] = ()) -> Scales:
    """One scale, which is `stored` so, or one for each matrix of a stack."""
    *outer, rows, columns = weight.shape
    whole: tuple[int, ...] = (*outer, 1, 1)
    scale = Read(name, whole) if outer else Reshape(Read(name, stored), whole)
    return Scales(scale, (rows, columns))


def per_row(weight: Weight, name: str) -> Scales:
    """One for each output."""
    return Scales(Read(name, (*weight.shape[:-1], 1)), (1, weight.shape[-1]))


def per_tile(weight: Weight, name: str, tile: tuple[int, int]) -> Scales:
    """One for each tile; the last ones of rows and columns may be smaller."""
    *outer, rows, columns = weight.shape
    return Scales(Read(name, (*outer, -(-rows // tile[0]), -(-columns // tile[1]))), tile)


def per_block(weight: Weight, name: str) -> Scales:
    """ModelOpt's, one for each 128 x 128, with dimensions of 1 beside those of the blocks."""
    rows, columns = (-(-size // _BLOCK) for size in weight.shape)
    return Scales(Reshape(Read(name, (rows, 1, columns, 1)), (rows, columns)), (_BLOCK, _BLOCK))


_BLOCK = 128
"""Rows and columns that share a scale, of a format whose configs don't say how many."""


def per_group_of_32(weight: Weight, suffix: str = "_scale") -> Recipe:
    """MXFP8: 32 neighbours of a row have an exponent."""
    rows, columns = weight.shape
    if columns % MX_BLOCK:
        raise refuse_groups("MXFP8", weight.name, columns, MX_BLOCK)
    scales = Read(weight.name + suffix, (rows, columns // MX_BLOCK), "float8_e8m0fnu")
    return scaled(weight, Scales(scales, (1, MX_BLOCK)))


def packed_mxfp4(method: str, weight: Weight, packed: str) -> Recipe:
    """MXFP4 whose rows are not stored in blocks: two values in a byte, the first in its lower half; 32 neighbours of a
    row have an exponent. `packed` ends the name of the values."""
    rows, columns = weight.shape
    if columns % MX_BLOCK:
        raise refuse_groups(method, weight.name, columns, MX_BLOCK)
    stored = Read(weight.name + packed, (rows, columns // 2), "uint8")
    values = Reshape(stored, (rows, columns // MX_BLOCK, MX_BLOCK // 2))
    return Dequantise(values, Read(weight.name + "_scale", (rows, columns // MX_BLOCK), "uint8"), "mxfp4")


def nvfp4(weight: Weight, packed: str, whole: str, stored: tuple[int, ...], *, divided: bool = False) -> Recipe:
    """Two values in a byte, and a scale for 16 neighbours of a row.

    `packed` and `whole` end the names of the values and of the scale of all of them, which is `stored` so.
    """
    rows, columns = weight.shape
    if columns % NVFP4_BLOCK:
        raise refuse_groups("NVFP4", weight.name, columns, NVFP4_BLOCK)
    values = Read(weight.name + packed, (rows, columns // 2), "uint8")
    scales = Read(weight.name + "_scale", (rows, columns // NVFP4_BLOCK), "float8_e4m3fn")
    total = Reshape(Read(weight.name + whole, stored), (1, 1))
    return Dequantise(values, scales, "nvfp4_divided" if divided else "nvfp4", global_scale=total)


_EXPERT_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""What transformers stacks, and the linear layers of an expert that quantisers store instead."""


T = TypeVar("T")


def expert_layers(name: str, shape: Sequence[int]) -> list[str]:
    """The linear layers that quantisers store in place of stacked experts, as `0.gate_proj` and so on, by the name and
    the shape of what transformers stacks; none of anything else."""
    if len(shape) != 3:
        return []
    return [f"{i}.{part}" for i in range(shape[0]) for part in _EXPERT_PARTS.get(name.rpartition(".")[2], ())]


def of_each(weight: Weight, names: Callable[..., tuple[str, ...]], said_of: Callable[[tuple[str, ...]], T]) -> list[T]:
    """What a config says of a weight, in a list; of stacked experts what it says of each linear layer by its `names`,
    or if that is nothing of all of them, what it says of the stack."""
    ends, stem = expert_layers(weight.name, weight.shape), weight.name.rpartition(".")[0]
    found = [said_of(names(f"{weight.module}.{end}", f"{stem}.{end}")) for end in ends]
    return found if any(found) else [said_of(names(weight.module, weight.stem))] * max(1, len(ends))


def same(method: str, weight: Weight, found: Sequence[T]) -> T:
    """What a config says of all layers of a weight, one by one; refused where it says different things of a stack."""
    others = [place for place, each in enumerate(found) if each != found[0]]
    if others:
        ends, stem = expert_layers(weight.name, weight.shape), weight.name.rpartition(".")[0]
        why = (
            f"{len(others)} of the {len(found)} layers of {weight.name}, such as {stem}.{ends[others[0]]}, "
            f"are not quantised as {stem}.{ends[0]} is, expected all in one format, or none"
        )
        raise refuse(method, "experts of a stack that are quantised in different ways", why=why)
    return found[0]


def one_by_one(model: PreTrainedModel, weight: Weight, method: str, recipe: Callable[[Weight], Recipe]) -> Recipe:
    """The recipe of a linear layer's weight, or of stacked experts, whose linear layers ModelOpt and compressed-tensors
    store one by one, as `experts.0.gate_proj` and so on; `recipe` makes that of one.
    """
    if len(weight.shape) == 2:
        return recipe(weight)
    experts, rows, columns = weight.shape
    stem, _, leaf = weight.name.rpartition(".")
    parts, module = _EXPERT_PARTS.get(leaf, ()), model.get_submodule(weight.module)
    plain = (getattr(module, "is_transposed", True), getattr(module, "is_concatenated", False)) == (False, True)
    if not parts or not plain or not weight.module.endswith(".experts"):
        raise refuse(method, f"stacked experts ({weight.name})")
    each = [Weight(f"{stem}.*.{part}.weight", (rows // len(parts), columns), weight.param) for part in parts]
    made = tuple(Each(recipe(one), 0, experts) for one in each)
    return made[0] if len(made) == 1 else Concat(made, 1)
