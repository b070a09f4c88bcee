"""Recipes: what they read, what comes out, and whether a checkpoint can honour them.

`check` compares all recipes of a graph with the headers of a checkpoint and reports everything that is wrong at
once, before a byte of any tensor is read.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from precast.ir import limits
from precast.ir.errors import RecipeError, WeightsError, some
from precast.ir.graph import schema, symbols
from precast.ir.manifest import Checkpoint
from precast.ir.patterns import matches
from precast.ir.weights import group_order, quantised, scales
from precast.ir.weights.checkpoint import CheckpointFiles, StoredDtype, StoredTensor, at_once
from precast.ir.weights.quantised import expect

ANY_FLOAT: tuple[StoredDtype, ...] = ("float64", "float32", "float16", "bfloat16", "F8_E8M0")
"""The stored dtypes that a `Read` without a dtype accepts."""
BYTES: tuple[StoredDtype, ...] = ("uint8", "int8", "F8_E8M0")
"""Those that a `Read` of uint8 accepts: their bytes are what is read. Values of four bits, two in a byte, are stored as
int8 by some, and exponents as float8_e8m0fnu."""
EXPONENTS: tuple[StoredDtype, ...] = ("F8_E8M0", "uint8")
"""Those that a `Read` of float8_e8m0fnu accepts: some store the same bytes as uint8."""

_TAKEN: Mapping[str | None, tuple[StoredDtype, ...]] = {None: ANY_FLOAT, "uint8": BYTES, "float8_e8m0fnu": EXPONENTS}
_SEEN_AS: Mapping[str | None, StoredDtype] = {"uint8": "uint8", "float8_e8m0fnu": "F8_E8M0"}
"""What the bytes of a tensor are, where a `Read` says it and the file may say something else."""

_PARTS = quantised.PARTS
"""The fields that hold a recipe, in the order in which what they make is handed on."""

Kind = Literal["missing", "shape", "dtype", "untied", "order", "unexpected"]


_TITLES: dict[Kind, str] = {
    # in the order of the report
    "missing": "missing",
    "shape": "of a wrong shape",
    "dtype": "of a wrong dtype",
    "untied": "tied by the config and not equal",
    "order": "of groups in another order than the config's desc_act says (if it is false, build with true)",
    "unexpected": "unexpected",
}
_COMPARED_BYTES = 1 << 24


class Problem(msgspec.Struct, frozen=True):
    """One way in which a checkpoint doesn't fit the recipes; `tensor` is the name in the recipe or the checkpoint."""

    kind: Kind
    tensor: str
    message: str


# --- what a recipe is ------------------------------------------------------------------------------------------


def parts(recipe: schema.Recipe) -> tuple[schema.Recipe, ...]:
    """The recipes that this one is made of, in order; those of an `Each` as they are written, once."""
    named = (getattr(recipe, name, None) for name in _PARTS)
    return (*getattr(recipe, "parts", ()), *(part for part in named if part is not None))


def leaves(recipe: schema.Recipe) -> tuple[schema.Read, ...]:
    """What the recipe reads, in order, that of an `Each` for each number; nothing for `Tie`."""
    return tuple(each_leaf(recipe))


def each_leaf(recipe: schema.Recipe) -> Iterator[schema.Read]:
    """As `leaves`, one by one: nobody holds all that an `Each` stands for."""
    if isinstance(recipe, schema.Read):
        yield recipe
    elif isinstance(recipe, schema.Each):
        written = leaves(recipe.of)  # there is no Each inside
        for index in range(recipe.count):
            yield from (numbered(read, recipe.start + index) for read in written)
    else:
        for part in parts(recipe):
            yield from each_leaf(part)


def nth(each: schema.Each, index: int) -> schema.Recipe:
    """Part `index` of those that `each` stands for, counted from 0."""
    return map_reads(each.of, lambda read: numbered(read, each.start + index))


def numbered(read: schema.Read, number: int) -> schema.Read:
    """What an `Each` reads for a number."""
    return schema.Read(read.tensor.replace("*", str(number)), read.shape, read.dtype)


def map_reads(recipe: schema.Recipe, made: Callable[[schema.Read], schema.Recipe]) -> schema.Recipe:
    """The recipe with what `made` gives in place of each `Read`."""
    if isinstance(recipe, schema.Read):
        return made(recipe)
    given = {name: part for name in _PARTS if (part := getattr(recipe, name, None)) is not None}
    changes: dict[str, object] = {name: map_reads(part, made) for name, part in given.items()}
    if isinstance(recipe, (schema.Concat, schema.Stack)):
        changes["parts"] = tuple(map_reads(part, made) for part in recipe.parts)
    return msgspec.structs.replace(recipe, **changes)


def in_world(recipe: schema.Recipe, world: Mapping[str, schema.Expr]) -> schema.Recipe:
    """The recipe with values in place of the symbols in its sizes."""
    changes: dict[str, object] = {
        name: in_world(part, world) for name in _PARTS if (part := getattr(recipe, name, None)) is not None
    }
    if isinstance(recipe, (schema.Concat, schema.Stack)):
        changes["parts"] = tuple(in_world(part, world) for part in recipe.parts)
    elif isinstance(recipe, schema.Slice):
        changes |= {name: symbols.substitute(getattr(recipe, name), world) for name in ("start", "length")}
    elif isinstance(recipe, schema.Reshape):
        changes["shape"] = tuple(symbols.substitute(size, world) for size in recipe.shape)
    elif isinstance(recipe, schema.Repeat):
        changes["count"] = symbols.substitute(recipe.count, world)
    return msgspec.structs.replace(recipe, **changes)


def plain(recipe: schema.Recipe) -> schema.Recipe:
    """What makes the same in the fewest steps, of a recipe whose sizes are numbers: nothing that takes all there is,
    joins one part, or cuts a join whose parts can be cut instead.

    A recipe that doesn't fit together is returned as it is: `shape` says why.
    """
    try:
        return _plain(recipe)
    except (RecipeError, IndexError):
        return recipe


def _plain(recipe: schema.Recipe) -> schema.Recipe:
    changes: dict[str, object] = {
        name: _plain(part) for name in _PARTS if (part := getattr(recipe, name, None)) is not None
    }
    if isinstance(recipe, (schema.Concat, schema.Stack)):
        changes["parts"] = tuple(map(_plain, recipe.parts))
    made: schema.Recipe = msgspec.structs.replace(recipe, **changes) if changes else recipe
    if isinstance(made, schema.Slice):
        return _taken(made.of, made.dim, made.start, made.length)
    if isinstance(made, schema.Concat):
        return _concatenated(made.parts, made.dim)
    return made.of if isinstance(made, schema.Repeat) and made.count == 1 else made


def _taken(of: schema.Recipe, dim: int, start: schema.Expr, length: schema.Expr) -> schema.Recipe:
    """Elements of a recipe, from the parts of a join that have them."""
    size = shape(of)[dim]
    if start == 0 and length == size:
        return of
    if isinstance(of, schema.Concat) and of.dim == dim and isinstance(start, int) and isinstance(length, int):
        parts, place = [], 0
        for part in of.parts:
            end = place + _known(shape(part)[dim])
            low, high = max(start, place), min(start + length, end)
            if low < high:
                parts.append(_taken(part, dim, low - place, high - low))
            place = end
        if parts:
            return _concatenated(tuple(parts), dim)
    return schema.Slice(of, dim, start, length)


def _concatenated(parts: tuple[schema.Recipe, ...], dim: int) -> schema.Recipe:
    """The parts in a row; those that were one are one again."""
    joined: list[schema.Recipe] = []
    for part in parts:
        last = joined[-1] if joined else None
        if isinstance(last, schema.Slice) and isinstance(part, schema.Slice) and _follows(last, part, dim):
            joined[-1] = _taken(last.of, dim, last.start, symbols.add(last.length, part.length))
        else:
            joined.append(part)
    return joined[0] if len(joined) == 1 else schema.Concat(tuple(joined), dim)


def _follows(last: schema.Slice, part: schema.Slice, dim: int) -> bool:
    end = symbols.add(last.start, last.length)
    return last.of == part.of and last.dim == part.dim == dim and symbols.equal(end, part.start)


def _known(size: schema.Expr) -> int:
    expect(isinstance(size, int), f"a part of {symbols.text(size)} elements, expected a number")
    assert isinstance(size, int)
    return size


def sizes(recipe: schema.Recipe) -> Iterator[schema.Expr]:
    """The sizes that a recipe writes out: starts, lengths, counts of `Repeat`, and shapes of `Reshape`."""
    if isinstance(recipe, schema.Slice):
        yield from (recipe.start, recipe.length)
    elif isinstance(recipe, schema.Repeat):
        yield recipe.count
    elif isinstance(recipe, schema.Reshape):
        yield from recipe.shape
    for part in parts(recipe):
        yield from sizes(part)


def shape(recipe: schema.Recipe) -> tuple[schema.Expr, ...]:
    """The sizes of what the recipe makes.

    Raises RecipeError where parts don't fit each other, for a scale that is one of them, and for a `Tie`, which has the
    shape of its param.
    """
    if isinstance(recipe, schema.Read):
        expect(all(size >= 0 for size in recipe.shape), f"read of {recipe.tensor}: a negative size")
        return recipe.shape
    if isinstance(recipe, schema.Tie):
        raise _part_tied(recipe)
    if isinstance(recipe, schema.Scale):
        return scales.shape(recipe)
    if any(isinstance(part, schema.Scale) for part in parts(recipe)):
        raise RecipeError("a scale is a recipe of its own, never a part of one")
    if isinstance(recipe, (schema.Concat, schema.Stack)):
        return _joined(recipe)
    if isinstance(recipe, schema.Dequantise):
        return quantised.shape(recipe, *map(shape, parts(recipe)))
    found = shape(recipe.of)
    if isinstance(recipe, schema.Quantise):
        return quantised.shape_at_load(recipe, found)
    if isinstance(recipe, schema.Each):
        return _repeated(recipe, found)
    if isinstance(recipe, schema.Slice):
        return _sliced(recipe, found)
    if isinstance(recipe, schema.Repeat):
        _axis("repeat", recipe.dim, len(found))
        expect(not isinstance(recipe.count, int) or recipe.count > 0, f"repeat: {symbols.text(recipe.count)} times")
        return (*found[: recipe.dim], symbols.mul(found[recipe.dim], recipe.count), *found[recipe.dim + 1 :])
    if isinstance(recipe, schema.Transpose):
        _axis("transpose", recipe.dim0, len(found))
        _axis("transpose", recipe.dim1, len(found))
        sizes = list(found)
        sizes[recipe.dim0], sizes[recipe.dim1] = sizes[recipe.dim1], sizes[recipe.dim0]
        return tuple(sizes)
    if isinstance(recipe, schema.Reshape):
        same = symbols.equal(symbols.numel(found), symbols.numel(recipe.shape))
        expect(same, f"reshape: {_text(found)} has other elements than {_text(recipe.shape)}")
        return recipe.shape
    return found


def dtype(recipe: schema.Recipe) -> schema.ReadDtype | None:
    """The element type of what the recipe makes; None: the one that the checkpoint has.

    Raises RecipeError for parts of different types, and for a `Tie`, which has the type of its param.
    """
    if isinstance(recipe, (schema.Read, schema.Cast)):
        return recipe.dtype
    if isinstance(recipe, schema.Tie):
        raise _part_tied(recipe)
    if isinstance(recipe, (schema.Concat, schema.Stack)):
        found: set[schema.ReadDtype | None] = {dtype(part) for part in recipe.parts}
        expect(len(found) == 1, f"parts of different dtypes: {', '.join(sorted(map(str, found)))}")
        return found.pop()
    if isinstance(recipe, schema.Dequantise):
        return quantised.dtype(recipe, *map(dtype, parts(recipe)))
    if isinstance(recipe, schema.Scale):
        return "float32"
    if isinstance(recipe, schema.Quantise):
        return quantised.dtype_at_load(recipe, dtype(recipe.of))
    return dtype(recipe.of)


def _part_tied(recipe: schema.Tie) -> RecipeError:
    return RecipeError(f"tie to {recipe.param}: a tie is a recipe of its own, never a part of one")


def _joined(recipe: schema.Concat | schema.Stack) -> tuple[schema.Expr, ...]:
    kind = type(recipe).__name__.lower()
    expect(len(recipe.parts) > 0, f"{kind}: no parts")
    shapes = [shape(part) for part in recipe.parts]
    first, dim = shapes[0], recipe.dim
    stacked = isinstance(recipe, schema.Stack)
    _axis(kind, dim, len(first) + stacked)
    for other in shapes[1:]:
        fits = len(other) == len(first) and all(
            symbols.equal(a, b) for i, (a, b) in enumerate(zip(first, other, strict=True)) if stacked or i != dim
        )
        expect(fits, f"{kind} along {dim}: {_text(first)} and {_text(other)} don't fit")
    if stacked:
        return (*first[:dim], len(shapes), *first[dim:])
    return (*first[:dim], symbols.add(*(sizes[dim] for sizes in shapes)), *first[dim + 1 :])


def _repeated(recipe: schema.Each, found: tuple[schema.Expr, ...]) -> tuple[schema.Expr, ...]:
    _axis("each", recipe.dim, len(found) + 1)
    in_bounds = 0 < recipe.count <= limits.MAX_EACH and recipe.start >= 0
    expect(in_bounds, f"each: {recipe.count} parts from {recipe.start} on, expected 1 to {limits.MAX_EACH}")
    expect(not _repeats(recipe.of), "each: another each inside of it")
    return (*found[: recipe.dim], recipe.count, *found[recipe.dim :])


def _repeats(recipe: schema.Recipe) -> bool:
    return isinstance(recipe, schema.Each) or any(map(_repeats, parts(recipe)))


def _sliced(recipe: schema.Slice, found: tuple[schema.Expr, ...]) -> tuple[schema.Expr, ...]:
    _axis("slice", recipe.dim, len(found))
    start, length, size = recipe.start, recipe.length, found[recipe.dim]
    for bound in (start, length):
        expect(not isinstance(bound, int) or bound >= 0, f"slice: {bound} is negative")
    if isinstance(start, int) and isinstance(length, int) and isinstance(size, int):
        expect(
            start + length <= size, f"slice: {start} and {length} more are past the {size} of dimension {recipe.dim}"
        )
    return (*found[: recipe.dim], length, *found[recipe.dim + 1 :])


def _axis(kind: str, dim: int, rank: int) -> None:
    expect(0 <= dim < rank, f"{kind}: dimension {dim} is not one of {rank}")


def _text(sizes: Sequence[schema.Expr]) -> str:
    return "[" + ", ".join(symbols.text(size) for size in sizes) + "]"


# --- recipes and a checkpoint ----------------------------------------------------------------------------------


def resolve(name: str, stored: Container[str], rules: Checkpoint) -> str | None:
    """The checkpoint's name for what a recipe calls `name`, or None where it has none.

    The name itself, the name with one of the optional prefixes put before it or taken off, or with another prefix in
    place of its own; or, likewise, another name that is tied to it.
    """
    if name in stored:
        return name
    names = itertools.chain((name,), (second for second, first in rules.tied.items() if first == name))
    spelled = (candidate for one in names for candidate in _spellings(one, rules))
    next(spelled)  # the name itself
    return next((candidate for candidate in spelled if candidate in stored), None)


def scale_tensor(recipe: schema.Scale, stored: Container[str], rules: Checkpoint) -> str | None:
    """The checkpoint's name for the tensor that a scale is, or None where it has none."""
    return next((name for one in recipe.tensors if (name := resolve(one, stored, rules)) is not None), None)


def problems(graph: schema.Graph, rules: Checkpoint, files: CheckpointFiles) -> list[Problem]:
    """What keeps `files` from being loaded by the graph's recipes, up to `limits.MAX_PROBLEMS`: missing tensors, then
    those of a wrong shape or dtype, in the order of the params, then tied ones that differ, groups that are not in
    order, and unexpected ones, in the order of the files. Empty: it fits. Only headers are read, but for tied tensors
    that are stored twice, and tensors of groups that no recipe reads.
    """
    expected: set[str] = set()
    found = list(itertools.islice(_read_problems(graph, rules, files, expected), limits.MAX_PROBLEMS))
    if len(found) == limits.MAX_PROBLEMS:
        return _sorted(found)  # what is unexpected, nobody knows
    for second, first in rules.tied.items():
        names = [resolve(name, files.tensors, msgspec.structs.replace(rules, tied={})) for name in (second, first)]
        expected.update(name for name in names if name is not None)
        if None not in names and not _equal(files, *(files.tensors[name] for name in names if name is not None)):
            found.append(Problem("untied", str(names[0]), f"expected the content of {names[1]}, to which it is tied"))
    for look in (_disordered, _unexpected):
        found += itertools.islice(look(rules, files, expected), limits.MAX_PROBLEMS)
    return _sorted(found)


def _read_problems(
    graph: schema.Graph, rules: Checkpoint, files: CheckpointFiles, expected: set[str]
) -> Iterator[Problem]:
    """What is wrong with the tensors that recipes read; those that are there are added to `expected`."""
    names: dict[str, str | None] = {}
    yield from _scale_problems(graph, rules, files, expected)
    for param in graph.params:
        if isinstance(param.recipe, schema.Tie):
            # The same tensor under its second name; some writers store it, and no reader needs it.
            expected.update(_spellings(param.name, rules))
        for read in each_leaf(param.recipe):
            if read.tensor not in names:
                names[read.tensor] = resolve(read.tensor, files.tensors, rules)
            name = names[read.tensor]
            if name is None:
                wanted = f"{read.dtype or 'floating point'} {_text(read.shape)}"
                yield Problem("missing", read.tensor, f"expected {wanted}")
            else:
                expected.add(name)
                yield from _mismatches(read, name, files.tensors[name])


def _scale_problems(
    graph: schema.Graph, rules: Checkpoint, files: CheckpointFiles, expected: set[str]
) -> Iterator[Problem]:
    """Scales that are not one number, and those that are missing where others are there."""
    wanted = [param.recipe for param in graph.params if isinstance(param.recipe, schema.Scale)]
    found = [scale_tensor(recipe, files.tensors, rules) for recipe in wanted]
    if not any(found):
        return
    for recipe, name in zip(wanted, found, strict=True):
        if name is None:
            yield Problem("missing", recipe.tensors[0], "expected floating point [], as there are other scales")
            continue
        expected.add(name)
        stored = files.tensors[name]
        if set(stored.shape) - {1}:
            yield Problem("shape", name, f"expected one number, found {_text(stored.shape)}")
        if stored.dtype not in ANY_FLOAT:
            yield Problem("dtype", name, f"expected {' or '.join(ANY_FLOAT)}, found {stored.dtype}")


def _disordered(rules: Checkpoint, files: CheckpointFiles, expected: set[str]) -> Iterator[Problem]:
    """The tensors of groups that nothing reads, because groups are in order, where they say something else."""
    patterns = rules.groups_in_order
    if not patterns:
        return
    sizes = {
        name: size
        for name in _others(files, expected, len(patterns))
        for pattern, size in patterns.items()
        if matches(pattern, name)
    }
    faults = at_once(files.folder, lambda name: group_order.fault(files, name, sizes[name]), list(sizes))
    for name, fault in zip(sizes, faults, strict=True):
        if fault:
            yield Problem("order", name, fault)


def _unexpected(rules: Checkpoint, files: CheckpointFiles, expected: set[str]) -> Iterator[Problem]:
    """The tensors that nothing reads and no pattern passes over."""
    patterns = (*rules.ignored, *rules.unused)
    for name in _others(files, expected, len(patterns)):
        if not any(matches(pattern, name) for pattern in patterns):
            tensor = files.tensors[name]
            yield Problem("unexpected", name, f"{tensor.dtype} {_text(tensor.shape)} in {tensor.file}")


def _others(files: CheckpointFiles, expected: set[str], num_patterns: int) -> list[str]:
    """The tensors that nothing reads. Raises WeightsError where they are too many for so many patterns."""
    others = [name for name in files.tensors if name not in expected]
    if len(others) * num_patterns > limits.MAX_MATCHES:
        message = f"{len(others)} tensors that nothing reads, to be compared with {num_patterns} patterns"
        raise WeightsError("weights-mismatch", message, where=files.folder.name)
    return others


def _sorted(found: list[Problem]) -> list[Problem]:
    """The different problems, in the order of the report."""
    return sorted(dict.fromkeys(found), key=lambda problem: list(_TITLES).index(problem.kind))


def check(graph: schema.Graph, rules: Checkpoint, files: CheckpointFiles, *, most: int | None = 8) -> None:
    """Raise WeightsError (`weights-mismatch`) unless there are no problems.

    It lists the first `most` of each kind and says how many there are; None: all.
    """
    found = problems(graph, rules, files)
    if not found:
        return
    lines = ["the checkpoint doesn't fit the bundle's recipes"]
    for kind, title in _TITLES.items():
        listed = [f"{problem.tensor}: {problem.message}" for problem in found if problem.kind == kind]
        if listed:
            count = f"{len(listed)}{' or more' if len(listed) >= limits.MAX_PROBLEMS else ''}"
            lines.append(f"  {count} {'tensor' if len(listed) == 1 else 'tensors'} {title}:")
            first = some(listed, len(listed) if most is None else most)
            hint = " (precast verify BUNDLE --weights DIR lists all)" if len(first) > (most or len(listed)) else ""
            lines += [f"    {line}" for line in first]
            lines[-1] += hint
    fix = "use a checkpoint of the model that the bundle was built for, or build a bundle from this checkpoint's config"
    raise WeightsError("weights-mismatch", "\n".join(lines), where=files.folder.name, fix=fix)


def require(
    graph: schema.Graph, rules: Checkpoint, files: CheckpointFiles, *, whole: schema.Graph | None = None
) -> dict[str, StoredTensor]:
    """The stored tensor of every name that the graph's recipes read, and under the first name of each scale that which
    it is, if it is there. Raises what `check` raises.

    `whole`: the graph of all ranks, if this one's reads a part of the tensors: those are what is checked.
    """
    check(whole or graph, rules, files)
    dtypes = {read.tensor: read.dtype for param in graph.params for read in each_leaf(param.recipe)}
    found = {name: resolve(name, files.tensors, rules) for name in sorted(dtypes)}
    for param in graph.params:
        if isinstance(param.recipe, schema.Scale):
            found[param.recipe.tensors[0]] = scale_tensor(param.recipe, files.tensors, rules)
    made = {name: files.tensors[stored] for name, stored in found.items() if stored is not None}
    seen = {name: _SEEN_AS[dtype] for name, dtype in dtypes.items() if dtype in _SEEN_AS}
    return made | {name: msgspec.structs.replace(made[name], dtype=dtype) for name, dtype in seen.items()}


def _spellings(name: str, rules: Checkpoint) -> Iterator[str]:
    yield name
    for prefix in rules.optional_prefixes:
        yield name.removeprefix(prefix) if name.startswith(prefix) else prefix + name
    for prefix, other in rules.prefixes.items():
        if name.startswith(prefix):
            yield other + name.removeprefix(prefix)


def _mismatches(read: schema.Read, name: str, stored: StoredTensor) -> Iterator[Problem]:
    if stored.shape != read.shape:
        yield Problem("shape", name, f"expected {_text(read.shape)}, found {_text(stored.shape)}")
    taken = _TAKEN[read.dtype] if read.dtype in _TAKEN else (str(read.dtype),)
    if stored.dtype not in taken:
        yield Problem("dtype", name, f"expected {' or '.join(taken)}, found {stored.dtype}")


def _equal(files: CheckpointFiles, one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two stored tensors have the same type and bytes. Raises WeightsError where they can't be read."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    left, right = bytearray(min(_COMPARED_BYTES, one.nbytes)), bytearray(min(_COMPARED_BYTES, one.nbytes))
    with files.source(one.file) as first, files.source(other.file) as second:
        for start in range(0, one.nbytes, _COMPARED_BYTES):
            size = min(_COMPARED_BYTES, one.nbytes - start)
            first.read_into(one.offset + start, [memoryview(left)[:size]])
            second.read_into(other.offset + start, [memoryview(right)[:size]])
            if left[:size] != right[:size]:
                return False
    return True
