"""Benchmarks find what they import: most of them run on no machine that tests run on."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

FILES = sorted((Path(__file__).parents[2] / "benchmarks").glob("*.py"))
IMPORT = re.compile(r"^ *from (precast[\w.]*) import ([\w, ]+)$", re.MULTILINE)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_modules_import(file: Path) -> None:
    importlib.import_module(file.stem)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_names_that_are_imported_later_exist(file: Path) -> None:
    """Those in functions, and in the code that benchmarks run in other processes."""
    for module, names in IMPORT.findall(file.read_text(encoding="utf-8")):
        for name in re.findall(r"(\w+)(?: as \w+)?", names):
            owner = importlib.import_module(module)
            assert hasattr(owner, name) or importlib.import_module(f"{module}.{name}")
