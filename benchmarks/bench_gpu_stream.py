"""On a Hopper GPU: the linear layers of a decode step of Llama 3.1 8B, by the weight stream and by cuBLAS.

The 129 products of a step (qkv, o, gate and up, down in 32 layers, and the head), over 15 GB of distinct random
weights, are one CUDA graph. Baselines in the same run: cuBLAS, the weight stream without programmatic dependent launch,
and one launch that reads all 15 GB, which is what the memory gives. Goals: at most 3.65 ms and 1.06 times that one
launch at 1 row, 3.85 ms and 1.12 times at 8 rows; the same logits with dependent launch and without, bit for bit.

    python benchmarks/bench_gpu_stream.py [--out FILE] [--variants [ROWS ...]]

`--variants` times other sizes of pieces and what of x is kept instead, alone and with norms between the products; they
are printed and not written.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from support import harness

from precast.ir.graph.schema import Const, Node, Ref, TensorType, Value
from precast.kernels import cuda_launch
from precast.kernels.launch import launched_of
from precast.kernels.linear.records import stream
from precast.kernels.linear.stream_plan import LONG, SHORT, Way
from precast.kernels.rms_norm.records import RECORDS as NORMS
from precast.kernels.use import GPU, use_of

LAYERS = 32
SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
HEAD = (128256, 4096)
ROWS = (1, 2, 4, 8)
GOALS = {1: (3.65, 1.06), 8: (3.85, 1.12)}
"""By rows: milliseconds at most, and how many times one launch that reads everything."""
Constants = dict[str, int]
ROLLED, TWICE = {"UNROLL": 1}, {"UNROLL": 2}
VARIANTS: dict[int, dict[str, tuple[Way, Constants]]] = {
    8: {
        "as it is": (SHORT, {}),
        "unrolled twice": (SHORT, TWICE),
        "rolled": (SHORT, ROLLED),
        "x kept from 9 tiles": (SHORT._replace(kept_from=9), {}),
        "1 KiB": (SHORT._replace(piece=512), {}),
        "1 KiB, unrolled twice": (SHORT._replace(piece=512), TWICE),
        "1.5 KiB": (SHORT._replace(piece=768, kept_bytes=80 << 10), {}),
        "1 KiB, 24 KiB of room": (SHORT._replace(piece=512, room=24 << 10), {}),
    },
    1: {
        "as it is": (LONG, {}),
        "unrolled twice": (LONG, TWICE),
        "rolled": (LONG, ROLLED),
        "x kept in down": (LONG._replace(kept_from=0), TWICE),
        "2 KiB": (LONG._replace(piece=1024, kept_from=0), TWICE),
        "1 KiB": (LONG._replace(piece=512, kept_from=0), TWICE),
        "all in flight": (LONG._replace(in_flight=1 << 20), TWICE),
        "2 KiB, 40 KiB of room": (LONG._replace(piece=1024, kept_from=0, room=40 << 10), TWICE),
    },
    4: {
        "as it is": (SHORT, {}),
        "4 KiB": (LONG, {}),
        "1 KiB": (SHORT._replace(piece=512), {}),
    },
    2: {
        "as it is": (LONG, {}),
        "2 KiB": (LONG._replace(piece=1024, kept_from=0), {}),
        "1 KiB": (LONG._replace(piece=512, kept_from=0), {}),
    },
}

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Writes `x` [rows, inputs] times `weight` [outputs, inputs] transposed into `y` [rows, outputs]."""


def cublas(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor) -> None:
    """By torch, which calls cuBLAS."""
    torch.mm(x, weight.t(), out=y)


def streamed(*, pdl: bool, way: Way | None = None, gate: str | None = None, **constants: int) -> Product:
    """By the weight stream, which goes a given way."""

    kernels: dict[tuple[int, ...], tuple[int, cuda_launch.Kernel]] = {}

    def product(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor) -> None:
        sizes = (x.stride(0), 1, 0, len(x), *weight.shape)
        args = (y.data_ptr(), x.data_ptr(), weight.data_ptr(), 0, 0, *sizes)
        if sizes not in kernels:
            launch = stream(len(x), *weight.shape, "bfloat16", gate=gate, most=len(x), way=way)
            function = cuda_launch.function_of(launch.kernel, tuple({**launch.constants, **constants}.items()), 0)
            given, plan = [*map(cuda_launch.At, range(len(args)))], launch.args[len(args) :]
            kernel = cuda_launch.Kernel(
                function, [*given, *plan], num_given=len(args), num_threads=launch.block,
                shared_bytes=launch.shared_bytes, pdl=pdl,
            )  # fmt: skip
            (grid,) = launch.grid
            kernels[sizes] = grid, kernel
        grid, kernel = kernels[sizes]
        kernel.launch((grid, 1, 1), args, torch.cuda.current_stream().cuda_stream)

    return product


class Model:
    """Weights in the order in which a step reads them, and the buffers between them."""

    def __init__(self) -> None:
        shapes = [*(SHAPES.items()), ("head", HEAD)]
        each = [(name, shape) for _ in range(LAYERS) for name, shape in shapes[:-1]] + shapes[-1:]
        self.all = torch.empty(
            sum(outputs * inputs for _, (outputs, inputs) in each), dtype=torch.bfloat16, device="cuda"
        )
        self.weights: dict[str, list[torch.Tensor]] = {name: [] for name, _ in shapes}
        at = 0
        for name, (outputs, inputs) in each:
            weight = self.all[at : at + outputs * inputs].view(outputs, inputs)
            self.weights[name].append(weight.normal_(0, inputs**-0.5))
            at += weight.numel()
        self.first = torch.randn(max(ROWS), 4096, device="cuda").bfloat16()
        sizes = {"x": 4096, "qkv": 6144, "gate_up": 28672, "logits": HEAD[0], "wide": 14336}
        sizes |= dict.fromkeys(("normed", "other", "y"), 4096)
        self.buffers = {name: torch.randn(max(ROWS) * size, device="cuda").bfloat16() for name, size in sizes.items()}

    def buffer(self, name: str, rows: int, size: int) -> torch.Tensor:
        """The first `size` elements of so many rows, one after the other in memory."""
        return self.buffers[name][: rows * size].view(rows, size)

    def step(self, product: Product, rows: int) -> None:
        """Product after product; each takes as many elements of the last one's result as it wants."""
        x = self.buffer("x", rows, 4096)
        for layer in range(LAYERS):
            qkv, wide = self.buffer("qkv", rows, 6144), self.buffer("gate_up", rows, 28672)
            product(x, self.weights["qkv"][layer], qkv)
            product(self.buffer("qkv", rows, 4096), self.weights["o"][layer], x)
            product(x, self.weights["gate_up"][layer], wide)
            product(self.buffer("gate_up", rows, 14336), self.weights["down"][layer], x)
        product(x, self.weights["head"][0], self.buffer("logits", rows, HEAD[0]))

    def error(self, product: Product, rows: int) -> float:
        """The largest relative error of a product over the five shapes, against float32; results are NaN before."""
        found = []
        for weights in self.weights.values():
            outputs, inputs = weights[-1].shape
            x = self.first.repeat(1, 4)[:rows, :inputs].contiguous()
            y = torch.full((rows, outputs), torch.nan, device="cuda", dtype=torch.bfloat16)
            product(x, weights[-1], y)
            expected = x.float() @ weights[-1].float().t()
            found.append(((y.float() - expected).norm() / expected.norm()).item())
        return max(error if error == error else float("inf") for error in found)

    def alone(self, product: Product, rows: int) -> Iterator[tuple[str, float]]:
        """By shape, the microseconds of one product among products of that shape."""
        for name, weights in self.weights.items():
            outputs, inputs = weights[0].shape
            x, y = self.buffer("wide", rows, inputs), self.buffer("logits", rows, outputs)
            many = weights * (4 if len(weights) == 1 else 1)

            def all_of_them(many: list[torch.Tensor] = many, x: torch.Tensor = x, y: torch.Tensor = y) -> None:
                for weight in many:
                    product(x, weight, y)

            yield name, 1000 * milliseconds(captured(all_of_them)) / len(many)


def captured(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """`run` once, and then as a graph."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def milliseconds(graph: torch.cuda.CUDAGraph, *, runs: int = 11, warm_ups: int = 3) -> float:
    """The median time of a replay."""
    times = []
    for index in range(warm_ups + runs):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if index >= warm_ups:
            times.append(start.elapsed_time(end))
    return statistics.median(times)


def read_rate(model: Model) -> float:
    """TB/s of one launch over all weights, as if they were one."""
    weight = model.all[: model.all.numel() // (16 * 4096) * (16 * 4096)].view(-1, 4096)
    y, product = torch.empty(1, len(weight), dtype=torch.bfloat16, device="cuda"), streamed(pdl=False)
    graph = captured(lambda: product(model.first[:1], weight, y))
    return 2 * weight.numel() / milliseconds(graph) / 1e9


def bits(model: Model, product: Product, rows: int) -> torch.Tensor:
    """The logits of a step, as integers, after NaN in all that it writes."""
    for buffer in model.buffers.values():
        buffer.fill_(torch.nan)
    model.buffer("x", rows, 4096).copy_(model.first[:rows])
    model.step(product, rows)
    return model.buffer("logits", rows, HEAD[0]).view(torch.int16).clone()


def measure(model: Model, rows: int, one_launch: float) -> dict[str, Any]:
    """The row of the table for so many rows; printed as well."""
    size = 2 * model.all.numel()
    products = {"cublas": cublas, "stream": streamed(pdl=False), "stream_pdl": streamed(pdl=True)}
    times = {name: milliseconds(captured(lambda p=product: model.step(p, rows))) for name, product in products.items()}
    expected = bits(model, products["stream"], rows)
    same = all(torch.equal(bits(model, products["stream_pdl"], rows), expected) for _ in range(3))
    row = {
        **{f"{name}_milliseconds": round(time, 3) for name, time in times.items()},
        "times_one_launch": round(times["stream_pdl"] * one_launch * 1e9 / size, 3),
        "largest_relative_error": round(model.error(products["stream_pdl"], rows), 5),
        "has_the_bits_without_pdl": same,
        "microseconds": {
            name: {shape: round(time, 2) for shape, time in model.alone(products[name], rows)}
            for name in ("cublas", "stream_pdl")
        },
    }
    print(f"rows {rows}", *(f"{key} {value}" for key, value in row.items()), sep="  ", flush=True)
    return row


class Layers:
    """The products of a step with its norms between them, and one more in the place of attention."""

    def __init__(self, model: Model, rows: int) -> None:
        self.model, self.rows = model, rows
        self.weight = torch.ones(4096, dtype=torch.bfloat16, device="cuda")
        (record,) = (each for each in NORMS if each.name == "triton.residual_rms_norm")
        rule = {"eps": Const(1e-5), "offset": Const(0.0), "cast_before_scale": Const(True)}
        hidden, weight = TensorType("bfloat16", (rows, 4096)), TensorType("bfloat16", (4096,))
        args = {**{name: Ref(name) for name in ("x", "residual", "weight")}, **rule}
        node = Node("precast.residual_rms_norm", args, (Value("y", hidden), Value("s", hidden)))
        types = {"x": hidden, "residual": hidden, "weight": weight}
        self._norm = launched_of(record, use_of(node, types, GPU, {"weight"}))

    def norm(self, x: torch.Tensor, residual: torch.Tensor, y: torch.Tensor) -> None:
        """`y` the norm of the sum of `x` and `residual`, and that sum in the place of the residual."""
        self._norm(x=x, residual=residual, weight=self.weight, out=(y, residual))

    def step(self, product: Product, gated: Product) -> None:
        """All layers and the head."""
        buffer, weights, rows = self.model.buffer, self.model.weights, self.rows
        x, normed, other = (buffer(name, rows, 4096) for name in ("x", "normed", "other"))
        qkv, narrow = buffer("qkv", rows, 6144), buffer("qkv", rows, 4096)
        wide, y = buffer("wide", rows, 14336), buffer("y", rows, 4096)
        for layer in range(LAYERS):
            self.norm(y, x, normed)
            product(normed, weights["qkv"][layer], qkv)
            self.norm(narrow, other, normed)
            product(normed, weights["o"][layer], y)
            self.norm(y, x, normed)
            gated(normed, weights["gate_up"][layer], wide)
            product(wide, weights["down"][layer], y)
        self.norm(y, x, normed)
        product(normed, weights["head"][0], buffer("logits", rows, HEAD[0]))


def print_variants(model: Model, rows: int, *, rounds: int = 6) -> None:
    """Milliseconds of the products alone, and with norms between them, of each variant in turn, several times."""
    layers, found = Layers(model, rows), {}
    for name, (way, more) in VARIANTS[rows].items():
        try:
            product, gated = (
                streamed(pdl=True, way=way, gate=gate, **more) for gate in (None, "silu")
            )  # fmt: skip
            steps = partial(model.step, product, rows), partial(layers.step, product, gated)
            found[name] = product, [captured(step) for step in steps], ([], []), bits(model, product, rows)
        except RuntimeError as refused:
            print(f"rows {rows}  {name:46s} {refused}", flush=True)
    expected = next(iter(found.values()))[-1]
    for _ in range(rounds):
        for _, graphs, times, _ in found.values():
            for graph, all_times in zip(graphs, times, strict=True):
                all_times.append(milliseconds(graph, runs=3, warm_ups=1))
    for name, (product, _, times, logits) in found.items():
        each = "  ".join(f"{statistics.median(one):.3f} ({min(one):.3f})" for one in times)
        shapes = " ".join(f"{shape} {time:.2f}" for shape, time in model.alone(product, rows))
        same = "the same bits" if torch.equal(logits, expected) else "OTHER BITS"
        error = model.error(product, rows)
        print(f"rows {rows}  {name:46s} alone, with norms: {each}  {shapes}  {error:.5f} {same}", flush=True)


def main() -> None:
    """Measure and write `results/gpu_stream.json`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=harness.RESULTS / "gpu_stream.json")
    parser.add_argument("--variants", type=int, nargs="*", metavar="ROWS", help="time variants for so many rows")
    given = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        print("needs a GPU of compute capability 9.0: nothing measured")
        return
    torch.manual_seed(0)
    model = Model()
    one_launch = read_rate(model)
    print(f"one launch over {2 * model.all.numel() / 1e9:.3f} GB: {one_launch:.3f} TB/s", flush=True)
    if given.variants is not None:
        for rows in given.variants or VARIANTS:
            print_variants(model, rows)
        return
    table = {str(rows): measure(model, rows, one_launch) for rows in ROWS}
    met = {
        f"at_most_{most}_ms_at_{rows}_rows": table[str(rows)]["stream_pdl_milliseconds"] <= most
        for rows, (most, _) in GOALS.items()
    } | {
        f"at_most_{times}_times_one_launch_at_{rows}_rows": table[str(rows)]["times_one_launch"] <= times
        for rows, (_, times) in GOALS.items()
    }
    figures = {
        "gigabytes": round(2 * model.all.numel() / 1e9, 3),
        "one_launch_terabytes_per_second": round(one_launch, 3),
        "rows": table,
        "goals": met,
        "is_goal_met": all(met.values()) and all(row["has_the_bits_without_pdl"] for row in table.values()),
    }
    harness.write(given.out, "gpu_stream", figures)


if __name__ == "__main__":
    main()
