"""How other systems lay out the same caches: plans and tables that the same scheduler runs on.

**Uniform pages**, after vLLM's hybrid cache manager, as its design page describes it
(https://docs.vllm.ai/en/latest/design/hybrid_kv_cache_manager/) and its function reference:

- All memory is one pool of blocks of equal bytes.
- Layers of one kind (full, window, state) are cut into groups of equally many layers, as many as the rarest kind has;
  as the most frequent has where that is less than 1.5 times as many. A group with fewer is padded. Each group has a
  block table of its own; blocks behind a window are freed.
- A layer's part of a block is 16 tokens of the kind with the largest tokens; kinds with smaller tokens have more of
  them in a block, and padding where the sizes don't divide.
- With states, blocks are enlarged, in steps of 16 tokens, until a layer's part holds the states of a layer (recurrence
  and conv together); they are padded up to it. A sequence has one block in each group of states.

**One table**: no groups; every layer keeps every token, also behind its window. That is what the same system does when
its hybrid manager is off. Not for models with states.

**Static split**: the pools of our plan, without slabs, each with a share of the memory that is fixed at start: in
proportion to what the mean sequence of a workload keeps in each, beside room for one chunk of a prompt in each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from precast.ir.graph.schema import CachePlan, Group, Pool, StateGroup
from precast.ir.memory import caches
from precast.loader.cache.arena import Arena
from precast.loader.cache.pages import PagePool
from precast.loader.cache.tables import PageTables

BLOCK_TOKENS = 16


def uniform_plan(plan: CachePlan) -> CachePlan:
    """The plan of uniform pages: a slab is a block, which any group draws."""
    # The states of a layer, recurrence and conv, are one block's part.
    kinds: tuple[Group | StateGroup, ...] = (*plan.groups, *plan.states[:1])
    num_layers = {group.name: len(group.slots) for group in kinds}
    fewest, most = min(num_layers.values()), max(num_layers.values())
    size = most if most < 1.5 * fewest else fewest
    part = layer_block_bytes(plan)
    groups: list[Group] = []
    state_groups: list[StateGroup] = []
    pool_names: list[str] = []
    for group in kinds:
        for i in range(-(-num_layers[group.name] // size)):
            name = f"{group.name}.{i}"
            pool_names.append(name)
            if isinstance(group, StateGroup):
                state_groups.append(msgspec.structs.replace(group, name=name, pool=name, slots=()))
                continue
            tokens = part // _layer_token_bytes(group) // BLOCK_TOKENS * BLOCK_TOKENS
            spec = msgspec.structs.replace(group.spec, page_size=tokens)
            groups.append(msgspec.structs.replace(group, name=name, pool=name, spec=spec, slots=()))
    pools = tuple(Pool(name, f"P_{name}") for name in pool_names)
    return CachePlan(pools, tuple(groups), tuple(state_groups), slab_bytes=size * part)


def layer_block_bytes(plan: CachePlan) -> int:
    """Bytes of one layer's part of a uniform block."""
    largest = max(_layer_token_bytes(group) for group in plan.groups)
    if not plan.states:
        return BLOCK_TOKENS * largest
    of_a_layer = sum(map(caches.state_bytes, plan.states)) / max(len(group.slots) for group in plan.states)
    return math.ceil(of_a_layer / (BLOCK_TOKENS * largest)) * BLOCK_TOKENS * largest


def one_table_plan(plan: CachePlan) -> CachePlan | None:
    """The plan of one table; None for one with states."""
    if plan.states:
        return None
    block = BLOCK_TOKENS * sum(map(caches.token_bytes, plan.groups))
    spec = msgspec.structs.replace(plan.groups[0].spec, page_size=BLOCK_TOKENS, window=None)
    group = msgspec.structs.replace(plan.groups[0], name="all", pool="all", spec=spec, slots=())
    return CachePlan((Pool("all", "P_all"),), (group,), (), slab_bytes=block)


def split_tables(plan: CachePlan, cache_bytes: int, lengths: Sequence[int], chunk: int) -> SplitTables:
    """The tables of a static split for sequences of these lengths."""
    page_bytes = caches.pool_page_bytes(plan)
    reserved, kept = dict.fromkeys(page_bytes, 0), dict.fromkeys(page_bytes, 0)
    for group in caches.groups(plan):
        reserved[group.pool] += caches.peak_pages(group, chunk, chunk)
        kept[group.pool] += sum(caches.kept_pages(group, length) for length in lengths)
    rest = cache_bytes - sum(reserved[name] * page_bytes[name] for name in page_bytes)
    per_page = rest / sum(kept[name] * page_bytes[name] for name in page_bytes)
    return SplitTables(plan, {name: reserved[name] + int(kept[name] * per_page) for name in page_bytes})


class SplitTables(PageTables):
    """Tables over pools that each have an arena of their own, whose slabs are their pages."""

    def __init__(self, plan: CachePlan, num_pages: Mapping[str, int]) -> None:
        pools = tuple(msgspec.structs.replace(pool, pages_per_slab=1) for pool in plan.pools)
        super().__init__(msgspec.structs.replace(plan, pools=pools), Arena(0))
        self.num_pages = dict(num_pages)
        self.pools = {name: PagePool(Arena(count), 1) for name, count in num_pages.items()}
        self.pool_of = {group.name: self.pools[group.pool] for group in self.groups}

    def can_take(self, pages: Mapping[str, int], freed: Mapping[str, int] | None = None) -> bool:
        left = {name: pool.num_available for name, pool in self.pools.items()}
        for name, count in self.by_pool(pages).items():
            left[name] += (freed or {}).get(name, 0) - count
        return min(left.values()) >= 0

    def can_hold(self, length: int, step: int) -> bool:
        return all(caches.peak_pages(group, length, step) <= self.num_pages[group.pool] for group in self.groups)


def _layer_token_bytes(group: Group) -> int:
    return caches.token_bytes(group) // len(group.slots)
