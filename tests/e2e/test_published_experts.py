"""Quantised checkpoints of mixtures of experts whose publishers round what experts multiply: bundles compute what
transformers' own experts do in float32 with rows that are rounded by the plain definition (`plain_rounding.py`)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from plain_rounding import (
    Rounding,
    float8_groups,
    float8_groups_e8m0,
    float8_tokens,
    in_parts,
    int8_tokens,
    round_experts,
    round_inputs,
)
from quantised import Stored
from quantised_checkpoints import (
    Case,
    Checkpoints,
    Made,
    compressed,
    float8,
    integers,
    maker,
    rows,
    stored_integers,
    write,
)
from reference import hf_logits, relative_error
from transformers import AutoModelForCausalLM

import precast
from precast.check.shards import prove
from precast.cli import show
from precast.ir.artifact import Bundle
from precast.ir.graph.schema import Block, Const, Node
from precast.ir.graph.world import bound
from precast.kernels.choices import cases
from precast.kernels.use import GPU, statics_in, types_in, use_of

PROMPT = [5, 9, 70, 33, 12, 88]
SIZES = {"hidden_size": 256, "intermediate_size": 384, "moe_intermediate_size": 384, "head_dim": 32}
"""Rows of two groups of 128 inputs, and of three; a rank of two has a group and a half of the latter."""
DEEPSEEK = {name: size for name, size in SIZES.items() if name != "head_dim"}
NEAR, FAR = 2e-3, 1e-2
"""As in `test_published_activations.py`: the logits are equal but for the order of sums, and far without rounding."""


class Published(NamedTuple):
    """A checkpoint with rounded inputs: what the graph says of them, and the plain definition."""

    case: Case
    kind: str
    rounding: Rounding


def small(quantise: Callable[[str, torch.Tensor], Stored]) -> Callable[[str, torch.Tensor], Stored]:
    """Weights that keep the inputs of all layers at about 1, so that no difference grows from layer to layer."""

    def quantised(name: str, weight: torch.Tensor) -> Stored:
        tensors, dense = quantise(name, weight)
        return {key: x * 2.0**-8 if x.dtype == torch.float32 else x for key, x in tensors.items()}, dense * 2.0**-8

    return quantised


def blocks(rows: int, columns: int) -> tuple[int, ...]:
    return -(-rows // 128), -(-columns // 128)


def inputs(format: str, weights: dict[str, Any], **activations: Any) -> dict[str, Any]:
    """A config of compressed-tensors with `input_activations`, of all tokens on their own."""
    config = compressed(format, **weights)
    given = {"symmetric": True, "strategy": "token", "dynamic": True}
    config["config_groups"]["group_0"]["input_activations"] = given | activations
    return config


FP8 = {"num_bits": 8, "type": "float"}
IN_BLOCKS: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
BLOCKS = small(float8("_scale_inv", (128, 128), blocks))
CASES = {
    "FP8 in groups": Published(Case("qwen3_moe", IN_BLOCKS, BLOCKS, changes=SIZES), "fp8_group", float8_groups),
    "FP8 in groups of DeepSeek": Published(
        Case("deepseek_v3", IN_BLOCKS, BLOCKS, changes=DEEPSEEK, which=r".*\.layers\..*_proj(_with_mqa)?\.weight"),
        "fp8_group", float8_groups,
    ),
    "FP8 in groups of DeepSeek-V3.1": Published(
        Case("deepseek_v3", IN_BLOCKS | {"scale_fmt": "ue8m0"}, BLOCKS, changes=DEEPSEEK,
             which=r".*\.layers\..*_proj(_with_mqa)?\.weight"),
        "fp8_group_e8m0", float8_groups_e8m0,
    ),
    "compressed FP8 of tokens": Published(
        Case("qwen3_moe", inputs("float-quantized", FP8 | {"strategy": "channel", "symmetric": True}, **FP8),
             small(float8("_scale", (1, 1 << 20), rows)), changes=SIZES),
        "fp8_token", float8_tokens,
    ),
    "compressed INT8 of tokens": Published(
        Case("qwen3_moe", inputs("int-quantized", integers(8, "channel", symmetric=True), num_bits=8, type="int"),
             stored_integers(8, None, zeros=False, packed=False), changes=SIZES),
        "int8_token", int8_tokens,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    return maker({name: published.case for name, published in CASES.items()}, tmp_path_factory)


def logits(bundle: Bundle, weights: Path, device: str = "cpu", **options: Any) -> torch.Tensor:
    with precast.load(bundle.path, weights=weights, device=device, cache_bytes=1 << 20, **options) as engine:
        return engine.logits(PROMPT)


def plain_logits(published: Published, checkpoints: Checkpoints, between: Rounding | None = None) -> torch.Tensor:
    """Of the model whose layers round their inputs. `between`: how its experts do it, if in another way."""
    model = AutoModelForCausalLM.from_pretrained(checkpoints.plain, dtype=torch.float32)

    def of(name: str) -> Rounding:
        # of latent attention this part is dequantised
        return (lambda x: x) if name.endswith("kv_b_proj") else published.rounding

    round_inputs(model, published.case.which, of)
    round_experts(model, between or published.rounding)
    return hf_logits(model, [PROMPT])[0]


def layers(bundle: Bundle) -> list[tuple[Block, Node]]:
    """The experts in few bits."""
    return [
        (block, node)
        for block in bundle.graph.blocks for node in block.nodes if node.op == "precast.quantised_experts"
    ]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_experts_that_round_rows(case: str, made: Callable[[str], Made]) -> None:
    checkpoints, bundle = made(case)

    found = logits(bundle, checkpoints.stored)

    assert relative_error(found, plain_logits(CASES[case], checkpoints)) < NEAR
    assert relative_error(found, plain_logits(CASES[case], checkpoints, between=lambda x: x)) > FAR


@pytest.mark.parametrize("case", CASES)
def test_the_graph_says_how_rows_are_rounded(case: str, made: Callable[[str], Made]) -> None:
    bundle = made(case).bundle

    assert layers(bundle)
    assert {node.args["rounding"] for _, node in layers(bundle)} == {Const(CASES[case].kind)}
    left = bundle.provenance.get("inputs not rounded", {})
    assert isinstance(left, dict)
    assert not [name for names in left.values() for name in names if "experts" in name]


def test_rows_stay_as_they_are_where_that_is_asked_for(made: Callable[[str], Made], tmp_path: Path) -> None:
    checkpoints, _ = made("FP8 in groups")

    bundle = precast.build(checkpoints.stored, tmp_path / "b", dtype="float32", activations="none")

    assert layers(bundle)
    assert all("rounding" not in node.args for _, node in layers(bundle))
    model = AutoModelForCausalLM.from_pretrained(checkpoints.plain, dtype=torch.float32)
    assert relative_error(logits(bundle, checkpoints.stored), hf_logits(model, [PROMPT])[0]) < 1e-5


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("ep", [1, 2])
def test_ranks_hold_the_same_model(case: str, ep: int, made: Callable[[str], Made]) -> None:
    """The proof compares products of inputs as they are."""
    checkpoints, bundle = made(case)

    assert prove(bundle, checkpoints.stored, tp=2, ep=ep).holds


def test_ranks_that_have_whole_experts_round_whole_rows(made: Callable[[str], Made]) -> None:
    """And those that have parts of them round their part of what is between the products."""
    case = "compressed INT8 of tokens"
    published, (checkpoints, bundle) = CASES[case], made(case)
    parted = functools.partial(_of_widths, published.rounding, {SIZES["moe_intermediate_size"]: 2})

    whole, parts = (logits(bundle, checkpoints.stored, tp=2, ep=ep) for ep in (2, 1))

    round_output = {"o_proj": 2}
    assert relative_error(whole, _ranks_logits(published, checkpoints, published.rounding, round_output)) < NEAR
    assert relative_error(parts, _ranks_logits(published, checkpoints, parted, round_output)) < NEAR
    assert relative_error(whole, parts) > NEAR


def _of_widths(rounding: Rounding, parts: dict[int, int], x: torch.Tensor) -> torch.Tensor:
    return in_parts(rounding, parts.get(x.shape[-1], 1))(x)


def _ranks_logits(
    published: Published, checkpoints: Checkpoints, experts: Rounding, parts: dict[str, int]
) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(checkpoints.plain, dtype=torch.float32)

    def of(name: str) -> Rounding:
        return in_parts(published.rounding, parts.get(name.rpartition(".")[2], 1))

    round_inputs(model, published.case.which, of)
    round_experts(model, experts)
    return hf_logits(model, [PROMPT])[0]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (2, 2)])
def test_hopper_has_kernels_that_round(
    case: str, tp: int, ep: int, made: Callable[[str], Made], tmp_path: Path
) -> None:
    """Also where no torch would compute the definition."""
    bundle = precast.build(made(case).checkpoints.stored, tmp_path / "b", dtype="bfloat16")
    graph = bound(bundle.graph, {"rank": tp - 1, "tp": tp, "ep": ep})

    for block, node in layers(msgspec.structs.replace(bundle, graph=graph)):
        use = use_of(node, types_in(block), GPU.without_torch, statics_in(block))
        assert {each.choice.record.kind for each in cases(use)} == {"triton"}


def test_inspect_counts_the_layers_of_experts(made: Callable[[str], Made]) -> None:
    report = show.summary(made("FP8 in groups").bundle)

    (counted,) = report.fields["expert_activations"].items()
    assert counted[0] == "fp8_group"
    assert f"and {counted[1]} MoE layer" in report.text


@pytest.mark.parametrize(
    ("experts", "linear", "text"),
    [
        ({"none": 3}, {}, "as they are in 3 MoE layers"),
        ({"fp8_token": 1}, {"fp8_token": 8, "none": 2},
         "rounded by fp8_token in 8 linear layers and 1 MoE layer; as they are in 2 linear layers"),
    ],
)  # fmt: skip
def test_inspect_says_both_in_one_row(experts: dict[str, int], linear: dict[str, int], text: str) -> None:
    assert show.rounded_text(linear, experts) == text


def test_scales_in_the_checkpoint_are_left_with_the_reason(tmp_path: Path) -> None:
    entries = {"quant_method": "fp8", "activation_scheme": "static"}
    config = write(Case("qwen3_moe", entries, float8("_scale", None, lambda *_: ())), tmp_path).stored

    bundle = precast.build(config, tmp_path / "b", dtype="float32")

    said = bundle.provenance["inputs not rounded"]
    assert isinstance(said, dict)
    reason = "its weight is joined of several, whose inputs have a scale each"
    assert "model.layers.*.mlp.experts.down_proj" in said[reason]
    assert all("rounding" not in node.args for _, node in layers(bundle))


def test_experts_whose_parts_are_rounded_in_two_ways_are_left(tmp_path: Path) -> None:
    """One op multiplies by both weights."""
    entries = inputs("float-quantized", FP8 | {"strategy": "channel", "symmetric": True}, **FP8)
    whole = entries["config_groups"]["group_0"]
    entries["config_groups"] = {
        "one": {"targets": ["re:.*down_proj"], "weights": whole["weights"]}, "rest": whole,
    }  # fmt: skip
    stored = write(Case("qwen3_moe", entries, float8("_scale", (1, 1 << 20), rows)), tmp_path).stored

    bundle = precast.build(stored, tmp_path / "b", dtype="float32")

    said = bundle.provenance["inputs not rounded"]
    assert isinstance(said, dict)
    reason = "precast.quantised_experts rounds the rows for both of its weights in one way"
    assert "model.layers.*.mlp.experts.gate_up_proj" in said[reason]
    assert all("rounding" not in node.args for _, node in layers(bundle))


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_a_gpu_rounds_as_the_definition_does(case: str, made: Callable[[str], Made], tmp_path: Path) -> None:
    """As the same test of linear layers."""
    checkpoints, bundle = made(case)
    rounded = logits(bundle, checkpoints.stored)
    half = precast.build(checkpoints.stored, tmp_path / "b", dtype="float16")

    by_definition, found = (logits(half, checkpoints.stored, device=device) for device in ("cpu", "cuda"))

    assert relative_error(found.float().cpu(), rounded) < 1.2 * relative_error(by_definition.float(), rounded)
