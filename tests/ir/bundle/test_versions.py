"""Versions: what is read, how old structs become new ones, and which bump a change of the schema needs."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import schema_diff
from schema_diff import Change, changes, required_bump

from precast.ir import encoding
from precast.ir.bundle import versions
from precast.ir.bundle.versions import Era
from precast.ir.encoding import FORMAT
from precast.ir.errors import BundleError
from precast.ir.graph.schema import Graph, Wire
from precast.ir.manifest import Manifest
from precast.ir.native import NativeLayer

SNAPSHOT = Path(__file__).resolve().parents[1] / "schema_v1.json"
HOW = "`python tests/support/schema_diff.py > tests/ir/schema_v1.json` takes the snapshot again; see docs/versioning.md"


# --- the schema and its snapshot -------------------------------------------------------------------------------


def test_schema_is_the_one_of_its_version() -> None:
    stored, current = json.loads(SNAPSHOT.read_text(encoding="utf-8")), schema_diff.snapshot()

    found = changes(stored, current)

    assert stored["format"] == current["format"], f"the snapshot is of another version. {HOW}"
    assert required_bump(found) == "none", f"this needs a bump: {found}. {HOW}"
    assert stored == current, f"this needs no bump, but a new snapshot: {found}. {HOW}"


def test_snapshot_holds_every_struct() -> None:
    reachable = schema_diff.snapshot()["structs"]

    ours = (Graph.__module__, Manifest.__module__, NativeLayer.__module__)

    def subclasses(cls: type) -> set[str]:
        return {cls.__name__}.union(*(subclasses(sub) for sub in cls.__subclasses__() if sub.__module__ in ours))

    assert set(reachable) == subclasses(Wire) - {"Wire"}
    assert reachable["Value"] == {
        "tag": None,
        "fields": {"name": {"type": "str"}, "type": {"type": "TensorType"}},
    }
    assert reachable["Symbol"]["fields"]["max"] == {"type": ["union", "int", "null"], "default": None}
    assert reachable["Concat"]["fields"]["dim"] == {"type": "int"}


def snapshot() -> dict[str, Any]:
    """A small snapshot."""
    return {
        "structs": {
            "A": {
                "tag": "a",
                "fields": {
                    "x": {"type": "int"},
                    "y": {"type": ["union", "int", "str"], "default": 1},
                    "z": {"type": ["list", ["literal", "p", "q"]]},
                    "d": {"type": ["dict", "str", "int"]},
                },
            },
            "B": {"tag": None, "fields": {}},
        },
        "ops": {"op@1": "(Tensor x) -> Tensor"},
        "limits": {"MAX_X": 10},
    }


def field(name: str, **definition: Any) -> Callable[[dict[str, Any]], object]:
    return lambda new: new["structs"]["A"]["fields"].update({name: definition})


CHANGES: list[tuple[str, Callable[[dict[str, Any]], object], str]] = [
    ("nothing", lambda new: None, "none"),
    ("struct added", lambda new: new["structs"].update(C={"tag": None, "fields": {}}), "minor"),
    ("struct removed", lambda new: new["structs"].pop("B"), "major"),
    ("tag changed", lambda new: new["structs"]["A"].update(tag="b"), "major"),
    ("tag added", lambda new: new["structs"]["B"].update(tag="b"), "major"),
    ("optional field added", field("w", type="int", default=None), "minor"),
    ("required field added", field("w", type="int"), "major"),
    ("field removed", lambda new: new["structs"]["A"]["fields"].pop("y"), "major"),
    ("field renamed",
     lambda new: new["structs"]["A"]["fields"].update(x2=new["structs"]["A"]["fields"].pop("x")), "major"),
    ("default changed", field("y", type=["union", "int", "str"], default=2), "major"),
    ("default removed", field("y", type=["union", "int", "str"]), "major"),
    ("default given", field("x", type="int", default=0), "major"),
    ("type widened", field("x", type=["union", "float", "int"]), "minor"),
    ("union widened", field("y", type=["union", "int", "null", "str"], default=1), "minor"),
    ("union narrowed", field("y", type=["union", "int"], default=1), "major"),
    ("union to one", field("y", type="int", default=1), "major"),
    ("literal widened", field("z", type=["list", ["literal", "p", "q", "r"]]), "minor"),
    ("literal narrowed", field("z", type=["list", ["literal", "p"]]), "major"),
    ("list to tuple", field("z", type=["tuple", ["literal", "p", "q"]]), "major"),
    ("list to one", field("z", type=["literal", "p", "q"]), "major"),
    ("values of a dict widened", field("d", type=["dict", "str", ["union", "int", "str"]]), "minor"),
    ("keys of a dict changed", field("d", type=["dict", "int", "int"]), "major"),
    ("type changed", field("x", type="str"), "major"),
    ("op added", lambda new: new["ops"].update({"op@2": "(Tensor y) -> Tensor"}), "none"),
    ("op removed", lambda new: new["ops"].pop("op@1"), "major"),
    ("signature changed", lambda new: new["ops"].update({"op@1": "(Tensor y) -> Tensor"}), "op"),
    ("limit raised", lambda new: new["limits"].update(MAX_X=11), "none"),
    ("limit lowered", lambda new: new["limits"].update(MAX_X=9), "major"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "bump"), [row[1:] for row in CHANGES], ids=[row[0] for row in CHANGES])
def test_bump(change: Callable[[dict[str, Any]], object], bump: str) -> None:
    old, new = snapshot(), copy.deepcopy(snapshot())
    change(new)

    assert required_bump(changes(old, new)) == bump


def test_largest_bump_counts_and_all_changes_are_named() -> None:
    new = snapshot()
    new["structs"]["A"]["fields"]["w"] = {"type": "int", "default": 0}
    del new["structs"]["B"]

    assert changes(snapshot(), new) == [
        Change("minor", "A.w", "optional field added"),
        Change("major", "B", "struct removed"),
    ]
    assert required_bump(changes(snapshot(), new)) == "major"


# --- old versions ----------------------------------------------------------------------------------------------


class Old(msgspec.Struct, frozen=True):
    """A graph of a time before this one."""

    size: int


class Middle(msgspec.Struct, frozen=True):
    """A graph of the time between."""

    sizes: tuple[int, ...]


ERAS = {
    1: Era(3, Old, Old, lambda old: Middle((old.size,)), lambda old: Middle((old.size, 0))),
    2: Era(0, Middle, Middle, lambda old: sum(old.sizes), lambda old: old.sizes),
    3: Era(1, int, tuple),
}


def test_old_structs_become_new_ones_step_by_step() -> None:
    assert versions.upgrade(Old(7), "graph", (1, 2), ERAS) == 7
    assert versions.upgrade(Middle((3, 4)), "graph", (2, 0), ERAS) == 7
    assert versions.upgrade(7, "graph", (3, 1), ERAS) == 7
    assert versions.upgrade(Old(7), "manifest", (1, 0), ERAS) == (7, 0)


@pytest.mark.parametrize("format", [(1, 0), (1, 3), (2, 0), (3, 1)])
def test_versions_that_are_read(format: tuple[int, int]) -> None:
    assert versions.era(format, ERAS) is ERAS[format[0]]


@pytest.mark.parametrize(
    ("format", "code"),
    [
        ((3, 2), "format-newer"),
        ((4, 0), "format-newer"),
        ((1, 4), "format-newer"),
        ((2**62, 0), "format-newer"),
        ((0, 9), "format-unknown"),
        ((-1, 0), "format-unknown"),
        ((1, -1), "format-unknown"),
    ],
)
def test_versions_that_are_not_read(format: tuple[int, int], code: str) -> None:
    with pytest.raises(BundleError) as caught:
        versions.era(format, ERAS)

    assert caught.value.code == code
    assert f"{format[0]}.{format[1]}" in caught.value.message
    assert caught.value.fix


def test_the_current_version_is_read_and_needs_no_step() -> None:
    found = versions.era(FORMAT, encoding.ERAS)

    assert (found.graph, found.manifest) == (Graph, Manifest)
    assert (found.next_graph, found.next_manifest) == (None, None)


def test_every_era_but_the_newest_leads_to_the_next() -> None:
    newest = max(encoding.ERAS)
    assert newest == FORMAT[0]
    assert encoding.ERAS[newest].minor == FORMAT[1]
    for major, found in encoding.ERAS.items():
        assert (found.next_graph is None) == (found.next_manifest is None) == (major == newest)
        assert major == newest or major + 1 in encoding.ERAS


def test_a_graph_of_an_unknown_version_is_not_decoded() -> None:
    with pytest.raises(BundleError) as caught:
        encoding.decode_graph(b"", (FORMAT[0], FORMAT[1] + 1))

    assert caught.value.code == "format-newer"
