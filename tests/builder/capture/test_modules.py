"""Modules whose code is replaced while they are traced: the graphs compute what transformers' own code computes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from model_sweep import COMPLETIONS
from reference import evaluate, hf_logits, relative_error
from torch import fx
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

from precast.builder import pipeline
from precast.builder.capture import modules
from precast.builder.capture.capture import Captured, capture
from precast.builder.capture.mixtures import drop_unread_rows, has_unread_rows
from precast.builder.capture.modules import routed_modules
from precast.builder.graph.context import FxNode, Options, tensor
from precast.builder.graph.nodes import op_counts
from precast.builder.lower.lower import lower, refuse_unknown_ops
from precast.builder.source.shrink import random_model, shrink
from precast.builder.source.source import open_source
from precast.ir.errors import BuildError
from precast.ir.manifest import PassRecord
from precast.ir.verify.verifier import verify
from precast.kernels.registry import register

ops = torch.ops.precast

PROMPTS = ([5, 9, 70, 33, 12, 88, 3, 41, 100, 7, 64, 20, 11], [17], [99, 4, 4, 120, 56, 31, 8, 77, 23, 61, 14])
MULTIPLIERS = [0.5, 1.5, 0.25, 2.0, 0.75]

INKLING = {"rel_extent": 5, "sliding_window_size": 4, "log_scaling_n_floor": 3}
NGRAMS = {"indexer_budget": 64, "ple_layer_ids": [1, 2], "eos_token_id": 4, "ple_embed_dim": 48}
WINDOWS = ["sliding_attention"] * 6
MODELS: list[tuple[str, dict[str, Any], set[str]]] = [
    # type, what differs from its small default config, the ops that it must come to
    ("minimax", {"block_size": 4}, {"precast.linear_attention", "precast.attention"}),
    ("recurrent_gemma", {}, {"precast.linear_recurrence", "precast.causal_conv", "precast.attention"}),
    ("zaya", {}, {"precast.causal_conv", "precast.attention"}),
    ("doge", {}, {"precast.attention"}),
    ("rwkv", {"num_hidden_layers": 3, "rescale_every": 1}, {"precast.wkv", "precast.causal_conv"}),
    ("xlstm", {"eps": 0.1}, {"precast.linear_attention", "precast.linear_recurrence"}),
    ("lfm3", {}, {"precast.causal_conv", "precast.attention"}),
    ("falcon_h1", {"ssm_multipliers": MULTIPLIERS}, {"precast.state_space_scan", "precast.attention"}),
    ("llama4_text", {}, {"precast.experts", "precast.route", "precast.attention"}),
    ("llama4_text", {"num_experts_per_tok": 3}, {"precast.experts", "precast.route", "precast.attention"}),
    ("llama4_text", {"hidden_act": "tanh"}, {"precast.grouped_linear", "precast.route", "precast.attention"}),
    ("dbrx", {}, {"precast.experts", "precast.route", "precast.attention"}),
    ("longcat_flash", {}, {"precast.experts", "precast.route", "precast.latent_attention"}),
    ("longcat_flash", {"zero_expert_num": 0}, {"precast.experts", "precast.route", "precast.latent_attention"}),
    ("longcat_flash", {"n_routed_experts": 0}, {"precast.latent_attention"}),
    ("qwen4_exp_text", {"indexer_budget": 64}, {"precast.attention", "precast.delta_rule", "precast.experts"}),
    ("qwen4_exp_text", NGRAMS, {"precast.causal_conv", "precast.embedding", "aten.bitwise_xor.Tensor"}),
    ("qwen4_exp_text", {**NGRAMS, "ngram_size": 4, "ple_conv_kernel_size": 2}, {"aten.bitwise_xor.Tensor"}),
    ("qwen4_exp_text", {**NGRAMS, "ngram_size": 2}, {"aten.bitwise_xor.Tensor"}),
    ("blt", {}, {"precast.attention", "precast.linear_recurrence", "precast.causal_conv"}),
    ("blt", {"patching_threshold": 100.0, "encoder_hash_byte_group_nb_functions": 2}, {"precast.attention"}),
    ("blt", {"patching_threshold": 0.0, "encoder_hash_byte_group_size": [2]}, {"precast.attention"}),
    ("inkling_text", INKLING, {"precast.attention", "precast.causal_conv", "precast.experts", "precast.route"}),
    ("inkling2_text", INKLING, {"precast.attention", "precast.causal_conv", "precast.grouped_linear"}),
    ("deepseek_v4", {"layer_types": WINDOWS, "mlp_layer_types": ["moe"] * 6}, {"precast.entry_attention"}),
    ("deepseek_v4", {}, {"precast.entry_attention", "precast.compress", "precast.select_entries", "precast.experts"}),
    ("deepseek_v4", {"index_topk": 16}, {"precast.entry_attention", "precast.compress"}),
    ("jetmoe", {}, {"precast.experts", "precast.grouped_linear", "precast.route", "precast.attention"}),
]


def small(name: str, **differs: Any) -> PreTrainedConfig:
    config = shrink(CONFIG_MAPPING[name](**COMPLETIONS.get(name, {})))
    for field, value in differs.items():
        setattr(config, field, value)
    return config


def captured(config: PreTrainedConfig, max_seq_len: int = 64) -> Captured:
    register()
    found = capture(open_source(config), Options("float32", max_seq_len))
    pipeline.run(found.graph, found.ctx, pipeline.split(pipeline.passes(), "shard")[0])
    return found


def calls(found: Captured, op: Any) -> list[FxNode]:
    return [node for node in found.graph.nodes if node.target is op.default]


def expert_weights(found: Captured) -> list[FxNode]:
    weights = [each for node in calls(found, torch.ops.precast.experts) for each in node.args[3:5]]
    return weights + [node.args[1] for node in calls(found, torch.ops.precast.grouped_linear)]


def run(found: Captured, state: dict[str, torch.Tensor]) -> torch.Tensor:
    """The logits `[T, V]` of all prompts in one batch."""
    lengths = [len(prompt) for prompt in PROMPTS]
    values = {
        "input_ids": torch.tensor([list(itertools.chain(*PROMPTS))]),
        "positions": torch.cat([torch.arange(length) for length in lengths])[None],
        "rope_lengths": torch.tensor([[length for length in lengths for _ in range(length)]]),
        "cu_seqlens": torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32),
    }
    values |= {place: info.value for place, info in found.ctx.constants.items()}
    values |= {place: evaluate(info.recipe, state) for place, info in found.ctx.params.items()}
    places = [node.name for node in found.graph.nodes if node.op == "placeholder"]
    with torch.no_grad():
        out = fx.Interpreter(fx.GraphModule({}, found.graph)).run(*[values[place] for place in places])
    return out["logits"][0]


@pytest.mark.parametrize(("name", "differs", "ops"), MODELS)
def test_graphs_compute_what_transformers_computes(name: str, differs: dict[str, Any], ops: set[str]) -> None:
    config = small(name, **differs)
    model = random_model(config)
    state = revert_weight_conversion(model, {key: value.clone() for key, value in model.state_dict().items()})
    expected = torch.cat(hf_logits(model, PROMPTS))

    found = captured(config)

    assert relative_error(run(found, state), expected) < 1e-5
    refuse_unknown_ops(found.graph)
    assert ops <= op_counts(found.graph).keys()
    # weights of experts are read as they are used
    assert all(found.ctx.is_param(weight) for weight in expert_weights(found))


def test_a_table_says_which_experts_a_token_has() -> None:
    config = small("deepseek_v4", layer_types=WINDOWS)
    model = random_model(config)
    tables = [buffer for name, buffer in model.named_buffers() if name.endswith("tid2eid")]
    for table in tables:
        table.random_(0, config.n_routed_experts, generator=torch.Generator().manual_seed(3))
    state = revert_weight_conversion(model, {key: value.clone() for key, value in model.state_dict().items()})
    expected = torch.cat(hf_logits(model, PROMPTS))

    found = captured(config)

    assert len(tables) == 2
    assert relative_error(run(found, state), expected) < 1e-5


def test_nothing_selects_where_no_sequence_has_more_entries_than_are_selected() -> None:
    config = small("deepseek_v4")
    rate = config.compress_rates["compressed_sparse_attention"]

    selecting, all_seen = (
        op_counts(captured(config, max_seq_len=length).graph).get("precast.select_entries", 0)
        for length in ((config.index_topk + 1) * rate, (config.index_topk + 1) * rate - 1)
    )
    assert (selecting, all_seen) == (2, 0)


@pytest.mark.parametrize("name", ["minimax", "recurrent_gemma", "rwkv", "xlstm"])
def test_what_a_sequence_keeps_is_planned_as_states(name: str) -> None:
    found = captured(small(name))
    early, late = pipeline.split(pipeline.passes(), "shard")
    history = tuple(PassRecord(each.name, each.stage, each.version, False, {}) for each in early)
    pipeline.run(found.graph, found.ctx, late, history=history)

    assert {group.spec.kind for group in found.ctx.caches.states} >= {"state"}
    verify(lower(found.graph, found.ctx))


def test_keys_that_are_chosen_by_their_bias_are_refused() -> None:
    config = small("doge", keep_window_size=48)

    captured(config, max_seq_len=48)
    with pytest.raises(BuildError, match="beyond 48 tokens") as refused:
        captured(config, max_seq_len=64)
    assert refused.value.code == "feature-unsupported"
    assert "max_seq_len of at most 48" in str(refused.value)


@pytest.mark.parametrize(
    ("differs", "message"),
    [
        ({"ple_layer_ids": [1], "eos_token_id": None}, "no eos_token_id"),
        ({"indexer_budget": 3, "indexer_compress_ratio": 4}, "indexer_budget is 3, expected at least a block of 4"),
    ],
)
def test_configs_of_qwen4_exp_that_say_too_little(differs: dict[str, Any], message: str) -> None:
    with pytest.raises(BuildError, match=message) as refused:
        captured(small("qwen4_exp_text", **differs))
    assert refused.value.code == "config-invalid"


@pytest.mark.parametrize(
    "differs",
    [
        {"encoder_config": {"cross_attn_all_layers": True, "num_hidden_layers": 2}},
        {"decoder_config": {"cross_attn_all_layers": False}},
        {"encoder_config": {"num_key_value_heads": 1}, "decoder_config": {"num_key_value_heads": 1}},
        {"local_attention_window_len": None, "patcher_config": {"sliding_window": None}},
        {"patcher_config": {"sliding_window": 3}},
    ],
)
def test_parts_of_blt_that_differ(differs: dict[str, Any]) -> None:
    entries = small("blt").to_dict()
    for name, value in differs.items():
        entries[name] = {**entries[name], **value} if isinstance(value, dict) else value
    config = CONFIG_MAPPING["blt"].from_dict(entries)
    model = random_model(config)

    assert relative_error(run(captured(config), model.state_dict()), torch.cat(hf_logits(model, PROMPTS))) < 1e-5


@pytest.mark.parametrize(
    ("differs", "code", "message"),
    [
        ({"patching_mode": "static"}, "feature-unsupported", "patching_mode is 'static', expected 'entropy'"),
        ({"patch_in_forward": False}, "feature-unsupported", "patch_in_forward is False, expected True"),
        ({"max_patch_length": 5}, "feature-unsupported", "max_patch_length is 5, expected None"),
        ({"patching_threshold": None}, "config-invalid", "patching_threshold is None, expected a number"),
        ({"patch_size": None}, "config-invalid", "patch_size is None, expected a number"),
        ({"encoder_hash_byte_group_nb_functions": 0}, "config-invalid", "nb_functions is 0, expected groups of bytes"),
    ],
)
def test_patches_that_the_patcher_does_not_end_are_refused(differs: dict[str, Any], code: str, message: str) -> None:
    with pytest.raises(BuildError, match=message) as refused:
        captured(small("blt", **differs))
    assert refused.value.code == code


def test_rotations_of_patches_that_depend_on_how_many_there_are_are_refused() -> None:
    config = small("blt")
    config.global_config.rope_parameters = {"rope_type": "dynamic", "factor": 16.0, "rope_theta": 10000.0}

    with pytest.raises(BuildError, match="rope_type 'dynamic' of the config's global_config depends on the number"):
        captured(config)


LONGEST = max(map(len, PROMPTS))
SPARSE_AND_FULL = {"num_hidden_layers": 2, "layer_types": ["full_attention", "minimax_m3_sparse"]}


@pytest.mark.parametrize(
    ("budget", "rate", "longest", "selections"),
    [(12, 2, 13, 0), (12, 2, 14, 1), (6, 3, 64, 1), (8, 4, 64, 1), (3, 1, 64, 1)],
)
def test_whole_blocks_are_selected_where_a_sequence_may_have_more(
    budget: int, rate: int, longest: int, selections: int
) -> None:
    # With many heads no two blocks have equal scores, 0 of all heads, of which transformers selects either.
    config = small("qwen4_exp_text", indexer_budget=budget, indexer_compress_ratio=rate, indexer_n_heads=16)
    model = random_model(config)
    state = revert_weight_conversion(model, {key: value.clone() for key, value in model.state_dict().items()})
    expected = torch.cat(hf_logits(model, PROMPTS))

    found = captured(config, max_seq_len=longest)

    targets = [node.target for node in found.graph.nodes]
    sparse = config.layer_types.count("indexed_attention") * selections
    assert targets.count(torch.ops.precast.select_entries.default) == sparse
    assert targets.count(torch.ops.precast.block_sparse_attention.default) == sparse
    assert relative_error(run(found, state), expected) < 1e-5


@pytest.mark.parametrize(("longest", "selections"), [(LONGEST, 0), (LONGEST + 1, 1)])
def test_blocks_are_selected_where_a_sequence_may_have_more(longest: int, selections: int) -> None:
    config = small("minimax_m3_vl_text", **SPARSE_AND_FULL, index_topk_blocks=LONGEST, index_block_size=1)
    model = random_model(config)
    state = revert_weight_conversion(model, {key: value.clone() for key, value in model.state_dict().items()})
    expected = torch.cat(hf_logits(model, PROMPTS))

    found = captured(config, max_seq_len=longest)

    targets = [node.target for node in found.graph.nodes]
    assert targets.count(torch.ops.precast.select_blocks.default) == selections
    assert targets.count(torch.ops.precast.block_sparse_attention.default) == selections
    assert relative_error(run(found, state), expected) < 1e-5


@pytest.mark.parametrize(
    ("differs", "message"),
    [
        ({"index_topk_blocks": 0}, "count: expected at least 1, found 0"),
        ({"index_n_heads": 3}, "heads are no multiple of 3 of selected"),
    ],
)
def test_blocks_that_nothing_can_select_are_refused(differs: dict[str, Any], message: str) -> None:
    config = small("minimax_m3_vl_text", **{**SPARSE_AND_FULL, **differs})

    with pytest.raises(BuildError, match=message) as refused:
        captured(config, max_seq_len=64)
    assert refused.value.code == "config-invalid"


@pytest.mark.parametrize("cap", [0.0, 40.0])
def test_exponential_gates_without_a_bound_are_refused(cap: float) -> None:
    with pytest.raises(BuildError, match=r"gate_soft_cap is .*, expected a number up to 30\.0") as refused:
        captured(small("xlstm", gate_soft_cap=cap))
    assert refused.value.code == "feature-unsupported"


class _Lightning(torch.nn.Module):
    """Of the same name as one of transformers', and another forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


_Lightning.__name__ = "MiniMaxLightningAttention"


EXPERTS = [
    ("llama4_text", "num_local_experts"),
    ("longcat_flash", "n_routed_experts"),
    ("jetmoe", "num_local_experts"),
]


@pytest.mark.parametrize(("name", "field"), EXPERTS)
def test_graphs_are_as_large_for_many_experts_as_for_few(name: str, field: str) -> None:
    few, many = (len(captured(small(name, **{field: count})).graph.nodes) for count in (4, 64))

    assert few == many


def test_keys_are_kept_once_however_many_experts_attend() -> None:
    config = small("jetmoe", num_experts_per_tok=3, num_attention_heads=6)

    (keys,) = {tensor(node.args[1]).shape[2] for node in calls(captured(config), ops.attention)}

    assert keys == config.num_key_value_heads == 2


class _LongcatExperts(torch.nn.Module):
    """Of the same name as transformers', and with rows that are read."""

    zero_expert_num, num_routed_experts = 2, 3

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(torch.ones(5, 2, 2))


_LongcatExperts.__name__ = "LongcatFlashExperts"


def test_rows_of_other_files_classes_stay() -> None:
    other = torch.nn.Sequential(_LongcatExperts())

    drop_unread_rows(other)

    assert not has_unread_rows(other)
    assert len(other[0].gate_up_proj) == 5


def test_classes_of_other_files_are_traced_as_they_are() -> None:
    with routed_modules(torch.nn.Sequential(_Lightning())):
        torch.testing.assert_close(_Lightning()(torch.ones(2)), torch.full((2,), 2.0))


def test_classes_get_their_own_methods_back() -> None:
    own = vars(MiniMaxLightningAttention)["forward"]
    model = random_model(small("minimax"))

    with routed_modules(model):
        assert vars(MiniMaxLightningAttention)["forward"] is modules._lightning_attention

    assert vars(MiniMaxLightningAttention)["forward"] is own
