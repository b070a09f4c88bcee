"""What is known of prefixes: spans of tokens with their pages, and the points at which a sequence can go on."""

from __future__ import annotations

import dataclasses
from array import array


@dataclasses.dataclass(frozen=True)
class PageCopy:
    """Copy one page of a group, all its layers, onto another."""

    group: str
    source: int
    target: int


class Point:
    """What a sequence needs to go on after a span: pages of the groups that forget, and states, by group.

    It `is_proven` as a span is.
    """

    __slots__ = ("first", "is_proven", "pages", "states")

    def __init__(self, first: dict[str, int], pages: dict[str, array[int]], *, is_proven: bool) -> None:
        self.first = first
        self.pages = pages
        self.states: dict[str, int] = {}
        self.is_proven = is_proven


class Span:
    """A known span: its pages in the groups that see everything, and how many running sequences stand on it.

    It is number `index` of its prefix; `digest` covers all tokens up to its end, `parent` those up to its beginning.
    It `is_proven` once a token was drawn from what it holds, so that it holds no NaN.
    """

    __slots__ = ("digest", "index", "is_proven", "num_users", "pages", "parent", "point")

    def __init__(
        self, digest: bytes, parent: bytes | None, index: int, pages: dict[str, array[int]], *, is_proven: bool
    ) -> None:
        self.digest = digest
        self.parent = parent
        self.index = index
        self.pages = pages
        self.is_proven = is_proven
        self.point: Point | None = None
        self.num_users = 0
