"""Weights as publishers' libraries store them, and the values that these libraries read: Precast reads the same.

compressed-tensors and transformers are installed, and compute here. What other libraries computed is in the files of
`golden/`, which `golden/make.py` makes. Each weight is read in both ways that bundles have: as numbers, made while the
checkpoint is loaded, and as the parts that stay in few bits, of which an op makes the numbers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import quantised
import torch
from compressed_tensors.compressors import ModelCompressor, decompress_module
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam, maybe_pad_tensor_for_block_quant
from safetensors import safe_open
from safetensors.torch import save_file
from stored_weights import Tensors, blocks, config_of
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from precast.builder.capture.factory import make_module
from precast.builder.source.shrink import random_model, shrink
from precast.builder.weights.kept import kept, stored
from precast.builder.weights.recipes import ModelCheckpoint
from precast.ir.graph.schema import Graph, Param, TensorType, Transpose
from precast.ir.weights import recipes as ir_recipes
from precast.ir.weights.checkpoint import CheckpointFiles
from precast.kernels.dequantise.dequantise import Quantised, dequantise
from precast.loader.torch_device import open_device
from precast.loader.weights.stream import load_weights


class Values(NamedTuple):
    """What Precast reads of weights, by their names, in float32: dequantised by the loader, and by the ops."""

    loaded: Tensors
    kept: Tensors


def read(
    config: Any, entries: dict[str, Any], files: Tensors, names: Iterable[str], folder: Path, *, turned: bool = False
) -> Values:
    """Reads these weights of a checkpoint of `files`, whose config says `entries` of its quantisation. MLX's are not
    kept: no op adds biases. `turned`: the model has the weights with their inputs first, unlike the ops."""
    save_file({name: tensor.contiguous() for name, tensor in files.items()}, folder / "model.safetensors")
    checkpoint = ModelCheckpoint(make_module(config, "float32"), entries)
    recipes = checkpoint.recipes(names)
    in_rows = {name: Transpose(each, 1, 2) if turned else each for name, each in recipes.items()}
    wholes = {} if entries["quant_method"] == "mlx" else {name: kept(each, "float32") for name, each in in_rows.items()}
    parts = {name: stored(whole, f"kept {name}") for name, whole in wholes.items()}
    params = [Param(name, TensorType("float32", ir_recipes.shape(each)), each) for name, each in recipes.items()]
    params += [param for each in parts.values() for param in each.params.values()]
    graph = Graph((), (), tuple(params), (), (), (), {})
    loaded = load_weights(graph, checkpoint.known_names(), CheckpointFiles.open(folder), device=open_device("cpu"))
    made = {}
    for name, whole in wholes.items():
        of = {part: loaded.tensors[param.name] for part, param in parts[name].params.items()}
        weight = of.pop("of")
        dense = dequantise(
            Quantised(weight, **of, format=whole.format, block=parts[name].block, zero_offset=whole.zero_offset)
        )
        made[name] = dense.mT if whole.format == "gptq" or turned else dense
    return Values({name: loaded.tensors[name] for name in recipes}, made)


def check(found: Values, expected: Tensors) -> None:
    """Equal bit for bit. Where a library computed in 16 bits, what Precast read is rounded to them: a value in few bits
    times a scale of 16 bits is rounded once, there and here."""
    assert expected
    for name, values in expected.items():
        assert torch.count_nonzero(values) > values.numel() / 2, f"{name} says little"
        assert torch.equal(found.loaded[name].to(values.dtype), values), name
        if found.kept:
            assert torch.equal(found.kept[name].to(values.dtype), values), name


def llama(**changes: Any) -> Any:
    return config_of("llama", num_hidden_layers=1, **changes)


# --- compressed-tensors ------------------------------------------------------------------------------------------

PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "INT4 in groups": ("W4A16", {"group_size": 16}),
    "INT4 with zeros": ("W4A16_ASYM", {"group_size": 32}),
    "INT4 by channels": ("W4A16", {"group_size": None, "strategy": "channel"}),
    "INT4 by channels with zeros": ("W4A16_ASYM", {"group_size": None, "strategy": "channel"}),
    "INT4, weights ordered while they were quantised": ("W4A16", {"group_size": 16, "actorder": "weight"}),
    "INT8 packed": ("W8A16", {"group_size": None, "strategy": "channel"}),
    "INT8 packed, in groups with zeros": ("W8A16", {"group_size": 16, "strategy": "group", "symmetric": False}),
    "INT8": ("W8A8", {}),
    "INT8 with zeros": ("W8A8", {"symmetric": False}),
    "INT8 in groups": ("W8A8", {"group_size": 16, "strategy": "group"}),
    "INT8, one scale": ("W8A8", {"strategy": "tensor"}),
    "FP8, one scale": ("FP8", {}),
    "FP8 by channels": ("FP8_DYNAMIC", {}),
    "FP8 in blocks": ("FP8_BLOCK", {"block_structure": [24, 16]}),
    "NVFP4": ("NVFP4", {}),
    "NVFP4, inputs of 16 bits": ("NVFP4A16", {}),
    "MXFP4": ("MXFP4A16", {}),
    "MXFP8": ("MXFP8", {}),
    "MXFP8, inputs of 16 bits": ("MXFP8A16", {}),
}
"""Names of the library's presets, and what is changed of how these store weights."""


def scheme_of(case: str) -> QuantizationScheme:
    preset, changes = PRESETS[case]
    scheme = preset_name_to_scheme(preset, ["Linear"])
    scheme.weights = QuantizationArgs(**(scheme.weights.model_dump() | changes))
    return scheme


def in_parts(weight: torch.Tensor, args: QuantizationArgs) -> torch.Tensor:
    """The weight with the values that share a scale along the last dimension, the others as scales have them."""
    if args.strategy == "tensor":
        return weight.reshape(1, -1)
    if args.strategy == "channel":
        return weight.unsqueeze(1)
    if args.strategy == "block":
        rows, columns = args.block_structure
        padded = maybe_pad_tensor_for_block_quant(weight, args.block_structure)
        return padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).transpose(1, 2).flatten(2)
    return weight.unflatten(1, (-1, args.group_size))


def observe(module: torch.nn.Module, args: QuantizationArgs) -> None:
    """Sets a layer's scales and zeros as the library computes them from the least and the largest values."""
    parts = in_parts(module.weight, args)
    bounds = parts.amin(-1), parts.amax(-1)
    whole = None
    if args.strategy == "tensor_group":
        whole = generate_gparam(bounds[0].min(), bounds[1].max())
        module.weight_global_scale.data.copy_(whole)
    scales, zeros = calculate_qparams(*bounds, args, global_scale=whole)
    module.weight_scale.data.copy_(scales)
    module.weight_zero_point.data.copy_(zeros)


class Checkpoint(NamedTuple):
    """What a library stores of a model's layers, the config's quantisation, and what it reads of that."""

    files: Tensors
    entries: dict[str, Any]
    values: Tensors


def compressed(config: Any, case: str, dtype: str, folder: Path) -> Checkpoint:
    """A random model as compressed-tensors stores it."""
    model = random_model(config).to(getattr(torch, dtype))
    for linear in (each for each in model.modules() if isinstance(each, torch.nn.Linear)):
        linear.weight.data += 0.01  # so that the zeros of asymmetric integers are not in the middle of their range
    scheme = scheme_of(case)
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"]))
    layers = {name: each for name, each in model.named_modules() if hasattr(each, "quantization_scheme")}
    with torch.no_grad():
        for layer in layers.values():
            observe(layer, scheme.weights)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    compressor.update_config(str(folder))
    files = {name: tensor.clone() for name, tensor in model.state_dict().items() if name.rpartition(".")[0] in layers}
    for layer in layers.values():
        decompress_module(layer)
    values = {f"{name}.weight": layer.weight.detach() for name, layer in layers.items()}
    return Checkpoint(files, json.loads((folder / "config.json").read_text())["quantization_config"], values)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", PRESETS)
def test_compressed_tensors(case: str, dtype: str, tmp_path: Path) -> None:
    """Of a model in float32, the library's values of integers and FP8 are float32, too. Those of NVFP4, MXFP4 and MXFP8
    are bfloat16, always."""
    config = llama()
    made = compressed(config, case, dtype, tmp_path)

    found = read(config, made.entries, made.files, made.values, tmp_path)

    check(found, made.values)


@pytest.mark.parametrize("case", ["NVFP4", "MXFP4"])
def test_compressed_tensors_of_four_bits_in_float32(case: str, tmp_path: Path) -> None:
    """By the functions with which the library decompresses, without their roundings to bfloat16."""
    config, args = llama(), scheme_of(case).weights
    made = compressed(config, case, "float32", tmp_path)

    found = read(config, made.entries, made.files, made.values, tmp_path)

    expected = {}
    for name in made.values:
        packed, scales = (made.files[name + part] for part in ("_packed", "_scale"))
        values = unpack_fp4_from_uint8(packed, packed.shape[0], 2 * packed.shape[1], dtype=torch.float32)
        scales = (scales.float() - 127).exp2() if case == "MXFP4" else scales.float()
        whole = made.files.get(name + "_global_scale")
        expected[name] = dequantize(values, scales, args=args, dtype=torch.float32, global_scale=whole)
    check(found, expected)


# --- transformers ------------------------------------------------------------------------------------------------

FP8: dict[str, tuple[dict[str, Any], Any, str]] = {
    "blocks": (
        {"quant_method": "fp8", "weight_block_size": [32, 32]},
        lambda name, weight: quantised.float8(name, weight, (32, 32), "_scale_inv", blocks(weight)),
        "_scale_inv",
    ),
    "blocks, scales in E8M0": (
        {"quant_method": "fp8", "weight_block_size": [32, 32], "scale_fmt": "ue8m0"},
        lambda name, weight: quantised.float8_e8m0(name, weight, (32, 32)),
        "_scale_inv",
    ),
    "one scale": (
        {"quant_method": "fp8", "weight_block_size": None},
        lambda name, weight: quantised.float8(name, weight, None, "_scale_inv", ()),
        "_scale_inv",
    ),
    "AutoFP8": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        lambda name, weight: quantised.float8(name, weight, None, "_scale", ()),
        "_scale",
    ),
    "MXFP8": (
        {"quant_method": "mxfp8", "scale_fmt": "ue8m0"},
        lambda name, weight: quantised.mxfp8(name, weight, "_scale_inv"),
        "_scale_inv",
    ),
}
"""What the config says, what makes the stored tensors, and how the name of the scales ends."""


def of_fp8(model: Any, name: str, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """What transformers makes of FP8 for a param of `model`, in its dtype."""
    given = {"weight": [values], "weight_scale_inv": [scales]}
    return Fp8Dequantize(None).convert(given, full_layer_name=name, model=model)[name]


@pytest.mark.parametrize("case", FP8)
def test_transformers_fp8(case: str, tmp_path: Path) -> None:
    config = llama()
    entries, quantise, suffix = FP8[case]
    model = AutoModelForCausalLM.from_config(config)
    weights = {name: each for name, each in model.state_dict().items() if name.endswith("_proj.weight")}
    files: Tensors = {}
    for name, weight in weights.items():
        files |= quantise(name, weight)[0]

    found = read(config, entries, files, weights, tmp_path)

    check(found, {name: of_fp8(model, name, files[name], files[name + suffix]) for name in weights})


def test_transformers_fp4_beside_fp8(tmp_path: Path) -> None:
    """DeepSeek-V4: the experts' second products in FP4, and a layer in FP8, whose scales are exponents, too."""
    config = shrink(AutoConfig.for_model("deepseek_v4", moe_intermediate_size=64, o_lora_rank=32))
    config.moe_intermediate_size = 32
    entries = {
        "quant_method": "fp8", "weight_block_size": [32, 32], "scale_fmt": "ue8m0", "expert_dtype": "fp4",
    }  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    experts, layer = "model.layers.0.mlp.experts.down_proj", "model.layers.0.self_attn.q_a_proj.weight"
    count, rows, columns = model.get_parameter(experts).shape
    files: Tensors = {}
    for expert in range(count):
        name = f"layers.0.ffn.experts.{expert}.w2.weight"
        files |= quantised.fp4_e8m0(name, torch.empty(rows, columns))[0]
    plain, _ = quantised.float8_e8m0("layers.0.attn.wq_a.weight", model.get_parameter(layer).detach(), (32, 32))
    files |= {name.replace("weight_scale_inv", "scale"): each for name, each in plain.items()}

    found = read(config, entries, files, [experts, layer], tmp_path)

    made = [
        of_fp8(model, layer, files[f"layers.0.ffn.experts.{i}.w2.weight"], files[f"layers.0.ffn.experts.{i}.w2.scale"])
        for i in range(count)
    ]
    dense = of_fp8(model, layer, files["layers.0.attn.wq_a.weight"], files["layers.0.attn.wq_a.scale"])
    check(found, {experts: torch.stack(made), layer: dense})


def test_transformers_mxfp4(tmp_path: Path) -> None:
    """GPT-OSS's experts, which transformers keeps with rows and columns exchanged."""
    config = config_of("gpt_oss", num_hidden_layers=1, num_local_experts=4, intermediate_size=32)
    shapes = {"gate_up_proj": (4, 64, 64), "down_proj": (4, 32, 64)}
    names = {f"model.layers.0.mlp.experts.{leaf}": shape for leaf, shape in shapes.items()}
    files: Tensors = {}
    for name, shape in names.items():
        files |= quantised.mxfp4(name, torch.empty(shape))[0]

    found = read(config, {"quant_method": "mxfp4"}, files, names, tmp_path, turned=True)

    given = {name: (files[name + "_blocks"], files[name + "_scales"]) for name in names}
    check(found, {name: convert_moe_packed_tensors(*each, dtype=torch.float32) for name, each in given.items()})


# --- what other libraries computed -------------------------------------------------------------------------------

GOLDEN = Path(__file__).with_name("golden")


def golden_cases() -> list[tuple[str, str]]:
    """The files and their cases."""
    found = []
    for path in sorted(GOLDEN.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found += [(path.stem, case) for case in json.loads(file.metadata()["cases"])]
    return found


@pytest.mark.parametrize(("library", "case"), golden_cases())
def test_golden(library: str, case: str, tmp_path: Path) -> None:
    files: Tensors = {}
    values: Tensors = {}
    with safe_open(GOLDEN / f"{library}.safetensors", "pt") as file:
        said = file.metadata()
        for key in file.keys():  # noqa: SIM118 - it is no dict
            of, kind, name = key.split("/")
            if of == case:
                (files if kind == "stored" else values)[name] = file.get_tensor(key)
    config = AutoConfig.for_model("llama", **json.loads(said["sizes"]))

    found = read(config, json.loads(said["cases"])[case]["entries"], files, values, tmp_path)

    check(found, values)
