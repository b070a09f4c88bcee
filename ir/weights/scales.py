"""What cached keys and values are divided by (`Scale`): read from a checkpoint that has it, and checked."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import msgspec

from precast.ir.errors import WeightsError, some
from precast.ir.graph.schema import Cast, Param, Read, Reshape, Scale
from precast.ir.weights.checkpoint import StoredTensor
from precast.ir.weights.quantised import expect

_SHAPE = (1,)


def shape(recipe: Scale) -> tuple[int, ...]:
    """The sizes of a scale: one number. Raises RecipeError for one without a name, or whose default can't be."""
    expect(len(recipe.tensors) > 0, "scale: no tensors")
    expect(_is_valid(recipe.default), f"scale: the default is {recipe.default}, expected a number above 0")
    return _SHAPE


def settled(params: Iterable[Param], stored: Mapping[str, StoredTensor]) -> tuple[Param, ...]:
    """The params with what reads a scale in the place of each `Scale` that `stored` has, by its first name; the others
    are their defaults."""
    return tuple(_settled(param, stored) for param in params)


def _settled(param: Param, stored: Mapping[str, StoredTensor]) -> Param:
    if not isinstance(param.recipe, Scale) or param.recipe.tensors[0] not in stored:
        return param
    name = param.recipe.tensors[0]
    read = Reshape(Cast(Read(name, stored[name].shape), "float32"), _SHAPE)
    return msgspec.structs.replace(param, recipe=read)


def names(params: Iterable[Param]) -> list[str]:
    """The params that are scales."""
    return [param.name for param in params if isinstance(param.recipe, Scale)]


def check(values: Mapping[str, float], where: str) -> None:
    """Raise WeightsError (`scale-invalid`) unless each of these scales, by their params' names, is above 0 and finite:
    a zero would make infinities of keys, and NaN spreads. `where`: the checkpoint that they are from."""
    bad = [f"{name} is {value}" for name, value in values.items() if not _is_valid(value)]
    if bad:
        message = f"scales of cached keys and values: {', '.join(some(bad, 8))}; expected numbers above 0"
        raise WeightsError("scale-invalid", message, where=where)


def _is_valid(value: float) -> bool:
    return math.isfinite(value) and value > 0
