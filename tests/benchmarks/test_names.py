"""Benchmarks find what they import: most of them run on no machine that tests run on."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
FILES = {".".join(file.relative_to(FOLDER).with_suffix("").parts): file for file in sorted(FOLDER.rglob("*.py"))}
IMPORT = re.compile(r"^ *from ((?:precast|support)[\w.]*) import ([\w, ]+)$", re.MULTILINE)


@pytest.mark.parametrize("name", FILES)
def test_modules_import(name: str) -> None:
    importlib.import_module(name)


@pytest.mark.parametrize("name", FILES)
def test_names_that_are_imported_later_exist(name: str) -> None:
    """Those in functions, and in the code that benchmarks run in other processes."""
    for module, names in IMPORT.findall(FILES[name].read_text(encoding="utf-8")):
        for each in re.findall(r"(\w+)(?: as \w+)?", names):
            owner = importlib.import_module(module)
            assert hasattr(owner, each) or importlib.import_module(f"{module}.{each}")
