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
from precast.loader.device import Buffer, aligned
from precast.loader.driver.copies import launch, loaded_kernels
from precast.loader.driver.device import DriverDevice
from precast.loader.driver.quantise_plan import Round, key_of_copies, keys, shape_of, stored_type
from precast.loader.weights.parts import Computed
from precast.loader.weights.views import View, contiguous


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
        stored, size = stored_type(each, self._stored), element_bytes(PARTS[recipe.part])
        *_, rows, columns = shape_of(each, recipe.of)
        matrix, made = rows * columns, math.prod(shape_of(each, recipe)[-2:])
        count = math.prod(shape_of(each, recipe)) // made
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
        launch(self._kernels[key_of_copies(size)], found[0], (*addresses, *found[1]))

    def _room(self, num_bytes: int) -> int:
        """Memory for one result: the next one is made when it is copied."""
        if self._scratch is None or self._scratch.shape[0] < num_bytes:
            self._device.synchronize()
            self._scratch = self._device.alloc(aligned(num_bytes, 1 << 20))
        return self._scratch.pointer


def _is_all(each: Computed, count: int) -> bool:
    """Whether all of a result goes, as it is made, to one place of its target."""
    shape, strides = each.destination.shape, each.destination.strides
    return math.prod(shape) == count and strides == contiguous(shape).strides
