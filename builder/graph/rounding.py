"""How the inputs of layers are rounded whose weights a checkpoint stores in few bits: what a build carries of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from precast.ir.graph.schema import Read, Recipe
from precast.ir.weights import recipes


class Rounding(NamedTuple):
    """How the input of a layer is rounded."""

    activation: str = "none"
    """As `precast.quantised_linear` has it, and `precast.quantised_experts`, which calls it `rounding`."""
    scale: Read | None = None
    """The tensor with the one scale of `fp8_tensor`."""
    bound: float | None = None
    """Inputs of larger magnitude count as this."""
    reason: str = ""
    """Why it is `none`, where the checkpoint's publisher rounds."""

    @property
    def kind(self) -> tuple[str, float | None]:
        """What two layers have in common that one piece of a graph can stand for."""
        return self.activation, self.bound


NONE = Rounding()
Roundings = Mapping[str, Rounding]
"""By the names of the tensors that a layer's weight is made of."""


def rounding_of(recipe: Recipe, roundings: Roundings) -> Rounding:
    """That of a layer whose weight is made so; of joined weights, what they have in common."""
    if not roundings:
        return NONE
    found = {roundings[read.tensor] for read in recipes.each_leaf(recipe) if read.tensor in roundings}
    if len(found) > 1 and all(each.scale is not None for each in found):
        return Rounding(reason="its weight is joined of several, whose inputs have a scale each")
    if len(found) > 1:
        return Rounding(reason="its weight is joined of several, whose inputs are rounded in different ways")
    return found.pop() if found else NONE
