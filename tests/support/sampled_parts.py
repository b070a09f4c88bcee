"""What ranks with parts of the vocabulary draw; a module of its own, which processes of a test import."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
from sampling_cases import FILTERS, arguments, logits_of
from torch import distributed

from precast.kernels.collectives.group import Group
from precast.kernels.collectives.processes import connect
from precast.kernels.collectives.together import run_ranks
from precast.kernels.sampling.parts import VocabularyPart, sample_parts
from precast.kernels.sampling.sample import Parameters

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
