"""The steps of one of several ranks that share the model, whatever runs them.

Rank 0 tells the others what each step computes before it begins it, and they do the same (`RankSteps.obey`): all draw
the same tokens, from equal logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from precast.ir.memory import caches
from precast.loader import sizing
from precast.loader.cache.spans import PageCopy
from precast.loader.device import Event
from precast.loader.run.batch import Arrays
from precast.loader.run.places import Layout, places_bytes
from precast.loader.run.steps import StepRunner, Ticket
from precast.loader.schedule.decoding import DecodeBatch
from precast.loader.schedule.requests import Step
from precast.loader.world.agree import Captured
from precast.loader.world.follower import Follower
from precast.loader.world.lead import Lead
from precast.loader.world.orders import Kind, Order, Orders, Part


class RankSteps(StepRunner):
    """What a `StepRunner` of one rank has besides. Rank 0's is used as any other; those of the others obey, and are
    told nothing else.

    What rank 0 calls raises TargetError besides, for a rank that is lost.
    """

    def join(self, world: Lead | Follower) -> None:
        """Be the runner of a rank of this world."""
        capacities = sizing.capacities(self.graph, self.limits, self.num_slabs)
        groups = [group.name for group in caches.groups(self.graph.caches)]
        self.orders = Orders(capacities, groups, places_bytes(capacities))
        self._world = world
        self._lead = world if isinstance(world, Lead) else None
        self._at_close: list[Callable[[], object]] = []

    @property
    def max_order_bytes(self) -> int:
        """The longest that rank 0 orders."""
        return self.orders.max_bytes

    def decode(self, raw: memoryview) -> tuple[Order, list[Part]]:
        """What rank 0 has ordered this rank to do, for `obey`. Raises what `Orders.decode` raises."""
        return self.orders.decode(raw)

    def launch(
        self, step: Step, decoding: DecodeBatch | Sequence[DecodeBatch] | None = None, *, is_timed: bool = False
    ) -> Ticket:
        """As `StepRunner.launch`, on all ranks. A step whose logits are wanted has ended: what is lost of a world
        leaves garbage in them, and nobody collects it."""
        assert self._lead is not None, "the others obey"
        with self._lead.step():
            ticket = super().launch(step, decoding, is_timed=is_timed)
            if decoding is None:
                ticket.arrived.synchronize()
        return ticket

    def collect(self, ticket: Ticket) -> list[int]:
        """As `StepRunner.collect`."""
        assert self._lead is not None, "the others obey"
        with self._lead.step(is_told=True):  # what is lost of a world leaves garbage in the place of tokens
            return super().collect(ticket)

    def obey(self, order: Order, parts: Sequence[Part]) -> None:
        """Do what rank 0 has ordered: what `launch`, `capture_next` or `copy_pages` does there."""
        self.opened()
        if order.kind == Kind.CAPTURE:
            self._capture_together()
            return
        self._arrivals.rotate()
        arrived = self._arrivals[0].arrived
        with self.device.use(), self.device.no_autograd():
            try:
                self._copy(order.copies)
                if order.kind == Kind.STEP:
                    self._places.receive(parts, arrived)
                    if order.num_tokens:
                        self.captures.replay(self._sizes[order.num_tokens], self._memory())
                    else:
                        self._compute(order)
            finally:
                arrived.record()

    def capture_next(self) -> None:
        """As `StepRunner.capture_next`, on all ranks: what one of them can't capture is captured by none."""
        assert self._lead is not None, "the others obey"
        with self._lead.step("capture"):
            self._lead.send(self._message(Order(Kind.CAPTURE)))
            self._capture_together()

    def _message(self, order: Order) -> list[bytes | memoryview]:
        """An order without inputs, for all other ranks."""
        return self.orders.encode(order)

    def _capture_together(self) -> None:
        """Capture the next size; it is kept if all ranks could."""
        try:
            super().capture_next()
        except RuntimeError as error:
            self.captures.stop("capture failed", error)
        mine = Captured(self.captures.num_captured, self.captures.failure)
        captured = self._world.gather("capture", mine, timeout="capture")
        failures = [f"rank {rank}: {each.failure}" for rank, each in enumerate(captured) if each.failure]
        self.captures.keep(min(each.num_captured for each in captured), ", ".join(failures))

    def copy_pages(self, copies: Iterable[PageCopy]) -> None:
        """As `StepRunner.copy_pages`, on all ranks."""
        assert self._lead is not None, "the others obey"
        if listed := list(copies):
            with self._lead.step():
                self._lead.send(self._message(Order(Kind.COPIES, listed)))
                self._copy(listed)

    def _fill(self, order: Order, arrays: Arrays, until: Event, layout: Layout) -> None:
        assert self._lead is not None, "the others obey"
        self._copy(order.copies)
        lengths = self._places.write(arrays, layout)
        # Before this rank's own work: the others begin at the same time.
        self._lead.send(self.orders.encode(order, self._places.written(lengths, layout)))
        self._places.copy(lengths, until, layout)

    def at_close(self, call: Callable[[], object]) -> None:
        """`call` is called when the runner is closed."""
        self._at_close.append(call)

    def _release(self) -> None:
        while self._at_close:
            self._at_close.pop()()
        # A kernel that had waited for a rank until its own limit has left the GPU with an error, which was raised.
        with suppress(RuntimeError):
            super()._release()
