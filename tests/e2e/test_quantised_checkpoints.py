"""Quantised checkpoints in the folders that publishers have: built and loaded, with the logits of the same values in
float32, and, bit for bit, with those of a bundle that dequantises them while it loads. Inputs of layers stay as they
are: `test_published_activations.py` has them rounded.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import families
import pytest
import quantised
import torch
from published_configs import quark
from quantised_checkpoints import (
    SIZES,
    Case,
    Made,
    Quantise,
    blocks,
    compressed,
    compressed_fp8,
    finer,
    float8,
    in_groups,
    integers,
    maker,
    rows,
    stored_integers,
    write,
)
from reference import hf_logits, relative_error
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import precast
from precast.check.shards import prove, prove_with_random_weights, unsharded
from precast.cli import show
from precast.ir.artifact import Bundle
from precast.ir.errors import WeightsError
from precast.ir.graph.schema import Const, Node
from precast.ir.graph.world import unsharded as on_one_rank
from precast.ir.weights import recipes
from precast.ir.weights.tensorfile import element_bytes
from precast.loader.weights.stream import params_bytes

PROMPT = [5, 9, 70, 33, 12, 88]

MODELOPT = {
    "producer": {"name": "modelopt"},
    "quantization": {
        "quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": ["lm_head"],
    },
}  # fmt: skip
UE8M0 = {"quant_method": "fp8", "scale_fmt": "ue8m0", "activation_scheme": "dynamic", "fmt": "e4m3"}
MXFP8 = {"quant_method": "mxfp8", "scale_fmt": "ue8m0", "weight_block_size": [1, 32], "ignored_layers": ["lm_head"]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": True}
GEMV = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv"}
NOT_DOWN = r".*\.layers\..*(?<!down)_proj\.weight"
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}


IN_BLOCKS_BESIDE_NVFP4 = {
    "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "ignore": ["lm_head"],
    "quantized_layers": {
        **{f"model.layers.{i}.self_attn": {"quant_algo": "FP8_PB_WO"} for i in range(9)},
        **{f"model.layers.{i}.mlp": {"quant_algo": "NVFP4", "group_size": 16} for i in range(9)},
    },
}  # fmt: skip
OF_BLOCKS = SIZES | {"hidden_size": 320, "head_dim": 64}
"""Of more blocks of 128 than one, and a smaller last one."""


def blocks_beside_nvfp4(suffix: str, shape: Callable[[int, int], tuple[int, ...]]) -> Quantise:
    def quantise(name: str, weight: torch.Tensor) -> quantised.Stored:
        if ".mlp." in name:
            return quantised.nvfp4(name, weight)
        rows, columns = (-(-size // 128) for size in weight.shape)
        return quantised.float8(name, weight, (128, 128), suffix, shape(rows, columns))

    return quantise


def in_groups_of_32(name: str, weight: torch.Tensor) -> quantised.Stored:
    return quantised.awq_gemv(name.removesuffix(".weight"), weight, 32)


CASES = {
    "FP8 in blocks": Case(
        "llama", {"quant_method": "fp8", "weight_block_size": [32, 32]}, float8("_scale_inv", (32, 32), blocks)
    ),
    "FP8 in blocks, scales in E8M0": Case(
        "llama", UE8M0 | {"weight_block_size": [32, 32]},
        lambda name, weight: quantised.float8_e8m0(name, weight, (32, 32)),
    ),
    "FP8 in blocks that no matrix ends with": Case(
        "llama", {"quant_method": "fp8", "weight_block_size": [32, 32]}, float8("_scale_inv", (32, 32), blocks),
        changes={},
    ),
    "FP8, a scale a tensor": Case(
        "llama", {"quant_method": "fp8", "weight_block_size": None}, float8("_scale_inv", None, lambda *_: ())
    ),
    "FBGEMM FP8": Case("llama", {"quant_method": "fbgemm_fp8"}, float8("_scale", (1, 1 << 20), rows)),
    "ModelOpt FP8": Case(
        "llama", {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
        float8("_scale", None, lambda *_: ()),
    ),
    "compressed FP8, a scale a tensor": Case(
        "llama", compressed_fp8("tensor"), float8("_scale", None, lambda *_: (1,))
    ),
    "compressed FP8 by channels": Case("llama", compressed_fp8("channel"), float8("_scale", (1, 1 << 20), rows)),
    "compressed FP8 in blocks": Case(
        "llama", compressed_fp8("block", block_structure=[32, 32]), float8("_scale", (32, 32), blocks)
    ),
    "compressed FP8 of some layers": Case(
        "llama", compressed_fp8("channel") | {"ignore": ["lm_head", "re:.*v_proj", "re:.*layers\\.0\\."]},
        float8("_scale", (1, 1 << 20), rows), which=r".*\.layers\.[12]\..*[^v]_proj\.weight",
    ),
    "ModelOpt NVFP4": Case("llama", MODELOPT, quantised.nvfp4, "hf_quant_config.json"),
    "ModelOpt FP8 in blocks beside NVFP4": Case(
        "llama", IN_BLOCKS_BESIDE_NVFP4, blocks_beside_nvfp4("_scale", lambda *sizes: (sizes[0], 1, sizes[1], 1)),
        changes=OF_BLOCKS,
    ),
    "ModelOpt FP8 in DeepSeek's blocks beside NVFP4": Case(
        "llama", IN_BLOCKS_BESIDE_NVFP4, blocks_beside_nvfp4("_scale_inv", lambda *sizes: sizes), changes=OF_BLOCKS
    ),
    "compressed NVFP4": Case(
        "llama", compressed("nvfp4-pack-quantized", **NVFP4),
        lambda name, weight: quantised.nvfp4(name, weight, divided=True),
    ),
    "compressed MXFP4": Case(
        "llama",
        compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32,
                   scale_dtype="torch.uint8"),
        quantised.packed_mxfp4,
        changes=SIZES | {"head_dim": 32},
    ),
    "compressed MXFP8": Case(
        "llama",
        compressed("mxfp8-quantized", num_bits=8, type="float", strategy="group", group_size=32,
                   scale_dtype="torch.uint8"),
        quantised.mxfp8,
    ),
    "ModelOpt MXFP8": Case(
        "llama", {"quantization": MODELOPT["quantization"] | {"quant_algo": "MXFP8", "group_size": 32}},
        quantised.mxfp8, "hf_quant_config.json",
    ),
    "Quark MXFP8": Case("llama", quark("fp8_e4m3"), quantised.mxfp8),
    "Quark MXFP4": Case(
        "llama", quark("fp4"), functools.partial(quantised.packed_mxfp4, packed=""), changes=SIZES | {"head_dim": 32}
    ),
    "Quark MXFP8 experts": Case(
        "qwen3_moe", quark("fp8_e4m3"), quantised.mxfp8, changes=SIZES | {"moe_intermediate_size": 128}
    ),
    "MXFP8 experts": Case(
        "qwen3_moe", MXFP8, functools.partial(quantised.mxfp8, suffix="_scale_inv"),
        changes=SIZES | {"moe_intermediate_size": 128},
    ),
    "FP8 experts in blocks": Case(
        "qwen3_moe", {"quant_method": "fp8", "weight_block_size": [16, 16]}, float8("_scale_inv", (16, 16), finer),
    ),
    "FP8 experts in blocks, scales in E8M0": Case(
        "qwen3_moe", UE8M0 | {"weight_block_size": [16, 16]},
        lambda name, weight: quantised.float8_e8m0(name, weight, (16, 16)),
    ),
    "compressed NVFP4 experts": Case(
        "qwen3_moe", compressed("nvfp4-pack-quantized", **NVFP4),
        lambda name, weight: quantised.nvfp4(name, weight, divided=True),
    ),
    "INT4 experts": Case(
        "qwen3_moe", compressed("pack-quantized", **integers(4, "group", symmetric=True)),
        stored_integers(4, 16, zeros=False),
    ),
    "MXFP4 experts": Case(
        "gpt_oss", {"quant_method": "mxfp4"}, quantised.mxfp4,
        changes={"hidden_size": 64, "intermediate_size": 64, "head_dim": 16, "num_local_experts": 4},
        which=r".*\.experts\.(gate_up|down)_proj",
    ),
    "INT4": Case(
        "llama", compressed("pack-quantized", **integers(4, "group", symmetric=True)),
        stored_integers(4, 16, zeros=False),
    ),
    "INT4 with zeros": Case(
        "llama", compressed("pack-quantized", **integers(4, "group", symmetric=False)),
        stored_integers(4, 16, zeros=True),
    ),
    "INT4 by channels": Case(
        "llama", compressed("pack-quantized", **integers(4, "channel", symmetric=True)),
        stored_integers(4, None, zeros=False),
    ),
    "INT4 with act order": Case(
        "llama", compressed("pack-quantized", **integers(4, "group", symmetric=True, actorder="group")),
        stored_integers(4, 16, zeros=False, order=True),
    ),
    "INT8 packed": Case(
        "llama", compressed("pack-quantized", **integers(8, "group", symmetric=False)),
        stored_integers(8, 16, zeros=True),
    ),
    "INT8": Case(
        "llama", compressed("int-quantized", **integers(8, "channel", symmetric=True)),
        stored_integers(8, None, zeros=False, packed=False),
    ),
    "INT8 with zeros": Case(
        "llama", compressed("int-quantized", **integers(8, "channel", symmetric=False)),
        stored_integers(8, None, zeros=True, packed=False),
    ),
    "AWQ": Case(
        "llama", {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"}, in_groups(quantised.awq)
    ),
    "AWQ experts": Case(
        "qwen3_moe", {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"}, in_groups(quantised.awq)
    ),
    "AWQ of gemv": Case("llama", GEMV, in_groups_of_32, changes=SIZES | {"head_dim": 32}),
    "AWQ experts of gemv": Case(
        "qwen3_moe", GEMV, in_groups_of_32, changes=SIZES | {"head_dim": 32, "moe_intermediate_size": 128}
    ),
    "GPTQ": Case("llama", GPTQ | {"desc_act": False}, in_groups(quantised.gptq, order=False), dtype="float16"),
    "GPTQ with act order": Case(
        "llama", GPTQ | {"desc_act": True}, in_groups(quantised.gptq, order=True), dtype="float16"
    ),
    "GPTQ of 8 bits": Case(
        "llama", GPTQ | {"bits": 8, "desc_act": False}, in_groups(quantised.gptq, order=False, bits=8), dtype="float16"
    ),
    "GPTQ of 8 bits with act order": Case(
        "llama", GPTQ | {"bits": 8, "desc_act": True}, in_groups(quantised.gptq, order=True, bits=8), dtype="float16"
    ),
    "GPTQ experts of 8 bits": Case(
        "qwen3_moe", GPTQ | {"bits": 8, "desc_act": False}, in_groups(quantised.gptq, order=False, bits=8),
        dtype="float16",
    ),
    "FP8 in blocks beside a last product in 16 bits": Case(
        "llama",
        {"quant_method": "fp8", "weight_block_size": [32, 32], "modules_to_not_convert": ["lm_head", "down_proj"]},
        float8("_scale_inv", (32, 32), blocks), which=NOT_DOWN,
    ),
    "AWQ beside a last product in 16 bits": Case(
        "llama",
        {"quant_method": "awq", "bits": 4, "group_size": 16, "modules_to_not_convert": ["down_proj"]},
        in_groups(quantised.awq), which=NOT_DOWN,
    ),
    "GPTQ with act order beside a last product in 16 bits": Case(
        "llama", GPTQ | {"desc_act": True, "dynamic": {r"-:.*\.down_proj": {}}},
        in_groups(quantised.gptq, order=True), dtype="float16", which=NOT_DOWN,
    ),
    "GPTQ with its head": Case(
        "llama", GPTQ | {"desc_act": False, "lm_head": True}, in_groups(quantised.gptq, order=False),
        changes=SIZES | {"vocab_size": 136}, dtype="float16", which=r"(.*\.layers\..*_proj|lm_head)\.weight",
    ),
    "GPTQ with act order with its head": Case(
        "llama", GPTQ | {"desc_act": True, "lm_head": True}, in_groups(quantised.gptq, order=True),
        changes=SIZES | {"vocab_size": 136}, dtype="float16", which=r"(.*\.layers\..*_proj|lm_head)\.weight",
    ),
    "GPTQ experts": Case(
        "qwen3_moe", GPTQ | {"desc_act": False}, in_groups(quantised.gptq, order=False), dtype="float16"
    ),
}  # fmt: skip


def logits(bundle: Bundle, weights: Path) -> torch.Tensor:
    with precast.load(bundle.path, weights=weights, device="cpu", cache_bytes=1 << 20) as engine:
        return engine.logits(PROMPT)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """Bundles keep what is quantised."""
    return maker(CASES, tmp_path_factory, activations="none")


NVFP4_EXPERTS = {
    "moe_quant_algo": "NVFP4", "quant_algo": "MIXED_PRECISION", "group_size": 16, "ignore": ["*.attn.*", "head"],
    "quantized_layers": {f"layers.{i}.ffn.experts": {"quant_algo": "NVFP4", "group_size": 16} for i in range(9)},
}  # fmt: skip


@pytest.mark.parametrize("format", ["mxfp4", "nvfp4"])
def test_experts_of_four_bits_beside_fp8_in_blocks(format: str, tmp_path: Path) -> None:
    """DeepSeek-V4, whose checkpoints call scales `<layer>.scale`; ModelOpt makes the experts NVFP4, and leaves the
    rest as it is."""

    def quantise(name: str, weight: torch.Tensor) -> quantised.Stored:
        if ".ffn.experts." in name:
            return {"mxfp4": quantised.fp4_e8m0, "nvfp4": quantised.nvfp4}[format](name, weight)
        made, dense = quantised.float8_e8m0(name, weight, (16, 16))
        return {name: made[name], name.removesuffix("weight") + "scale": made[name + "_scale_inv"]}, dense

    which = r".*\.layers\..*(attn\.w\w+|indexer\.wq_b|experts\..*)\.weight"
    entries = UE8M0 | {"weight_block_size": [16, 16], "expert_dtype": "fp4"}
    case = Case("deepseek_v4", entries | (NVFP4_EXPERTS if format == "nvfp4" else {}), quantise, which=which)
    plain, stored = write(case, tmp_path)
    bundle = precast.build(stored, tmp_path / "kept", dtype="float32", activations="none")
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)

    found = logits(bundle, stored)

    assert relative_error(found, hf_logits(model, [PROMPT])[0]) < 1e-5
    nodes = [node for block in bundle.graph.blocks for node in block.nodes] + list(bundle.graph.main)
    kept = [node for node in nodes if isinstance(node, Node) and node.op == "precast.quantised_experts"]
    assert kept
    assert {node.args["format"] for node in kept} == {Const(format)}
    assert {row.units for row in bundle.graph.shards.rows if row.kind == "entry attention"} == {2}, "groups of heads"
    for dp in (1, 2):
        assert prove(bundle, stored, tp=2, ep=2, dp=dp).holds


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_dequantised_model(case: str, made: Callable[[str], Made], tmp_path: Path) -> None:
    (plain, stored), bundle = made(case)
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)

    found = logits(bundle, stored)

    assert relative_error(found, hf_logits(model, [PROMPT])[0]) < 1e-5
    assert "dequantised" not in bundle.provenance, "all of it is kept"
    dense = precast.build(stored, tmp_path / "dense", dtype="float32", dequantise=True, disabled_passes=apart(bundle))
    if "GPTQ with act order" in case:  # of a matrix that lies transposed a library may add up in another order
        assert relative_error(found, logits(dense, stored)) < 1e-6
    else:
        assert torch.equal(found, logits(dense, stored))


@pytest.mark.parametrize(
    ("case", "are_joined"),
    [
        ("GPTQ", True), ("GPTQ with act order", False), ("GPTQ of 8 bits", True),
        ("GPTQ of 8 bits with act order", False),
    ],
)  # fmt: skip
def test_gptq_is_joined_where_its_groups_are_in_order(case: str, are_joined: bool, made: Callable[[str], Made]) -> None:
    bundle = made(case).bundle

    names = {param.name.split("layers.0.")[-1] for param in bundle.graph.params if "layers.0." in param.name}

    assert ("self_attn.q_proj_k_proj_v_proj.weight" in names) == are_joined
    assert ("self_attn.o_proj.weight.groups" in names) != are_joined
    assert ("*.g_idx" in bundle.manifest.checkpoint.ignored) == are_joined


@pytest.mark.parametrize(
    ("case", "format"),
    [
        ("GPTQ", "packed4"), ("GPTQ experts", "packed4"), ("GPTQ with act order", "gptq"),
        ("GPTQ of 8 bits", "packed8"), ("GPTQ of 8 bits with act order", "packed8"),
        ("GPTQ experts of 8 bits", "packed8"), ("AWQ", "packed4"), ("AWQ experts", "packed4"),
        ("AWQ of gemv", "packed4"), ("AWQ experts of gemv", "packed4"),
    ],
)  # fmt: skip
def test_words_lie_in_rows_but_for_gptq_with_act_order(case: str, format: str, made: Callable[[str], Made]) -> None:
    nodes = [node for block in made(case).bundle.graph.blocks for node in block.nodes]

    found = {(node.op, node.args["format"]) for node in nodes if node.op.startswith("precast.quantised_")}

    ops = {"precast.quantised_linear"} | ({"precast.quantised_experts"} if "experts" in case else set())
    assert found == {(op, Const(format)) for op in ops}


@pytest.mark.parametrize(
    ("case", "ways"),
    [
        ("FP8 in blocks", {"fp8 of 8 bits, blocks of 32 x 32": 6, "fp8 of 8 bits, blocks of 16 x 32": 3,
                           "fp8 of 8 bits, blocks of 32 x 16": 3}),
        ("FP8, a scale a tensor", {"fp8 of 8 bits, one scale a row": 6, "fp8 of 8 bits, one scale a matrix": 6}),
        ("AWQ", {"packed4 of 4 bits, groups of 16": 12}),
        ("GPTQ with act order", {"gptq of 4 bits, groups in act order": 21}),
        ("GPTQ experts of 8 bits", {"packed8 of 8 bits, groups of 16": 12}),
        ("INT4 by channels", {"packed4 of 4 bits, one scale a row": 12}),
        ("MXFP4 experts", {"mxfp4 of 4 bits, groups of 32": 6}),
    ],
)  # fmt: skip
def test_inspect_says_how_weights_are_stored(case: str, ways: dict[str, int], made: Callable[[str], Made]) -> None:
    report = show.summary(made(case).bundle)

    assert report.fields["few_bits"] == ways
    assert all(f"{way}: {count}" in report.text for way, count in ways.items())


@pytest.mark.parametrize("dequantise", [False, True], ids=["kept", "dequantised"])
def test_groups_in_another_order_than_the_config_says_are_refused(
    dequantise: bool, made: Callable[[str], Made], tmp_path: Path
) -> None:
    """As stored with act order, and said to be without."""
    stored = made("GPTQ").checkpoints.stored
    bundle = precast.build(stored, tmp_path / "b", dtype="float32", dequantise=dequantise)
    tensors = load_file(stored / "model.safetensors")
    name = "model.layers.1.self_attn.o_proj.g_idx"
    tensors[name][20], tensors[name][50] = tensors[name][50].item(), tensors[name][20].item()
    save_file(tensors, tmp_path / "model.safetensors")

    with pytest.raises(WeightsError) as error:
        precast.load(bundle.path, weights=tmp_path, device="cpu", cache_bytes=1 << 20)

    assert error.value.code == "weights-mismatch"
    assert f"{name}: input 20 is of group 3, expected 1" in str(error.value)
    assert "desc_act" in str(error.value)


def test_groups_in_order_need_not_be_stored(made: Callable[[str], Made], tmp_path: Path) -> None:
    (_, stored), bundle = made("GPTQ")
    tensors = load_file(stored / "model.safetensors")
    save_file({name: each for name, each in tensors.items() if "g_idx" not in name}, tmp_path / "model.safetensors")

    assert torch.equal(logits(bundle, tmp_path), logits(bundle, stored))


def apart(bundle: Bundle) -> tuple[str, ...]:
    """What to leave out so that a dequantised bundle multiplies the same matrices, and not several in one: the bits of
    a product depend on it."""
    names = [param.name for param in bundle.graph.params]
    return () if any("q_proj_k_proj" in name for name in names) else ("fuse_projections", "fuse_gated_activation")


@pytest.mark.parametrize("case", CASES)
def test_ranks_together_give_the_logits_of_one(case: str, made: Callable[[str], Made]) -> None:
    (_, stored), bundle = made(case)
    worlds = [(world.tp, ep) for world in bundle.graph.shards.worlds for ep in world.ep]

    assert worlds == [(1, 1), *CASES[case].worlds]
    alone = unsharded(bundle, stored)
    assert all(prove(bundle, stored, tp=tp, ep=ep, alone=alone).holds for tp, ep in worlds[1:])


def test_channels_are_split_where_blocks_end(made: Callable[[str], Made]) -> None:
    """Heads have 16 channels, half a block, or 12. Of the feed-forward layer's 128 a rank has whole blocks of 32; of
    80, which not even two ranks could share in blocks, parts of them."""
    found = {}
    for case in ("FP8 in blocks", "FP8 in blocks that no matrix ends with"):
        nodes = [node for node in made(case).bundle.graph.blocks[0].nodes if node.op == "precast.quantised_linear"]
        found[case] = [tuple(item.value for item in node.args["block"].items) for node in nodes]  # type: ignore[union-attr]

    assert found == {
        "FP8 in blocks": [(16, 32), (32, 16), (32, 32), (32, 32)],
        "FP8 in blocks that no matrix ends with": [(4, 32), (32, 4), (8, 32), (32, 8)],
    }


def test_channels_are_split_where_blocks_of_the_first_product_end(made: Callable[[str], Made]) -> None:
    """The last product, in 16 bits, could be split anywhere."""
    nodes = made("FP8 in blocks beside a last product in 16 bits").bundle.graph.blocks[0].nodes

    (_, _, gate_up) = (node for node in nodes if node.op == "precast.quantised_linear")

    assert [item.value for item in gate_up.args["block"].items] == [32, 32]  # type: ignore[union-attr]


@pytest.mark.parametrize("case", ["FP8, a scale a tensor", "MXFP4 experts", "AWQ"])
def test_stages_and_ranks_with_sequences_of_their_own(case: str, made: Callable[[str], Made]) -> None:
    (_, stored), bundle = made(case)
    alone = unsharded(bundle, stored)

    assert prove(bundle, stored, tp=1, pp=2, alone=alone).holds
    assert prove(bundle, stored, tp=2, dp=2, alone=alone).holds


@pytest.mark.parametrize(
    "case",
    [
        "FP8 in blocks", "MXFP8 experts", "MXFP4 experts", "INT4 with act order", "compressed NVFP4", "AWQ",
        "AWQ of gemv", "GPTQ",
    ],
)  # fmt: skip
def test_ranks_agree_about_random_weights(case: str, made: Callable[[str], Made]) -> None:
    assert prove_with_random_weights(made(case).bundle, tp=2).proof.holds


FINITE, POSITIVE = "expected a finite number", "expected a finite number above 0"
UNSIGNED = "expected a finite number of at least 0"


@pytest.mark.parametrize("dequantise", [False, True], ids=["kept", "dequantised"])
@pytest.mark.parametrize(
    ("case", "part", "value", "message"),
    [
        ("FP8 in blocks", "self_attn.q_proj.weight_scale_inv", torch.nan, f"scale at [1, 1] is nan, {UNSIGNED}"),
        ("FP8 in blocks", "mlp.up_proj.weight_scale_inv", -0.5, f"scale at [3, 1] is -0.5, {UNSIGNED}"),
        ("FP8, a scale a tensor", "mlp.up_proj.weight_scale_inv", -0.5, f"scale is -0.5, {UNSIGNED}"),
        ("FP8 in blocks, scales in E8M0", "mlp.up_proj.weight_scale_inv", torch.nan, "scale at [3, 1] is 0xff"),
        ("compressed MXFP8", "mlp.up_proj.weight_scale", 255, "scale at [127, 1] is 0xff"),
        ("FBGEMM FP8", "mlp.down_proj.weight_scale", torch.inf, f"scale at [63, 0] is inf, {UNSIGNED}"),
        ("ModelOpt NVFP4", "mlp.up_proj.weight_scale", torch.nan, f"scale at [127, 3] is 0x7f, {UNSIGNED}"),
        ("ModelOpt NVFP4", "mlp.up_proj.weight_scale", -1.0, f"scale at [127, 3] is 0xb8, {UNSIGNED}"),
        ("ModelOpt NVFP4", "mlp.up_proj.weight_scale_2", torch.nan, f"scale is nan, {UNSIGNED}"),
        ("compressed NVFP4", "mlp.up_proj.weight_global_scale", 0.0, f"scale at [0] is 0.0, {POSITIVE}"),
        ("compressed NVFP4", "mlp.up_proj.weight_global_scale", -2.0, f"scale at [0] is -2.0, {POSITIVE}"),
        ("compressed NVFP4 experts", "mlp.experts.3.up_proj.weight_global_scale", 0.0, "scale at [0] is 0.0"),
        ("compressed MXFP4", "mlp.down_proj.weight_scale", 255, f"scale at [63, 3] is 0xff, {FINITE}"),
        ("INT4", "mlp.down_proj.weight_scale", torch.nan, f"scale at [63, 7] is nan, {FINITE}"),
        ("AWQ experts", "mlp.experts.2.gate_proj.scales", torch.inf, f"scale at [3, 63] is inf, {FINITE}"),
        ("GPTQ with act order", "self_attn.o_proj.g_idx", 4, "group at [63] is 4, expected 0 to 3"),
        ("INT4 with act order", "self_attn.o_proj.weight_g_idx", -1, "group at [63] is -1, expected 0 to 3"),
    ],
)
def test_scales_that_cannot_be_meant_are_refused(
    case: str, part: str, value: float, message: str, dequantise: bool, made: Callable[[str], Made], tmp_path: Path
) -> None:
    """The message names the one tensor of those that are joined or stacked, and its file."""
    (_, stored), bundle = made(case)
    if dequantise:
        bundle = precast.build(stored, tmp_path / "b", dtype="float32", dequantise=True)
    tensors = load_file(stored / "model.safetensors")
    name = f"model.layers.1.{part}"
    damaged = tensors[name].float()
    damaged.view(-1)[-1] = value
    tensors[name] = damaged.to(tensors[name].dtype)
    save_file(tensors, tmp_path / "model.safetensors")

    with pytest.raises(WeightsError) as error:
        precast.load(bundle.path, weights=tmp_path, device="cpu", cache_bytes=1 << 20)

    assert error.value.code == "weights-mismatch"
    assert error.value.where == str(tmp_path / "model.safetensors")
    assert error.value.message.startswith(f"{name}: the {message}")


@pytest.mark.parametrize("dequantise", [False, True], ids=["kept", "dequantised"])
@pytest.mark.parametrize(
    ("case", "part", "value"),
    [
        ("FP8 in blocks", "mlp.up_proj.weight_scale_inv", 0.0),
        ("ModelOpt NVFP4", "mlp.up_proj.weight_scale_2", 0.0),
        ("INT4", "mlp.down_proj.weight_scale", -0.25),
        ("GPTQ", "mlp.down_proj.scales", -0.25),
    ],
)
def test_scales_of_blocks_of_zeros_and_signed_ones_of_integers_are_taken(
    case: str, part: str, value: float, dequantise: bool, made: Callable[[str], Made], tmp_path: Path
) -> None:
    (_, stored), bundle = made(case)
    if dequantise:
        bundle = precast.build(stored, tmp_path / "b", dtype="float32", dequantise=True)
    tensors = load_file(stored / "model.safetensors")
    tensors[f"model.layers.1.{part}"].view(-1)[-1] = value
    save_file(tensors, tmp_path / "model.safetensors")

    assert logits(bundle, tmp_path).isfinite().all()


def test_a_checkpoint_that_is_not_quantised_is_refused(made: Callable[[str], Made]) -> None:
    (plain, _), bundle = made("FP8 in blocks")

    with pytest.raises(WeightsError) as error:
        precast.load(bundle.path, weights=plain, device="cpu", cache_bytes=1 << 20)

    assert "model.layers.0.mlp.down_proj.weight: expected float8_e4m3fn, found float32" in str(error.value)
    assert "model.layers.0.mlp.down_proj.weight_scale_inv" in str(error.value)


@pytest.mark.parametrize(
    ("name", "shape", "found"),
    [
        ("weight_scale", (4, 6), "weight_scale: expected [2, 1, 3, 1], found [4, 6]"),
        ("weight_scale_inv", (4, 6), "weight_scale_inv: expected [2, 1, 3, 1], found [4, 6]"),
        ("scale", (2, 3), "weight_scale: expected floating point [2, 1, 3, 1], or {}weight_scale_inv"),
    ],
)  # fmt: skip
def test_scales_of_blocks_by_other_names_or_shapes_are_refused(
    name: str, shape: tuple[int, ...], found: str, made: Callable[[str], Made], tmp_path: Path
) -> None:
    (_, stored), bundle = made("ModelOpt FP8 in blocks beside NVFP4")
    tensors, layer = load_file(stored / "model.safetensors"), "model.layers.1.self_attn.q_proj."
    del tensors[f"{layer}weight_scale"]
    tensors[layer + name] = torch.ones(shape)
    save_file(tensors, tmp_path / "model.safetensors")

    with pytest.raises(WeightsError) as error:
        precast.load(bundle.path, weights=tmp_path, device="cpu", cache_bytes=1 << 20)

    assert layer + found.format(layer) in str(error.value)


@pytest.mark.parametrize(("scale", "fits"), [(2.0**-14, True), (1.0 + 2.0**-10, False)])
def test_scales_that_16_bits_do_not_hold_are_refused(
    scale: float, fits: bool, made: Callable[[str], Made], tmp_path: Path
) -> None:
    """The config says bfloat16, and so does the bundle; in the checkpoint scales are float16."""
    (_, stored), bundle = made("INT4")
    tensors = load_file(stored / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight_scale"
    assert tensors[name].dtype == torch.bfloat16
    tensors[name] = torch.full_like(tensors[name], 2.0**-9).half()
    tensors[name][3, 1] = scale
    save_file(tensors, tmp_path / "model.safetensors")
    message = ""

    try:
        precast.load(bundle.path, weights=tmp_path, device="cpu", cache_bytes=1 << 20).close()
    except WeightsError as error:
        message = str(error)

    assert bool(message) != fits
    assert fits or re.search(f"{name}: a scale that bfloat16 doesn't hold exactly(.|\n)*--dequantise", message)


@pytest.mark.parametrize("scales", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", ["GPTQ", "GPTQ with act order", "GPTQ of 8 bits", "GPTQ experts"])
def test_gptq_under_a_config_of_bfloat16(case: str, scales: torch.dtype, tmp_path: Path) -> None:
    """GPTQModel's scales are float16 all the same; AutoGPTQ's are of the model's type."""
    _, stored = write(CASES[case]._replace(dtype="bfloat16"), tmp_path)
    tensors = load_file(stored / "model.safetensors")
    typed = {name: each.to(scales) if name.endswith(".scales") else each for name, each in tensors.items()}
    save_file(typed, stored / "model.safetensors")
    bundle = precast.build(stored, tmp_path / "b", dtype="float32")

    found = logits(bundle, stored)

    dense = precast.build(stored, tmp_path / "dense", dtype="float32", dequantise=True, disabled_passes=apart(bundle))
    assert relative_error(found, logits(dense, stored)) < 1e-6
    kept = [param.type.dtype for param in bundle.graph.params if param.name.endswith("scales")]
    assert set(kept) == {"float16"}


@pytest.mark.parametrize(("family", "bits"), [("llama", 4), ("llama-tied-bias", 8)])
def test_mlx(family: str, bits: int, tmp_path: Path) -> None:
    """As mlx_lm writes it: embeddings are quantised, too, and both entries of the config say it. All of it becomes
    numbers of the bundle's dtype as it is read."""
    which, groups = r"(.*_proj|.*embed_tokens|lm_head)\.weight", {"group_size": 32, "bits": bits}
    case = Case(family, groups, lambda name, weight: quantised.mlx(name, weight, bits, 32), which=which)
    plain, stored = write(case, tmp_path)
    config = json.loads((stored / "config.json").read_text())
    (stored / "config.json").write_text(json.dumps(config | {"quantization": groups}))
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)

    bundle = precast.build(stored, tmp_path / "bundle", dtype="float32")

    assert relative_error(logits(bundle, stored), hf_logits(model, [PROMPT])[0]) < 1e-5
    assert [*bundle.provenance["dequantised"]] == ["its groups have biases, and no op adds these"]
    assert prove(bundle, stored, tp=2).holds
    assert prove_with_random_weights(bundle, tp=2).proof.holds


REAL = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "num_hidden_layers": 1}  # fmt: skip
"""Llama-3-8B's."""


@pytest.mark.parametrize(
    "case", [case for case in CASES if CASES[case].family == "llama" and not re.search("MXFP8|head", case)]
)
def test_a_load_takes_the_memory_that_the_checkpoint_has(case: str, tmp_path: Path) -> None:
    """Within 2 %: a scale of a matrix becomes one a row, and the few that have no group are held in 32 bits. Those of
    MXFP8 are many: a byte for 32 becomes four."""
    config = families.make_config("llama")
    for name, value in REAL.items():
        setattr(config, name, value)
    written = config.to_dict() | {"dtype": CASES[case].dtype, "architectures": ["LlamaForCausalLM"]}
    entries = CASES[case].entries
    entries = {"quant_method": "modelopt"} | entries["quantization"] if "quantization" in entries else entries
    (tmp_path / "config.json").write_text(json.dumps(written | {"quantization_config": entries}))

    built = precast.build(tmp_path, tmp_path / "b", dtype="bfloat16", activations="none")
    graph = on_one_rank(built.graph)

    reads = {read.tensor: read for param in graph.params for read in recipes.each_leaf(param.recipe)}
    in_files = sum(math.prod(read.shape) * element_bytes(read.dtype or "bfloat16") for read in reads.values())
    assert params_bytes(graph) < 1.02 * in_files
