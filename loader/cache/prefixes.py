"""Reuse of what other sequences computed: pages and states of a prefix, found by the content of its tokens.

A sequence is cut into spans of whole pages of every group. The digest of a span covers all tokens up to its end, so
equal digests mean equal prefixes. A computed span stays known when its sequence has ended, with its pages in the
groups that see everything. A sequence can go on from the end of a span only if two more things are there, which are
kept at some spans only, the points:

- in groups with a window or chunk, the pages that the next token sees (not always those of the span),
- in groups of states, a copy of the state after the span's last token, in a page of its own.

Points are made where a chunk of a prompt ends, where a prompt leaves what was known, and where a sequence ends.
What is reused is what would have been computed: no digest is shared by sequences whose keys are rotated differently,
and at least one token of a sequence is always computed.

Pages that only known spans hold are given up, those used longest ago first, whenever a sequence needs pages.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections import Counter
from collections.abc import Callable, Hashable
from typing import NamedTuple

from precast.ir.memory import caches
from precast.loader.cache.sequence import CachedSequence
from precast.loader.cache.spans import PageCopy, Point, Span
from precast.loader.cache.tables import PageTables, SequenceTable, forgets

STATE_SPAN = 64
"""Tokens a span where no group has pages."""
MAX_SPANS = 1 << 16
"""Known spans that no sequence uses: without pages nothing else bounds them."""


class Match(NamedTuple):
    """What a sequence could go on from. Nothing is held for it: it is true until spans are given up.

    The `spans` are those of its first `length` tokens, and `table` would be its page table; `known_length` tokens are
    known, and of those after `length` no point tells what comes next.
    """

    spans: list[Span]
    length: int
    known_length: int
    table: SequenceTable


class Prefixes:
    """The known spans. They hold pages of the pools like any sequence, and give them up when they are asked to."""

    def __init__(
        self, tables: PageTables, *, kind_of: Callable[[int], Hashable] = lambda _: 0, reuses: bool = True
    ) -> None:
        """Sequences of unequal `kind_of(prefill_length)` share nothing. `reuses` False: nothing is ever known."""
        self._tables = tables
        self._kind_of = kind_of
        self._reuses = reuses
        plan = tables.plan
        self._full = [group for group in plan.groups if not forgets(group.spec)]
        self._forgetting = [group for group in plan.groups if forgets(group.spec)]
        self._states = plan.states if reuses else ()
        self.has_states = bool(self._states)
        self.span_tokens = math.lcm(*(group.spec.page_size for group in plan.groups)) if plan.groups else STATE_SPAN
        self._known: dict[bytes, Span] = {}
        self._unused: dict[bytes, Span] = {}  # of the known ones, those without users: used longest ago first
        self._points: dict[bytes, Span] = {}  # of the known ones, those with a point: made or used longest ago first
        self._in_points = {group.name: Counter[int]() for group in self._forgetting}  # how many points hold each page
        self._reclaimable = dict.fromkeys(tables.pool_of, 0)
        self._saves: dict[tuple[str, int], int] = {}  # group and target: the source, in the order of the copies

    @property
    def num_spans(self) -> int:
        return len(self._known)

    def reclaimable(self, match: Match | None = None) -> dict[str, int]:
        """Pages by group that `drop_one` gives back at most; some of windows may still be in use."""
        found = self._reclaimable.copy()
        for span in () if match is None else match.spans:
            if not span.num_users:
                for name, pages in span.pages.items():
                    found[name] -= len(pages)
        return found

    # --- going on after a prefix ---------------------------------------------------------------------------------

    def match(self, sequence: CachedSequence) -> Match:
        """What the sequence, which has no pages, could go on from; it changes nothing."""
        spans = self._chain(sequence) if sequence.reuses_prefixes else []
        known = len(spans) * self.span_tokens
        if self._forgetting or self._states:
            while spans and spans[-1].point is None:
                spans.pop()
        table, point = self._tables.new_table(), spans[-1].point if spans else None
        held = [span.pages for span in spans]
        if point is not None:
            table.first.update(point.first)
            held.append(point.pages)
        for each in held:
            for name, pages in each.items():
                table.pages[name].extend(pages)
        return Match(spans, len(spans) * self.span_tokens, known, table)

    def start(self, sequence: CachedSequence, match: Match) -> None:
        """Let the sequence go on from what `match` has just found for it."""
        sequence.num_computed = sequence.num_reused = match.length
        sequence.num_registered = len(match.spans)
        sequence.shared_length = match.known_length
        sequence.table = match.table
        self._tables.hold(match.table)
        for span in match.spans:
            self._use(span, sequence)
        point = match.spans[-1].point if match.spans else None
        if point is not None:
            if not point.is_proven:
                sequence.points.append(point)
            for name, page in point.states.items():
                self._tables.pool_of[name].retain((page,))
                sequence.restores[name] = page
            self._points[match.spans[-1].digest] = self._points.pop(match.spans[-1].digest)

    def restores(self, sequence: CachedSequence) -> list[PageCopy]:
        """The states that the sequence goes on from, to be copied before its first chunk."""
        return [PageCopy(name, page, sequence.table.pages[name][0]) for name, page in sequence.restores.items()]

    def restored(self, sequence: CachedSequence) -> None:
        """The sequence's first chunk is computed: the states that it went on from may be dropped."""
        for name, page in sequence.restores.items():
            self._free_state(name, page)
        sequence.restores.clear()

    # --- what sequences leave ------------------------------------------------------------------------------------

    def register(self, sequence: CachedSequence) -> None:
        """Make known what the sequence has computed, while it has its pages. A point is made at its last whole span.

        Where the sequence left what was known, and its pages still show it, there is a point too; and where all of its
        tokens are whole spans, one span before, for who begins with the same ones and has to compute the last.
        """
        # With states to restore nothing is computed yet, and its states are not its own.
        if sequence.restores or not sequence.reuses_prefixes or not self._reuses or self._is_withdrawn(sequence):
            return
        count = min(sequence.num_computed, sequence.num_known) // self.span_tokens
        digests = self._digests(sequence, count)
        for index in range(sequence.num_registered, count):
            span = self._known.get(digests[index])
            if span is None or not span.num_users:
                self._publish(span, index, sequence)
        sequence.num_registered = max(sequence.num_registered, count)
        if self._forgetting or self._states:
            same = min(sequence.num_computed, sequence.num_known - 1) // self.span_tokens
            for end in {count, same, min(sequence.shared_length // self.span_tokens, count)} - {0}:
                self._make_point(digests[end - 1], end * self.span_tokens, sequence)

    def prove(self, sequence: CachedSequence) -> None:
        """A token was drawn from all that the sequence stands on: it stays known if others fail that go on from it."""
        sequence.is_proven = True
        proven: list[Span | Point] = [*sequence.spans, *sequence.points]
        for each in proven:
            each.is_proven = True

    def leave(self, sequence: CachedSequence) -> None:
        """The sequence gives up its pages: its spans may be dropped, the last ones first."""
        self.restored(sequence)
        sequence.is_proven = False
        sequence.points.clear()
        while sequence.spans:
            span = sequence.spans.pop()
            span.num_users -= 1
            if span.num_users:
                continue
            if self._known.get(span.digest) is span:
                self._unused[span.digest] = span
                self._count(span.pages, 1)
            else:  # withdrawn meanwhile
                self._free(span.pages)
        sequence.num_registered = 0
        sequence.shared_length = 0
        while len(self._unused) > MAX_SPANS:
            self.drop_one()

    def withdraw(self, sequence: CachedSequence) -> None:
        """Forget what the sequence computed, as its logits are NaN: nobody goes on from there again.

        What others computed goes too where no token was drawn from it yet, since the NaN may stand there; else it
        stays, without the points that the sequence made in it. Spans that continue those forgotten go with them.
        Sequences that stand on them now go on, and leave nothing.
        """
        sequence.reuses_prefixes = False
        for span in [span for span in self._points.values() if span.point in sequence.points]:
            self._drop_point(span)
        num_reused = sequence.num_reused // self.span_tokens
        gone = {
            span.digest
            for i, span in enumerate(sequence.spans)
            if self._known.get(span.digest) is span and (i >= num_reused or not span.is_proven)
        }
        children: dict[bytes | None, list[bytes]] = {}
        for span in self._known.values():
            children.setdefault(span.parent, []).append(span.digest)
        pending = list(gone)
        while pending:
            more = [digest for digest in children.get(pending.pop(), ()) if digest not in gone]
            gone.update(more)
            pending += more
        for digest in gone:
            span = self._known[digest]
            if span.num_users:
                self._drop_point(span)
                del self._known[digest]
            else:
                self._drop(span)

    def _is_withdrawn(self, sequence: CachedSequence) -> bool:
        """Whether a span that the sequence stands on was withdrawn: then so was the last one."""
        return bool(sequence.spans) and self._known.get(sequence.spans[-1].digest) is not sequence.spans[-1]

    def take_saves(self) -> list[PageCopy]:
        """The states to be copied into points before the next step, each target once."""
        return [PageCopy(name, source, target) for (name, target), source in self._saves.items()]

    def saved(self) -> None:
        """The copies of `take_saves` are made."""
        self._saves.clear()

    # --- giving up -----------------------------------------------------------------------------------------------

    def drop_one(self, keep: Match | None = None) -> bool:
        """Give up the span that was used longest ago, or where all are in use a point; False: nothing left to free.

        What `keep` needs stays; `touch` has been called for it.
        """
        kept = [] if keep is None else keep.spans
        oldest = next(iter(self._unused.values()), None)
        if oldest is not None and oldest not in kept[oldest.index : oldest.index + 1]:
            self._drop(oldest)
            return True
        last = kept[-1].point if kept else None
        for span in self._points.values():
            if span.point is not None and span.point is not last and self._frees(span.point, last):
                self._drop_point(span)
                return True
        return False

    def touch(self, match: Match) -> None:
        """What `match` found is wanted: it is given up last."""
        for span in reversed(match.spans):
            if not span.num_users:
                self._unused[span.digest] = self._unused.pop(span.digest)
        if match.spans and match.spans[-1].point is not None:
            self._points[match.spans[-1].digest] = self._points.pop(match.spans[-1].digest)

    def _drop(self, span: Span) -> None:
        """Give up a span without users."""
        del self._unused[span.digest], self._known[span.digest]
        self._count(span.pages, -1)
        self._free(span.pages)
        self._drop_point(span)

    def _frees(self, point: Point, kept: Point | None) -> bool:
        """Whether a page becomes free without this point and others, but for the `kept` one: none but points hold it.

        Windows of running sequences may show the same pages.
        """
        return bool(point.states) or any(
            self._tables.pool_of[name].holders(page) == self._in_points[name][page]
            and (kept is None or page not in kept.pages[name])
            for name, pages in point.pages.items()
            for page in pages
        )

    def drop_points(self) -> None:
        """Give up all points, for states that may be wrong."""
        for span in list(self._points.values()):
            self._drop_point(span)

    def clear(self) -> None:
        """Give up everything that no running sequence stands on, and all points."""
        while self.drop_one():
            pass
        self.drop_points()

    # --- spans ---------------------------------------------------------------------------------------------------

    def _chain(self, sequence: CachedSequence) -> list[Span]:
        """The known spans that the sequence begins with, leaving one token to compute."""
        found: list[Span] = []
        most = (len(sequence.token_ids) - 1) // self.span_tokens
        while len(found) < most:
            # Digests are made as far as they are needed: most requests differ from all others early.
            digests = self._digests(sequence, len(found) + 1)
            span = self._known.get(digests[len(found)])
            if span is None:
                break
            found.append(span)
        return found

    def _digests(self, sequence: CachedSequence, count: int) -> list[bytes]:
        """The digests of at least the first `count` spans, which have all their tokens."""
        made = sequence.digests
        while len(made) < count:
            before = made[-1] if made else repr(self._kind_of(sequence.prefill_length)).encode()
            start = len(made) * self.span_tokens
            tokens = sequence.token_ids[start : start + self.span_tokens].tobytes()
            made.append(hashlib.blake2b(before + tokens, digest_size=32).digest())
        return made

    def _publish(self, span: Span | None, index: int, sequence: CachedSequence) -> None:
        """Make a span known that the sequence has computed.

        If it is known, and no point led there, the sequence's own pages are kept in place of the known ones: so its
        later spans aren't kept without this one, and nothing is kept twice.
        """
        pages = self._pages_of(index, sequence)
        if span is None:
            digest, parent = sequence.digests[index], sequence.digests[index - 1] if index else None
            span = self._known[digest] = self._unused[digest] = Span(digest, parent, index)
            self._count(pages, 1)
        else:
            self._free(span.pages)
        span.pages, span.is_proven = pages, sequence.is_proven
        self._use(span, sequence)

    def _pages_of(self, index: int, sequence: CachedSequence) -> dict[str, array[int]]:
        """The sequence's pages of a span, with one holder more."""
        pages = {}
        for group in self._full:
            per_span = self.span_tokens // group.spec.page_size
            pages[group.name] = sequence.table.pages[group.name][index * per_span : (index + 1) * per_span]
            self._tables.pool_of[group.name].retain(pages[group.name])
        return pages

    def _use(self, span: Span, sequence: CachedSequence) -> None:
        if not span.num_users:
            del self._unused[span.digest]
            self._count(span.pages, -1)
        span.num_users += 1
        sequence.spans.append(span)

    # --- points --------------------------------------------------------------------------------------------------

    def _make_point(self, digest: bytes, length: int, sequence: CachedSequence) -> None:
        """A point after the first `length` tokens, if the sequence's pages and states show it."""
        span, table = self._known.get(digest), sequence.table
        if span is None or span.point is not None or (self._states and length != sequence.num_computed):
            return
        first, pages = {}, {}
        for group in self._forgetting:
            name, size = group.name, group.spec.page_size
            begin, evicted = caches.first_visible(group.spec, length) // size, table.first[group.name]
            if begin < evicted:
                return
            first[name] = begin
            pages[name] = table.pages[name][begin - evicted : length // size - evicted]
        point = Point(first, pages, sequence.is_proven)
        if self._states and not self._save_states(point, span, sequence):
            return
        for name, some in pages.items():
            self._tables.pool_of[name].retain(some)
            self._in_points[name].update(some)
        self._count(pages, 1)
        span.point = point
        sequence.points.append(point)
        self._points[digest] = span

    def _save_states(self, point: Point, span: Span, sequence: CachedSequence) -> bool:
        """Take pages for copies of the sequence's states. Older spans give way to them, running sequences don't."""
        wanted = {group.name: 1 for group in self._states}
        while not self._tables.can_take(wanted):
            if not self._unused or next(iter(self._unused.values())) is span:
                return False
            self.drop_one()
        for name in wanted:
            page = point.states[name] = self._tables.pool_of[name].allocate(1)[0]
            self._saves[name, page] = sequence.table.pages[name][0]
            self._reclaimable[name] += 1
        return True

    def _drop_point(self, span: Span) -> None:
        point, span.point = span.point, None
        if point is None:
            return
        del self._points[span.digest]
        self._count(point.pages, -1)
        self._free(point.pages)
        for name, pages in point.pages.items():
            self._in_points[name].subtract(pages)
        for name, page in point.states.items():
            self._free_state(name, page)
            self._reclaimable[name] -= 1

    def _free_state(self, name: str, page: int) -> None:
        """One holder less of a copy of states; without any it need not be made."""
        pool = self._tables.pool_of[name]
        pool.free((page,))
        if not pool.holders(page):
            self._saves.pop((name, page), None)

    def _free(self, pages: dict[str, array[int]]) -> None:
        for name, some in pages.items():
            self._tables.pool_of[name].free(some)

    def _count(self, pages: dict[str, array[int]], sign: int) -> None:
        for name, some in pages.items():
            self._reclaimable[name] += sign * len(some)
