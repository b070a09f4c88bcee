"""The verifier's rules about the cache plan, and about the ops that write and read what it plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeGuard

from precast.ir import limits
from precast.ir.graph import symbols
from precast.ir.graph.schema import CacheGroup, Call, Const, EntrySpec, Group, Node, Pool, Ref, StateGroup, TensorType
from precast.ir.graph.text import format_type
from precast.ir.memory import caches
from precast.ir.memory.step_inputs import STEP_INPUTS, group_inputs
from precast.ir.ops import table as ops
from precast.ir.verify.facts import Facts, Fault, Rule, duplicates, same_type

MAX_CACHE_OPS = 100_000
"""Ops on caches, each counted once per call: no other check takes more than linear time in the graph's size."""

Resolve = Callable[[str], str | None]
"""From a name in a block to the name in `main` that a call binds it to; None for a value that the block makes."""


def _plan_names(facts: Facts) -> Iterator[Fault]:
    plan = facts.graph.caches
    yield from duplicates("pool", (pool.name for pool in plan.pools))
    yield from duplicates("group", (group.name for group in caches.groups(plan)))
    yield from duplicates("slot", (slot.name for _, slot in caches.slots(plan)))


def _plan_references(facts: Facts) -> Iterator[Fault]:
    plan = facts.graph.caches
    pools = {pool.name for pool in plan.pools}
    for group in caches.groups(plan):
        if group.pool not in pools:
            yield f"group {group.name}", f"there is no pool {group.pool}"
        if not group.slots:
            yield f"group {group.name}", "expected at least one slot"
    for unused in sorted(pools - {group.pool for group in caches.groups(plan)}):
        yield f"pool {unused}", "no group uses it"


def _page_counts(facts: Facts) -> Iterator[Fault]:
    pools = facts.graph.caches.pools
    declared = {symbol.name for symbol in facts.graph.symbols}
    fed = {size for value in facts.graph.inputs for size in value.type.shape}
    for pool in pools:
        if pool.pages not in declared:
            yield f"pool {pool.name}", f"its pages are counted by {pool.pages}, which is no declared symbol"
        if pool.pages in fed:
            yield f"pool {pool.name}", f"its pages are counted by {pool.pages}, which is a size of an input"
    yield from duplicates("symbol", (pool.pages for pool in pools), "counts the pages of two pools")


def _specs(facts: Facts) -> Iterator[Fault]:
    for group in caches.groups(facts.graph.caches):
        sizes = list(caches.spec_sizes(group))
        for name, size in sizes:
            if isinstance(size, int) and size < 1:
                yield f"group {group.name}", f"{name}: expected at least 1, found {size}"
        spec = group.spec
        if isinstance(spec, EntrySpec) and spec.rate > 0 and spec.page_size % spec.rate:
            yield f"group {group.name}", f"page_size: expected a multiple of rate {spec.rate}, found {spec.page_size}"
        if isinstance(spec, EntrySpec) and spec.rate != 1 and spec.window is not None:
            yield f"group {group.name}", f"expected a window or a rate, found window {spec.window} and rate {spec.rate}"
        reaches = [f"{name} {size}" for name, size in sizes if name in ("window", "chunk")]
        if len(reaches) > 1:
            yield f"group {group.name}", f"expected a window or chunks, found {' and '.join(reaches)}"


def _slots(facts: Facts) -> Iterator[Fault]:
    pages = {pool.name: pool.pages for pool in facts.graph.caches.pools}
    for group in caches.groups(facts.graph.caches):
        if group.pool not in pages:
            continue
        expected = caches.slot_types(group.spec, pages[group.pool])
        for slot in group.slots:
            types = [value.type for value in slot.tensors]
            if not _same_types(types, expected):
                found, wanted = (", ".join(map(format_type, some)) for some in (types, expected))
                yield f"slot {slot.name}", f"expected tensors {wanted} by the spec of its group, found {found}"


def _geometries(facts: Facts) -> Iterator[Fault]:
    first: dict[str, CacheGroup] = {}
    for group in caches.groups(facts.graph.caches):
        other = first.setdefault(group.pool, group)
        if not _same_types(caches.slot_types(group.spec, "pages"), caches.slot_types(other.spec, "pages")):
            yield f"group {group.name}", f"its pages have another geometry than those of {other.name} in the same pool"


def _same_types(types: Sequence[TensorType], others: Sequence[TensorType]) -> bool:
    return len(types) == len(others) and all(map(same_type, types, others))


def _slabs(facts: Facts) -> Iterator[Fault]:
    plan = facts.graph.caches
    if not plan.slab_bytes:
        for pool in plan.pools:
            if pool.pages_per_slab != 1:
                yield f"pool {pool.name}", f"{pool.pages_per_slab} pages a slab, in a plan without slabs"
        return
    if plan.slab_bytes not in range(2**63):
        yield "caches", f"slab_bytes: expected 0 to {2**63 - 1}, found {plan.slab_bytes}"
        return
    yield from duplicates("pool", (group.pool for group in caches.groups(plan)), "serves two groups despite slabs")
    owners = {group.pool: group for group in caches.groups(plan)}
    for pool in plan.pools:
        faults = _slab_faults(plan.slab_bytes, pool, owners.get(pool.name))
        yield from ((f"pool {pool.name}", fault) for fault in faults)


def _slab_faults(slab_bytes: int, pool: Pool, group: CacheGroup | None) -> Iterator[str]:
    """What is wrong with how the pages of the pool's group stand in a slab."""
    if pool.pages_per_slab < 1:
        yield f"pages_per_slab: expected at least 1, found {pool.pages_per_slab}"
        return
    stride, rest = divmod(slab_bytes, pool.pages_per_slab)
    if rest or stride % caches.PAGE_ALIGNMENT:
        wanted = f"expected a multiple of {caches.PAGE_ALIGNMENT} bytes a page"
        yield f"{wanted}, found {pool.pages_per_slab} pages in a slab of {slab_bytes} bytes"
    if group is None:
        return
    needed = _page_bytes(group)
    if needed is not None and needed > stride:
        yield f"a page of group {group.name} takes {needed} bytes, and has {stride}"


def _page_sizes(facts: Facts) -> Iterator[Fault]:
    """Sizes are bounded because slabs are computed from them, for a plan without slabs when it is loaded."""
    plan = facts.graph.caches
    if (count := len(caches.groups(plan))) > limits.MAX_GROUPS:
        yield "caches", f"expected at most {limits.MAX_GROUPS} groups, found {count}"
    for paged in plan.groups:
        if paged.spec.page_size > limits.MAX_PAGE_TOKENS:
            found = f"page_size: expected at most {limits.MAX_PAGE_TOKENS}, found {paged.spec.page_size}"
            yield f"group {paged.name}", found
    for group in caches.groups(plan):
        needed = _page_bytes(group)
        if needed is None:
            yield f"group {group.name}", "sizes: expected integers and expressions of tp and rank, of at least 1 each"
        elif needed > limits.MAX_PAGE_BYTES:
            yield f"group {group.name}", f"a page takes {needed} bytes, expected at most {limits.MAX_PAGE_BYTES}"


def _page_bytes(group: CacheGroup) -> int | None:
    """The bytes of a page of the group; None where a size is not known, or is below 1."""
    shapes = [kind.shape[1:] for slot in group.slots for kind in (value.type for value in slot.tensors)]
    try:
        sizes = [symbols.evaluate(size, caches.UNSHARDED) for shape in shapes for size in shape]
    except (KeyError, ZeroDivisionError):
        return None
    return caches.page_bytes(group) if min(sizes, default=1) >= 1 else None


def _group_inputs(facts: Facts) -> Iterator[Fault]:
    inputs = {value.name: value.type for value in facts.graph.inputs}
    for group in caches.groups(facts.graph.caches):
        for name, (dtype, size) in group_inputs(group).items():
            found = inputs.get(name)
            if found is None:
                yield f"group {group.name}", f"%{name} is no input of the graph"
            elif not (
                found.dtype == dtype and len(found.shape) == 1 and (size is None or symbols.equal(found.shape[0], size))
            ):
                shape = f"[{'any' if size is None else symbols.text(size)}]"
                yield f"group {group.name}", f"%{name}: expected {dtype}{shape}, found {format_type(found)}"
    fed = (name for group in caches.groups(facts.graph.caches) for name in caches.input_names(group))
    yield from duplicates(
        "input", (*fed, *STEP_INPUTS), "is the metadata of two groups, or twice of one, or of any step"
    )


def _cache_ops(facts: Facts) -> Iterator[Fault]:
    ops_of = {
        name: [(scope.at(i), node) for i, node in enumerate(scope.steps) if _is_cache_op(node)]
        for name, scope in facts.blocks.items()
    }
    checks = 0
    for index, step in enumerate(facts.graph.main):
        if not isinstance(step, Call):
            if _is_cache_op(step):
                yield from _cache_op(facts, facts.main.at(index), step, lambda name: name)
            continue
        inner = ops_of.get(step.block, [])
        checks += len(inner)
        if checks > MAX_CACHE_OPS:
            yield facts.main.at(index), f"more than {MAX_CACHE_OPS} ops on caches, over all calls"
            return
        for where, node in inner:
            yield from _cache_op(facts, f"{facts.main.at(index)}, {where}", node, step.args.get)


def _is_cache_op(step: Node | Call) -> TypeGuard[Node]:
    return isinstance(step, Node) and bool(_cache_args(step)[1])


def _cache_args(node: Node) -> tuple[list[str], list[str]]:
    """The op's arguments that are one slot's tensors, and those that say which pages or states of it."""
    op = ops.lookup(node.op, node.version)
    if op is None:
        return [], []
    held = [arg.name for arg in op.args if arg.name == "state" or arg.name.endswith("cache")]
    return held, [name for name, word in op.integers.items() if word.kind == "group"]


def _cache_op(facts: Facts, where: str, node: Node, resolve: Resolve) -> Iterator[Fault]:
    """The tensors of one slot, the metadata of its group, and the window or chunk of its group."""
    bound = {name: resolve(arg.name) for name, arg in node.args.items() if isinstance(arg, Ref)}
    names, metadata = _cache_args(node)
    paged = metadata != ["slots"]
    group, slot = facts.slots.get(bound.get(names[0]) or "", (None, None))
    if group is None or slot is None or isinstance(group, Group) != paged:
        yield where, f"{names[0]}: expected a tensor of a {'cache' if paged else 'state'} slot"
        return
    expected = {name: tensor.name for name, tensor in zip(names, slot.tensors, strict=False)}
    if isinstance(group, StateGroup):
        expected["slots"] = group.slot_ids
    else:
        expected |= {name: getattr(group.inputs, name) for name in metadata}
    for name, tensor in expected.items():
        if bound.get(name) != tensor:
            yield where, f"{name}: expected %{tensor} of slot {slot.name}, group {group.name}, found %{bound.get(name)}"
    for name in ("window", "chunk") if "page_indices" in metadata else ():
        size = getattr(group.spec, name, None)  # latents have no chunks
        if size is not None and node.args.get(name) != Const(size):
            yield where, f"{name}: expected {size}, that of group {group.name}, whose pages end there"
    if isinstance(group.spec, EntrySpec) and node.args.get("rate") != Const(group.spec.rate):
        yield where, f"rate: expected {group.spec.rate}, the tokens of an entry of group {group.name}"


CACHE_RULES = (
    Rule("IR040", "pools, groups and slots have names of their own", _plan_names),
    Rule("IR041", "each group has a pool and a slot, each pool a group", _plan_references),
    Rule("IR042", "each pool's pages are counted by a declared symbol of its own", _page_counts),
    Rule("IR043", "sizes of a spec are at least 1, a window excludes chunks, and pages are of whole blocks", _specs),
    Rule("IR044", "a slot's tensors are those of its group's spec", _slots),
    Rule("IR045", "groups of one pool have pages of one geometry", _geometries),
    Rule("IR046", "a group's metadata are graph inputs of the right types, and its own", _group_inputs),
    Rule(
        "IR047", "an op on a cache takes one slot's tensors, and metadata, window, chunk, rate of its group", _cache_ops
    ),
    Rule("IR048", "in a plan with slabs each group has a pool of its own, whose pages fit and fill a slab", _slabs),
    Rule("IR049", "a plan has few groups, whose pages' sizes are known, at least 1, and limited", _page_sizes),
)
