"""stateful_causal_conv@1: as causal_conv, with the K - 1 tokens before this step's in a state.

state[slot, c] = x[t - K + 2 .. t + 1, c], oldest first, where t is the sequence's last token; of tokens before its
first it holds zeros. Packed sequences and slots: `precast.kernels.states`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional

from precast.ir.ops.rows_states import CONV_ACTIVATIONS
from precast.kernels.causal_conv import gathered
from precast.kernels.dtypes import FLOAT
from precast.kernels.spec import PRODUCT, Draw, OpSpec, Sample
from precast.kernels.states import (
    METADATA,
    Slots,
    bounds_of,
    computed_in,
    one_by_one,
    sequence_samples,
    spoiled,
    state_sample,
)


def stateful_causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    slots: torch.Tensor,
    cu_seqlens: torch.Tensor,
    kv_lens: torch.Tensor,
    *,
    activation: str = "none",
) -> torch.Tensor:
    """`x` [1, T, C], `weight` [C, K], `bias` [C], `state` [P, C, K - 1] in x's dtype; [1, T, C] in x's dtype.

    Metadata is int32: `slots`, `kv_lens` [B], `cu_seqlens` [B + 1]. Computed in float32, rounded once. Raises
    ValueError for an activation that isn't none or silu.
    """
    return convolve(x, weight, bias, Slots(state, slots, cu_seqlens, kv_lens), activation)


def convolve(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, held: Slots, activation: str
) -> torch.Tensor:
    """The formula, sequence by sequence, for both forms."""
    if activation not in CONV_ACTIVATIONS:
        raise ValueError(f"activation: expected one of {', '.join(CONV_ACTIVATIONS)}, found {activation!r}")
    taps = weight.to(computed_in(x)).unsqueeze(1)
    offset = None if bias is None else bias.to(taps.dtype)

    def sequence(own: torch.Tensor, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        line = torch.cat((before, own.T), dim=1)
        y = functional.conv1d(line[None], taps, offset, groups=len(line))[0].T
        return functional.silu(y) if activation == "silu" else y, line[:, len(own) :]

    return one_by_one(sequence, (x,), torch.zeros_like(x, memory_format=torch.contiguous_format), held)


def _samples(draw: Draw) -> Iterator[Sample]:
    for i, (sequences, padding, nameless) in enumerate(sequence_samples()):
        channels, width = (6, 4) if i % 2 else (5, 3)
        end = bounds_of(sequences)[-1]
        yield {
            "x": spoiled(draw.normal(1, end + padding, channels), end),
            "weight": draw.normal(channels, width),
            "bias": draw.normal(channels) if i % 3 else None,
            **state_sample(draw, sequences, nameless, (channels, width - 1), draw.dtype),
            "activation": "silu" if i % 2 else "none",
        }
    # One tap needs no state; a slice of a fused product; weights in float32.
    sequences = ((3, 3), (2, 8))
    yield {
        "x": draw.normal(1, 5, 4),
        "weight": draw.normal(4, 1),
        "bias": None,
        **state_sample(draw, sequences, (), (4, 0), draw.dtype),
        "activation": "silu",
    }
    yield {
        "x": draw.normal(1, 5, 12)[..., 4:8],
        "weight": draw.normal(4, 4, dtype=torch.float32),
        "bias": draw.normal(4, dtype=torch.float32),
        **state_sample(draw, sequences, (), (4, 3), draw.dtype),
    }


STATEFUL_CAUSAL_CONV = OpSpec(
    name="precast.stateful_causal_conv",
    axes={
        "x": "1 T C",
        "weight": "C J+1",
        "bias": "C",
        "state": "P C J",
        "slots": "B",
        "cu_seqlens": "B+1",
        "kv_lens": "B",
    },
    results={"y": "1 T C"},
    dtypes={"x": FLOAT, "weight": FLOAT, "bias": FLOAT, "state": FLOAT} | dict.fromkeys(METADATA, (torch.int32,)),
    reference=stateful_causal_conv,
    samples=_samples,
    tolerances=PRODUCT,
    implementations={
        "cpu": lambda: gathered.stateful_causal_conv,
        "cuda": lambda: gathered.stateful_causal_conv,
    },
)
