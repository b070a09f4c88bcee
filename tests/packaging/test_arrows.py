"""Arrows point down only: api -> builder, loader -> kernels -> ir; imports are absolute and start with `precast`.

Read from the sources, so an import inside a function or under TYPE_CHECKING counts like any other.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import pytest
from source_imports import imported_names

# folder -> what it may import of the project; the front door may import all of it
MAY_IMPORT = {
    "ir": ("precast.ir",),
    "kernels": ("precast.kernels", "precast.ir"),
    "builder": ("precast.builder", "precast.kernels", "precast.ir"),
    "loader": ("precast.loader", "precast.kernels", "precast.ir"),
    "api": ("precast",),
}


def forbidden_imports(folder: str, source: str) -> list[tuple[int, str]]:
    """(line, dotted name) of each import of `source` that a file in `folder` may not have."""

    def is_forbidden(name: str) -> bool:
        top = name.partition(".")[0]
        if top == "precast":
            return not any(name == allowed or name.startswith(allowed + ".") for allowed in MAY_IMPORT[folder])
        return top == "" or top in MAY_IMPORT

    return [(line, name) for line, name in imported_names(source) if is_forbidden(name)]


@pytest.mark.parametrize(
    ("folder", "line"),
    [
        ("ir", "from precast.kernels import spec"),
        ("ir", "from precast import __version__"),
        ("ir", "import precast.loader.engine.engine"),
        ("kernels", "from precast.builder.capture.export import export"),
        ("loader", "def load():\n    from precast import builder"),
        ("loader", "import importlib\nimportlib.import_module('precast.builder.pipeline')"),
        ("builder", "from precast.loader.program.restore import restore"),
        ("api", "from . import cli"),
        ("api", "import kernels"),
        ("ir", "from .schema import Graph"),
        ("builder", "from ir.schema import Graph"),
        ("ir", "from precast.irrigation import Graph"),
    ],
)
def test_wrong_arrow_is_found(folder: str, line: str) -> None:
    assert len(forbidden_imports(folder, line)) == 1


@pytest.mark.parametrize(
    ("folder", "line"),
    [
        ("ir", "from precast.ir.graph.schema import Graph"),
        ("ir", "import msgspec"),
        ("kernels", "from precast.ir import schema"),
        ("builder", "import precast.kernels.spec"),
        ("loader", "from precast.kernels import rotary"),
        ("api", "from precast.builder.pipeline import build"),
    ],
)
def test_right_arrow_is_let_through(folder: str, line: str) -> None:
    assert forbidden_imports(folder, line) == []


def test_the_container_knows_nothing_of_graphs(root: Path, tree: list[PurePosixPath]) -> None:
    sources = [path for path in tree if path.parts[:2] == ("ir", "bundle") and path.suffix == ".py"]
    allowed = ("precast.ir.bundle.", "precast.ir.errors.", "precast.ir.limits.")
    found = [
        f"{path}:{line} imports {name}"
        for path in sources
        for line, name in imported_names((root / path).read_text(encoding="utf-8"))
        if name.startswith("precast") and not f"{name}.".startswith(allowed)
    ]

    assert sources
    assert found == []


def circles(root: Path, tree: list[PurePosixPath], folder: str) -> list[str]:
    """Modules of the folder that lead back to themselves by what they import of it when they are imported."""
    modules = {"precast." + ".".join(path.with_suffix("").parts): path for path in tree if path.suffix == ".py"}
    inside = {name: path for name, path in modules.items() if path.parts[0] == folder}
    leads_to = {}
    for name, path in inside.items():
        imported = {each for _, each in imported_names((root / path).read_text(encoding="utf-8"))}
        leads_to[name] = {each for each in imported | {each.rpartition(".")[0] for each in imported} if each in inside}
    found = []
    for name in inside:
        reached: set[str] = set()
        pending = [name]
        while pending:
            new = leads_to[pending.pop()] - reached
            reached |= new
            pending += new
        if name in reached:
            found.append(name)
    return found


def test_a_circle_is_found(tmp_path: Path) -> None:
    sources = {"a": "from precast.ir.b import x", "b": "from precast.ir import c", "c": "import precast.ir.a", "d": ""}
    (tmp_path / "ir").mkdir()
    for name, source in sources.items():
        (tmp_path / "ir" / f"{name}.py").write_text(source)

    assert circles(tmp_path, [PurePosixPath(f"ir/{name}.py") for name in sources], "ir") == [
        "precast.ir.a", "precast.ir.b", "precast.ir.c",
    ]  # fmt: skip


@pytest.mark.parametrize("folder", ["ir"])
def test_no_circles_of_imports(folder: str, root: Path, tree: list[PurePosixPath]) -> None:
    assert circles(root, tree, folder) == []


@pytest.mark.parametrize("folder", sorted(MAY_IMPORT))
def test_arrows_point_down(folder: str, root: Path, tree: list[PurePosixPath]) -> None:
    sources = [path for path in tree if path.parts[0] == folder and path.suffix == ".py"]
    found = [
        f"{path}:{line} imports {name}"
        for path in sources
        for line, name in forbidden_imports(folder, (root / path).read_text(encoding="utf-8"))
    ]

    assert sources
    assert found == [], f"{folder}/ may import of the project: {', '.join(MAY_IMPORT[folder])}"
