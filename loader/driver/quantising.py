"""Weights that are quantised while they are read, without torch: kernels of the native layer make values of 8 bits and
scales of matrices that were read as they are stored, where these belong."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from precast.ir.graph.schema import Quantise
from precast.ir.native import NativeLayer
from precast.ir.weights.checkpoint import StoredTensor
from precast.ir.weights.tensorfile import element_bytes
from precast.kernels.dequantise.launches import PARTS, quantising_arguments, quantising_key
from precast.kernels.native import Native
from precast.kernels.without_torch.copies import rearranged_arguments
from precast.loader.driver.copies import launch, loaded_kernels
from precast.loader.driver.device import DriverDevice
from precast.loader.driver.quantise_plan import Round, is_direct, key_of_copies, keys, shape_of, stored_type
from precast.loader.weights.parts import Computed
from precast.loader.weights.views import View


class Quantising:
    """The kernels of a layer that quantise, and that bring what they make to where it belongs."""

    def __init__(
        self, computed: Collection[Computed], stored: Mapping[str, StoredTensor], layer: NativeLayer,
        device: DriverDevice, scratch: int,
    ) -> None:  # fmt: skip
        """`scratch`: the address of as much memory as `scratch_bytes` says, for one result at a time."""
        self._stored, self._scratch = stored, scratch
        self._kernels = loaded_kernels(keys(computed, stored), Native(layer), device)

    def make(self, round: Round, read: Mapping[int, int], at: Mapping[int, int]) -> None:
        """Launch what makes a round's params, which lie `at` these addresses, of what was `read` to these."""
        for each, source in round.computed:
            self._make(each, read[source], at[each.target])

    def _make(self, each: Computed, source: int, target: int) -> None:
        recipe = each.recipe
        assert isinstance(recipe, Quantise), "planned"
        stored, size = stored_type(each, self._stored), element_bytes(PARTS[recipe.part])
        *_, rows, columns = shape_of(each, recipe.of)
        shape = shape_of(each, recipe)
        made = math.prod(shape[-2:])
        out = target + size * each.destination.offset if is_direct(each) else self._scratch
        grid, numbers = quantising_arguments(rows, columns, recipe.block)
        kernel = self._kernels[quantising_key(recipe.part, recipe.block, stored)[0]]
        for i in range(math.prod(shape[:-2])):
            addresses = source + i * rows * columns * element_bytes(stored), out + i * made * size
            launch(kernel, grid, (*addresses, *numbers))
        if not is_direct(each):
            self._copy(each.source, out, each.destination, target, size)

    def _copy(self, source: View, out: int, destination: View, target: int, size: int) -> None:
        found = rearranged_arguments(source.shape, source.strides, destination.strides)
        assert found is not None, "planned"
        addresses = out + size * source.offset, target + size * destination.offset
        launch(self._kernels[key_of_copies(size)], found[0], (*addresses, *found[1]))
