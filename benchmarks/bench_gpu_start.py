"""On a GPU: from the start of a process to the first token, without torch and with it, each beside its floor.

Claims: a process that serves a bundle with a native layer has its first token after at most 1.35 times what context,
pinned memory and a parallel read of the same files take through the CUDA driver alone; with torch as the backend, after
at most 0.95 times what `import torch`, a context and the same read take one after another. All in one sitting, in turn.

    python benchmarks/bench_gpu_start.py --build DIR [--shapes SHAPE ...]     # without a GPU: bundles and native layers
    python benchmarks/bench_gpu_start.py --bundles DIR [--shapes SHAPE ...] [--out FILE]

A model in few bits has a smaller floor, and as much to make ready: `--torch-runs 0 --shapes llama-3.1-8b
llama-3.1-8b-fp8 llama-3.1-8b-int4 gpt-oss-20b-mxfp4 --out benchmarks/results/gpu_start_few_bits.json` measures some.

The checkpoints have random weights and lie in memory (/dev/shm), as files in the page cache do; each is removed after
its shape, and FILE is written then. A process that fails is noted, and ends none of the others.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from support import harness
from support.no_torch import BLOCK
from support.published_bundles import build, write_checkpoint

from precast.ir.artifact import Bundle

SHAPES = ("llama-3.1-8b", "qwen3-30b-a3b-half", "gemma-3-12b")
GOALS = {"driver": 1.35, "torch": 0.95}
RATE_GOAL = 0.8
"""Of the pinned rate from host to device, that weights come with."""
RUNS, TORCH_RUNS, AT_ONCE, KILLED = 5, 3, 3, 12
LONG = 120
"""Seconds after which a process is given up."""

FLOOR = """
import ctypes, json, os, sys, threading, time
began = time.perf_counter()
CHUNK, READERS = 16 << 20, 12
imported = began
if sys.argv[2] == "torch":
    import torch
    imported = time.perf_counter()
    torch.zeros(1, device="cuda")
driver = ctypes.CDLL("libcuda.so.1")
def made(kind, name, *args):
    found = kind()
    status = getattr(driver, name)(ctypes.byref(found), *args)
    assert status == 0, (name, status)
    return found
assert driver.cuInit(0) == 0
context = made(ctypes.c_void_p, "cuDevicePrimaryCtxRetain", made(ctypes.c_int, "cuDeviceGet", 0))
driver.cuCtxSetCurrent(context)
opened = time.perf_counter()
names = sorted(os.path.join(sys.argv[1], name) for name in os.listdir(sys.argv[1]) if name.endswith(".safetensors"))
sizes = [os.path.getsize(name) for name in names]
memory = made(ctypes.c_uint64, "cuMemAlloc_v2", ctypes.c_size_t(sum(sizes)))
ring = made(ctypes.c_void_p, "cuMemHostAlloc", ctypes.c_size_t(READERS * CHUNK), 1)
jobs, before = [], 0
for name, size in zip(names, sizes):
    jobs += [(name, at, before + at, min(CHUNK, size - at)) for at in range(0, size, CHUNK)]
    before += size
waiting = iter(jobs)
lock = threading.Lock()
def copy(target, place, size, stream):
    status = driver.cuMemcpyHtoDAsync_v2(
        ctypes.c_uint64(target), ctypes.c_void_p(place), ctypes.c_size_t(size), stream)
    assert status == 0, status
def read(number):
    driver.cuCtxSetCurrent(context)
    stream = made(ctypes.c_void_p, "cuStreamCreate", 1)
    place = ring.value + number * CHUNK
    view = memoryview((ctypes.c_char * CHUNK).from_address(place)).cast("B")
    files = {name: os.open(name, os.O_RDONLY) for name in names}
    while True:
        with lock:
            job = next(waiting, None)
        if job is None:
            break
        assert driver.cuStreamSynchronize(stream) == 0
        name, at, target, size = job
        assert os.preadv(files[name], [view[:size]], at) == size
        copy(memory.value + target, place, size, stream)
    assert driver.cuStreamSynchronize(stream) == 0
threads = [threading.Thread(target=read, args=(number,)) for number in range(READERS)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print("first", flush=True)
done = time.perf_counter()
stream = made(ctypes.c_void_p, "cuStreamCreate", 1)
for _ in range(40):
    copy(memory.value, ring.value, READERS * CHUNK, stream)
assert driver.cuStreamSynchronize(stream) == 0
rate = 40 * READERS * CHUNK / (time.perf_counter() - done)
print(json.dumps({"import": imported - began, "context": opened - imported, "read": done - opened,
                  "pinned_bytes_per_s": rate, "bytes": sum(sizes)}), flush=True)
os._exit(0)
"""

SERVE = """
import json, os, sys, time
began = time.perf_counter()
checkpoint, backend, bundle, digest, cache_bytes, variant, captures = sys.argv[1:8]
import precast
if variant:  # what it imports stands beside the context, as in a start without it
    from precast.loader.driver.context import begin_early
    begin_early("cuda")
if variant == "without warm-up":
    from precast.loader.driver.runner import DriverRunner
    DriverRunner.warm_up = lambda self, num_tokens, is_over: None
elif variant == "long turns":
    from precast.loader import turns
    turns.TURN_SECONDS = sys.getswitchinterval()
engine = precast.load(
    bundle, weights=checkpoint, device="cuda", cache_bytes=int(cache_bytes), allow_config_mismatch=True,
    backend=backend, native=digest,
)
SamplingParams = precast.SamplingParams
def timeline_of(engine):
    found, later = engine.timeline.to_dict(), engine.timeline.origin - began
    for phase in found["phases"]:
        phase["start"] += later
    return found
answer = engine.generate([[1, 2, 3, 4, 5]], SamplingParams(max_tokens=1, ignore_eos=True))
print("first", flush=True)
found = {"first_token_s": round(time.perf_counter() - began, 4), "token": answer[0].token_ids,
         "imported": sorted({"torch", "triton"} & set(sys.modules)), "timeline": timeline_of(engine),
         "compilations": engine.stats.compilations}
fields = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
found["host_bytes"] = {name: int(fields[name].split()[0]) << 10 for name in ("VmHWM", "VmRSS", "RssAnon", "RssFile")
                       if name in fields}
if captures:
    start = time.perf_counter()
    engine.wait_until_captured()
    found["captured"] = {"graphs": engine.stats.graphs, "seconds": round(time.perf_counter() - start, 3),
                         "compilations": engine.stats.compilations}
print(json.dumps(found), flush=True)
os._exit(0)
"""


FREE = """
import json
from precast.loader.driver.device import DriverDevice
print("first", flush=True)
print(json.dumps({"free": DriverDevice(0).free_bytes()}))
"""


class Start(NamedTuple):
    """Seconds from the start of a process to its first token, and what it says in the end."""

    seconds: float
    said: dict[str, Any]


def started(code: str, *args: object) -> Start:
    """One process, from its start on. Raises RuntimeError with what it says where it fails."""
    began = time.perf_counter()
    command = [sys.executable, "-X", "faulthandler", "-c", code, *map(str, args)]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        assert process.stdout is not None
        last = threading.Timer(LONG, process.kill)
        last.start()
        line = process.stdout.readline()
        seconds = time.perf_counter() - began
        rest = process.stdout.read()  # not `communicate`, which passes over what came with the line
        process.wait()
        last.cancel()
        if process.returncode == -signal.SIGKILL and time.perf_counter() - began >= LONG:
            raise RuntimeError(f"no end after {LONG} s")
        if line.strip() != "first" or not rest.strip():
            errors.seek(0)
            raise RuntimeError(f"code {process.returncode}, {line.strip()!r}: {errors.read().strip()[-1500:]}")
    return Start(seconds, json.loads(rest.splitlines()[-1]))


def after_last_byte(timeline: dict[str, Any]) -> float:
    """Seconds from the weights' last byte to the first token: the most that computing layer by layer could gain."""
    ends = {phase["name"]: phase["start"] + (phase["seconds"] or 0.0) for phase in timeline["phases"]}
    return round(ends["first token"] - ends["weights"], 4)


class Runs:
    """The starts of one shape, by name, as they come; one that fails is noted."""

    def __init__(self) -> None:
        self.starts: dict[str, list[Start]] = {}
        self.failed: dict[str, str] = {}

    def run(self, name: str, code: str, *args: object) -> None:
        """Start one."""
        try:
            self.add(name, started(code, *args))
        except (RuntimeError, OSError, ValueError) as error:
            self.failed[name] = str(error)
            print(f"{name}: FAILED {error}", flush=True)

    def add(self, name: str, start: Start) -> None:
        """Keep one, and say so."""
        self.starts.setdefault(name, []).append(start)
        print(f"{name}: {start.seconds:.3f} s", flush=True)

    def figures(self) -> dict[str, Any]:
        """Of each name all seconds, and what the run nearest to their median said."""
        found: dict[str, Any] = {}
        for name, starts in self.starts.items():
            middle = sorted(starts, key=lambda start: start.seconds)[(len(starts) - 1) // 2]
            found[name] = {
                "seconds": [round(each.seconds, 4) for each in starts],
                "median": round(statistics.median(each.seconds for each in starts), 4),
                **middle.said,
            }
            if "timeline" in middle.said:
                found[name]["after_last_byte_s"] = after_last_byte(middle.said["timeline"])
        for name, why in self.failed.items():
            found.setdefault(name, {})["failed"] = why
        return found


def together(runs: Runs, name: str, start: Callable[[], Start]) -> None:
    """`AT_ONCE` processes at once; the last one's first token counts."""
    try:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for each in [pool.submit(start) for _ in range(AT_ONCE)]:
                runs.add(name, each.result())
    except (RuntimeError, OSError, ValueError) as error:
        runs.failed[name] = str(error)
        print(f"{name}: FAILED {error}", flush=True)


def killed(bundle: Path, checkpoint: Path, digest: str) -> dict[str, Any]:
    """`precast run`, ended by SIGTERM and SIGINT at random moments: how soon, with which codes, and what is left."""
    command = [sys.executable, "-m", "precast", "run", bundle, "--weights", checkpoint, "--token-ids", "1,2,3"]
    command += ["--backend", "driver", "--allow-native", digest, "--allow-config-mismatch", "--cache-bytes", 1 << 30]
    moments, seconds, codes = random.Random(0), [], []
    free = started(FREE).said["free"]
    for index in range(KILLED):
        with subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            with suppress(subprocess.TimeoutExpired):
                process.wait(moments.uniform(0.1, 1.5))
            began = time.perf_counter()
            process.send_signal((signal.SIGINT, signal.SIGTERM)[index % 2])
            codes.append(process.wait(LONG))
            seconds.append(round(time.perf_counter() - began, 3))
    left = free - started(FREE).said["free"]
    print(f"killed: {codes}, slowest {max(seconds)} s, {left} bytes of the GPU left behind", flush=True)
    return {"codes": codes, "seconds": seconds, "bytes_left_behind": left}


def measured(bundle: Path, checkpoint: Path, *, is_first: bool, torch_runs: int) -> dict[str, Any]:
    """All processes of one shape, in turn; those that only the first shape tells are left out of the others."""
    digest = Bundle.open(bundle).digest
    runs = Runs()

    def serve(backend: str, variant: str = "", cache: int = 16 << 30, captures: str = "") -> tuple[object, ...]:
        code = BLOCK + SERVE if backend == "driver" else SERVE
        return code, checkpoint, backend, bundle, digest, cache, variant, captures

    runs.run("first", *serve("driver"))  # with files of this shape and of the libraries that nobody has read
    for turn in range(RUNS):
        runs.run("floor", FLOOR, checkpoint, "driver")
        runs.run("driver", *serve("driver"))
        if turn < torch_runs:
            runs.run("torch floor", FLOOR, checkpoint, "torch")
            runs.run("torch", *serve("torch"))
        if turn < 3 and is_first:
            runs.run("driver, without warm-up", *serve("driver", "without warm-up"))
            runs.run("driver, long turns", *serve("driver", "long turns"))
    runs.run("driver, captured", *serve("driver", captures="yes"))
    if is_first:
        together(runs, "floor, at once", lambda: started(FLOOR, checkpoint, "driver"))
        together(runs, "driver, at once", lambda: started(*serve("driver", cache=1 << 30)))  # type: ignore[arg-type]
        try:
            return {**compared(runs.figures()), "killed": killed(bundle, checkpoint, digest)}
        except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
            runs.failed["killed"] = str(error)
    return compared(runs.figures())


def compared(found: dict[str, Any]) -> dict[str, Any]:
    """The figures with what they are beside one another, and whether that is what is claimed."""
    for name, floor in (("driver", "floor"), ("torch", "torch floor")):
        if "median" in found.get(name, {}) and "median" in found.get(floor, {}):
            ratio = found[name]["median"] / found[floor]["median"]
            reached = {"times_the_floor": round(ratio, 3), "goal": GOALS[name], "reached": ratio <= GOALS[name]}
            found[name] |= reached
    if "timeline" in found.get("driver", {}) and "pinned_bytes_per_s" in found.get("floor", {}):
        (weights,) = (each for each in found["driver"]["timeline"]["phases"] if each["name"] == "weights")
        share = weights["bytes"] / weights["seconds"] / found["floor"]["pinned_bytes_per_s"]
        found["driver"] |= {"share_of_pinned_rate": round(share, 3), "rate_reached": share >= RATE_GOAL}
    at_once = [found.get(name, {}).get("seconds") for name in ("driver, at once", "floor, at once")]
    if all(at_once):
        found["driver, at once"]["times_the_floor"] = round(max(at_once[0]) / max(at_once[1]), 3)
    return found


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path)
    parser.add_argument("--bundles", type=Path, default=Path("build/driver"))
    parser.add_argument("--checkpoints", type=Path, default=Path("/dev/shm/precast-checkpoints"))
    parser.add_argument("--out", type=Path, default=harness.RESULTS / "gpu_start.json")
    parser.add_argument("--torch-runs", type=int, default=TORCH_RUNS)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    arguments = parser.parse_args()
    if arguments.build:
        arguments.build.mkdir(parents=True, exist_ok=True)
        for shape in arguments.shapes:
            build(arguments.build, shape)
        return
    machine = harness.machine_by_itself()
    figures: dict[str, Any] = {}
    for shape in arguments.shapes:
        print(f"== {shape}", flush=True)
        bundle, checkpoint = arguments.bundles / f"{shape}.bundle", arguments.checkpoints / shape
        try:
            write_checkpoint(bundle, checkpoint)
            figures[shape] = measured(bundle, checkpoint, is_first=not figures, torch_runs=arguments.torch_runs)
        except (OSError, subprocess.CalledProcessError) as error:
            figures[shape] = {"failed": str(error)}
        finally:
            shutil.rmtree(checkpoint, ignore_errors=True)
        text = json.dumps({"claim": "gpu_start", "machine": machine, "figures": figures}, indent=1)
        arguments.out.write_text(text + "\n", encoding="utf-8")
        for name in ("driver", "torch"):
            kept = ("median", "times_the_floor", "reached", "share_of_pinned_rate", "after_last_byte_s", "host_bytes")
            print(name, {key: figures[shape].get(name, {}).get(key) for key in kept}, flush=True)


if __name__ == "__main__":
    main()
