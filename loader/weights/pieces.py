"""Recipes taken apart: which elements of which stored tensor go where in which param.

A recipe is followed from its root to what it reads, with the part of the destination that each branch fills. A
branch without a join is a strided view of one stored tensor, so nearly all of it is arithmetic: one piece for each
tensor read. Only a join under a reshape that no strides describe is made in a temporary tensor and moved afterwards.

Values that a checkpoint holds in few bits are computed, matrix by matrix, from tensors that are read for it
(`lay_out_inputs`) and gone afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from precast.ir.errors import BundleError
from precast.ir.graph import symbols as exprs
from precast.ir.graph.schema import (
    Cast,
    Concat,
    Dequantise,
    Dtype,
    Each,
    Expr,
    Param,
    Read,
    Recipe,
    Reshape,
    Slice,
    Stack,
    Tie,
    Transpose,
)
from precast.ir.weights import quantised, recipes
from precast.loader.weights import views
from precast.loader.weights.views import Shape, View

Window = tuple[tuple[int, int], ...]
"""The part of a recipe's result that is wanted: start and length in each dimension."""

Casts = tuple[Dtype, ...]
"""The element types that a value is converted to, one after the other, the target's last; none: it stays as it is."""


class Target(msgspec.Struct, frozen=True):
    """A tensor to be filled: a param, or a temporary one without a name. Contiguous."""

    name: str | None
    dtype: Dtype
    shape: Shape


class Piece(msgspec.Struct, frozen=True):
    """Elements of a stored tensor, by its name in the recipes, for elements of a target; both views have one shape."""

    tensor: str
    source: View
    target: int
    destination: View
    casts: Casts


class Move(msgspec.Struct, frozen=True):
    """Elements of a temporary target for elements of a later one, once the temporary one is filled."""

    source: int
    view: View
    target: int
    destination: View
    casts: Casts


class Computed(msgspec.Struct, frozen=True):
    """Elements of a dequantised tensor for elements of a target. `index`: all of them are in that part of its first
    dimension, and `source` views that part alone.
    """

    recipe: Dequantise
    index: int | None
    source: View
    target: int
    destination: View
    casts: Casts


class Inputs(msgspec.Struct, frozen=True):
    """What a computation reads, as targets of a layout of its own."""

    values: int
    scales: int
    zeros: int | None
    groups: int | None


class Layout(msgspec.Struct, frozen=True):
    """All pieces of all params; `ties` maps a param to the one whose memory it shares."""

    targets: tuple[Target, ...]
    pieces: tuple[Piece, ...]
    moves: tuple[Move, ...]
    ties: dict[str, str]
    computed: tuple[Computed, ...] = ()


def lay_out(params: Iterable[Param], symbols: Mapping[str, int], stored_dtype: Callable[[str], str]) -> Layout:
    """Take the recipes of `params` apart; `stored_dtype` gives the element type of a stored tensor by its name.

    Raises BundleError (symbol-unbound) for a symbol without a value, and (graph-invalid) for a slice that, with these
    values, leaves what it slices.
    """
    maker = _Maker(symbols, stored_dtype)
    ties: dict[str, str] = {}
    for param in params:
        if isinstance(param.recipe, Tie):
            ties[param.name] = param.recipe.param
            continue
        try:
            maker.add_param(param)
        except BundleError as error:
            raise error.inside(f"param {param.name}") from None
    return Layout(tuple(maker.targets), tuple(maker.pieces), tuple(maker.moves), ties, tuple(maker.computed))


def lay_out_inputs(
    computed: Sequence[Computed], symbols: Mapping[str, int], stored_dtype: Callable[[str], str]
) -> tuple[Layout, tuple[Inputs, ...]]:
    """The tensors that these computations need, in temporary targets, and which of them each one needs."""
    maker = _Maker(symbols, stored_dtype)
    inputs = tuple(maker.add_inputs(each) for each in computed)
    return Layout(tuple(maker.targets), tuple(maker.pieces), tuple(maker.moves), {}), inputs


class _Maker:
    def __init__(self, symbols: Mapping[str, int], stored_dtype: Callable[[str], str]) -> None:
        self._symbols = symbols
        self._stored_dtype = stored_dtype
        self.targets: list[Target] = []
        self.pieces: list[Piece] = []
        self.moves: list[Move] = []
        self.computed: list[Computed] = []

    def add_param(self, param: Param) -> None:
        shape = self._sizes(param.type.shape)
        target = self._add_target(Target(param.name, param.type.dtype, shape))
        self._place(param.recipe, views.contiguous(shape), _whole(shape), target, (param.type.dtype,))

    def add_inputs(self, computed: Computed) -> Inputs:
        """Temporary targets for what a computation reads, or for the part of it that `index` says."""
        recipe = computed.recipe
        values, scales = self._input(recipe.of, computed), self._input(recipe.scales, computed)
        zeros, groups = (
            None if part is None else self._input(part, computed) for part in (recipe.zeros, recipe.groups)
        )
        return Inputs(values, scales, zeros, groups)

    def _input(self, part: Recipe, computed: Computed) -> int:
        window = _whole(self._shape(part))
        if computed.index is not None:
            window = ((computed.index, 1), *window[1:])
        shape = tuple(length for _, length in window)
        dtype = self._dtype(part)
        target = self._add_target(Target(None, dtype, shape))
        self._place(part, views.contiguous(shape), window, target, (dtype,))
        return target

    def _add_target(self, target: Target) -> int:
        self.targets.append(target)
        return len(self.targets) - 1

    def _place(self, recipe: Recipe, destination: View, window: Window, target: int, casts: Casts) -> None:
        """Fill `destination`, of the window's shape, with the window of what the recipe makes."""
        if 0 in destination.shape:
            return
        leaf = self._leaf(recipe)
        if leaf is not None:
            origin, source, inner = leaf
            for dim, (start, length) in enumerate(window):
                source = views.narrow(source, dim, start, length)
            kept = _conversions(self._dtype(origin), (*inner, *casts))
            if isinstance(origin, Read):
                self.pieces.append(Piece(origin.tensor, source, target, destination, kept))
            else:
                self._compute(origin, source, target, destination, kept)
        elif isinstance(recipe, Slice):
            start, length = window[recipe.dim]
            moved = (start + self._slice_start(recipe), length)
            inside = (*window[: recipe.dim], moved, *window[recipe.dim + 1 :])
            self._place(recipe.of, destination, inside, target, casts)
        elif isinstance(recipe, Transpose):
            i, j = recipe.dim0, recipe.dim1
            exchanged = list(window)
            exchanged[i], exchanged[j] = exchanged[j], exchanged[i]
            self._place(recipe.of, views.transpose(destination, i, j), tuple(exchanged), target, casts)
        elif isinstance(recipe, Cast):
            self._place(recipe.of, destination, window, target, (recipe.dtype, *casts))
        elif isinstance(recipe, Concat):
            self._place_concat(recipe, destination, window, target, casts)
        elif isinstance(recipe, Stack):
            start, length = window[recipe.dim]
            inside = (*window[: recipe.dim], *window[recipe.dim + 1 :])
            for i in range(length):
                self._place(recipe.parts[start + i], views.select(destination, recipe.dim, i), inside, target, casts)
        elif isinstance(recipe, Each):
            start, length = window[recipe.dim]
            inside = (*window[: recipe.dim], *window[recipe.dim + 1 :])
            for i in range(length):
                part = recipes.nth(recipe, start + i)
                self._place(part, views.select(destination, recipe.dim, i), inside, target, casts)
        else:
            assert isinstance(recipe, Reshape), "verified: a tie is a recipe of its own"
            self._place_reshape(recipe, destination, window, target, casts)

    def _place_concat(self, recipe: Concat, destination: View, window: Window, target: int, casts: Casts) -> None:
        dim = recipe.dim
        first, length = window[dim]
        begin = 0
        for part in recipe.parts:
            end = begin + self._shape(part)[dim]
            low, high = max(begin, first), min(end, first + length)
            if low < high:
                inside = (*window[:dim], (low - begin, high - low), *window[dim + 1 :])
                self._place(part, views.narrow(destination, dim, low - first, high - low), inside, target, casts)
            begin = end

    def _compute(self, recipe: Dequantise, source: View, target: int, destination: View, casts: Casts) -> None:
        """Compute the elements that `source` views, one after the other in the first of three dimensions or more."""
        shape = self._shape(recipe)
        parts = views.split(source, destination, math.prod(shape[1:])) if len(shape) > 2 else None
        if parts is None:
            self.computed.append(Computed(recipe, None, source, target, destination, casts))
            return
        for index, inside, place in parts:
            self.computed.append(Computed(recipe, index, inside, target, place, casts))

    def _place_reshape(self, recipe: Reshape, destination: View, window: Window, target: int, casts: Casts) -> None:
        shape, inner = self._shape(recipe), self._shape(recipe.of)
        fitting = views.reshape(destination, inner) if window == _whole(shape) else None
        if fitting is not None:
            self._place(recipe.of, fitting, _whole(inner), target, casts)
            return
        temporary = self._add_target(Target(None, self._dtype(recipe.of), inner))
        self._place(recipe.of, views.contiguous(inner), _whole(inner), temporary, (self.targets[temporary].dtype,))
        view = views.contiguous(shape)
        for dim, (start, length) in enumerate(window):
            view = views.narrow(view, dim, start, length)
        kept = _conversions(self.targets[temporary].dtype, casts)
        self.moves.append(Move(temporary, view, target, destination, kept))

    def _leaf(self, recipe: Recipe) -> tuple[Read | Dequantise, View, Casts] | None:
        """What the recipe reads or computes, as a view of it, and its casts; None if it joins or isn't strided."""
        if isinstance(recipe, (Read, Dequantise)):
            return recipe, views.contiguous(self._shape(recipe)), ()
        if isinstance(recipe, (Concat, Stack, Each, Tie)):
            return None
        leaf = self._leaf(recipe.of)
        if leaf is None:
            return None
        origin, view, casts = leaf
        if isinstance(recipe, Cast):
            return origin, view, (*casts, recipe.dtype)
        if isinstance(recipe, Transpose):
            return origin, views.transpose(view, recipe.dim0, recipe.dim1), casts
        if isinstance(recipe, Slice):
            start, (length,) = self._slice_start(recipe), self._sizes((recipe.length,))
            return origin, views.narrow(view, recipe.dim, start, length), casts
        shape = self._sizes(recipe.shape)
        reshaped = views.reshape(view, shape) if 0 not in shape else views.contiguous(shape)
        return None if reshaped is None else (origin, reshaped, casts)

    def _slice_start(self, recipe: Slice) -> int:
        start, length = self._sizes((recipe.start, recipe.length))
        size = self._shape(recipe.of)[recipe.dim]
        if min(start, length) < 0 or start + length > size:
            message = f"a slice of {length} elements from {start} on leaves the {size} of dimension {recipe.dim}"
            raise BundleError("graph-invalid", message)
        return start

    def _shape(self, recipe: Recipe) -> Shape:
        if isinstance(recipe, Read):
            return recipe.shape
        if isinstance(recipe, Reshape):
            return self._sizes(recipe.shape)
        if isinstance(recipe, (Concat, Stack)):
            return self._joined_shape(recipe)
        assert not isinstance(recipe, Tie), "verified: a tie is a recipe of its own"
        if isinstance(recipe, Dequantise):
            return self._sizes(quantised.shape(recipe, *map(self._shape, recipes.parts(recipe))))
        inner = self._shape(recipe.of)
        if isinstance(recipe, Each):
            return (*inner[: recipe.dim], recipe.count, *inner[recipe.dim :])
        if isinstance(recipe, Slice):
            return (*inner[: recipe.dim], *self._sizes((recipe.length,)), *inner[recipe.dim + 1 :])
        return views.swap(inner, recipe.dim0, recipe.dim1) if isinstance(recipe, Transpose) else inner

    def _joined_shape(self, recipe: Concat | Stack) -> Shape:
        first, dim = self._shape(recipe.parts[0]), recipe.dim
        if isinstance(recipe, Stack):
            return (*first[:dim], len(recipe.parts), *first[dim:])
        return (*first[:dim], sum(self._shape(part)[dim] for part in recipe.parts), *first[dim + 1 :])

    def _dtype(self, recipe: Recipe) -> Dtype:
        """The element type of what the recipe makes; where parts differ, one that holds them all."""
        if isinstance(recipe, Cast):
            return recipe.dtype
        if isinstance(recipe, Read):
            return msgspec.convert(self._stored_dtype(recipe.tensor), Dtype)
        if isinstance(recipe, Dequantise):
            return "float32"
        if isinstance(recipe, (Concat, Stack, Each)):
            parts = [recipes.nth(recipe, i) for i in range(recipe.count)] if isinstance(recipe, Each) else recipe.parts
            found: set[Dtype] = {self._dtype(part) for part in parts}
            widest: Dtype = "float64" if "float64" in found else "float32"
            return found.pop() if len(found) == 1 else widest
        assert not isinstance(recipe, Tie), "verified: a tie is a recipe of its own"
        return self._dtype(recipe.of)

    def _sizes(self, sizes: tuple[Expr, ...]) -> Shape:
        try:
            return tuple(size if isinstance(size, int) else exprs.evaluate(size, self._symbols) for size in sizes)
        except KeyError as error:
            raise BundleError("symbol-unbound", f"symbol {error} has no value") from None


def _whole(shape: Shape) -> Window:
    return tuple((0, size) for size in shape)


def _conversions(dtype: str, casts: Casts) -> Casts:
    """The casts without those to the type that a value already has."""
    kept: list[Dtype] = []
    for cast in casts:
        if cast != (kept[-1] if kept else dtype):
            kept.append(cast)
    return tuple(kept)
