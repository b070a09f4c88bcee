"""The nodes of a graph as they run without torch: each a view, or launches, in ways that the sizes of a step choose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from precast.ir.errors import TargetError
from precast.ir.graph import schema as ir
from precast.ir.graph.infer import named_references
from precast.ir.graph.normed_sums import BOTH
from precast.ir.memory.addresses import VIEWS
from precast.kernels.choices import Case, cases, workspace
from precast.kernels.collectives.launches import norm_after
from precast.kernels.launch_key import forms, launch_key
from precast.kernels.records import Launch, Pointer, Ranges, Record, Stride
from precast.kernels.use import Target, Use, statics_in, types_in, use_of
from precast.loader.driver.collectives import is_collective
from precast.loader.driver.placed import NotCoveredError

Sizes = Mapping[str, int]


class Keyed(NamedTuple):
    """A launch, and what names its kernel."""

    launch: Launch
    key: str


class Way(NamedTuple):
    """The launches of a node in steps of these sizes, and the bytes that they hold beside the results."""

    sizes: Ranges
    launches: tuple[Keyed, ...]
    workspace: ir.Expr


class RunNode(NamedTuple):
    """A node as it runs: in one of several ways, or in none, if it is a view. `tensors`: its arguments by the names
    that launches give them. Where ranks meet, `collectives` say what is launched; `norm`: what norms a sum then."""

    node: ir.Node
    ways: tuple[Way, ...]
    tensors: Mapping[str, str]
    meets: bool = False
    norm: tuple[Way, ...] = ()


Known = dict[tuple[object, ...], tuple[Way, ...]]
"""The ways of work that was looked at: blocks have much in common."""


def nodes_of(
    function: ir.Graph | ir.Block, target: Target, most: Sizes, known: Known, *, meets: bool = False
) -> list[RunNode]:
    """The nodes of `main` or of a block as they run; whether ranks meet in some. What is found is `known` then.

    Raises NotCoveredError for a node that is neither launches nor a view.
    """
    types, statics = types_in(function), statics_in(function)
    items: Sequence[ir.Node | ir.Call] = function.main if isinstance(function, ir.Graph) else function.nodes
    found = []
    for node in (item for item in items if isinstance(item, ir.Node)):
        use = use_of(node, types, target, statics)
        if not (meets and is_collective(node)):
            found.append(_run_node(use, types, most, known))
            continue
        norm = norm_after(node) if node.op == BOTH else None
        ways = () if norm is None else _run_node(use_of(norm, types, target, statics), types, most, known).ways
        how = Way({}, (), workspace(use))
        found.append(RunNode(node, (how,), dict(named_references(node.args)), meets=True, norm=ways))
    return found


def _run_node(use: Use, types: Mapping[str, ir.TensorType], most: Sizes, known: Known) -> RunNode:
    if is_view(use):
        return RunNode(use.node, (), {})
    tensors = dict(named_references(use.node.args))
    work = use.node.op, use.node.version, use.text, *use.operands.items()
    if work not in known:
        kinds: dict[str, ir.Dtype] = {name: types[value].dtype for name, value in tensors.items()}
        kinds |= {f"out.{i}": value.type.dtype for i, value in enumerate(use.node.outputs)}
        known[work] = tuple(_ways(use, kinds, most))
    return RunNode(use.node, known[work], tensors)


def _ways(use: Use, kinds: Mapping[str, ir.Dtype], most: Sizes) -> Iterator[Way]:
    found: dict[str, tuple[Keyed, ...]] = {}
    for case in covered_cases(use, most):
        record = case.choice.record
        if record.name not in found:
            found[record.name] = keyed(record, use, kinds)
        yield Way(case.sizes, found[record.name], record.workspace(use))


def is_view(use: Use) -> bool:
    """Whether the node's result is its argument, seen in another way."""
    if use.node.op == "aten.to.dtype":
        return use.operands["self"].type.dtype == use.result.dtype
    return use.node.op in VIEWS


def covered_cases(use: Use, most: Sizes) -> list[Case]:
    """The cases of a use in steps of at least one token, sequence and row of logits, and at most so many.

    Raises NotCoveredError where one of them runs anything but launches.
    """
    try:
        chosen = cases(use)
    except TargetError:  # nothing does it without torch
        chosen = cases(use._replace(target=use.target._replace(kinds=use.target.kinds | {"torch"})))
    found = []
    for case in chosen:
        if any(high == 0 or low > most[symbol] for symbol, (low, high) in case.sizes.items()):
            continue
        record = case.choice.record
        if isinstance(record.runs, str):
            where = " and ".join(
                f"{symbol} {low} to {'any' if high is None else high}" for symbol, (low, high) in case.sizes.items()
            )
            raise NotCoveredError(f"{use.node.op} of {use.dtype} is computed by {record.name}{where and f' ({where})'}")
        found.append(case)
    return found


def keyed(record: Record, use: Use, kinds: Mapping[str, ir.Dtype]) -> tuple[Keyed, ...]:
    """A record's launches of a use, with what names their kernels; `kinds` are the element types of its tensors."""
    assert not isinstance(record.runs, str), f"{record.name} names a function"

    def dtype_of(pointer: Pointer) -> ir.Dtype:
        return pointer.dtype or ("uint8" if pointer.tensor == "workspace" else kinds[pointer.tensor])

    return tuple(
        Keyed(launch, "" if launch.library else launch_key(launch, forms(launch, dtype_of)))
        for launch in record.runs(use)
    )


def expressions(run: RunNode, types: Mapping[str, ir.TensorType]) -> Iterator[ir.Expr]:
    """What a step's numbers are worked out from."""
    yield from (size for value in run.node.outputs for size in value.type.shape)
    for arg in run.node.args.values():
        for item in arg.items if isinstance(arg, ir.Items) else (arg,):
            if isinstance(item, ir.Dim):
                yield item.expr
    for way in (*run.ways, *run.norm):
        yield from way.sizes
        for launch, _ in way.launches:
            yield from launch.grid
            for given in launch.args:
                if isinstance(given, (str, ir.Apply)):
                    yield given
                elif isinstance(given, Pointer):
                    yield given.offset
                elif isinstance(given, Stride) and given.tensor in run.tensors:
                    yield from types[run.tensors[given.tensor]].shape[1:]
