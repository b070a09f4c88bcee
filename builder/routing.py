"""Routes a Hugging Face model's attention to `precast.attention` while the model is traced.

transformers lets an attention implementation be registered by name, together with the function that makes its
masks. Ours makes no mask tensor: it finds out which keys the model's mask rule lets a query see, and hands that
finding (`CausalMask`) through the layers in the mask's place. What is neither causal nor a causal window is
refused; a mask that a model makes for itself never passes for one of ours.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from transformers import AttentionInterface, masking_utils
from transformers.masking_utils import AttentionMaskInterface

from precast.ir.errors import BuildError

IMPLEMENTATION = "precast"

_IGNORED_ARGUMENTS = {
    # arguments of attention calls that don't change the result of one causal forward pass
    "dropout", "is_causal", "use_cache", "output_attentions", "output_hidden_states", "position_ids",
    "cache_position", "return_dict", "sliding_window", "position_embeddings", "past_key_values", "logits_to_keep",
    "deterministic",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class CausalMask:
    """Which keys a query sees: those before and with it, of which at most the last `window` (None: all)."""

    window: int | None


@dataclasses.dataclass
class Trace:
    """What the routed functions need to know of the trace in progress."""

    cu_seqlens: torch.Tensor
    rope_lengths: torch.Tensor
    max_seq_len: int


_current: ContextVar[Trace] = ContextVar("precast_trace")


def current_trace() -> Trace:
    """The trace in progress. Raises LookupError outside of one."""
    return _current.get()


@contextlib.contextmanager
def tracing(trace: Trace) -> Iterator[None]:
    """Makes `trace` the current one."""
    token = _current.set(trace)
    try:
        yield
    finally:
        _current.reset(token)


@contextlib.contextmanager
def routed_attention() -> Iterator[None]:
    """Registers the implementation, and keeps transformers from looking for packed sequences in the positions.

    Sequences are told apart by `cu_seqlens`; the mask rule that we look at must be the layer's own.
    """
    AttentionInterface.register(IMPLEMENTATION, _attention)
    AttentionMaskInterface.register(IMPLEMENTATION, _mask)
    original = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = original


def _mask(*, mask_function: Callable[..., Any], attention_mask: torch.Tensor | None = None, **_: Any) -> CausalMask:
    if attention_mask is not None:
        raise BuildError("feature-unsupported", "the model passes a padding mask to its own attention")
    return CausalMask(window=find_window(mask_function, current_trace().max_seq_len))


def find_window(mask_function: Callable[..., Any], max_seq_len: int) -> int | None:
    """The window of a mask rule `(batch, head, query, key) -> bool`; None when queries see all keys before them.

    The rule is evaluated for the last query over all keys, which gives the window, and then compared with that
    finding on a grid of small positions and around the window's edge.
    Raises BuildError: `model-unsupported` for a rule that lets a query see later keys, `feature-unsupported` for
    another one that is no causal window.
    """
    with _disable_current_modes():
        zero = torch.zeros((), dtype=torch.int64)
        seen = _evaluate(mask_function, zero, torch.tensor([[max_seq_len - 1]]), torch.arange(max_seq_len)[None])[0]
        count = int(seen.sum())
        window = None if count == max_seq_len else count
        small = torch.arange(min(max_seq_len, 64))
        edge = torch.arange(max(0, count - 3), min(max_seq_len, count + 3))
        positions = torch.unique(torch.cat([small, edge]))
        query, key = positions[:, None], positions[None, :]
        expected = (key <= query) & (query - key < (window or max_seq_len))
        tail = torch.arange(max_seq_len) >= max_seq_len - count
        found = _evaluate(mask_function, zero, query, key).expand(len(positions), len(positions))
        if bool((found & (key > query)).any()):
            raise BuildError(
                "model-unsupported",
                "the model's attention sees tokens that come later, expected a decoder",
                fix="precast builds decoders; encoders and prefix language models are out of its scope",
            )
        if not torch.equal(seen, tail) or not torch.equal(found, expected):
            raise BuildError(
                "feature-unsupported",
                "the model's attention mask is neither causal nor a causal sliding window",
                fix="precast builds full attention and sliding windows; chunked attention is out of its scope",
            )
    return window


def _evaluate(rule: Callable[..., Any], zero: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    result = rule(zero, zero, query, key)
    return torch.as_tensor(result, dtype=torch.bool).expand(torch.broadcast_shapes(query.shape, key.shape))


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: CausalMask | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Query `[1, H, T, D]`, key `[1, K, T, D]`, value `[1, K, T, Dv]` -> `[1, T, H, Dv]`."""
    where = type(module).__name__
    if not isinstance(attention_mask, CausalMask):
        raise BuildError(
            "feature-unsupported",
            f"{where} passes a mask of type {type(attention_mask).__name__} to its attention, expected the one that "
            "transformers makes for the attention implementation",
        )
    unknown = {name for name, argument in kwargs.items() if argument is not None} - _IGNORED_ARGUMENTS
    if unknown:
        raise BuildError("feature-unsupported", f"{where} passes {', '.join(sorted(unknown))} to its attention")
    out = torch.ops.precast.attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        s_aux,
        current_trace().cu_seqlens,
        scale=float(query.shape[-1] ** -0.5 if scaling is None else scaling),
        window=attention_mask.window,
        soft_cap=softcap,
    )
    return out, None
