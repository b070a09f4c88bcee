"""On a GPU: a bundle of the Llama-3.1-8B shape, built elsewhere, against transformers on the same random weights.

Claims: in float32, `engine.generate` gives transformers' greedy tokens (32 tokens, 4 prompts of unequal length);
in bfloat16, logits are as near to the float32 reference as transformers' own bfloat16 logits are. Beside them, what
an eager engine costs: phases of the load, milliseconds a decode step, tokens a second of prefill.

    python benchmarks/bench_gpu_llama_8b.py --bundles DIR --checkpoint DIR

`--bundles` holds `float32.bundle` and `bfloat16.bundle`, as `--build` writes them on any machine. Weights are made
at `--checkpoint` if there are none. transformers must be installed on the target for the comparison only.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from support import harness, shapes

SHAPE = "llama-3.1-8b"
DTYPES = ("float32", "bfloat16")
NUM_TOKENS = 32

_RUN = "import runpy; runpy.run_module('precast', run_name='__main__', alter_sys=True)"
_FLOOR = """
import json, time
started = time.perf_counter()
import torch
torch.zeros(1, device="cuda")
print(json.dumps({"seconds": time.perf_counter() - started}))
"""
LENGTHS = (5, 33, 128, 517)


def build(folder: Path) -> None:
    """Both bundles, from the config alone."""
    import precast

    source = shapes.write_config(SHAPE, folder / "config")
    for dtype in DTYPES:
        precast.build(source, folder / f"{dtype}.bundle", dtype=dtype, max_seq_len=8192)


def make_checkpoint(path: Path) -> None:
    """Random bfloat16 weights at the model's real shapes, in shards of about 5 GB."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shapes.write_config(SHAPE, path)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.bfloat16)
    model.save_pretrained(path, max_shard_size="5GB")
    del model
    free()


def free() -> None:
    """Give the GPU's memory back to whoever comes next."""
    gc.collect()
    torch.cuda.empty_cache()


def prompts() -> list[list[int]]:
    """Token ids of unequal length, the same in every run."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 128000, (length,), generator=generator).tolist() for length in LENGTHS]


def reference(checkpoint: Path) -> tuple[list[list[int]], list[torch.Tensor], list[float]]:
    """transformers: greedy tokens and logits in float32, and the error of its own bfloat16 logits."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, device_map="cuda")
    tokens, logits = [], []
    for prompt in prompts():
        ids = torch.tensor([prompt], device="cuda")
        with torch.no_grad():
            logits.append(model(input_ids=ids, use_cache=False).logits[0].cpu())
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False,
                eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
        tokens.append(out[0, len(prompt) :].tolist())
    del model
    free()
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16, device_map="cuda")
    errors = []
    for prompt, expected in zip(prompts(), logits, strict=True):
        with torch.no_grad():
            found = model(input_ids=torch.tensor([prompt], device="cuda"), use_cache=False).logits[0].float().cpu()
        errors.append(relative_error(found, expected))
    del model
    free()
    return tokens, logits, errors


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference over the norm of what was expected."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def measure(bundle: Path, checkpoint: Path, expected: list[torch.Tensor]) -> dict[str, Any]:
    """One engine: its tokens, its logits' errors, its phases, and the cost of its steps."""
    import precast

    params = precast.SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    engine = precast.load(bundle, weights=checkpoint, device="cuda", max_num_seqs=64, max_num_tokens=8192)
    errors = [relative_error(engine.logits(p).cpu(), e) for p, e in zip(prompts(), expected, strict=True)]
    outputs = engine.generate(prompts(), params)
    result = {
        "tokens": [list(output.token_ids) for output in outputs],
        "logit_errors": errors,
        "timeline": engine.timeline.to_dict(),
        "decode_ms": {str(n): decode_ms(engine, n) for n in (1, 8, 64)},
        "prefill_tokens_per_s": prefill_rate(engine),
    }
    engine.close()
    del engine
    free()
    return result


def decode_ms(engine: Any, num_seqs: int) -> float:
    """The median milliseconds of a step that decodes `num_seqs` sequences of about 128 tokens."""
    import precast

    params = precast.SamplingParams(max_tokens=24, ignore_eos=True)
    handles = [engine.submit([7 + i] * 128, params) for i in range(num_seqs)]
    times = []
    while engine.has_work:
        started = time.perf_counter()
        events = engine.step()
        torch.cuda.synchronize()
        if len(events) == num_seqs:
            times.append(1000 * (time.perf_counter() - started))
    assert handles
    return round(statistics.median(times[2:]), 3)


def prefill_rate(engine: Any, length: int = 4096, runs: int = 5) -> float:
    """The median tokens per second of a step that computes a prompt of `length` tokens."""
    import precast

    rates = []
    for run in range(runs):
        engine.submit([11 + run] * length, precast.SamplingParams(max_tokens=1))
        started = time.perf_counter()
        while engine.has_work:
            engine.step()
        torch.cuda.synchronize()
        rates.append(length / (time.perf_counter() - started))
    return round(statistics.median(rates), 1)


def start(bundle: Path, checkpoint: Path, runs: int = 5) -> dict[str, Any]:
    """From the first line of `precast run` to its first token, against what no loader can do without."""
    command = ["run", str(bundle), "--weights", str(checkpoint), "--device", "cuda", "--token-ids", "1,15,27"]
    command += ["--max-tokens", "1", "--json"]
    timelines = [harness.fresh_process(_RUN, *command)["timeline"] for _ in range(runs)]
    floors = [harness.fresh_process(_FLOOR)["seconds"] for _ in range(runs)]
    first_token = statistics.median(timeline["total_seconds"] for timeline in timelines)
    weights = next(phase["bytes"] for phase in timelines[0]["phases"] if phase["name"] == "weights")
    floor = statistics.median(floors) + weights / pinned_bytes_per_second()
    return {
        "first_token_seconds": round(first_token, 3),
        "import_context_and_pinned_copy_seconds": round(floor, 3),
        "ratio": round(first_token / floor, 3),
        "goal_ratio": 1.25,
        "phases": {phase["name"]: round(phase["seconds"], 3) for phase in timelines[0]["phases"]},
        "runs": runs,
    }


def pinned_bytes_per_second(num_bytes: int = 1 << 30, runs: int = 5) -> float:
    """The rate of copies from pinned memory to the GPU."""
    source = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    return num_bytes / harness.median_seconds(copy, runs=runs)


def main() -> None:
    """Build, or measure and write `results/gpu_llama_8b.json`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", type=Path)
    parser.add_argument("--bundles", type=Path)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--out", type=Path, default=harness.RESULTS / "gpu_llama_8b.json")
    arguments = parser.parse_args()
    if arguments.build:
        build(arguments.build)
        return
    if not torch.cuda.is_available() or arguments.bundles is None:
        print("needs a CUDA GPU, --bundles and --checkpoint: nothing measured")
        return
    if not (arguments.checkpoint / "config.json").exists():
        make_checkpoint(arguments.checkpoint)
    tokens, logits, own_errors = reference(arguments.checkpoint)
    measured = {dtype: measure(arguments.bundles / f"{dtype}.bundle", arguments.checkpoint, logits) for dtype in DTYPES}
    result: dict[str, Any] = {"transformers_bfloat16_logit_errors": own_errors}
    for dtype, one in measured.items():
        found = one.pop("tokens")
        one["greedy_tokens_equal"] = [a == b for a, b in zip(found, tokens, strict=True)]
        result[dtype] = one
    result["start_bfloat16"] = start(arguments.bundles / "bfloat16.bundle", arguments.checkpoint)
    harness.write(arguments.out, "gpu_llama_8b", result)


if __name__ == "__main__":
    main()
