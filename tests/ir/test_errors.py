"""What errors show of names that others chose: printable, in one line, cut."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import hostile

from precast.ir import limits
from precast.ir.artifact import Bundle
from precast.ir.errors import BundleError, PrecastError, printable, shown, shown_value, some
from precast.ir.graph.schema import Block, Call, Node, Ref

FORGED = "a\n  code: fine\x1b[2J"


def test_what_is_shown_of_a_name() -> None:
    assert shown("model.layers.0") == "model.layers.0"
    assert shown(FORGED) == r"a\n  code: fine\x1b[2J"
    assert shown("\u202ex\u2028") == r"\u202ex\u2028"
    assert shown("x" * 1000) == "x" * limits.MAX_SHOWN + "... (1000 characters)"
    assert some([FORGED]) == [r"a\n  code: fine\x1b[2J"]


def test_what_is_shown_of_a_value() -> None:
    assert shown_value(FORGED) == r"'a\n  code: fine\x1b[2J'"
    assert shown_value([1.5, None]) == "[1.5, None]"
    assert shown_value("x" * 1000) == "'" + "x" * (limits.MAX_SHOWN - 1) + "... (1002 characters)"
    assert shown_value(10**5000) == "an integer of 16610 bits"
    assert shown_value([10**5000]) == "a list"


def test_lines_of_a_message_stay() -> None:
    assert printable("a\nb\tc") == "a\nb\\tc"


def test_an_error_is_printable_and_cut() -> None:
    text = str(PrecastError("write-failed", "\x1b[31m" + "x" * 10_000_000, where=FORGED))

    assert text.startswith(r"a\n  code: fine\x1b[2J: \x1b[31mxx")
    assert len(text) < 2 * limits.MAX_MESSAGE


@pytest.mark.parametrize(
    "graph",
    [
        hostile.graph(main=[Node(FORGED, {"self": Ref("x")}, (hostile.value("y", "T"),))]),
        hostile.graph(main=[hostile.relu("x", FORGED, "T")]),
        hostile.graph(blocks=[Block(FORGED, (), (), (), (), ())], main=[Call(FORGED, {}, ())]),
        hostile.graph(given=[hostile.value("i", FORGED)]),
    ],
    ids=["op", "value", "block", "symbol"],
)
def test_names_in_a_graph_forge_no_line(graph: hostile.Graph, tmp_path: Path) -> None:
    with pytest.raises(BundleError) as caught:
        Bundle.open(hostile.write(tmp_path / "x.bundle", graph))

    text = str(caught.value)
    assert not [letter for letter in text if not letter.isprintable() and letter != "\n"]
    assert [line for line in text.splitlines() if line.startswith("  code: ")] == [f"  code: {caught.value.code}"]
