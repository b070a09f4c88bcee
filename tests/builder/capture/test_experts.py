"""Experts that are routed to our op: which gates are found, which are traced, and one call for each layer."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference import evaluate
from torch.nn import functional
from transformers import CONFIG_MAPPING
from transformers.activations import ACT2FN
from transformers.integrations.moe import use_experts_implementation

from precast.builder import pipeline
from precast.builder.capture.capture import Captured, capture
from precast.builder.capture.experts import Gate, find_gate, routed_experts
from precast.builder.capture.routing import IMPLEMENTATION
from precast.builder.graph.context import FxNode, Options
from precast.builder.graph.nodes import op_counts, op_name
from precast.builder.lower.lower import lower
from precast.builder.source.source import open_source
from precast.ir.verify.verifier import verify
from precast.kernels.registry import register

Function = Callable[[torch.Tensor], torch.Tensor]

# --- gates -------------------------------------------------------------------------------------------------------


def halves(act: Callable[..., torch.Tensor]) -> Function:
    return lambda h: act(h.chunk(2, dim=-1)[0]) * h.chunk(2, dim=-1)[1]


def clamped(alpha: float, limit: float, offset: float) -> Function:
    def gate(h: torch.Tensor) -> torch.Tensor:
        gate, value = h[..., ::2].clamp(max=limit), h[..., 1::2].clamp(-limit, limit)
        return gate * torch.sigmoid(alpha * gate) * (value + offset)

    return gate


def in_float32(h: torch.Tensor) -> torch.Tensor:
    gate, value = h.chunk(2, dim=-1)
    return (functional.silu(gate.float()) * value.float()).to(h.dtype)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (halves(functional.silu), Gate("silu", True)),
        (halves(ACT2FN["gelu"]), Gate("gelu", True)),
        (halves(ACT2FN["gelu_pytorch_tanh"]), Gate("gelu_tanh", True)),
        (halves(ACT2FN["gelu_new"]), Gate("gelu_tanh", True)),
        (halves(ACT2FN["quick_gelu"]), Gate("silu", True, alpha=1.702)),
        (halves(functional.relu), Gate("relu", True)),
        (lambda h: functional.silu(h[..., ::2]) * h[..., 1::2], Gate("silu", True, interleaved=True)),
        (clamped(1.702, 7.0, 1.0), Gate("silu", True, True, 1.702, 7.0, 1.0)),
        (clamped(0.5, 20.0, 0.25), Gate("silu", True, True, 0.5, 20.0, 0.25)),
        (clamped(1.0, math.inf, 0.0), Gate("silu", True, interleaved=True)),
        (in_float32, Gate("silu", True)),
    ],
)
def test_a_gate_is_found_by_its_results(function: Function, expected: Gate) -> None:
    assert find_gate(function, gated=True) == expected


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (ACT2FN["relu2"], Gate("relu2", False)),
        (ACT2FN["silu"], Gate("silu", False)),
        (lambda h: h * torch.sigmoid(1.5 * h), Gate("silu", False, alpha=1.5)),
    ],
)
def test_so_is_an_activation_without_a_gate(function: Function, expected: Gate) -> None:
    assert find_gate(function, gated=False) == expected


def clamped_behind(h: torch.Tensor) -> torch.Tensor:
    gate, value = h.chunk(2, dim=-1)
    return functional.silu(gate).clamp(max=7.0) * value.clamp(-7.0, 7.0)


def clamped_below(h: torch.Tensor) -> torch.Tensor:
    gate, value = h.chunk(2, dim=-1)
    return functional.silu(gate.clamp(-7.0, 7.0)) * value.clamp(-7.0, 7.0)


def one_sided(h: torch.Tensor) -> torch.Tensor:
    gate, value = h.chunk(2, dim=-1)
    return functional.silu(gate.clamp(max=7.0)) * value.clamp(max=7.0)


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(halves(torch.tanh), id="another activation"),
        pytest.param(lambda h: functional.silu(h.chunk(2, -1)[1]) * h.chunk(2, -1)[0], id="the values first"),
        pytest.param(clamped_behind, id="clamped behind the activation"),
        pytest.param(clamped_below, id="the gate clamped below"),
        pytest.param(one_sided, id="the values clamped on one side"),
        pytest.param(lambda h: 1.001 * halves(functional.silu)(h), id="scaled"),
        pytest.param(lambda h: halves(functional.silu)(h).flip(0), id="rows mixed up"),
        pytest.param(lambda h: halves(functional.silu)(h).sum(dim=-1), id="another shape"),
        pytest.param(halves(lambda x: x * torch.empty(1, device="meta")), id="with params"),
    ],
)
def test_what_is_no_gate_of_ours_is_none(function: Function) -> None:
    assert find_gate(function, gated=True) is None


# --- traces ------------------------------------------------------------------------------------------------------


class _Config:
    _experts_implementation = IMPLEMENTATION


class _Experts(torch.nn.Module):
    """A layer of experts as transformers' classes are; its own loop is what ours is compared with."""

    def __init__(self, config: Any, *, transposed: bool, bias: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = {"gate_up_proj": (5, 8, 6), "down_proj": (5, 6, 4)}
        for name, (num, rows, columns) in shapes.items():
            shape = (num, columns, rows) if transposed else (num, rows, columns)
            setattr(self, name, torch.nn.Parameter(torch.randn(shape, generator=generator)))
            offsets = torch.nn.Parameter(torch.randn((num, rows), generator=generator)) if bias else None
            setattr(self, f"{name}_bias", offsets)
        self.act_fn = torch.nn.functional.silu

    def forward(self, hidden_states: torch.Tensor, top_k_index: Any, top_k_weights: Any) -> torch.Tensor:
        total = torch.zeros_like(hidden_states)
        for token, expert in [(t, k) for t in range(len(total)) for k in range(top_k_index.shape[1])]:
            h = self._product(hidden_states[token], "gate_up_proj", top_k_index[token, expert])
            h = self._product(self._apply_gate(h), "down_proj", top_k_index[token, expert])  # type: ignore[operator]
            total[token] += self._normed(h) * top_k_weights[token, expert]
        return total

    def _product(self, x: torch.Tensor, name: str, expert: torch.Tensor) -> torch.Tensor:
        weight, bias = getattr(self, name)[expert], getattr(self, f"{name}_bias")
        y = x @ (weight if self.is_transposed else weight.T)  # type: ignore[has-type]
        return y if bias is None else y + bias[expert]

    def _normed(self, h: torch.Tensor) -> torch.Tensor:
        return self.post_expert_norm(h) if self.has_post_expert_norm else h  # type: ignore[operator]


def experts_of(
    *, transposed: bool = False, bias: bool = False, interleaved: bool = False, norm: bool = False, gate: Any = None
) -> torch.nn.Module:
    class Experts(_Experts):
        pass

    if gate is not None or interleaved:
        function = gate or (lambda h: functional.silu(h[..., ::2]) * h[..., 1::2])
        Experts._apply_gate = lambda self, h: function(h)  # type: ignore[attr-defined]
    made = use_experts_implementation(
        Experts, is_transposed=transposed, has_bias=bias, is_concatenated=not interleaved, has_post_expert_norm=norm
    )(_Config(), transposed=transposed, bias=bias)
    if norm:
        made.post_expert_norm = torch.nn.LayerNorm(6)
    return made


IDS = torch.tensor([[0, 3], [3, 1], [1, 0]])
OURS = {"precast.experts": 1}
TRACED = {"precast.grouped_linear": 2}


@pytest.mark.parametrize(
    ("differs", "calls"),
    [
        ({}, OURS),
        ({"transposed": True, "bias": True}, OURS),
        ({"transposed": True, "bias": True, "interleaved": True}, OURS),
        ({"interleaved": True}, OURS),
        ({"gate": halves(torch.tanh)}, TRACED),
        ({"gate": halves(torch.tanh), "transposed": True, "bias": True}, TRACED),
        ({"norm": True}, TRACED),
    ],
)
def test_a_layer_of_experts_is_traced(differs: dict[str, Any], calls: dict[str, int]) -> None:
    register()
    module = experts_of(**differs)
    inputs = (torch.randn(3, 6), IDS, torch.rand(3, 2))
    with torch.no_grad():
        with routed_experts():
            program = torch.export.export(module, inputs, strict=False)
            found = program.module()(*inputs)
        module.config._experts_implementation = "eager"
        expected = module(*inputs)
    counts = Counter(op_name(node.target) for node in program.graph.nodes)

    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert {name: count for name, count in counts.items() if name.startswith("precast")} == calls


# --- models ------------------------------------------------------------------------------------------------------

_BASE: dict[str, Any] = {
    "vocab_size": 131, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_LATENT: dict[str, Any] = {
    "q_lora_rank": 16, "kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 16,
    "num_key_value_heads": 4,
}  # fmt: skip
_MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 16},
    "gpt_oss": {"num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 16, "sliding_window": 8},
    "deepseek_v3": {
        **_LATENT, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_group": 4,
        "topk_group": 2, "first_k_dense_replace": 1, "n_shared_experts": 1,
    },
    "nemotron_h": {
        "layers_block_type": ["moe", "attention", "moe"], "n_routed_experts": 8, "num_experts_per_tok": 3,
        "moe_intermediate_size": 24, "n_group": 1, "topk_group": 1, "head_dim": 16,
        "moe_shared_expert_intermediate_size": 24,
    },
    "phimoe": {"num_local_experts": 6, "num_experts_per_tok": 2},
}  # fmt: skip
LAYERS = {"mixtral": 3, "qwen3_moe": 3, "gpt_oss": 3, "deepseek_v3": 2, "nemotron_h": 2, "phimoe": 3}
NO_ROUTE = {"phimoe"}  # its choice is of its own kind


def captured(name: str, dtype: str, **differs: Any) -> Captured:
    register()
    config = CONFIG_MAPPING[name](**{**_BASE, **_MODELS[name], **differs})
    found = capture(open_source(config), Options(dtype, 64))
    pipeline.run(found.graph, found.ctx, pipeline.passes())
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", _MODELS)
def test_a_model_has_one_call_for_each_layer_of_experts(name: str, dtype: str) -> None:
    found = captured(name, dtype)

    counts = op_counts(found.graph)
    assert counts["precast.experts"] == LAYERS[name]
    assert counts["precast.route"] == (0 if name in NO_ROUTE else LAYERS[name])
    verify(lower(found.graph, found.ctx))


def test_the_graph_does_not_grow_with_the_experts() -> None:
    few, many = captured("qwen3_moe", "float32"), captured("qwen3_moe", "float32", num_experts=64)

    assert op_counts(few.graph) == op_counts(many.graph)


def test_weights_in_another_layout_are_read_into_ours() -> None:
    found = captured("gpt_oss", "float32")
    experts: list[FxNode] = [node for node in found.graph.nodes if node.target is torch.ops.precast.experts.default]
    generator = torch.Generator().manual_seed(0)
    stored = torch.randn((6, 48, 80), generator=generator)

    for node in experts:
        assert all(found.ctx.is_param(weight) for weight in node.args[3:7])
    up = evaluate(found.ctx.params[experts[1].args[3].name].recipe, _One(stored))
    torch.testing.assert_close(up[:, :40], stored[:, :, ::2].transpose(1, 2))
    torch.testing.assert_close(up[:, 40:], stored[:, :, 1::2].transpose(1, 2))


class _One(dict[str, torch.Tensor]):
    """A checkpoint in which every tensor is this one."""

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.value = value

    def __missing__(self, name: str) -> torch.Tensor:
        return self.value


def test_the_attributes_say_what_the_config_does() -> None:
    found = captured("gpt_oss", "bfloat16", swiglu_limit=5.0)
    (attributes, *_) = [node.kwargs for node in found.graph.nodes if node.target is torch.ops.precast.experts.default]

    assert attributes == {"activation": "silu", "gated": True, "alpha": 1.702, "limit": 5.0, "offset": 1.0}
