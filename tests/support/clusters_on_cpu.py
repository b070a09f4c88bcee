"""Runs CUDA C++ of `precast.kernels` on a CPU, as `tests/kernels/clusters_on_cpu.h` has its threads and clusters."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from compiled_on_cpu import compiled
from plain_source import plain_source

from precast.ir.graph import symbols
from precast.kernels.records import Launch, Pointer, Stride


class Source:
    """A file below `kernels`, for the emulation `program` of `tests/kernels`, which includes it as `name`.inc."""

    def __init__(self, folder: Path, file: str, program: str) -> None:
        self._folder, self._program = folder, program
        self._built: dict[tuple[str, ...], ctypes.CDLL] = {}
        text = plain_source(file, memory="u32 memory[1];")
        (folder / program.replace("_on_cpu.cpp", ".inc")).write_text(text, encoding="utf-8")

    def run(
        self, launch: Launch, tensors: Mapping[str, torch.Tensor], late: bool,
        before: Mapping[str, torch.Tensor] | None = None, defines: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """Launch it with these tensors; those of `before` are as they are there until all wait for the kernel in front.

        `late`: copies arrive no earlier than they are waited for.
        """
        given, changed = dict(tensors), []
        for name, early in (before or {}).items():
            after = tensors[name].contiguous()
            given[name] = early.clone()
            assert after.stride() == given[name].stride() == tensors[name].stride(), f"{name} is copied as a whole"
            changed.append((given[name], after))
        numbers = []
        for arg in launch.args:
            if isinstance(arg, Pointer):
                numbers.append(given[arg.tensor].data_ptr() + symbols.evaluate(arg.offset, {}))
            elif isinstance(arg, Stride):
                numbers.append(given[arg.tensor].stride(arg.axis))
            else:
                numbers.append(0 if arg is None else symbols.evaluate(arg, {}))
        constants = tuple(
            f"-D{name}" if value is True else f"-D{name}={value}"
            for name, value in sorted(launch.constants.items()) if value is not False
        )  # fmt: skip
        places = [x for early, after in changed for x in (early.data_ptr(), after.data_ptr(), after.nbytes)]
        self._library((*constants, *defines)).run(
            (ctypes.c_uint64 * len(numbers))(*numbers),
            (ctypes.c_uint32 * 3)(*[symbols.evaluate(size, {}) for size in (*launch.grid, 1, 1)][:3]), launch.block,
            launch.shared_bytes, late, (ctypes.c_uint64 * len(places))(*places), len(changed),
        )  # fmt: skip

    def _library(self, defines: tuple[str, ...]) -> ctypes.CDLL:
        if defines not in self._built:
            library = self._folder / f"{self._program.removesuffix('.cpp')}{len(self._built)}.so"
            self._built[defines] = ctypes.CDLL(str(compiled(self._program, library, "-shared", *defines)))
        return self._built[defines]
