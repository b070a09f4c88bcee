"""compress@1 and stateful_compress@1: the entry of a block of `rate` tokens, at the last of them; zeros at the others.

    y[t, d] = sum_j p[j, d] * kv[t - W + 1 + j, d]        p = softmax_j(gate[t - W + 1 + j, d] + bias[j, d])

for tokens t at positions `rate - 1`, `2 * rate - 1`, ... of their sequence; each channel by itself. `W = rate`, if `kv`
has as many channels as `bias`. If it has twice as many, blocks overlap: `W = 2 * rate`, and the first half of `j`, the
block before, is read from the first half of `kv`'s and `gate`'s channels, the second half of `j` from the other one. A
sequence's first block has none before it: `p = 0` there.

state[slot] = kv and gate of the last W tokens, oldest first; of tokens before a sequence's first it holds zeros. The
oldest of them is in no block with the next token; with it states are as large as blocks are, and pages of both divide a
slab well. Packed sequences and slots: `precast.kernels.stateful.walks`.

It is the compression of DeepSeek-V4, without norm and rotation: equations 9 to 12 of its report with overlap, 20 to 23
without.
"""

from __future__ import annotations

import torch

from precast.kernels.stateful.forms import form_specs, forms
from precast.kernels.stateful.walks import Slots, computed_in, one_by_one


def _compress(kv: torch.Tensor, gate: torch.Tensor, bias: torch.Tensor, held: Slots) -> torch.Tensor:
    """`kv`, `gate` [1, T, C], `bias` [W, D], C of D or 2 D, state [2, W, C] in kv's dtype; [1, T, D] in kv's dtype.

    Computed in float32, rounded once.
    """
    width, size = bias.shape
    overlaps = kv.shape[2] != size
    rate = width // 2 if overlaps else width
    offset = bias.to(computed_in(kv)).T

    def sequence(
        own: torch.Tensor, own_gate: torch.Tensor, place: torch.Tensor, before: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        line = torch.cat((before, torch.stack((own, own_gate))), dim=1)
        y = own.new_zeros((len(own), size))
        ends = ((place + 1) % rate == 0).nonzero()[:, 0]
        seen = line[:, 1:].unfold(1, width, 1)[:, ends]  # [2, blocks, C, W]
        if overlaps:
            seen = torch.cat((seen[:, :, :size, :rate], seen[:, :, size:, rate:]), dim=-1)
        scores = seen[1] + offset
        if overlaps:
            scores[place[ends] < rate, :, :rate] = -torch.inf
        y[ends] = (scores.softmax(dim=-1) * seen[0]).sum(dim=-1)
        return y, line[:, len(own) :]

    return one_by_one(sequence, (kv, gate, _places(kv, held, rate)), kv.new_zeros((*kv.shape[:2], size)), held)


def _places(kv: torch.Tensor, held: Slots, rate: int) -> torch.Tensor:
    """[1, T]: where in its block a token stands, and `rate` more if there is a block before."""
    places = torch.zeros(kv.shape[:2], dtype=torch.int64, device=kv.device)
    bounds, lengths = held.cu_seqlens.tolist(), held.kv_lens.tolist()
    for first, end, length in zip(bounds, bounds[1:], lengths, strict=False):
        positions = torch.arange(length - (end - first), length, device=kv.device)
        places[0, first:end] = torch.where(positions < rate, positions, rate + positions % rate)
    return places


compress, stateful_compress = forms("compress", _compress)


COMPRESS, STATEFUL_COMPRESS = form_specs(
    "compress",
    axes={"kv": "1 T C", "gate": "1 T C", "bias": "J D"},
    state="I J C",
    result="1 T D",
    reference=(compress, stateful_compress),
)
