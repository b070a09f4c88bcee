"""CUDA C++ of `precast.kernels` as a compiler for this CPU takes it, beside an emulation of what it has not."""

from __future__ import annotations

import re
from pathlib import Path

from precast.kernels.cuda_source import included

_KERNELS = Path(__file__).parents[2] / "kernels"
_PTX = re.compile(r"// --- what PTX has and C\+\+ has not.*?(?=// --- )", re.DOTALL)
"""What emulations have, as they have what is in `half.cuh`."""


def plain_source(file: str, memory: str = "unsigned char* memory = shared;") -> str:
    """A file below `kernels`, with the headers that it includes in their places, without what only a GPU has.

    `memory` stands for the declaration of shared memory.
    """
    text = _read(file)
    for name in included(text):
        header = "" if name == "half.cuh" else _read(name)
        text = text.replace(f'#include "{name}"', header)
    text = _PTX.sub("", text.replace("#pragma once", "")).replace('extern "C"', "")
    return re.sub(r"extern __shared__ .*memory\[\];", memory, text)


def _read(file: str) -> str:
    return (_KERNELS / file).read_text(encoding="utf-8")
