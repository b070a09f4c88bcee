"""stateful_wkv@1, for each channel:

    y[t] = (N[t - 1] + exp(first + k[t]) * v[t]) / (D[t - 1] + exp(first + k[t]))
    N[t] = exp(decay) * N[t - 1] + exp(k[t]) * v[t]        D[t] = exp(decay) * D[t - 1] + exp(k[t])

The state [3, C] holds N / exp(m), D / exp(m) and m, the largest exponent in D. Packed sequences and slots:
`precast.kernels.states`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from precast.kernels.dtypes import FLOAT
from precast.kernels.spec import PRODUCT, Draw, OpSpec, Sample
from precast.kernels.states import METADATA, Slots, bounds_of, one_by_one, sequence_samples, spoiled, state_sample
from precast.kernels.wkv import doubled
from precast.kernels.wkv.step import added, begun, kept, mean, one


def stateful_wkv(
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    first: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
    cu_seqlens: torch.Tensor,
    kv_lens: torch.Tensor,
) -> torch.Tensor:
    """`k`, `v` [1, T, C], `decay` (at most 0), `first` [C], `state` [P, 3, C] float32; [1, T, C] in v's dtype.

    Metadata is int32: `slots`, `kv_lens` [B], `cu_seqlens` [B + 1]. Computed in float32, rounded once.
    """
    return scan(k, v, decay, first, Slots(state, slots, cu_seqlens, kv_lens))


def scan(k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, first: torch.Tensor, held: Slots) -> torch.Tensor:
    """The formula, token by token, for both forms."""

    def sequence(k: torch.Tensor, v: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        sums, rows = begun(state), []
        for t in range(len(k)):
            rows.append(mean(added(sums, 0.0, one(k[t] + first.to(k.dtype), v[t]))))
            sums = added(sums, decay.to(k.dtype), one(k[t], v[t]))
        return torch.stack(rows), kept(sums)

    return one_by_one(sequence, (k, v), v.new_zeros(v.shape), held)


def _samples(draw: Draw) -> Iterator[Sample]:
    channels = 7
    for i, (sequences, padding, nameless) in enumerate(sequence_samples()):
        end = bounds_of(sequences)[-1]
        tokens = end + padding
        states = state_sample(draw, sequences, nameless, (3, channels), torch.float32)
        states["state"][:, 1] = states["state"][:, 1].abs() + 0.5  # a sum of positive numbers
        yield {
            # Exponents beyond what exp can take, too.
            "k": spoiled(draw.normal(1, tokens, channels, scale=(1.0, 60.0)[i % 2]), end),
            "v": spoiled(draw.normal(1, tokens, channels), end),
            "decay": -draw.uniform(channels, high=(0.5, 30.0)[i % 2], dtype=torch.float32),
            "first": draw.normal(channels),
            **states,
        }
    sequences = ((5, 5), (1, 1))
    fused = draw.normal(1, 6, 8)
    yield {
        "k": fused[..., :4],
        "v": fused[..., 4:],
        "decay": -draw.uniform(4),
        "first": draw.normal(4),
        **state_sample(draw, sequences, (), (3, 4), torch.float32),
    }


STATEFUL_WKV = OpSpec(
    name="precast.stateful_wkv",
    axes={
        "k": "1 T C",
        "v": "1 T C",
        "decay": "C",
        "first": "C",
        "state": "P 3 C",
        "slots": "B",
        "cu_seqlens": "B+1",
        "kv_lens": "B",
    },
    results={"y": "1 T C"},
    dtypes=dict.fromkeys(("k", "v", "decay", "first"), FLOAT)
    | {"state": (torch.float32,)}
    | dict.fromkeys(METADATA, (torch.int32,)),
    reference=stateful_wkv,
    samples=_samples,
    tolerances=PRODUCT,
    implementations={"cpu": lambda: doubled.stateful_wkv, "cuda": lambda: doubled.stateful_wkv},
    reads_metadata=True,
)
