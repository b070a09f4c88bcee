"""Orders as bytes: what is written is read, and nothing else is."""

from __future__ import annotations

import pytest

from precast.ir.errors import TargetError
from precast.loader.cache.spans import PageCopy
from precast.loader.world.orders import Kind, Order, Orders, Part

ORDERS = Orders(["b", "a", "c"], ["near", "far"], 100)


def raw(order: Order, *parts: Part) -> bytes:
    return b"".join(ORDERS.encode(order, parts))


@pytest.mark.parametrize(
    ("order", "parts"),
    [
        (Order(Kind.CAPTURE, []), []),
        (Order(Kind.COPIES, [PageCopy("far", 3, 4), PageCopy("near", 0, 1)]), []),
        (Order(Kind.STEP, [], 8), [(0, b"12345678")]),
        (
            Order(Kind.STEP, [PageCopy("near", 7, 9)], 0, {"a": 3, "c": 0}, 2, has_unknown=True),
            [(0, b"abc"), (60, b"z" * 40)],
        ),
    ],
)
def test_orders_travel(order: Order, parts: list[tuple[int, bytes]]) -> None:
    sent = raw(order, *(Part(start, memoryview(data)) for start, data in parts))

    found, inputs = ORDERS.decode(memoryview(sent))

    assert found == order
    assert [(part.start, bytes(part.data)) for part in inputs] == parts
    assert len(sent) <= ORDERS.max_bytes


STEP = raw(Order(Kind.STEP, [PageCopy("far", 1, 2)], 0, {"a": 1}, 1), Part(90, memoryview(b"0123456789")))


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (b"", "requires a buffer"),
        (STEP[:-1], "expected"),
        (STEP + b"x", "expected"),
        (b"\2" + STEP[1:], "version 2"),
        (STEP[:1] + b"\7" + STEP[2:], "7 is not a valid Kind"),
        (STEP[:16] + b"\xff\xff\xff\xff" + STEP[20:], "4294967295 copies"),
        (STEP[:20] + b"\2" + STEP[21:], "2 lengths"),
        (STEP[:24] + b"\4" + STEP[25:], "4 parts"),
        (STEP[:32] + b"\2" + STEP[33:], "copies of pages of 2 groups"),
        (STEP.replace(b"\x5a\0\0\0", b"\x5b\0\0\0"), "bytes 91 to 101 of 100"),
    ],
)
def test_bytes_that_are_no_order_are_refused(bad: bytes, why: str) -> None:
    with pytest.raises(TargetError, match=why) as error:
        ORDERS.decode(memoryview(bad))
    assert error.value.code == "ranks-differ"
