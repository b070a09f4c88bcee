"""Whether a checkpoint can honour recipes: what they read, looked for among its headers.

`check` compares all recipes of a graph with the headers of a checkpoint and reports everything that is wrong at
once, before a byte of any tensor is read.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Literal

import msgspec

from precast.ir import limits
from precast.ir.errors import WeightsError, some
from precast.ir.graph import schema
from precast.ir.graph.symbols import shape_text
from precast.ir.manifest import Checkpoint
from precast.ir.patterns import matches
from precast.ir.weights import group_order, zeros
from precast.ir.weights.checkpoint import CheckpointFiles, StoredDtype, StoredTensor, at_once
from precast.ir.weights.recipes import each_leaf

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

Kind = Literal["missing", "shape", "dtype", "untied", "order", "zeros", "unexpected"]

_TITLES: dict[Kind, str] = {
    # in the order of the report
    "missing": "missing",
    "shape": "of a wrong shape",
    "dtype": "of a wrong dtype",
    "untied": "tied by the config and not equal",
    "order": "of groups in another order than the config's desc_act says (if it is false, build with true)",
    "zeros": "that the config's model has not, and that are no zeros (if they are meant, the config has to say so)",
    "unexpected": "unexpected",
}
_LISTS_ALL = " (precast verify BUNDLE --weights DIR [--allow-config-mismatch] lists all)"
_COMPARED_BYTES = 1 << 24


class Problem(msgspec.Struct, frozen=True):
    """One way in which a checkpoint doesn't fit the recipes; `tensor` is the name in the recipe or the checkpoint."""

    kind: Kind
    tensor: str
    message: str


def resolve(name: str, stored: Container[str], rules: Checkpoint) -> str | None:
    """The checkpoint's name for what a recipe calls `name`, or None where it has none.

    The name itself, the name with one of the optional prefixes put before it or taken off, or with another prefix in
    place of its own; or, likewise, the name with another ending; or another name that is tied to it.
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
    order, zeros that are none, and unexpected ones, in the order of the files. Empty: it fits. Only headers are read,
    but for tied tensors that are stored twice, and tensors of groups and of zeros that no recipe reads.
    """
    expected: set[str] = set()
    found = list(itertools.islice(_read_problems(graph, rules, files, expected), limits.MAX_PROBLEMS))
    if len(found) == limits.MAX_PROBLEMS:
        return _sorted(found)  # what is unexpected, nobody knows
    for second, first in rules.tied.items():
        names = [resolve(name, files.tensors, msgspec.structs.replace(rules, tied={})) for name in (second, first)]
        expected.update(name for name in names if name is not None)
        if None not in names and not _equal(files, *(files.tensors[name] for name in names if name is not None)):
            what = f"expected the content of {names[1]}, to which it is tied (tie_word_embeddings)"
            found.append(Problem("untied", str(names[0]), what))
    for look in (_disordered, _not_zeros, _unexpected):
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
                wanted = f"{read.dtype or 'floating point'} {shape_text(read.shape)}"
                others = "".join(f", or {other}" for other in _other_endings(read.tensor, rules))
                yield Problem("missing", read.tensor, f"expected {wanted}{others}")
            else:
                expected.add(name)
                yield from _mismatches(read, name, files.tensors[name], rules)


def _scale_problems(
    graph: schema.Graph, rules: Checkpoint, files: CheckpointFiles, expected: set[str]
) -> Iterator[Problem]:
    """Scales that are not one number, and those that are missing where others are there, by whatever name."""
    wanted = [param.recipe for param in graph.params if isinstance(param.recipe, schema.Scale)]
    found = [scale_tensor(recipe, files.tensors, rules) for recipe in wanted]
    if not any(found):
        if wanted and (others := _scales_by_other_names(rules, files)):
            message = f"expected floating point [], as there are scales by other names, such as {others[0]}"
            yield Problem("missing", wanted[0].tensors[0], message)
        return
    for recipe, name in zip(wanted, found, strict=True):
        if name is None:
            yield Problem("missing", recipe.tensors[0], "expected floating point [], as there are other scales")
            continue
        expected.add(name)
        stored = files.tensors[name]
        if set(stored.shape) - {1}:
            yield Problem("shape", name, f"expected one number, found {shape_text(stored.shape)}")
        if stored.dtype not in ANY_FLOAT:
            yield Problem("dtype", name, f"expected {' or '.join(ANY_FLOAT)}, found {stored.dtype}")


def _scales_by_other_names(rules: Checkpoint, files: CheckpointFiles) -> list[str]:
    """The tensors that are called as scales of cached keys and values are, but those of parts that aren't built."""
    named = [name for name in files.tensors if name.rpartition(".")[2] in ("k_scale", "v_scale")]
    if len(named) * len(rules.unused) > limits.MAX_MATCHES:
        return named
    return [name for name in named if not any(matches(pattern, name) for pattern in rules.unused)]


def _disordered(rules: Checkpoint, files: CheckpointFiles, expected: set[str]) -> Iterator[Problem]:
    """The tensors of groups that nothing reads, because groups are in order, where they say something else."""
    return _faults("order", group_order.fault, rules.groups_in_order, files, expected)


def _not_zeros(rules: Checkpoint, files: CheckpointFiles, expected: set[str]) -> Iterator[Problem]:
    """The tensors that nothing reads, because they are all 0, where they are something else."""
    return _faults("zeros", zeros.fault, rules.zeros, files, expected)


def _faults(
    kind: Kind,
    fault: Callable[[CheckpointFiles, str, int], str],
    patterns: Mapping[str, int],
    files: CheckpointFiles,
    expected: set[str],
) -> Iterator[Problem]:
    """What `fault` finds in tensors that nothing reads and one of the patterns describes."""
    if not patterns:
        return
    sizes = {
        name: size
        for name in _others(files, expected, len(patterns))
        for pattern, size in patterns.items()
        if matches(pattern, name)
    }
    found = at_once(files.folder, lambda name: fault(files, name, sizes[name]), list(sizes))
    for name, what in zip(sizes, found, strict=True):
        if what:
            yield Problem(kind, name, what)


def _unexpected(rules: Checkpoint, files: CheckpointFiles, expected: set[str]) -> Iterator[Problem]:
    """The tensors that nothing reads and no pattern passes over."""
    patterns = (*rules.ignored, *rules.unused)
    for name in _others(files, expected, len(patterns)):
        if not any(matches(pattern, name) for pattern in patterns):
            tensor = files.tensors[name]
            yield Problem("unexpected", name, f"{tensor.dtype} {shape_text(tensor.shape)} in {tensor.file}")


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
            hint = _LISTS_ALL if len(first) > (most or len(listed)) else ""
            lines += [f"    {line}" for line in first]
            lines[-1] += hint
    fix = "use a checkpoint of the model that the bundle was built for, or build a bundle from this checkpoint's config"
    if any(stored.dtype not in ANY_FLOAT for stored in files.tensors.values()):
        fix += "; if it is that config, its quantization_config doesn't say how these tensors are stored"
    raise WeightsError("weights-mismatch", "\n".join(lines), where=files.folder.name, fix=fix)


def require(
    graph: schema.Graph, rules: Checkpoint, files: CheckpointFiles, *, whole: schema.Graph | None = None
) -> dict[str, StoredTensor]:
    """The stored tensor of every name that the graph's recipes read, in the shape that they read, and under the first
    name of each scale that which it is, if it is there. Raises what `check` raises.

    `whole`: the graph of all ranks, if this one's reads a part of the tensors: those are what is checked.
    """
    check(whole or graph, rules, files)
    reads = {read.tensor: read for param in graph.params for read in each_leaf(param.recipe)}
    found = {name: resolve(name, files.tensors, rules) for name in sorted(reads)}
    for param in graph.params:
        if isinstance(param.recipe, schema.Scale):
            found[param.recipe.tensors[0]] = scale_tensor(param.recipe, files.tensors, rules)
    made = {name: files.tensors[stored] for name, stored in found.items() if stored is not None}
    return made | {name: _as_read(made[name], read) for name, read in reads.items()}


def _as_read(stored: StoredTensor, read: schema.Read) -> StoredTensor:
    """A stored tensor as a recipe takes it."""
    return msgspec.structs.replace(stored, shape=read.shape, dtype=_SEEN_AS.get(read.dtype, stored.dtype))


def _spellings(name: str, rules: Checkpoint) -> Iterator[str]:
    for one in (name, *_other_endings(name, rules)):
        yield one
        for prefix in rules.optional_prefixes:
            yield one.removeprefix(prefix) if one.startswith(prefix) else prefix + one
        for prefix, other in rules.prefixes.items():
            if one.startswith(prefix):
                yield other + one.removeprefix(prefix)


def _other_endings(name: str, rules: Checkpoint) -> list[str]:
    return [name.removesuffix(end) + other for end, other in rules.endings.items() if name.endswith(end)]


def _mismatches(read: schema.Read, name: str, stored: StoredTensor, rules: Checkpoint) -> Iterator[Problem]:
    is_one = {*stored.shape, *read.shape} == {1}  # one number, as `[]`, `[1]` or `[1, 1]`
    is_alike = read.tensor.endswith(tuple(rules.endings)) and _without_ones(stored.shape) == _without_ones(read.shape)
    if stored.shape != read.shape and not is_one and not is_alike:
        yield Problem("shape", name, f"expected {shape_text(read.shape)}, found {shape_text(stored.shape)}")
    taken = _TAKEN[read.dtype] if read.dtype in _TAKEN else (str(read.dtype),)
    if stored.dtype not in taken:
        yield Problem("dtype", name, f"expected {' or '.join(taken)}, found {stored.dtype}")


def _without_ones(shape: tuple[int, ...]) -> list[int]:
    return [size for size in shape if size != 1]


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
