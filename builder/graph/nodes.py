"""Nodes of an FX graph: what they call, with which arguments, in which layer, and which of them nothing needs."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch

from precast.builder.graph.context import FxGraph, FxNode, PassContext


def op_name(target: Any) -> str:
    """`aten.add.Tensor`, `precast.rms_norm`, or the name of a Python operator."""
    name = str(target) if hasattr(target, "_schema") else getattr(target, "__name__", str(target))
    return name.removesuffix(".default") if name.startswith("precast.") else name


def op_counts(graph: FxGraph) -> Counter[str]:
    """How often each op stands in the graph. Picking one of several results is no operation."""
    calls = Counter(node.target for node in graph.nodes if node.op == "call_function")
    found = Counter[str]()
    for target, count in calls.items():
        if target is not operator.getitem:
            found[op_name(target)] += count
    return found


def is_write(node: FxNode) -> bool:
    """Whether the node calls an op that writes into an argument."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def argument(node: FxNode, name: str) -> Any:
    """What the call gives for this argument of its op, by position or by name, or the op's default."""
    for position, arg in enumerate(node.target._schema.arguments):
        if arg.name == name:
            return node.args[position] if position < len(node.args) else node.kwargs.get(name, arg.default_value)
    raise AssertionError(f"{op_name(node.target)} has no argument {name}")


def given_arguments(node: FxNode) -> dict[str, Any]:
    """The call's arguments by name, without those that have their defaults because they aren't given."""
    positional = (arg.name for arg in node.target._schema.arguments if not arg.kwarg_only)
    return dict(zip(positional, node.args, strict=False)) | node.kwargs


def largest(size: int | torch.SymInt) -> int:
    """The size where no step is too short for it: 7 of `min(T, 7)`; more than any step has where nothing bounds it."""
    if isinstance(size, int):
        return size
    expr = size.node.expr
    return int(expr.subs(dict.fromkeys(expr.free_symbols, 1 << 40)))


def placeholder(graph: FxGraph, name: str) -> FxNode:
    """The graph's placeholder of this name."""
    return next(node for node in graph.nodes if node.op == "placeholder" and node.name == name)


def module_path(node: FxNode) -> str:
    """The path of the innermost module that the node was traced in; empty for the model itself."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values()]
    return paths[-1].removeprefix("model.") if paths else ""


def layer_of(node: FxNode) -> str | None:
    """The path of the outermost numbered module (`model.layers.3`, `transformer.h.3`), or None outside of layers."""
    for path, _ in (node.meta.get("nn_module_stack") or {}).values():
        if path.rpartition(".")[2].isdigit():
            return path.removeprefix("model.")
    return None


def origins(*nodes: FxNode, goes_on: Callable[[FxNode], bool]) -> list[FxNode]:
    """The nodes and all that they are computed from, each once; beyond a node of which `goes_on` is false, none."""
    found: dict[FxNode, None] = {}
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in found:
            found[node] = None
            stack += node.all_input_nodes if goes_on(node) else []
    return list(found)


def by_call(uses: Iterable[tuple[str, FxNode]], how: str) -> str:
    """What is called, and the first three modules it is called in: `aten.mean.dim (in model.norm); ...` for "in"."""
    modules: dict[str, set[str]] = {}
    for call, node in uses:
        modules.setdefault(call, set()).add(module_path(node) or "the model itself")
    listed = ((call, ", ".join(sorted(paths)[:3]), len(paths) - 3) for call, paths in sorted(modules.items()))
    return "; ".join(f"{call} ({how} {first}{f' and {more} more' if more > 0 else ''})" for call, first, more in listed)


def eliminate_dead_code(graph: FxGraph, ctx: PassContext) -> None:
    """Removes nodes that nothing needs, and the params and constants that no node uses any more.

    A node that writes into an argument is needed. The tracer's assertions, which return nothing, are not: what they
    state holds for every graph.
    """
    for node in reversed(list(graph.nodes)):
        if node.users or node.op == "output" or is_write(node):
            continue
        if node.op == "placeholder":
            if node.name not in ctx.params and node.name not in ctx.constants:
                continue
            ctx.params.pop(node.name, None)
            ctx.constants.pop(node.name, None)
        graph.erase_node(node)
