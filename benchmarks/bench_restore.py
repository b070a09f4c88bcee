"""From a bundle to a callable: `Bundle.open` and `restore`, against `torch.export.load` of the same model.

Claim: the bundle of the Llama-3.1-8B shape is restored in 0.03 s on two CPU cores, at least 30 times faster than
`torch.export.load` loads the same model, exported on the meta device in the same run. Each measurement is the first
of a fresh process that has imported what it needs: what a user who starts an engine waits for. As in
`precast.load`, the garbage collector is held meanwhile: it would look through all that `import torch` has made.

    python benchmarks/bench_restore.py [--bundle BUNDLE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from support import harness

LLAMA_8B: dict[str, Any] = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "bos_token_id": 128000, "eos_token_id": 128001, "tie_word_embeddings": False, "rope_theta": 500000.0,
}  # fmt: skip
RUNS, BASELINE_RUNS = 7, 3

RESTORE = """
import gc, json, sys, time
import torch
from precast.ir.artifact import Bundle
from precast.ir.graph.world import unsharded
from precast.loader.collector import collector_held
from precast.loader.program.restore import restore

pauses = []
gc.callbacks.append(lambda phase, info: pauses.append(time.perf_counter()))
started = time.perf_counter()
with collector_held():
    bundle = Bundle.open(sys.argv[1])
    opened = time.perf_counter()
    program = restore(unsharded(bundle.graph), device=torch.device("cpu"))
done = time.perf_counter()
collector = sum(end - start for start, end in zip(pauses[::2], pauses[1::2]))
again = []
for _ in range(5):
    start = time.perf_counter()
    restore(unsharded(bundle.graph), device=torch.device("cpu"))
    again.append(time.perf_counter() - start)
print(json.dumps({"open": opened - started, "restore": done - opened, "total": done - started,
                  "of_which_garbage_collector": collector, "restore_again": sorted(again)[2]}))
"""

EXPORT = """
import json, sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM

class Logits(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids):
        return self.model(input_ids=input_ids, use_cache=False).logits

with torch.device("meta"):
    model = LlamaForCausalLM(LlamaConfig(**json.loads(sys.argv[1]))).eval().to(torch.bfloat16)
ids = torch.zeros(1, 16, dtype=torch.int64, device="meta")
with torch.no_grad():
    sizes = {"input_ids": {1: torch.export.Dim.DYNAMIC}}
    program = torch.export.export(Logits(model), (), {"input_ids": ids}, dynamic_shapes=sizes)
torch.export.save(program, sys.argv[2])
print("{}")
"""

LOAD_EXPORTED = """
import json, sys, time
import torch, torch.export

started = time.perf_counter()
torch.export.load(sys.argv[1]).module()
print(json.dumps({"total": time.perf_counter() - started}))
"""


def build(out: Path) -> None:
    """The bundle of the 8B shape, from its config alone."""
    from transformers import LlamaConfig

    import precast

    precast.build(LlamaConfig(**LLAMA_8B), out, dtype="bfloat16")


def measure(code: str, path: Path, runs: int) -> dict[str, float]:
    """The median of each figure over fresh processes."""
    found = [harness.fresh_process(code, str(path)) for _ in range(runs)]
    return {name: round(statistics.median(one[name] for one in found), 5) for name in found[0]}


def main() -> None:
    """Measure both and write `results/restore.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bundle", type=Path, help="a bundle of the 8B shape; without it, one is built")
    parser.add_argument("--out", type=Path, default=harness.RESULTS / "restore.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bundle = arguments.bundle or Path(folder) / "llama.bundle"
        if arguments.bundle is None:
            build(bundle)
        exported = Path(folder) / "llama.pt2"
        harness.fresh_process(EXPORT, json.dumps(LLAMA_8B), str(exported))
        ours = measure(RESTORE, bundle, RUNS)
        baseline = measure(LOAD_EXPORTED, exported, BASELINE_RUNS)
    figures = {
        "seconds": ours,
        "torch_export_load_seconds": baseline["total"],
        "times_faster": round(baseline["total"] / ours["total"], 1),
    }
    harness.write(arguments.out, "restore", figures)


if __name__ == "__main__":
    main()
