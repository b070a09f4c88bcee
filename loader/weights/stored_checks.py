"""What the parts of weights in few bits must be, once they are read: scales are numbers, and groups have scales.

A scale that is no number makes a whole row of nonsense, and a model that goes on talking. All that is looked at are
bits, a few in a hundred of the weights; each backend does that with its own arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from precast.ir.errors import WeightsError, some
from precast.ir.graph.schema import Cast, Dequantise, Dtype, Graph, Quantise, Recipe
from precast.ir.graph.stored_parts import groups_dim, stored_parts
from precast.ir.weights import recipes
from precast.ir.weights.checkpoint import StoredDtype

BITS: Mapping[StoredDtype, tuple[str, int]] = MappingProxyType({
    "float64": ("int64", 0x7FF0000000000000), "float32": ("int32", 0x7F800000), "float16": ("int16", 0x7C00),
    "bfloat16": ("int16", 0x7F80), "float8_e4m3fn": ("uint8", 0x7F), "uint8": ("uint8", 0xFF),
    "F8_E8M0": ("uint8", 0xFF),
})  # fmt: skip
"""By the type of scales: integers of that size, and the bits that are all set in what is no finite number. uint8 are
exponents, of which 255 stands for none."""

_MOST_NAMED = 3


Bits = Any
"""An array of torch or of numpy."""
Least = Literal["any", "zero", "above zero"]


class Check(NamedTuple):
    """What the numbers must be that `recipe` makes: integers from 0 on, below `num_groups`, or finite, and at `least`
    so much. `what`: how messages call one.

    A zero with a sign counts as negative: kernels don't look for a sign.
    """

    param: str
    recipe: Recipe
    dtype: Dtype
    what: str = "scale"
    least: Least = "any"
    num_groups: int | None = None

    @property
    def tensors(self) -> tuple[str, ...]:
        """Those of the checkpoint that it is made from, as recipes call them."""
        return tuple(dict.fromkeys(read.tensor for read in recipes.each_leaf(self.recipe)))

    @property
    def expected(self) -> str:
        """What is expected of each number."""
        if self.num_groups is not None:
            return f"0 to {self.num_groups - 1}"
        return {"any": "a finite number", "zero": "a finite number of at least 0"}.get(
            self.least, "a finite number above 0"
        )

    def listed(self) -> str:
        """Some of the tensors."""
        return ", ".join(some(list(self.tensors), _MOST_NAMED))


class Fault(Exception):
    """Something isn't what a check asks; whoever has the checkpoint says which tensor of it is to blame."""

    def __init__(self, check: Check) -> None:
        super().__init__(check.param)
        self.check = check


def rounding(check: Check, tensor: str, where: str) -> WeightsError:
    """The error for a tensor of scales that the param's type doesn't hold."""
    message = f"{tensor}: a scale that {check.dtype} doesn't hold exactly"
    fix = "build the bundle with --dequantise, which reads scales of any type"
    return WeightsError("weights-mismatch", message, where=where, fix=fix)


def are_bad(bits: Bits, check: Check) -> Bits:
    """Which numbers aren't what they must be; `bits` are integers, as `BITS` has them, of any array."""
    if check.num_groups is not None:
        return (bits < 0) | (bits >= check.num_groups)
    mask = BITS[check.dtype][1]
    found = bits & mask == mask
    if check.least == "any":
        return found
    found = found | (bits > mask) | (bits < 0)
    return found if check.least == "zero" else found | (bits == 0)


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
        kind = params[scales].type.shape
        groups = kind[groups_dim(format)] if part == "groups" else None
        found = _check(name, params[name].recipe, params[name].type.dtype, format, part, groups)
        if found is not None:
            yield found


def checks_of_inputs(recipe: Dequantise | Quantise) -> dict[str, Check]:
    """What is to be looked at in the parts that numbers are computed from, by the parts' names."""
    if isinstance(recipe, Quantise):
        return {}  # a scale that it makes says it
    dim = 0 if recipe.format == "gptq" else 1
    groups = recipes.shape(recipe.scales)[dim] if recipe.groups is not None else None
    found: dict[str, Check] = {}
    for name, part in recipes.named_parts(recipe).items():
        stored = recipes.dtype(part)
        dtype: Dtype = "float32" if stored is None or stored == "float8_e8m0fnu" else stored
        check = _check("", part, dtype, recipe.format, name, groups)
        found |= {} if check is None else {name: check}
    return found


def _check(param: str, recipe: Recipe, dtype: Dtype, format: str, part: str, groups: Any) -> Check | None:
    """That of a part of a weight of this format; None: it may be anything."""
    if part == "groups":
        return Check(param, recipe, "int32", "group", num_groups=groups)
    if part == "biases":
        return Check(param, recipe, dtype, "bias")
    if part not in ("scales", "global_scale", "input_scale"):
        return None
    if part == "input_scale" or (part == "global_scale" and format == "nvfp4_divided"):
        return Check(param, recipe, dtype, least="above zero")
    if _is_at_load(recipe):
        return Check(param, recipe, dtype, "weight")
    # Some quantisers of integers make negative scales, and exponents have no sign.
    return Check(param, recipe, dtype, least="zero" if format in _FLOATS else "any")


_FLOATS = frozenset(("fp8", "nvfp4", "nvfp4_divided"))
"""Formats whose values have a sign of their own: scales have none."""


def _is_at_load(recipe: Recipe) -> bool:
    """Whether it is made of numbers that are quantised while they are read."""
    return isinstance(recipe, Quantise) or any(map(_is_at_load, recipes.parts(recipe)))
