"""Random plans, random growth, sharing, eviction and release: every token stays where it was written, nothing leaks.

Each cached token's place is written with a number of its own, in the real cache tensors; if two pages shared a byte, or
one were given out while it is held, a number would be lost.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterator

import msgspec
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from precast.ir.graph.schema import (
    CachePlan,
    Group,
    LatentSpec,
    PagedInputs,
    PagedSpec,
    Pool,
    Slot,
    StateGroup,
    StateSpec,
    Value,
)
from precast.ir.memory import caches
from precast.loader.cache.arena import Arena
from precast.loader.cache.memory import CacheMemory
from precast.loader.cache.tables import PageTables, SequenceTable
from precast.loader.torch_device import CpuDevice

INPUTS = PagedInputs("a", "b", "c", "d")
Spec = PagedSpec | LatentSpec | StateSpec

page_sizes = st.sampled_from((1, 2, 3, 4, 8))
windows = st.one_of(st.none(), st.integers(1, 12))
specs = st.one_of(
    st.builds(PagedSpec, st.integers(1, 3), st.integers(1, 9), st.just(2), st.just("int32"), page_sizes, windows),
    st.builds(
        PagedSpec, st.just(2), st.just(5), st.just(40), st.just("float64"), page_sizes, st.none(), st.integers(1, 9)
    ),
    st.builds(LatentSpec, st.integers(1, 70), st.integers(1, 9), st.just("float32"), page_sizes, windows),
    st.builds(StateSpec, st.just("state"), st.tuples(st.integers(1, 300)), st.just("int64")),
)
plans = st.lists(st.tuples(specs, st.integers(1, 3)), min_size=1, max_size=5)


def plan_of(drawn: list[tuple[Spec, int]]) -> CachePlan:
    """A plan with a group, and a pool, for each spec and number of layers; slabs as the loader chooses them."""
    pools, groups, states = [], [], []
    for i, (spec, layers) in enumerate(drawn):
        types = caches.slot_types(spec, f"P{i}")
        slots = tuple(
            Slot(f"{i}.{n}", tuple(Value(f"{i}.{n}.{part}", kind) for part, kind in enumerate(types)))
            for n in range(layers)
        )
        pools.append(Pool(f"pool{i}", f"P{i}"))
        if isinstance(spec, StateSpec):
            states.append(StateGroup(f"g{i}", f"pool{i}", spec, f"ids{i}", slots))
        else:
            groups.append(Group(f"g{i}", f"pool{i}", spec, INPUTS, slots))
    return caches.with_slabs(CachePlan(tuple(pools), tuple(groups), tuple(states)))


class Sequence(msgspec.Struct):
    """A table, the number that each position was written with, and the one of its states."""

    table: SequenceTable
    numbers: list[int]
    state: int = 0


class Tables(RuleBasedStateMachine):
    """Any order of what the engine does with tables."""

    @initialize(drawn=plans, slabs=st.integers(0, 12))
    def begin(self, drawn: list[tuple[Spec, int]], slabs: int) -> None:
        self.plan = plan_of(drawn)
        self.memory = CacheMemory(self.plan, slabs + len(self.plan.pools), CpuDevice())
        self.memory.arena.fill_(0xFF)
        self.tables = PageTables(self.plan, Arena(self.memory.num_slabs))
        self.sequences: list[Sequence] = []
        self.kept: list[tuple[str, list[int]]] = []
        self.evicted: Counter[str] = Counter()
        self.counter = itertools.count(1)

    # --- actions -----------------------------------------------------------------------------------------------

    @rule(tokens=st.integers(1, 20))
    def add(self, tokens: int) -> None:
        self.sequences.append(Sequence(self.tables.new_table(), []))
        self.grow(len(self.sequences) - 1, tokens, False)

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 99), tokens=st.integers(1, 20), evicts=st.booleans())
    def grow(self, which: int, tokens: int, evicts: bool) -> None:
        sequence = self.sequences[which % len(self.sequences)]
        table, start = sequence.table, len(sequence.numbers)
        if evicts:
            self.evict(which)
        length, before = start + tokens, self.pages_of(table)
        missing = self.tables.missing(table, length)
        if not self.tables.can_take(self.tables.missing(table, length)):
            assert self.slabs_for(missing) > self.tables.arena.num_free
            return
        assert self.slabs_for(missing) <= self.tables.arena.num_free
        self.tables.grow(table, length)
        after = self.pages_of(table)
        assert all(after[name][: len(pages)] == pages for name, pages in before.items())
        assert {name: len(after[name]) - len(before[name]) for name in missing} == missing
        self.write(sequence, tokens)

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 99))
    def evict(self, which: int) -> None:
        sequence = self.sequences[which % len(self.sequences)]
        table, position = sequence.table, len(sequence.numbers)
        before = {name: (table.first[name], len(pages)) for name, pages in table.pages.items()}
        self.tables.evict(table, position)
        for group in self.plan.groups:
            first, count = before[group.name]
            gone = table.first[group.name] - first
            assert (gone >= 0, len(table.pages[group.name])) == (True, count - gone)
            seen = caches.first_visible(group.spec, position) // group.spec.page_size
            assert table.first[group.name] == max(first, min(seen, first + count)), "all that is unseen, and no more"
            self.evicted[group.pool] += gone

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 99))
    def end(self, which: int) -> None:
        self.tables.release(self.sequences.pop(which % len(self.sequences)).table)

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 99))
    def restart(self, which: int) -> None:
        sequence = self.sequences[which % len(self.sequences)]
        self.tables.release(sequence.table)
        sequence.numbers = []

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 99))
    def fork(self, which: int) -> None:
        """Another sequence goes on from a prefix: whole pages, and what the next token sees, are shared."""
        source = self.sequences[which % len(self.sequences)]
        table = source.table
        block = math.lcm(*(group.spec.page_size for group in self.plan.groups))
        length = len(source.numbers) // block * block
        first, pages = {}, {}
        for group in self.plan.groups:
            name, size = group.name, group.spec.page_size
            first[name] = caches.first_visible(group.spec, length) // size
            pages[name] = table.pages[name][
                max(first[name] - table.first[name], 0) : length // size - table.first[name]
            ]
            if first[name] < table.first[name]:
                return
        own = self.tables.new_table()
        if not length or (self.plan.states and length < len(source.numbers)):
            return
        if not self.tables.can_take({group.name: 1 for group in self.plan.states}):
            return
        own.first.update(first)
        for name, shared in pages.items():
            own.pages[name].extend(shared)
        self.tables.hold(own)
        self.tables.grow(own, length)
        for group in self.plan.states:
            self.memory.copy_page(group.name, table.pages[group.name][0], own.pages[group.name][0])
        self.sequences.append(Sequence(own, source.numbers[:length], source.state))

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 99), group=st.integers(0, 9))
    def keep(self, which: int, group: int) -> None:
        """Hold the pages of a group beyond the sequence's end."""
        names = [found.name for found in self.tables.groups]
        name = names[group % len(names)]
        pages = list(self.sequences[which % len(self.sequences)].table.pages[name])
        for page in pages:
            self.tables.pool_of[name].retain((page,))
        self.kept.append((name, pages))

    @precondition(lambda self: self.kept)
    @rule(which=st.integers(0, 99))
    def drop(self, which: int) -> None:
        name, pages = self.kept.pop(which % len(self.kept))
        self.tables.pool_of[name].free(pages)

    # --- what must hold ----------------------------------------------------------------------------------------

    @invariant()
    def every_page_has_its_holders(self) -> None:
        holders: Counter[tuple[str, int]] = Counter()
        for sequence in self.sequences:
            for name, pages in sequence.table.pages.items():
                assert len(set(pages)) == len(pages), "a sequence has a page once"
                holders.update((name, page) for page in pages)
        for name, pages in self.kept:
            holders.update((name, page) for page in pages)
        for (name, page), count in holders.items():
            assert self.tables.pool_of[name].holders(page) == count
        slabs: Counter[int] = Counter()
        for group in self.tables.groups:
            pool = self.tables.pool_of[group.name]
            pages = {page for name, page in holders if name == group.name}
            owned = {page // pool.pages_per_slab for page in pages}
            assert (pool.num_held, pool.num_slabs) == (len(pages), len(owned))
            slabs.update(owned)
        assert all(count == 1 for count in slabs.values()), "a slab is of one pool"
        assert self.tables.arena.num_free == self.memory.num_slabs - len(slabs)

    @invariant()
    def every_token_is_where_it_was_written(self) -> None:
        for sequence in self.sequences:
            for group, pages, offsets, numbers in self.places(sequence, 0):
                for tensor in self.tensors(group):
                    found = tensor[pages, offsets].flatten(1)
                    assert bool((found == numbers[:, None]).all())
            for states in self.plan.states:
                for page in sequence.table.pages[states.name]:
                    assert all(bool((tensor[page] == sequence.state).all()) for tensor in self.tensors(states))

    @invariant()
    def usage_adds_up(self) -> None:
        usage = self.tables.usage()
        for name, pool in self.tables.pools.items():
            found = usage[name]
            assert found.pages_evicted == self.evicted[name]
            assert found.pages == found.pages_in_use + found.pages_free + (
                self.tables.arena.num_free * pool.pages_per_slab
            )
            assert 0 <= found.waste_bytes <= pool.num_slabs * self.plan.slab_bytes

    def teardown(self) -> None:
        if not hasattr(self, "sequences"):
            return
        for sequence in self.sequences:
            self.tables.release(sequence.table)
        for name, pages in self.kept:
            self.tables.pool_of[name].free(pages)
        assert self.tables.arena.num_free == self.memory.num_slabs
        assert all(pool.num_held == 0 for pool in self.tables.pools.values())

    # --- parts -------------------------------------------------------------------------------------------------

    def pages_of(self, table: SequenceTable) -> dict[str, list[int]]:
        return {name: list(pages) for name, pages in table.pages.items()}

    def slabs_for(self, missing: dict[str, int]) -> int:
        pools = self.tables.pool_of
        return sum(
            max(0, math.ceil((count - pools[name].num_room) / pools[name].pages_per_slab))
            for name, count in missing.items()
        )

    def tensors(self, group: Group | StateGroup) -> list[torch.Tensor]:
        return [self.memory.tensors[value.name] for slot in group.slots for value in slot.tensors]

    def places(
        self, sequence: Sequence, start: int
    ) -> Iterator[tuple[Group, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """By group, of the tokens from `start` on that are still held: pages, offsets in them, numbers."""
        for group in self.plan.groups:
            evicted, size = sequence.table.first[group.name], group.spec.page_size
            positions = torch.arange(max(start, evicted * size), max(start, evicted * size, len(sequence.numbers)))
            pages = torch.tensor(sequence.table.pages[group.name], dtype=torch.int64)
            numbers = torch.tensor(sequence.numbers, dtype=torch.int64)
            yield group, pages[positions // size - evicted], positions % size, numbers[positions]

    def write(self, sequence: Sequence, tokens: int) -> None:
        """New numbers for the next tokens, and for the states."""
        start = len(sequence.numbers)
        sequence.numbers += itertools.islice(self.counter, tokens)
        sequence.state = next(self.counter)
        for group, pages, offsets, numbers in self.places(sequence, start):
            for tensor in self.tensors(group):
                rest = [1] * (tensor.dim() - 2)
                tensor[pages, offsets] = numbers.to(tensor.dtype).view(-1, *rest).expand(-1, *tensor.shape[2:])
        for states in self.plan.states:
            (page,) = sequence.table.pages[states.name]
            for tensor in self.tensors(states):
                tensor[page] = sequence.state


TestTables = Tables.TestCase
TestTables.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)


def random_spec(draw: random.Random) -> Spec:
    size, window = draw.choice((1, 2, 3, 4, 8)), draw.choice((None, 1, 5, 12))
    return draw.choice(
        (
            PagedSpec(draw.randint(1, 3), draw.randint(1, 9), 2, "int32", size, window),
            PagedSpec(2, 5, 40, "float64", size, None, draw.randint(1, 9)),
            LatentSpec(draw.randint(1, 70), draw.randint(1, 9), "float32", size, window),
            StateSpec("state", (draw.randint(1, 300),), "int64"),
        )
    )


@pytest.mark.parametrize("seed", range(10))
def test_a_thousand_steps(seed: int) -> None:
    draw, machine = random.Random(seed), Tables()
    drawn = [(random_spec(draw), draw.randint(1, 3)) for _ in range(draw.randint(1, 4))]
    machine.begin(drawn=drawn, slabs=draw.randint(0, 30))
    for step in range(1000):
        action = draw.choices(
            ("add", "grow", "evict", "end", "restart", "fork", "keep", "drop"), (4, 30, 4, 2, 1, 6, 2, 4)
        )[0]
        which = draw.randrange(100)
        if action == "add":
            machine.add(tokens=draw.randint(1, 20))
        elif action == "drop":
            if machine.kept:
                machine.drop(which=which)
        elif machine.sequences:
            more = {
                "grow": {"tokens": draw.randint(1, 9), "evicts": draw.random() < 0.8},
                "keep": {"group": which // 9},
            }
            getattr(machine, action)(which=which, **more.get(action, {}))
        machine.every_page_has_its_holders()
        machine.usage_adds_up()
        if step % 10 == 0:
            machine.every_token_is_where_it_was_written()
        if len(machine.sequences) > 12:
            machine.end(which=which)
    machine.every_token_is_where_it_was_written()
    machine.teardown()
