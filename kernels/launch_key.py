"""What names the compiled kernel of a launch: all that is known before it runs, as one digest. No torch and no triton.

Two launches with one key differ in addresses, strides and sizes alone. Which of a key's kernels takes those is said by
the conditions of each (`precast.ir.native`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable

from precast.ir.graph.schema import Apply, Dtype
from precast.ir.native import ALIGNED, MOST_INT32, takes
from precast.kernels.records import Launch, Pointer, Stride

__all__ = ["ALIGNED", "MOST_INT32", "forms", "launch_key", "takes"]

DtypeOf = Callable[[Pointer], Dtype]
"""The element type that a launch's pointer leads to."""


def forms(launch: Launch, dtype_of: DtypeOf) -> tuple[str, ...]:
    """What is known of each argument: `-` none is given, `*` and an element type, `f` a float, `n` a number of the step
    (a stride or a size), or of a constant what Triton compiles for: `1`, `i16` a multiple of 16, `i`.

    CUDA C++ is compiled for none of it: there, all numbers are `n` and pointers have no type.
    """
    return tuple(_form(arg, dtype_of, is_triton=not launch.block) for arg in launch.args)


def launch_key(launch: Launch, known: tuple[str, ...]) -> str:
    """The digest, 64 hexadecimal digits, of a launch whose arguments have these `forms`."""
    what = [
        launch.kernel, sorted(launch.constants.items()), launch.num_warps, launch.num_stages, launch.block,
        launch.shared_bytes, launch.pdl, known,
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(what, separators=(",", ":")).encode()).hexdigest()


def _form(arg: object, dtype_of: DtypeOf, *, is_triton: bool) -> str:
    if arg is None:
        return "-"
    if isinstance(arg, Pointer):
        return f"*{dtype_of(arg)}" if is_triton else "*"
    if isinstance(arg, float):
        return "f"
    if isinstance(arg, (Stride, str, Apply)) or not is_triton:
        return "n"
    assert isinstance(arg, int), f"{arg!r} is no argument of a launch"
    return "1" if arg == 1 else "i16" if arg % ALIGNED == 0 else "i"
