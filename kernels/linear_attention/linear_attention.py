"""linear_attention@1 and stateful_linear_attention@1, for each head:

    S[t] = exp(decay[t]) * S[t - 1] + k[t] v[t]^T        y[t] = scale * q[t] S[t]

S [D, E] is the state; `decay` is one number for a head, for a token's head, or for each of its D rows; without it
nothing decays. Packed sequences and slots: `precast.kernels.states`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from precast.kernels.forms import form_specs, forms
from precast.kernels.linear_attention.step import step, token_decays
from precast.kernels.spec import Draw, Sample
from precast.kernels.states import Slots, bounds_of, one_by_one, sequence_samples, spoiled, state_sample


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor | None, held: Slots, scale: float
) -> torch.Tensor:
    """`q`, `k` [1, T, H, D], `v` [1, T, H, E], state [H, D, E] float32; [1, T, H, E] in q's dtype.

    `decay` [H], [1, T, H] or [1, T, H, D], the logarithm of the factor, at most 0. Computed in float32, rounded once.
    """

    def sequence(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = []
        for t in range(len(q)):
            y, state = step(q[t] * scale, k[t], v[t], decay[t], state)
            rows.append(y)
        return torch.stack(rows), state

    out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    return one_by_one(sequence, (q, k, v, token_decays(decay, v)), out, held)


linear_attention, stateful_linear_attention = forms("linear_attention", _attend)


def _samples(draw: Draw) -> Iterator[Sample]:
    heads, size, value = 3, 8, 5
    for i, (sequences, padding, nameless) in enumerate(sequence_samples()):
        end = bounds_of(sequences)[-1]
        tokens = end + padding
        shapes = ((heads,), (1, tokens, heads), (1, tokens, heads, size))
        # Steep decays too: what is gone is gone, without overflow on the way.
        decay = -draw.uniform(*shapes[i % 3], high=(0.5, 30.0)[i % 2], dtype=torch.float32)
        yield {
            "q": spoiled(draw.normal(1, tokens, heads, size), end),
            "k": spoiled(draw.normal(1, tokens, heads, size), end),
            "v": spoiled(draw.normal(1, tokens, heads, value), end),
            "decay": decay if decay.dim() == 1 else spoiled(decay, end),
            **state_sample(draw, sequences, nameless, (heads, size, value), torch.float32),
            "scale": size**-0.5,
        }
    sequences = ((5, 9), (1, 1))
    fused = draw.normal(1, 6, 2, 24, scale=0.5)
    yield {
        "q": fused[..., :8],
        "k": fused[..., 8:16],
        "v": fused[..., 16:],
        "decay": None,
        **state_sample(draw, sequences, (), (2, 8, 8), torch.float32),
        "scale": 1.0,
    }


LINEAR_ATTENTION, STATEFUL_LINEAR_ATTENTION = form_specs(
    "linear_attention",
    axes={"q": "1 T H D", "k": "1 T H D", "v": "1 T H E", "decay": "..."},
    state="H D E",
    result="1 T H E",
    reference=(linear_attention, stateful_linear_attention),
    samples=_samples,
)
