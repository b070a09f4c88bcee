"""On a GPU: microseconds of a layer of experts in few bits with many tokens, by how large tiles of products are.

Claim: of the sizes that are measured the built-in one is the fastest, or within 2 %, at the most tokens of each range.
Layers are those of `bench_gpu_quantised_experts.py`, and calls are timed as there: order and sum of pairs are part of
them. All results are compared with the first ones.

    python benchmarks/bench_gpu_expert_tiles.py [--out FILE]
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from support import harness
from support.expert_layers import inputs_of, layers_us, run
from support.quantised_layers import CASES, stored_layer, use_of

from precast.kernels import cuda_source
from precast.kernels.quantised_experts import tiles
from precast.kernels.records import Launch

TRIED = ((64, 1), (128, 1), (64, 2), (128, 2))
"""Rows of a tile, and bands of 128 rows of the weight."""
TOKENS = {
    "gpt-oss-20b in mxfp4": (256, 512, 1024, 2048, 4096, 8192),
    "qwen3-30b-a3b in fp8 blocks": (1024, 2048, 4096, 8192),
}
LAYERS = 4


def launches(name: str, tokens: int, tile: tuple[int, int]) -> tuple[Launch, ...]:
    """Of a step, with such tiles."""
    built_in, tiles._TILES = tiles._TILES, ((*tile, None),)
    try:
        return tiles.run(use_of(CASES[name], tokens), next(most for most in tiles.STEPS if not most or tokens <= most))
    finally:
        tiles._TILES = built_in


def measured(name: str) -> dict[str, Any]:
    """By tokens, and rows of the weight and of an expert in a tile; tiles that a weight can't have are left out."""
    stored, rows = [stored_layer(CASES[name]) for _ in range(LAYERS)], dict[str, Any]()
    for tokens in TOKENS[name]:
        layers, expected = inputs_of(CASES[name].shape, tokens, stored), None
        for tile in TRIED:
            made = launches(name, tokens, tile)
            if any(each.constants["BANDS"] != tile[1] for each in made if "BANDS" in each.constants):
                continue
            run(made, layers[0])
            found = layers[0]["out.0"].float()
            expected = found if expected is None else expected
            error = ((found - expected).abs().max() / expected.abs().max()).item()
            rows.setdefault(f"{tokens}", {})[f"{128 * tile[1]} x {tile[0]}"] = {
                "us": round(layers_us(made, layers)),
                "error": round(error, 5),
            }
        print(name, tokens, rows[f"{tokens}"], flush=True)
    return rows


def main() -> None:
    """Measure and write `results/gpu_expert_tiles.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=harness.RESULTS / "gpu_expert_tiles.json")
    arguments = parser.parse_args()
    made = [
        each for name in TOKENS for tokens in TOKENS[name] for tile in TRIED for each in launches(name, tokens, tile)
    ]
    sources = {
        (each.kernel.rpartition(":")[0].removeprefix("precast.kernels."), tuple(each.constants.items()))
        for each in made if "BANDS" in each.constants
    }  # fmt: skip
    with ThreadPoolExecutor(14) as pool:
        list(pool.map(lambda source: cuda_source.compiled(*source, torch.cuda.get_device_capability()), sources))
    harness.write(arguments.out, "gpu_expert_tiles", {name: measured(name) for name in TOKENS})


if __name__ == "__main__":
    main()
