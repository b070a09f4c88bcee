"""Where the symbols of a graph are read: in the shapes of which of its tensors. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from precast.ir.graph import symbols as exprs
from precast.ir.graph.schema import Expr, Value


class Source(NamedTuple):
    """A symbol's value is `(tensor.shape[axis] - offset) / factor`."""

    symbol: str
    tensor: str
    axis: int
    factor: int
    offset: int


def sources_of(values: Sequence[Value]) -> tuple[Source, ...]:
    """Where each symbol is read: the first size that is the symbol itself, else the first that is linear in it."""
    found: dict[str, Source] = {}
    for plain in (True, False):
        for value in values:
            for axis, size in enumerate(value.type.shape):
                linear = _linear(size)
                if linear is not None and linear[0] not in found and plain == isinstance(size, str):
                    found[linear[0]] = Source(linear[0], value.name, axis, linear[1], linear[2])
    return tuple(found.values())


def _linear(size: Expr) -> tuple[str, int, int] | None:
    """(symbol, factor, offset) of a size `symbol * factor + offset`; None for every other size.

    Equality at 0, 1 and 2 is enough here: what a wrong guess would yield is compared with the size itself afterwards.
    """
    free = exprs.free_symbols(size)
    if len(free) != 1:
        return None
    (symbol,) = free
    try:
        at = [exprs.evaluate(size, {symbol: number}) for number in range(3)]
    except ZeroDivisionError:
        return None
    factor = at[1] - at[0]
    return (symbol, factor, at[0]) if factor > 0 and at[2] - at[1] == factor else None
