"""delta_rule@1 and stateful_delta_rule@1, for each value head, with the query and key of its group:

    S' = exp(decay[t]) * S[t - 1]        S[t] = S' + k[t] (beta[t] * (v[t] - k[t] S'))^T        y[t] = scale * q[t] S[t]

S [D, E] is the state; `decay` is one number for a token's head (gated delta rule), or one for each of its D rows
(Kimi delta attention); without it nothing decays. With `normalise`, q and k are first divided by sqrt(sum_d x[d]^2 +
1e-6). Packed sequences and slots: `precast.kernels.states`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from precast.kernels.delta_rule.step import prepared, step
from precast.kernels.forms import form_specs, forms
from precast.kernels.linear_attention.step import token_decays
from precast.kernels.spec import Draw, Sample
from precast.kernels.states import Slots, bounds_of, one_by_one, sequence_samples, spoiled, state_sample


def _apply(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor | None,
    beta: torch.Tensor,
    held: Slots,
    scale: float,
    normalise: bool,
) -> torch.Tensor:
    """`q`, `k` [1, T, K, D], `v` [1, T, H, E], state [H, D, E] float32; [1, T, H, E] in q's dtype.

    H is a multiple of K: value heads of one key head lie side by side. `decay` [1, T, H] or [1, T, H, D], the logarithm
    of the factor, at most 0; `beta` [1, T, H]. Computed in float32, rounded once.
    """

    def sequence(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor,
        state: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q, k = prepared(q, v, normalise) * scale, prepared(k, v, normalise)
        rows = []
        for t in range(len(q)):
            y, state = step(q[t], k[t], v[t], decay[t], beta[t], state)
            rows.append(y)
        return torch.stack(rows), state

    out = q.new_zeros(v.shape)
    return one_by_one(sequence, (q, k, v, token_decays(decay, v), beta), out, held)


delta_rule, stateful_delta_rule = forms("delta_rule", _apply)


def _samples(draw: Draw) -> Iterator[Sample]:
    size, value = 8, 5
    for i, (sequences, padding, nameless) in enumerate(sequence_samples()):
        keys, heads = ((2, 4), (3, 3), (1, 3))[i % 3]
        end = bounds_of(sequences)[-1]
        tokens = end + padding
        shape = (1, tokens, heads, size)[: 4 - i % 2]
        # Steep decays too: what is gone is gone, without overflow on the way.
        decay = -draw.uniform(*shape, high=0.5 if i % 4 < 2 else 30.0, dtype=torch.float32)
        yield {
            "q": spoiled(draw.normal(1, tokens, keys, size), end),
            "k": spoiled(draw.normal(1, tokens, keys, size), end),
            "v": spoiled(draw.normal(1, tokens, heads, value), end),
            "decay": spoiled(decay, end),
            "beta": spoiled(draw.uniform(1, tokens, heads), end),
            **state_sample(draw, sequences, nameless, (heads, size, value), torch.float32),
            "scale": size**-0.5,
            "normalise": True,
        }
    sequences = ((5, 9), (1, 1))
    fused = draw.normal(1, 6, 2, 24, scale=0.3)
    yield {
        "q": fused[..., :8],
        "k": fused[..., 8:16],
        "v": fused[..., 16:],
        "decay": None,
        "beta": draw.uniform(1, 6, 2, high=2.0),
        **state_sample(draw, sequences, (), (2, 8, 8), torch.float32),
        "scale": 1.0,
        "normalise": False,
    }


DELTA_RULE, STATEFUL_DELTA_RULE = form_specs(
    "delta_rule",
    axes={"q": "1 T K D", "k": "1 T K D", "v": "1 T H E", "decay": "...", "beta": "1 T H"},
    state="H D E",
    result="1 T H E",
    reference=(delta_rule, stateful_delta_rule),
    samples=_samples,
)
