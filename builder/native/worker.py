"""Compiles kernels in a process of its own: `python -m precast.builder.native.worker FOLDER`, without a GPU.

It reads jobs as JSON from standard input, writes each image to FOLDER, by its SHA-256, and what it made as JSON to
standard output. A process of its own, because Triton reads what it is told from the environment when it is imported.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from precast.ir.native import NO_ARGUMENT, NativeParam, ParamType
from precast.kernels.cuda_source import compiled
from precast.kernels.named import named
from precast.kernels.sources import kernel_sources

_POINTERS = {
    "bool": "i1", "int8": "i8", "uint8": "u8", "int32": "i32", "int64": "i64", "float8_e4m3fn": "fp8e4nv",
    "float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64",
}  # fmt: skip


class Job(msgspec.Struct, frozen=True):
    """A kernel to compile: a launch's, for arguments of these forms (`precast.kernels.launch_key`), of which some are
    multiples of 16, 1, or integers of 64 bits."""

    kernel: str
    capability: tuple[int, int]
    constants: dict[str, int | float | bool | str]
    forms: tuple[str, ...]
    aligned: tuple[int, ...]
    ones: tuple[int, ...]
    wide: tuple[int, ...]
    num_warps: int
    num_stages: int
    block: int
    shared_bytes: int
    pdl: bool


class Made(msgspec.Struct, frozen=True):
    """What became of a job, as `precast.ir.native.NativeKernel` says it. `sources`: what the kernel is made from."""

    image: str
    function: str
    threads: int
    shared_bytes: int
    params: tuple[NativeParam, ...]
    aligned: tuple[int, ...]
    ones: tuple[int, ...]
    sources: tuple[str, ...]


def make(job: Job, folder: Path) -> Made:
    """Compile a job, and write its image."""
    found, image = _of_cuda(job) if job.block else _of_triton(job)
    digest = hashlib.sha256(image).hexdigest()
    (folder / digest).write_bytes(image)
    return msgspec.structs.replace(found, image=digest, sources=kernel_sources(job.kernel))


def _of_cuda(job: Job) -> tuple[Made, bytes]:
    """CUDA C++: all arguments are parameters, numbers of 64 bits."""
    file, _, name = job.kernel.removeprefix("precast.kernels.").partition(":")
    image = compiled(file, tuple(job.constants.items()), job.capability)
    types: dict[str, ParamType] = {"f": "float32", "n": "int64"}
    params = tuple(
        NativeParam(types.get(form, "pointer"), NO_ARGUMENT if form == "-" else i) for i, form in enumerate(job.forms)
    )
    return Made("", name, job.block, job.shared_bytes, params, (), (), ()), image


def _of_triton(job: Job) -> tuple[Made, bytes]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    kernel = named(job.kernel)
    signature: dict[str, str] = {}
    constants: dict[str, Any] = dict(job.constants)
    attributes: dict[tuple[int, ...], Any] = {}
    params: list[NativeParam] = []
    aligned: list[int] = []
    ones: list[int] = []
    given = iter(range(len(job.forms)))
    for place, (name, param) in enumerate(zip(kernel.arg_names, kernel.params, strict=True)):
        if name in job.constants:
            signature[name] = "constexpr"
            continue
        i = next(given)
        form, is_number = job.forms[i], job.forms[i][0] in "1in"
        is_told = not (param.do_not_specialize and is_number)
        if form == "-" or (is_told and (form == "1" or i in job.ones)):
            signature[name], constants[name] = "constexpr", None if form == "-" else 1
            ones += [i] if i in job.ones else []
            continue
        kind: ParamType = "int64" if i in job.wide else "int32" if is_number else "float32"
        signature[name] = "i64" if i in job.wide else "i32" if is_number else "fp32"
        if form[0] == "*":
            kind, signature[name] = "pointer", "*" + _POINTERS[form[1:]]
        if is_told and (form == "i16" or i in job.aligned):
            attributes[(place,)] = [["tt.divisibility", 16]]
            aligned += [i] if i in job.aligned else []
        params.append(NativeParam(kind, i))
    assert next(given, None) is None, f"{job.kernel} takes fewer arguments"
    source = GluonASTSource if kernel.is_gluon() else ASTSource
    options = {"num_warps": job.num_warps, "num_stages": job.num_stages, "launch_pdl": job.pdl}
    major, minor = job.capability
    made = triton.compile(
        source(kernel, signature, constexprs=constants, attrs=attributes),
        target=GPUTarget("cuda", 10 * major + minor, 32), options=options,
    )  # fmt: skip
    about = made.metadata
    assert not about.global_scratch_size, f"{job.kernel} wants memory of its own"
    params += [NativeParam("pointer", NO_ARGUMENT)] * 2  # memory of its own, which is none
    found = Made("", about.name, 32 * about.num_warps, about.shared, tuple(params), tuple(aligned), tuple(ones), ())
    return found, made.asm["cubin"]


if __name__ == "__main__":
    jobs = msgspec.json.decode(sys.stdin.buffer.read(), type=list[Job])
    sys.stdout.write(json.dumps([msgspec.to_builtins(make(job, Path(sys.argv[1]))) for job in jobs]))
