"""The native layer of a bundle for a device, where it may be loaded."""

from __future__ import annotations

from collections.abc import Sequence

from precast.ir.artifact import Bundle
from precast.ir.native import NativeLayer
from precast.kernels.use import Target
from precast.loader.driver.coverage import UnfitError


def layers_of(opened: Bundle) -> Sequence[NativeLayer]:
    """The native layers of a bundle. Raises UnfitError if it has none."""
    raise UnfitError("the bundle has no native layer", opened)


def layer_for(layers: Sequence[NativeLayer], opened: Bundle, target: Target) -> NativeLayer:
    """The layer for a target. Raises UnfitError where there is none, or it isn't admitted."""
    for layer in layers:
        if layer.target == target.text:
            return layer
    listed = ", ".join(layer.target for layer in layers)
    raise UnfitError(f"the bundle has native layers for {listed}, and the GPU is {target.text}", opened)
