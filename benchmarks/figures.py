"""The figures of README.md and of pages in docs/, made from `results/*.json`: no figure is written by hand.

    python benchmarks/figures.py [--check]

Writes each page's figures between its two marks, and the picture of docs/start.md. `--check` writes nothing, and fails
where a page says something else.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from support import kernel_figures, start_figures

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- begin: made by benchmarks/figures.py -->\n", "<!-- end: made by benchmarks/figures.py -->\n"

SYSTEMS = ("uniform pages", "one table", "static split")
WORKLOADS = {"short chat": "chat", "long documents": "documents", "mixed, heavy-tailed": "mixed"}
SHAPES = {
    "gemma-3-27b": "Gemma 3 27B", "gemma-4-26b-a4b": "Gemma 4 26B A4B", "gpt-oss-120b": "GPT-OSS 120B",
    "qwen3-next-80b-a3b": "Qwen3-Next 80B", "nemotron-h-56b": "Nemotron-H 56B", "deepseek-v3": "DeepSeek V3",
}  # fmt: skip
STEPPED = {
    "llama-3.1-8b": "Llama-3.1-8B", "gemma-3-12b": "Gemma-3-12B",
    "qwen3-30b-a3b-half": "Qwen3-30B-A3B, half of its layers",
}  # fmt: skip
LONG = "gemma-3-12b, sequences of 32,768 tokens in 102.48 GiB"
BY_SEED = "precast, useful % of allocated by seed"


def result(claim: str) -> dict[str, Any]:
    """The figures of `results/<claim>.json`."""
    return dict(_read(claim)["figures"])


def place(claim: str) -> str:
    """Where a claim was measured, in a word: the README says once what the words mean."""
    gpu = _read(claim)["machine"].get("gpu")
    return "CPU" if gpu is None else gpu.removeprefix("NVIDIA ")


def readme() -> str:
    """The table of README.md, and what its last column means."""
    build, restored, front = result("build"), result("restore"), result("front_door")
    gpu, cached = result("gpu_llama_8b"), result("caches")
    small, large = build["llama-3.1-8b"], build["llama-3.1-405b"]
    half, long = gpu["bfloat16"], cached[LONG]
    start, few = result("gpu_start")["llama-3.1-8b"], result("gpu_start_few_bits")["gpt-oss-20b-mxfp4"]
    captured = start["driver, captured"]["captured"]
    commands = sorted({f"{front['seconds'][name]:.2f}" for name in ("inspect", "verify", "digest")})
    equal = sum(gpu["float32"]["greedy_tokens_equal"])
    at_start = long["vLLM's arithmetic at start, by tokens a step"]["16384"]
    beside = [result("gpu_vllm")[shape] for shape in ("llama-3.1-8b-int4", "gpt-oss-20b-mxfp4")]
    one = {by: ", ".join(f"{each[by]['decode_ms']['1']:.2f}" for each in beside) for by in ("precast", "vllm")}
    served = result("gpu_serve")
    clients, answers = list(served["answers"].items())[-1]
    alone = int(clients) * served["tokens"] / answers["generate_seconds"]
    rows = [
        ("build from the config, start to end of the process", _cost(small),
         "importing torch and transformers, and `torch.export` alone: "
         f"{small['baseline_import_and_export_seconds']:.1f} s", place("build")),
        ("the same for the Llama-3.1-405B shape, 126 layers", _cost(large),
         f"{large['baseline_import_and_export_seconds']:.1f} s", place("build")),
        ("bundle opened, verified, restored to a callable", f"{restored['seconds']['total']:.3f} s",
         f"`torch.export.load` of the same model: {restored['torch_export_load_seconds']:.1f} s", place("restore")),
        ("`import precast.loader`, on top of `import torch`", f"{front['loader_over_torch_seconds']:.3f} s",
         f"`import torch`: {front['seconds']['import_torch']:.2f} s", place("front_door")),
        ("`precast inspect`, `verify`, `digest`, start to end of the process", f"{_span(commands)} s",
         f"an empty Python: {front['seconds']['python']:.2f} s", place("front_door")),
        ("from a new process to the first token, without torch, weights in the page cache "
         "([docs/start.md](docs/start.md))",
         f"**{start['driver']['median']:.2f} s**",
         f"the CUDA context and a read of the same files by twelve threads: {start['floor']['median']:.2f} s",
         place("gpu_start")),
        ("the same with torch", f"{start['torch']['median']:.2f} s",
         f"`import torch`, its context and the same read: {start['torch floor']['median']:.2f} s", place("gpu_start")),
        (f"the same for GPT-OSS-20B in MXFP4, {few['floor']['bytes'] / 1e9:.1f} GB, without torch",
         f"{few['driver']['median']:.2f} s", f"context and read: {few['floor']['median']:.2f} s",
         place("gpu_start_few_bits")),
        ("CUDA graphs of all sizes of steps, captured after the first token",
         f"{captured['graphs']} in {captured['seconds']:.2f} s", f"{captured['compilations']} kernels compiled",
         place("gpu_start")),
        ("a step of one sequence as it is served: Llama-3.1-8B in INT4, GPT-OSS-20B in MXFP4 "
         "([more](docs/quantisation.md#beside-vllm))",
         f"{one['precast']} ms", f"vLLM {beside[0]['vllm']['version']}: {one['vllm']} ms", place("gpu_vllm")),
        (f"`precast serve`, Llama-3.1-8B in FP8: tokens streamed to {clients} clients "
         "([more](docs/serving.md#what-it-costs))",
         f"{answers['tokens_per_second']:,} a second; ready {served['ready_seconds']:.1f} s after its start",
         f"`engine.generate` without HTTP: {alone:,.0f} a second",
         place("gpu_serve")),
        ("float32: prompts whose 32 greedy tokens are transformers'",
         f"{equal} of {len(gpu['float32']['greedy_tokens_equal'])}", "", place("gpu_llama_8b")),
        ("bfloat16: logits, relative to transformers' in float32", f"off by {_range(half['logit_errors'], 3)}",
         f"transformers' own in bfloat16: {_range(gpu['transformers_bfloat16_logit_errors'], 3)}",
         place("gpu_llama_8b")),
        ("useful bytes among allocated cache bytes, six geometries under three workloads, simulated",
         f"{_useful_by_seed(cached)} % ([docs/caches.md](docs/caches.md#figures))",
         f"uniform pages: {_useful(cached, 'uniform pages')} %; one table for all layers: "
         f"{_useful(cached, 'one table')} %", "any"),
        ("sequences of 32,768 tokens of the Gemma 3 12B shape at once in 102.48 GiB of cache, simulated",
         f"{long['precast']['most at once']}",
         f"one table for all layers: {long['one table']['most at once']}; vLLM 0.25.1's own count at start: {at_start}",
         "any"),
    ]  # fmt: skip
    words = (
        f"Llama-3.1-8B shape, random weights in bfloat16, {_weights_bytes(half) / 1e9:.2f} GB. "
        f"*CPU*: {_machine('build')}. *{place('gpu_llama_8b')}*: one {_read('gpu_llama_8b')['machine']['gpu']} and "
        f"{_machine('gpu_llama_8b')}.\n\n"
    )
    table = _table(("what", "figure", "beside it, in the same run", "machine"), rows)
    return f"{words}{table}\nA decode step as it is served without torch, by numbers of sequences. {quantised_page()}"


def _weights_bytes(measured: Any) -> int:
    """Of the checkpoint that a run has read."""
    phases = measured["timeline"]["phases"]
    return int(next(phase["bytes"] for phase in phases if phase["name"] == "weights"))


def steps_page() -> str:
    """The table of docs/steps.md: decode steps with torch, op by op and captured."""
    figures = result("gpu_steps")
    batches = [key for key in next(iter(figures.values()))["captured"] if key.isdecimal()]
    rows = []
    for shape, found in figures.items():
        pairs = (f"{found['eager'][batch]['ms']:.1f} / {found['captured'][batch]['ms']:.1f}" for batch in batches)
        once = found["capture"]
        rows.append((STEPPED.get(shape, shape), *pairs, f"{once['sizes']} sizes, {once['seconds']:.1f} s"))
    words = (
        "Decode steps with torch, in milliseconds, op by op / captured as a CUDA graph, by numbers of sequences. "
        f"Random weights in bfloat16, one {_read('gpu_steps')['machine']['gpu']}.\n\n"
    )
    return words + _table(("", *(f"{batch} seq." for batch in batches), "capturing, once a load"), rows)


def caches_page() -> str:
    """The table of docs/caches.md, and its long sequences."""
    figures = result("caches")
    rows = []
    for shape, name in SHAPES.items():
        found = figures[shape]
        for number, (workload, word) in enumerate(WORKLOADS.items()):
            one = found[workload]
            title = f"{name}, {found['cache_bytes'] / 1e9:.1f} GB" if number == 0 else ""
            systems = [_at_once(one.get(system)) for system in ("precast", *SYSTEMS)]
            rows.append((title, word, f"{_range(one[BY_SEED], 1)} %", *systems))
    heads = ("", "workload", "useful of allocated, over five streams",
             "sequences at once (useful of all cache memory)", *SYSTEMS)  # fmt: skip
    return _table(heads, rows)


def kernels_page() -> str:
    """The tables of docs/kernel_speed.md."""
    rows = (row.cells for claim, rows_of in kernel_figures.KERNELS.items() for row in rows_of(result(claim)))
    return f"{_table(kernel_figures.HEADS, rows)}{_float8_layers()}{_single_tokens()}{_waited_for()}{_products_alone()}"


def _float8_layers() -> str:
    """Layers of float8 on both sides by tiles of our own and by cuBLASLt."""
    found = result("gpu_float8_tiles")
    counts = [count for count in found["rows"]["o"] if count != "bytes_us"]
    rows = [
        (f"{layer}, scales of {kind}", f"{each['bytes_us']:.1f}", *(_both(each[count]) for count in counts))
        for kind, layers in found.items() for layer, each in layers.items()
    ]  # fmt: skip
    table = _table(("us", "its bytes", *(f"{count} rows" for count in counts)), rows)
    return f"\n## Float8 on both sides\n{_FLOAT8.format(gpu=_read('gpu_float8_tiles')['machine']['gpu'])}{table}"


def _both(times: Mapping[str, Any]) -> str:
    """Of both ways, the one that a layer gets in bold."""
    return " / ".join(f"**{times[f'{by}_us']:.1f}**" if by == times["chosen"] else f"{times[f'{by}_us']:.1f}"
                      for by in ("tiles", "cublaslt"))  # fmt: skip


_FLOAT8 = """
Layers of Llama 3.1 8B whose inputs are rounded already, by `float8_tiles.cu` / by cuBLASLt, on one {gpu}; in bold
what a layer gets (`benchmarks/bench_gpu_float8_tiles.py`).

"""


def _single_tokens() -> str:
    """What attention of single tokens adds to a layer, as records have it and by Triton."""
    rows = []
    for case, row in result("gpu_decode_attention")["rows"].items():
        model, _, tokens = case.partition(", ")
        seqs, _, length = tokens.partition(" x 1 of ")
        us = row["us"]
        in_triton = next(us[name] for name in us if name.startswith("triton"))
        own = f"{us[row['chosen']]:.1f}" if row["chosen"] in us else "not measured"
        rows.append((model, seqs, f"{int(length):,}", f"{row['bytes_us']:.1f}", own, row["chosen"],
                     f"{min(us.values()):.1f}", f"{in_triton:.1f}"))  # fmt: skip
    heads = ("", "sequences", "tokens of each", "its bytes, us", "us", "way", "fastest way, us", "Triton, us")
    gpu = _read("gpu_decode_attention")["machine"]["gpu"]
    return f"\n## Single tokens of many sequences\n{_SINGLE.format(gpu=gpu)}{_table(heads, rows)}"


_SINGLE = """
What attention adds to a layer in a graph of them, on one {gpu}; and what the fastest of all ways that
were tried adds, and Triton's kernel. A way is the blocks of a cluster, warps of a block, and blocks of keys in a warp's
ring: `Decode` in `kernels/attention/decode.py`. Windows of GPT-OSS and Gemma are shorter than long contexts.

"""


def _waited_for() -> str:
    """Which kernels of a layer a step waits for."""
    rows = [
        (SERVED[shape], count, f"{step['step_ms']:.2f}", f"{step['layer_us']:.0f}",
         ", ".join(f"{_in_short(name)} {us:.1f}" for name, us in step["kernels"]))
        for shape, steps in result("gpu_step_kernels").items() for count, step in steps.items()
    ]  # fmt: skip
    gpu = _read("gpu_step_kernels")["machine"]["gpu"]
    table = _table(("", "seq.", "step, ms", "layer, us", "its kernels in order, us"), rows)
    return f"\n## What a step waits for\n{_WAITED.format(gpu=gpu)}{table}"


def _in_short(name: str) -> str:
    """A library's kernel by its first word."""
    word = name.removeprefix("void ").partition(" ")[0].partition("<")[0]
    return word.partition("_")[0] if word.startswith("nvjet") else word.removesuffix("_kernel")


_WAITED = """
Captured steps of sequences of 130 to 240 tokens on one {gpu}, with random weights. Kernels overlap:
of each is given by how much its end comes after the ends of all in front of it, so that these times add up to a layer's
(`benchmarks/bench_gpu_step_kernels.py`). GPUs of one kind differ by some percent, most with many sequences, and
steps as they are served ([quantisation.md](quantisation.md#what-steps-take)) may be of another one.

"""


def _products_alone() -> str:
    """What steps take with kernels left out."""
    found = result("gpu_products_alone")
    parts = "all", "without gates", "without attention", "products alone", "all, copies", "copies alone"
    rate = found["read_bytes_per_second"]
    rows = [
        (SERVED[shape], count, f"{1000 * found[shape]['step_bytes'] / rate:.2f}" if count == "1" else "",
         *(f"{found[shape][part][count]:.2f}" for part in parts))
        for shape in found if shape in SERVED for count in ("1", "8")
        if count == "1" or "gpt-oss" not in shape  # without the rest all sequences have the same experts
    ]  # fmt: skip
    table = _table(("", "seq.", "its bytes, ms", *parts), rows)
    gpu = _read("gpu_products_alone")["machine"]["gpu"]
    return f"\n## What a step can't do without\n{_ALONE.format(gpu=gpu)}{table}"


_ALONE = """
Steps as they are served on one {gpu}, in ms, with some of their kernels left out
(`benchmarks/bench_gpu_products_alone.py`): what norms, gates, attention and the time between kernels could still give
is the difference. Tokens are drawn in all of them; with products alone inputs are not rounded either. Copies are
products that multiply nothing: as many kernels, each after the one in front, bring the same bytes.

"""


def attention_page() -> str:
    """The table of sparse attention in docs/kernels/attention.md."""
    found = result("gpu_sparse_attention")["rows"]
    rows = []
    for name in (name.partition(", ")[2] for name in found if name.startswith("paged_select_keys")):
        queries, _, tokens = name.partition(" of ")
        seqs, _, each = queries.partition(" x ")
        whose = f"{seqs} x {int(tokens):,}" if each == "1" else f"{int(each):,} queries at {int(tokens):,}"
        ops = (found[f"{op}, {name}"] for op in ("paged_select_keys", "paged_sparse_latent_attention"))
        both = found.get(f"both, {name}")
        together = ("-",) * 3
        if both:
            together = (f"{both['us']:,.0f}", f"{both['ratio']:.2f}", f"{both['ratio_of_reads']:.2f}")
        each_op = (f"{row[kind]:,.0f}" for row in ops for kind in ("us", "triton_us", "floor_us"))
        rows.append((whose, *each_op, *together))
    heads = ("sequences x tokens", "selection, us", "in Triton", "at least", "attention, us", "in Triton", "at least",
             "both, us", "times as long", "reads alone, times")  # fmt: skip
    sparse = f"One {_read('gpu_sparse_attention')['machine']['gpu']}.\n\n" + _table(heads, rows)
    return f"{sparse}\n{_selected_blocks()}"


def _selected_blocks() -> str:
    found = result("gpu_selected_blocks")["rows"]
    cases: dict[tuple[str, str], list[str]] = {}
    for name, row in found.items():
        model, _, case = name.split(", ")
        seqs, _, tokens = case.partition(" x 1 of ")
        cases.setdefault((model, f"{seqs} x {int(tokens):,}"), []).extend(
            f"{row[kind]:,.0f}" for kind in ("us", "floor_us")
        )
    heads = ("model", "sequences x tokens", "selection, us", "at least", "attention, us", "at least")
    gpu = _read("gpu_selected_blocks")["machine"]["gpu"]
    return f"The same of selected blocks, which the next section is about. One {gpu}.\n\n" + _table(
        heads, [(*case, *numbers) for case, numbers in cases.items()]
    )


def native_page() -> str:
    """The table of docs/native.md."""
    ((_, figures),) = result("native").items()
    rows = [
        (f"`{target}`", str(found["kernels"]), f"{found['bytes']:,}", f"{found['image_bytes']:,}",
         f"{found['seconds']:.0f} s", f"{found['processor_seconds']:.0f} s", f"{found['cuda'] / 1000:.1f}")
        for target, found in figures.items()
    ]  # fmt: skip
    heads = ("target", "kernels", "bytes stored", "unpacked", "compiled in", "processors", "CUDA of the driver")
    return _table(heads, rows)


def sharding_page() -> str:
    """The figures of docs/sharding.md."""
    found, sums, alone = result("gpu_tensor_parallel"), result("gpu_collectives"), result("gpu_steps")
    counts = ("1", "8", "64", "256")
    rows = []
    for name, worlds in found.items():
        one = alone[name]["captured"]
        decode = (f"{one[count]['ms']:.2f}" for count in counts)
        if "tp 1" not in worlds:
            prefill = f"{one['prefill_tokens_per_s']['1 x 4096']:,.0f}"
            rows.append((STEPPED[name], "one GPU, another day", *decode, prefill))
        for world, two in worlds.items():
            decode = (f"{two['decode_ms'][count]:.2f}" for count in counts)
            rows.append((STEPPED[name], world, *decode, f"{two['prefill_tokens_per_s']:,.0f}"))
    first = found["llama-3.1-8b"]["tp 2"]["first_token"]["seconds"]
    text = (
        "Milliseconds of a decode step as served, by sequences, and tokens a second of a prompt of 4,096 tokens; "
        f"weights are random, in bfloat16; two NVIDIA H200 and {_machine('gpu_tensor_parallel')}.\n\n"
    )
    text += _table(("shape", "world", *counts, "prefill"), rows)
    text += (
        f"\nThe start of a process to the first token of Llama-3.1-8B on both takes {first[len(first) // 2]:.1f} s "
        "with torch, kernels compiled and files in the page cache.\n\n"
        "Microseconds of an all-reduce of rows of 4,096 bfloat16 numbers in a CUDA graph, and with the residual "
        f"sum and the norm; a copy between the GPUs runs at {sums['copy_gigabytes_per_second']} GB/s.\n\n"
    )
    kinds = {"NCCL": "nccl", "one shot": "one_shot", "two shots": "two_shot", "with norm": "norm"}
    rows = [
        (f"{int(count):,}", *(f"{_fastest(times, kind):.1f}" for kind in kinds.values()), f"{times['moved']:.1f}")
        for count, times in sums["rows"].items()
    ]
    return text + _table(("rows", *kinds, "the bytes alone"), rows)


def _fastest(times: dict[str, float], kind: str) -> float:
    """Of all grids that were tried."""
    return min(time for name, time in times.items() if name.startswith(kind))


def registry_page() -> str:
    """The figures of docs/registry.md."""
    found = result("registry")
    moved, large, shared = found["transfers"], found["large_layer"], found["shared"]
    apart = found["names_apart"].values()
    would_share = _range((100 * each["shared"] for each in apart), 0)
    seconds = moved["seconds"]

    def milliseconds(name: str) -> str:
        return f"{1000 * seconds[name]:.0f} ms" if name in seconds else "-"

    rows = [
        ("push", milliseconds("push"), milliseconds("push_plain"), f"{moved['push_over_plain']:.2f}",
         milliseconds("oras_push")),
        ("push again, where all is there", milliseconds("push_again"), "", "", ""),
        ("pull into an empty store", milliseconds("pull"), milliseconds("pull_plain"),
         f"{moved['pull_over_plain']:.2f}", milliseconds("oras_pull")),
        ("pull of what the store has, by tag", milliseconds("pull_of_what_the_store_has_by_tag"), "", "", ""),
    ]  # fmt: skip
    text = (
        f"The bundle of the Llama-3.1-8B shape with two native layers of 3 MB ({moved['bytes'] / 1e6:.1f} MB) to and "
        f"from {found['registry']} on the same machine ({_machine('registry')}), within a running process; beside it "
        "plain sockets over as many connections, which ask and check nothing, and `oras cp`, a process of its own. The "
        f"best of {found['runs']} runs each. To open and verify the bundle, before a push and after a pull, takes "
        f"{milliseconds('open_bundle')}.\n\n"
    )
    heads = ("what", "Precast", "plain sockets", "ratio", "oras")
    peaks = ", ".join(f"{way} {large[way]['peak_mib']:.0f} MiB" for way in ("push", "pull"))
    native, without = shared["with_native_layers"], shared["without"]
    text += _table(heads, rows)
    text += (
        f"\nThe most memory that a process has while it moves a layer of {large['bytes'] / 1e9:.0f} GB, Python and "
        f"all: {peaks}. {native['bundles']} such bundles that differ in the names of their checkpoint's tensors alone "
        f"share {_short(100 * native['shared'])} % of their bytes in the store; without the native layers, "
        f"{_short(100 * without['shared'])} % of {min(each['bytes'] for each in apart) / 1e3:.0f} kB: the names stand "
        "in the recipes of the graph, and each has its own.\n\nThe names are no layer of their own, because that would "
        f"change little: bundles without native layers would share {would_share} % "
        "(this shape, and one with experts). Most of what differs are the manifest, which names its blobs, the image "
        "manifest and the provenance record, which every bundle has of its own.\n"
    )
    return text


def serving_page() -> str:
    """The figures of docs/serving.md."""
    found = result("serve")
    streams, engine = found["streams"], found["beside_the_engine"]
    idle, beside = found["probes_idle"], found["probes_beside_texts_of_5_mb"]
    steps = {name: each["driver"]["decode_ms"]["256"] for name, each in result("gpu_served").items() if name in _DENSE}
    drawn = " and ".join(f"{_DENSE[name]} {256_000 / steps[name]:,.0f}" for name in _DENSE)
    rows = [
        (f"tokens a second, in {streams['streams']} streams, those that wait sent together",
         f"{streams['tokens_per_second']:,}",
         f"what an {place('gpu_served')} draws for as many sequences of Llama-3.1-8B: {drawn}"),
        (f"{engine['answers']} answers of {engine['tokens']} tokens of a tiny model, with who asks on the same cores",
         f"{engine['seconds']:.2f} s", f"`engine.generate` alone: {engine['generate_seconds']:.2f} s"),
        ("`/health` while texts of 5 MB are encoded: median, 99 %, the longest", _milliseconds(beside["milliseconds"]),
         f"without them: {_milliseconds(idle)}"),
    ]  # fmt: skip
    text = f"On {_machine('serve')}; `benchmarks/bench_serve.py`.\n\n" + _table(("what", "", "beside it"), rows)
    return text + "\n" + _served_by_a_gpu()


def _served_by_a_gpu() -> str:
    found = result("gpu_serve")
    rows = [
        (number, f"{each['seconds']:.2f}", f"{each['generate_seconds']:.2f}", f"{each['ratio']:.2f}",
         f"{each['tokens_per_second']:,}")
        for number, each in found["answers"].items()
    ]  # fmt: skip
    return (
        f"With one {place('gpu_serve')}: Llama-3.1-8B in FP8, clients that each send a prompt of "
        f"{found['prompt_tokens']} tokens and are streamed {found['tokens']}, beside `engine.generate` in a process "
        "without HTTP (`benchmarks/bench_gpu_serve.py`). An answer of one token to a known prompt takes "
        f"{found['first_token_ms']:.1f} ms. The server is ready {found['ready_seconds']:.1f} s after it is started, "
        f"with the checkpoint in memory; an engine by itself is after {found['load_seconds']:.1f} s.\n\n"
    ) + _table(("clients", "seconds", "`generate`", "ratio", "tokens a second"), rows)


_DENSE = {"llama-3.1-8b": "in bfloat16", "llama-3.1-8b-fp8": "in FP8"}


def _milliseconds(found: dict[str, float]) -> str:
    return f"{found['median']:.1f}, {found['p99']:.1f}, {found['most']:.0f} ms"


def trust_page() -> str:
    """The figures of docs/trust.md."""
    found = result("trust")
    rows = [
        (
            what,
            *(f"{1000 * seconds[name]:.0f} ms" for name in ("with_open", "first")),
            f"{1000 * seconds['again']:.1f} ms",
        )
        for what, seconds in sorted(found["checks_cpu_seconds"].items(), key=lambda row: row[1]["first"])
    ]
    whole = ", ".join(f"`{name}` {1000 * seconds:.0f} ms" for name, seconds in found["commands_cpu_seconds"].items())
    text = _table(("signed by", "opened and verified", "the first check", "the next"), rows)
    machine = f"of one of {_read('trust')['machine']['cores']} cores"
    return text + f"\nOf the processor, {machine}, in a process without torch. Whole commands:\n{whole}.\n"


def start_page() -> str:
    """The picture and the figures of docs/start.md; what to run, where nothing was measured yet."""
    if not (RESULTS / "gpu_start.json").exists():
        return (
            "Nothing was measured yet with this release: `python benchmarks/bench_gpu_start.py` measures it, on a GPU, "
            "and\n`python benchmarks/figures.py` then fills in the table and draws the picture.\n"
        )
    found = result("gpu_start")
    shape = start_figures.NAMES.get(next(iter(found)), "")
    text = f"![both starts of {shape}, phase by phase](start.svg)\n\n"
    text += f"One {_read('gpu_start')['machine'].get('gpu', 'GPU')} and {_machine('gpu_start')}; medians.\n\n"
    text += _table(start_figures.HEADS, start_figures.rows(found)) + f"\n{start_figures.words(found)}"
    if (RESULTS / "gpu_start_few_bits.json").exists():
        # The floor has fewer bytes to read, and all else that a start has to do is as much as in 16 bits.
        few = result("gpu_start_few_bits")
        rows = (row[:4] + row[7:] for row in start_figures.rows(few))
        heads = start_figures.HEADS[:4] + start_figures.HEADS[7:]
        gpu = _read("gpu_start_few_bits")["machine"].get("gpu", "GPU")
        text += f"\nIn few bits, without torch, beside bfloat16 in the same run, on one {gpu}:\n\n{_table(heads, rows)}"
    return text + _start_on_host()


def _start_on_host() -> str:
    """What a start without torch does in Python."""
    found = result("start_on_host")
    torch = found.pop("import_torch_ms")
    phases = list(next(iter(found.values()))["ms"])
    rows = [
        (start_figures.NAMES[shape], *(f"{each['ms'][name]:.0f}" for name in phases), f"{each['ms_in_all']:.0f}")
        for shape, each in found.items()
    ]
    cores = _read("start_on_host")["machine"]["cores"]
    text = "\nWhat of a start without torch is Python, but for what takes a checkpoint or a GPU, in ms of one of "
    text += f"{cores} cores, where `import torch` takes {torch:,.0f}:\n\n"
    return text + _table(("", *phases, "in all"), rows)


SERVED = {
    "llama-3.1-8b": "Llama-3.1-8B, bfloat16", "llama-3.1-8b-fp8": "FP8 by row, inputs rounded by token",
    "llama-3.1-8b-fp8-blocks": "FP8 in blocks, inputs rounded in groups", "llama-3.1-8b-int4": "INT4 in groups of 128",
    "llama-3.1-8b-nvfp4": "NVFP4", "llama-3.1-8b-gptq": "GPTQ, 4 bits in groups of 128",
    "llama-3.1-8b-awq": "AWQ, 4 bits in groups of 128, float16",
    "gpt-oss-20b-mxfp4": "GPT-OSS-20B, MXFP4", "gemma-3-12b": "Gemma-3-12B, bfloat16",
    "qwen3-30b-a3b-half": "half of Qwen3-30B-A3B, bfloat16",
}  # fmt: skip


def quantised_page() -> str:
    """The table of docs/quantisation.md and README.md: what steps take as they are served, without torch."""
    rows, found = [], result("gpu_served")
    for shape in SERVED:
        driver = found.get(shape, {}).get("driver", {})
        if "decode_ms" not in driver:  # not measured, or failed
            continue
        decode = [f"{ms:.2f}" for ms in driver["decode_ms"].values()]
        least_ms = 1000 * found[shape]["step_bytes"] / found["read_bytes_per_second"]
        decode[0] += f" ({driver['decode_ms']['1'] / least_ms:.2f})"
        prefill = f"{round(driver['prefill_tokens_per_s']['1 x 4096'], -2):,.0f}"
        rows.append((SERVED[shape], f"{found[shape]['checkpoint_bytes'] / 1e9:.1f}", *decode, prefill))
    counts = (f"{count} seq., ms" for count in (8, 64, 256))
    heads = ("", "files, GB", "1 seq., ms (times its bytes)", *counts, "prompts of 4,096, tokens/s")
    text = f"One {_read('gpu_served')['machine']['gpu']}, random weights.\nIn brackets is how many times as long a "
    text += "step of one sequence takes as this GPU takes to read what it needs.\n\n"
    return text + _table(heads, rows)


def _beside_vllm() -> str:
    """What steps and prompts take beside vLLM."""
    found, rows, sides = result("gpu_vllm"), [], ("precast", "vllm")
    for shape, each in found.items():
        if not all("decode_ms" in each[side] for side in sides):  # one has failed
            continue
        pairs = zip(*(each[side]["decode_ms"].values() for side in sides), strict=True)
        prompts = (f"{round(each[side]['prefill_tokens_per_s']['1 x 4096'], -2):,.0f}" for side in sides)
        rows.append((SERVED[shape], *(f"{ours:.2f} / {theirs:.2f}" for ours, theirs in pairs), " / ".join(prompts)))
    heads = ("", *(f"{count} seq., ms" for count in (1, 8, 64, 256)), "prompts of 4,096, tokens/s")
    version, gpu = next(iter(found.values()))["vllm"]["version"], _read("gpu_vllm")["machine"]["gpu"]
    return f"\n## Beside vLLM\n\nPrecast / vLLM {version}, one {gpu}.{_BESIDE}{_table(heads, rows)}"


_BESIDE = """ Both load the same files of random
weights, one after the other. It was measured before
[attention of 9 and more sequences](kernels/attention.md#single-tokens), the gate of FP8 by row and
[products of float8 with 9 to 256 rows](kernels/linear.md#float8-on-both-sides) were made faster; and with 64 and 256
sequences, contexts of Precast's were up to a hundred tokens longer: beside sequences that decode it takes prompts more
slowly.

"""


def few_bits_page() -> str:
    """The tables of docs/quantisation.md: what steps take, also beside vLLM, what a model holds, and how far results of
    a layer are from the exact ones."""
    held = [
        (SERVED[shape], f"{each['checkpoint_and_cache_bytes'] / 1e9:.2f}", f"{each['device_bytes'] / 1e9:.2f}",
         f"{each['ratio']:.2f}")
        for shape, each in result("gpu_few_bits_memory").items()
    ]  # fmt: skip
    lost, found = [], result("gpu_few_bits_drift")
    for name, each in found.items():
        parts = (each["weight"], each["input"], *each["arithmetic"].values())
        lost.append((name, *("" if part == 0 else f"{100 * part:.2f}" for part in parts)))
    first, *others = next(iter(found.values()))["arithmetic"]
    heads = ("in %", "weight", "input", f"arithmetic, of {first} token", *(f"of {int(count):,}" for count in others))
    memory = _table(("", "files and caches, GB", "on the device, GB", "ratio"), held)
    return f"{quantised_page()}{_beside_vllm()}{_HELD}{memory}{_LOST}{_table(heads, lost)}"


_HELD = """
## What they hold

Device memory of a model that is loaded for 8 sequences and 1,024 tokens a step, with 2 GiB of caches, without what a
CUDA context takes by itself. What is held beside files and caches is room for a step; with four bits a weight as
prompts multiply it is part of it, or 2,048 to 4,096 of its outputs.

"""
_LOST = """
## What is lost

How far a layer's results are from those that its weight gave before it was rounded to few bits, in parts: by the
weight's values, by those of the input, and by the kernel's arithmetic, which is that of bfloat16. The layer has 4,096
outputs of 14,336 inputs, all normal numbers.

"""


def image_page() -> str:
    """The table of examples/image/README.md."""
    rows = []
    for name, found in result("image").items():
        largest = ", ".join(f"{top} {size / 1e6:.0f}" for top, size in list(found["largest"].items())[:6])
        whole = "-" if found["image_bytes"] is None else f"{found['image_bytes'] / 1e6:,.0f} MB"
        name += f", {found['torch']}" if found.get("torch") else ""
        rows.append((name, whole, f"{found['installed_bytes'] / 1e6:,.0f} MB", largest))
    return _table(("image", "in all", "of it by pip", "the largest, MB"), rows)


PAGES: dict[str, Callable[[], str]] = {
    "README.md": readme, "docs/caches.md": caches_page, "docs/kernel_speed.md": kernels_page,
    "docs/kernels/attention.md": attention_page,
    "docs/native.md": native_page,
    "docs/quantisation.md": few_bits_page,
    "docs/registry.md": registry_page,
    "docs/serving.md": serving_page,
    "docs/sharding.md": sharding_page,
    "docs/start.md": start_page,
    "docs/steps.md": steps_page,
    "docs/trust.md": trust_page,
    "examples/image/README.md": image_page,
}  # fmt: skip


PICTURES: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "docs/start.svg": ("gpu_start", start_figures.picture)
}
"""Pictures, each with the result that it is drawn from; there is none without."""


def filled(page: str) -> str:
    """The page's text with its figures as the results have them; the whole picture."""
    if page in PICTURES:
        claim, drawn = PICTURES[page]
        return drawn(result(claim))
    text = (ROOT / page).read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    if END not in rest:
        raise ValueError(f"{page}: the marks of its figures are missing")
    return f"{before}{BEGIN}{PAGES[page]()}{END}{after}"


def main() -> None:
    """Write the pages, or compare them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a page differs")
    check = parser.parse_args().check
    pages = [*PAGES, *(name for name, (claim, _) in PICTURES.items() if (RESULTS / f"{claim}.json").exists())]
    stale = [page for page in pages if not (ROOT / page).exists() or filled(page) != _text(page)]
    if check:
        sys.exit(f"not what benchmarks/results says: {', '.join(stale)}" if stale else 0)
    for page in stale:
        (ROOT / page).write_text(filled(page), encoding="utf-8")


def _text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def _read(claim: str) -> dict[str, Any]:
    return dict(json.loads((RESULTS / f"{claim}.json").read_text(encoding="utf-8")))


def _machine(claim: str) -> str:
    found = _read(claim)["machine"]
    return f"{found['cores']} cores, torch {'.'.join(found['torch'].split('.')[:2])}"


def _cost(build: dict[str, Any]) -> str:
    return f"{build['seconds']:.1f} s, {build['peak_gib']:.2f} GiB"


def _span(texts: Sequence[str]) -> str:
    return " to ".join(dict.fromkeys((texts[0], texts[-1])))


def _range(values: Iterable[float], digits: int) -> str:
    found = sorted(values)
    return _span([f"{found[0]:.{digits}f}", f"{found[-1]:.{digits}f}"])


def _short(share: float) -> str:
    """A share in percent, rounded down: what is said to be reached was."""
    return f"{int(share * 100) / 100:g}"


def _useful_by_seed(figures: dict[str, Any]) -> str:
    found = [share for shape in SHAPES for workload in WORKLOADS for share in figures[shape][workload][BY_SEED]]
    return f"{_short(min(found))} to {max(found):.0f}"


def _useful(figures: dict[str, Any], system: str) -> str:
    tested = [figures[shape][workload].get(system) for shape in SHAPES for workload in WORKLOADS]
    return _range([one["useful, % of allocated"] for one in tested if one is not None], 0)


def _at_once(system: dict[str, Any] | None) -> str:
    if system is None:
        return "-"
    return f"{system['sequences at once']:.0f} ({system['useful, % of the arena']:.0f} %)"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [" | ".join(heads), "|".join("---" for _ in heads), *(" | ".join(row) for row in rows)]
    return "".join(f"| {line} |\n" if "---" not in line else f"|{line}|\n" for line in lines)


if __name__ == "__main__":
    main()
