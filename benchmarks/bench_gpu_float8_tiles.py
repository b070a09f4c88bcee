"""On a GPU: layers of float8 on both sides with 16 to 256 rows, by tiles of our own and by cuBLASLt.

Claim: of up to 64 rows `float8_tiles.cu` takes less time than cuBLASLt, the baseline in the same run; of more so does
the record that a layer gets, or as much as the other. Layers are those of Llama 3.1 8B, inputs are rounded already.
Layers with weights of their own follow one another in a CUDA graph, so that L2 doesn't hold what the next one reads;
both results are compared.

    python benchmarks/bench_gpu_float8_tiles.py [--out FILE] [--rows N ...]
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from bench_gpu_quantised_linear import FORMATS, LAYERS, Arguments, weight
from support import harness
from support.gpu_times import microseconds, read_bytes_per_second

from precast.kernels import cuda_launch
from precast.kernels.choices import fitting
from precast.kernels.cuda_source import Constants, compiled
from precast.kernels.launch import Launched, use_of_tensors
from precast.kernels.quantised_linear.float8_tiles import ROWS as COLUMNS
from precast.kernels.quantised_linear.quantised_linear import few_bits
from precast.kernels.quantised_linear.records import RECORDS
from precast.kernels.records import Record
from precast.kernels.use import Use

ROWS = (16, 32, 64, 96, 128, 192, 256)
KINDS = {"rows": "fp8 rows, fp8_token", "blocks": "fp8 blocks, fp8_group"}
"""What has a scale together, and how `bench_gpu_quantised_linear.py` calls it."""
MORE_THAN_L2 = 256 << 20
HOPPER = (9, 0)
MOST_DIFFERENCE = 0.004
"""Between both results, relative: each is rounded to bfloat16 once."""


class Case(NamedTuple):
    """Scales of `KINDS`, a layer of `LAYERS`, and rows."""

    kind: str
    layer: str
    rows: int

    def given(self, device: str) -> Arguments:
        """A call of `precast.rounded_linear`."""
        format, (outputs, inputs) = FORMATS[KINDS[self.kind]], LAYERS[self.layer]
        x = torch.randn(1, self.rows, inputs, device=device)
        values, scales = few_bits(x, format.activation, None)
        return {
            "input": values.contiguous(), "input_scales": scales.contiguous(), "input_scale": None, "bias": None,
            **weight(format, outputs, inputs, device), "dtype": format.dtype, "activation": format.activation,
        }  # fmt: skip

    def use(self, given: Arguments) -> Use:
        """Of a layer whose input alone is made in the step."""
        use = use_of_tensors("precast.rounded_linear", 1, given)
        made = ("input", "input_scales")
        operands = {name: each._replace(is_activation=name in made) for name, each in use.operands.items()}
        return use._replace(operands=operands, target=use.target._replace(device="cuda", capability=HOPPER))

    def records(self) -> dict[str, Record]:
        """Of both, whichever a layer gets."""
        columns = next(each for each in COLUMNS if each >= self.rows)
        names = {"tiles": f"cuda.rounded_linear_of_float8_to_{columns}",
                 "cublaslt": f"cublaslt.rounded_linear_of_float8_{self.kind}"}  # fmt: skip
        return {by: next(each for each in RECORDS if each.name == name) for by, name in names.items()}


def constants_of(case: Case) -> Constants:
    """Those of the tiles' source."""
    record = case.records()["tiles"]
    assert not isinstance(record.runs, str)
    return tuple(record.runs(case.use(case.given("meta")))[-1].constants.items())


def compile_source(constants: Constants) -> tuple[Constants, bytes]:
    """For a process of a pool."""
    return constants, compiled("quantised_linear/float8_tiles.cu", constants, HOPPER)


def compile_all(cases: list[Case]) -> None:
    """The tiles' kernels, on all cores."""
    sources = list(dict.fromkeys(map(constants_of, cases)))
    with ProcessPoolExecutor(max(1, min(14, (os.cpu_count() or 2) - 2)), mp_context=get_context("spawn")) as pool:
        made = dict(pool.map(compile_source, sources))

    def found(file: str, constants: Constants, capability: tuple[int, int]) -> bytes:
        return made.get(constants) or compiled(file, constants, capability)

    cuda_launch.compiled = found


def measured(case: Case) -> dict[str, Any]:
    """Microseconds of a layer by both, and which of them it gets."""
    given = case.given("cuda")
    copies = max(2, -(-MORE_THAN_L2 // given["weight"].nbytes))
    weights = [given["weight"], *(given["weight"].clone() for _ in range(copies - 1))]
    use, results, figures = case.use(given), [], dict[str, Any]()
    tensors = {name: x for name, x in given.items() if isinstance(x, torch.Tensor)}
    for by, record in case.records().items():
        assert not isinstance(record.runs, str)
        out = torch.full((1, case.rows, len(given["weight"])), torch.nan, dtype=given["dtype"], device="cuda")
        launched = Launched(record.runs(use), record.workspace(use))
        figures[f"{by}_us"] = round(microseconds([partial(launched, **tensors | {"weight": each}, out=out)
                                                  for each in weights]), 2)  # fmt: skip
        results.append(out.float())
    difference = float((results[0] - results[1]).norm() / results[1].norm())
    assert difference < MOST_DIFFERENCE, f"{case}: results differ by {difference:.3g}"
    chosen = next(iter(fitting(use, {"T": case.rows})))
    return {**figures, "chosen": "tiles" if chosen.kind == "cuda" else "cublaslt"}


def cases(rows: list[int]) -> Iterator[Case]:
    """All of them."""
    for kind in KINDS:
        for layer in LAYERS:
            yield from (Case(kind, layer, each) for each in rows)


def main() -> None:
    """Measure and write `results/gpu_float8_tiles.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=harness.RESULTS / "gpu_float8_tiles.json")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    figures: dict[str, Any] = {}
    with torch.inference_mode():
        compile_all(list(cases(arguments.rows)))
        rate = read_bytes_per_second()
        for case in cases(arguments.rows):
            outputs, inputs = LAYERS[case.layer]
            found = figures.setdefault(case.kind, {}).setdefault(
                case.layer, {"bytes_us": round(1e6 * outputs * inputs / rate, 2)}
            )
            found[str(case.rows)] = measured(case)
    harness.write(arguments.out, "gpu_float8_tiles", figures)


if __name__ == "__main__":
    main()
