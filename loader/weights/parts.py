"""Recipes taken apart: which elements of which stored tensor go where in which param.

A recipe is followed from its root to what it reads, with the part of the destination that each branch fills. A
branch without a join is a strided view of one stored tensor, so nearly all of it is arithmetic: one part for each
tensor read. Only a join under a reshape that no strides describe is made in a temporary tensor and moved afterwards.

Values that a checkpoint holds in few bits are computed, matrix by matrix, from tensors that are read for it
(`Assembly.add_inputs`) and gone afterwards. Recipes are those of a graph that is bound to its rank: all sizes are
numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import msgspec

from precast.ir.errors import BundleError, RecipeError
from precast.ir.graph import schema as ir
from precast.ir.graph import symbols
from precast.ir.weights import quantised, recipes
from precast.loader.weights import views
from precast.loader.weights.narrow import Computation, narrowed
from precast.loader.weights.repacked import PER_WORD, Words
from precast.loader.weights.views import Shape, View

Region = tuple[tuple[int, int], ...]
"""The part of a recipe's result that is wanted: start and length in each dimension."""

Casts = tuple[ir.Dtype, ...]
"""The element types that a value is converted to, one after the other, the target's last; none: it stays as it is."""


Inputs = dict[str, int]
"""The targets of what a computation reads, by the name of the recipe's part."""


class Target(msgspec.Struct, frozen=True):
    """A tensor to be filled: a param, or a temporary one without a name. Contiguous."""

    name: str | None
    dtype: ir.Dtype
    shape: Shape


class Part(msgspec.Struct, frozen=True):
    """Elements of a stored tensor, by its name in the recipes, for elements of a target; both views have one shape.

    `repack`: they are words that become others. Where these are exchanged, the views have three dimensions, of which
    the second are the eight words that are read, and written, together.
    """

    tensor: str
    source: View
    target: int
    destination: View
    casts: Casts
    repack: Words | None = None


class Move(msgspec.Struct, frozen=True):
    """Elements of a temporary target for elements of an earlier one, of its type, once the temporary one is filled."""

    source: int
    view: View
    target: int
    destination: View


class Computed(msgspec.Struct, frozen=True):
    """Elements of a dequantised tensor, or of a part of a quantised one, for elements of a target. `index`: all of them
    are in that part of its first dimension, and `source` views that part alone.
    """

    recipe: Computation
    index: int | None
    source: View
    target: int
    destination: View
    casts: Casts


def param_parts(params: Iterable[ir.Param], stored_dtype: Callable[[str], str]) -> Assembly:
    """Take the recipes of `params` apart; `stored_dtype` gives the element type of a stored tensor by its name.

    Raises BundleError (graph-invalid) for a recipe that doesn't make what its param is, and (symbol-unbound) for a size
    that is no number.
    """
    assembly = Assembly(stored_dtype)
    for param in params:
        try:
            if not isinstance(param.recipe, ir.Tie):
                assembly.add_param(param)
        except BundleError as error:
            raise error.inside(f"param {param.name}") from None
    return assembly


class Assembly:
    """The targets, and what fills them: parts of stored tensors, what is computed, and, after both, moves in order;
    float32 targets that are `filled` are one number."""

    def __init__(self, stored_dtype: Callable[[str], str]) -> None:
        self._stored_dtype = stored_dtype
        self.targets: list[Target] = []
        self.parts: list[Part] = []
        self.computed: list[Computed] = []
        self.moves: list[Move] = []
        self.filled: dict[int, float] = {}

    def add_param(self, param: ir.Param) -> None:
        """A target for the param, and what fills it; a scale that no tensor is has its default."""
        shape = _shape(param.recipe)
        if shape != param.type.shape:
            wanted = ", ".join(map(symbols.text, param.type.shape))
            raise BundleError("graph-invalid", f"its recipe makes {list(shape)}, expected [{wanted}]")
        target = self._add_target(Target(param.name, param.type.dtype, shape))
        if isinstance(param.recipe, ir.Scale):
            self.filled[target] = param.recipe.default
        else:
            self._place(param.recipe, views.contiguous(shape), _whole(shape), target, (param.type.dtype,))

    def add_inputs(self, computed: Computed, dtype: ir.Dtype | None = None) -> Inputs:
        """Temporary targets for what a computation reads, or for the part of it that `index` says; of the type `dtype`,
        or of those that it computes with."""
        return {name: self._input(part, computed, dtype) for name, part in _inputs(computed.recipe).items()}

    def _input(self, part: ir.Recipe, computed: Computed, wanted: ir.Dtype | None) -> int:
        region = _whole(_shape(part))
        if computed.index is not None:
            region = ((computed.index, 1), *region[1:])
        shape = tuple(length for _, length in region)
        stored = recipes.dtype(part)
        # Scales are used in float32, whatever floating type is stored, or exponents.
        dtype: ir.Dtype = wanted or ("float32" if stored is None or stored == "float8_e8m0fnu" else stored)
        target = self._add_target(Target(None, dtype, shape))
        self._place(part, views.contiguous(shape), region, target, (dtype,))
        return target

    def _add_target(self, target: Target) -> int:
        self.targets.append(target)
        return len(self.targets) - 1

    def _place(self, recipe: ir.Recipe, destination: View, region: Region, target: int, casts: Casts) -> None:
        """Fill `destination`, of the region's shape, with the region of what the recipe makes."""
        if 0 in destination.shape:
            return
        leaf = _leaf(recipe)
        if leaf is not None:
            origin, source, inner = leaf
            source = _narrowed(source, region)
            if isinstance(origin, ir.Read):
                kept = _conversions(self._stored_dtype(origin.tensor), (*inner, *casts))
                self.parts.append(Part(origin.tensor, source, target, destination, kept))
            else:
                kept = _conversions(_computed_dtype(origin), (*inner, *casts))
                self._compute(origin, source, target, destination, kept)
        elif isinstance(recipe, ir.Slice):
            start, length = region[recipe.dim]
            moved = (start + _number(recipe.start), length)
            inside = (*region[: recipe.dim], moved, *region[recipe.dim + 1 :])
            self._place(recipe.of, destination, inside, target, casts)
        elif isinstance(recipe, ir.Transpose):
            i, j = recipe.dim0, recipe.dim1
            self._place(recipe.of, views.transpose(destination, i, j), views.swap(region, i, j), target, casts)
        elif isinstance(recipe, ir.Cast):
            self._place(recipe.of, destination, region, target, (recipe.dtype, *casts))
        elif isinstance(recipe, ir.Concat):
            self._place_concat(recipe, destination, region, target, casts)
        elif isinstance(recipe, (ir.Stack, ir.Each)):
            start, length = region[recipe.dim]
            inside = (*region[: recipe.dim], *region[recipe.dim + 1 :])
            if isinstance(recipe, ir.Each) and isinstance(recipe.of, ir.Read):
                self._place_numbered(
                    recipe, recipe.of, range(start, start + length), destination, inside, target, casts
                )
                return
            for i in range(length):
                part = recipe.parts[start + i] if isinstance(recipe, ir.Stack) else recipes.nth(recipe, start + i)
                self._place(part, views.select(destination, recipe.dim, i), inside, target, casts)
        elif isinstance(recipe, ir.Repeat):
            self._place_repeat(recipe, destination, region, target, casts)
        elif isinstance(recipe, ir.Repack):
            self._place_repack(recipe, destination, region, target, casts)
        else:
            assert isinstance(recipe, ir.Reshape), "verified: a tie or a scale is a recipe of its own"
            self._place_reshape(recipe, destination, region, target, casts)

    def _place_numbered(
        self, each: ir.Each, read: ir.Read, numbers: range, destination: View, region: Region, target: int, casts: Casts
    ) -> None:
        """Stored tensors of one shape, each one part: those of experts, by tens of thousands."""
        source = _narrowed(views.contiguous(_shape(read)), region)
        for i, number in enumerate(numbers):
            tensor = recipes.numbered(read, each.start + number).tensor
            kept = _conversions(self._stored_dtype(tensor), casts)
            self.parts.append(Part(tensor, source, target, views.select(destination, each.dim, i), kept))

    def _place_concat(self, recipe: ir.Concat, destination: View, region: Region, target: int, casts: Casts) -> None:
        dim = recipe.dim
        first, length = region[dim]
        begin = 0
        for part in recipe.parts:
            end = begin + _shape(part)[dim]
            low, high = max(begin, first), min(end, first + length)
            if low < high:
                inside = (*region[:dim], (low - begin, high - low), *region[dim + 1 :])
                self._place(part, views.narrow(destination, dim, low - first, high - low), inside, target, casts)
            begin = end

    def _compute(self, recipe: Computation, source: View, target: int, destination: View, casts: Casts) -> None:
        """Compute the elements that `source` views, and few others, one after the other in the first of three
        dimensions or more.
        """
        shapes = {name: _shape(part) for name, part in _inputs(recipe).items()}
        recipe, source = narrowed(recipe, _shape(recipe), shapes, source)
        shape = _shape(recipe)
        parts = views.split(source, destination, math.prod(shape[1:])) if len(shape) > 2 else None
        if parts is None:
            self.computed.append(Computed(recipe, None, source, target, destination, casts))
            return
        for index, inside, place in parts:
            self.computed.append(Computed(recipe, index, inside, target, place, casts))

    def _place_repeat(self, recipe: ir.Repeat, destination: View, region: Region, target: int, casts: Casts) -> None:
        """What is repeated is made once, in a temporary target, and moved with a step of 0 between its copies."""
        dim, count = recipe.dim, _number(recipe.count)
        start, length = region[dim]
        first = start // count
        inside = (*region[:dim], (first, -(-(start + length) // count) - first), *region[dim + 1 :])
        shape = tuple(size for _, size in inside)
        temporary = self._add_target(Target(None, casts[-1], shape))
        self._place(recipe.of, views.contiguous(shape), inside, temporary, casts)
        whole, place = views.contiguous(shape), start - first * count
        for index, elements, copies, at in _runs(place, length, count):
            source = views.repeated(views.narrow(whole, dim, index, elements), dim, copies)
            wanted = views.divided(views.narrow(destination, dim, at, elements * copies), dim, copies)
            self.moves.append(Move(temporary, source, target, wanted))

    def _place_repack(self, recipe: ir.Repack, destination: View, region: Region, target: int, casts: Casts) -> None:
        read = recipe.of
        assert isinstance(read, ir.Read), "verified"
        stored = views.contiguous(_shape(read))
        if recipe.part == "groups":  # whose words have a group in each row of the others
            destination, region = views.transpose(destination, 0, 1), views.swap(region, 0, 1)
        if recipe.part == "zeros":
            source = _narrowed(views.transpose(stored, 0, 1), region)
            self._add_words(recipe, read, source, target, destination, casts)
        else:
            self._place_exchanged(recipe, read, stored.shape[1], destination, region, target, casts)

    def _place_exchanged(
        self, recipe: ir.Repack, read: ir.Read, words: int, destination: View, region: Region, target: int, casts: Casts
    ) -> None:
        """Rows of the result, each of one half byte of the stored rows' `words`. Those that begin or end within the
        eight of a word are taken from a temporary target that has them all."""
        (row, rows), (column, columns) = region
        if row % PER_WORD or rows % PER_WORD:
            first = row // PER_WORD * PER_WORD
            taken = -(-(row + rows) // PER_WORD) * PER_WORD - first
            whole, inside = views.contiguous((taken, columns)), ((first, taken), (column, columns))
            temporary = self._add_target(Target(None, casts[-1], whole.shape))
            self._place_exchanged(recipe, read, words, whole, inside, temporary, casts)
            self.moves.append(Move(temporary, views.narrow(whole, 0, row - first, rows), target, destination))
            return
        shape, step = (columns, PER_WORD, rows // PER_WORD), destination.strides
        source = View(PER_WORD * column * words + row // PER_WORD, shape, (PER_WORD * words, words, 1))
        destination = View(destination.offset, shape, (step[1], step[0], PER_WORD * step[0]))
        self._add_words(recipe, read, source, target, destination, casts)

    def _add_words(
        self, recipe: ir.Repack, read: ir.Read, source: View, target: int, destination: View, casts: Casts
    ) -> None:
        kept = _conversions(self._stored_dtype(read.tensor), casts)
        self.parts.append(Part(read.tensor, source, target, destination, kept, recipe.part))

    def _place_reshape(self, recipe: ir.Reshape, destination: View, region: Region, target: int, casts: Casts) -> None:
        shape, inner = _shape(recipe), _shape(recipe.of)
        fitting = views.reshape(destination, inner) if region == _whole(shape) else None
        if fitting is not None:
            self._place(recipe.of, fitting, _whole(inner), target, casts)
            return
        # Converted on the way into the temporary target: casts are of each element, wherever it stands.
        temporary = self._add_target(Target(None, casts[-1], inner))
        self._place(recipe.of, views.contiguous(inner), _whole(inner), temporary, casts)
        view = views.contiguous(shape)
        for dim, (start, length) in enumerate(region):
            view = views.narrow(view, dim, start, length)
        self.moves.append(Move(temporary, view, target, destination))


def _narrowed(view: View, region: Region) -> View:
    for dim, (start, length) in enumerate(region):
        if start or length != view.shape[dim]:
            view = views.narrow(view, dim, start, length)
    return view


def _runs(start: int, length: int, count: int) -> Iterator[tuple[int, int, int, int]]:
    """Elements `start .. start + length` of a row in which each element stands `count` times: (first element, elements,
    copies of each, where they begin in what is wanted)."""
    done = 0
    while done < length:
        index, skipped = divmod(start + done, count)
        elements = 0 if skipped else (length - done) // count
        copies = count if elements else min(count - skipped, length - done)
        yield index, max(elements, 1), copies, done
        done += max(elements, 1) * copies


def _computed_dtype(recipe: Computation) -> ir.Dtype:
    return "float8_e4m3fn" if isinstance(recipe, ir.Quantise) and recipe.part == "values" else "float32"


def _inputs(recipe: Computation) -> dict[str, ir.Recipe]:
    """The parts of the recipe that are there, by name."""
    return {name: part for name in quantised.PARTS if (part := getattr(recipe, name, None)) is not None}


def _leaf(recipe: ir.Recipe) -> tuple[ir.Read | Computation, View, Casts] | None:
    """What the recipe reads or computes, as a view of it, and its casts; None if it joins, repacks or isn't strided."""
    if isinstance(recipe, (ir.Read, ir.Dequantise, ir.Quantise)):
        return recipe, views.contiguous(_shape(recipe)), ()
    if isinstance(recipe, (ir.Concat, ir.Stack, ir.Each, ir.Repeat, ir.Repack, ir.Tie, ir.Scale)):
        return None
    leaf = _leaf(recipe.of)
    if leaf is None:
        return None
    origin, view, casts = leaf
    if isinstance(recipe, ir.Cast):
        return origin, view, (*casts, recipe.dtype)
    if isinstance(recipe, ir.Transpose):
        return origin, views.transpose(view, recipe.dim0, recipe.dim1), casts
    if isinstance(recipe, ir.Slice):
        return origin, views.narrow(view, recipe.dim, _number(recipe.start), _number(recipe.length)), casts
    shape = _shape(recipe)
    reshaped = views.reshape(view, shape) if 0 not in shape else views.contiguous(shape)
    return None if reshaped is None else (origin, reshaped, casts)


def _shape(recipe: ir.Recipe) -> Shape:
    try:
        return tuple(map(_number, recipes.shape(recipe)))
    except RecipeError as error:
        raise BundleError("graph-invalid", str(error)) from None


def _number(size: ir.Expr) -> int:
    if not isinstance(size, int):
        raise BundleError("symbol-unbound", f"{symbols.text(size)} has no value in a recipe")
    return size


def _whole(shape: Shape) -> Region:
    return tuple((0, size) for size in shape)


def _conversions(dtype: str, casts: Casts) -> Casts:
    """The casts without those to the type that a value already has."""
    kept: list[ir.Dtype] = []
    for cast in casts:
        if cast != (kept[-1] if kept else dtype):
            kept.append(cast)
    return tuple(kept)
