"""What `few_bits.cuh` makes of numbers of few bits, all of them, on a CPU."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from plain_source import plain_source

HERE = Path(__file__).parent


@pytest.mark.parametrize("element", ["bfloat16", "float16"])
def test_elements_of_all_numbers_of_few_bits(element: str, tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++ to compile the header for this CPU")
    (tmp_path / "few_bits.inc").write_text(plain_source("few_bits.cuh"), encoding="utf-8")
    flags = ["-std=c++20", "-O2", f"-I{tmp_path}", f"-I{HERE}", *(["-DFLOAT16"] if element == "float16" else [])]
    subprocess.run([compiler, *flags, HERE / "few_bits_on_cpu.cpp", "-o", tmp_path / "few_bits"], check=True)

    done = subprocess.run([tmp_path / "few_bits"], capture_output=True, text=True, timeout=60)

    assert (done.returncode, done.stdout) == (0, "")
