"""Routes mixtures of experts that transformers' experts interface doesn't reach, for the table of `modules`.

These models write their experts out: a product of every token with every expert, or a loop over the experts that were
hit, whose length depends on values. In their place comes one `precast.experts` for a layer, however many experts it
has, or a `grouped_linear` for each of its products where something else stands between the two.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from precast.builder.capture.experts import mixture, mixture_with
from precast.builder.capture.routing import IMPLEMENTATION

ops = torch.ops.precast


# --- Llama 4 -----------------------------------------------------------------------------------------------------


def _scaled_inputs(module: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each expert's score multiplies what goes into it: a row for each token and choice, and what comes out is added.

    Model code gives all experts all tokens, times 0 where they weren't chosen; of 0 an expert makes 0.
    """
    x = hidden_states.reshape(-1, module.hidden_dim)
    router, experts = module.router, module.experts
    logits = torch.nn.functional.linear(x, router.weight, router.bias)
    scores, ids = ops.route(
        logits, None, scoring="sigmoid", top_k=router.top_k, choice="logits", normalise=False, dtype=logits.dtype
    )
    rows = (x[:, None] * scores[:, :, None]).reshape(-1, module.hidden_dim)
    ids = ids.reshape(-1, 1)
    y = mixture(
        rows, ids, torch.ones_like(ids, dtype=rows.dtype),
        experts.gate_up_proj.transpose(1, 2), experts.down_proj.transpose(1, 2), experts.act_fn,
    )  # fmt: skip
    return module.shared_expert(x) + y.reshape(-1, router.top_k, module.hidden_dim).sum(dim=1), logits


# --- DBRX --------------------------------------------------------------------------------------------------------


def _flat_experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The experts' weights lie one below the other, [E * F, I], gates and values apart."""
    mlp, shape = module.mlp, (module.num_experts, module.ffn_hidden_size, module.hidden_size)
    up = torch.cat([mlp.w1.view(shape), mlp.v1.view(shape)], dim=1)
    down = mlp.w2.view(shape).transpose(1, 2)
    x = hidden_states.reshape(-1, module.hidden_size)
    return mixture(x, top_k_index, top_k_weights, up, down, mlp.activation_fn).view(hidden_states.shape)


# --- LongCat Flash -----------------------------------------------------------------------------------------------


def _experts_and_identities(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Ids beyond those of the experts that have weights stand for the token itself."""
    experts = module.num_routed_experts
    passed = top_k_weights.masked_fill(top_k_index < experts, 0.0).sum(dim=1, keepdim=True)
    y = (hidden_states * passed).to(hidden_states.dtype)
    if experts == 0:
        return y
    return y + mixture(hidden_states, top_k_index, top_k_weights, module.gate_up_proj, module.down_proj, module.act_fn)


def drop_unread_rows(model: torch.nn.Module) -> None:
    """Takes the rows of experts without weights from the weights of all: the hub's checkpoints don't hold them, those
    that transformers writes do, and nothing reads them."""
    for module in _experts_beside_identities(model):
        read = module.gate_up_proj[: module.num_routed_experts]
        module.gate_up_proj = torch.nn.Parameter(read, requires_grad=False)


def has_unread_rows(model: torch.nn.Module) -> bool:
    """Whether checkpoints of the model may hold rows that were taken from it."""
    return any(True for _ in _experts_beside_identities(model))


def _experts_beside_identities(model: torch.nn.Module) -> Iterator[Any]:
    for module in model.modules():
        kind = type(module)
        known = kind.__name__ == "LongcatFlashExperts" and kind.__module__.startswith("transformers.")
        if known and module.zero_expert_num and module.gate_up_proj is not None:
            yield module


# --- Step 3.7 ----------------------------------------------------------------------------------------------------


def _clamped_experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Where a layer clamps, gates are clamped after their activation."""
    y = mixture_with(
        module._apply_gate, hidden_states, top_k_index, top_k_weights, module.gate_up_proj, module.down_proj
    )
    return y.to(hidden_states.dtype)


# --- JetMoe ------------------------------------------------------------------------------------------------------


def _chosen(router: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights and ids [T, K] of the experts of `x` [T, I]: a softmax over the chosen ones."""
    logits = router.layer(x).float()
    return ops.route(
        logits, None, scoring="softmax", top_k=router.top_k, choice="logits", normalise=False, dtype=x.dtype
    )


def _sorted_experts(module: Any, layer_input: torch.Tensor) -> torch.Tensor:
    """Model code sorts tokens by expert, and splits them by how many each has."""
    x = layer_input.reshape(-1, module.input_size)
    weights, ids = _chosen(module.router, x)
    y = mixture(x, ids, weights, module.input_linear.weight, module.output_linear.weight, module.activation)
    return y.view(layer_input.shape) + module.bias


def _attention_of_experts(
    module: Any, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None,
    position_embeddings: Any = None, past_key_values: Any = None, **kwargs: Any,
) -> tuple[torch.Tensor, None, None]:  # fmt: skip
    """Each chosen expert makes queries for all heads of keys, and takes what these find.

    Model code repeats the keys for each choice, whole; here the queries of one head stand together in place of that.
    """
    mixed, heads, size = module.experts, module.num_key_value_heads, module.head_dim
    tokens, top_k = hidden_states.shape[1], mixed.top_k
    x = hidden_states.reshape(-1, mixed.input_size)
    weights, ids = _chosen(mixed.router, x)
    flat = ids.reshape(-1)
    rows = x[:, None].expand(tokens, top_k, mixed.input_size).reshape(-1, mixed.input_size)
    query = ops.grouped_linear(rows, mixed.input_linear.weight, None, flat).view(1, tokens, top_k, heads, size)
    query = query.transpose(2, 3).reshape(1, tokens, heads * top_k, size).transpose(1, 2)
    key, value = (part.view(1, tokens, heads, size).transpose(1, 2) for part in _halves(module.kv_proj(hidden_states)))
    query, key = sys.modules[type(module).__module__].apply_rotary_pos_emb(query, key, *position_embeddings)
    y, _ = ALL_ATTENTION_FUNCTIONS[IMPLEMENTATION](
        module, query, key, value, attention_mask, scaling=module.scaling, **kwargs
    )
    y = y.reshape(1, tokens, heads, top_k, size).transpose(2, 3).reshape(-1, heads * size)
    y = ops.grouped_linear(y, mixed.output_linear.weight, None, flat).view(tokens, top_k, mixed.input_size)
    return (y * weights[:, :, None]).sum(dim=1).view(hidden_states.shape) + mixed.bias, None, None


def _halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = x.chunk(2, dim=-1)
    return first, second


# --- Inkling -----------------------------------------------------------------------------------------------------


def _weighed_with_shared(
    module: Any, hidden_states: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The scores of the chosen experts and of the shared ones add up to the scale.

    Model code divides by their sum as logarithms: exp(log s - log sum(exp(log s))) is s / sum(s).
    """
    x, shared = hidden_states.reshape(-1, module.hidden_dim), module.n_shared_experts
    logits = torch.nn.functional.linear(x.float(), module.weight.float())
    routed = logits[:, :-shared]
    chosen, ids = ops.route(
        routed, module.e_score_correction_bias.float(), scoring="sigmoid", top_k=module.top_k, normalise=False,
        dtype=torch.float32,
    )  # fmt: skip
    scores = torch.cat([chosen, torch.sigmoid(logits[:, -shared:])], dim=-1)
    weights = scores / scores.sum(dim=-1, keepdim=True) * module.route_scale * module.global_scale.float()
    weights = weights.to(hidden_states.dtype)
    return routed, weights[:, : module.top_k], ids, weights[:, module.top_k :]


# --- DeepSeek-V4 -------------------------------------------------------------------------------------------------


def _experts_by_token(
    module: Any, hidden_states: torch.Tensor, input_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A table of the checkpoint says which experts a token has; their weights are computed.

    Clamped, since the scores are looked up by what the table holds: a bundle is known to read nothing beyond them,
    whatever that is.
    """
    logits = torch.nn.functional.linear(hidden_states.reshape(-1, module.hidden_dim), module.weight)
    ids = module.tid2eid[input_ids.reshape(-1)].clamp(0, module.num_experts - 1)
    weights = module.score_fn(logits).gather(1, ids)
    weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return logits, weights * module.routed_scaling_factor, ids


MIXTURES: dict[str, tuple[str, Callable[..., Any]]] = {
    # the module's class -> its method, and what is traced in its place
    "Llama4TextMoe": ("forward", _scaled_inputs),
    "DbrxExperts": ("forward", _flat_experts),
    "LongcatFlashExperts": ("forward", _experts_and_identities),
    "Step3p7Experts": ("forward", _clamped_experts),
    "InklingTopkRouter": ("forward", _weighed_with_shared),
    "JetMoeMoE": ("forward", _sorted_experts),
    "JetMoeAttention": ("forward", _attention_of_experts),
    "DeepseekV4HashRouter": ("forward", _experts_by_token),
}
