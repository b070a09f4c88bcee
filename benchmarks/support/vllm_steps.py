"""What steps take as vLLM serves them, by the clock: the requests and rounds of `served_steps`, for its engine."""

from __future__ import annotations

import json
import os
import statistics
import time
from typing import Any

from support.served_steps import COUNTS, PROMPT_TOKENS, PROMPTS, prompts


def submit(engine: Any, given: list[list[int]], max_tokens: int) -> list[str]:
    """Adds greedy requests that don't end before `max_tokens`; their ids, which are unlike all before."""
    import vllm
    from vllm.sampling_params import RequestOutputKind

    params = vllm.SamplingParams(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
    )
    began = time.monotonic_ns()
    return [
        engine.add_request(f"{began}-{number}", {"prompt_token_ids": prompt}, params)
        for number, prompt in enumerate(given)
    ]


def decode_ms(engine: Any, count: int, rounds: int = 5) -> float:
    """Milliseconds a step of `count` sequences that decode: the median of rounds of eight steps."""
    ids, times = submit(engine, prompts(count, PROMPT_TOKENS), 1000), []
    while len(engine.step()) < count:
        pass
    for _ in range(4):
        engine.step()
    for _ in range(rounds):
        started = time.perf_counter()
        decoded = [len(engine.step()) for _ in range(8)]
        times.append((time.perf_counter() - started) / 8)
        if decoded != [count] * 8:
            raise RuntimeError(f"steps decoded {decoded} sequences, not {count} each: something waits or has ended")
    engine.abort_request(ids, internal=True)
    while engine.has_unfinished_requests():
        engine.step()
    return round(1000 * statistics.median(times), 3)


def prefill(engine: Any, count: int, length: int, runs: int = 3) -> float:
    """Tokens a second, of `count` prompts that are computed together: the median of as many runs."""
    rates = []
    for run in range(runs):
        given = prompts(count + 100 * run, length)[:count]
        started = time.perf_counter()
        submit(engine, given, 1)
        while engine.has_unfinished_requests():
            engine.step()
        rates.append(count * length / (time.perf_counter() - started))
    return round(statistics.median(rates), 1)


def main(checkpoint: str) -> None:
    """Prints what `bench_gpu_served` measures of Precast, for the model in this folder. Steps are captured for those
    counts of sequences, and no others, which shortens the start alone."""
    import vllm

    started = time.perf_counter()
    model = vllm.LLM(
        model=checkpoint, skip_tokenizer_init=True, max_model_len=8192, max_num_seqs=256, max_num_batched_tokens=8192,
        kv_cache_memory_bytes=24 << 30, enable_prefix_caching=False,
        compilation_config={"cudagraph_capture_sizes": list(COUNTS)},
    )  # fmt: skip
    engine = model.llm_engine
    found: dict[str, Any] = {"version": vllm.__version__, "load_seconds": round(time.perf_counter() - started, 2)}
    for count, size in PROMPTS:  # what is compiled at first use
        prefill(engine, count, size, runs=1)
    found["decode_ms"] = {str(count): decode_ms(engine, count) for count in COUNTS}
    found["prefill_tokens_per_s"] = {f"{n} x {size}": prefill(engine, n, size) for n, size in PROMPTS}
    engine.engine_core.shutdown()
    print(json.dumps(found), flush=True)
    os._exit(0)
