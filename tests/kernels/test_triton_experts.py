"""Routers and experts in Triton, of sizes that models have, as they are compiled for GPUs: within their shared memory,
on tensor cores, with weights on their way while others are multiplied. What they compute: `routed_experts.py`.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from compiled_launches import stack_bytes

from precast.ir.graph.schema import Const, Dtype, Node, Ref, TensorType, Value
from precast.kernels.choices import cases, records_of
from precast.kernels.experts.launches import shared_bytes
from precast.kernels.records import Launch, Pointer, Stride
from precast.kernels.use import Target, Use, use_of

triton = pytest.importorskip("triton", reason="Triton is published for Linux only")

NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int32": "i32", "int64": "i64"}
# Experts, experts of a token, widths of activations and between the products.
QWEN, DEEPSEEK, GPT_OSS = (128, 8, 2048, 768), (256, 8, 7168, 2048), (32, 4, 2880, 2880)
QWEN_NEXT = (512, 10, 2048, 512)
CLAMPED = {"alpha": 1.702, "limit": 7.0, "offset": 1.0}
HOPPER, AMPERE, ADA = (9, 0), (8, 0), (8, 9)


def layer(
    sizes: tuple[int, int, int, int], capability: tuple[int, int], dtype: Dtype = "bfloat16", **rule: float
) -> Use:
    """Gated experts for `T` tokens, with biases if there is a rule."""
    num, top_k, width, inner = sizes
    types = {
        "x": TensorType(dtype, ("T", width)), "expert_ids": TensorType("int64", ("T", top_k)),
        "expert_weights": TensorType(dtype, ("T", top_k)), "up": TensorType(dtype, (num, 2 * inner, width)),
        "down": TensorType(dtype, (num, width, inner)),
    }  # fmt: skip
    if rule:
        types |= {"up_bias": TensorType(dtype, (num, 2 * inner)), "down_bias": TensorType(dtype, (num, width))}
    constants = {"activation": "silu", "gated": True, **rule}
    args = {name: Ref(name) for name in types} | {name: Const(value) for name, value in constants.items()}
    node = Node("precast.experts", args, (Value("y", types["x"]),))
    return use_of(node, types, Target("cuda", capability))


def router(capability: tuple[int, int]) -> Use:
    """DeepSeek-V3's."""
    types = {"logits": TensorType("float32", ("T", 256)), "bias": TensorType("float32", (256,))}
    rule = {"scoring": "sigmoid", "top_k": 8, "num_groups": 8, "top_groups": 4, "normalise": True}
    args = {name: Ref(name) for name in types} | {name: Const(value) for name, value in rule.items()}
    results = (Value("w", TensorType("float32", ("T", 8))), Value("i", TensorType("int64", ("T", 8))))
    return use_of(Node("precast.route", args, results), types, Target("cuda", capability))


def compiled(launch: Launch, use: Use) -> Any:
    """A launch's kernel as one with aligned tensors and sizes would compile it."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, _, name = launch.kernel.partition(":")
    kernel = getattr(import_module(module), name)
    constants = dict(launch.constants)
    given = [each for each in kernel.arg_names if each not in constants]
    signature, attributes = {}, {}
    for each, arg in zip(given, launch.args, strict=True):
        if arg is None or (isinstance(arg, int) and arg in (0, 1)):
            constants[each] = arg
            continue
        signature[each] = f"*{NAMES[dtype_of(arg, use)]}" if isinstance(arg, Pointer) else "i32"
        if isinstance(arg, (Pointer, Stride)) or (isinstance(arg, int) and arg % 16 == 0):
            attributes[(kernel.arg_names.index(each),)] = [["tt.divisibility", 16]]
    signature |= dict.fromkeys(constants, "constexpr")
    ordered = {each: signature[each] for each in kernel.arg_names}
    capability = use.target.capability
    return triton.compile(
        ASTSource(kernel, ordered, constexprs=constants, attrs=attributes),
        target=GPUTarget("cuda", 10 * capability[0] + capability[1], 32),
        options={"num_warps": launch.num_warps, "num_stages": launch.num_stages},
    )


def dtype_of(arg: Pointer, use: Use) -> Dtype:
    if arg.dtype is not None:
        return arg.dtype
    results = {f"out.{i}": value.type for i, value in enumerate(use.node.outputs)}
    return (results | {name: operand.type for name, operand in use.operands.items()})[arg.tensor].dtype


def launches_of(use: Use, tokens: int) -> tuple[Launch, ...]:
    """Those of a step of so many tokens."""
    within = [
        case.choice.record
        for case in cases(use)
        for low, high in [case.sizes.get("T", (0, None))]
        if low <= tokens and (high is None or tokens <= high)
    ]
    (record,) = within
    assert record.kind == "triton"
    assert not isinstance(record.runs, str)
    return record.runs(use)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("use", "tokens"),
    [
        (layer(QWEN, HOPPER), 1),
        (layer(QWEN, HOPPER), 64),
        (layer(DEEPSEEK, HOPPER), 1),
        (layer(DEEPSEEK, HOPPER), 4096),
        (layer(GPT_OSS, HOPPER, **CLAMPED), 1),
        (layer(GPT_OSS, HOPPER, **CLAMPED), 64),
        (layer(GPT_OSS, HOPPER, **CLAMPED), 1024),
        (layer(QWEN_NEXT, HOPPER), 2048),
        (layer(GPT_OSS, AMPERE, "float16", **CLAMPED), 4096),
        (layer(QWEN, AMPERE), 8),
        (layer(QWEN, ADA), 4096),
        (layer(GPT_OSS, ADA, "float32", **CLAMPED), 4096),
        (router(HOPPER), 1),
        (router(AMPERE), 1),
    ],
    ids=lambda value: value if isinstance(value, int) else f"{value.node.op}, {value.dtype}, {value.target.text}",
)
def test_what_models_need_is_compiled(use: Use, tokens: int, tmp_path: Path) -> None:
    for launch in launches_of(use, tokens):
        found = compiled(launch, use)

        assert len(found.asm["cubin"]) > 0
        assert found.metadata.shared <= shared_bytes(use.target.capability)
        # Registers hold all that a thread has; but for a few numbers of the largest tiles on older GPUs.
        assert stack_bytes(found, tmp_path) <= (0 if use.target.capability == HOPPER else 64)
        assert ("griddepcontrol.wait" in found.asm["ptx"]) == (use.target.capability == HOPPER) == launch.pdl
        if launch.kernel.endswith(":grouped_kernel"):
            ptx = found.asm["ptx"]
            # Half precision runs on the tensor cores, float32 in float32; both are loaded ahead.
            assert any(name in ptx for name in ("wgmma", "mma.sync")) == (use.dtype != "float32")
            assert "cp.async" in ptx


@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 16, 17, 64, 65, 256, 257, 1024, 1025, 100_000])
def test_one_record_is_for_each_number_of_tokens(tokens: int) -> None:
    own = [record for record in records_of("precast.experts", 1) if record.kind == "triton"]
    ranges = [record.sizes["T"] for record in own]

    assert sum(low <= tokens and (high is None or tokens <= high) for low, high in ranges) == 1
    assert launches_of(layer(QWEN, HOPPER), tokens)
