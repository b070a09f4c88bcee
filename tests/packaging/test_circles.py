"""No module of the project imports itself by way of others, inside functions and under TYPE_CHECKING neither."""

from __future__ import annotations

import graphlib
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

import pytest
from source_imports import imported_names

BUILDER_ORDER = (
    # each room of the builder imports from those before it, and none from one after it: the data's way
    "versions", "limits", "named", "replaced", "graph", "source", "weights", "capture", "shard", "passes", "pipeline",
    "snapshot", "lower", "native",
    "build",
)  # fmt: skip


def module_name(path: PurePosixPath) -> str:
    """The import name of a file: `api/` is `precast` itself."""
    parts = path.with_suffix("").parts
    parts = parts[1:] if parts[0] == "api" else parts
    return ".".join(("precast", *(parts[:-1] if parts[-1:] == ("__init__",) else parts)))


def imports(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Which of the modules each module imports."""
    found: dict[str, set[str]] = {}
    for name, source in sources.items():
        found[name] = set()
        for _, imported in imported_names(source):
            while imported and imported not in sources:  # a thing inside a module
                imported = imported.rpartition(".")[0]
            if imported and imported != name:
                found[name].add(imported)
    return found


def circle(edges: Mapping[str, Iterable[str]]) -> list[str]:
    """A circle of imports, its first module again at the end; empty where there is none."""
    try:
        graphlib.TopologicalSorter(edges).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


@pytest.fixture(scope="module")
def edges(root: Path, tree: list[PurePosixPath]) -> dict[str, set[str]]:
    """The imports of all modules of the project."""
    rooms = ("api", "builder", "ir", "kernels", "loader")
    files = [path for path in tree if path.parts[0] in rooms and path.suffix == ".py"]
    return imports({module_name(path): (root / path).read_text(encoding="utf-8") for path in files})


def test_a_circle_is_found() -> None:
    sources = {
        "precast.a": "from precast.b import x",
        "precast.b": "def f():\n    from precast.c import C",
        "precast.c": "if TYPE_CHECKING:\n    import precast.a",
        "precast.d": "import precast.a",
    }

    assert set(circle(imports(sources))) == {"precast.a", "precast.b", "precast.c"}


def test_a_line_is_no_circle() -> None:
    assert circle(imports({"precast.a": "from precast.b import x, y", "precast.b": "import math"})) == []


def test_no_circle(edges: dict[str, set[str]]) -> None:
    assert edges
    assert circle(edges) == []


def test_rooms_of_the_builder_follow_the_datas_way(edges: dict[str, set[str]]) -> None:
    def room(name: str) -> int:
        return BUILDER_ORDER.index(name.split(".")[2])

    wrong = [
        f"{name} imports {other}"
        for name, others in edges.items()
        for other in others
        if all(each.startswith("precast.builder.") for each in (name, other)) and room(other) > room(name)
    ]

    assert wrong == []
