"""Routes a Hugging Face model's attention to `precast.attention` while the model is traced.

transformers lets an attention implementation be registered by name, together with the function that makes its
masks. Ours finds out which keys the model's mask function lets a query see. What `find_reach` doesn't know
is refused; else the mask is the result of `precast_trace.causal_mask`, an op that exists in traces alone: a routed
attention knows it again, and the pass `match_attention` finds it where a model writes its attention out. A mask that
a model makes for itself never passes for one of ours.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel, masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from precast.builder.capture.reach import Reach, find_reach
from precast.builder.graph.nodes import largest
from precast.builder.replaced import replaced
from precast.ir.errors import BuildError
from precast.kernels.attention.attend import probabilities, visible_keys

IMPLEMENTATION = "precast"

_IGNORED_ARGUMENTS = {
    # arguments of attention calls that don't change the result of one causal forward pass
    "dropout", "is_causal", "use_cache", "output_attentions", "output_hidden_states", "position_ids",
    "cache_position", "return_dict", "sliding_window", "position_embeddings", "past_key_values", "logits_to_keep",
    "deterministic", "output_router_logits",
}  # fmt: skip


_SIZES = range(1, 2**63)
"""Of windows and chunks, in tokens."""


@dataclasses.dataclass
class Trace:
    """What the routed functions need to know of the trace in progress."""

    cu_seqlens: torch.Tensor
    rope_lengths: torch.Tensor
    max_seq_len: int
    masks: list[tuple[torch.Tensor, Reach | BuildError]] = dataclasses.field(default_factory=list)
    """The masks made in this trace, with what they let queries see, or why they can't be used."""
    paddings: list[torch.Tensor] = dataclasses.field(default_factory=list)
    """The padding masks that the model made for itself, and where it says that there is text; they must turn out to be
    true everywhere."""


_current: ContextVar[Trace] = ContextVar("precast_trace")


def current_trace() -> Trace:
    """The trace in progress. Raises LookupError outside of one."""
    return _current.get()


@contextlib.contextmanager
def tracing(trace: Trace) -> Iterator[Trace]:
    """Makes `trace` the current one."""
    token = _current.set(trace)
    try:
        yield trace
    finally:
        _current.reset(token)


@contextlib.contextmanager
def routed_attention() -> Iterator[None]:
    """Registers the implementation, and keeps transformers from looking for packed sequences in the positions, for
    padding before the first chunk, and for blocks of other input than text, whose tokens see each other.

    Sequences are told apart by `cu_seqlens`; the mask function that we look at must be the layer's own, made of
    no tensor of the trace.
    """
    AttentionInterface.register(IMPLEMENTATION, _attention)
    AttentionMaskInterface.register(IMPLEMENTATION, _mask)
    trace_ops()
    chunked, no_padding = masking_utils.chunked_causal_mask_function, torch.zeros(1, dtype=torch.int64)

    def chunked_from_start(chunk_size: Any, left_padding: Any) -> Callable[..., torch.Tensor]:
        return chunked(chunk_size, no_padding) if _is_size(chunk_size) else _refused_chunks

    eager = ALL_MASK_ATTENTION_FUNCTIONS["eager"]
    ALL_MASK_ATTENTION_FUNCTIONS["eager"] = _mask
    try:
        with replaced(
            (masking_utils, "find_packed_sequence_indices", lambda position_ids: None),
            (masking_utils, "chunked_causal_mask_function", chunked_from_start),
            (masking_utils, "blockwise_overlay", _no_blocks),
        ):
            yield
    finally:
        ALL_MASK_ATTENTION_FUNCTIONS["eager"] = eager


def _refused_chunks(*_: Any) -> torch.Tensor:
    """The mask of chunks of no size: transformers' own would take some, such as -1, for another."""
    message = "the config's chunks have no size, expected a number of tokens of at least 1"
    raise BuildError("config-invalid", message, fix="correct attention_chunk_size in the config")


def _no_blocks(block_sequence_ids: torch.Tensor) -> Callable[..., torch.Tensor]:
    """The mask of blocks where there are none: in text, whose ids are negative."""
    current_trace().paddings.append(block_sequence_ids < 0)
    return lambda batch, head, query, key: torch.zeros((), dtype=torch.bool)


def implementation_for(model_class: type[PreTrainedModel]) -> str:
    """Ours, where the model's file asks transformers' interface for its attention; else `eager`: attention written
    out, which `match_attention` finds in the graph."""
    scope = vars(sys.modules[model_class.__module__])
    return IMPLEMENTATION if ALL_ATTENTION_FUNCTIONS in scope.values() else "eager"


def causal_mask(
    cu_seqlens: torch.Tensor, size: int, *, window: int | None, chunk: int | None, dtype: torch.dtype
) -> torch.Tensor:
    """What attention that is written out adds to its scores: `[1, 1, size, size]`, 0 where a query sees a key of its
    own sequence, and the least value of `dtype` elsewhere."""
    at = torch.arange(size, device=cu_seqlens.device)
    sequence = torch.bucketize(at, cu_seqlens[1:].long(), right=True)
    positions = at - cu_seqlens.long()[sequence]
    seen = visible_keys(positions, positions, window, chunk) & (sequence[:, None] == sequence)
    return torch.where(seen, 0.0, torch.finfo(dtype).min).to(dtype)[None, None]


def sparse_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, selected: torch.Tensor, sinks: torch.Tensor | None,
    cu_seqlens: torch.Tensor, *, scale: float,
) -> torch.Tensor:  # fmt: skip
    """Attention over the keys at `selected` [1, T, N], which count all tokens; a key that a query may not see is passed
    over. `q`, `k`, `v` as `precast.attention` takes them."""
    size = q.shape[1]
    mask = causal_mask(cu_seqlens, size, window=None, chunk=None, dtype=torch.float32)[0, 0]
    hidden = torch.ones_like(mask, dtype=torch.bool).scatter(-1, selected[0].long(), False)
    group = q.shape[2] // k.shape[2]
    keys, values = (heads[0].repeat_interleave(group, dim=1) for heads in (k, v))
    scores = torch.einsum("qhd,lhd->qhl", q[0].float(), keys.float()) * scale
    unseen = hidden | (mask < 0)
    shares = probabilities(scores.masked_fill(unseen[:, None], float("-inf")), sinks)
    return torch.einsum("qhl,lhd->qhd", shares, values.float()).to(q.dtype)[None].contiguous()


@cache
def trace_ops() -> torch.library.Library:
    """`torch.ops.precast_trace`, defined once; kept by this function."""
    library = torch.library.Library("precast_trace", "DEF")
    library.define(
        "causal_mask(Tensor cu_seqlens, SymInt size, *, int? window, int? chunk, ScalarType dtype) -> Tensor"
    )
    library.impl("causal_mask", causal_mask, "CompositeExplicitAutograd")
    torch.library.register_fake(
        "precast_trace::causal_mask",
        lambda cu_seqlens, size, *, window, chunk, dtype: cu_seqlens.new_empty((1, 1, size, size), dtype=dtype),
        lib=library,
    )
    library.define(
        "sparse_attention(Tensor q, Tensor k, Tensor v, Tensor selected, Tensor? sinks, Tensor cu_seqlens, *,"
        " float scale) -> Tensor"
    )
    library.impl("sparse_attention", sparse_attention, "CompositeExplicitAutograd")
    torch.library.register_fake(
        "precast_trace::sparse_attention",
        lambda q, k, v, selected, sinks, cu_seqlens, *, scale: q.new_empty((*q.shape[:-1], v.shape[-1])),
        lib=library,
    )
    return library


def _mask(
    *, mask_function: Callable[..., Any], q_length: Any, attention_mask: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32, config: Any = None, **_: Any,
) -> torch.Tensor:  # fmt: skip
    trace = current_trace()
    if attention_mask is not None:
        trace.paddings.append(attention_mask)
    try:
        reach = _reach(mask_function, config)
    except BuildError as error:  # models make masks that no layer uses: refused is one that is used
        mask = torch.ops.precast_trace.causal_mask(trace.cu_seqlens, q_length, window=-1, chunk=None, dtype=dtype)
        trace.masks.append((mask, error))
        return mask
    if reach.chunk is not None and getattr(config, "_attn_implementation", None) == "eager":
        raise BuildError("feature-unsupported", "the model writes out attention over chunks, expected a window or none")
    mask = torch.ops.precast_trace.causal_mask(
        trace.cu_seqlens, q_length, window=reach.window, chunk=reach.chunk, dtype=dtype
    )
    trace.masks.append((mask, reach))
    return mask


def _reach(mask_function: Callable[..., Any], config: Any) -> Reach:
    """`find_reach`; where that fails because of a size in the config, the error names it."""
    try:
        return find_reach(mask_function, current_trace().max_seq_len)
    except (BuildError, OverflowError, RuntimeError, ZeroDivisionError) as error:
        for name in ("sliding_window", "attention_chunk_size"):
            size = getattr(config, name, None)
            if size is not None and not _is_size(size):
                expected = f"expected a number of tokens from 1 to {_SIZES[-1]}"
                message, fix = f"the config's {name} is {size!r}, {expected}", f"correct {name} in the config"
                raise BuildError("config-invalid", message, fix=fix) from error
        raise


def _is_size(size: Any) -> bool:
    return type(size) is int and size in _SIZES


def _attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None, scaling: float | None = None, softcap: float | None = None,
    s_aux: torch.Tensor | None = None, indices: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None, sinks: torch.Tensor | None = None,
    block_indices: torch.Tensor | None = None, **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Query `[1, H, T, D]`, key `[1, K, T, D]`, value `[1, K, T, Dv]` -> `[1, T, H, Dv]`.

    Of the modules in `_BLOCKS` alone: `block_indices` `[1, T, heads, count]`, the blocks of keys that are attended to.
    Of the modules in `_RELATIVE` alone: `position_bias` `[1, H, T, R]`, a number for each query and distance;
    `sinks` `[1, H, T, 1]`, a sink of each query's own.
    """
    where = type(module).__name__
    found = [reach for mask, reach in current_trace().masks if _is_whole(attention_mask, mask)]
    if not found:
        given = "no mask" if attention_mask is None else "a mask of its own"
        raise BuildError(
            "feature-unsupported",
            f"{where} passes {given} to its attention, expected the one that transformers makes for the attention "
            "implementation",
        )
    if isinstance(found[0], BuildError):
        raise found[0]
    if where not in _RELATIVE:
        kwargs |= {"position_bias": position_bias, "sinks": sinks}
    if where not in _BLOCKS:
        kwargs |= {"block_indices": block_indices}
    unknown = {name for name, argument in kwargs.items() if argument is not None} - _IGNORED_ARGUMENTS
    if unknown:
        raise BuildError("feature-unsupported", f"{where} passes {', '.join(sorted(unknown))} to its attention")
    # A query selects as many keys as `indices` has columns, min(limit, T): up to so many tokens attention is full.
    if indices is not None and largest(indices.shape[-1]) < current_trace().max_seq_len:
        return _sparse_attention(where, query, key, value, indices, scaling, softcap, s_aux, found[0]), None
    scale = float(query.shape[-1] ** -0.5 if scaling is None else scaling)
    if where in _BLOCKS and block_indices is not None:
        size, tail = _BLOCKS[where]
        return torch.ops.precast.block_sparse_attention(
            *(heads.transpose(1, 2) for heads in (query, key, value)), block_indices, current_trace().cu_seqlens,
            scale=scale, block_size=getattr(module.indexer, size), tail=tail,
        ), None  # fmt: skip
    if sinks is not None:
        query, key, s_aux = _with_own_sinks(query, key, sinks, scale)
    bias = {} if position_bias is None else {"bias": position_bias.transpose(1, 2)}
    out = torch.ops.precast.attention(
        *(heads.transpose(1, 2) for heads in (query, key, value)), s_aux, current_trace().cu_seqlens,
        scale=scale, window=found[0].window, soft_cap=softcap, chunk=found[0].chunk, **bias,
    )  # fmt: skip
    return out, None


_BLOCKS = {"MiniMaxM3VLAttention": ("block_size", False), "Qwen4ExpTextAttention": ("compress_ratio", True)}
"""Modules whose indexer `attentions` makes select blocks as our ops do: what it calls their size, and whether a query
sees its tail besides, the keys after its last whole block."""
_RELATIVE = {"InklingAttention", "Inkling2SlidingAttention", "Inkling2FullAttention"}
"""Modules whose bias `attentions` makes by distance. That of others has a number for each pair of tokens."""

EXTRA_ELEMENTS = 8
"""Of queries and keys, where one element more says something: heads stay a multiple of what kernels read at once."""


def _with_own_sinks(
    query: torch.Tensor, key: torch.Tensor, sinks: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries and keys whose scores are less by the query's sink, by one element more; sinks of 0 for all heads.

    exp(s) / (sum exp(s) + exp(sink)) is exp(s - sink) / (sum exp(s - sink) + 1).
    """
    shift = sinks.float() / -scale
    rounded = shift.to(query.dtype)
    rest = (shift - rounded.float()).to(query.dtype)  # of half precision: without it the sink would be coarse
    zeros = torch.zeros_like(rounded).expand(*query.shape[:-1], EXTRA_ELEMENTS - 2)
    ones = torch.ones_like(key[..., :1]).expand(*key.shape[:-1], EXTRA_ELEMENTS)
    wide = torch.cat([query, rounded, rest, zeros], dim=-1)
    return wide, torch.cat([key, ones], dim=-1), torch.zeros(query.shape[1], dtype=query.dtype)


def _is_whole(given: torch.Tensor | None, mask: torch.Tensor) -> bool:
    """Whether a layer was given the mask that we made, or a view of all of it."""
    if given is mask:
        return True
    return given is not None and given._base is mask and given.shape == mask.shape and given.storage_offset() == 0


def _sparse_attention(
    where: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, indices: torch.Tensor,
    scaling: float | None, softcap: float | None, s_aux: torch.Tensor | None, reach: Reach,
) -> torch.Tensor:  # fmt: skip
    """As `_attention`, over the keys at `indices` [1, T, N] alone, which count all tokens of a trace: an op of traces,
    of which `match_sparse_attention` makes one of ours."""
    given = {"a soft cap": softcap, "a window": reach.window, "chunks": reach.chunk}
    others = [name for name, argument in given.items() if argument is not None]
    if others:
        message = f"{where} gives {' and '.join(others)} to attention over selected keys, expected none"
        raise BuildError(
            "feature-unsupported", message, fix=f"build with max_seq_len of at most {largest(indices.shape[-1])}"
        )
    return torch.ops.precast_trace.sparse_attention(
        *(heads.transpose(1, 2) for heads in (query, key, value)), indices, s_aux, current_trace().cu_seqlens,
        scale=float(query.shape[-1] ** -0.5 if scaling is None else scaling),
    )  # fmt: skip
