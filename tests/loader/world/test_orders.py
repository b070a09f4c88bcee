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
            Order(Kind.STEP, [PageCopy("near", 7, 9)], 0, {"a": 3, "c": 0}, 2, has_unknown=True, wants_logits=True),
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
        (b"\3" + STEP[1:], "version 3"),
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


def test_each_follower_reads_its_own_of_several_orders() -> None:
    orders = [Order(Kind.STEP, [], 8, num_rows=2), Order(Kind.STEP, [PageCopy("far", 1, 2)], 8, num_rows=2)]
    parts = [[Part(0, memoryview(b"12345678"))], [Part(4, memoryview(b"ab"))]]
    each = [ORDERS.encode(order, own) for order, own in zip(orders, parts, strict=True)]

    sent = b"".join(ORDERS.encode_each(each))

    for follower, order in enumerate(orders):
        found, inputs = ORDERS.decode_own(memoryview(sent), follower, 2)
        assert found == order
        assert [(part.start, bytes(part.data)) for part in inputs] == [
            (part.start, bytes(part.data)) for part in parts[follower]
        ]
    assert len(sent) <= ORDERS.max_bytes_of_each(2)


@pytest.mark.parametrize("change", ["", "x", "one order"])
def test_bytes_that_are_no_orders_for_all_are_refused(change: str) -> None:
    each = ORDERS.encode(Order(Kind.CAPTURE))
    sent = b"".join(ORDERS.encode_each([each] * 2))
    bad = {"": sent[:9], "x": sent + b"x", "one order": b"".join(ORDERS.encode_each([each]))}[change]

    with pytest.raises(TargetError, match=f"{len(bad)} bytes that are no orders for 2 ranks") as error:
        ORDERS.decode_own(memoryview(bad), 0, 2)

    assert error.value.code == "ranks-differ"
