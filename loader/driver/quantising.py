"""Weights that are quantised while they are read, without torch: some matrices at a time are read as they are stored,
and kernels of the native layer make values of 8 bits and scales of them, where these belong."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple, TypeAlias

from precast.ir.graph.schema import Dtype, Quantise, Recipe
from precast.ir.native import NativeLayer
from precast.ir.weights import recipes
from precast.ir.weights.checkpoint import StoredTensor
from precast.ir.weights.tensorfile import element_bytes
from precast.kernels.dequantise.launches import PARTS, STORED, quantising_arguments, quantising_key
from precast.kernels.native import Native
from precast.kernels.without_torch.copies import REARRANGED, rearranged_arguments, rearranged_key
from precast.loader.device import Buffer, aligned
from precast.loader.driver.copies import launch, loaded_kernels
from precast.loader.driver.device import DriverDevice
from precast.loader.weights.parts import Assembly, Computed
from precast.loader.weights.read_plan import grouped
from precast.loader.weights.views import View, contiguous

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
        inputs = [assembly.add_inputs(made[0], _stored_type(made[0], stored))["of"] for made in group]
        yield Round(assembly, [(each, read) for made, read in zip(group, inputs, strict=True) for each in made])


def num_bytes(computed: Collection[Computed], stored: Mapping[str, StoredTensor]) -> int:
    """What is read for these computations, of each matrix once."""
    return sum({(each.recipe.of, each.index): _matrix_bytes(each, stored) for each in computed}.values())


class Quantising:
    """The kernels of a layer that quantise, and that bring what they make to where it belongs."""

    def __init__(
        self, computed: Collection[Computed], stored: Mapping[str, StoredTensor], layer: NativeLayer,
        device: DriverDevice,
    ) -> None:  # fmt: skip
        self._stored, self._device = stored, device
        self._kernels = loaded_kernels(keys(computed, stored), Native(layer), device)
        self._scratch: Buffer | None = None

    def make(self, round: Round, read: Mapping[int, int], at: Mapping[int, int]) -> None:
        """Launch what makes a round's params, which lie `at` these addresses, of what was `read` to these."""
        for each, source in round.computed:
            self._make(each, read[source], at[each.target])

    def _make(self, each: Computed, source: int, target: int) -> None:
        recipe = each.recipe
        assert isinstance(recipe, Quantise), "planned"
        stored, size = _stored_type(each, self._stored), element_bytes(PARTS[recipe.part])
        *_, rows, columns = _shape(each, recipe.of)
        matrix, made = rows * columns, math.prod(_shape(each, recipe)[-2:])
        count = math.prod(_shape(each, recipe)) // made
        is_there = each.source == contiguous(each.source.shape) and _is_all(each, made * count)
        out = target + size * each.destination.offset if is_there else self._room(size * made * count)
        grid, numbers = quantising_arguments(rows, columns, recipe.block)
        kernel = self._kernels[quantising_key(recipe.part, recipe.block, stored)[0]]
        for i in range(count):
            addresses = source + i * matrix * element_bytes(stored), out + i * made * size
            launch(kernel, grid, (*addresses, *numbers))
        if not is_there:
            self._copy(each.source, out, each.destination, target, size)

    def _copy(self, source: View, out: int, destination: View, target: int, size: int) -> None:
        found = rearranged_arguments(source.shape, source.strides, destination.strides)
        assert found is not None, "planned"
        addresses = out + size * source.offset, target + size * destination.offset
        launch(self._kernels[_copies(size)], found[0], (*addresses, *found[1]))

    def _room(self, num_bytes: int) -> int:
        """Memory for one result: the next one is made when it is copied."""
        if self._scratch is None or self._scratch.shape[0] < num_bytes:
            self._device.synchronize()
            self._scratch = self._device.alloc(aligned(num_bytes, 1 << 20))
        return self._scratch.pointer


def keys(computed: Collection[Computed], stored: Mapping[str, StoredTensor]) -> frozenset[str]:
    """Those of the kernels that these computations take."""
    found = set[str]()
    for each in computed:
        recipe = each.recipe
        assert isinstance(recipe, Quantise), "planned"
        found.add(quantising_key(recipe.part, recipe.block, _stored_type(each, stored))[0])
        found.add(_copies(element_bytes(PARTS[recipe.part])))
    return frozenset(found)


def _copies(size: int) -> str:
    return rearranged_key(REARRANGED[size])[0]


def _is_all(each: Computed, count: int) -> bool:
    """Whether all of a result goes, as it is made, to one place of its target."""
    shape, strides = each.destination.shape, each.destination.strides
    return math.prod(shape) == count and strides == contiguous(shape).strides


def _shape(each: Computed, recipe: Recipe) -> tuple[int, ...]:
    """Of what is made, or of what it is made of."""
    sizes = [size for size in recipes.shape(recipe) if isinstance(size, int)]
    return tuple(sizes if each.index is None else sizes[1:])


def _matrix_bytes(each: Computed, stored: Mapping[str, StoredTensor]) -> int:
    return math.prod(_shape(each, each.recipe.of)) * element_bytes(_stored_type(each, stored))


def _stored_type(each: Computed, stored: Mapping[str, StoredTensor]) -> Dtype:
    return stored[recipes.leaves(each.recipe)[0].tensor].dtype  # type: ignore[return-value]
