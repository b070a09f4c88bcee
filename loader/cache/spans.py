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


@dataclasses.dataclass(eq=False, slots=True)
class Point:
    """What a sequence needs to go on after a span: pages of the groups that forget, and states, by group.

    It `is_proven` as a span is.
    """

    first: dict[str, int]
    pages: dict[str, array[int]]
    is_proven: bool
    states: dict[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(eq=False, slots=True)
class Span:
    """A known span: its pages in the groups that see everything, and how many running sequences stand on it.

    It is number `index` of its prefix; `digest` covers all tokens up to its end, `parent` those up to its beginning.
    It `is_proven` once a token was drawn from what it holds, so that it holds no NaN.
    """

    digest: bytes
    parent: bytes | None
    index: int
    pages: dict[str, array[int]] = dataclasses.field(default_factory=dict)
    is_proven: bool = False
    point: Point | None = None
    num_users: int = 0
