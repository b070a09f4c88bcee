"""The pages of one pool: cut from slabs of the arena, shared by those who hold them, free when nobody does.

Page `p` lies in slab `p // pages_per_slab`. A pool draws a slab when its own have no room, and gives a slab back as
soon as none of its pages is held; so memory that one pool doesn't need is there for the others.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from precast.loader.cache.arena import Arena

_NUM_LEVELS = 8
"""Slabs with room are told apart by how full they are, in so many steps."""


class PagePool:
    """Pages, each with a count of its holders. Taking, sharing and giving back cost O(1) a page.

    Pages are taken from the fullest slabs, so that the others become free as a whole. Of pages taken together those
    from the fullest slabs come last: sequences with a window give back their first pages soon, the last ones stay.
    """

    __slots__ = ("_held", "_holders", "_levels", "_roomy", "arena", "num_held", "num_slabs", "pages_per_slab")

    def __init__(self, arena: Arena, pages_per_slab: int) -> None:
        assert pages_per_slab >= 1, f"{pages_per_slab} pages a slab"
        self.arena = arena
        self.pages_per_slab = pages_per_slab
        self.num_slabs = 0  # that the pool has drawn
        self.num_held = 0
        self._holders = array("I", bytes(4 * arena.num_slabs * pages_per_slab))
        self._held = [0] * arena.num_slabs  # pages, by slab
        # The free pages of the pool's slabs that have any, by level and slab; the last ones are used first.
        self._roomy: tuple[dict[int, list[int]], ...] = tuple({} for _ in range(_NUM_LEVELS))
        self._levels = bytes(held * _NUM_LEVELS // pages_per_slab for held in range(pages_per_slab))

    @property
    def num_room(self) -> int:
        """Free pages in the pool's own slabs."""
        return self.num_slabs * self.pages_per_slab - self.num_held

    @property
    def num_available(self) -> int:
        """Pages that can be taken now, if no other pool draws a slab meanwhile."""
        return self.num_room + self.arena.num_free * self.pages_per_slab

    def holders(self, page: int) -> int:
        """How many hold the page; 0 for a free one."""
        return self._holders[page]

    def allocate(self, count: int, *, spare: int = 0) -> array[int]:
        """`count` free pages as int32, with one holder each. The caller has asked whether there are so many.

        Up to `spare` slabs may be drawn beyond need, so that pages that are given back together fill slabs.
        """
        assert count <= self.num_available, f"{count} pages wanted, {self.num_available} available"
        own: list[int] = []
        if spare > 0:
            self._take_slabs(min(count // self.pages_per_slab, spare) * self.pages_per_slab, own)
        pages: list[int] = []
        left = count - len(own)
        for slabs in reversed(self._roomy):
            while slabs and len(pages) < left:
                number, free = slabs.popitem()
                self._take(number, free, left - len(pages), pages)
        self._take_slabs(left - len(pages), pages)
        pages += own
        pages.reverse()
        holders = self._holders
        for page in pages:
            assert not holders[page], f"page {page} is given out, and is held"
            holders[page] = 1
        self.num_held += count
        return array("i", pages)

    def retain(self, pages: Iterable[int]) -> None:
        """One more holder of each of these pages, which are held."""
        holders = self._holders
        for page in pages:
            assert holders[page], f"page {page} is shared, and nobody holds it"
            holders[page] += 1

    def free(self, pages: Iterable[int]) -> None:
        """One holder less of each; a page without any is free, and its slab the arena's if all its pages are."""
        holders, per_slab, held, levels, roomy = (
            self._holders, self.pages_per_slab, self._held, self._levels, self._roomy,
        )  # fmt: skip
        for page in pages:
            left = holders[page] - 1
            assert left >= 0, f"page {page} is freed, and is not in use"
            holders[page] = left
            if left:
                continue
            self.num_held -= 1
            number = page // per_slab
            now = held[number] = held[number] - 1
            before = levels[now + 1] if now + 1 < per_slab else None  # None: it had no room
            if not now:
                if before is not None:
                    del roomy[before][number]
                self.num_slabs -= 1
                self.arena.give_back(number)
            elif before is None:
                roomy[levels[now]][number] = [page]
            elif before == levels[now]:
                roomy[before][number].append(page)
            else:
                free = roomy[levels[now]][number] = roomy[before].pop(number)
                free.append(page)

    def _take_slabs(self, count: int, pages: list[int]) -> None:
        """Append `count` pages of slabs that are drawn for them."""
        per_slab = self.pages_per_slab
        drawn = self.arena.draw(-(-count // per_slab))
        self.num_slabs += len(drawn)
        wanted = len(pages) + count
        for number in drawn:
            if per_slab == 1:
                self._held[number] = 1
                pages.append(number)
            else:
                free = list(range(number * per_slab + per_slab - 1, number * per_slab - 1, -1))
                self._take(number, free, wanted - len(pages), pages)

    def _take(self, number: int, free: list[int], count: int, pages: list[int]) -> None:
        """Append up to `count` of a slab's free pages, which stand in no level now; what is left of them does."""
        if len(free) <= count:
            self._held[number] = self.pages_per_slab
            pages += free
            return
        held = self._held[number] = self._held[number] + count
        pages += free[-count:]
        del free[-count:]
        self._roomy[self._levels[held]][number] = free
