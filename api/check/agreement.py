"""Whether a loaded bundle computes what transformers computes: the same logits, the same greedy tokens.

The prompts are unequal, packed into one batch, or arrive one after another and are computed in chunks; transformers
computes each alone.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from precast.ir.artifact import Bundle
from precast.ir.graph.world import unsharded
from precast.ir.memory import caches
from precast.ir.weights.checkpoint import CheckpointFiles
from precast.loader.cache.arena import Arena
from precast.loader.cache.memory import CacheMemory
from precast.loader.cache.tables import PageTables
from precast.loader.engine.params import SamplingParams
from precast.loader.load import load
from precast.loader.program.restore import restore
from precast.loader.run.runner import Runner
from precast.loader.schedule.requests import Chunk, Request, Step
from precast.loader.sizing import EngineLimits
from precast.loader.torch_device import open_device
from precast.loader.torch_load import constant_tensors
from precast.loader.weights.stream import load_weights

if TYPE_CHECKING:
    from precast.loader.engine.engine import Engine

PROMPTS = (
    (5, 9, 70, 33, 12, 88, 3, 41, 100, 7, 64, 20, 11),
    (17,),
    (99, 4, 4, 120, 56, 31, 8, 77, 23, 61, 14, 90, 2, 3, 5),
)
"""Token ids below 121, of which `precast.builder.source.shrink` makes text. 0 and 1 (padding, begin) are left out."""

NUM_TOKENS = 32
CHUNK = 7
"""Tokens that a step computes at most: less than the longer prompts."""

TOLERANCE = 1e-4
"""Of logits in float32, relative: the norm of the difference over the norm of what transformers gives."""

_CACHE_BYTES = 1 << 26


@dataclasses.dataclass(frozen=True)
class Agreement:
    """How far a bundle agrees with transformers. `logits_error` is the largest relative error of the prompts."""

    logits_error: float
    tokens_equal: bool

    @property
    def logits_equal(self) -> bool:
        """Whether all logits are within the tolerance."""
        return self.logits_error < TOLERANCE


def agreement(bundle: Bundle, weights: Path, model: Any) -> Agreement:
    """Compare a bundle with the transformers model whose weights `weights` holds, in float32 on the CPU.

    Logits are compared for all prompts in one packed batch, and for each in chunks; tokens while prompts arrive.

    Raises what loading and running the bundle raise.
    """
    with load(
        bundle, weights=weights, device="cpu", max_num_seqs=3, max_num_tokens=CHUNK, cache_bytes=_CACHE_BYTES
    ) as engine:
        in_chunks = [engine.logits(list(prompt)) for prompt in PROMPTS]
        answers = arrive_one_after_another(engine, PROMPTS, NUM_TOKENS)
    expected = hf_logits(model, PROMPTS)
    error = max(
        relative_error(found, wanted)
        for logits in (in_chunks, run_packed(bundle, weights, PROMPTS))
        for found, wanted in zip(logits, expected, strict=True)
    )
    equal = all(is_greedy(model, prompt, answer) for prompt, answer in zip(PROMPTS, answers, strict=True))
    return Agreement(error, equal)


def run_packed(bundle: Bundle, weights: Path, prompts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """What the graph returns as logits for each token of the prompts, `[T, V]` each, from one step over all of them.

    The caches begin as NaN: what a sequence didn't write must not matter.
    """
    graph, device = unsharded(bundle.graph), open_device("cpu")
    program = restore(graph, device=torch.device("cpu"))
    program.bind(load_weights(graph, bundle.manifest.checkpoint, CheckpointFiles.open(weights), device=device).tensors)
    program.bind(constant_tensors(graph, bundle.constants, device))
    longest = max(map(len, prompts))
    num_slabs = caches.slabs_for(caches.with_slabs(graph.caches), len(prompts), longest, longest)
    memory = CacheMemory(graph.caches, num_slabs, device)
    memory.arena.fill_(0xFF)  # NaN in every floating type
    program.bind(memory.tensors)
    tables = PageTables(memory.plan, Arena(num_slabs))

    def chunk_of(ids: Sequence[int]) -> Chunk:
        request = Request(0, array("q", ids), len(ids) + 1)
        request.table = tables.new_table()
        tables.grow(request.table, len(ids))
        return Chunk(request, len(ids), "all")

    limits = EngineLimits(len(prompts), sum(map(len, prompts)), longest)
    ticket = Runner(program, graph, memory, device, limits).launch(Step([], [chunk_of(ids) for ids in prompts]))
    assert ticket.logits is not None, "a step that draws nothing gives its logits"
    return list(ticket.logits.float().split([len(ids) for ids in prompts]))


def arrive_one_after_another(engine: Engine, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
    """The greedy tokens of each prompt; a prompt arrives when the one before it has given three tokens."""
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    waiting = [list(prompt) for prompt in prompts]
    order = [engine.submit(waiting.pop(0), params)]
    tokens: dict[int, list[int]] = {order[0]: []}
    while engine.has_work:
        for event in engine.step():
            tokens[event.request_id].extend(event.token_ids)
        if waiting and len(tokens[order[-1]]) >= 3:
            order.append(engine.submit(waiting.pop(0), params))
            tokens[order[-1]] = []
    return [tokens[handle] for handle in order]


def hf_logits(model: Any, prompts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """transformers' logits of each sequence, computed alone, `[T, V]`."""
    with torch.no_grad():
        return [model(input_ids=torch.tensor([list(prompt)]), use_cache=False).logits[0].clone() for prompt in prompts]


def is_greedy(model: Any, prompt: Sequence[int], answer: Sequence[int]) -> bool:
    """Whether each token of the answer is the likeliest one after those before it, by transformers without a cache.

    That is what `generate` gives for a model whose cache changes nothing, in one pass instead of one a token. Where two
    tokens are as likely within `TOLERANCE`, either will do: which one is a matter of the machine's arithmetic.
    """
    (logits,) = hf_logits(model, [[*prompt, *answer[:-1]]])
    steps = logits[len(prompt) - 1 :]
    if not answer or len(steps) != len(answer):
        return False
    chosen = steps.gather(1, torch.tensor([list(answer)]).T)[:, 0]
    return bool((steps.amax(1) - chosen <= TOLERANCE * steps.abs().amax(1)).all())


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference over the norm of what was expected; infinite for what isn't finite."""
    error = float((found.double() - expected.double()).norm() / expected.double().norm())
    return error if bool(torch.isfinite(found).all()) else float("inf")
