"""Launches of Triton's kernels, compiled for compute capability 9.0 without a GPU."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from precast.ir.graph.schema import Dtype, TensorType
from precast.kernels.records import Launch, Pointer, Stride

_NAMES: Mapping[Dtype, str] = {
    "float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float8_e4m3fn": "fp8e4nv", "int32": "i32",
    "int64": "i64", "uint8": "u8", "int8": "i8",
}  # fmt: skip


def compiled(launch: Launch, types: Mapping[str, TensorType]) -> Any:
    """The kernel as it is compiled for contiguous tensors of these types, results by "out.0" and so on.

    Addresses and the strides of rows are multiples of 16, elements lie side by side.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, _, name = launch.kernel.partition(":")
    kernel = getattr(import_module(module), name)
    signature, constants, attributes = dict[str, str](), dict[str, Any](launch.constants), {}
    given = iter(launch.args)
    for i, parameter in enumerate(kernel.arg_names):
        arg = None if parameter in constants else next(given)
        signature[parameter] = "i32"
        if arg is None:
            constants.setdefault(parameter, None)
        elif isinstance(arg, Pointer):
            signature[parameter] = "*" + _NAMES[arg.dtype or types[arg.tensor].dtype]
            attributes[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(arg, Stride) and arg.axis == len(types[arg.tensor].shape) - 1:
            constants[parameter] = 1
        elif isinstance(arg, Stride):
            attributes[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(arg, float):
            signature[parameter] = "fp32"
        elif arg in (0, 1):
            constants[parameter] = arg
        elif isinstance(arg, int) and arg % 16 == 0:
            attributes[(i,)] = [["tt.divisibility", 16]]
    assert next(given, None) is None, f"{launch.kernel} takes fewer arguments"
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages, "launch_pdl": launch.pdl}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def stack_bytes(made: Any, folder: Path) -> int:
    """What a thread of a compiled kernel keeps in memory, as what it has no registers for. `folder`: for a file."""
    return resource_usage(made.asm["cubin"], folder)["STACK"]


def resource_usage(cubin: bytes, folder: Path) -> dict[str, int]:
    """What a thread takes, by cuobjdump's names: registers (`REG`), and bytes of memory in place of some (`STACK`)."""
    from triton import knobs

    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    usage = subprocess.run(
        [knobs.nvidia.cuobjdump.path, "-res-usage", str(file)], check=True, capture_output=True, text=True
    )
    return {name: int(number) for name, number in re.findall(r"\b([A-Z]+):(\d+)", usage.stdout)}
