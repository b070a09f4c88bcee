"""The wheel holds what the tree holds, each file below `precast`, and nothing else."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path, PurePosixPath

import pytest

ROOMS = {
    "api": PurePosixPath("precast"),
    "ir": PurePosixPath("precast/ir"),
    "kernels": PurePosixPath("precast/kernels"),
    "builder": PurePosixPath("precast/builder"),
    "loader": PurePosixPath("precast/loader"),
}


@pytest.fixture(scope="module")
def wheel_names(root: Path, tree: list[PurePosixPath], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The names in a wheel built from a copy of the tree: nothing left over from earlier builds enters it."""
    source = tmp_path_factory.mktemp("source")
    for path in tree:
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / path, source / path)
    built = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(source / "out"), str(source)],
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = (source / "out").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return [name for name in archive.namelist() if not name.endswith("/")]


def test_wheel_holds_the_tree(wheel_names: list[str], tree: list[PurePosixPath]) -> None:
    expected = {
        str(ROOMS[path.parts[0]].joinpath(*path.parts[1:]))
        for path in tree
        if path.parts[0] in ROOMS and (path.suffix in (".py", ".cu", ".cuh", ".json") or path.name == "py.typed")
    }
    packed = {name for name in wheel_names if ".dist-info/" not in name}

    assert packed == expected, "list every package and its folder in pyproject.toml, [tool.setuptools]"


def test_wheel_is_one_typed_package_with_its_licence(wheel_names: list[str]) -> None:
    tops = {name.partition("/")[0] for name in wheel_names}

    assert tops == {"precast", "precast-0.1.0.dist-info"}
    assert "precast/py.typed" in wheel_names
    assert "precast-0.1.0.dist-info/licenses/LICENSE" in wheel_names


def needed(names: Iterable[str]) -> set[str]:
    """The packages that these requirements bring, and what those require by themselves, of what is installed here."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        requirement = waiting.pop()
        name = re.split(r"[^A-Za-z0-9_.-]", requirement, maxsplit=1)[0].lower().replace("_", "-")
        if "extra ==" in requirement or name in found:
            continue
        found.add(name)
        with contextlib.suppress(metadata.PackageNotFoundError):
            waiting += metadata.requires(name) or []
    return found


def test_plain_precast_brings_neither_torch_nor_model_code(root: Path) -> None:
    """What serves through the driver alone, and what CI pushes and signs with, is small: examples/image."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    heavy = {"torch", "triton", "transformers", "nvidia-cublas"}

    assert needed(project["dependencies"]) & heavy == set()
    assert needed(project["optional-dependencies"]["torch"]) >= {"torch", "triton"}
    assert "precast[torch]" in project["optional-dependencies"]["build"]
