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
    """What a sequence needs to go on after a span: pages of the groups that forget, and states, by group."""

    __slots__ = ("first", "pages", "states")

    def __init__(self, first: dict[str, int], pages: dict[str, array[int]]) -> None:
        self.first = first
        self.pages = pages
        self.states: dict[str, int] = {}


class Span:
    """A known span: its pages in the groups that see everything, and how many running sequences stand on it.

    `digest` covers all tokens up to its end, `parent` those up to its beginning.
    """

    __slots__ = ("digest", "num_users", "pages", "parent", "point")

    def __init__(self, digest: bytes, parent: bytes | None, pages: dict[str, array[int]]) -> None:
        self.digest = digest
        self.parent = parent
        self.pages = pages
        self.point: Point | None = None
        self.num_users = 0
