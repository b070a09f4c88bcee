"""sample@1 and sample@2: one token for each row of logits, the same whatever other rows are in the batch.

A row with temperature 0 takes its largest logit, the first of them if several are equal. Any other row, with
x[i] = (logits[i] - max(logits)) / temperature, keeps the tokens that pass all filters:

1. min_p: x[i] >= log(min_p), that is, a probability of at least min_p times the largest; 0: off.
2. top_k: x[i] at least the top_k-th largest, so that equals of the last are kept; 0: off.
3. top_p: of those that passed 1 and 2, sorted by x (equals by index), the shortest run from the top whose
   probability reaches top_p; 1: off. The first always passes.

It takes the largest of x[i] + g[i] among them, where g is Gumbel noise of (seed, step, i): this draws token i with
its probability among those kept.

The versions differ in rows from which nothing can be drawn. In version 2 a row that has a NaN, or no finite logit at
all, gives -1, which is no token: whatever computed it is broken, and its request can't go on. In version 1 a row of
nothing but -inf gives token 0, and so may one that has a NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from precast.kernels.calls import implements
from precast.kernels.dtypes import FLOAT
from precast.kernels.sampling.limits import MAX_SORTED
from precast.kernels.sampling.noise import gumbel
from precast.kernels.spec import OpSpec

# Weights are summed as integers of 2^-40, so that a sum is the same in any order.
_ONE = 2.0**40


class Parameters(NamedTuple):
    """One of each for every row [R]: float32, `top_k` int32, `seeds` and `steps` int64."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor
    steps: torch.Tensor


@implements("sample")
def sample(logits: torch.Tensor, parameters: Parameters) -> torch.Tensor:
    """Token ids [R] int64 from `logits` [R, V]. Nothing is read back to the host."""
    return torch.cat([_drawn(*part) for part in _parts(logits, parameters)])


@implements("sample", version=2)
def sample_2(logits: torch.Tensor, parameters: Parameters) -> torch.Tensor:
    """As `sample`; -1 where a row has a NaN or no finite logit."""
    return torch.cat([marked(part, _drawn(part, own)) for part, own in _parts(logits, parameters)])


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """What `sample_2` gives for temperature 0, [R] int64, without sorting; `logits` [R, V]."""
    return torch.cat([marked(part, part.argmax(-1)) for part in logits.split(_rows(logits))])


def marked(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """`tokens` [R], -1 where a row of `logits` [R, V] has a NaN or no finite one."""
    # The least magnitude is NaN if any is, and infinite if all are.
    return torch.where(logits.abs().amin(-1).isfinite(), tokens, -1)


def _parts(logits: torch.Tensor, parameters: Parameters) -> Iterator[tuple[torch.Tensor, Parameters]]:
    for each in zip(*(x.split(_rows(logits)) for x in (logits, *parameters)), strict=True):
        yield each[0], Parameters(*each[1:])


def _rows(logits: torch.Tensor) -> int:
    """As many rows at a time as bound what a step holds."""
    return max(1, MAX_SORTED // max(1, logits.shape[1]))


def _drawn(logits: torch.Tensor, parameters: Parameters) -> torch.Tensor:
    temperature, top_k, top_p, min_p, seeds, steps = parameters
    x = scaled(logits, temperature)
    kept = passed(x, top_k, top_p, min_p)
    drawn = pick(x.masked_fill(~kept, float("-inf")), seeds, steps)
    return torch.where(temperature > 0, drawn, logits.argmax(-1))


def scaled(logits: torch.Tensor, temperature: torch.Tensor, tops: torch.Tensor | None = None) -> torch.Tensor:
    """(logits - max) / temperature in float32 [R, V]: at most 0, never NaN for logits that aren't; rows with
    temperature 0 are not divided. `tops` [R]: the largest of rows of which `logits` are a part."""
    largest = torch.finfo(torch.float32).max
    # The bound on both sides keeps the difference from being inf - inf.
    x = logits.float().clamp(max=largest)
    top = x.amax(-1, keepdim=True) if tops is None else tops.float()[:, None].clamp(max=largest)
    x = x - top.clamp(min=-largest)
    return x / torch.where(temperature > 0, temperature, 1.0)[:, None]


def passed(x: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Which tokens pass the three filters; `x` [R, V] from `scaled`; [R, V] bool."""
    size = x.shape[1]
    ordered, index = torch.sort(x, dim=-1, descending=True, stable=True)
    last = torch.where(top_k > 0, top_k, size).clamp(max=size).long() - 1
    kept = (ordered >= min_p.log()[:, None]) & (ordered >= ordered.gather(1, last[:, None]))
    weights = (ordered.exp().double() * _ONE).round().long() * kept
    total = weights.sum(-1, keepdim=True)
    before = weights.cumsum(-1) - weights
    kept &= (before.double() < top_p.double()[:, None] * total) | (top_p >= 1)[:, None]
    kept[:, 0] = True
    return torch.zeros_like(kept).scatter_(1, index, kept)


def pick(x: torch.Tensor, seeds: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """A token for each row of `x` [R, V], with probability in proportion to exp(x); [R] int64."""
    return (x + gumbel(seeds, steps, x.shape[1])).argmax(-1)


_ROW = {"temperature": torch.float32, "top_k": torch.int32, "top_p": torch.float32, "min_p": torch.float32,
        "seeds": torch.int64, "steps": torch.int64}  # fmt: skip


def _spec(version: int, reference: Callable[..., Any]) -> OpSpec:
    return OpSpec(
        name="precast.sample",
        version=version,
        axes={"logits": "R V"} | dict.fromkeys(_ROW, "R"),
        results={"tokens": "R"},
        dtypes={"logits": FLOAT} | {name: (dtype,) for name, dtype in _ROW.items()},
        reference=reference,
    )


SAMPLE = _spec(1, sample)
SAMPLE_2 = _spec(2, sample_2)
