"""Which layer a node belongs to, by the module that it was traced in."""

from __future__ import annotations

from precast.builder.graph.context import FxNode


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
