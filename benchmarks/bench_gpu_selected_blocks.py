"""On a GPU: microseconds of attention to selected blocks of keys a layer, beside what its bytes need.

Claim: at 131,072 tokens of context attention to what is selected costs as much as at 32,768: keys that are not selected
cost nothing. The selection, and attention to it, of MiniMax-M3 (16 blocks of 128 keys, for each group of heads) and of
Qwen4-Exp (512 blocks of 4, the same for all heads), in bfloat16, in pages of 16 tokens in random order, as many layers
as are more than the L2 cache holds. What is selected is the selection's own.

    python benchmarks/bench_gpu_selected_blocks.py [--out FILE]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from bench_gpu_attention import Case, read_rate
from bench_gpu_sparse_attention import microseconds_of, use_of
from support import harness

from precast.kernels.choices import resolve

PAGE_SIZE, MORE_THAN_L2, MOST_LAYERS = 16, 192 << 20, 8
CASES = (Case(1, 1, 131072), Case(8, 1, 131072), Case(32, 1, 131072), Case(1, 1, 32768), Case(64, 1, 16384))


class Model(NamedTuple):
    """Heads, those of keys, those that select, their sizes, and what is selected."""

    heads: int
    kv_heads: int
    size: int
    index_heads: int
    index_size: int
    count: int
    block_size: int

    @property
    def is_of_means(self) -> bool:
        """Whether blocks are selected by one key each, and a query sees its tail besides."""
        return self.block_size < PAGE_SIZE


MODELS = {
    "MiniMax-M3": Model(64, 4, 128, 4, 128, 16, 128),
    "Qwen4-Exp": Model(16, 2, 256, 16, 128, 512, 4),
}


def layers_of(model: Model, case: Case) -> list[dict[str, dict[str, Any]]]:
    """What each layer's two ops are called with, their results among it."""
    pages = -(-case.tokens // PAGE_SIZE)
    total, slots = case.seqs * pages, PAGE_SIZE // model.block_size if model.is_of_means else PAGE_SIZE
    a_layer = 2 * total * PAGE_SIZE * model.kv_heads * model.size * 2
    count = min(MOST_LAYERS, max(2, -(-MORE_THAN_L2 // a_layer)))

    def normal(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device="cuda").normal_()

    steps = torch.arange(case.seqs + 1, dtype=torch.int32)
    lists = {
        "cu_seqlens": steps,
        "kv_lens": torch.full((case.seqs,), case.tokens - 1, dtype=torch.int32),
        "page_indices": torch.randperm(total, generator=torch.Generator().manual_seed(0)).int(),
        "page_indptr": steps * pages,
        "page_start": torch.zeros(case.seqs, dtype=torch.int32),
    }
    lists = {name: x.cuda() for name, x in lists.items()}
    groups = 1 if model.is_of_means else model.index_heads
    selected = torch.empty(1, case.seqs, groups, model.count, dtype=torch.int32, device="cuda")
    q = normal(1, case.seqs, model.heads, model.size)
    index_q = normal(1, case.seqs, model.index_heads, model.index_size)
    made = []
    for _ in range(count):
        keys, values = (normal(total, PAGE_SIZE, model.kv_heads, model.size) for _ in range(2))
        index = normal(total, slots, model.index_size)
        select = {"q": index_q, "cache": index, **lists, "count": model.count}
        if model.is_of_means:
            weights = torch.ones(1, case.seqs, model.index_heads, device="cuda")
            select |= {"weights": weights, "scale": model.index_size**-0.5, "rate": model.block_size,
                       "out": selected[:, :, 0]}  # fmt: skip
        else:
            select |= {"block_size": model.block_size, "local": 1, "out": selected}
        attend = {"q": q, "k_cache": keys, "v_cache": values, "selected": selected, **lists,
                  "scale": model.size**-0.5, "block_size": model.block_size, "tail": model.is_of_means,
                  "out": torch.empty_like(q)}  # fmt: skip
        made.append({"paged_select_entries" if model.is_of_means else "paged_select_blocks": select,
                     "paged_block_sparse_attention": attend})  # fmt: skip
    return made


def bytes_of(op: str, model: Model, case: Case) -> int:
    """What is read at least once."""
    if op == "paged_block_sparse_attention":
        return case.seqs * model.count * model.block_size * model.kv_heads * model.size * 2 * 2
    return case.seqs * case.tokens // (model.block_size if model.is_of_means else 1) * model.index_size * 2


def measure(op: str, layers: list[dict[str, Any]], least: float, seqs: int) -> dict[str, Any]:
    """One row of the table."""
    use = use_of(op, layers[0])
    record = resolve(use, {"T": seqs, "B": seqs}).record
    assert not isinstance(record.runs, str), "attention to selected blocks on GPUs is launches"
    held = record.workspace(use)
    assert isinstance(held, int), "all sizes are known"
    us = microseconds_of(record.runs(use), layers, held)
    return {"record": record.name, "us": us, "floor_us": round(least, 2)}


def main() -> None:
    """Measure and write `results/gpu_selected_blocks.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=harness.RESULTS / "gpu_selected_blocks.json")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs a CUDA GPU: nothing measured")
        return
    rate = read_rate()
    table: dict[str, Any] = {}
    for (name, model), case in ((each, case) for each in MODELS.items() for case in CASES):
        layers = layers_of(model, case)
        for op in layers[0]:
            least = 1e-3 * bytes_of(op, model, case) / rate
            row = measure(op, [layer[op] for layer in layers], least, case.seqs)
            table[f"{name}, {op}, {case.text}"] = row
            print(f"{name}, {op}, {case.text}: {json.dumps(row)}", flush=True)
        del layers
        torch.cuda.empty_cache()
    harness.write(arguments.out, "gpu_selected_blocks", {"read_gb_per_s": rate, "rows": table})


if __name__ == "__main__":
    main()
