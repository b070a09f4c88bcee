"""Routes BLT, whose middle layers take a step for each patch of bytes, for the table of `modules`.

A small model, the patcher, says after which bytes a patch ends. How many patches there are depends on the bytes, so
here each byte stands for the patch that would end with it, and all layers have a row a byte: attention between
patches passes over keys of bytes that end none, and what later bytes see is the last patch that did end. What the rows
of other bytes hold is computed and never seen. Results are those of transformers without a cache; with one, its patcher
sees a step's bytes alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutputWithPast

from precast.builder.capture.rope import depends_on_length
from precast.builder.capture.routing import EXTRA_ELEMENTS, current_trace
from precast.builder.capture.shifts import delayed, ids_before
from precast.builder.replaced import replaced
from precast.ir.errors import BuildError

ops = torch.ops.precast


def _bytes_in_patches(
    module: Any, input_ids: torch.Tensor, position_ids: torch.Tensor, **_: Any
) -> BaseModelOutputWithPast:
    """Bytes, patches of them, and bytes again."""
    _refuse_other_patches(module.config)
    ends = _ends_of_patches(module, input_ids, position_ids)[..., None]  # [1, T, 1]
    begins = (delayed(ends.float(), 1) > 0) | (position_ids[..., None] == 0)
    number = _since(torch.ones_like(begins.float()), begins.float(), "sum") - 1  # of the byte's patch, from 0
    x, patches = _encoded(module, _embedded(module, input_ids), position_ids, begins, number)
    patches = _between(module.global_transformer, patches, ends, number)
    last = _since((~ends).to(patches.dtype), torch.where(ends, patches, torch.zeros_like(patches)), "sum")
    return BaseModelOutputWithPast(last_hidden_state=_decoded(module, x, position_ids, last))


def _encoded(
    module: Any, x: torch.Tensor, position_ids: torch.Tensor, begins: torch.Tensor, number: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes after the first layers [1, T, H], and what each patch is with them up to each byte [1, T, patch]."""
    encoder, window = module.local_encoder, _window(module.config)
    turned = encoder.rotary_emb(x, position_ids)
    patches: list[torch.Tensor] = []
    for index, layer in enumerate(encoder.layers):
        x = layer(x, position_embeddings=turned, window=window)
        if index == len(encoder.layers) - 1 or encoder.config.cross_attn_all_layers:
            largest = _since((~begins).to(x.dtype), x, "max")
            queries = encoder.patch_embedding_projection(largest).split(x.shape[-1], dim=-1)
            attend = encoder.cross_attn_layers[index if encoder.config.cross_attn_all_layers else 0]
            found = _attention_to_own_patch(attend, queries, x, number)
            patches = [query + own for query, own in zip(queries, found, strict=True)]
    return x, torch.cat(patches, dim=-1)


def _between(module: Any, patches: torch.Tensor, ends: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """Patches after the middle layers [1, T, H]. Raises BuildError for rotations that depend on how many there are."""
    kind = module.rotary_emb.rope_type
    if depends_on_length(kind):
        message = f"the rope_type {kind!r} of the config's global_config depends on the number of patches"
        raise BuildError("feature-unsupported", message, fix="serve it with transformers")
    x = module.token_embedding_projection(patches)
    turned = module.rotary_emb(x, number[..., 0].to(torch.int64))
    for layer in module.layers:
        x = layer(x, position_embeddings=turned, ends=ends)
    return x


def _decoded(module: Any, x: torch.Tensor, position_ids: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """Bytes after the last layers [1, T, H], of those after the first and the `last` patch that has ended."""
    decoder, window = module.local_decoder, _window(module.config)
    turned = decoder.rotary_emb(x, position_ids)
    patch = decoder.patch_embedding_projection(last).split(x.shape[-1], dim=-1)
    for index, layer in enumerate(decoder.layers):
        if index == 0 or decoder.config.cross_attn_all_layers:
            x = x + _attention_to_last_patch(decoder.cross_attn_layers[index], x, patch)
        x = layer(x, position_embeddings=turned, window=window)
    return decoder.norm(x)


def _window(config: Any) -> int | None:
    return getattr(config, "local_attention_window_len", None)


def _refuse_other_patches(config: Any) -> None:
    """Raises BuildError for patches that something else than the patcher's entropy ends, and for configs that make
    none."""
    expected = {"patching_mode": "entropy", "patch_in_forward": True, "max_patch_length": None}
    for name, value in expected.items():
        found = getattr(config, name, value)
        if found != value:
            message = f"the config's {name} is {found!r}, expected {value!r}: patches end where the patcher says so"
            raise BuildError("feature-unsupported", message, fix="serve it with transformers")
    for name in ("patching_threshold", "patch_size"):
        if getattr(config, name) is None:
            message = f"the config's {name} is None, expected a number"
            raise BuildError("config-invalid", message, fix=f"add {name} to the config")
    for name in ("encoder_hash_byte_group_nb_functions", "encoder_hash_byte_group_size"):
        if not getattr(config, name):
            message = f"the config's {name} is {getattr(config, name)!r}, expected groups of bytes to hash"
            raise BuildError("config-invalid", message, fix=f"correct {name} in the config")


def _since(factor: torch.Tensor, x: torch.Tensor, kind: str) -> torch.Tensor:
    """The sum or the largest of `x` [1, T, C] since the last byte whose `factor` [1, T, 1] is 0; else it is 1."""
    return ops.linear_recurrence(x, factor.expand_as(x), current_trace().cu_seqlens, kind=kind)


def _ends_of_patches(module: Any, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    """Whether a patch ends with each byte [1, T] bool: where the patcher doesn't know what comes next. The first byte
    is a patch of its own."""
    patcher = module.patcher
    x = patcher.embed_tokens(input_ids)
    turned = patcher.rotary_emb(x, position_ids)
    for layer in patcher.layers:
        x = layer(x, position_embeddings=turned, window=getattr(patcher.config, "sliding_window", None))
    shares = torch.softmax(patcher.lm_head(patcher.norm(x)).float(), dim=-1)
    entropy = -(shares * torch.log(shares.clamp_min(torch.finfo(torch.float32).tiny))).sum(dim=-1)
    return (entropy > module.config.patching_threshold) | (position_ids == 0)


def _embedded(module: Any, input_ids: torch.Tensor) -> torch.Tensor:
    """Bytes' embeddings, and with each those of the groups of bytes that end with it, which are found by hashes:
    polynomials of a prime, in integers of 64 bits that overflow."""
    groups, table = _groups_of_bytes(module, input_ids), module.encoder_hash_tok_embedding
    longest, vocabulary = max(size for size, _ in groups), module.config.encoder_hash_byte_group_vocab
    places = range(longest - 1, -1, -1)  # of a byte, counted from its group's last one
    factors = [
        [_wrapped(prime ** (size - 1 - place)) if place < size else 0 for place in places] for size, prime in groups
    ]
    before = [each.to(torch.int64) for each in reversed(ids_before(input_ids, longest - 1))]
    ids = torch.stack([*before, input_ids], dim=-1)
    hashes = (ids[:, :, None] * torch.tensor(factors)).sum(dim=-1)  # [1, T, groups]
    rows = torch.remainder(hashes, torch.tensor(vocabulary)) + torch.arange(len(groups)) * vocabulary
    rows = rows.clamp(0, table.num_embeddings - 1)  # they are; now a graph says so
    found = table(rows.flatten(1)).unflatten(1, (-1, len(groups)))
    return module.local_encoder.embed_tokens(input_ids) + found.sum(dim=2)


def _groups_of_bytes(module: Any, input_ids: torch.Tensor) -> list[tuple[int, int]]:
    """The size and the prime of each group of bytes: what model code asks its hash function for."""
    scope, config, found = sys.modules[type(module).__module__], module.config, []

    def noted(ids: torch.Tensor, group_size: int, prime: int, _: int) -> torch.Tensor:
        found.append((group_size, prime))
        return ids

    with replaced((scope, "byte_group_hash_function", noted)):
        scope.compute_hash_embeddings(
            input_ids, module.local_encoder, module.encoder_hash_tok_embedding,
            config.encoder_hash_byte_group_nb_functions, config.encoder_hash_byte_group_size, 0,
        )  # fmt: skip
    return found


def _wrapped(number: int) -> int:
    """As an integer of 64 bits overflows."""
    return (number + 2**63) % 2**64 - 2**63


def _self_attention(
    module: Any, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], *_: Any,
    window: int | None = None, ends: torch.Tensor | None = None, **__: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Attention over a window. With `ends` [1, T, 1] over the keys alone with which a patch ends: those of other bytes
    have one element more, by which a score becomes too low to weigh."""
    shape = (*hidden_states.shape[:-1], -1, module.head_dim)
    q, k, v = (project(hidden_states).view(shape) for project in (module.q_proj, module.k_proj, module.v_proj))
    rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb
    q, k = rotate(q, k, *position_embeddings, unsqueeze_dim=2)
    if ends is not None:
        q = _widened(q, torch.full_like(q[..., :1], _never(q)))
        k = _widened(k, (~ends)[:, :, None].to(k.dtype))
    y = _attention(module, q, k, v, window)
    return module.o_proj(y.flatten(2)), None


def _attention_to_own_patch(
    module: Any, patches: Sequence[torch.Tensor], x: torch.Tensor, number: torch.Tensor
) -> list[torch.Tensor]:
    """What the queries of each patch, some [1, T, H], find among the bytes `x` [1, T, H] of it so far; `number`
    [1, T, 1] float32 says which patch a byte is of.

    A bit of the number is an element of a key, and its opposite another one; the query has what lowers the score where
    they differ. So scores within a patch stay exactly as they are.
    """
    shape = (*x.shape[:-1], -1, module.head_dim)
    q = torch.stack([module.q_proj(module.q_norm(each)).view(shape) for each in patches], dim=3)
    found = module.k_norm(x)
    k, v = (project(found).view(shape) for project in (module.k_proj, module.v_proj))
    places = 2.0 ** torch.arange(max(1, (current_trace().max_seq_len - 1).bit_length()))
    bits = torch.floor(number / places) - 2 * torch.floor(number / (2 * places))
    both = torch.cat([bits, 1 - bits], dim=-1)[:, :, None].to(q.dtype)
    y = _attention(module, _widened(q.flatten(2, 3), (1 - both) * _never(q)), _widened(k, both), v, None)
    own = y.unflatten(2, (-1, len(patches))).unbind(3)
    return [module.o_proj(each.flatten(2)) + patch for each, patch in zip(own, patches, strict=True)]


def _attention_to_last_patch(module: Any, x: torch.Tensor, patch: Sequence[torch.Tensor]) -> torch.Tensor:
    """What each byte `x` [1, T, H] finds among the keys of the last patch that has ended, some [1, T, H]."""
    shape = (*x.shape[:-1], module.num_key_value_heads, -1, module.head_dim)
    found = [module.k_norm(each) for each in patch]
    q = module.q_proj(module.q_norm(x)).view(shape)
    k, v = (
        torch.cat([project(each).view(shape) for each in found], dim=3) for project in (module.k_proj, module.v_proj)
    )
    shares = torch.softmax((q @ k.transpose(3, 4)).float() * module.scaling, dim=-1).to(v.dtype)
    return module.o_proj((shares @ v).flatten(2)) + x


def _attention(module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
    return ops.attention(
        q, k, v, None, current_trace().cu_seqlens, scale=float(module.scaling), window=_below(window), soft_cap=None
    )


def _below(window: int | None) -> int | None:
    """None for a window that sees whole sequences."""
    return None if window is None or window >= current_trace().max_seq_len else window


def _widened(x: torch.Tensor, elements: torch.Tensor) -> torch.Tensor:
    """`x` [1, T, heads, D] with `elements` [1, T, 1 or heads, E] for each head, and zeros up to what kernels read."""
    zeros = -elements.shape[-1] % EXTRA_ELEMENTS
    elements = elements.expand(*x.shape[:-1], -1)
    return torch.cat([x, elements, torch.zeros_like(x[..., :1]).expand(*x.shape[:-1], zeros)], dim=-1)


def _never(q: torch.Tensor) -> float:
    """An element of a query that, with a key's 1, leaves a key without weight."""
    return -min(1e9, torch.finfo(q.dtype).max / 4)


BYTE_PATCHES: dict[str, tuple[str, Callable[..., Any]]] = {
    # the module's class -> its method, and what is traced in its place
    "BltModel": ("forward", _bytes_in_patches),
    "BltSelfAttention": ("forward", _self_attention),
}
