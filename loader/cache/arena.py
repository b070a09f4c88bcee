"""The cache memory as equal slabs, which any pool draws and gives back. No tensor is known here."""

from __future__ import annotations


class Arena:
    """The slabs `0 .. num_slabs - 1`. The slab given back last is drawn next; both cost O(1)."""

    __slots__ = ("_given_back", "_is_drawn", "_num_touched", "num_slabs")

    def __init__(self, num_slabs: int) -> None:
        assert num_slabs >= 0, f"{num_slabs} slabs"
        self.num_slabs = num_slabs
        self._num_touched = 0  # slabs from here on were never drawn
        self._given_back: list[int] = []
        self._is_drawn = bytearray(num_slabs)

    @property
    def num_free(self) -> int:
        """Slabs that can be drawn."""
        return self.num_slabs - self._num_touched + len(self._given_back)

    def draw(self, count: int) -> list[int]:
        """So many slabs for the caller alone; fewer where all are drawn."""
        given_back = self._given_back
        first = max(0, len(given_back) - count)
        drawn = given_back[first:][::-1]
        del given_back[first:]
        end = min(self._num_touched + count - len(drawn), self.num_slabs)
        drawn += range(self._num_touched, end)
        self._num_touched = end
        for slab in drawn:
            self._is_drawn[slab] = 1
        return drawn

    def give_back(self, slab: int) -> None:
        """Let others draw a slab, which must be drawn."""
        assert self._is_drawn[slab], f"slab {slab} is given back, and is not drawn"
        self._is_drawn[slab] = 0
        self._given_back.append(slab)
