"""What a pass works with: the graph's side tables, and the few ways in which a graph is edited.

A pass gets an FX graph whose placeholders are inputs, params, and constants; this context says which is which, and
holds what a placeholder stands for. New nodes get their value types from the op's fake function, and the layer that
they belong to from the node that they replace.

torch types a node's arguments as the union of all that any op takes; a pass knows what its op takes: `FxGraph` and
`FxNode` say so to a type checker, and are torch's own classes at run time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.node import map_arg

from precast.builder.graph.rounding import Roundings
from precast.ir.errors import BuildError
from precast.ir.graph.schema import CachePlan, Dtype, Expr, Recipe, ShardOverride, Value
from precast.kernels.dtypes import BY_NAME
from precast.kernels.sizes import NoExpressionError, expression

if TYPE_CHECKING:

    class FxNode(fx.Node):
        """A node whose arguments are what its op takes."""

        graph: FxGraph  # pyright: ignore[reportIncompatibleVariableOverride]
        args: Any
        kwargs: Any
        target: Any
        users: dict[FxNode, None]  # type: ignore[assignment]
        all_input_nodes: list[FxNode]  # type: ignore[assignment]

    class FxGraph(fx.Graph):
        """A graph of such nodes."""

        nodes: Iterable[FxNode]  # type: ignore[assignment]

        def call_function(self, *args: Any, **kwargs: Any) -> FxNode: ...

        def placeholder(self, *args: Any, **kwargs: Any) -> FxNode: ...

else:
    FxGraph, FxNode = fx.Graph, fx.Node


@dataclasses.dataclass(frozen=True)
class Options:
    """What the user asked of a build."""

    dtype: str
    max_seq_len: int
    page_size: int | None = None
    """Tokens a page in every group; None: chosen for each."""
    kv_dtype: Dtype | None = None
    """Of cached keys and values; None: that of the model. States keep theirs."""
    overrides: tuple[ShardOverride, ...] = ()
    """What the user says of how the model is split."""
    kv_from_config: bool = False
    """Whether the config names that dtype, not the user: then latents keep the model's, and it may have no effect."""
    dequantise: bool = False
    """Whether weights that a checkpoint stores in few bits are dequantised while they are read, all of them."""
    activations: str = "published"
    """`published`: inputs of layers are rounded as the checkpoint's config says; `none`: they stay as they are."""
    quantise: str | None = None
    """The format that weights of a checkpoint in 16 or 32 bits are brought to while they are read; None: none."""


class KvScales(NamedTuple):
    """The names that a checkpoint may have for what a layer's keys and values are divided by, the likeliest first."""

    k: tuple[str, ...]
    v: tuple[str, ...]


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
    scales: Mapping[str, KvScales] = dataclasses.field(default_factory=dict)
    """What a quantised checkpoint calls the scales of keys and values, by the path of the attention layer."""
    roundings: Roundings = dataclasses.field(default_factory=dict)
    """How inputs are rounded, of layers whose weights a checkpoint stores in few bits."""
    wide: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Why weights that are none of few bits were not chosen to be quantised, by the tensors that they are made of;
    empty where none is quantised while it is read."""

    # --- reading ---------------------------------------------------------------------------------------------

    def is_param(self, node: Any) -> bool:
        """Whether the node is a param's placeholder."""
        return isinstance(node, FxNode) and node.op == "placeholder" and node.name in self.params

    def constant(self, node: Any) -> torch.Tensor | None:
        """The constant's value, or None when the node is no constant."""
        info = self.constants.get(node.name) if isinstance(node, FxNode) and node.op == "placeholder" else None
        return info.value if info else None

    def shape(self, of: FxNode | torch.Tensor) -> tuple[Expr, ...]:
        """The sizes of a node's value, or of a tensor, as expressions."""
        value = of if isinstance(of, torch.Tensor) else tensor(of)
        return tuple(expr_of(size, self.symbols) for size in value.shape)

    # --- editing ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def before(self, node: FxNode) -> Iterator[None]:
        """New nodes stand before `node` and belong to its layer."""
        with node.graph.inserting_before(node):
            self._origin = node
            yield

    def call(self, target: Any, *args: Any, **kwargs: Any) -> FxNode:
        """A new node; its value comes from the op's fake function."""
        return self._new(self._origin, target, args, kwargs, self.fake(target, args, kwargs))

    def item(self, node: FxNode, index: int) -> FxNode:
        """Result `index` of a node with several."""
        return self._new(node, operator.getitem, (node, index), {}, node.meta["val"][index])

    def _new(self, origin: FxNode, target: Any, args: Any, kwargs: Any, value: Any) -> FxNode:
        node: Any = origin.graph.call_function(target, args, kwargs)
        if "nn_module_stack" in origin.meta:
            node.meta["nn_module_stack"] = origin.meta["nn_module_stack"]
        node.meta["val"] = value
        return node

    def fake(self, target: Any, args: Any, kwargs: Any) -> Any:
        """What the op returns for the nodes' values, as fake tensors."""
        values, keyword_values = map_arg((args, kwargs), lambda n: n.meta["val"])
        mode = self.fake_mode or contextlib.nullcontext()
        # Without the dispatcher, torch 2.11 multiplies matrices by code that can't count symbolic sizes.
        with mode, torch.no_grad(), enable_python_dispatcher():
            return target(*values, **keyword_values)

    def replace(self, old: FxNode, new: FxNode) -> None:
        """All users of `old` use `new`, and `old` goes."""
        old.replace_all_uses_with(new)
        old.graph.erase_node(old)

    def empty(self, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        """A fake tensor; sizes may be the exporter's symbols."""
        with self.fake_mode or contextlib.nullcontext():
            return torch.empty(shape, dtype=dtype)

    def new_param(
        self, after: FxNode, name: str, recipe: Recipe, shape: Any, dtype: torch.dtype | None = None
    ) -> FxNode:
        """A new param placeholder of the dtype of `after`, the placeholder that it follows, or of another one."""
        node = self._placeholder(after, "p_" + name.replace(".", "_"))
        node.meta["val"] = self.empty(shape, dtype or tensor(after).dtype)
        self.params[node.name] = ParamInfo(name, recipe)
        return node

    def new_input(self, after: FxNode, name: str, fake: torch.Tensor) -> FxNode:
        """A new graph input; `fake` has its type."""
        node = self._placeholder(after, name)
        assert node.name == name, f"the graph has a value named {name}"
        node.meta["val"] = fake
        return node

    def new_constant(self, after: FxNode, name: str, value: torch.Tensor) -> FxNode:
        """A placeholder for a constant."""
        node = self.new_input(after, name, self.empty(value.shape, value.dtype))
        self.constants[name] = ConstantInfo(name, value)
        return node

    def new_cache(self, after: FxNode, value: Value, pages: torch.SymInt) -> FxNode:
        """A placeholder for a cache tensor of so many pages."""
        node = self._placeholder(after, "cache_" + value.name.replace(".", "_"))
        node.meta["val"] = self.empty((pages, *value.type.shape[1:]), BY_NAME[value.type.dtype])
        self.cache_tensors[node.name] = value
        return node

    def new_symbol(self, name: str) -> torch.SymInt:
        """A size that the exporter didn't know, and its name in the bundle."""
        assert self.fake_mode is not None
        assert self.fake_mode.shape_env is not None
        size: torch.SymInt = self.fake_mode.shape_env.create_unbacked_symint()
        self.symbols[str(size.node.expr)] = name
        return size

    def _placeholder(self, after: FxNode, name: str) -> FxNode:
        with after.graph.inserting_after(after):
            node: Any = after.graph.placeholder(name)
        return node


def tensor(node: Any) -> torch.Tensor:
    """The node's value as a (fake) tensor."""
    value = node.meta["val"]
    assert isinstance(value, torch.Tensor)
    return value


def expr_of(size: int | torch.SymInt, names: Mapping[str, Expr]) -> Expr:
    """The size as an expression in normal form; `names` maps the exporter's symbols to ours.

    Raises BuildError("export-failed") for a size that depends on something else than the packed batch.
    """
    try:
        return expression(size, names.get)
    except NoExpressionError as error:
        message = f"a size depends on {error}, which is no size of the packed batch"
        raise BuildError("export-failed", message) from error
