"""Tables of embeddings that a checkpoint stores in FP8 stay so: of n-grams, in parts, and of tokens, of which ranks
have a part. The logits are, bit for bit, those of a bundle that dequantises them while it loads.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import quantised
import torch
from model_sweep import COMPLETIONS
from reference import hf_logits, relative_error
from safetensors.torch import load_file, save_file
from stored_weights import blocks, config_of
from transformers import AutoConfig, AutoModelForCausalLM

import precast
from precast.builder.native.variants import World, of_worlds
from precast.builder.source.shrink import random_model, shrink
from precast.check.shards import prove, prove_with_random_weights
from precast.cli import show
from precast.ir.artifact import Bundle
from precast.ir.errors import WeightsError
from precast.ir.graph.schema import Node
from precast.ir.graph.world import unsharded
from precast.kernels.use import GPU
from precast.loader.driver.coverage import uncovered
from precast.loader.sizing import EngineLimits

PROMPT = [5, 9, 70, 33, 12, 88, 2, 9, 70]
LOOK_UPS = ("precast.quantised_embedding", "precast.quantised_sharded_embedding")


class Made(NamedTuple):
    """Folders of one model: its values in float32, and as they are stored, with tables in FP8."""

    plain: Path
    stored: Path


def write(config: Any, tables: list[str], folder: Path, products: str = "o_proj") -> Made:
    """A random model; each table has one scale, whatever parts it is stored in, and the `products` have blocks."""
    plain, stored = folder / "plain", folder / "stored"
    model = random_model(config)
    model.save_pretrained(plain)
    dense = load_file(plain / "model.safetensors")
    files: dict[str, torch.Tensor] = {}
    for name, tensor in dense.items():
        made = {name: tensor}
        found = next((each for each in tables if f"{each}." in name), None)
        if found is not None:
            scale = 0.3 + len(name.partition(found)[0]) % 4 / 7
            values = (tensor * 100).to(torch.float8_e4m3fn)
            dense[name] = values.float() * torch.tensor(scale)
            made = {name: values, f"{name.partition(found)[0]}{found}.weight_scale": torch.tensor([scale])}
        elif name.endswith(f"{products}.weight"):
            made, dense[name] = quantised.float8(name, tensor, (32, 32), "_scale_inv", blocks(tensor))
        files |= made
    save_file({name: each.contiguous() for name, each in dense.items()}, plain / "model.safetensors", {"format": "pt"})
    stored.mkdir()
    save_file(files, stored / "model.safetensors")
    linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    entries = {
        "quant_method": "fp8", "weight_block_size": [32, 32], "modules_to_convert": tables,
        "modules_to_not_convert": ["experts", *(each for each in linear if not each.endswith(products))],
    }  # fmt: skip
    written = json.loads((plain / "config.json").read_text())
    (stored / "config.json").write_text(json.dumps(written | {"quantization_config": entries}))
    return Made(plain, stored)


@pytest.fixture(scope="module")
def ngrams(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Qwen4-Exp, whose tables of n-grams are in four parts each."""
    config = shrink(AutoConfig.for_model("qwen4_exp_text", **COMPLETIONS["qwen4_exp_text"]))
    return write(config, ["ngram_embedding", "embed_tokens"], tmp_path_factory.mktemp("ngrams"))


@pytest.fixture(scope="module")
def built(ngrams: Made, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Bundle]:
    """Builds a bundle of it, once."""

    @functools.cache
    def build(dtype: str, **options: Any) -> Bundle:
        return precast.build(ngrams.stored, tmp_path_factory.mktemp("b") / "b", dtype=dtype, **options)

    return build


def logits(bundle: Bundle, weights: Path, device: str = "cpu", **options: Any) -> torch.Tensor:
    with precast.load(bundle.path, weights=weights, device=device, cache_bytes=1 << 24, **options) as engine:
        return engine.logits(PROMPT)


def look_ups(bundle: Bundle) -> list[str]:
    """The ops that look up rows of tables in few bits."""
    nodes = [node for block in bundle.graph.blocks for node in block.nodes]
    nodes += [step for step in bundle.graph.main if isinstance(step, Node)]
    return sorted(node.op for node in nodes if node.op in LOOK_UPS)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_are_those_of_tables_that_are_dequantised(
    dtype: str, tp: int, ngrams: Made, built: Callable[..., Bundle]
) -> None:
    found = logits(built(dtype), ngrams.stored, tp=tp)

    assert torch.equal(found, logits(built(dtype, dequantise=True), ngrams.stored, tp=tp))
    if dtype == "float32":
        model = AutoModelForCausalLM.from_pretrained(ngrams.plain, dtype=torch.float32)
        assert relative_error(found, hf_logits(model, [PROMPT])[0]) < 1e-5


def test_tables_are_held_as_they_are_stored(built: Callable[..., Bundle]) -> None:
    """Of n-grams each rank has all rows, of tokens its part. Ids are rounded by nobody, and nobody says why not."""
    bundle = built("bfloat16")
    params = {param.name: param.type.dtype for param in bundle.graph.params if "embed" in param.name}

    assert look_ups(bundle) == [LOOK_UPS[0], LOOK_UPS[0], LOOK_UPS[1]]
    assert look_ups(built("bfloat16", dequantise=True)) == []
    assert sorted(params.values()) == ["float32"] * 3 + ["float8_e4m3fn"] * 3
    assert "dequantised" not in bundle.provenance
    reasons = bundle.provenance["inputs not rounded"]
    assert isinstance(reasons, dict)
    assert not any("embed" in name for names in reasons.values() for name in names)
    assert show.summary(bundle).fields["few_bits"]["fp8 of 8 bits, one scale a matrix"] == 3


def test_the_driver_alone_looks_them_up_by_kernels_of_the_native_layer(built: Callable[..., Bundle]) -> None:
    bundle = built("bfloat16")
    limits = EngineLimits(256, 8192, bundle.manifest.model.max_seq_len)

    kernels = [each.launch for each in of_worlds(bundle.graph, GPU, (), [World(1, 1), World(2, 1)])]

    assert uncovered(unsharded(bundle.graph), GPU, limits) == []
    found = [each.constants["IS_PART"] for each in kernels if each.kernel.endswith(":quantised_rows_kernel")]
    assert {False, True} == set(found)


def test_ranks_hold_the_same_model(ngrams: Made, built: Callable[..., Bundle]) -> None:
    bundle = built("float32")

    for dp in (1, 2):
        assert prove(bundle, ngrams.stored, tp=2, dp=dp).holds
    assert prove(bundle, ngrams.stored, tp=1, pp=2).holds
    assert prove_with_random_weights(bundle, tp=2).proof.holds


@pytest.mark.parametrize("scale", [float("nan"), -1.0])
def test_a_scale_that_cannot_be_meant(scale: float, ngrams: Made, built: Callable[..., Bundle], tmp_path: Path) -> None:
    tensors = load_file(ngrams.stored / "model.safetensors")
    name = "model.layers.1.ple.ple_embedding.ngram_embedding.weight_scale"
    save_file({**tensors, name: torch.tensor([scale])}, tmp_path / "model.safetensors")

    with pytest.raises(WeightsError, match=name):
        logits(built("bfloat16"), tmp_path)


@pytest.mark.parametrize("tied", [False, True])
def test_a_table_that_the_head_is_tied_to_is_dequantised(tied: bool, tmp_path: Path) -> None:
    made = write(config_of("llama", tie_word_embeddings=tied), ["embed_tokens"], tmp_path)

    bundle = precast.build(made.stored, tmp_path / "b", dtype="float32")

    model = AutoModelForCausalLM.from_pretrained(made.plain, dtype=torch.float32)
    assert relative_error(logits(bundle, made.stored, tp=2), hf_logits(model, [PROMPT])[0]) < 1e-5
    assert look_ups(bundle) == ([] if tied else [LOOK_UPS[1]])
    left = {"more than one op takes it": ["model.embed_tokens.weight"]}
    assert bundle.provenance.get("dequantised") == (left if tied else None)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gpu_gives_the_bits_of_tables_that_are_dequantised(dtype: str, tmp_path: Path) -> None:
    """All other kernels are the same, as nothing else is quantised."""
    made = write(config_of("llama"), ["embed_tokens"], tmp_path, products="none of them")
    kept, dense = (
        precast.build(made.stored, tmp_path / str(dequantise), dtype=dtype, dequantise=dequantise)
        for dequantise in (False, True)
    )

    found, expected = (logits(bundle, made.stored, device="cuda") for bundle in (kept, dense))

    assert len(look_ups(kept)) == 1
    assert torch.equal(found, expected)
