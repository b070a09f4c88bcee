"""A user's plan file: what it says of params by patterns of their names, and whether that can be.

    {"model.layers.*.mlp": "replicate", "lm_head": "split"}

`replicate` keeps params whole on every rank, and with them what can't be split without them. The other choices are
expectations: a build whose plan is another one is refused.
"""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import msgspec

from precast.builder.shard.names import names_of, pattern_of, rows_of
from precast.ir import limits
from precast.ir.errors import BuildError, shown_value, some
from precast.ir.files import read_file
from precast.ir.graph.schema import Block, Call, Choice, Graph, ShardOverride

CODE = "shard-plan-invalid"

Overrides = tuple[ShardOverride, ...]


def read_overrides(path: Path) -> Overrides:
    """What a plan file says, by patterns in order. Raises BuildError (shard-plan-invalid)."""
    try:
        data = read_file(path, limits.MAX_CONFIG_BYTES)
    except OSError as error:
        message = f"the file can't be read: {error.strerror}"
        raise BuildError(CODE, message, where=str(path), fix="check the path and who may read it") from error
    try:
        if len(data) > limits.MAX_CONFIG_BYTES:
            raise ValueError(f"it has more than {limits.MAX_CONFIG_BYTES} bytes")
        found = json.loads(data, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise _refused(f"the file is no JSON object: {error}", path) from None
    if not isinstance(found, dict):
        raise _refused(f"the file is no JSON object but a {type(found).__name__}", path)
    try:
        return overrides_of(found)
    except BuildError as error:
        error.where = str(path)
        raise


def overrides_of(entries: Mapping[str, object]) -> Overrides:
    """The same for entries that are at hand. Raises BuildError (shard-plan-invalid) for all that are none."""
    known = get_args(Choice)
    wrong = [f"{shown_value(name)}: {shown_value(choice)}" for name, choice in entries.items()
             if not isinstance(choice, str) or choice not in known or not _is_pattern(name)]  # fmt: skip
    if wrong:
        raise BuildError(
            CODE, f"expected names with choices of {', '.join(known)}; found {', '.join(some(wrong))}", fix=_EXAMPLE
        )
    if len(entries) > limits.MAX_OVERRIDES:
        raise BuildError(CODE, f"found {len(entries)} entries, expected at most {limits.MAX_OVERRIDES}", fix=_EXAMPLE)
    return tuple(ShardOverride(name, choice) for name, choice in sorted(entries.items()))  # type: ignore[arg-type]


_EXAMPLE = 'write entries such as "model.layers.*.mlp": "replicate"; `*` stands for characters other than dots'


def _is_pattern(name: object) -> bool:
    return isinstance(name, str) and name.isprintable() and 0 < len(name.encode()) <= limits.MAX_STRING_BYTES


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    counts = Counter(name for name, _ in pairs)
    twice = sorted(name for name, count in counts.items() if count > 1)
    if twice:
        raise ValueError(f"it says {', '.join(some(twice))} twice")
    return dict(pairs)


def _refused(found: str, path: Path) -> BuildError:
    return BuildError(CODE, found, where=str(path), fix=_EXAMPLE)


# --- against a graph -------------------------------------------------------------------------------------------------


def named(graph: Graph, overrides: Overrides) -> dict[str, ShardOverride]:
    """The entry that each param goes by.

    Raises BuildError (shard-plan-invalid) for entries that name no param, and for params that two entries want
    otherwise.
    """
    names = names_of(graph)
    found: dict[str, ShardOverride] = {}
    problems, told = [], set()
    for entry in overrides:
        pattern = pattern_of(entry.pattern)
        fitting = [name for name, each in names.items() if any(map(pattern.fullmatch, each))]
        if not fitting:
            problems.append(f'"{entry.pattern}" names nothing{_nearest(entry.pattern, names.values())}')
        for name in fitting:
            before = found.get(name, entry)
            found[name] = entry if before.choice == "split" else before
            if _contradict(before.choice, entry.choice) and (before, entry) not in told:
                told.add((before, entry))
                problems.append(
                    f'"{before.pattern}" says {before.choice} and "{entry.pattern}" {entry.choice} of {name}'
                )
    if problems:
        raise BuildError(
            CODE, f"the plan file doesn't fit the model: {'; '.join(some(problems))}",
            fix="correct these entries; `precast inspect --weights` of a build without the file lists all params",
        )  # fmt: skip
    return found


def _contradict(one: Choice, other: Choice) -> bool:
    choices = {one, other}
    return len(choices) > 1 and ("split" not in choices or "replicate" in choices)


def _nearest(pattern: str, names: Iterable[Iterable[str]]) -> str:
    """What the user may have meant: names of params, cut to as many parts as the pattern has."""
    length = pattern.count(".") + 1
    known = sorted({".".join(name.split(".")[:length]) for each in names for name in each})
    near = difflib.get_close_matches(pattern, known, n=2, cutoff=0.5) or known[:2]
    return f" (there is {' or '.join(near)})"


def apart(graph: Graph, wanted: Mapping[str, ShardOverride]) -> Graph:
    """The graph in which calls that are to be split otherwise than others of their block have a block of their own."""
    blocks = {block.name: block for block in graph.blocks}
    taken: dict[str, dict[frozenset[str], str]] = {}
    added: list[Block] = []
    main = []
    for step in graph.main:
        if isinstance(step, Call):
            whole = frozenset(formal for formal, actual in step.args.items() if is_whole(wanted.get(actual)))
            known = taken.setdefault(step.block, {})
            if whole not in known:
                known[whole] = _free(step.block, {*blocks, *(block.name for block in added)}) if known else step.block
                if known[whole] != step.block:
                    added.append(msgspec.structs.replace(blocks[step.block], name=known[whole]))
            step = msgspec.structs.replace(step, block=known[whole])
        main.append(step)
    return msgspec.structs.replace(graph, blocks=(*graph.blocks, *added), main=tuple(main))


def is_whole(entry: ShardOverride | None) -> bool:
    """Whether the entry keeps its params whole."""
    return entry is not None and entry.choice == "replicate"


def _free(name: str, taken: set[str]) -> str:
    return next(found for number in range(1, len(taken) + 2) if (found := f"{name}_{number}") not in taken)


def check_expected(graph: Graph, wanted: Mapping[str, ShardOverride]) -> None:
    """Raise BuildError (shard-plan-invalid) where the graph's plan is not what entries expect, with its reasons."""
    rows, shapes = rows_of(graph), {param.name: param.type.shape for param in graph.params}
    problems: dict[str, str] = {}
    for name, entry in wanted.items():
        row = rows.get(name)
        mode = "replicated" if row is None else row.mode
        if entry.choice == "replicate" or mode == entry.choice or (entry.choice == "split" and mode != "replicated"):
            continue
        if row is None and len(shapes[name]) < 2:
            continue  # norms, and biases of what is split by rows, are whole beside matrices that aren't
        reason = f": {row.reason}" if row is not None and row.reason else ""
        problems.setdefault(entry.pattern, f'"{entry.pattern}" says {entry.choice}, and {name} is {mode}{reason}')
    if problems:
        raise BuildError(
            CODE, f"the model can't be split as the plan file says: {'; '.join(some(list(problems.values())))}",
            fix="leave these entries out, or say what `precast inspect --shards` of a build without the file shows",
        )  # fmt: skip
