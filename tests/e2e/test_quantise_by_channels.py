"""`--quantise fp8-channel`: a load computes what a checkpoint computes that compressed-tensors quantised beforehand,
with a scale for each output and inputs that are rounded token by token (its preset FP8_DYNAMIC)."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import families
import msgspec
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import calculate_qparams
from quantised_checkpoints import compressed_fp8
from reference import hf_logits, relative_error
from safetensors.torch import load_file, save_file

import precast
from precast.builder.source.shrink import random_model
from precast.check.shards import prove
from precast.cli import show
from precast.ir.artifact import Bundle
from precast.ir.graph.schema import Graph, Read
from precast.ir.graph.world import unsharded as of_one_rank
from precast.ir.weights.checkpoint import CheckpointFiles
from precast.loader.torch_device import open_device
from precast.loader.weights.stream import load_weights

PROMPT = [5, 9, 70, 33, 12, 88]
ROUTERS = ["re:.*mlp.gate$", "re:.*shared_expert_gate$"]
CASES: dict[str, tuple[str, dict[str, Any], list[str], list[tuple[int, int]]]] = {
    # model: (family, changes of its config, what is ignored beside the head, ranks and parts of the experts)
    "llama": ("llama", {"hidden_size": 192, "intermediate_size": 320}, [], [(2, 1)]),
    "experts": ("qwen2_moe", {}, ROUTERS, [(2, 1), (2, 2)]),
}
DYNAMIC = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
WEIGHTS = QuantizationArgs(num_bits=8, type="float", symmetric=True, strategy="channel")


class Made(NamedTuple):
    """A checkpoint in bfloat16 and what is built of it, and the same quantised beforehand."""

    model: Any
    plain: Path
    bundle: Bundle
    stored: Path
    published: Bundle


def quantised_beforehand(plain: Path, stored: Path, ignored: list[str]) -> None:
    """The checkpoint as compressed-tensors makes it of the projections, with its own functions."""
    entries = compressed_fp8("channel")
    entries["config_groups"]["group_0"]["input_activations"] = DYNAMIC
    entries["ignore"] += ignored
    shutil.copytree(plain, stored)
    config = json.loads((plain / "config.json").read_text()) | {"quantization_config": entries}
    (stored / "config.json").write_text(json.dumps(config))
    files = {}
    for name, weight in load_file(plain / "model.safetensors").items():
        files[name] = weight
        if name.endswith("_proj.weight"):
            wide = weight.float()
            scales, zeros = calculate_qparams(wide.amin(1, keepdim=True), wide.amax(1, keepdim=True), WEIGHTS)
            files[name] = quantize(wide, scales, zeros, WEIGHTS, dtype=torch.float8_e4m3fn)
            files[name + "_scale"] = scales
    save_file(files, stored / "model.safetensors", {"format": "pt"})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    @functools.cache
    def make(case: str) -> Made:
        family, changes, ignored, _ = CASES[case]
        folder, config = tmp_path_factory.mktemp("case"), families.make_config(family)
        for name, value in changes.items():
            setattr(config, name, value)
        model = random_model(config).to(torch.bfloat16)
        for weight in (each for each in model.model.layers[1].parameters() if each.dim() > 1):
            weight.data[..., :3, :] = 0.0
        model.save_pretrained(folder / "plain")
        quantised_beforehand(folder / "plain", folder / "stored", ignored)
        bundle = precast.build(folder / "plain", folder / "b", dtype="float32", quantise="fp8-channel")
        published = precast.build(folder / "stored", folder / "p", dtype="float32")
        return Made(model.float(), folder / "plain", bundle, folder / "stored", published)

    return make


def logits(bundle: Bundle, weights: Path, **options: Any) -> torch.Tensor:
    with precast.load(bundle.path, weights=weights, device="cpu", cache_bytes=1 << 20, **options) as engine:
        return engine.logits(PROMPT)


def params_of(bundle: Bundle, weights: Path) -> Mapping[str, torch.Tensor]:
    graph, files = of_one_rank(bundle.graph), CheckpointFiles.open(weights)
    return load_weights(graph, bundle.manifest.checkpoint, files, device=open_device("cpu")).tensors


def without_recipes(graph: Graph) -> Graph:
    params = tuple(msgspec.structs.replace(param, recipe=Read("any", ())) for param in graph.params)
    return msgspec.structs.replace(graph, params=params)


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_what_is_quantised_beforehand(case: str, made: Callable[[str], Made]) -> None:
    """Bit for bit, and with rows of zeros."""
    model, plain, bundle, stored, published = made(case)

    found = logits(bundle, plain)

    assert found.isfinite().all()
    assert torch.equal(found, logits(published, stored))
    assert relative_error(found, hf_logits(model, [PROMPT])[0]) > 1e-3


@pytest.mark.parametrize("case", CASES)
def test_the_graph_is_that_of_what_is_quantised_beforehand(case: str, made: Callable[[str], Made]) -> None:
    """Ops, types, how inputs are rounded, how all is split: everything but how params are made."""
    _, _, bundle, _, published = made(case)

    assert without_recipes(bundle.graph) == without_recipes(published.graph)
    assert "inputs not rounded" not in bundle.provenance
    first, second = (show.summary(each).fields for each in (bundle, published))
    for name in ("weights_bytes", "few_bits", "activations", "expert_activations"):
        assert first.get(name) == second.get(name)
    assert set(first["activations"]) == {"fp8_token"}


@pytest.mark.parametrize("case", CASES)
def test_params_are_those_that_are_stored_beforehand(case: str, made: Callable[[str], Made]) -> None:
    _, plain, bundle, stored, published = made(case)

    found, expected = (params_of(*each) for each in ((bundle, plain), (published, stored)))

    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        rows_of_zeros = expected[name] == torch.finfo(torch.float32).eps  # compressed-tensors' scale of these
        same = tensor.float() == expected[name].float()
        assert (same | (rows_of_zeros if name.endswith("scales") else False)).all(), name
    assert any((tensor == torch.finfo(torch.float32).tiny).any() for tensor in found.values())


@pytest.mark.parametrize(("case", "tp", "ep"), [(case, *world) for case, each in CASES.items() for world in each[3]])
def test_ranks_compute_the_same(case: str, tp: int, ep: int, made: Callable[[str], Made]) -> None:
    """A part of a row has the scale of the whole row."""
    _, plain, bundle, stored, published = made(case)

    found, expected = (logits(*each, tp=tp, ep=ep) for each in ((bundle, plain), (published, stored)))

    assert torch.equal(found, expected)
    assert prove(bundle, plain, tp=tp, ep=ep).holds


def test_inputs_stay_as_they_are_where_that_is_asked_for(made: Callable[[str], Made], tmp_path: Path) -> None:
    _, plain, _, stored, _ = made("experts")

    bundle, published = (
        precast.build(weights, tmp_path / name, dtype="float32", activations="none", **options)
        for weights, name, options in ((plain, "b", {"quantise": "fp8-channel"}), (stored, "p", {}))
    )

    said = show.summary(bundle).fields
    assert (set(said["activations"]), set(said["expert_activations"])) == ({"none"}, {"none"})
    assert torch.equal(logits(bundle, plain), logits(published, stored))
