"""What the parts of weights in few bits must be, once they are read: scales are numbers, and groups have scales.

A scale that is no number makes a whole row of nonsense, and a model that goes on talking. All that is looked at are
bits, a few in a hundred of the weights; each backend does that with its own arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from precast.ir.errors import WeightsError, some
from precast.ir.graph.schema import Cast, Dtype, Graph, Recipe
from precast.ir.graph.stored_parts import groups_dim, stored_parts
from precast.ir.weights import recipes

BITS: Mapping[Dtype, tuple[str, int]] = MappingProxyType({
    "float32": ("int32", 0x7F800000), "float16": ("int16", 0x7C00), "bfloat16": ("int16", 0x7F80),
    "float8_e4m3fn": ("uint8", 0x7F), "uint8": ("uint8", 0xFF),
})  # fmt: skip
"""By the type of scales: integers of that size, and the bits that are all set in what is no finite number. uint8 are
exponents, of which 255 stands for none."""

UNSIGNED: Dtype = "float8_e4m3fn"
"""NVFP4's scales, which have no sign: kernels don't look for one."""

_MOST_NAMED = 3


Bits = Any
"""An array of torch or of numpy."""


class Check(NamedTuple):
    """What a param must be. `num_groups`: integers from 0 on, below it; None: finite numbers, and, if `divides`, no 0.

    `tensors` are those of the checkpoint that it is made from.
    """

    param: str
    tensors: tuple[str, ...]
    dtype: Dtype
    num_groups: int | None = None
    divides: bool = False

    def refusal(self) -> WeightsError:
        """The error for a param that is something else."""
        others = "0 or " if self.divides else "negative or " if self.dtype == UNSIGNED else ""
        what = f"a scale that is {others}no finite number"
        if self.num_groups is not None:
            what = f"a group that has no scales: expected 0 to {self.num_groups - 1}"
        message = f"{', '.join(some(list(self.tensors), _MOST_NAMED))}: {what}"
        fix = "the checkpoint is damaged: download or copy it again"
        return WeightsError("weights-mismatch", message, where=self.param, fix=fix)

    def rounding(self) -> WeightsError:
        """The error for scales that the param's type doesn't hold."""
        message = f"{', '.join(some(list(self.tensors), _MOST_NAMED))}: a scale that {self.dtype} doesn't hold exactly"
        fix = "build the bundle with --dequantise, which reads scales of any type"
        return WeightsError("weights-mismatch", message, where=self.param, fix=fix)


def are_bad(bits: Bits, check: Check) -> Bits:
    """Which scales aren't what they must be, but for a 0; `bits` are integers as `BITS` has them, of any array."""
    mask = BITS[check.dtype][1]
    found = bits & mask == mask
    return found | (bits > mask) if check.dtype == UNSIGNED else found


def is_rounded(check: Check, stored_dtype: Callable[[str], str]) -> bool:
    """Whether scales are of a type, in the checkpoint, of which the param's type doesn't hold all numbers."""
    halves = check.dtype in ("float16", "bfloat16")
    return halves and any(stored_dtype(name) != check.dtype for name in check.tensors)


def widened(recipe: Recipe) -> Recipe:
    """The recipe of scales, with float32 in place of the type that they are converted to."""
    return Cast(recipe.of if isinstance(recipe, Cast) else recipe, "float32")


def checks(graph: Graph) -> Iterator[Check]:
    """What is to be looked at in the params of a graph that is bound to its rank."""
    params = {param.name: param for param in graph.params}
    for name, (format, part, scales) in stored_parts(graph).items():
        param = params[name]
        tensors = tuple(dict.fromkeys(read.tensor for read in recipes.each_leaf(param.recipe)))
        if part == "groups":
            count = params[scales].type.shape[groups_dim(format)]
            yield Check(name, tensors, param.type.dtype, count if isinstance(count, int) else None)
        elif part in ("scales", "global_scale", "input_scale"):
            divides = part == "global_scale" and format == "nvfp4_divided"
            yield Check(name, tensors, param.type.dtype, None, divides)
