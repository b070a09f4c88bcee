"""What ranks with parts of the vocabulary draw; a module of its own, which processes of a test import."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
from gpu_ranks import group_of
from sampling_cases import FILTERS, arguments, logits_of
from torch import distributed

from precast.kernels import registry
from precast.kernels.choices import fastest
from precast.kernels.collectives.group import Group
from precast.kernels.collectives.processes import connect
from precast.kernels.collectives.together import run_ranks
from precast.kernels.sampling.parts import VocabularyPart, sample_parts
from precast.kernels.sampling.sample import Parameters
from precast.loader.run.drawing import sampler_on

ODD = 301
"""Tokens of a vocabulary that ranks can't divide."""


def part_of(group: Group, size: int) -> VocabularyPart:
    return VocabularyPart(group, size, -(-size // group.size))


def parts_of(logits: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    """Each rank's columns; in the place of tokens that there aren't, numbers larger than all others."""
    columns = -(-logits.shape[1] // ranks)
    filled = torch.cat((logits, logits.new_full((len(logits), ranks * columns - logits.shape[1]), 1000.0)), 1)
    return list(filled.split(columns, 1))


def sampled(ranks: int, asked: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """What each of so many simulated ranks draws."""
    logits, parameters = asked["logits"], Parameters(**{name: x for name, x in asked.items() if name != "logits"})
    parts = parts_of(logits, ranks)
    return run_ranks(ranks, lambda group: sample_parts(parts[group.rank], parameters, part_of(group, logits.shape[1])))


GPU_CASES = [(1, 128_256, torch.bfloat16), (24, 50_257, torch.bfloat16), (64, 1001, torch.float16),
             (20, 300, torch.float32)]  # fmt: skip
"""Rows, tokens, dtype."""


def tokens_of_gpus(rank: int, size: int, folder: Path) -> None:
    """One of several GPUs: what it draws from parts, eagerly and in replays, and from all logits; to a file."""
    group = group_of(rank, size, folder)
    on, found = torch.device("cuda", rank), []
    all_of_it = registry.function_of(fastest("precast.sample", 2, registry.target_of(on)))
    for count, vocabulary, dtype in GPU_CASES:
        part = part_of(group, vocabulary)
        sampler = sampler_on(part, dtype, 64)
        assert sampler is not None
        cases = list(logits_of(count, vocabulary, dtype))
        asked = {name: x.to(on) for name, x in arguments(cases[0][1].clone(), FILTERS).items()}
        own, out = parts_of(asked["logits"], size)[rank].clone(), torch.empty(count, dtype=torch.int64, device=on)
        given = asked | {"logits": own}
        sampler(**given, out=out)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            sampler(**given, out=out)
        for seed, (name, logits) in enumerate(cases):
            turned = FILTERS[seed:] + FILTERS[:seed]
            for key, value in arguments(logits, turned, seed=seed).items():
                asked[key].copy_(value)
            own.copy_(parts_of(asked["logits"], size)[rank])
            out.fill_(-7)
            if seed % 2:
                sampler(**given, out=out)
            else:
                graph.replay()
            found.append((name, count, vocabulary, out.tolist(), all_of_it(**asked).tolist()))
    torch.save(found, folder / f"{rank}.pt")
    group.all_reduce(torch.empty(8, device=on), torch.ones(8, device=on))  # nobody leaves before all are done
    torch.cuda.synchronize()


def tokens_of_processes(rank: int, size: int, folder: Path) -> None:
    """One of several processes over gloo; what it drew goes to a file."""
    store = distributed.FileStore(str(folder / "store"), size)
    group = connect(store, rank, size, torch.device("cpu"), timedelta(minutes=2))
    found = []
    for _, logits in logits_of(len(FILTERS), ODD, torch.bfloat16):
        asked = arguments(logits, FILTERS)
        parameters = Parameters(**{name: x for name, x in asked.items() if name != "logits"})
        found.append(sample_parts(parts_of(logits, size)[rank], parameters, part_of(group, ODD)))
    torch.save(found, folder / f"{rank}.pt")
    group.all_reduce(torch.ones(1), torch.ones(1))  # nobody leaves before all have what they need
