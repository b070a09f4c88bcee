"""On a GPU: microseconds of attention over keys and values of 8 bits, beside 16, and what rounding them loses.

Claims: where bytes decide, which is decoding over long contexts, keys and values of 8 bits take about half the time of
16; scales cost nothing. Shapes are those of `bench_gpu_attention.py`, and so are pages and layers. Each row also has
the largest difference from torch's attention in float32 over the very values that the cache holds (`wrong` above
0.05), and the drift: how far that is from attention over the values before they were rounded, relative to it. Keys and
values are normal numbers; those of models differ, so the drift says how much, not how well a model answers.

    python benchmarks/bench_gpu_float8_caches.py [--tiles] [--out FILE]

`--tiles` also tries other ways to decode over 8 bits, and reports the three fastest: for up to 8 sequences other rings
and numbers of warps, for more other tiles.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import bench_gpu_attention as attention
import bench_gpu_decode_attention as few_tokens
import torch
from bench_gpu_attention import MODELS, Case, Choice, Given, Model
from support import harness
from support.gpu_times import microseconds

from precast.kernels.attention.decode import MOST_FEW, MOST_SHARED_BYTES, Decode, decode_of, shared_bytes
from precast.kernels.attention.launches import FEW_SLOTS

FLOAT8 = torch.float8_e4m3fn
SCALES = (0.011, 0.023)
"""Of keys and values: normal numbers fill the range of a float8, and are rounded as the largest of a model's are."""
CASES = (
    Case(1, 1, 4096), Case(8, 1, 4096), Case(64, 1, 4096), Case(64, 1, 256), Case(1, 1, 32768), Case(1, 1024, 8192),
)  # fmt: skip
KINDS = ("16 bits", "8 bits", "8 bits, scales")


def in_8_bits(given: Given, *, scaled: bool) -> Given:
    """The layer with rounded keys and values, in pages of its own."""
    changes: dict[str, Any] = {}
    for name, scale in zip(("k", "v"), SCALES, strict=True):
        wide = given.arguments[f"{name}_cache"].float()
        stored = (wide / scale if scaled else wide).clamp(-448, 448).to(FLOAT8)
        changes[f"{name}_cache"] = stored
        if scaled:
            changes[f"{name}_scale"] = torch.tensor([scale], device="cuda")
    return Given({**given.arguments, **changes}, torch.empty_like(given.out))


def meant(given: Given) -> Given:
    """The layer with what its keys and values stand for, in float32."""
    x = given.arguments
    wide = {f"{name}_cache": x[f"{name}_cache"].float() * x.get(f"{name}_scale", 1.0) for name in "kv"}
    return Given({**x, **wide}, given.out)


def reference(model: Model, case: Case, given: Given) -> torch.Tensor:
    """The last queries of the last sequence, up to 128 of them, by torch in float32."""
    count = min(case.queries, 128)
    x = given.arguments
    pages = x["page_indices"][int(x["page_indptr"][-2]) :].long()
    start = int(x["page_start"][-1])
    q = x["q"][0, -count:].float().transpose(0, 1)
    k, v = (x[name][pages].flatten(0, 1)[: case.tokens - start].transpose(0, 1) for name in ("k_cache", "v_cache"))
    k, v = (each.repeat_interleave(model.heads // model.kv_heads, 0) for each in (k, v))
    own = torch.arange(case.tokens - count, case.tokens, device="cuda")[:, None]
    distance = own - torch.arange(start, case.tokens, device="cuda")
    visible = (distance >= 0) & (distance < (model.window or case.tokens))
    scores = (q @ k.transpose(1, 2) * model.size**-0.5).masked_fill(~visible, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(0, 1)


def timed(layers: list[Given], model: Model, case: Case, tried: Choice | Decode) -> float:
    """Microseconds of a layer."""
    return round(microseconds(few_tokens.calls_of(attention.repeated(layers), model, case, tried)), 2)


def others_of(layers: list[Given], model: Model, case: Case) -> list[Choice | Decode]:
    """Other ways to decode than the chosen one."""
    if case.seqs > MOST_FEW:
        return [Choice(split=tile) for tile in attention.SPLIT_TILES[model.size]]
    use = attention.use_of(layers[0].arguments, layers[0].out, torch.cuda.get_device_capability())
    cluster = decode_of(use, FEW_SLOTS if case.seqs <= FEW_SLOTS else MOST_FEW).cluster
    found = [Decode(cluster, warps, stages) for warps in (4, 8) for stages in (2, 3, 4, 6, 8)]
    return [each for each in found if shared_bytes(model.size, each, use.width("k_cache")) <= MOST_SHARED_BYTES]


def measure(model: Model, case: Case, *, tiles: bool) -> dict[str, Any]:
    """One row of the table: times by kind, differences, the drift, and the fastest tiles."""
    wide = attention.layers_of(model, case, "cuda")
    row: dict[str, Any] = {}
    for kind in KINDS:
        layers = wide if kind == "16 bits" else [in_8_bits(each, scaled="scales" in kind) for each in wide]
        row[kind] = timed(layers, model, case, Choice())
        expected = reference(model, case, meant(layers[0]))
        error = float((layers[0].out[0, -len(expected) :].float() - expected).abs().max())
        row[f"{kind}, error"] = round(error, 5)
        if not error < attention.MOST_DIFFERENT:
            row[f"{kind}, wrong"] = error
        if kind == "16 bits":
            exact = expected
        else:
            row[f"{kind}, drift"] = round(float((expected - exact).norm() / exact.norm()), 5)
    if tiles and case.queries == 1:
        others = others_of(layers, model, case)
        told = [attention.told(each) if isinstance(each, Choice) else str(each) for each in others]
        times = [timed(layers, model, case, each) for each in others]
        row["tiles"] = sorted(zip(times, told, strict=True))[:3]
    return row


def main() -> None:
    """Measure and write `results/gpu_float8_caches.json`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=harness.RESULTS / "gpu_float8_caches.json")
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--models", nargs="*", default=["llama-8b", "gemma-12b"])
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs a CUDA GPU: nothing measured")
        return
    table: dict[str, Any] = {}
    for name in arguments.models:
        for case in CASES:
            try:
                row = measure(MODELS[name], case, tiles=arguments.tiles)
            except Exception as error:  # noqa: BLE001 - one case doesn't end the others
                row = {"failed": str(error)[:300]}
            table[f"{name}, {case.text}"] = row
            print(f"{name}, {case.text}: {json.dumps(row)}", flush=True)
            torch.cuda.empty_cache()
    text = json.dumps({"claim": "gpu_float8_caches", "machine": harness.machine(), "figures": {"rows": table}})
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
