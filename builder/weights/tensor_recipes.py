"""Tensors that know their recipe: what torch is asked to do with them becomes a recipe, and no element is computed.

transformers says how it converts a checkpoint by code: operations that stack, split and reorder tensors. Run on these
tensors, the same code says it as recipes, so there is no second account of it here that could be wrong. Only the few
functions of torch that recipes can express are known; any other is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from precast.ir.errors import BuildError
from precast.ir.graph.schema import Concat, Each, Read, Recipe, Reshape, Slice, Stack, Transpose
from precast.ir.weights import recipes

_NUMBER = re.compile(r"(\d+)")


class RecipeTensor(torch.Tensor):
    """A tensor on the meta device, of a shape and a dtype, and the recipe that makes it."""

    recipe: Recipe

    @staticmethod
    def of(recipe: Recipe, shape: Sequence[int], dtype: torch.dtype) -> RecipeTensor:
        """The tensor of this shape that `recipe` makes."""
        return _known(torch.empty(tuple(shape), dtype=dtype, device="meta"), recipe)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """What `func` makes, with its recipe; what is no tensor (a shape, a dtype) as torch gives it."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            made: Any = func(*args, **kwargs)
        is_one = not isinstance(made, (tuple, list))
        results: Any = (made,) if is_one else made
        if not any(isinstance(result, torch.Tensor) for result in results):
            return made
        name = func.__name__
        if name in _UNCHANGED:
            return _known(made, args[0].recipe)
        if name in _RESHAPES:
            return _known(made, _reshaped(args[0], made))
        if name not in _RECIPES:
            raise BuildError("recipe-unsupported", f"no recipe says what torch's {name} does")
        found = _RECIPES[name](results, *args, **kwargs)
        known = tuple(_known(result, recipe) for result, recipe in zip(results, found, strict=True))
        return known[0] if is_one else known


def _known(tensor: torch.Tensor, recipe: Recipe) -> RecipeTensor:
    with torch._C.DisableTorchFunctionSubclass():
        known = tensor.as_subclass(RecipeTensor)
    known.recipe = recipe
    return known


# --- functions of torch: the recipe of each result, from the results and the arguments ---------------------------

Results = Sequence[torch.Tensor]

_UNCHANGED = frozenset(("contiguous", "clone", "detach"))
_RESHAPES = frozenset(("reshape", "view", "flatten", "unflatten", "squeeze", "unsqueeze"))


def _reshaped(source: RecipeTensor, made: torch.Tensor) -> Recipe:
    shape = tuple(made.shape)
    return source.recipe if shape == tuple(source.shape) else Reshape(source.recipe, shape)


def _transpose(results: Results, source: RecipeTensor, dim0: int, dim1: int) -> list[Recipe]:
    rank = source.dim()
    return [Transpose(source.recipe, dim0 % rank, dim1 % rank)]


def _cuts(results: Results, source: RecipeTensor, sizes: Any, dim: int = 0) -> list[Recipe]:
    """`chunk` and `split`: the results lie one after another."""
    dim %= source.dim()
    found: list[Recipe] = []
    start = 0
    for result in results:
        length = result.shape[dim]
        found.append(source.recipe if len(results) == 1 else Slice(source.recipe, dim, start, length))
        start += length
    return found


def _unbind(results: Results, source: RecipeTensor, dim: int = 0) -> list[Recipe]:
    dim %= source.dim()
    return [Reshape(Slice(source.recipe, dim, i, 1), tuple(result.shape)) for i, result in enumerate(results)]


def _cat(results: Results, tensors: Sequence[RecipeTensor], dim: int = 0) -> list[Recipe]:
    if len(tensors) == 1:
        return [tensors[0].recipe]
    return [Concat(tuple(tensor.recipe for tensor in tensors), dim % results[0].dim())]


def _stack(results: Results, tensors: Sequence[RecipeTensor], dim: int = 0) -> list[Recipe]:
    return [stacked([tensor.recipe for tensor in tensors], dim % results[0].dim())]


_RECIPES: dict[str, Callable[..., list[Recipe]]] = {
    "transpose": _transpose,
    "chunk": _cuts,
    "split": _cuts,
    "unbind": _unbind,
    "cat": _cat,
    "stack": _stack,
}


# --- many parts in few words -------------------------------------------------------------------------------------


def stacked(parts: Sequence[Recipe], dim: int) -> Recipe:
    """The parts along a new dimension: an `Each` where their names count, a `Stack` otherwise."""
    each = _each(parts, dim)
    return Stack(tuple(parts), dim) if each is None else each


def _each(parts: Sequence[Recipe], dim: int) -> Each | None:
    """The parts as one, if the names that they read differ in a number that goes up by one from part to part."""
    if len(parts) < 2:
        return None
    names = [[read.tensor for read in recipes.leaves(part)] for part in parts[:2]]
    found = _counted(names[0][0], names[1][0]) if names[0] and names[1] else None
    if found is None:
        return None
    place, start = found
    written = _starred(parts[0], place)
    each = Each(written, dim, len(parts), start)
    same = all(recipes.nth(each, index) == part for index, part in enumerate(parts))
    return each if same else None


def _counted(first: str, second: str) -> tuple[int, int] | None:
    """Which of the numbers in two names is one higher in the second, and what it is in the first."""
    if "*" in first:
        return None
    words, others = _NUMBER.split(first), _NUMBER.split(second)
    places = [i for i, (a, b) in enumerate(zip(words, others, strict=False)) if a != b]
    if len(words) != len(others) or len(places) != 1 or not words[places[0]].isdigit():
        return None
    start = int(words[places[0]])
    return (places[0], start) if str(start + 1) == others[places[0]] else None


def _starred(recipe: Recipe, place: int) -> Recipe:
    """The recipe with `*` for the number at `place` of each name that it reads."""

    def starred(read: Read) -> Read:
        words = _NUMBER.split(read.tensor)
        return Read("".join((*words[:place], "*", *words[place + 1 :])), read.shape, read.dtype)

    return recipes.map_reads(recipe, starred)
