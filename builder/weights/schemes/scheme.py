"""How a checkpoint is quantised, whatever the method: what the recipes of a model are made by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from precast.builder.graph.rounding import NONE, Rounding
from precast.ir.graph.schema import Recipe


class Weight(NamedTuple):
    """A checkpoint tensor as it would be without quantisation: its name and shape, and its param's name."""

    name: str
    shape: tuple[int, ...]
    param: str

    @property
    def module(self) -> str:
        """Where the module stands whose param this is."""
        return self.param.rpartition(".")[0]

    @property
    def stem(self) -> str:
        """The checkpoint's name of what holds the weight."""
        return self.name.removesuffix(".weight")


class Scheme(NamedTuple):
    """How a checkpoint is quantised: `recipe` makes a weight's values, of those that `holds` says are quantised.

    `ignored` are patterns of tensors that only other ways of computing need. `scales` are what an attention layer calls
    the scales of its cached keys and values, with `?` for k or v, the likeliest first. `groups_in_order`, `zeros` and
    `endings` are those of the manifest's `Checkpoint`. `rounding` says how the inputs of a weight's layer are rounded.
    """

    method: str
    holds: Callable[[Weight], bool]
    recipe: Callable[[Weight], Recipe]
    ignored: tuple[str, ...]
    scales: tuple[str, ...] = ()
    groups_in_order: Mapping[str, int] = MappingProxyType({})
    zeros: Mapping[str, int] = MappingProxyType({})
    rounding: Callable[[Weight], Rounding] = lambda _: NONE
    endings: Mapping[str, str] = MappingProxyType({})


KV_SCALES = ("?_scale", "?_proj.?_scale", "attn.?_scale", "qkv_proj.?_scale")
"""As compressed-tensors and vLLM, ModelOpt, Quark, and what fuses projections name them."""
