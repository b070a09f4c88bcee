"""precast.sample@2 where each rank has the logits of a part of the vocabulary: the same tokens, bit for bit.

Ranks send each other what decides, not logits: the largest of their part and its index; of rows that are drawn the best
score; with top_k the few tokens that may pass. Rows that have top_p alone are put together whole, and no others.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from precast.kernels.collectives.group import Group
from precast.kernels.sampling.limits import MAX_SORTED
from precast.kernels.sampling.noise import gumbel, gumbel_of
from precast.kernels.sampling.sample import Parameters, passed, pick, scaled


class VocabularyPart(NamedTuple):
    """A rank's tokens of a vocabulary: columns of its logits, of which those beyond the last token are nobody's."""

    group: Group
    size: int
    """Tokens of the vocabulary."""
    columns: int
    """Of each rank's logits."""

    @property
    def first(self) -> int:
        """The rank's first token."""
        return self.group.rank * self.columns

    @property
    def num_tokens(self) -> int:
        """How many of its columns are tokens: one at least."""
        return min(self.columns, self.size - self.first)


def whole(logits: torch.Tensor, part: VocabularyPart) -> torch.Tensor:
    """All ranks' logits [R, V], of those of each [R, columns]."""
    return torch.cat(list(_all(logits, part)), 1)[:, : part.size]


def sample_parts(logits: torch.Tensor, parameters: Parameters | None, part: VocabularyPart) -> torch.Tensor:
    """Token ids [R] int64 from each rank's logits [R, columns]: what `sample_2` gives for all; all ranks call it.

    The parameters, the same on all ranks, lie in host memory; None: all rows are greedy.
    """
    own = logits[:, : part.num_tokens]
    least = own.abs().amin(-1)  # NaN if any is, and infinite if all are
    tops, index, least = _best(own.double(), part, least)
    tokens = torch.where(least.isfinite(), index, -1)
    if parameters is None:
        return tokens
    temperature, top_k, top_p, min_p, seeds, steps = parameters
    is_listed = (top_k > 0) & (top_k < part.size)
    # Where min_p lets none pass, the likeliest is kept.
    is_drawn = (temperature > 0) & (tokens >= 0) & (is_listed | (min_p <= 1))
    is_shared = is_drawn & ~is_listed & (top_p < 1)
    for rows in (is_drawn & ~is_listed & ~is_shared).nonzero()[:, 0].split(_rows(part)):
        x = scaled(own[rows], temperature[rows], tops[rows])
        x = x.masked_fill(x < min_p[rows].log()[:, None], float("-inf"))
        scores = x + gumbel(seeds[rows], steps[rows], part.num_tokens, part.first)
        tokens[rows] = _best(scores.double(), part)[1]
    for row in (is_drawn & is_listed).nonzero()[:, 0].tolist():
        chosen = slice(row, row + 1)
        x, ids = _candidates(scaled(own[chosen], temperature[chosen], tops[chosen]), int(top_k[row]), part)
        kept = passed(x, top_k[chosen], top_p[chosen], min_p[chosen])
        scores = x.masked_fill(~kept, float("-inf")) + gumbel_of(seeds[chosen], steps[chosen], ids)
        tokens[row] = ids[0, scores.argmax()]
    for rows in is_shared.nonzero()[:, 0].split(_rows(part)):
        x = scaled(whole(logits[rows], part), temperature[rows])
        kept = passed(x, top_k[rows], top_p[rows], min_p[rows])
        tokens[rows] = pick(x.masked_fill(~kept, float("-inf")), seeds[rows], steps[rows])
    return tokens


def _rows(part: VocabularyPart) -> int:
    """As many at a time as bound what is held."""
    return max(1, MAX_SORTED // part.size)


def _all(x: torch.Tensor, part: VocabularyPart) -> torch.Tensor:
    """What all ranks have, [ranks, *x.shape]."""
    found = x.new_empty(part.group.size, *x.shape)
    part.group.all_gather(found, x.contiguous())
    return found


def _best(
    values: torch.Tensor, part: VocabularyPart, least: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of all ranks' float64 values [R, tokens]: the largest, and the first token that has it; and the least `least`."""
    index = values.argmax(-1)
    best = values.gather(1, index[:, None])[:, 0]
    said = torch.stack((best, (index + part.first).double(), (best if least is None else least).double()))
    found = _all(said, part)
    first = found[:, 0].argmax(0, keepdim=True)
    return found[:, 0].gather(0, first)[0], found[:, 1].gather(0, first)[0].long(), found[:, 2].amin(0)


def _candidates(x: torch.Tensor, top_k: int, part: VocabularyPart) -> tuple[torch.Tensor, torch.Tensor]:
    """The x of all tokens of a row that may be among the `top_k` largest, and which they are: float32, int64 [1, N].

    `x` [1, tokens] are a rank's. Those of each rank that are as large as the last of its own `top_k`, by their indices.
    """
    last = x.topk(min(top_k, x.shape[1])).values[:, -1:]
    ids = (x >= last)[0].nonzero()[:, 0]
    counts = _all(torch.tensor([len(ids)]), part)[:, 0]
    said = x.new_zeros(2, int(counts.max()), dtype=torch.float64)
    said[:, : len(ids)] = torch.stack((x[0, ids].double(), (ids + part.first).double()))
    found = torch.cat([each[:, :count] for each, count in zip(_all(said, part), counts.tolist(), strict=True)], 1)
    return found[:1].float(), found[1:].long()
