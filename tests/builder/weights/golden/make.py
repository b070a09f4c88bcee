"""Makes the golden files of this folder: small weights as a publisher's library stores them, and the values that the
same library reads from what it stored. `test_publishers.py` compares Precast with them; it needs none of the libraries.

In an environment of their own, Python 3.11, which needs no GPU:

    pip install torch==2.13.0 transformers==5.23.0 safetensors accelerate datasets scipy pulp omegaconf requests \\
        pillow psutil loguru onnx onnxslim ml_dtypes pypcre logbar threadpoolctl device-smi tokenicer defuser zstandard
    pip install --no-deps nvidia-modelopt==0.47.0 amd-quark==0.13 auto-gptq==0.7.1 mlx==0.32.4 mlx-cpu==0.32.4 \\
        fbgemm-gpu-genai==1.9.0 compressed-tensors==0.18.0 auto-round==0.16.1 py-cpuinfo
    pip download --no-deps --no-binary :all: --no-build-isolation autoawq==0.2.9 gptqmodel==7.7.0

`--no-deps`, since the libraries don't agree on versions, and what is called here needs few of their dependencies. The
two that are downloaded would compile kernels for GPUs: unpack them, and name their folders in PYTHONPATH. Then

    TRITON_INTERPRET=1 python tests/builder/weights/golden/make.py modelopt quark

makes the files of the libraries that are named, or of all: their names are the files'. FBGEMM's kernel is Triton's,
which runs on a CPU with TRITON_INTERPRET=1.

A file has some cases. Of each, `CASE/stored/NAME` is what a checkpoint holds under NAME, and `CASE/values/NAME` are the
values of the weight NAME. The metadata say the library, its version, the sizes of the model, and of each case the
config's quantisation, and what made the values.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32,
    "num_key_value_heads": 1, "head_dim": 16,
}  # fmt: skip
"""Of the model, a llama's."""
WEIGHTS = {"model.layers.0.self_attn.k_proj": (16, 32), "model.layers.0.mlp.down_proj": (32, 64)}
"""The layers that the files have, with their outputs and inputs."""


class Case(NamedTuple):
    """What a library stores of the weights, by the checkpoint's names; their values, by the weights' names; what the
    config says of quantisation; and the function of the library that made the values."""

    stored: Tensors
    values: Tensors
    entries: dict[str, Any]
    function: str


def weights() -> Tensors:
    """Random weights of the layers, whose sizes differ from eight neighbours to the next."""
    made = {}
    for name, (outputs, inputs) in WEIGHTS.items():
        sizes = torch.randn(outputs, inputs // 8).mul(0.5).exp().repeat_interleave(8, 1)
        made[name] = 0.05 * torch.randn(outputs, inputs) * sizes
    return made


def model() -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("llama", architectures=["LlamaForCausalLM"], **SIZES)
    made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, weight in weights().items():
        made.get_submodule(name).weight.data.copy_(weight)
    return made


def _without_init(package: str) -> None:
    """Lets modules of a package be imported without its `__init__`, which wants a GPU or an old transformers."""
    spec = importlib.util.find_spec(package)
    assert spec is not None, f"{package} is not installed"
    made = types.ModuleType(package)
    made.__path__ = list(spec.submodule_search_locations or ())
    sys.modules[package] = made


def exported(folder: str) -> tuple[Tensors, dict[str, Any]]:
    """What a library wrote of the layers, and its `quantization_config`."""
    tensors = load_file(Path(folder, "model.safetensors"))
    config = json.loads(Path(folder, "config.json").read_text())["quantization_config"]
    return {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[0] in WEIGHTS}, config


def modelopt() -> Iterator[tuple[str, Case]]:
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP8QTensor, NVFP4QTensor

    def nvfp4(weight: torch.Tensor, scale: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        shape = torch.Size((weight.shape[0], 2 * weight.shape[1]))
        stored = NVFP4QTensor(shape, torch.float32, weight)
        return stored.dequantize(torch.float32, scale=scale, double_scale=whole, block_sizes={-1: 16})

    def in_blocks(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        sizes, stored = {-1: 128, -2: 128}, FP8QTensor(weight.shape, torch.float32, weight)
        return stored.dequantize(torch.float32, scale=scale.reshape(1, 1), block_sizes=sizes)

    def of(kind: Any) -> Callable[..., torch.Tensor]:
        return lambda weight, scale: kind(weight.shape, torch.float32, weight).dequantize(torch.float32, scale=scale)

    for name, config, suffixes, dequantize, kind in (
        ("nvfp4", mtq.NVFP4_DEFAULT_CFG, ("weight", "weight_scale", "weight_scale_2"), nvfp4, "NVFP4QTensor"),
        ("fp8", mtq.FP8_DEFAULT_CFG, ("weight", "weight_scale"), of(FP8QTensor), "FP8QTensor"),
        ("mxfp8", mtq.MXFP8_DEFAULT_CFG, ("weight", "weight_scale"), of(MXFP8QTensor), "MXFP8QTensor"),
        ("fp8 in blocks", mtq.FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG, ("weight", "weight_scale"), in_blocks, "FP8QTensor"),
    ):
        quantised = mtq.quantize(model(), config, lambda made: made(torch.arange(16)[None]))
        with tempfile.TemporaryDirectory() as folder:
            export_hf_checkpoint(quantised, export_dir=folder)
            stored, entries = exported(folder)
        values = {f"{layer}.weight": dequantize(*(stored[f"{layer}.{end}"] for end in suffixes)) for layer in WEIGHTS}
        yield name, Case(stored, values, entries, f"modelopt.torch.quantization.qtensor.{kind}.dequantize, in float32")


def quark() -> Iterator[tuple[str, Case]]:
    from quark.torch import ModelQuantizer, export_safetensors, import_model_from_safetensors
    from quark.torch.quantization.config import config as quark_config

    for name, spec in (
        ("fp8", quark_config.FP8E4M3PerTensorSpec(observer_method="min_max", is_dynamic=False)),
        ("fp8 by channels", quark_config.FP8E4M3PerChannelSpec(is_dynamic=False, ch_axis=0)),
        ("mxfp4", quark_config.OCP_MXFP4Spec(ch_axis=-1, is_dynamic=False)),
    ):
        layers = quark_config.QLayerConfig(weight=spec.to_quantization_spec())
        quantizer = ModelQuantizer(quark_config.QConfig(global_quant_config=layers, exclude=["lm_head"]))
        quantised = quantizer.freeze(quantizer.quantize_model(model(), None))
        with tempfile.TemporaryDirectory() as folder:
            export_safetensors(quantised, folder)
            stored, entries = exported(folder)
            read = import_model_from_safetensors(model(), folder)
        values = {}
        for layer in WEIGHTS:
            linear = read.get_submodule(layer)
            values[f"{layer}.weight"] = linear.weight_quantizer(linear.weight.data)
        yield name, Case(stored, values, entries, "the weight_quantizer of quark's QParamsLinear, in float32")


def affine(weight: torch.Tensor, bits: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zeros [outputs, groups] of groups of `size` inputs, in float32; zeros are 1 at least, since GPTQ's
    first format stores one less."""
    groups = weight.split(size, 1)
    low, high = (torch.stack([bound(each) for each in groups], 1) for bound in (_least, _most))
    scales = ((high - low) / ((1 << bits) - 1)).half().float()
    return scales, (-low / scales).round().clamp(1, (1 << bits) - 1)


def _least(group: torch.Tensor) -> torch.Tensor:
    return group.amin(1).clamp(max=-1e-3)


def _most(group: torch.Tensor) -> torch.Tensor:
    return group.amax(1).clamp(min=1e-3)


def linear(weight: torch.Tensor) -> torch.nn.Linear:
    made = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    made.weight.data.copy_(weight)
    return made


def autoawq() -> Iterator[tuple[str, Case]]:
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.modules.linear.gemv import WQLinear_GEMV
    from awq.utils.packing_utils import dequantize_gemm, unpack_awq

    for name, group_size in (("groups", 16), ("one group", -1)):
        stored: Tensors = {}
        values: Tensors = {}
        for layer, weight in weights().items():
            if weight.shape[0] % 32:  # AutoAWQ packs no others
                continue
            size = weight.shape[1] if group_size == -1 else group_size
            scales, zeros = (each.t().contiguous() for each in affine(weight, 4, size))
            exact = _in_four_bits(weight, scales, zeros, size)
            packed = WQLinear_GEMM.from_linear(linear(exact), 4, size, scales=scales, zeros=zeros)
            stored |= {f"{layer}.{part}": getattr(packed, part) for part in ("qweight", "qzeros", "scales")}
            values[f"{layer}.weight"] = dequantize_gemm(packed.qweight, packed.qzeros, packed.scales, 4, size).t()
        entries = {
            "quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True, "version": "gemm",
            "modules_to_not_convert": None,
        }  # fmt: skip
        yield name, Case(stored, values, entries, "awq.utils.packing_utils.dequantize_gemm, in float16")

    # Only its kernels for GPUs compute with `gemv`: here a function of the library unpacks what the library packed.
    stored, values, size = {}, {}, 32
    for layer, weight in weights().items():
        scales, zeros = affine(weight, 4, size)
        exact = _in_four_bits(weight, scales.t(), zeros.t(), size)
        packed = WQLinear_GEMV.from_linear(linear(exact), 4, size, scales=scales, zeros=zeros)
        stored |= {f"{layer}.{part}": getattr(packed, part) for part in ("qweight", "qzeros", "scales")}
        whole, points = (each & 15 for each in unpack_awq(packed.qweight, packed.qzeros, 4))
        groups = torch.arange(weight.shape[1]) // size
        values[f"{layer}.weight"] = (whole - points[:, groups]) * packed.scales[:, groups]
    entries = {
        "quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True, "version": "gemv",
        "modules_to_not_convert": None,
    }  # fmt: skip
    yield "gemv", Case(stored, values, entries, "awq.utils.packing_utils.unpack_awq, of zeros, too, in float16")


def _in_four_bits(weight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, size: int) -> torch.Tensor:
    """What integers of 4 bits stand for, which AWQ's packing rounds to the same integers: it bounds none."""
    steps = torch.arange(weight.shape[1]) // size
    whole = (weight.t() / scales[steps] + zeros[steps]).round().clamp(0, 15)
    return ((whole - zeros[steps]) * scales[steps]).t()


GPTQ_CASES = {"4 bits": (4, 16, False, "gptq"), "act order": (4, 16, True, "gptq_v2"), "8 bits": (8, 32, False, "gptq")}
"""Bits, the size of groups, whether they are in act order, and the format."""


def _groups(inputs: int, size: int, *, order: bool) -> torch.Tensor:
    """The group of each input; `order`: of inputs in any order."""
    groups = torch.arange(inputs, dtype=torch.int32) // size
    return groups[torch.randperm(inputs)] if order else groups


def _grouped(weight: torch.Tensor, bits: int, groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`affine` of the groups that inputs are said to be of."""
    parts = [affine(weight[:, groups == group], bits, len(groups)) for group in range(int(groups.max()) + 1)]
    scales, zeros = zip(*parts, strict=True)
    return torch.cat(scales, 1), torch.cat(zeros, 1)


def gptqmodel() -> Iterator[tuple[str, Case]]:
    from gptqmodel import QuantizeConfig
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    for name, (bits, size, order, format) in GPTQ_CASES.items():
        config = QuantizeConfig(bits=bits, group_size=size, desc_act=order, sym=False, format=format)
        stored: Tensors = {}
        values: Tensors = {}
        for layer, weight in weights().items():
            outputs, inputs = weight.shape
            groups = _groups(inputs, size, order=order)
            scales, zeros = _grouped(weight, bits, groups)
            packed = TorchLinear(bits, size, False, order, inputs, outputs, register_buffers=True)
            packed.pack_original(linear(weight), scales, zeros.int(), groups)
            values[f"{layer}.weight"] = packed.eval().dequantize_weight().t()
            if format == "gptq":
                convert_gptq_v2_to_v1_format_module(packed, config)
            parts = ("qweight", "qzeros", "scales", "g_idx")
            stored |= {f"{layer}.{part}": getattr(packed, part).clone() for part in parts}
        entries = {"quant_method": "gptq", **config.to_dict(), "meta": {}}  # which says how it was quantised
        yield name, Case(stored, values, entries, "gptqmodel's TorchLinear.dequantize_weight, in float16")


def autogptq() -> Iterator[tuple[str, Case]]:
    """Of the library with which GPTQ's checkpoints began; it reads them in the products of its layers, and what these
    make of the unit matrix is the weight."""
    _without_init("auto_gptq")
    from auto_gptq.nn_modules.qlinear.qlinear_cuda import QuantLinear

    for name, (bits, size, order) in {"uneven groups": (4, 48, False), "act order": (8, 16, True)}.items():
        stored: Tensors = {}
        values: Tensors = {}
        for layer, weight in weights().items():
            outputs, inputs = weight.shape
            if outputs % 32:  # AutoGPTQ packs no others
                continue
            groups = _groups(inputs, size, order=order)
            packed = QuantLinear(bits, size, inputs, outputs, bias=False)
            packed.pack(linear(weight).half(), *_grouped(weight, bits, groups), groups)
            with torch.no_grad():
                values[f"{layer}.weight"] = packed(torch.eye(inputs).half()).t()
            parts = ("qweight", "qzeros", "scales", "g_idx")
            stored |= {f"{layer}.{part}": getattr(packed, part) for part in parts}
        entries = {
            "quant_method": "gptq", "bits": bits, "group_size": size, "desc_act": order, "sym": False,
            "true_sequential": True, "damp_percent": 0.01, "static_groups": False,
        }  # fmt: skip
        yield name, Case(stored, values, entries, "auto_gptq's QuantLinear of a unit matrix, in float16")


AUTO_ROUND: dict[str, tuple[str, int, int]] = {
    "GPTQ's packing": ("auto_round:auto_gptq", 4, 16), "GPTQ's packing, 8 bits": ("auto_round:auto_gptq", 8, 32),
    "AWQ's packing": ("auto_round:auto_awq", 4, 16),
}  # fmt: skip
"""How integers are packed, their bits, and the size of groups."""


def autoround() -> Iterator[tuple[str, Case]]:
    from auto_round.export.export_to_awq.utils import WQLinear_GEMM, dequantize_gemm
    from auto_round_extension.torch.qlinear_torch_zp import QuantLinear

    for name, (packing, bits, size) in AUTO_ROUND.items():
        stored: Tensors = {}
        values: Tensors = {}
        for layer, weight in weights().items():
            outputs, inputs = weight.shape
            if outputs % 32:  # AutoRound leaves others in 16 bits
                continue
            scales, zeros = affine(weight, bits, size)
            if packing.endswith("gptq"):
                packed = QuantLinear(bits, size, inputs, outputs, bias=False)
                packed.pack(linear(weight), scales, zeros, None, device="cpu")
                with torch.no_grad():
                    made = packed(torch.eye(inputs).half()).t()
            else:
                scales, zeros = scales.t().contiguous(), zeros.t().contiguous()
                exact = linear(_in_four_bits(weight, scales, zeros, size))
                packed = WQLinear_GEMM.from_linear(exact, bits, size, scales=scales, zeros=zeros, device="cpu")
                made = dequantize_gemm(packed.qweight, packed.qzeros, packed.scales, bits, size).t()
            stored |= {f"{layer}.{part}": getattr(packed, part) for part in ("qweight", "qzeros", "scales")}
            values[f"{layer}.weight"] = made
        entries = {
            "quant_method": "auto-round", "packing_format": packing, "bits": bits, "group_size": size, "sym": False,
            "data_type": "int", "block_name_to_quantize": "model.layers", "autoround_version": "0.16.1",
            "extra_config": {"model.layers.0.self_attn.k_proj": {"bits": 16}},
        }  # fmt: skip
        yield name, Case(stored, values, entries, "the layers that auto_round makes of its checkpoints, in float16")


def mlx() -> Iterator[tuple[str, Case]]:
    import mlx.core as mx
    import numpy as np

    def to_torch(array: Any) -> torch.Tensor:
        words = array.dtype == mx.uint32
        return torch.from_numpy(np.array(array if words else array.astype(mx.float32)))

    def dequantise(stored: list[Any], bits: int, size: int) -> torch.Tensor:
        words, scales, biases = stored
        in_float32 = (scales.astype(mx.float32), biases.astype(mx.float32))
        return to_torch(mx.dequantize(words, *in_float32, group_size=size, bits=bits))

    for name, bits, size, dtype in (
        ("4 bits", 4, 32, torch.float32),
        ("8 bits", 8, 32, torch.bfloat16),
    ):
        stored: Tensors = {}
        values: Tensors = {}
        for layer, weight in weights().items():
            array = mx.array(weight.numpy()).astype(mx.bfloat16 if dtype == torch.bfloat16 else mx.float32)
            parts = mx.quantize(array, group_size=size, bits=bits)
            made = dict(zip(("weight", "scales", "biases"), map(to_torch, parts), strict=True))
            stored |= {f"{layer}.{part}": each if part == "weight" else each.to(dtype) for part, each in made.items()}
            values[f"{layer}.weight"] = dequantise(parts, bits, size)
        entries = {"quant_method": "mlx", "group_size": size, "bits": bits}
        yield name, Case(stored, values, entries, "mlx.core.dequantize, of scales and biases in float32")


def compressed_tensors() -> Iterator[tuple[str, Case]]:
    """Act order, which the library has left out since; other formats are compared with the installed version."""
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    for name, bits, symmetric in (("int4", 4, True), ("int8 with zeros", 8, False)):
        args = QuantizationArgs(
            num_bits=bits, type="int", strategy="group", group_size=16, symmetric=symmetric, actorder="group"
        )
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        stored: Tensors = {}
        values: Tensors = {}
        for layer, weight in weights().items():
            groups = _groups(weight.shape[1], 16, order=True)
            parts = [weight[:, groups == group] for group in range(int(groups.max()) + 1)]
            least, most = (torch.stack([bound(part) for part in parts], 1) for bound in (_least, _most))
            scales, zeros = calculate_qparams(least, most, args)
            made = {"weight": weight, "weight_scale": scales, "weight_zero_point": zeros, "weight_g_idx": groups}
            packed = PackedQuantizationCompressor.compress(made, scheme)
            stored |= {f"{layer}.{part}": each for part, each in packed.items()}
            values[f"{layer}.weight"] = PackedQuantizationCompressor.decompress(packed, scheme)["weight"]
        group = {"targets": ["Linear"], "weights": json.loads(args.model_dump_json())}
        entries = {
            "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
            "config_groups": {"group_0": group},
        }  # fmt: skip
        yield name, Case(stored, values, entries, "PackedQuantizationCompressor.decompress, in float32")


def fbgemm() -> Iterator[tuple[str, Case]]:
    """Rows of FP8. `dequantize_fp8_row` starts its kernel on a GPU, and lets it write bfloat16. Here a CPU runs the
    same kernel, which writes what it computed."""
    _without_init("fbgemm_gpu")
    from fbgemm_gpu.experimental.gemm.triton_gemm import fp8_gemm

    assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1"
    stored: Tensors = {}
    values: Tensors = {}
    for layer, weight in weights().items():
        rows, columns = weight.shape
        packed, scale = fp8_gemm.quantize_fp8_row(weight.bfloat16(), use_triton=False)
        made = torch.empty(rows, columns)
        kernel = fp8_gemm._kernel_dequantize_fp8_row.fn
        strides = (columns, 1, columns, 1)
        kernel[(-(-rows // 16),)](
            packed, scale, made, rows, columns, *strides, BLOCK_M=16, BLOCK_K=512, NUM_STAGES=1, USE_INT64=False
        )
        stored |= {f"{layer}.weight": packed, f"{layer}.weight_scale": scale[:, None]}
        values[f"{layer}.weight"] = made
    entries = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}
    yield "fp8", Case(stored, values, entries, "the kernel of fbgemm_gpu's dequantize_fp8_row, in float32")


LIBRARIES: dict[str, tuple[str, Callable[[], Iterator[tuple[str, Case]]]]] = {
    "modelopt": ("nvidia-modelopt", modelopt),
    "quark": ("amd-quark", quark),
    "autoawq": ("autoawq", autoawq),
    "gptqmodel": ("gptqmodel", gptqmodel),
    "autogptq": ("auto-gptq", autogptq),
    "autoround": ("auto-round", autoround),
    "mlx": ("mlx", mlx),
    "compressed_tensors": ("compressed-tensors", compressed_tensors),
    "fbgemm": ("fbgemm-gpu-genai", fbgemm),
}


def write(library: str) -> None:
    """The golden file of a library."""
    package, make = LIBRARIES[library]
    torch.manual_seed(0)
    cases = dict(make())
    tensors = {
        f"{name}/{kind}/{tensor}": each.detach().contiguous().clone()
        for name, case in cases.items()
        for kind, found in (("stored", case.stored), ("values", case.values))
        for tensor, each in found.items()
    }
    said = {name: {"function": case.function, "entries": case.entries} for name, case in cases.items()}
    metadata = {"library": package, "version": importlib.metadata.version(package)}
    metadata |= {"sizes": json.dumps(SIZES), "cases": json.dumps(said)}
    save_file(tensors, Path(__file__).with_name(f"{library}.safetensors"), metadata)


if __name__ == "__main__":
    for chosen in sys.argv[1:] or LIBRARIES:
        write(chosen)
