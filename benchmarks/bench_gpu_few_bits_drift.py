"""On a GPU: how far results of linear layers in few bits are from those of the layer before it was quantised, and what
of that comes from the weight's few bits, from the input's, and from the arithmetic.

Claim: what the kernels' arithmetic adds is small beside what few bits lose, in steps of few tokens and of many. A
weight of normal numbers, 4,096 outputs of 14,336 inputs, is rounded to the nearest values of a format, its scales by
the largest numbers. All is compared in float32: the size of a difference by the size of the exact result.

    weight       the definition with the weight's values, and the input as it is, from the exact result
    input        the same with the input rounded as well, from the one before
    arithmetic   the kernel in bfloat16, from the definition with both; by tokens of the step

    python benchmarks/bench_gpu_few_bits_drift.py [--out FILE]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from support import harness

from precast.kernels.choices import fitting
from precast.kernels.dequantise.quantise import quantised
from precast.kernels.launch import Launched, use_of_tensors
from precast.kernels.quantised_linear.quantised_linear import quantised_linear

OUTPUTS, INPUTS, ROWS = 4096, 14336, (1, 8, 64, 256, 2048)
GROUP = 128
Arguments = dict[str, Any]


class Format(NamedTuple):
    """How a weight [O, I] is stored, and how the input is rounded."""

    store: Callable[[torch.Tensor], Arguments]
    activation: str = "none"


# --- weights, rounded to the nearest ----------------------------------------------------------------------------------


def fp8(block: tuple[int, int]) -> Callable[[torch.Tensor], Arguments]:
    def store(w: torch.Tensor) -> Arguments:
        parts = {"weight": quantised(w, "values", block), "scales": quantised(w, "scales", block)}
        return {**parts, "format": "fp8", "block": block}

    return store


def int8(w: torch.Tensor) -> Arguments:
    scales = w.abs().amax(1, keepdim=True) / 127
    return {"weight": (w / scales).round().to(torch.int8), "scales": scales, "format": "int8", "block": (1, INPUTS)}


def words(values: torch.Tensor, bits: int) -> torch.Tensor:
    """[a, n * b] of whole numbers as [a, b] int32, of which each has n."""
    shifts = torch.arange(0, 32, bits, device=values.device)
    return (values.long().unflatten(-1, (-1, 32 // bits)) << shifts).sum(-1).to(torch.int32)


def packed(bits: int, *, points: bool = False) -> Callable[[torch.Tensor], Arguments]:
    """Groups of 128; with `points` from the least number to the largest, else about 0."""

    def store(w: torch.Tensor) -> Arguments:
        groups, most = w.unflatten(1, (-1, GROUP)), 2**bits - 1
        if points:
            low, high = groups.amin(-1), groups.amax(-1)
            scales = ((high - low) / most).bfloat16()
            zeros = (-low / scales.float()).round().clamp(0, most)
        else:
            scales = (groups.abs().amax(-1) / (most // 2)).bfloat16()
            zeros = torch.full_like(scales, 2 ** (bits - 1), dtype=torch.float32)
        values = (groups / scales.float()[..., None] + zeros[..., None]).round().clamp(0, most).flatten(1)
        made = {"weight": words(values, bits), "scales": scales, "format": f"packed{bits}"}
        return {
            **made,
            **({"zeros": words(zeros.t(), bits).t().contiguous()} if points else {"zero_offset": 2 ** (bits - 1)}),
        }

    return store


def in_fp4(x: torch.Tensor) -> torch.Tensor:
    """The numbers of four bits next to these, two in a byte."""
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=x.device)
    between = (numbers[1:] + numbers[:-1]) / 2
    bits = torch.bucketize(x.abs(), between) + 8 * (x < 0)
    return (bits[..., ::2] + 16 * bits[..., 1::2]).to(torch.uint8)


def mxfp4(w: torch.Tensor) -> Arguments:
    blocks = w.unflatten(1, (-1, 32))
    exponents = (blocks.abs().amax(-1).log2().floor() - 2).clamp(-127, 127)
    values = in_fp4(torch.ldexp(blocks, -exponents[..., None]))
    return {"weight": values, "scales": (exponents + 127).to(torch.uint8), "format": "mxfp4"}


def nvfp4(w: torch.Tensor) -> Arguments:
    whole = (w.abs().amax() / (6 * 448)).view(1, 1)
    blocks = w.unflatten(1, (-1, 16))
    scales = (blocks.abs().amax(-1) / 6 / whole).to(torch.float8_e4m3fn)
    values = in_fp4(blocks / (scales.float() * whole)[..., None]).flatten(1)
    return {"weight": values, "scales": scales, "global_scale": whole, "format": "nvfp4"}


FORMATS = {
    "FP8, a scale for each row": Format(fp8((1, INPUTS))),
    "FP8, a scale for each row, inputs rounded by token": Format(fp8((1, INPUTS)), "fp8_token"),
    "FP8 in blocks of 128 x 128, inputs rounded in groups": Format(fp8((128, 128)), "fp8_group"),
    "INT8, a scale for each row": Format(int8),
    "INT8, a scale for each row, inputs rounded by token": Format(int8, "int8_token"),
    "INT8 in groups of 128": Format(packed(8)),
    "INT4 in groups of 128": Format(packed(4)),
    "INT4 in groups of 128, with points": Format(packed(4, points=True)),
    "NVFP4": Format(nvfp4),
    "MXFP4": Format(mxfp4),
}


# --- what is lost --------------------------------------------------------------------------------------------------


def kernel(x: torch.Tensor, given: Arguments) -> torch.Tensor:
    """By the record that serves so many rows."""
    given = {"input": x[None], **given}
    use = use_of_tensors("precast.quantised_linear", 1, given)
    operands = {name: each._replace(is_activation=name == "input") for name, each in use.operands.items()}
    use = use._replace(operands=operands)
    record = next(iter(fitting(use, {"T": len(x)})))
    assert not isinstance(record.runs, str), record.name
    out = torch.full((1, len(x), OUTPUTS), torch.nan, dtype=x.dtype, device="cuda")
    tensors = {name: each for name, each in given.items() if isinstance(each, torch.Tensor)}
    Launched(record.runs(use), record.workspace(use))(**tensors, out=out)
    return out[0].float()


def drift(one: Format, w: torch.Tensor, x: torch.Tensor) -> dict[str, Any]:
    """Of one format."""
    stored, exact = one.store(w), x.float() @ w.t()

    def from_(a: torch.Tensor, b: torch.Tensor) -> float:
        return float(f"{float((a - b).norm() / exact[: len(a)].norm()):.2e}")

    whole = quantised_linear(input=x.float(), **stored, activation="none")
    both = quantised_linear(input=x.float(), **stored, activation=one.activation)
    arithmetic = {str(n): from_(kernel(x[:n], {**stored, "activation": one.activation}), both[:n]) for n in ROWS}
    return {"weight": from_(whole, exact), "input": from_(both, whole), "arithmetic": arithmetic}


def main() -> None:
    """Measure and write `results/gpu_few_bits_drift.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=harness.RESULTS / "gpu_few_bits_drift.json")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs a CUDA GPU: nothing measured")
        return
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    figures: dict[str, Any] = {}
    with torch.inference_mode():
        w = torch.randn(OUTPUTS, INPUTS, device="cuda") * INPUTS**-0.5
        x = torch.randn(max(ROWS), INPUTS, device="cuda").bfloat16()
        for name, one in FORMATS.items():
            figures[name] = drift(one, w, x)
            print(name, figures[name], flush=True)
    harness.write(arguments.out, "gpu_few_bits_drift", figures)


if __name__ == "__main__":
    main()
