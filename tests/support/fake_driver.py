"""The driver backend on a machine without a GPU: a driver that computes nothing, and layers of kernels without code.

What is around kernels is tested so: memory, descriptors, processes, what is launched. Tokens are all 0.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import pytest
from support.no_torch import BLOCK

from precast.builder.native.layer import target_named
from precast.builder.native.variants import Variant, World, of_worlds
from precast.ir.artifact import Bundle, write_bundle
from precast.ir.graph.schema import Graph
from precast.ir.native import NO_ARGUMENT, NativeKernel, NativeLayer, NativeParam, ParamType
from precast.kernels.sources import file_digest, kernel_sources

IMAGE = b"\x7fELF no code"


def environment(folder: Path, *, blocks: bool = True, **more: str) -> dict[str, str]:
    """Of processes that find the driver, made in this folder, and in which torch and Triton are blocked."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler, for a driver that computes nothing")
    libraries, modules = folder / "libraries", folder / "modules"
    if not libraries.exists():
        libraries.mkdir()
        modules.mkdir()
        source, made = Path(__file__).with_name("fake_cuda.c"), libraries / "libcuda.so.1"
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-w", source, "-o", made], check=True)
        (libraries / "libcublasLt.so.13").symlink_to(made)
        (modules / "sitecustomize.py").write_text(BLOCK, encoding="utf-8")
    found = dict(os.environ) | {"LD_LIBRARY_PATH": str(libraries), "OMP_NUM_THREADS": "1", **more}
    if blocks:
        found["PYTHONPATH"] = os.pathsep.join(filter(None, (str(modules), os.environ.get("PYTHONPATH"))))
    return found


def without_code(graph: Graph, worlds: Sequence[World]) -> NativeLayer:
    """The layer for sm_90 of a bundle's graph for these worlds, whose kernels have no code."""
    wanted = of_worlds(graph, target_named("sm_90"), (), worlds)
    names = sorted({name for each in wanted for name in kernel_sources(each.launch.kernel)})
    digest = hashlib.sha256(IMAGE).hexdigest()
    return NativeLayer(
        target="sm_90", driver=12000, compilers={}, sources={name: file_digest(name) or "" for name in names},
        kernels=tuple(sorted((_kernel(each, digest) for each in wanted), key=_place)), images={digest: IMAGE},
        worlds=() if list(worlds) == [World(1, 1)] else tuple(tuple(each) for each in worlds),  # type: ignore[arg-type]
    )  # fmt: skip


def _kernel(variant: Variant, digest: str) -> NativeKernel:
    types: Mapping[str, ParamType] = {"f": "float32", "n": "int64", "1": "int64", "i16": "int64", "i": "int64"}
    params = tuple(
        NativeParam(types.get(form, "pointer"), NO_ARGUMENT if form == "-" else i)
        for i, form in enumerate(variant.forms) if i not in variant.ones
    )  # fmt: skip
    launch = variant.launch
    return NativeKernel(
        launch.kernel, variant.key, digest, "nothing", launch.block or 32 * launch.num_warps, launch.shared_bytes,
        params, variant.aligned, variant.ones, launch.pdl,
    )  # fmt: skip


def _place(kernel: NativeKernel) -> tuple[str, str, int]:
    return kernel.kernel, kernel.key, -len(kernel.aligned) - len(kernel.ones)


def with_layer(bundle: Bundle, path: Path, worlds: Sequence[World]) -> Bundle:
    """The bundle, at another place, with such a layer."""
    files = bundle.files("tokenizer")
    return write_bundle(
        path, manifest_without_blobs=msgspec.structs.replace(bundle.manifest, blobs=()), graph=bundle.graph,
        constants=bundle.constants, files=files, provenance={}, native=[without_code(bundle.graph, worlds)],
    )  # fmt: skip
