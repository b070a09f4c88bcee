"""Predicted peaks of activations against what the allocator counts, for whole programs of several families.

The families are small, but as wide as it takes for the peak to be made by the same ops as in a real model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from allocations import peak_bytes
from program_steps import random_program, step_inputs

import precast
from precast.ir.graph import symbols
from precast.ir.graph.schema import Expr, Graph, Node
from precast.ir.memory import liveness
from precast.ir.memory.liveness import Operand
from precast.kernels import step_memory
from precast.kernels.choices import resolve
from precast.kernels.registry import target_of
from precast.kernels.use import Use
from precast.loader.placement import bind_world, place
from precast.loader.program.restore import Program

NUM_PAGES = 200
CUDA = torch.device("cuda")
SMALL = 128 << 10
"""Bytes that the allocator's blocks may be larger than what was asked for."""

pytestmark = pytest.mark.gpu

_BASE: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 1024, "max_position_embeddings": 2048,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 64},
    "gpt_neox": {},
    "qwen3_moe": {
        "head_dim": 64, "num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 256,
        "norm_topk_prob": True,
    },
    "gpt_oss": {"head_dim": 64, "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 256},
    "deepseek_v3": {
        "num_key_value_heads": 4, "q_lora_rank": 96, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
        "v_head_dim": 32, "n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 2, "topk_group": 1,
        "first_k_dense_replace": 1, "moe_intermediate_size": 256,
    },
    "nemotron_h": {
        "hybrid_override_pattern": "M-*-", "num_hidden_layers": 4, "head_dim": 64, "mamba_num_heads": 8,
        "mamba_head_dim": 32, "ssm_state_size": 64, "n_groups": 2, "chunk_size": 64,
    },
    "qwen3_next": {
        "head_dim": 64, "num_hidden_layers": 4, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
        "linear_key_head_dim": 64, "linear_value_head_dim": 64, "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256,
    },
    "gemma4_text": {
        "head_dim": 64, "global_head_dim": 128, "sliding_window": 32, "num_kv_shared_layers": 1,
        "num_hidden_layers": 4, "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 512,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Graph]:
    """Built when a test first asks: `graph_of` fills it."""
    return {}


def graph_of(built: dict[tuple[str, str], Graph], folder: Path, family: str, dtype: str) -> Graph:
    """The family's graph in this dtype."""
    from transformers import AutoConfig

    if (family, dtype) not in built:
        config = AutoConfig.for_model(family, **{**_BASE, **FAMILIES[family]})
        graph = precast.build(config, folder / "b", dtype=dtype).graph
        built[family, dtype] = bind_world(graph, place("cuda"))
    return built[family, dtype]


def sizes_of(graph: Graph, sequences: list[tuple[int, int]]) -> dict[str, int]:
    """What these sequences come to."""
    lists = {
        group.name: sum(-(-context // group.spec.page_size) for _, context in sequences)
        for group in graph.caches.groups
    }
    tokens = sum(count for count, _ in sequences)
    longest = max(context for _, context in sequences)
    return step_memory.step_sizes(
        graph, max_num_tokens=tokens, max_num_seqs=len(sequences), max_seq_len=longest, num_pages=lists
    )


def predicted(graph: Graph, sequences: list[tuple[int, int]]) -> int:
    """The peak of steps up to this size."""
    return symbols.evaluate(step_memory.peak(graph, target_of(CUDA)), sizes_of(graph, sequences))


def predicted_of_this_size(graph: Graph, sequences: list[tuple[int, int]]) -> int:
    """The same without the workspaces of what computes smaller steps only."""
    target, sizes = target_of(CUDA), sizes_of(graph, sequences)

    def workspace(node: Node, operands: Mapping[str, Operand]) -> Expr:
        use = Use(node, operands, target)
        return resolve(use, sizes).record.workspace(use)

    runs = liveness.runs(graph, workspace)
    return max(step_memory.moment_bytes(moment, sizes) for run in runs for moment in run.moments)


def measured(program: Program, graph: Graph, sequences: list[tuple[int, int]]) -> int:
    """The peak of the second run: the first one leaves what libraries keep for themselves."""
    inputs = step_inputs(graph, sequences, CUDA)
    program(**inputs)
    return peak_bytes(lambda: program(**inputs), CUDA)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [*((family, "bfloat16") for family in FAMILIES), ("qwen3", "float32"), ("qwen3_moe", "float32"),
     ("nemotron_h", "float32")],
)  # fmt: skip
def test_prompts_take_what_is_predicted(
    family: str, dtype: str, graphs: dict[tuple[str, str], Graph], tmp_path: Path
) -> None:
    graph = graph_of(graphs, tmp_path, family, dtype)
    program = random_program(graph, CUDA, NUM_PAGES)
    for tokens in (16, 130, 500):
        sequences = [(tokens, tokens)]
        found = measured(program, graph, sequences)
        assert found <= predicted(graph, sequences) + SMALL, f"{tokens} tokens"
        assert predicted_of_this_size(graph, sequences) <= 1.1 * found + 4 * SMALL, f"{tokens} tokens"


@pytest.mark.parametrize("family", FAMILIES)
def test_batches_never_take_more(family: str, graphs: dict[tuple[str, str], Graph], tmp_path: Path) -> None:
    graph = graph_of(graphs, tmp_path, family, "bfloat16")
    program = random_program(graph, CUDA, NUM_PAGES)
    for sequences in (
        [(1, 1)],
        [(1, 100)] * 9,
        [(1, 40), (100, 100), (1, 7), (90, 190), (3, 30)],
        [(17, 17), (9, 300), (31, 31), (16, 20)],
        [(2, 2)] * 12,
    ):
        assert measured(program, graph, sequences) <= predicted(graph, sequences) + SMALL, sequences
