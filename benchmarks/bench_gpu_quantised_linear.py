"""On a GPU: linear layers whose weights are in few bits, beside the product in bfloat16 and the time of their bytes.

Claim: of few rows such a layer takes the time in which its weight is read, so less than in bfloat16 by as much as the
weight is smaller; of a prompt it takes little more than in bfloat16, and less where both sides are of eight bits. The
layers are those of Llama 3.1 8B. Calls are captured in a row in a CUDA graph, over more weights than L2 holds; the
product in bfloat16 is torch's, measured the same way in the same run. Three rows are compared with the definition.

    python benchmarks/bench_gpu_quantised_linear.py [--out FILE] [--seconds N] [--tiles] [--rows N ...] [FORMAT ...]

`--tiles` measures other tiles for 1, 16 and 64 rows besides. What the seconds leave no time for has no figures.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from support import harness
from support.gpu_times import microseconds, product_flops_per_second, read_bytes_per_second
from support.launch_compiler import compile_launch

from precast.kernels.choices import fitting
from precast.kernels.launch import Launched, use_of_tensors
from precast.kernels.quantised_linear import launches
from precast.kernels.quantised_linear.launches import Tile
from precast.kernels.quantised_linear.quantised_linear import quantised_linear
from precast.kernels.records import Record
from precast.kernels.use import Use

LAYERS = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
"""Outputs and inputs."""
ROWS = (1, 8, 16, 64, 256, 4096)
TILED_ROWS, TILED_LAYERS = (1, 16, 64), ("o", "gate_up")
MORE_THAN_L2, MOST_COPIES = 160 << 20, 12
GROUP = 128
Arguments = dict[str, Any]
Calls = list[Callable[[], Any]]


class Format(NamedTuple):
    """How a weight is stored (with `kind`, how its scales lie), and how the input is rounded."""

    format: str
    kind: str = ""
    activation: str = "none"
    dtype: torch.dtype = torch.bfloat16


FORMATS = {
    "fp8 blocks": Format("fp8", "blocks"), "fp8 blocks, fp8_group": Format("fp8", "blocks", "fp8_group"),
    "fp8 rows": Format("fp8", "rows"), "fp8 rows, fp8_token": Format("fp8", "rows", "fp8_token"),
    "int8 rows": Format("int8", "rows"), "int8 rows, int8_token": Format("int8", "rows", "int8_token"),
    "packed4": Format("packed4"), "packed4 points": Format("packed4", "points"), "packed8": Format("packed8"),
    "mxfp4": Format("mxfp4"), "nvfp4": Format("nvfp4"), "gptq": Format("gptq", dtype=torch.float16),
}  # fmt: skip


def words(*shape: int, device: str) -> torch.Tensor:
    """Random bits, int32."""
    return torch.empty(shape, dtype=torch.int32, device=device).random_(-(1 << 31), (1 << 31) - 1)


def scales(*shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """About as large as makes values that add up to 1."""
    return (torch.rand(shape, device=device) * 1e-3 + 1e-3).to(dtype)


def weight(one: Format, outputs: int, inputs: int, device: str) -> Arguments:
    """A layer's parts."""
    scale = partial(scales, dtype=torch.float32, device=device)
    if one.format in ("fp8", "int8"):
        block = (GROUP, GROUP) if one.kind == "blocks" else (1, inputs)
        values = words(outputs, inputs // 4, device=device).view(torch.int8)
        if one.format == "fp8":
            values = torch.where(values & 0x7F == 0x7F, 0, values).view(torch.float8_e4m3fn)  # NaN
        shape = (-(-outputs // block[0]), -(-inputs // block[1]))
        return {"weight": values, "scales": scale(*shape) / 30, "format": one.format, "block": block}
    if one.format in ("packed4", "packed8"):
        each = {"packed4": 8, "packed8": 4}[one.format]
        made: Arguments = {"weight": words(outputs, inputs // each, device=device), "format": one.format}
        made["scales"] = scales(outputs, inputs // GROUP, dtype=torch.bfloat16, device=device)
        if one.kind == "points":
            return {**made, "zeros": words(outputs // each, inputs // GROUP, device=device)}
        return {**made, "zero_offset": 8 if each == 8 else 128}
    if one.format == "mxfp4":
        exponents = torch.full((outputs, inputs // 32), 118, dtype=torch.uint8, device=device)
        values = words(outputs, inputs // 32, 4, device=device).view(torch.uint8)
        return {"weight": values, "scales": exponents, "format": "mxfp4"}
    if one.format == "nvfp4":
        values = words(outputs, inputs // 8, device=device).view(torch.uint8)
        return {"weight": values, "scales": torch.ones(outputs, inputs // 16, device=device).to(torch.float8_e4m3fn),
                "global_scale": scale(1, 1), "format": "nvfp4"}  # fmt: skip
    return {  # with act order: without, it is read as packed4
        "weight": words(inputs // 8, outputs, device=device), "format": "gptq", "zero_offset": 1,
        "groups": (torch.randperm(inputs, device=device) // GROUP).int(),
        "zeros": words(inputs // GROUP, outputs // 8, device=device),
        "scales": scales(inputs // GROUP, outputs, dtype=torch.float16, device=device),
    }  # fmt: skip


def input_of(rows: int, inputs: int, one: Format, device: str) -> torch.Tensor:
    return torch.randn(1, rows, inputs, device=device).to(one.dtype)


def use_of(given: Arguments, capability: tuple[int, int]) -> Use:
    """Of params, but for the input."""
    use = use_of_tensors("precast.quantised_linear", 1, given)
    operands = {name: each._replace(is_activation=name == "input") for name, each in use.operands.items()}
    return use._replace(operands=operands, target=use.target._replace(device="cuda", capability=capability))


def record_for(use: Use, rows: int, tile: Tile | None) -> Record:
    """The first that takes it; of those with tiles, if one is given."""
    return next(each for each in fitting(use, {"T": rows}) if tile is None or each.kind == "triton")


def num_bytes(given: Mapping[str, Any]) -> int:
    """Of the tensors."""
    return sum(x.nbytes for x in given.values() if isinstance(x, torch.Tensor))


@contextlib.contextmanager
def choosing(tile: Tile | None) -> Iterator[None]:
    """Another tile than that of `precast.kernels.quantised_linear.launches`; None: that."""
    chosen = launches.tile_of
    if tile is not None:
        launches.tile_of = lambda *_: tile  # type: ignore[assignment]
    try:
        yield
    finally:
        launches.tile_of = chosen


def tiles_for(one: Format, layer: str, rows: int) -> list[Tile]:
    """Tiles to try beside the chosen one."""
    outputs, inputs = LAYERS[layer]
    use = use_of({"input": input_of(rows, inputs, one, "meta"), **weight(one, outputs, inputs, "meta")}, (9, 0))
    chosen = launches.tile_of(use, next((most for most in launches.ROWS if rows <= most), None))
    tried = [chosen._replace(n=n, parts=parts) for n in (16, 32, 64, 128) for parts in (1, 2, 4)]
    tried += [chosen._replace(num_stages=stages) for stages in (2, 3, 4, 6, 8, 10)]
    tried += [chosen._replace(num_warps=warps) for warps in (2, 8)]
    return [tile for tile in dict.fromkeys(tried) if tile != chosen]


Job = tuple[str, str, int, Tile | None, tuple[int, int]]


def compile_one(job: Job) -> str:
    """Into the cache on disk; why it failed."""
    name, layer, rows, tile, capability = job
    one, (outputs, inputs) = FORMATS[name], LAYERS[layer]
    try:
        given = {"input": input_of(rows, inputs, one, "meta"), **weight(one, outputs, inputs, "meta"),
                 "activation": one.activation}  # fmt: skip
        use = use_of(given, capability)
        record = record_for(use, rows, tile)
        tensors = {key: x for key, x in given.items() if isinstance(x, torch.Tensor)}
        tensors["out.0"] = torch.empty(1, rows, outputs, dtype=one.dtype, device="meta")
        tensors["workspace"] = torch.empty(1 << 40, dtype=torch.uint8, device="meta")
        assert not isinstance(record.runs, str), record.name
        with choosing(tile):
            for launch in record.runs(use):
                if not launch.library and not launch.block:
                    compile_launch(launch, tensors)
    except Exception as error:  # noqa: BLE001 - one case doesn't end the others
        return f"{job[:4]}: {type(error).__name__}: {error}"
    return ""


def compile_all(jobs: list[Job]) -> float:
    """Compiles what will be measured, on all cores; the seconds it took."""
    began = time.perf_counter()
    with ProcessPoolExecutor(max(1, min(14, (os.cpu_count() or 2) - 2)), mp_context=get_context("spawn")) as pool:
        problems = {each for each in pool.map(compile_one, jobs, chunksize=2) if each}
    for problem in sorted(problems)[:8]:
        print("not compiled:", problem[:300], file=sys.stderr)
    return time.perf_counter() - began


class Layer:
    """A layer's weights in a format: as many copies as L2 doesn't hold."""

    def __init__(self, name: str, layer: str) -> None:
        self.one, (self.outputs, self.inputs) = FORMATS[name], LAYERS[layer]
        first = weight(self.one, self.outputs, self.inputs, "cuda")
        self.num_bytes = num_bytes(first)
        count = max(1, min(MOST_COPIES, -(-MORE_THAN_L2 // self.num_bytes)))
        self.copies = [first, *(weight(self.one, self.outputs, self.inputs, "cuda") for _ in range(count - 1))]

    def calls(self, rows: int, tile: Tile | None = None) -> tuple[str, Calls, torch.Tensor, Arguments]:
        """The record's name, a call for each copy, and the first one's result and arguments."""
        x = input_of(rows, self.inputs, self.one, "cuda")
        out = torch.empty(1, rows, self.outputs, dtype=self.one.dtype, device="cuda")
        given = [{"input": x, **copy, "activation": self.one.activation} for copy in self.copies]
        use = use_of(given[0], torch.cuda.get_device_capability())
        record = record_for(use, rows, tile)
        assert not isinstance(record.runs, str), record.name
        with choosing(tile):
            launched = Launched(record.runs(use), record.workspace(use))
        tensors = [{key: x for key, x in each.items() if isinstance(x, torch.Tensor)} for each in given]
        calls = [partial(launched, **each, out=out) for each in tensors]
        return record.name, calls * max(1, 6 // len(calls)), out, given[0]


def measured(layer: Layer, rows: int, rates: tuple[float, float], tile: Tile | None = None) -> dict[str, Any]:
    """Microseconds of a call, beside the time of the bytes, or of the products if that is more."""
    name, calls, _, _ = layer.calls(rows, tile)
    moved = layer.num_bytes + layer.one.dtype.itemsize * rows * (layer.inputs + layer.outputs)
    floor = max(moved / rates[0], 2 * rows * layer.inputs * layer.outputs / rates[1])
    return {
        "microseconds": round(microseconds(calls), 2), "floor_microseconds": round(1e6 * floor, 2),
        "record": name.partition(".")[2].removeprefix("quantised_linear") or name.partition(".")[0],
    }  # fmt: skip


def difference(layer: Layer) -> str:
    """From the definition, in units of the largest number, of three rows."""
    _, calls, out, given = layer.calls(3)
    out.fill_(torch.nan)
    calls[0]()
    expected = quantised_linear(**given).float()
    return f"{float((out.float() - expected).abs().max() / expected.abs().max()):.1e}"


def in_bfloat16(layer: str, rows: int) -> float:
    """Microseconds of torch's product."""
    outputs, inputs = LAYERS[layer]
    count = max(1, min(MOST_COPIES, -(-MORE_THAN_L2 // (2 * outputs * inputs))))
    weights = [torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
    calls = [partial(torch.nn.functional.linear, x, each) for each in weights]
    return round(microseconds(calls * max(1, 6 // count)), 2)


def attempt(case: Callable[[], Any]) -> Any:
    """What the case gives, or why it failed: the others are measured all the same."""
    try:
        return case()
    except Exception as error:  # noqa: BLE001 - whatever it is
        return {"failed": f"{type(error).__name__}: {error}"[:300]}


def tiled(name: str, rates: tuple[float, float]) -> dict[str, Any]:
    """Other tiles of a format: microseconds by layer, rows and tile, the fastest first."""
    found: dict[str, Any] = {}
    for layer in TILED_LAYERS:
        made = Layer(name, layer)
        for rows in TILED_ROWS:
            times = {}
            for tile in (None, *tiles_for(FORMATS[name], layer, rows)):
                result = attempt(lambda: measured(made, rows, rates, tile))  # noqa: B023 - called at once
                times["chosen" if tile is None else " ".join(map(str, tile))] = result.get("microseconds", 1e9)
            found[f"{layer}, {rows}"] = dict(sorted(times.items(), key=lambda each: each[1])[:6])
    return found


def main() -> None:
    """Measure and write `results/gpu_quantised_linear.json`, a line for each format and layer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=harness.RESULTS / "gpu_quantised_linear.json")
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("formats", nargs="*", default=list(FORMATS), metavar="FORMAT")
    arguments = parser.parse_args()
    began, capability = time.perf_counter(), torch.cuda.get_device_capability()
    torch.manual_seed(0)
    shapes = [(layer, rows) for layer in LAYERS for rows in arguments.rows]
    jobs: list[Job] = [(name, *shape, None, capability) for name in arguments.formats for shape in shapes]
    if arguments.tiles:
        jobs += [
            (name, layer, rows, tile, capability)
            for name in arguments.formats for layer in TILED_LAYERS for rows in TILED_ROWS
            for tile in tiles_for(FORMATS[name], layer, rows)
        ]  # fmt: skip
    figures: dict[str, Any] = {"compile_seconds": round(compile_all(jobs))}

    def save() -> None:
        figures["seconds"] = round(time.perf_counter() - began)
        with contextlib.redirect_stdout(io.StringIO()):
            harness.write(arguments.out, "gpu_quantised_linear", figures)

    with torch.inference_mode():
        rates = read_bytes_per_second(), product_flops_per_second()
        figures |= {"read_terabytes_per_second": round(rates[0] / 1e12, 2), "teraflops": round(rates[1] / 1e12)}
        dense = {shape: attempt(partial(in_bfloat16, *shape)) for shape in shapes}
        figures["bfloat16"] = {f"{layer}, {rows}": time_ for (layer, rows), time_ in dense.items()}
        print({key: figures[key] for key in ("compile_seconds", "read_terabytes_per_second", "teraflops", "bfloat16")})
        for name in arguments.formats:
            figures[name] = {}
            for layer in LAYERS:
                if time.perf_counter() - began > arguments.seconds:
                    break
                made = Layer(name, layer)
                found = {f"{rows}": attempt(partial(measured, made, rows, rates)) for rows in arguments.rows}
                figures[name][layer] = {"worst_difference": attempt(partial(difference, made)), **found}
                times = [(each.get("microseconds", each), each.get("floor_microseconds")) for each in found.values()]
                shown = [f"{rows}: {time_} ({floor}) of {dense[layer, rows]}"
                         for rows, (time_, floor) in zip(arguments.rows, times, strict=True)]  # fmt: skip
                print(f"{name}, {layer} | {figures[name][layer]['worst_difference']} | {'; '.join(shown)}", flush=True)
            save()
        if arguments.tiles:
            for name in arguments.formats:
                if time.perf_counter() - began < arguments.seconds:
                    figures[f"{name}, tiles"] = attempt(partial(tiled, name, rates))
                    print(name, figures[f"{name}, tiles"], flush=True)
                    save()
    save()


if __name__ == "__main__":
    main()
