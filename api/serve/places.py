"""Places: how many answers the engine has to give at once, and how many requests are not over."""

from __future__ import annotations


class Places:
    """The places of a server, `most` of them.

    `num_open` are taken: the engine has so many answers to give. The clients of `num_unsent` requests don't have all of
    theirs yet.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.num_open = 0
        self.num_unsent = 0

    def take(self, count: int) -> Place:
        """So many places, for the answers to one request."""
        self.num_open += count
        self.num_unsent += 1
        return Place(self, count)


class Place:
    """The places of one request: `free` them when the engine has ended the answers, `leave` when the request is over.

    Both may be called again.
    """

    def __init__(self, places: Places, count: int) -> None:
        self._places = places
        self._count = count
        self._is_over = False

    def free(self) -> None:
        """The engine works for others from here on."""
        self._places.num_open -= self._count
        self._count = 0

    def leave(self) -> None:
        """The client has its answers, or is gone."""
        self.free()
        if not self._is_over:
            self._is_over = True
            self._places.num_unsent -= 1
