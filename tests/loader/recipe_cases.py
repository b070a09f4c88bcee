"""Recipes for tests: what each of them means in plain torch, random ones, and graphs that consist of params alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import quantised
import torch
from hypothesis import strategies as st

from precast.ir.graph import symbols as exprs
from precast.ir.graph.schema import (
    Cast,
    Concat,
    Dequantise,
    Dtype,
    Each,
    Expr,
    Graph,
    Param,
    Quantise,
    Read,
    Recipe,
    Repack,
    Repeat,
    Reshape,
    ShardPlan,
    Slice,
    Stack,
    Symbol,
    TensorType,
    Tie,
    Transpose,
    World,
)
from precast.ir.weights import recipes as ir_recipes
from precast.kernels import dtypes
from precast.loader.weights import views

Tensors = dict[str, torch.Tensor]
FLOATS: tuple[Dtype, ...] = ("float64", "float32", "float16", "bfloat16")


def evaluate(
    recipe: Recipe, tensors: Mapping[str, torch.Tensor], symbols: Mapping[str, int] | None = None
) -> torch.Tensor:
    """What the recipe makes of `tensors`."""

    def size(expr: Expr) -> int:
        return exprs.evaluate(expr, symbols or {})

    def make(part: Recipe) -> torch.Tensor:
        match part:
            case Read():
                return tensors[part.tensor]
            case Slice():
                return make(part.of).narrow(part.dim, size(part.start), size(part.length))
            case Concat():
                return torch.cat([make(each) for each in part.parts], part.dim)
            case Stack():
                return torch.stack([make(each) for each in part.parts], part.dim)
            case Transpose():
                return make(part.of).transpose(part.dim0, part.dim1)
            case Reshape():
                return make(part.of).reshape([size(each) for each in part.shape])
            case Cast():
                return make(part.of).to(dtypes.BY_NAME[part.dtype])
            case Repeat():
                return make(part.of).repeat_interleave(size(part.count), part.dim)
            case Repack():
                return quantised.repacked(make(part.of), part.part)
            case Each():
                return torch.stack([make(ir_recipes.nth(part, i)) for i in range(part.count)], part.dim)
            case Dequantise():
                return quantised.dequantised(part, [make(each) for each in ir_recipes.parts(part)])
            case Quantise():
                return quantised.part_of_fp8(make(part.of), part.part, part.block)
            case Tie():
                raise AssertionError("a tie makes nothing")

    return make(recipe)


def read(name: str, tensors: Mapping[str, torch.Tensor], *, any_float: bool = False) -> Read:
    """The recipe that reads a tensor as it is; `any_float`: whatever its floating type is."""
    tensor = tensors[name]
    return Read(name, tuple(tensor.shape), None if any_float else dtypes.NAMES[tensor.dtype])


def params_graph(recipes: Mapping[str, Recipe], tensors: Tensors, symbols: Mapping[str, int] | None = None) -> Graph:
    """A graph without nodes whose params are made by `recipes`; a tie has the type of the param that it names."""

    def type_of(recipe: Recipe) -> TensorType:
        if isinstance(recipe, Tie):
            return type_of(recipes[recipe.param])
        made = evaluate(recipe, tensors, symbols)
        return TensorType(dtypes.NAMES[made.dtype], tuple(made.shape))

    params = tuple(Param(name, type_of(recipe), recipe) for name, recipe in recipes.items())
    ranks = (symbols or {}).get("tp", 1)
    return Graph(
        tuple(Symbol(name) for name in symbols or {}), (), params, (), (), (), {name: name for name in recipes},
        shards=ShardPlan(tuple(World(tp) for tp in sorted({1, ranks}))),
    )  # fmt: skip


# --- random recipes ----------------------------------------------------------------------------------------------


class Made(NamedTuple):
    """A recipe with the shape and dtype of what it makes."""

    recipe: Recipe
    shape: tuple[int, ...]
    dtype: Dtype


@st.composite
def recipe_sets(
    draw: st.DrawFn, *, quantised: bool = False, repacked: bool = True
) -> tuple[dict[str, Recipe], Tensors]:
    """One to three params, and the tensors that they read; params may read the same tensors."""
    tensors: Tensors = {}
    plain = (_read, _read, _experts, *((_repacked,) if repacked else ()))
    firsts = (_read, _experts, _quantised, _quantised_at_load) if quantised else plain
    recipes = {f"p{i}": draw(_made(tensors, firsts)).recipe for i in range(draw(st.integers(1, 3)))}
    return recipes, tensors


@st.composite
def _made(draw: st.DrawFn, tensors: Tensors, firsts: Sequence[Callable[[Tensors], st.SearchStrategy[Made]]]) -> Made:
    made = draw(st.sampled_from(firsts).flatmap(lambda first: first(tensors)))
    for _ in range(draw(st.integers(0, 5))):
        made = draw(
            st.sampled_from((_slice, _join, _transpose, _reshape, _cast, _repeat)).flatmap(
                lambda op, m=made: op(tensors, m)
            )
        )
    return made


@st.composite
def _experts(draw: st.DrawFn, tensors: Tensors) -> Made:
    """Numbered tensors along a new dimension."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=2)))
    count, start, dim = draw(st.integers(1, 4)), draw(st.integers(0, 11)), draw(st.integers(0, len(shape)))
    layer = len(tensors)
    for number in range(start, start + count):
        tensors[f"layer.{layer}.{number}.w"] = (torch.arange(math.prod(shape)) * 0.7 - number).reshape(shape)
    each = Each(Read(f"layer.{layer}.*.w", shape, "float32"), dim, count, start)
    return Made(each, (*shape[:dim], count, *shape[dim:]), "float32")


@st.composite
def _repacked(draw: st.DrawFn, tensors: Tensors) -> Made:
    """Words of four bits, of one layer or of experts, or zeros."""
    rows, words, name = 8 * draw(st.integers(1, 3)), draw(st.integers(1, 3)), f"words.{len(tensors)}"
    drawn = torch.Generator().manual_seed(len(tensors))
    count, part = draw(st.integers(1, 3)), draw(st.sampled_from(("values", "zeros", "groups")))
    for number in range(count):
        made = torch.randint(-(2**31), 2**31, (rows, words), generator=drawn)
        tensors[f"{name}.{number}"] = made.int()
    shape = {"values": (8 * words, rows // 8), "zeros": (words, rows), "groups": (rows // 8, 8 * words)}[part]
    if count == 1:
        return Made(Repack(read(f"{name}.0", tensors), part), shape, "int32")
    each = Each(Repack(Read(name + ".*", (rows, words), "int32"), part), 0, count)
    return Made(each, (count, *shape), "int32")


@st.composite
def _quantised(draw: st.DrawFn, tensors: Tensors) -> Made:
    """Two matrices or one in float8, with a scale for each block."""
    shape = (*draw(st.sampled_from(((), (2,)))), draw(st.integers(1, 9)), draw(st.integers(1, 9)))
    block = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    scales = (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))
    name = f"quantised.{len(tensors)}"
    tensors[name] = (torch.arange(math.prod(shape)) * 0.9 - 20).reshape(shape).to(torch.float8_e4m3fn)
    tensors[name + ".scale"] = (torch.arange(math.prod(scales)) * 0.013 + 0.1).reshape(scales)
    made = Dequantise(read(name, tensors), read(name + ".scale", tensors), "fp8", block)
    return Made(made, shape, "float32")


@st.composite
def _quantised_at_load(draw: st.DrawFn, tensors: Tensors) -> Made:
    """Values or scales of two matrices or one, of which blocks are zeros."""
    shape = (*draw(st.sampled_from(((), (2,)))), draw(st.integers(1, 9)), draw(st.integers(1, 9)))
    block = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    name, dtype = f"wide.{len(tensors)}", draw(st.sampled_from(FLOATS))
    tensors[name] = ((torch.arange(math.prod(shape)) * 0.9 - 20).clamp(min=0)).reshape(shape).to(dtypes.BY_NAME[dtype])
    which = draw(st.sampled_from(("values", "scales")))
    made = Quantise(read(name, tensors, any_float=draw(st.booleans())), which, block)
    found = (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1])) if which == "scales" else shape
    return Made(made, found, "float32" if which == "scales" else "float8_e4m3fn")


@st.composite
def _read(draw: st.DrawFn, tensors: Tensors, shape: tuple[int, ...] | None = None, dtype: Dtype | None = None) -> Made:
    fitting = [
        name
        for name, tensor in tensors.items()
        if shape in (None, tuple(tensor.shape)) and dtype in (None, dtypes.NAMES[tensor.dtype])
    ]
    if fitting and draw(st.booleans()):
        name = draw(st.sampled_from(fitting))
    else:
        name = f"tensor.{len(tensors)}"
        shape = shape or tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
        dtype = dtype or draw(st.sampled_from(FLOATS))
        made = torch.arange(math.prod(shape)) + 1000 * len(tensors)
        values = made * 0.37
        if dtype == "float8_e4m3fn":
            values %= 400  # the largest float8 is 448, and what is above becomes NaN, which equals nothing
        tensors[name] = values.reshape(shape).to(dtypes.BY_NAME[dtype])
    tensor = tensors[name]
    found = dtypes.NAMES[tensor.dtype]
    return Made(Read(name, tuple(tensor.shape), found), tuple(tensor.shape), found)


@st.composite
def _slice(draw: st.DrawFn, tensors: Tensors, made: Made) -> Made:
    dim = draw(st.integers(0, len(made.shape) - 1))
    start = draw(st.integers(0, made.shape[dim] - 1))
    length = draw(st.integers(1, made.shape[dim] - start))
    shape = (*made.shape[:dim], length, *made.shape[dim + 1 :])
    return Made(Slice(made.recipe, dim, start, length), shape, made.dtype)


@st.composite
def _join(draw: st.DrawFn, tensors: Tensors, made: Made) -> Made:
    """A stack or a concatenation with itself, with a tensor of the same shape, and with a transposed one."""
    others = draw(st.lists(st.sampled_from(("itself", "tensor", "transposed")), min_size=1, max_size=2))
    parts = [made.recipe]
    for other in others:
        if other == "itself":
            parts.append(made.recipe)
        elif other == "tensor":
            parts.append(draw(_read(tensors, made.shape, made.dtype)).recipe)
        else:
            swapped = views.swap(made.shape, 0, len(made.shape) - 1)
            parts.append(Transpose(draw(_read(tensors, swapped, made.dtype)).recipe, 0, len(made.shape) - 1))
    if draw(st.booleans()):
        dim = draw(st.integers(0, len(made.shape)))
        return Made(Stack(tuple(parts), dim), (*made.shape[:dim], len(parts), *made.shape[dim:]), made.dtype)
    dim = draw(st.integers(0, len(made.shape) - 1))
    shape = (*made.shape[:dim], made.shape[dim] * len(parts), *made.shape[dim + 1 :])
    return Made(Concat(tuple(parts), dim), shape, made.dtype)


@st.composite
def _transpose(draw: st.DrawFn, tensors: Tensors, made: Made) -> Made:
    dim0, dim1 = (draw(st.integers(0, len(made.shape) - 1)) for _ in range(2))
    return Made(Transpose(made.recipe, dim0, dim1), views.swap(made.shape, dim0, dim1), made.dtype)


@st.composite
def _reshape(draw: st.DrawFn, tensors: Tensors, made: Made) -> Made:
    """Any shape of as many elements, in up to four dimensions."""
    rest = math.prod(made.shape)
    shape = []
    for _ in range(draw(st.integers(0, 3))):
        shape.append(draw(st.sampled_from([size for size in range(1, rest + 1) if rest % size == 0])))
        rest //= shape[-1]
    return Made(Reshape(made.recipe, (*shape, rest)), (*shape, rest), made.dtype)


@st.composite
def _cast(draw: st.DrawFn, tensors: Tensors, made: Made) -> Made:
    dtype = draw(st.sampled_from(FLOATS))
    return Made(Cast(made.recipe, dtype), made.shape, dtype)


@st.composite
def _repeat(draw: st.DrawFn, tensors: Tensors, made: Made) -> Made:
    dim, count = draw(st.integers(0, len(made.shape) - 1)), draw(st.integers(1, 3))
    shape = (*made.shape[:dim], made.shape[dim] * count, *made.shape[dim + 1 :])
    return Made(Repeat(made.recipe, dim, count), shape, made.dtype)
