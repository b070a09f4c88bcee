"""Checks what connects ranks without torch, on two GPUs of one host: memory of each other's GPUs, and NCCL.

    python benchmarks/checks/check_driver_peers.py [--out FILE] [--gpus 2]

A process for each GPU makes its context, opens the others' memory, and adds up, norms and gathers tensors of odd sizes,
op by op and in replays of a captured graph; numpy says what should come. Neither torch nor Triton is imported: kernels
are compiled by NVRTC. At the end one rank waits in vain, and is told to stop. A line a case, a few seconds in all; it
ends with code 1 where a case failed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from precast.ir.errors import PrecastError
from precast.ir.graph.normed_sums import BOTH, GROUP, SUM
from precast.ir.graph.schema import Const, Dtype, Node, Ref, TensorType, Value
from precast.ir.memory.strides import contiguous
from precast.ir.native import NO_ARGUMENT, NativeKernel, NativeLayer, NativeParam
from precast.ir.weights.tensorfile import element_bytes
from precast.kernels.collectives.launches import Among
from precast.kernels.cuda_source import compiled
from precast.kernels.launch_key import forms
from precast.kernels.native import Native
from precast.kernels.records import Launch
from precast.kernels.use import GPU
from precast.loader.device import Buffer, host_bytes
from precast.loader.driver.collectives import GATHER
from precast.loader.driver.connection import Connection
from precast.loader.driver.device import DriverDevice
from precast.loader.driver.kernels import Kernels
from precast.loader.driver.library import DriverError
from precast.loader.driver.on_host import converted
from precast.loader.driver.placed import WORKSPACE, At, Placed, Template
from precast.loader.driver.program import Ready
from precast.loader.world.agree import Said
from precast.loader.world.channel import accept_ranks, connect, listen, new_secret
from precast.loader.world.follower import Follower
from precast.loader.world.lead import Lead
from precast.loader.world.timeouts import Timeouts

MOST_BYTES = 64 << 20
TURNS = 3
SECONDS = 15.0
"""That a kernel waits for other ranks."""
SUMS: list[tuple[tuple[int, ...], Dtype]] = [
    (shape, dtype)
    for dtype in ("bfloat16", "float16", "float32")
    for shape in ((1, 8), (1, 1, 4096), (3, 40), (77, 4096))
] + [((2100, 4096), "bfloat16"), ((3, 5), "bfloat16"), ((4,), "float64"), ((1, 3, 33), "float16")]
"""The last are no whole vectors, or of another type: NCCL's."""
NORMS: list[tuple[tuple[int, ...], Dtype, float, bool]] = [
    (shape, dtype, offset, cast)
    for dtype, offset, cast in (("bfloat16", 0.0, True), ("float16", 1.0, False), ("float32", 0.0, True))
    for shape in ((1, 1, 4096), (1, 7, 72), (1, 300, 4096), (1, 2, 16384))
] + [((1, 2100, 4096), "bfloat16", 0.0, True)]
GATHERS: list[tuple[tuple[int, ...], Dtype, int]] = [
    ((5, 7), "bfloat16", 0),
    ((1, 3, 33), "float32", -1),
    ((1, 64, 1001), "bfloat16", -1),
    ((6,), "int64", 0),
]


class Array(NamedTuple):
    """Numbers of a rank, as they lie in memory (`raw`), and as float64."""

    raw: Any
    values: Any


class Rank(NamedTuple):
    """One of the processes."""

    among: Among
    device: DriverDevice
    connection: Connection
    memory: dict[str, Buffer]
    gather: Callable[[str], object]


class Case(NamedTuple):
    """What is launched over memory that begins with these arrays, and what should come."""

    name: str
    templates: list[Template]
    given: Callable[[int], dict[str, Array]]
    expected: Callable[[int], dict[str, tuple[Any, float]]]
    dtype: Dtype


@cache
def numbers(rank: int, turn: int, shape: tuple[int, ...], dtype: Dtype) -> Array:
    """What a rank has in this turn, some of it -0.0."""
    made = np.random.default_rng(1000 * turn + rank).standard_normal(shape, np.float32)
    made[np.abs(made) < 0.1] = -0.0
    if dtype == "int64":
        raw: Any = (made * 1000).astype(np.int64)
        return Array(raw, raw)
    raw = made.astype(np.float64) if dtype == "float64" else converted(made, "float32", dtype)
    return Array(raw, wide(raw, dtype))


def wide(raw: Any, dtype: Dtype) -> Any:
    """The numbers that lie so in memory, as float64."""
    return raw if dtype == "int64" else converted(raw, dtype, "float64").astype(np.float64)


def rounded(values: Any, dtype: Dtype) -> Any:
    """float64 rounded to a type, as float64."""
    if dtype in ("float64", "int64"):
        return values
    return wide(converted(values.astype(np.float32), "float32", dtype), dtype)


def placed(name: str, shape: Sequence[int], dtype: Dtype) -> Placed:
    return Placed(name, 0, dtype, contiguous(shape))


# --- cases -----------------------------------------------------------------------------------------------------------


def sum_cases(rank: Rank) -> Iterator[Case]:
    for shape, dtype in SUMS:
        node = Node(SUM, {"x": Ref("x"), "group": GROUP}, (Value("y", TensorType(dtype, shape)),))
        tensors = {"x": placed("x", shape, dtype), "out.0": placed("out.0", shape, dtype)}

        def given(turn: int, shape: Any = shape, dtype: Any = dtype) -> dict[str, Array]:
            return {"x": numbers(rank.among.rank, turn, shape, dtype)}

        def expected(turn: int, shape: Any = shape, dtype: Any = dtype) -> dict[str, tuple[Any, float]]:
            return {"out.0": (total(rank.among.size, turn, shape, dtype), 0.0)}

        templates = rank.connection.collectives.summed(node, tensors)
        yield Case(f"sum {dtype} {list(shape)}", templates, given, expected, dtype)


def total(size: int, turn: int, shape: tuple[int, ...], dtype: Dtype) -> Any:
    """The ranks' sum, added in float32 in their order and rounded once."""
    parts = [numbers(rank, turn, shape, dtype).values for rank in range(size)]
    if dtype == "float64":
        return sum(parts[1:], parts[0])
    found = parts[0].astype(np.float32)
    for part in parts[1:]:
        found = found + part.astype(np.float32)
    return rounded(found.astype(np.float64), dtype)


def norm_cases(rank: Rank) -> Iterator[Case]:
    for shape, dtype, offset, cast in NORMS:
        args = {"x": Ref("x"), "residual": Ref("residual"), "weight": Ref("weight"), "group": GROUP}
        args |= {"eps": Const(1e-5), "offset": Const(offset), "cast_before_scale": Const(cast)}
        made = tuple(Value(name, TensorType(dtype, shape)) for name in ("y", "s"))
        names = ("x", "residual", "out.0", "out.1")
        tensors = {name: placed(name, shape, dtype) for name in names} | {"weight": placed("weight", shape[-1:], dtype)}

        def given(turn: int, shape: Any = shape, dtype: Any = dtype) -> dict[str, Array]:
            own = numbers(rank.among.rank, turn, shape, dtype)
            return {"x": own, "residual": numbers(77, turn, shape, dtype), "weight": numbers(99, 0, shape[-1:], dtype)}

        def expected(turn: int, case: Any = (shape, dtype, offset, cast)) -> dict[str, tuple[Any, float]]:
            shape, dtype, offset, cast = case
            stream = rounded(total(rank.among.size, turn, shape, dtype) + numbers(77, turn, shape, dtype).values, dtype)
            weight = numbers(99, 0, shape[-1:], dtype).values
            normed = stream / np.sqrt(np.square(stream).mean(-1, keepdims=True) + 1e-5)
            normed = rounded(normed, dtype) if cast else normed
            return {"out.1": (stream, 0.0), "out.0": (normed * (weight + offset), TOLERANCE[dtype])}

        templates, left = rank.connection.collectives.normed(Node(BOTH, args, made), tensors)
        if left is None:
            yield Case(f"norm {dtype} {list(shape)}", templates, given, expected, dtype)


TOLERANCE = {"bfloat16": 3e-2, "float16": 4e-3, "float32": 1e-5}
"""Of a norm, relative to its largest element: it is rounded two or three times."""


def gather_cases(rank: Rank) -> Iterator[Case]:
    for shape, dtype, dim in GATHERS:
        args = {"x": Ref("x"), "dim": Const(dim), "group": GROUP, "size": Const(rank.among.size)}
        whole = list(shape)
        whole[dim] *= rank.among.size
        node = Node(GATHER, args, (Value("y", TensorType(dtype, tuple(whole))),))

        def given(turn: int, shape: Any = shape, dtype: Any = dtype) -> dict[str, Array]:
            return {"x": numbers(rank.among.rank, turn, shape, dtype)}

        def expected(turn: int, shape: Any = shape, dtype: Any = dtype, dim: Any = dim) -> dict[str, tuple[Any, float]]:
            parts = [numbers(each, turn, shape, dtype).values for each in range(rank.among.size)]
            return {"out.0": (np.concatenate(parts, dim), 0.0)}

        tensors = {"x": placed("x", shape, dtype), "out.0": placed("out.0", whole, dtype)}
        templates = list(rank.connection.collectives.gathered(node, tensors))
        yield Case(f"gather {dtype} {list(shape)} along {dim}", templates, given, expected, dtype)


# --- on the device -------------------------------------------------------------------------------------------------


def upload(rank: Rank, name: str, raw: Any) -> None:
    data = np.ascontiguousarray(raw).reshape(-1).view(np.uint8)
    pinned = rank.device.alloc(len(data), pinned=True)
    np.frombuffer(host_bytes(pinned), np.uint8)[:] = data
    rank.device.copy(rank.memory[name].view(0, (len(data),)), pinned)
    rank.device.synchronize()


def download(rank: Rank, name: str, shape: Sequence[int], dtype: Dtype) -> Any:
    count = int(np.prod(shape)) * element_bytes(dtype)
    pinned = rank.device.alloc(count, pinned=True)
    rank.device.copy(pinned, rank.memory[name].view(0, (count,)))
    rank.device.synchronize()
    held = {"bfloat16": np.uint16}.get(dtype, dtype)
    return wide(np.frombuffer(host_bytes(pinned), held).reshape(shape).copy(), dtype)


def run_case(rank: Rank, case: Case, kernels: Kernels) -> str:
    """Eagerly and captured, by turns: "right", or where numbers are others than numpy's. All ranks make all turns."""
    said = "right"
    at = {name: buffer.pointer for name, buffer in rank.memory.items()}

    def launch() -> None:
        for each in case.templates:
            values = tuple(at[v.base] + v.offset if isinstance(v, At) else v for v in each.values)
            kernels.prepared(Ready(each.launch, each.key, each.grid, values))(rank.device.current)

    for turn in range(TURNS):
        for name, array in case.given(turn).items():
            upload(rank, name, array.raw)
        wanted = case.expected(turn)
        for name, (values, _) in wanted.items():
            upload(rank, name, np.full(values.size * element_bytes(case.dtype), 0xFF, np.uint8))
        rank.gather("turn")
        if turn == 0:
            launch()
        elif turn == 1:
            with rank.device.capture() as graph:
                launch()
            graph.replay()
        elif turn % 2:
            graph.replay()
        else:
            launch()
        rank.device.synchronize()
        for name, (values, tolerance) in wanted.items():
            found = download(rank, name, values.shape, case.dtype)
            error = np.abs(found - values).max() / max(1.0, np.abs(values).max())
            if not error <= tolerance and said == "right":
                said = f"wrong: turn {turn}: {name} is off by {error:.3g}, first {found.ravel()[:4]}"
    return said


def layer_of(launches: Sequence[tuple[Launch, str]], capability: tuple[int, int]) -> NativeLayer:
    """A native layer of these launches of CUDA C++."""
    kernels, images = {}, {}
    for launch, key in launches:
        file, _, name = launch.kernel.removeprefix("precast.kernels.").partition(":")
        image = compiled(file, tuple(launch.constants.items()), capability)
        digest = hashlib.sha256(image).hexdigest()
        images[digest] = image
        known = forms(launch, lambda pointer: "uint8")
        params = tuple(
            NativeParam("int64" if form == "n" else "pointer", NO_ARGUMENT if form == "-" else i)
            for i, form in enumerate(known)
        )
        kernels[key] = NativeKernel(launch.kernel, key, digest, name, launch.block, launch.shared_bytes, params, (), (),
                                    launch.pdl)  # fmt: skip
    return NativeLayer("sm_{}{}".format(*capability), 12000, {}, {}, tuple(kernels.values()), images)


def seconds_of(rank: Rank, case: Case, kernels: Kernels, count: int = 200) -> float:
    """How long a launch of a case takes, of many in one captured graph."""
    at = {name: buffer.pointer for name, buffer in rank.memory.items()}
    with rank.device.capture() as graph:
        for _ in range(count):
            for each in case.templates:
                values = tuple(at[v.base] + v.offset if isinstance(v, At) else v for v in each.values)
                kernels.prepared(Ready(each.launch, each.key, each.grid, values))(rank.device.current)
    first, last = rank.device.event(timed=True), rank.device.event(timed=True)
    for _ in range(3):
        rank.gather("timed")
        first.record()
        graph.replay()
        last.record()
        last.synchronize()
    return rank.device.seconds_between(first, last) / count


def check(side: Lead | Follower, among: Among, folder: Path) -> dict[str, Any]:
    """All that one process does; what came of each case."""
    began = time.perf_counter()
    device = DriverDevice(among.rank)

    def exchange(name: str, said: bytes) -> list[bytes]:
        return [each.value for each in side.gather(name, Said(said))]

    target = GPU._replace(capability=device.capability, tp=among.size)
    connection = Connection(among, device, target, folder, exchange, seconds=SECONDS)
    found: dict[str, Any] = {"gpu": device.model, "context and memory, s": round(time.perf_counter() - began, 3)}
    found["peers"] = connection.collectives.has_peers
    with device.use():
        try:
            connection.connect_nccl()
        except (PrecastError, RuntimeError, OSError) as error:
            found["nccl"] = str(error)
        found["connected by"] = connection.text
        names = ("x", "residual", "weight", "out.0", "out.1", WORKSPACE)
        memory = {name: device.alloc(MOST_BYTES) for name in names} | connection.memory
        rank = Rank(among, device, connection, memory, lambda name: exchange(name, b""))
        found["cases"] = dict(_checked(rank, found))
        found["torch"] = "torch" in sys.modules
        exchange("cases", b"")
        if connection.collectives.has_peers:
            found["stopped"] = _stopped(rank, exchange)
    return found


def _checked(rank: Rank, found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    cases = [*sum_cases(rank), *norm_cases(rank), *gather_cases(rank)]
    launched = [(each.launch, each.key) for case in cases for each in case.templates if each.key]
    native = Native(layer_of(launched, rank.device.capability))
    kernels = Kernels(native, rank.device, rank.connection.calls)
    for case in cases:
        if any(not each.key and each.launch.kernel not in rank.connection.calls for each in case.templates):
            yield case.name, "left out: there is no NCCL"
            continue
        try:
            yield case.name, run_case(rank, case, kernels)
        except (DriverError, RuntimeError) as error:
            yield case.name, f"wrong, and the end: {error}"
            return
    timed = {case.name: case for case in cases}
    for name in ("sum bfloat16 [1, 1, 4096]", "norm bfloat16 [1, 1, 4096]"):
        if name in timed:
            found[f"{name}, us"] = round(1e6 * seconds_of(rank, timed[name], kernels), 2)


def _stopped(rank: Rank, exchange: Callable[[str, bytes], object]) -> str:
    """Rank 0 adds up alone until it is told to stop; how that ended."""
    case = next(case for case in sum_cases(rank) if case.name == "sum bfloat16 [1, 1, 4096]")
    native = Native(layer_of([(each.launch, each.key) for each in case.templates], rank.device.capability))
    said = "not asked"
    if rank.among.rank == 0:
        at = {name: buffer.pointer for name, buffer in rank.memory.items()}
        for each in case.templates:
            values = tuple(at[v.base] + v.offset if isinstance(v, At) else v for v in each.values)
            Kernels(native, rank.device).prepared(Ready(each.launch, each.key, each.grid, values))(rank.device.current)
        began = time.perf_counter()
        timer = threading.Timer(0.5, rank.connection.abort)
        timer.start()
        try:
            rank.device.synchronize()
            said = "right"
        except DriverError as error:
            said = f"wrong: after {time.perf_counter() - began:.1f} s: {error}"
    exchange("stopped", b"")
    return said


# --- processes -------------------------------------------------------------------------------------------------------


def main() -> int:
    """Start the other ranks, be rank 0, and say what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/check_driver_peers.json"))
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--follow", help=argparse.SUPPRESS)
    options = parser.parse_args()
    timeouts = Timeouts(join=60, agree=60, load=60, end=5)
    if options.follow:
        rank, size, port, folder = json.loads(options.follow)
        secret = bytes.fromhex(sys.stdin.readline().strip())
        side = Follower(rank, size, connect("127.0.0.1", port, secret, rank, seconds=60), timeouts)
        _told(side, Among(rank, size), Path(folder))
        return 0
    processes = []
    with tempfile.TemporaryDirectory(prefix="precast-") as folder:
        secret = new_secret()
        with closing(listen("127.0.0.1", None)) as listener:
            for rank in range(1, options.gpus):
                told = json.dumps([rank, options.gpus, listener.getsockname()[1], folder])
                process = subprocess.Popen(
                    [sys.executable, __file__, "--follow", told], stdin=subprocess.PIPE, text=True
                )
                assert process.stdin is not None
                process.stdin.write(secret.hex() + "\n")
                process.stdin.close()
                processes.append(process)
            lead = Lead(accept_ranks(listener, secret, range(1, options.gpus), seconds=60), timeouts)
        found = _told(lead, Among(0, options.gpus), Path(folder))
    for process in processes:
        process.kill()
        process.wait()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for rank, each in enumerate(found):
        cases = each.pop("cases", {})
        odd = {name: text for name, text in cases.items() if text != "right"}
        print(f"rank {rank}: {len(cases) - len(odd)} of {len(cases)} cases are right", json.dumps(each | odd, indent=1))
        each["cases"] = cases
    said = [each.get("cases", {"none": "wrong"}) for each in found]
    ends = [each.get("stopped", "not asked") for each in found]
    return int(any(text.startswith("wrong") for text in (*ends, *(text for cases in said for text in cases.values()))))


def _told(side: Lead | Follower, among: Among, folder: Path) -> list[Any]:
    """What came of this rank, told to all."""
    try:
        mine = check(side, among, folder)
    except Exception as error:  # noqa: BLE001 - it is told
        mine = {"error": f"{type(error).__name__}: {error}", "where": traceback.format_exc()[-1500:]}
    try:
        return [msgspec.json.decode(each.value) for each in side.gather("found", Said(msgspec.json.encode(mine)))]
    except PrecastError as error:
        return [mine, {"error": f"the others: {error}"}]


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # threads may wait for ranks that have ended
