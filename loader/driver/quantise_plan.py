"""Weights that are quantised while they are read, without torch: what of it is done at all, which matrices are read
together, and by which kernels. No byte is read here."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from typing import NamedTuple, TypeAlias

from precast.ir.graph.schema import Dtype, Quantise, Recipe
from precast.ir.weights import recipes
from precast.ir.weights.checkpoint import StoredTensor
from precast.ir.weights.tensorfile import element_bytes
from precast.kernels.dequantise.launches import PARTS, STORED, quantising_key
from precast.kernels.without_torch.copies import REARRANGED, rearranged_arguments, rearranged_key
from precast.loader.weights.parts import Assembly, Computed
from precast.loader.weights.read_plan import grouped
from precast.loader.weights.views import contiguous

ROUND_BYTES = 256 << 20
"""What is read for one round; one matrix may be more."""

Matrix: TypeAlias = tuple[Recipe, int | None]
"""What is read for a computation: a recipe, and which part of its first dimension."""


def refusal(computed: Collection[Computed], stored: Mapping[str, StoredTensor], named: Callable[[int], bool]) -> str:
    """Why some of these computations aren't made here; empty if all are. `named`: whether a target is a param."""
    for each in computed:
        recipe = each.recipe
        if not isinstance(recipe, Quantise):
            return f"the checkpoint's tensors are quantised ({recipe.format})"
        types = {stored[leaf.tensor].dtype for leaf in recipes.leaves(recipe.of)}
        if len(types) > 1 or not types <= set(STORED):
            return f"weights of {', '.join(sorted(types))} are quantised while they are read"
        steps = each.source.shape, each.source.strides, each.destination.strides
        if each.casts or not named(each.target) or rearranged_arguments(*steps) is None:
            return "weights that are quantised while they are read are rearranged"
    return ""


class Round(NamedTuple):
    """Targets that are read, and what is computed of which of them."""

    assembly: Assembly
    computed: list[tuple[Computed, int]]


def rounds(computed: Collection[Computed], stored: Mapping[str, StoredTensor]) -> Iterator[Round]:
    """The computations in the order of the files, as many together as `ROUND_BYTES` are read for, and always those of a
    matrix: its values and its scales."""

    def place(each: Computed) -> tuple[str, int, int]:
        first = stored[recipes.leaves(each.recipe)[0].tensor]
        return first.file, first.offset, each.index or 0

    of_matrix = dict[Matrix, list[Computed]]()
    for each in sorted(computed, key=place):
        of_matrix.setdefault((each.recipe.of, each.index), []).append(each)
    for group in grouped(of_matrix.values(), lambda made: _matrix_bytes(made[0], stored), ROUND_BYTES):
        assembly = Assembly(lambda name: stored[name].dtype)
        inputs = [assembly.add_inputs(made[0], stored_type(made[0], stored))["of"] for made in group]
        yield Round(assembly, [(each, read) for made, read in zip(group, inputs, strict=True) for each in made])


def num_bytes(computed: Collection[Computed], stored: Mapping[str, StoredTensor]) -> int:
    """What is read for these computations, of each matrix once."""
    return sum({(each.recipe.of, each.index): _matrix_bytes(each, stored) for each in computed}.values())


def scratch_bytes(computed: Collection[Computed]) -> int:
    """The largest of the results that aren't made where they belong, but copied there."""
    return max((result_bytes(each) for each in computed if not is_direct(each)), default=0)


def result_bytes(each: Computed) -> int:
    """Of a result, of which a target may get a part."""
    assert isinstance(each.recipe, Quantise), "planned"
    return math.prod(shape_of(each, each.recipe)) * element_bytes(PARTS[each.recipe.part])


def is_direct(each: Computed) -> bool:
    """Whether all of a result goes, as it is made, to one place of its target."""
    source, shape = each.source, each.destination.shape
    is_all = math.prod(shape) == math.prod(shape_of(each, each.recipe))
    return is_all and source == contiguous(source.shape) and each.destination.strides == contiguous(shape).strides


def keys(computed: Collection[Computed], stored: Mapping[str, StoredTensor]) -> frozenset[str]:
    """Those of the kernels that these computations take."""
    found = set[str]()
    for each in computed:
        recipe = each.recipe
        assert isinstance(recipe, Quantise), "planned"
        found.add(quantising_key(recipe.part, recipe.block, stored_type(each, stored))[0])
        found.add(key_of_copies(element_bytes(PARTS[recipe.part])))
    return frozenset(found)


@cache
def key_of_copies(size: int) -> str:
    return rearranged_key(REARRANGED[size])[0]


def shape_of(each: Computed, recipe: Recipe) -> tuple[int, ...]:
    """Of what is made, or of what it is made of."""
    sizes = [size for size in recipes.shape(recipe) if isinstance(size, int)]
    return tuple(sizes if each.index is None else sizes[1:])


def _matrix_bytes(each: Computed, stored: Mapping[str, StoredTensor]) -> int:
    return math.prod(shape_of(each, each.recipe.of)) * element_bytes(stored_type(each, stored))


def stored_type(each: Computed, stored: Mapping[str, StoredTensor]) -> Dtype:
    return stored[recipes.leaves(each.recipe)[0].tensor].dtype  # type: ignore[return-value]
