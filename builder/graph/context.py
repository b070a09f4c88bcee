"""What a pass works with: the graph's side tables, and the few ways in which a graph is edited.

A pass gets an FX graph whose placeholders are inputs, params, and constants; this context says which is which, and
holds what a placeholder stands for. New nodes get their value types from the op's fake function, and the layer that
they belong to from the node that they replace.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.node import map_arg

from precast.builder.graph.fx_types import FxGraph, FxNode
from precast.ir.graph.schema import CachePlan, Dtype, Expr, Recipe, Value


@dataclasses.dataclass(frozen=True)
class Options:
    """What the user asked of a build."""

    dtype: str
    max_seq_len: int
    page_size: int | None = None
    """Tokens a page in every group; None: chosen for each."""
    kv_dtype: Dtype | None = None
    """Of cached keys, values and latents; None: that of the model. States keep theirs."""


@dataclasses.dataclass
class ParamInfo:
    """A param placeholder's name in the bundle and how it is made."""

    name: str
    recipe: Recipe


@dataclasses.dataclass
class ConstantInfo:
    """A constant placeholder's name in the bundle and its value, on the CPU."""

    name: str
    value: torch.Tensor


@dataclasses.dataclass
class PassContext:
    """The state of a build beside its graph."""

    options: Options
    params: dict[str, ParamInfo]
    """Placeholder -> param."""
    constants: dict[str, ConstantInfo]
    """Placeholder -> constant."""
    symbols: dict[str, Expr]
    """The exporter's symbol -> ours."""
    cache_tensors: dict[str, Value] = dataclasses.field(default_factory=dict)
    """Placeholder -> cache tensor."""
    caches: CachePlan = dataclasses.field(default_factory=CachePlan)
    fake_mode: FakeTensorMode | None = None

    # --- reading ---------------------------------------------------------------------------------------------

    def is_param(self, node: Any) -> bool:
        """Whether the node is a param's placeholder."""
        return isinstance(node, FxNode) and node.op == "placeholder" and node.name in self.params

    def constant(self, node: Any) -> torch.Tensor | None:
        """The constant's value, or None when the node is no constant."""
        info = self.constants.get(node.name) if isinstance(node, FxNode) and node.op == "placeholder" else None
        return info.value if info else None

    # --- editing ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def before(self, node: FxNode) -> Iterator[None]:
        """New nodes stand before `node` and belong to its layer."""
        with node.graph.inserting_before(node):
            self._origin = node
            yield

    def call(self, graph: FxGraph, target: Any, *args: Any, **kwargs: Any) -> FxNode:
        """A new node; its value comes from the op's fake function."""
        node = graph.call_function(target, args, kwargs)
        origin = self._origin
        if "nn_module_stack" in origin.meta:
            node.meta["nn_module_stack"] = origin.meta["nn_module_stack"]
        node.meta["val"] = self.fake(target, args, kwargs)
        return node

    def item(self, graph: FxGraph, node: FxNode, index: int) -> FxNode:
        """Result `index` of a node with several."""
        import operator

        got = graph.call_function(operator.getitem, (node, index))
        if "nn_module_stack" in node.meta:
            got.meta["nn_module_stack"] = node.meta["nn_module_stack"]
        got.meta["val"] = node.meta["val"][index]
        return got

    def fake(self, target: Any, args: Any, kwargs: Any) -> Any:
        """What the op returns for the nodes' values, as fake tensors."""
        values, keyword_values = map_arg((args, kwargs), lambda n: n.meta["val"])
        mode = self.fake_mode or contextlib.nullcontext()
        # Without the dispatcher, torch 2.11 multiplies matrices by code that can't count symbolic sizes.
        with mode, torch.no_grad(), enable_python_dispatcher():
            return target(*values, **keyword_values)

    def replace(self, old: FxNode, new: FxNode) -> None:
        """All users of `old` use `new`; `old` goes when nothing else needs it."""
        old.replace_all_uses_with(new)

    def empty(self, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        """A fake tensor; sizes may be the exporter's symbols."""
        with self.fake_mode or contextlib.nullcontext():
            return torch.empty(shape, dtype=dtype)

    def new_param(self, graph: FxGraph, after: FxNode, name: str, recipe: Recipe, shape: Any) -> FxNode:
        """A new param placeholder of the dtype of `after`, the param that it follows."""
        node = self._placeholder(graph, after, "p_" + name.replace(".", "_"))
        node.meta["val"] = self.empty(shape, tensor(after).dtype)
        self.params[node.name] = ParamInfo(name, recipe)
        return node

    def new_input(self, graph: FxGraph, after: FxNode, name: str, fake: torch.Tensor) -> FxNode:
        """A new graph input; `fake` has its type."""
        node = self._placeholder(graph, after, name)
        assert node.name == name, f"the graph has a value named {name}"
        node.meta["val"] = fake
        return node

    def new_cache(self, graph: FxGraph, after: FxNode, value: Value, fake: torch.Tensor) -> FxNode:
        """A placeholder for a cache tensor, of the type that `fake` has."""
        node = self._placeholder(graph, after, "cache_" + value.name.replace(".", "_"))
        node.meta["val"] = fake
        self.cache_tensors[node.name] = value
        return node

    def new_symbol(self, name: str) -> torch.SymInt:
        """A size that the exporter didn't know, and its name in the bundle."""
        assert self.fake_mode is not None
        assert self.fake_mode.shape_env is not None
        size: torch.SymInt = self.fake_mode.shape_env.create_unbacked_symint()
        self.symbols[str(size.node.expr)] = name
        return size

    def _placeholder(self, graph: FxGraph, after: FxNode, name: str) -> FxNode:
        with graph.inserting_after(after):
            return graph.placeholder(name)


def tensor(node: Any) -> torch.Tensor:
    """The node's value as a (fake) tensor."""
    value = node.meta["val"]
    assert isinstance(value, torch.Tensor)
    return value
