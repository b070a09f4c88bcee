"""The native layer of a bundle: its kernels, compiled for a target with the compilers that are installed here."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import msgspec

from precast.builder.native.kept import Kept
from precast.builder.native.variants import Variant, known_targets, nodes_without_launches, variants
from precast.builder.native.worker import Job, Made
from precast.ir.errors import BuildError
from precast.ir.graph.schema import Graph
from precast.ir.graph.world import unsharded
from precast.ir.native import SHARED_BYTES, NativeKernel, NativeLayer
from precast.kernels.cuda_source import is_installed, nvrtc_version
from precast.kernels.measured import Table, shipped_tables
from precast.kernels.sources import file_digest
from precast.kernels.use import Target

Versions = Mapping[str, str]
_LEAST_JOBS = 8
"""Of a process, where several share them."""


def target_named(text: str) -> Target:
    """The GPU of a name such as sm_90. Raises BuildError (`option-invalid`) for one that layers can't be made for."""
    if text not in SHARED_BYTES:
        found = f"target is {text!r}, expected one of {', '.join(SHARED_BYTES)}"
        raise BuildError("option-invalid", found, fix="leave it out: kernels are then compiled where they run")
    return Target.parse(text)


def native_layer(
    graph: Graph, target: Target, tables: Sequence[Table] = (), *, keep: Path | None = None
) -> NativeLayer:
    """The layer of a bundle's graph, for a world of one rank.

    It has what is launched by the choices that come with Precast for GPUs of this target, and by those of `tables`;
    also where torch is not installed, if the graph can do without. Kernels that lie in the folder `keep` are not
    compiled, and others are put there.
    Raises BuildError (`dependency-missing`) where a compiler isn't installed.
    """
    versions, graph = compilers(target), unsharded(graph)
    known = [table for table in (*shipped_tables(), *tables) if table.machine.capability == target.capability]
    wanted = variants(graph, known_targets(graph, target, known))
    with tempfile.TemporaryDirectory(prefix="precast-") as folder:
        kept = None if keep is None else Kept(keep, versions)
        made = _compiled([_job(variant, target) for variant in wanted], Path(folder), kept)
        images = {each.image: (Path(folder) / each.image).read_bytes() for each in made}
    kernels = [_kernel(variant, each) for variant, each in zip(wanted, made, strict=True)]
    sources = sorted({name for each in made for name in each.sources})
    used = {name: each for name, each in versions.items() if _uses(name, wanted)}
    return NativeLayer(
        target=target.text,
        driver=_least_driver(target, used),
        compilers=used,
        sources={name: file_digest(name) or "" for name in sources},
        kernels=tuple(sorted(kernels, key=lambda each: (each.kernel, each.key, -len(each.aligned) - len(each.ones)))),
        images=dict(sorted(images.items())),
    )


def what_is_left(graph: Graph, target: Target) -> tuple[str, ...]:
    """The ops that a layer can't hold the kernels of: they are compiled where they run."""
    return tuple(sorted({node.op for node in nodes_without_launches(unsharded(graph), target)}))


def compilers(target: Target) -> dict[str, str]:
    """The versions of the compilers: of Triton, of its assembler for a target, and of NVRTC."""
    if not is_installed() or find_spec("triton") is None:
        raise BuildError(
            "dependency-missing",
            "kernels can't be compiled here: triton, cuda-bindings or nvidia-cuda-nvrtc is not installed",
            fix="pip install triton cuda-bindings nvidia-cuda-nvrtc, or leave the target out",
        )
    return {"nvrtc": nvrtc_version(), "ptxas": _ptxas_version(target), "triton": _version("triton")}


def _job(variant: Variant, target: Target) -> Job:
    launch = variant.launch
    return Job(
        kernel=launch.kernel, capability=target.capability, constants=dict(launch.constants), forms=variant.forms,
        aligned=variant.aligned, ones=variant.ones, wide=variant.wide, num_warps=launch.num_warps,
        num_stages=launch.num_stages, block=launch.block, shared_bytes=launch.shared_bytes, pdl=launch.pdl,
    )  # fmt: skip


def _kernel(variant: Variant, made: Made) -> NativeKernel:
    return NativeKernel(
        kernel=variant.launch.kernel, key=variant.key, image=made.image, function=made.function, threads=made.threads,
        shared_bytes=made.shared_bytes, params=made.params, aligned=made.aligned, ones=made.ones,
        pdl=variant.launch.pdl,
    )  # fmt: skip


def _compiled(jobs: Sequence[Job], folder: Path, kept: Kept | None) -> list[Made]:
    """What became of the jobs, in their order; their images are in `folder`."""
    if kept is None:
        return _compiled_now(jobs, folder)
    found: dict[int, Made] = {}
    for i, job in enumerate(jobs):
        if (held := kept.read(job)) is not None:
            found[i], image = held
            (folder / found[i].image).write_bytes(image)
    missing = [i for i in range(len(jobs)) if i not in found]
    for i, made in zip(missing, _compiled_now([jobs[i] for i in missing], folder), strict=True):
        kept.write(jobs[i], made, (folder / made.image).read_bytes())
        found[i] = made
    return [found[i] for i in range(len(jobs))]


def _compiled_now(jobs: Sequence[Job], folder: Path) -> list[Made]:
    """What became of the jobs, in their order; as many processes as there are processors share them, if each has some:
    its start takes as long as a few kernels."""
    count = min(os.cpu_count() or 1, -(-len(jobs) // _LEAST_JOBS))
    shares = [jobs[i::count] for i in range(count)]
    with ThreadPoolExecutor(count or 1) as pool:
        done = list(pool.map(lambda share: _worker(share, folder), shares))
    return [done[i % count][i // count] for i in range(len(jobs))]


def _worker(jobs: Sequence[Job], folder: Path) -> list[Made]:
    told = {
        "TRITON_DISABLE_LINE_INFO": "1", "TRITON_ALWAYS_COMPILE": "1", "TRITON_CACHE_DIR": str(folder / "cache"),
        "PYTHONSAFEPATH": "1",
    }  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")} | told
    run = subprocess.run(
        [sys.executable, "-m", "precast.builder.native.worker", str(folder)],
        input=msgspec.json.encode(jobs), capture_output=True, env=environment, check=False,
    )  # fmt: skip
    if run.returncode != 0:
        last = run.stderr.decode(errors="replace").strip()[-2000:]
        fix = "leave this --target out: its kernels are then compiled at load; and report the message"
        raise BuildError("compile-failed", f"a kernel doesn't compile for this target:\n{last}", fix=fix)
    return msgspec.json.decode(run.stdout, type=list[Made])


def _uses(compiler: str, wanted: Sequence[Variant]) -> bool:
    """Whether one of these kernels is made by the compiler."""
    return any((compiler == "nvrtc") == bool(variant.launch.block) for variant in wanted)


def _least_driver(target: Target, used: Versions) -> int:
    """The driver's version of CUDA that the images need, as `cuDriverGetVersion` counts.

    Within a major version of CUDA, drivers load what newer toolkits of it make (CUDA Compatibility, minor version
    compatibility), for GPUs that they know: those of 10.0 and above are known from 12.8 on.
    """
    majors = [int(used[name].partition(".")[0]) for name in ("nvrtc", "ptxas") if name in used]
    return max([12080 if target.capability >= (10, 0) else 12000, *(1000 * major for major in majors)])


def _ptxas_version(target: Target) -> str:
    """Of the assembler that comes with Triton: it has another one for 10.0 and above."""
    from triton import knobs

    tools = knobs.nvidia
    return str((tools.ptxas_blackwell if target.capability >= (10, 0) else tools.ptxas).version)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
