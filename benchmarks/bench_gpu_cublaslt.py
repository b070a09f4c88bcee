"""On a GPU: the linear layers of models by cuBLASLt, with its first choice of an algorithm and the fastest one.

Claim: choosing by measurement among what cuBLASLt proposes makes the products of a step faster than `torch.mm`, the
baseline in the same run. Each layer is timed for rows of 16 to 8192, its head for up to 256, over more weights than L2
holds, as a CUDA graph; results are compared with the product in float32. Steps are the sums over a model's layers.

    python benchmarks/bench_gpu_cublaslt.py [--out FILE] [--table FILE] [--seconds N] [MODEL ...]

`--table` also puts what was measured into a table of choices, in the place of what that said of these products. Both
files are written after each layer. What the seconds leave no time for has no figures.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace
from support import harness
from support.gpu_times import product_flops_per_second, read_bytes_per_second

from precast.kernels import machine
from precast.kernels.linear.tuning import tune
from precast.kernels.measured import MeasuredProduct, Table, read_table, write_table

ROWS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
MOST_ROWS_OF_A_HEAD = 256


class Layer(NamedTuple):
    """A weight [outputs, inputs], and how many of them a step reads."""

    outputs: int
    inputs: int
    count: int


MODELS: dict[str, dict[str, Layer]] = {
    "llama-3.1-8b": {
        "qkv": Layer(6144, 4096, 32), "o": Layer(4096, 4096, 32), "gate_up": Layer(28672, 4096, 32),
        "down": Layer(4096, 14336, 32), "head": Layer(128256, 4096, 1),
    },
    "gemma-3-12b": {
        "qkv": Layer(8192, 3840, 48), "o": Layer(3840, 4096, 48), "gate_up": Layer(30720, 3840, 48),
        "down": Layer(3840, 15360, 48), "head": Layer(262208, 3840, 1),
    },
    "qwen3-30b-a3b-half": {
        "qkv": Layer(5120, 2048, 24), "o": Layer(2048, 4096, 24), "router": Layer(128, 2048, 24),
        "head": Layer(151936, 2048, 1),
    },
    "llama-3.1-8b, a half": {
        "qkv": Layer(3072, 4096, 32), "o": Layer(4096, 2048, 32), "gate_up": Layer(14336, 4096, 32),
        "down": Layer(4096, 7168, 32), "head": Layer(64128, 4096, 1),
    },
    "qwen3-30b-a3b-half, a half": {
        "qkv": Layer(2560, 2048, 24), "o": Layer(2048, 2048, 24), "head": Layer(75968, 2048, 1),
    },
}  # fmt: skip
"""The products of the models' steps but those of experts; "a half" are those of one of two ranks."""


class Measurement:
    """The cases of the table, measured one after the other until the time is up."""

    def __init__(self, seconds: float) -> None:
        self.products: list[MeasuredProduct] = []
        self._end = time.perf_counter() + seconds

    def row(self, layer: Layer, rows: int) -> dict[str, Any]:
        """Microseconds of `torch.mm`, of the first choice and of the fastest; or why there are none."""
        if time.perf_counter() > self._end:
            return {"failed": "the time was up"}
        try:
            found = tune("bfloat16", layer.outputs, layer.inputs, rows=rows)
        except Exception as error:  # noqa: BLE001 - whatever it is, the others are measured
            return {"failed": f"{type(error).__name__}: {error}"[:200]}
        self.products.append(found.product)
        times = {
            "torch": round(found.torch_microseconds, 2),
            "first": found.product.first_microseconds,
            "fastest": found.product.microseconds,
        }
        return {**times, "candidates": found.num_candidates, "faults": list(found.faults)[:2]}


def measure(model: dict[str, Layer], measurement: Measurement) -> Iterator[dict[str, Any]]:
    """By layer and rows, after each layer what there is of all; printed as torch / first / fastest."""
    table: dict[str, Any] = {}
    for name, layer in model.items():
        table[name] = {
            str(rows): measurement.row(layer, rows) for rows in ROWS if name != "head" or rows <= MOST_ROWS_OF_A_HEAD
        }
        shown = [
            f"{rows}: {row['failed']}" if "failed" in row
            else f"{rows}: {row['torch']}/{row['first']}/{row['fastest']} of {row['candidates']}"
            + "!" * len(row["faults"])
            for rows, row in table[name].items()
        ]  # fmt: skip
        print(f"  {name} {layer.outputs}x{layer.inputs}  {'  '.join(shown)}", flush=True)
        yield table


def steps(model: dict[str, Layer], table: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds of all products of a step by rows, of up to `MOST_ROWS_OF_A_HEAD` with the head; where all have
    figures."""
    found = {}
    for rows in map(str, ROWS):
        parts = {name: row[rows] for name, row in table.items() if rows in row}
        wanted = [name for name in model if name != "head" or int(rows) <= MOST_ROWS_OF_A_HEAD]
        if all("fastest" in parts.get(name, {}) for name in wanted):
            found[rows] = {
                how: round(sum(model[name].count * row[how] for name, row in parts.items()) / 1000, 3)
                for how in ("torch", "first", "fastest")
            }
    return found


def rates() -> dict[str, float]:
    """What the machine reads and multiplies a second, at most."""
    read, product = read_bytes_per_second() / 1e12, product_flops_per_second() / 1e12
    return {"read_tb_per_s": round(read, 3), "product_tflop_per_s": round(product, 1)}


def put(products: list[MeasuredProduct], path: Path) -> None:
    """Write a table with these products, and all else that it held; of cuBLASLt only what this version measured."""

    def key(product: MeasuredProduct) -> Any:
        return product.dtype, product.outputs, product.inputs, product.bias, product.rows

    before = read_table(path) if path.is_file() else Table(machine.this_machine())
    new = {key(product) for product in products}
    kept = [product for product in before.products if key(product) not in new]
    if before.machine.cublaslt != machine.this_machine().cublaslt:
        kept = []
    merged = tuple(sorted([*kept, *products], key=key))
    unfinished = path.with_suffix(".part")
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    write_table(replace(before, machine=machine.this_machine(), products=merged), unfinished)
    os.replace(unfinished, path)


def main() -> None:
    """Measure and write `results/gpu_cublaslt.json`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=harness.RESULTS / "gpu_cublaslt.json")
    parser.add_argument("--table", type=Path)
    parser.add_argument("--seconds", type=float, default=45)
    parser.add_argument("models", nargs="*", default=list(MODELS), metavar="MODEL")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs a CUDA GPU: nothing measured")
        return
    gc.freeze()  # some versions of torch collect garbage before each capture: what is imported isn't looked at again
    started, measurement = time.perf_counter(), Measurement(given.seconds)
    figures: dict[str, Any] = {"rates": rates()}
    print("microseconds of torch / first choice / fastest of how many")
    with torch.inference_mode():
        for name in given.models:
            model = MODELS[name]
            print(name, flush=True)
            for table in measure(model, measurement):
                figures[name] = {"milliseconds": steps(model, table), "microseconds": table}
                with contextlib.redirect_stdout(io.StringIO()):
                    harness.write(given.out, "gpu_cublaslt", figures)
                if given.table is not None:
                    put(measurement.products, given.table)
            print(f"  a step's products, ms: {figures[name]['milliseconds']}", flush=True)
    print(f"{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
