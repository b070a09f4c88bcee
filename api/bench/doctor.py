"""What this machine allows a start to be: each check looks at one thing, and never fails itself.

What imports torch or makes a context runs in a process of its own: it is timed as a start would see it, and what it
breaks is its own. Needs neither torch nor a GPU, and writes nothing but a temporary file, where that is possible.
"""

from __future__ import annotations

import importlib.metadata
import json
import mmap
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import msgspec

from precast.bench import floor, page_cache

Status = Literal["fine", "slow", "missing", "unknown"]
CHILD_SECONDS = 300.0
PROBE_BYTES = 512 << 20
"""What is read to measure a disk; of a checkpoint, its first bytes."""
JOB_BYTES = 8 << 20
LEAST_BYTES = 8 * JOB_BYTES
"""Of fewer, threads that begin take as long as what they read, and no rate can be told."""

REQUIRED = ("torch", "msgspec", "numpy", "safetensors", "tokenizers", "zstandard")
OPTIONAL = {"triton": "kernels on GPUs", "transformers": "precast build", "obstore": "s3:// and gs://"}

SLOW_IMPORT, SLOW_CONTEXT = 4.0, 1.0
"""Seconds, above which most machines do better."""
SLOW_DISK, SLOW_CACHE, SLOW_PINNED = 1e9, 4e9, 20e9
"""Bytes a second, below which most machines with a GPU do better."""
MODEL_BYTES = 16e9
"""A checkpoint of 8 billion parameters in 16 bits, as an example of what a rate means."""

_TORCH = """
import json, sys, time
started = time.perf_counter()
import torch
found = {"import": time.perf_counter() - started, "version": torch.__version__, "cuda": torch.version.cuda}
found["gpus"] = torch.cuda.device_count() if torch.cuda.is_available() else 0
started = time.perf_counter()
device = "cuda" if found["gpus"] and sys.argv[1] != "cpu" else "cpu"
torch.zeros(1, device=device)
found["context"] = time.perf_counter() - started
size, dtype, runs = (8192, torch.bfloat16, 20) if device == "cuda" else (1024, torch.float32, 5)
a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
(a @ b).sum().item()
started = time.perf_counter()
for _ in range(runs):
    c = a @ b
c[0, 0].item()
found["matmul"] = {"device": device, "dtype": str(dtype)[6:], "size": size}
found["matmul"]["flops"] = 2 * size**3 * runs / (time.perf_counter() - started)
print(json.dumps(found))
"""
_LOADER = """
import json, time
started = time.perf_counter()
import precast.loader.load
print(json.dumps({"import": time.perf_counter() - started}))
"""
_DRIVER = """
import json, runpy, sys, time
floor = runpy.run_path(sys.argv[1])
started = time.perf_counter()
cuda = floor["CudaDriver"]()
count = cuda.count()
found = {"count": count}
if count:
    index = int(sys.argv[2])
    found |= cuda.describe(index)
    cuda.open(index)
    found["context"] = time.perf_counter() - started
    found["free_bytes"] = cuda.free_bytes()
    size = 256 << 20
    target, stream = cuda.alloc(size), cuda.stream()
    started = time.perf_counter()
    source = cuda.pin(size)
    found["pinning"] = size / (time.perf_counter() - started)
    rates = []
    for _ in range(5):
        started = time.perf_counter()
        cuda.copy(target, source, size, stream)
        cuda.wait(stream)
        rates.append(size / (time.perf_counter() - started))
    found["pinned"] = sorted(rates)[2]
print(json.dumps(found))
"""


class Check(msgspec.Struct, frozen=True):
    """What was looked at, and what was found: in words, and as numbers by name. `why` and `fix`, unless it is fine."""

    name: str
    status: Status
    found: str
    why: str = ""
    fix: str = ""
    numbers: dict[str, Any] = {}


def examine(device: str | None, weights: Path | None, say: Callable[[str], None] | None = None) -> list[Check]:
    """All checks. `device`: cpu, or a GPU that must be there; None: a GPU if there is one. `weights`: a checkpoint
    whose disk is measured, a directory or a file; None: the disk of temporary files.
    """
    checks: list[Check] = []
    parts: tuple[tuple[str, Callable[[], Iterator[Check]]], ...] = (
        ("packages", _packages),
        ("memory", _memory),
        ("gpu", lambda: _gpu(device)),
        ("torch", lambda: _torch(device, any(each.name == "gpu" and each.numbers for each in checks))),
        ("disk", lambda: _disk(weights)),
        ("caches", lambda: _kernel_cache(any(each.name == "gpu" and each.numbers for each in checks))),
    )
    for name, part in parts:
        if say is not None:
            say(name)
        checks += part()
    return checks


# --- what is installed -------------------------------------------------------------------------------------------


def _packages() -> Iterator[Check]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    system = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}, {cores} cores"
    yield Check("system", "fine", system, numbers={"cores": cores, "python": platform.python_version()})
    versions = {name: _version(name) for name in (*REQUIRED, *OPTIONAL)}
    shown = ", ".join(f"{name} {version}" for name, version in versions.items() if version is not None)
    lacking = [name for name in REQUIRED if versions[name] is None]
    if lacking:
        why, fix = f"not installed: {', '.join(lacking)}", f"pip install {' '.join(lacking)}"
        yield Check("packages", "missing", shown, why, fix, versions)
    else:
        without = [f"{name} ({what})" for name, what in OPTIONAL.items() if versions[name] is None]
        yield Check(
            "packages", "fine", shown + (f"; without {', '.join(without)}" if without else ""), numbers=versions
        )


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


# --- memory ------------------------------------------------------------------------------------------------------


def _memory() -> Iterator[Check]:
    numbers = {}
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        sizes = {name: int(rest.split()[0]) * 1024 for name, rest in (line.split(":", 1) for line in lines)}
        numbers = {"total_bytes": sizes["MemTotal"], "available_bytes": sizes["MemAvailable"]}
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
        if limit.isdigit():
            numbers["limit_bytes"] = int(limit)
    except (OSError, KeyError, ValueError):
        pass
    if "total_bytes" not in numbers:
        yield Check("memory", "unknown", "the system doesn't tell")
        return
    text = f"{numbers['total_bytes'] / 1e9:.1f} GB, {numbers['available_bytes'] / 1e9:.1f} GB available"
    if "limit_bytes" in numbers:
        text += f", this container may use {numbers['limit_bytes'] / 1e9:.1f} GB"
    room = min(numbers["available_bytes"], numbers.get("limit_bytes", numbers["available_bytes"]))
    if room < MODEL_BYTES:
        why = f"a checkpoint of {MODEL_BYTES / 1e9:.0f} GB doesn't stay in the page cache: each start reads the disk"
        yield Check("memory", "slow", text, why, "give the machine or the container more memory", numbers)
    else:
        yield Check("memory", "fine", text, numbers=numbers)


# --- the GPU, by its driver --------------------------------------------------------------------------------------


def _gpu(device: str | None) -> Iterator[Check]:
    if device == "cpu":
        return
    index = re.fullmatch(r"cuda:(\d+)", device or "")
    found, error = _child(_DRIVER, str(floor.__file__), index[1] if index else "0", bare=True)
    if not found.get("count"):
        why = error or "the driver shows no device to this process"
        fix = "install the driver, or check with nvidia-smi, and CUDA_VISIBLE_DEVICES; without a GPU, --device cpu"
        yield Check("gpu", "unknown" if device is None else "missing", "none: everything runs on the CPU", why, fix)
        return
    if error:
        yield Check("gpu", "missing", f"{found['count']} devices", error, "check the index of the device")
        return
    text = (
        f"{found['name']}, compute capability {found['capability']}, {found['total_bytes'] / 1e9:.1f} GB, of which "
        f"{found['free_bytes'] / 1e9:.1f} GB free, driver for CUDA {found['driver_cuda']}"
    )
    if found["free_bytes"] < 0.9 * found["total_bytes"]:
        why, fix = "others hold memory of it", "look with nvidia-smi who does, or give --cache-bytes"
        yield Check("gpu", "slow", text, why, fix, found)
    elif float(found["capability"]) < 8.0:
        why = "Triton's kernels want compute capability 8.0: torch's ops run in their place"
        yield Check("gpu", "slow", text, why, "use a newer GPU", found)
    else:
        yield Check("gpu", "fine", text, numbers=found)
    yield _judged(
        "context", f"{found['context']:.2f} s by the driver alone", found["context"] > SLOW_CONTEXT,
        "the driver wakes the GPU up for each process", "nvidia-smi -pm 1 keeps it awake",
        {"seconds": found["context"]},
    )  # fmt: skip
    text = f"{found['pinned'] / 1e9:.1f} GB/s from pinned memory: {_takes(found['pinned'])}"
    yield _judged(
        "bus", text, found["pinned"] < SLOW_PINNED, "the GPU's slot, or a virtual machine, is narrower than PCIe 5",
        "look at the link with nvidia-smi -q", {"bytes_per_second": found["pinned"], "pinning": found["pinning"]},
    )  # fmt: skip


# --- torch -------------------------------------------------------------------------------------------------------


def _torch(device: str | None, has_gpu: bool) -> Iterator[Check]:
    found, error = _child(_TORCH, device or "any")
    if not found:
        yield Check("torch", "missing", "cannot be used", error, "pip install torch")
        return
    text = f"{found['version']}, for {'CUDA ' + found['cuda'] if found['cuda'] else 'CPUs'}"
    if has_gpu and not found["gpus"]:
        why = "there is a GPU, and torch doesn't see it"
        fix = "install a torch for CUDA, of no later version than the driver's: https://download.pytorch.org/whl"
        yield Check("torch", "missing", text, why, fix, found)
    else:
        yield Check("torch", "fine", text, numbers={name: found[name] for name in ("version", "cuda", "gpus")})
    loader, error = _child(_LOADER)
    seconds = loader.get("import", 0.0)
    numbers = {"torch": found["import"], "loader": seconds}
    if error:
        yield Check("imports", "missing", f"torch {found['import']:.2f} s", error, "install precast again", numbers)
    else:
        yield _judged(
            "imports", f"torch {found['import']:.2f} s, all that a load imports {seconds:.2f} s",
            max(numbers.values()) > SLOW_IMPORT, "packages lie on a slow or cold disk, or the cores are busy",
            "keep the environment on a local disk, and look at the cores' load", numbers,
        )  # fmt: skip
    matmul = found["matmul"]
    yield Check(
        "matmul", "fine",
        f"{matmul['flops'] / 1e12:.3g} TFLOP/s of {matmul['dtype']} on {matmul['device']}, {matmul['size']} cubed",
        numbers=matmul,
    )  # fmt: skip


# --- the disk ----------------------------------------------------------------------------------------------------


def _disk(weights: Path | None) -> Iterator[Check]:
    try:
        if weights is not None:
            if not weights.exists():
                fix = "name a checkpoint's directory, or its file"
                yield Check("disk", "missing", f"{weights}: no such file or directory", "there is nothing to read", fix)
                return
            files = [weights] if weights.is_file() else sorted(weights.glob("*.safetensors"))
            if not files:
                yield Check(
                    "disk", "missing", f"{weights}: no safetensors files", "it is no checkpoint", "name another"
                )
                return
            yield from _rates(max(files, key=lambda file: file.stat().st_size))
            return
        with tempfile.NamedTemporaryFile() as file:
            block = os.urandom(JOB_BYTES)
            for _ in range(PROBE_BYTES // JOB_BYTES):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            yield from _rates(Path(file.name))
    except OSError as error:
        fix = "name a checkpoint with --weights: reading needs no place to write to"
        yield Check("disk", "unknown", "not measured", f"{error.strerror}: {error.filename or 'temporary files'}", fix)


def _rates(file: Path) -> Iterator[Check]:
    """The rates at which threads read a file, first from the disk and then from the page cache."""
    size = file.stat().st_size
    if size < LEAST_BYTES:
        found = f"{size:,} bytes in {file.parent}"
        why, fix = "no rate can be told from so few", "name a larger checkpoint, or none"
        yield from (Check(name, "unknown", found, why, fix) for name in ("disk", "page cache"))
        return
    page_cache.drop([file])
    share = page_cache.cached_share([file])
    cold, warm = (_read_rate(file) for _ in range(2))
    numbers = {"bytes_per_second": cold, "cached_share": share}
    text = f"{cold / 1e9:.2f} GB/s from {file.parent}: {_takes(cold)}"
    if share is None or share > 0.1:
        why = "the kernel kept the file in the page cache, or doesn't tell: memory may have been measured"
        yield Check("disk", "unknown", text, why, "name a larger checkpoint, or measure after a restart", numbers)
    else:
        yield _judged(
            "disk", text, cold < SLOW_DISK, "the first start after a boot waits for the disk, or for a network",
            "keep checkpoints on a local NVMe disk, or read them once before (cat FILES > /dev/null)", numbers,
        )  # fmt: skip
    yield _judged(
        "page cache", f"{warm / 1e9:.2f} GB/s: {_takes(warm)}", warm < SLOW_CACHE,
        "few cores, or slow memory, copy the bytes", "give the process more cores", {"bytes_per_second": warm},
    )  # fmt: skip


def _read_rate(file: Path) -> float:
    descriptor = os.open(file, os.O_RDONLY)
    size = min(os.fstat(descriptor).st_size, PROBE_BYTES)
    starts = deque(range(0, size, JOB_BYTES))
    threads = floor.host_threads()
    buffers = [mmap.mmap(-1, JOB_BYTES) for _ in range(threads)]
    for buffer in buffers:
        buffer.write(bytes(JOB_BYTES))

    def work(buffer: mmap.mmap) -> None:
        while starts:
            try:
                os.preadv(descriptor, [buffer], starts.popleft())
            except IndexError:
                return

    try:
        started = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, buffers))
        return size / (time.perf_counter() - started)
    finally:
        os.close(descriptor)


# --- compiled kernels --------------------------------------------------------------------------------------------


def _kernel_cache(has_gpu: bool) -> Iterator[Check]:
    """Where Triton keeps what it compiled: without such a place each start compiles again."""
    if not has_gpu:
        return
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    place = Path(os.environ.get("TRITON_CACHE_DIR") or os.path.join(home, ".triton", "cache"))
    there = next((each for each in (place, *place.parents) if each.exists()), place)
    if os.access(there, os.W_OK):
        entries = sum(1 for _ in place.iterdir()) if place.is_dir() else 0
        yield Check("kernel cache", "fine", f"{place}, {entries} entries", numbers={"entries": entries})
    else:
        why = "kernels are compiled at each start, which takes seconds"
        fix = "set TRITON_CACHE_DIR to a folder that can be written to and stays"
        yield Check("kernel cache", "slow", f"{place} can't be written to", why, fix)


# --- shared ------------------------------------------------------------------------------------------------------


def _judged(name: str, found: str, is_slow: bool, why: str, fix: str, numbers: dict[str, Any]) -> Check:
    return Check(name, "slow", found, why, fix, numbers) if is_slow else Check(name, "fine", found, numbers=numbers)


def _takes(rate: float) -> str:
    return f"{MODEL_BYTES / 1e9:.0f} GB take {MODEL_BYTES / rate:.1f} s"


def _child(code: str, *arguments: str, bare: bool = False) -> tuple[dict[str, Any], str]:
    """What a new process prints last, as JSON, and its last word where it fails. `bare`: without installed packages."""
    flags = ("-I", "-S") if bare else ()
    try:
        ran = subprocess.run(
            [sys.executable, *flags, "-c", code, *arguments], capture_output=True, text=True, errors="replace",
            timeout=CHILD_SECONDS, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return {}, str(error)
    lines = ran.stdout.strip().splitlines()
    said = (ran.stderr.strip().splitlines() or [f"it ended with {ran.returncode}"])[-1]
    said = said.removeprefix("<run_path>.CudaError: ")
    try:
        return json.loads(lines[-1]), "" if ran.returncode == 0 else said
    except (IndexError, ValueError):
        return {}, said
