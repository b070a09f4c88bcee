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
