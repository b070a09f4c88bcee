"""On a GPU: microseconds of a norm, a gate, a rotation, as one launch each, against PyTorch's operations one by one.

Claims: with few rows a launch takes hardly longer than an empty kernel does in the same chain; with many, memory is
read and written as fast as a copy of a large tensor does. Shapes are those of Llama 3.1 8B, Qwen3 and Gemma 3 12B, in
bfloat16. Each is captured many times in a row in a CUDA graph: with programmatic dependent launch, as a step has it,
and without. What one call touches is not touched again before 64 MB of others were, if there are so many rows.

    python benchmarks/bench_gpu_small_kernels.py [--out FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
import triton
import triton.language as tl
from support import harness
from support.gpu_times import copy_rate, microseconds

from precast.kernels import registry
from precast.kernels.choices import records_of
from precast.kernels.launch import as_function
from precast.kernels.records import Record
from precast.kernels.triton_chain import wait_for_previous

ROWS = (1, 8, 64, 256, 4096)
WITHOUT_PDL = (1, 4096)
RING_BYTES = 64 << 20
MAX_BUFFERS = 16
Sample = dict[str, Any]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


def norm(rows: int, width: int, **rule: Any) -> Sample:
    return {"x": normal(1, rows, width), "weight": normal(width), "eps": 1e-6, "cast_before_scale": True, **rule}


def residual_norm(rows: int, width: int) -> Sample:
    return norm(rows, width, residual=normal(1, rows, width))


def two_norms(rows: int, width: int) -> Sample:
    more = {"inner_weight": normal(width), "offset": 1.0, "cast_before_scale": False}
    return residual_norm(rows, width) | more


def layer_norm(rows: int, width: int) -> Sample:
    return {"x": normal(1, rows, width), "weight": normal(width), "bias": normal(width), "eps": 1e-6}


def gate(rows: int, width: int, kind: str) -> Sample:
    return {"x": normal(1, rows, 2 * width), "kind": kind}


def tables(rows: int, pairs: int) -> Sample:
    positions = torch.arange(rows, device="cuda")[None]
    return {"positions": positions, "inv_freq": torch.rand(pairs, device="cuda"), "scale": 1.0, "dtype": torch.bfloat16}


def turned(rows: int, heads: int, kv_heads: int, size: int, **norms: Any) -> Sample:
    """A slice each of a fused product; tokens on pages of 16 in random order."""
    parts = (
        normal(1, rows, (heads + 2 * kv_heads) * size).unflatten(2, (-1, size)).split([heads, kv_heads, kv_heads], 2)
    )
    weights = {name: normal(size) for name in ("q_weight", "k_weight")} if norms else {}
    pages = -(-rows // 16) + 8
    return {
        **dict(zip("qkv", parts, strict=True)), "cos": normal(1, rows, size // 2), "sin": normal(1, rows, size // 2),
        "q_weight": None, "k_weight": None, **weights, "k_cache": normal(pages, 16, kv_heads, size),
        "v_cache": normal(pages, 16, kv_heads, size), "slot_mapping": torch.randperm(pages * 16, device="cuda")[:rows],
        "interleaved": False, **norms,
    }  # fmt: skip


def rotation(rows: int, heads: int, size: int) -> Sample:
    made = turned(rows, heads, 8, size)
    return {"x": made["q"], "cos": made["cos"], "sin": made["sin"], "interleaved": False}


QWEN: Mapping[str, Any] = {"eps": 1e-6, "cast_before_scale": True}
GEMMA: Mapping[str, Any] = {"eps": 1e-6, "offset": 1.0, "cast_before_scale": False}
CASES: dict[str, tuple[str, Callable[[int], Sample]]] = {
    "rms_norm 4096": ("rms_norm", lambda rows: norm(rows, 4096)),
    "rms_norm 32 heads of 128": ("rms_norm", lambda rows: norm(rows, 128) | {"x": turned(rows, 32, 8, 128)["q"]}),
    "residual_rms_norm 4096": ("residual_rms_norm", lambda rows: residual_norm(rows, 4096)),
    "norm_residual_norm 3840": ("norm_residual_norm", lambda rows: two_norms(rows, 3840)),
    "layer_norm 4096": ("layer_norm", lambda rows: layer_norm(rows, 4096)),
    "silu 14336": ("gated_activation", lambda rows: gate(rows, 14336, "silu")),
    "gelu_tanh 15360": ("gated_activation", lambda rows: gate(rows, 15360, "gelu_tanh")),
    "rotary 32 x 128": ("rotary", lambda rows: rotation(rows, 32, 128)),
    "rotary_tables 64": ("rotary_tables", lambda rows: tables(rows, 64)),
    "rotary_write_kv 32/8 x 128": ("rotary_write_kv", lambda rows: turned(rows, 32, 8, 128)),
    "rotary_write_kv 32/4 x 128, norms": ("rotary_write_kv", lambda rows: turned(rows, 32, 4, 128, **QWEN)),
    "rotary_write_kv 16/8 x 256, norms": ("rotary_write_kv", lambda rows: turned(rows, 16, 8, 256, **GEMMA)),
}
"""By a name: the op, and its arguments for so many rows."""


def moved_bytes(sample: Sample, results: tuple[torch.Tensor, ...]) -> int:
    """What the op must read and write: of caches as much as the new keys and values."""
    read = [x for name, x in sample.items() if isinstance(x, torch.Tensor) and "cache" not in name]
    written = [*results, *(sample[name] for name in ("k", "v") if name in sample)]
    return sum(x.numel() * x.element_size() for x in (*read, *written))


def without_pdl(record: Record) -> Record:
    """The record with launches that begin when the one in front has ended."""
    runs = record.runs
    assert not isinstance(runs, str)

    def alone(use: Any) -> Any:
        return tuple(each._replace(pdl=False, constants={**each.constants, "PDL": False}) for each in runs(use))

    return msgspec.structs.replace(record, runs=alone)


def as_tuple(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def worst(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> float:
    """The largest difference, in units of the largest number expected."""
    pairs = [(x.float(), y.float()) for x, y in zip(found, expected, strict=True)]
    return max(float((x - y).abs().max() / y.abs().max().clamp(min=1e-9)) for x, y in pairs)


def ring(op: str, record: Record, make: Callable[[int], Sample], rows: int) -> tuple[list[Callable[[], Any]], int]:
    """Calls of the record over samples of their own, at least 20 of them, and the bytes that one moves."""
    first = make(rows)
    function = as_function(record)
    size = moved_bytes(first, as_tuple(function(**first)))
    count = min(MAX_BUFFERS, max(1, RING_BYTES // max(size, 1)))
    samples = [first, *(make(rows) for _ in range(count - 1))]
    outs = [function(**sample) for sample in samples]

    def call(sample: Sample, out: Any) -> Callable[[], Any]:
        return lambda: function(**sample, out=out)

    calls = [call(sample, out) for sample, out in zip(samples, outs, strict=True)]
    return list(itertools.islice(itertools.cycle(calls), max(20, count))), size


def measure(op: str, make: Callable[[int], Sample], rows: int) -> dict[str, Any]:
    """One row of the table."""
    (record,) = (each for each in records_of(f"precast.{op}", 1) if each.name == f"triton.{op}")
    reference = next(spec.reference for spec in registry.specs() if spec.name == f"precast.{op}")
    sample = make(rows)
    found, expected = as_tuple(as_function(record)(**sample)), as_tuple(reference(**sample))
    calls, size = ring(op, record, make, rows)
    ours = microseconds(calls)
    plain = microseconds([lambda: reference(**sample)] * 5, runs=3)
    made = {
        "microseconds": round(ours, 2),
        "gigabytes_per_second": round(size / ours / 1e3),
        "one_by_one_microseconds": round(plain, 1),
        "worst_difference": float(f"{worst(found, expected):.1e}"),
    }
    if rows in WITHOUT_PDL:
        made["without_pdl_microseconds"] = round(microseconds(ring(op, without_pdl(record), make, rows)[0]), 2)
    return made


@triton.jit
def empty_kernel(x_ptr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """What a launch costs in a chain."""
    wait_for_previous(PDL)
    tl.store(x_ptr + tl.program_id(0), 1.0)


def empty(has_pdl: bool) -> float:
    """Microseconds of a kernel of one program that does nothing."""
    x = torch.zeros(1, device="cuda")
    launch: Any = empty_kernel[(1,)]
    return microseconds([lambda: launch(x, PDL=has_pdl, launch_pdl=has_pdl)] * 50)


def main() -> None:
    """Measure and write `results/gpu_small_kernels.json`; a case that fails says so in its place."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=harness.RESULTS / "gpu_small_kernels.json")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    started = time.perf_counter()
    figures: dict[str, Any] = {
        "copy_gigabytes_per_second": round(copy_rate() / 1e9),
        "empty_microseconds": round(empty(True), 2),
        "empty_without_pdl_microseconds": round(empty(False), 2),
    }
    print(figures)
    with torch.inference_mode():
        figures["cases"] = {name: table(name, op, make) for name, (op, make) in CASES.items()}
    figures["seconds"] = round(time.perf_counter() - started)
    print(f"{figures['seconds']} s")
    with contextlib.redirect_stdout(io.StringIO()):
        harness.write(arguments.out, "gpu_small_kernels", figures)


def table(name: str, op: str, make: Callable[[int], Sample]) -> dict[str, Any]:
    """The case with each number of rows, printed in a line: microseconds, GB/s, microseconds of the definition."""
    found: dict[str, Any] = {}
    for rows in ROWS:
        try:
            found[str(rows)] = measure(op, make, rows)
        except Exception as error:  # noqa: BLE001 - whatever it is, the others are measured
            found[str(rows)] = {"failed": f"{type(error).__name__}: {error}"[:300]}
    shown = (f"{rows}: {' '.join(str(value) for value in row.values())}" for rows, row in found.items())
    print(f"{name} | {' | '.join(shown)}", flush=True)
    return found


if __name__ == "__main__":
    main()
