"""What `few_bits.cuh` makes of numbers of few bits, all of them, on a CPU."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from compiled_on_cpu import compiled
from plain_source import plain_source


@pytest.mark.parametrize("element", ["bfloat16", "float16"])
def test_elements_of_all_numbers_of_few_bits(element: str, tmp_path: Path) -> None:
    (tmp_path / "few_bits.inc").write_text(plain_source("few_bits.cuh"), encoding="utf-8")
    flags = ["-DFLOAT16"] if element == "float16" else []
    program = compiled("few_bits_on_cpu.cpp", tmp_path / "few_bits", *flags)

    done = subprocess.run([program], capture_output=True, text=True, timeout=60)

    assert (done.returncode, done.stdout) == (0, "")
