"""On a GPU: the predicted peak of a step's activations against what torch's allocator counts, for five families.

Claim: the prediction, arithmetic over the graph and without a run, is never below the measured peak, and at most 10 %
above it, for steps of 16, 64, 1000 and 8192 tokens. Widths are those of published models, layers are few and random.
Steps are the engine's own: 64 sequences that decode, prompts, and mixtures of both, of which the arithmetic knows only
the totals. The graph's own run is measured, in steps whose tokens are greedy, against the graph's peak; and whole steps
that draw tokens against the step's.
What is measured are the blocks of torch's allocator, with the setting that `precast.load` makes.

    python benchmarks/bench_activations.py --prepare DIR     # where transformers is: the bundles
    python benchmarks/bench_activations.py --measure DIR     # on the GPU, without transformers
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from support import harness, random_checkpoints
from support.activation_ops import Run, WatchedOps
from support.shapes import SHAPES

from precast.ir.artifact import Bundle
from precast.ir.graph import symbols
from precast.ir.graph.schema import Expr, Graph
from precast.ir.graph.world import unsharded
from precast.ir.memory import caches
from precast.ir.memory.addresses import Addresses
from precast.kernels import registry, step_memory
from precast.kernels.dtypes import BY_NAME
from precast.kernels.sampling.limits import SAMPLE_VERSION
from precast.kernels.use import LONGEST
from precast.loader.cache.memory import CacheMemory
from precast.loader.engine.engine import Engine
from precast.loader.engine.params import SamplingParams
from precast.loader.program.restore import restore
from precast.loader.run.runner import Runner
from precast.loader.sizing import EngineLimits
from precast.loader.timeline import Timeline
from precast.loader.torch_device import cut_blocks_to_size, open_device

MAX_TOKENS, MAX_SEQS, MAX_SEQ_LEN = 8192, 64, 16384
DRAWN = 12
"""Tokens of an answer: the first prompts of a row still decode when the last are computed."""
ABOVE = 1.1
"""The most that a prediction may be above the measured peak."""

_DEEPSEEK = {name: value for name, value in SHAPES["deepseek-v3"].items() if name != "quantization_config"}
FAMILIES: dict[str, dict[str, Any]] = {
    "dense": {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "hidden_size": 4096,
        "intermediate_size": 12288, "num_hidden_layers": 3, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "max_position_embeddings": 40960, "tie_word_embeddings": False, "eos_token_id": 151645,
    },
    "experts": {**SHAPES["qwen3-235b-a22b"], "num_hidden_layers": 2},
    "latent attention": {**_DEEPSEEK, "num_hidden_layers": 2, "first_k_dense_replace": 1},
    "hybrid state space": {
        **SHAPES["nemotron-h-56b"], "num_hidden_layers": 5, "hybrid_override_pattern": "M-M*-",
        "max_position_embeddings": 40960,
    },
    "shared kv": {
        **SHAPES["gemma-4-26b-a4b"], "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 6,
        "num_attention_heads": 8, "num_key_value_heads": 2, "num_global_key_value_heads": None,
        "attention_k_eq_v": False, "enable_moe_block": False, "sliding_window": 512,
        "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144, "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
    },
}  # fmt: skip

PROMPTS: dict[str, list[list[int]]] = {
    # row: prompts' lengths, those of a list submitted when all before them decode
    "16 tokens": [[16]],
    "64 tokens": [[1000] * 64],
    "1000 tokens": [[1000]],
    "8192 tokens": [[8192]],
    "mixed": [[40 + 13 * i for i in range(60)], [6000]],
    "ragged": [[1 + 37 * i % 811 for i in range(40)]],
}
CLAIMED = ("16 tokens", "64 tokens", "1000 tokens", "8192 tokens")
"""The rows that are held to `ABOVE`; no row may be below what was measured."""


class Step(NamedTuple):
    """A step of an engine: its sizes by symbol; the bytes that it held at most, in blocks and as asked for."""

    sizes: dict[str, int]
    bytes: int
    asked: int


class Sized:
    """A program that notes the sizes of its last run, and the bytes that it held."""

    def __init__(self, run: Run, graph: Graph) -> None:
        self._run = run
        self._inputs = graph.inputs
        self.sizes: dict[str, int] = {}
        self.held = (0, 0)

    def __call__(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        self.sizes = {"tp": 1, "rank": 0, LONGEST: int(inputs["kv_lens"].max())}
        for value in self._inputs:
            for size, found in zip(value.type.shape, inputs[value.name].shape, strict=True):
                self.sizes |= {size: found} if isinstance(size, str) else {}
        self.sizes["B"] = inputs["kv_lens"].shape[0]
        results: list[dict[str, torch.Tensor]] = []
        self.held = _held(lambda: results.append(self._run(**inputs)))
        return results[0]


def prepare(folder: Path) -> None:
    """The bundles."""
    from transformers import AutoConfig

    import precast

    folder.mkdir(parents=True, exist_ok=True)
    for family, shape in FAMILIES.items():
        config = AutoConfig.for_model(**shape)
        precast.build(config, _place(folder, family), dtype="bfloat16", max_seq_len=MAX_SEQ_LEN)


def measure(folder: Path, only: str | None) -> dict[str, Any]:
    """Each family's rows, and how many of them break the claim."""
    figures: dict[str, Any] = {"rows_below": 0, "rows_far_above": 0, "families": {}, "drawing_bytes_a_logit": {}}
    for family in FAMILIES if only is None else [only]:
        opened = _Family(family, Bundle.open(_place(folder, family)), torch.device("cuda", 0))
        rows = opened.rows()
        figures["families"][family] = rows
        figures["drawing_bytes_a_logit"][family] = opened.drawing()
        del opened
        figures["rows_below"] += sum(row["lowest_ratio_of_all_steps"] < 1 for row in rows)
        figures["rows_far_above"] += sum(row["claimed"] and row["predicted_over_measured"] > ABOVE for row in rows)
        torch.cuda.empty_cache()
    return figures


class _Family:
    """One bundle with random weights on the GPU."""

    def __init__(self, name: str, opened: Bundle, device: torch.device) -> None:
        self._name = name
        self._graph, self._model, self._device = unsharded(opened.graph), opened.manifest.model, device
        plan = caches.with_slabs(self._graph.caches)
        self._memory = CacheMemory(plan, caches.slabs_for(plan, MAX_SEQS, 2048, MAX_TOKENS), open_device(device))
        self._tensors = {**random_checkpoints.tensors(self._graph, device), **self._memory.tensors}
        self._program = restore(self._graph, device=device)
        self._program.bind(self._tensors)
        cut_blocks_to_size(device)
        self._addresses = self._planned({"T": MAX_TOKENS, "B": MAX_SEQS, "R": MAX_SEQS})
        self._program.place(self._addresses, torch.empty(self._addresses.num_bytes, dtype=torch.uint8, device=device))

    def _planned(self, sizes: Mapping[str, int]) -> Addresses:
        return step_memory.addresses_of(self._graph, registry.target_of(self._device), sizes)

    def rows(self) -> list[dict[str, Any]]:
        """All steps of a second run: the first one leaves what libraries keep for themselves."""
        found = []
        target = registry.target_of(self._device)
        for drawn in (False, True):
            peak = (step_memory.step_peak if drawn else step_memory.peak)(self._graph, target, self._addresses)
            for name in PROMPTS:
                program = Sized(self._program, self._graph)
                steps = [list(self._run(program, name, drawn)) for _ in range(2)][1]
                # What has an address takes what was planned; all else is measured.
                placed = [self._planned(step.sizes).num_bytes for step in steps]
                row = _row(name, drawn, steps, placed, peak)
                print(_line(self._name, row), flush=True)
                found.append(row | self._explained(row, name))
        return found

    def drawing(self) -> dict[int, float]:
        """Bytes that drawing tokens holds for each logit, for so many rows."""
        made = {value.name: value.type for step in self._graph.main for value in step.outputs}
        logits = made[self._graph.outputs["logits"]]
        sample = registry.resolve("precast.sample", SAMPLE_VERSION, self._device)
        found = {}
        for count in (1, 2, 3, 8, 16, 27, 28, 40, 64):
            rows = torch.randn(
                count, int(symbols.evaluate(logits.shape[-1], {"tp": 1, "rank": 0})), device=self._device
            )
            rows = rows.to(BY_NAME[logits.dtype])
            given = {name: torch.full((count,), value, device=self._device) for name, value in _DRAWING.items()}
            given["top_k"] = given["top_k"].int()
            for _ in range(2):
                held = _held(partial(sample, logits=rows, **given))[0]
            found[count] = round(held / rows.numel(), 4)
        return found

    def _run(self, program: Sized, name: str, drawn: bool) -> Iterator[Step]:
        limits = EngineLimits(MAX_SEQS, MAX_TOKENS, MAX_SEQ_LEN)
        runner = Runner(program, self._graph, self._memory, open_device(self._device), limits)
        engine = Engine(runner, self._model, tokenizer_files={}, timeline=Timeline(), reuses_prefixes=False)
        params = SamplingParams(max_tokens=DRAWN, temperature=float(drawn), top_k=50, seed=1, ignore_eos=True)
        for lengths in PROMPTS[name]:
            for length in lengths:
                engine.submit([3 + i % 997 for i in range(length)], params)
            program.sizes = {}
            while program.sizes.get("T", 0) != program.sizes.get("B", 1):  # until all of them decode
                yield _step(engine, program, drawn)
        while engine.has_work:
            yield _step(engine, program, drawn)

    def _explained(self, row: dict[str, Any], name: str) -> dict[str, Any]:
        """The ops where the prediction has its peak; for a row that breaks the claim, those predicted wrong."""
        is_below = row["lowest_ratio_of_all_steps"] < 1
        sizes = row["lowest"]["sizes"] if is_below else row["sizes"]
        largest = step_memory.largest_moments(self._graph, registry.target_of(self._device), sizes, 4)
        found: dict[str, Any] = {"largest": [f"{size} {at.path} {at.node.op}" for size, at in largest]}
        if is_below or (row["claimed"] and row["predicted_over_measured"] > ABOVE):
            watched = WatchedOps(self._graph, self._tensors, self._device)
            program = Sized(watched, self._graph)
            for _ in self._run(program, name, False):
                if program.sizes == sizes:
                    break
            found["mispredicted"] = watched.mispredicted(sizes)
        return found


def _place(folder: Path, family: str) -> Path:
    return folder / f"{family.replace(' ', '_')}.bundle"


def _step(engine: Engine, program: Sized, drawn: bool) -> Step:
    """One step: what all of it holds where tokens are drawn, else what the program holds."""
    held = _held(engine.step)
    return Step(program.sizes, *(held if drawn else program.held))


def _held(run: Callable[[], object]) -> tuple[int, int]:
    """The bytes that were held at most beyond those before: of the allocator's blocks, and of what it was asked for."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()
    run()
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()
    blocks, asked = (
        after[f"{kind}_bytes.all.peak"] - before[f"{kind}_bytes.all.current"] for kind in ("allocated", "requested")
    )
    return blocks, asked


def _row(name: str, drawn: bool, steps: list[Step], placed: Sequence[int], peak: Expr) -> dict[str, Any]:
    """Of the steps with the row's number of tokens that whose prediction is lowest beside the measured; or of all."""
    tokens = name.split()[0]
    predicted = [own + symbols.evaluate(peak, step.sizes) for own, step in zip(placed, steps, strict=True)]
    measured = [own + step.bytes for own, step in zip(placed, steps, strict=True)]
    ratios = [said / found for said, found in zip(predicted, measured, strict=True)]
    fitting = [i for i, step in enumerate(steps) if not tokens.isdigit() or step.sizes["T"] == int(tokens)]
    chosen, lowest = min(fitting, key=lambda i: ratios[i]), min(range(len(steps)), key=lambda i: ratios[i])
    return {
        "row": name,
        "tokens": "drawn" if drawn else "greedy",
        "claimed": name in CLAIMED,
        "sizes": steps[chosen].sizes,
        "placed_bytes": placed[chosen],
        "predicted_bytes": predicted[chosen],
        "measured_bytes": measured[chosen],
        "asked_bytes": steps[chosen].asked,
        "predicted_over_measured": round(ratios[chosen], 4),
        "steps": len(steps),
        "lowest_ratio_of_all_steps": round(min(ratios), 4),
        "lowest": steps[lowest]._asdict() | {"placed": placed[lowest], "predicted": predicted[lowest]},
    }


def _line(family: str, row: dict[str, Any]) -> str:
    """A row as it is printed: MiB predicted and measured, the ratio, the lowest one of all steps."""
    predicted, measured = (row[f"{name}_bytes"] / (1 << 20) for name in ("predicted", "measured"))
    ratios = f"{row['predicted_over_measured']:.4f} (lowest {row['lowest_ratio_of_all_steps']:.4f})"
    return f"{family:18} {row['row']:11} {row['tokens']:6} {predicted:10.3f} {measured:10.3f} {ratios}"


_DRAWING: dict[str, float | int] = {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "min_p": 0.1, "seeds": 1, "steps": 1}


def main() -> None:
    """One of the two halves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    halves = parser.add_mutually_exclusive_group(required=True)
    halves.add_argument("--prepare", type=Path, metavar="DIR")
    halves.add_argument("--measure", type=Path, metavar="DIR")
    parser.add_argument("--family", choices=FAMILIES, help="this one only")
    parser.add_argument("--out", type=Path, default=harness.RESULTS / "activations.json")
    arguments = parser.parse_args()
    if arguments.prepare:
        prepare(arguments.prepare)
    else:
        harness.write(arguments.out, "activations", measure(arguments.measure, arguments.family))


if __name__ == "__main__":
    main()
