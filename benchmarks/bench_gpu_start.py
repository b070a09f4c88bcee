"""On a GPU: from the start of a process to the first token, without torch and with it.

Claim: a process that serves a bundle with a native layer has its first token after at most 1.35 times what context,
pinned memory and a parallel read of the same files take through the CUDA driver alone, in the same run.

    python benchmarks/bench_gpu_start.py --build DIR [SHAPE ...]       # without a GPU: bundles and their native layers
    python benchmarks/bench_gpu_start.py --bundles DIR [SHAPE ...]

The checkpoints have random weights and lie in memory (/dev/shm), as files in the page cache do.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from precast.ir.artifact import Bundle

SHAPES = ("llama-3.1-8b",)
TARGET = "sm_90"
GOAL = 1.35
RUNS = 3
BATCHES = (1, 8, 64, 256)

FLOOR = """
import ctypes, os, sys, threading, time
CHUNK, READERS = 16 << 20, 12
driver = ctypes.CDLL("libcuda.so.1")
def made(kind, name, *args):
    found = kind()
    status = getattr(driver, name)(ctypes.byref(found), *args)
    assert status == 0, (name, status)
    return found
assert driver.cuInit(0) == 0
context = made(ctypes.c_void_p, "cuDevicePrimaryCtxRetain", made(ctypes.c_int, "cuDeviceGet", 0))
driver.cuCtxSetCurrent(context)
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
        status = driver.cuMemcpyHtoDAsync_v2(
            ctypes.c_uint64(memory.value + target), ctypes.c_void_p(place), ctypes.c_size_t(size), stream)
        assert status == 0
    assert driver.cuStreamSynchronize(stream) == 0
threads = [threading.Thread(target=read, args=(number,)) for number in range(READERS)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print("first", flush=True)
print("{}", flush=True)
os._exit(0)
"""

SERVE = """
import json, os, sys, time
began = time.perf_counter()
checkpoint, backend, bundle, digest, batches = sys.argv[1], *sys.argv[2:6]
if backend == "driver":
    class Blocked:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in ("torch", "triton"):
                raise ImportError(name + " is blocked")
    sys.meta_path.insert(0, Blocked())
import precast
from precast.loader.timeline import Timeline
timeline = Timeline(origin=began)
engine = precast.load(
    bundle, weights=checkpoint, device="cuda", cache_bytes=16 << 30, allow_config_mismatch=True, backend=backend,
    native=digest, timeline=timeline,
)
SamplingParams = precast.SamplingParams
answer = engine.generate([[1, 2, 3, 4, 5]], SamplingParams(max_tokens=1, ignore_eos=True))
print("first", flush=True)
found = {"first_token_s": round(time.perf_counter() - began, 3), "timeline": timeline.text(),
         "imported": sorted({"torch", "triton"} & set(sys.modules)), "token": answer[0].token_ids}
if batches:
    start = time.perf_counter()
    engine.wait_until_captured()
    found["captured"], found["capture_s"] = engine.stats.graphs, round(time.perf_counter() - start, 2)
    found["ms_a_step"] = {}
    for count in map(int, batches.split(",")):
        for number in range(count):
            engine.submit([number + 3] * 100, SamplingParams(max_tokens=120, ignore_eos=True))
        while engine.stats.tokens_decoded < 20 * count or engine.stats.requests_waiting:
            engine.step()
        for _ in range(10):
            engine.step()
        start = time.perf_counter()
        for _ in range(40):
            engine.step()
        found["ms_a_step"][count] = round((time.perf_counter() - start) / 40 * 1000, 3)
        while engine.has_work:
            engine.step()
    start = time.perf_counter()
    engine.generate([list(range(4096))], SamplingParams(max_tokens=1, ignore_eos=True))
    found["prefill_4096_s"] = round(time.perf_counter() - start, 4)
print(json.dumps(found), flush=True)
os._exit(0)
"""


def build(folder: Path, shape: str) -> None:
    """The bundle of a published shape, with its layer."""
    from support import shapes

    import precast

    began = time.perf_counter()
    source = shapes.write_config(shape, folder / f"{shape}.config")
    made = precast.build(source, folder / f"{shape}.bundle", dtype="bfloat16", max_seq_len=8192, targets=[TARGET])
    layer = made.native[TARGET]
    size = sum(map(len, layer.images.values()))
    print(f"{shape}: {len(layer.kernels)} kernels, {size >> 10} KiB, {time.perf_counter() - began:.0f} s", flush=True)


def started(code: str, *args: object) -> tuple[float, dict[str, Any]]:
    """Seconds from the start of a process to its first token, and what it says in the end."""
    began = time.perf_counter()
    command = [sys.executable, "-c", code, *map(str, args)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        line = process.stdout.readline()
        seconds = time.perf_counter() - began
        rest = process.stdout.read()
        if line.strip() != "first":
            raise RuntimeError(process.stderr.read().strip()[-1500:])
    return seconds, json.loads(rest.splitlines()[-1]) if rest.strip() else {}


def measured(folder: Path, shape: str, place: Path) -> dict[str, Any]:
    """All processes of one shape; one that fails is noted."""
    bundle, checkpoint = folder / f"{shape}.bundle", place / shape
    digest = Bundle.open(bundle).digest
    if not (checkpoint / "model.safetensors.index.json").exists():
        write = (
            "import sys; sys.path.insert(0, sys.argv[1]); from support import random_checkpoints; "
            "from pathlib import Path; from precast.ir.artifact import Bundle; "
            "random_checkpoints.write(Bundle.open(sys.argv[2]), Path(sys.argv[3]))"
        )
        subprocess.run([sys.executable, "-c", write, Path(__file__).parent, bundle, checkpoint], check=True)
    found: dict[str, Any] = {}
    for name, runs, code, args in (
        ("floor", RUNS, FLOOR, ()),
        ("driver", RUNS, SERVE, ("driver", bundle, digest, "")),
        ("driver_steps", 1, SERVE, ("driver", bundle, digest, ",".join(map(str, BATCHES)))),
        ("torch", 1, SERVE, ("torch", bundle, digest, "")),
    ):
        try:
            timed = [started(code, checkpoint, *args) for _ in range(runs)]
            found[name] = {"seconds": [round(seconds, 3) for seconds, _ in timed], **timed[-1][1]}
        except (RuntimeError, OSError, ValueError) as error:
            found[name] = {"failed": str(error)}
        print(name, found[name].pop("timeline", ""), json.dumps(found[name]), sep="\n", flush=True)
    if "seconds" in found["floor"] and "seconds" in found["driver"]:
        ratio = statistics.median(found["driver"]["seconds"]) / statistics.median(found["floor"]["seconds"])
        found |= {"ratio": round(ratio, 3), "goal": GOAL, "reached": ratio <= GOAL}
    return found


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", type=Path)
    parser.add_argument("--bundles", type=Path)
    parser.add_argument("--checkpoints", type=Path, default=Path("/dev/shm/precast-checkpoints"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("shapes", nargs="*", default=list(SHAPES))
    arguments = parser.parse_args()
    if arguments.build:
        arguments.build.mkdir(parents=True, exist_ok=True)
        for shape in arguments.shapes:
            build(arguments.build, shape)
        return
    found = {shape: measured(arguments.bundles, shape, arguments.checkpoints) for shape in arguments.shapes}
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1))
    for shape, each in found.items():
        print(shape, {name: each[name] for name in ("ratio", "goal", "reached") if name in each})


if __name__ == "__main__":
    main()
