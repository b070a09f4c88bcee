"""Gives each layer that looks back a cache or a state, with the graph inputs that say where it lies."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from precast.builder.graph.context import FxGraph, FxNode, PassContext, tensor
from precast.builder.passes.graph_pass import graph_pass
from precast.ir.errors import BuildError
from precast.ir.graph import schema as ir
from precast.ir.memory import caches
from precast.ir.ops import table as ops
from precast.ir.ops.op import OpDef


def new_pool(number: int) -> ir.Pool:
    """Pool `number` of a plan, and the symbol that counts its pages."""
    return ir.Pool(f"pool{number}", f"P_pool{number}")


class MetadataInputs:
    """Makes graph inputs over symbols; asked for one that is there already, gives that."""

    def __init__(self, graph: FxGraph, ctx: PassContext) -> None:
        self.graph, self.ctx = graph, ctx
        places = {node.name: node for node in graph.nodes if node.op == "placeholder"}
        self.after = places["cu_seqlens"]
        bounds = tensor(self.after).shape[0]
        self.inputs = places
        self.known: dict[str, Any] = {"T": tensor(places["input_ids"]).shape[1], "B": bounds - 1, "B + 1": bounds}

    def symbol(self, name: str) -> Any:
        """The size of this name; a new one is unknown to the exporter, and enters its table of symbols."""
        if name not in self.known:
            self.known[name] = self.ctx.new_symbol(name)
        return self.known[name]

    def add_input(self, name: str, dtype: str, size: str, entries: Any = None) -> FxNode:
        """A one-dimensional graph input."""
        if name not in self.inputs:
            length = entries if size == "N" else self.known[size]
            fake = self.ctx.empty((length,), getattr(torch, dtype))
            self.inputs[name] = self.ctx.new_input(self.after, name, fake)
        return self.inputs[name]


Spec = ir.PagedSpec | ir.LatentSpec | ir.IndexSpec | ir.EntrySpec

DEFAULT_PAGE_SIZE = 16
"""Tokens a page until `plan_pages` chooses."""

_INPUTS = {
    # a group's metadata inputs: dtype, sizes ("N": its page table's entries)
    "page_indices": ("int32", "N"),
    "page_indptr": ("int32", "B + 1"),
    "page_start": ("int32", "B"),
    "slot_mapping": ("int64", "T"),
}


class _Form(NamedTuple):
    """How an op that looks at a sequence's tokens gets a cache: what writes it, what reads it in the op's place, the
    arguments that are kept, by their places, and the names of the tensors that keep them."""

    write: str
    read: str
    kept: tuple[int, ...]
    tensors: tuple[str, ...]
    written_with: tuple[str, ...] = ()
    """The keyword arguments that what writes takes, too."""

    @property
    def is_index(self) -> bool:
        """Whether keys are selected by what is kept."""
        return self.tensors == ("index",)


_FORMS = {
    "attention": _Form("write_kv", "paged_attention", (1, 2), ("k", "v")),
    "latent_attention": _Form("write_latent", "paged_latent_attention", (1, 2), ("latent",)),
    "sparse_latent_attention": _Form("write_latent", "paged_sparse_latent_attention", (1, 2), ("latent",)),
    "select_keys": _Form("write_index_keys", "paged_select_keys", (1,), ("index",)),
    "block_sparse_attention": _Form("write_kv", "paged_block_sparse_attention", (1, 2), ("k", "v")),
    "select_blocks": _Form("write_index_keys", "paged_select_blocks", (1,), ("index",)),
    "entry_attention": _Form("write_entries", "paged_entry_attention", (1,), ("entries",), ("rate",)),
    "select_entries": _Form("write_entries", "paged_select_entries", (1,), ("index",), ("rate",)),
}
"""By the op. All take queries first, `cu_seqlens` last; what reads has the cache's tensors for those that are kept."""


@graph_pass(stage="cache", version=1)
def insert_caches(graph: FxGraph, ctx: PassContext) -> bool:
    """attention(q, k, v) -> write_kv(k, v, cache), paged_attention(q, cache); likewise latent and sparse attention, and
    the selection of keys and of blocks of them.

    Layers of equal geometry, window and chunk form a group, with a page table, a pool and a set of metadata inputs. A
    layer with the very keys and values of an earlier one has no cache of its own: it reads that one's. The plan is
    recorded in the context; `plan_pages` sizes its pages.

    What a step writes it reads back from the cache, its own keys too. So with a cache of another dtype than the model's
    a token sees the same keys however its prompt was cut, and whoever computed them.

    Keys and values of 8 bits are divided by scales where the checkpoint's format has some: params of their own, one for
    the keys and one for the values of each layer that writes.
    """
    forms = {getattr(torch.ops.precast, name).default: form for name, form in _FORMS.items()}
    layers = [node for node in graph.nodes if node.op == "call_function" and node.target in forms]
    specs: dict[Spec, list[FxNode]] = {}
    for node in layers:
        specs.setdefault(_spec(node, forms[node.target], ctx), []).append(node)
    if not specs:
        _refuse_kv_dtype(ctx)
        return False
    sizes = MetadataInputs(graph, ctx)
    kv_lens = sizes.add_input("kv_lens", "int32", "B")
    pools: list[ir.Pool] = []
    groups = []
    names = _slot_names(layers, forms)
    for spec, nodes in specs.items():
        name = _group_name(spec, specs)
        pool = new_pool(len(ctx.caches.pools) + len(pools))
        pools.append(pool)
        fields = {field: f"{field}_{name}" for field in _INPUTS}
        entries = sizes.symbol(f"N_{name}")
        metadata = {
            field: sizes.add_input(fields[field], dtype, size, entries) for field, (dtype, size) in _INPUTS.items()
        }
        pages = sizes.symbol(pool.pages)
        slots: list[ir.Slot] = []
        written: dict[tuple[FxNode, ...], tuple[tuple[FxNode, ...], dict[str, FxNode]]] = {}
        for node in nodes:
            form = forms[node.target]
            kept = tuple(node.args[place] for place in form.kept)
            if kept not in written:
                values = _values(names[node], form, spec, pool)
                slots.append(ir.Slot(names[node], values))
                scales = _scales(ctx, node, spec)
                written[kept] = _write(ctx, node, form, values, pages, kv_lens, metadata, scales), scales
            _read(ctx, node, form, *written[kept], kv_lens, metadata)
        groups.append(ir.Group(name, pool.name, spec, ir.PagedInputs(**fields), tuple(slots)))
    ctx.caches = ir.CachePlan((*ctx.caches.pools, *pools), tuple(groups), ctx.caches.states)
    return True


def _slot_names(layers: list[FxNode], forms: dict[Any, _Form]) -> dict[FxNode, str]:
    """`layers.N` for what attends, and for what selects keys `indexers.N`, each numbered by itself."""
    found: dict[FxNode, str] = {}
    for prefix, is_index in (("layers", False), ("indexers", True)):
        nodes = [node for node in layers if forms[node.target].is_index == is_index]
        found |= {node: f"{prefix}.{number}" for number, node in enumerate(nodes)}
    return found


def _refuse_kv_dtype(ctx: PassContext) -> None:
    """Raise BuildError where the option is given to a model without such caches."""
    if ctx.options.kv_dtype is not None and not ctx.options.kv_from_config:
        kept = "only states, which keep their dtype" if ctx.caches.states else "no caches"
        message = f"kv_dtype is given, but the model has no keys, values or latents to keep: it has {kept}"
        raise BuildError("option-invalid", message, fix="leave kv_dtype out")


def _spec(node: FxNode, form: _Form, ctx: PassContext) -> Spec:
    first = tensor(node.args[1])
    own: Any = str(first.dtype).removeprefix("torch.")
    # Without scales of their own, latents and what they are selected by are rounded only for who asks for it.
    dtype = own if ctx.options.kv_from_config and form.tensors != ("k", "v") else ctx.options.kv_dtype or own
    page_size, window = ctx.options.page_size or DEFAULT_PAGE_SIZE, node.kwargs.get("window")
    rate = node.kwargs.get("rate")
    if rate is not None:
        whole = caches.whole_blocks(page_size, rate)
        return ir.EntrySpec(int(first.shape[2]), dtype, whole, rate, window)
    if form.is_index:
        return ir.IndexSpec(int(first.shape[2]), dtype, page_size)
    second = tensor(node.args[2])
    if form.tensors == ("latent",):
        return ir.LatentSpec(int(first.shape[2]), int(second.shape[2]), dtype, page_size, window)
    sizes = int(first.shape[2]), int(first.shape[3]), int(second.shape[3])
    return ir.PagedSpec(*sizes, dtype, page_size, window, node.kwargs.get("chunk"))


def _group_name(spec: Spec, specs: dict[Spec, list[FxNode]]) -> str:
    """`full`, `window1024`, `chunk8192`, `latent_full`, `index`; with the geometry where that alone is not enough."""
    name = _short_name(spec)
    if sum(_short_name(other) == name for other in specs) == 1:
        return name
    if isinstance(spec, ir.IndexSpec):
        return f"{name}_{spec.key_size}"
    if isinstance(spec, ir.LatentSpec):
        return f"{name}_{spec.latent_size}x{spec.rope_size}"
    if isinstance(spec, ir.EntrySpec):
        return f"{name}_{spec.entry_size}"
    return f"{name}_{spec.num_kv_heads}x{spec.head_size}x{spec.value_size}"


def _short_name(spec: Spec) -> str:
    if isinstance(spec, ir.IndexSpec):
        return "index"
    if isinstance(spec, ir.EntrySpec) and spec.rate > 1:
        return f"entries{spec.rate}"
    reach = "full" if spec.window is None else f"window{spec.window}"
    if isinstance(spec, ir.PagedSpec) and spec.chunk is not None:
        reach = f"chunk{spec.chunk}"
    if isinstance(spec, ir.EntrySpec):
        return f"entries_{reach}"
    return reach if isinstance(spec, ir.PagedSpec) else f"latent_{reach}"


def _values(slot: str, form: _Form, spec: Spec, pool: ir.Pool) -> tuple[ir.Value, ...]:
    """The cache tensors of a slot."""
    types = caches.slot_types(spec, pool.pages)
    return tuple(ir.Value(f"{slot}.{short}", type) for short, type in zip(form.tensors, types, strict=True))


def _scales(ctx: PassContext, node: FxNode, spec: Spec) -> dict[str, FxNode]:
    """Params for what the layer's keys and values are divided by, by the names of the ops' arguments.

    Raises BuildError where the checkpoint's format has scales, but nothing says what they are called in this layer.
    """
    if not ctx.scales or not isinstance(spec, ir.PagedSpec) or spec.dtype != "float8_e4m3fn":
        return {}
    paths = [path.removeprefix("model.") for path, _ in reversed((node.meta.get("nn_module_stack") or {}).values())]
    layer = next((path for path in paths if path in ctx.scales), None)
    if layer is None:
        message = f"{paths[0] if paths else node.name}: keys and values of 8 bits, and no known names of their scales"
        raise BuildError("feature-unsupported", message, fix="keep them in the model's dtype (kv_dtype model)")
    place = [each for each in node.graph.nodes if each.op == "placeholder"][-1]
    made = {}
    for name, tensors in zip(("k_scale", "v_scale"), ctx.scales[layer], strict=True):
        place = made[name] = ctx.new_param(place, f"{layer}.{name}", ir.Scale(tensors), (1,), torch.float32)
    return made


def _write(
    ctx: PassContext, node: FxNode, form: _Form, values: tuple[ir.Value, ...], pages: Any, kv_lens: FxNode,
    metadata: dict[str, FxNode], scales: dict[str, FxNode],
) -> tuple[FxNode, ...]:  # fmt: skip
    """Writes what `node` keeps; the cache tensors that it is written into."""
    places = tuple(ctx.new_cache(kv_lens, value, pages) for value in values)
    kept = (node.args[place] for place in form.kept)
    given = {name: node.kwargs[name] for name in form.written_with} | scales
    with ctx.before(node):
        ctx.call(getattr(torch.ops.precast, form.write).default, *kept, *places, metadata["slot_mapping"], **given)
    return places


def _read(
    ctx: PassContext, node: FxNode, form: _Form, places: tuple[FxNode, ...], scales: dict[str, FxNode], kv_lens: FxNode,
    metadata: dict[str, FxNode],
) -> None:  # fmt: skip
    """Puts the op that reads the pages in the place of `node`."""
    q, *others = (arg for place, arg in enumerate(node.args) if place not in form.kept)
    with ctx.before(node):
        paged = ctx.call(
            getattr(torch.ops.precast, form.read).default, q, *places, *others, kv_lens,
            metadata["page_indices"], metadata["page_indptr"], metadata["page_start"], **node.kwargs, **scales,
        )  # fmt: skip
    ctx.replace(node, paged)


def _states() -> dict[Any, OpDef]:
    """The cache-free ops that have a stateful form, by torch's name."""
    rows = [row for name, version in ops.names() if (row := ops.lookup(name, version)) is not None and row.state]
    return {getattr(torch.ops.precast, row.name.removeprefix("precast.")).default: row for row in rows}


def _state_spec(node: FxNode, row: OpDef) -> ir.StateSpec:
    assert row.state is not None
    given = zip(row.args, node.args, strict=False)
    shape = row.state.shape({arg.name: tensor(value) for arg, value in given if isinstance(value, FxNode)})
    dtype = str(tensor(node).dtype).removeprefix("torch.") if row.state.kind == "conv" else "float32"
    return ir.StateSpec(row.state.kind, tuple(map(int, shape)), dtype)  # type: ignore[arg-type]


@graph_pass(stage="cache", version=1)
def insert_states(graph: FxGraph, ctx: PassContext) -> bool:
    """scan(..., cu_seqlens) -> stateful_scan(..., state, slots, cu_seqlens, kv_lens), and convs likewise.

    Layers whose states are of equal spec form a group, with slot ids and a pool of its own. The plan is recorded in
    the context.
    """
    states = _states()
    specs: dict[ir.StateSpec, list[FxNode]] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target in states:
            specs.setdefault(_state_spec(node, states[node.target]), []).append(node)
    if not specs:
        return False
    inputs = MetadataInputs(graph, ctx)
    kv_lens = inputs.add_input("kv_lens", "int32", "B")
    for spec, nodes in specs.items():
        name = f"{spec.kind}_{'x'.join(map(str, spec.shape))}"
        pool = new_pool(len(ctx.caches.pools))
        slot_ids = inputs.add_input(f"slot_ids_{name}", "int32", "B")
        pages = inputs.symbol(pool.pages)
        type = ir.TensorType(spec.dtype, (pool.pages, *spec.shape))
        values = [ir.Value(f"{name}.{i}.{spec.kind}", type) for i in range(len(nodes))]
        for node, value in zip(nodes, values, strict=True):
            _insert_state(ctx, node, value, states[node.target], pages, slot_ids, kv_lens)
        slots = tuple(ir.Slot(value.name.rpartition(".")[0], (value,)) for value in values)
        group = ir.StateGroup(name, pool.name, spec, slot_ids.name, slots)
        ctx.caches = ir.CachePlan((*ctx.caches.pools, pool), ctx.caches.groups, (*ctx.caches.states, group))
    return True


def _insert_state(
    ctx: PassContext, node: FxNode, value: ir.Value, row: OpDef, pages: Any, slot_ids: FxNode, kv_lens: FxNode
) -> None:
    state = ctx.new_cache(kv_lens, value, pages)
    *tensors, cu_seqlens = node.args
    with ctx.before(node):
        target = getattr(torch.ops.precast, f"stateful_{row.name.removeprefix('precast.')}").default
        stateful = ctx.call(target, *tensors, state, slot_ids, cu_seqlens, kv_lens, **node.kwargs)
    ctx.replace(node, stateful)
