"""Experts in few bits in Triton, of sizes that models have, as they are compiled for GPUs, and the PTX that makes their
values, run on a CPU. What they compute: `launched_quantised_experts.py`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_launches import compiled, stack_bytes

from precast.ir.graph.schema import Const, Dtype, Items, Node, Ref, TensorType, Value
from precast.ir.graph.symbols import evaluate
from precast.kernels.choices import cases, records_of, resolve
from precast.kernels.dequantise.dequantise import Quantised, dequantise
from precast.kernels.experts.launches import shared_bytes
from precast.kernels.records import Launch, Pointer
from precast.kernels.use import Target, Use, use_of

triton = pytest.importorskip("triton", reason="Triton is published for Linux only")

# Experts, experts of a token, widths of activations and between the products.
QWEN, GPT_OSS, DEEPSEEK = (128, 8, 2048, 768), (32, 4, 2880, 2880), (256, 8, 7168, 2048)
CLAMPED = {"alpha": 1.702, "limit": 7.0, "offset": 1.0}
HOPPER, AMPERE = (9, 0), (8, 0)


def stored(format: str, num: int, rows: int, columns: int) -> dict[str, TensorType]:
    """The types of a weight's parts; groups of 128. Scales of blocks are left to the caller."""
    kinds: dict[str, dict[str, tuple[Dtype, tuple[int, ...]]]] = {
        "mxfp4": {"": ("uint8", (columns // 32, 16)), "_scales": ("uint8", (columns // 32,))},
        "nvfp4": {"": ("uint8", (columns // 2,)), "_scales": ("float8_e4m3fn", (columns // 16,))},
        "packed4": {"": ("int32", (columns // 8,)), "_scales": ("bfloat16", (columns // 128,))},
        "fp8": {"": ("float8_e4m3fn", (columns,))},
        "int8": {"": ("int8", (columns,))},
    }
    found = {part: TensorType(dtype, (num, rows, *sizes)) for part, (dtype, sizes) in kinds[format].items()}
    if format == "nvfp4":
        found["_global_scale"] = TensorType("float32", (num, 1, 1))
    return found


def layer(
    format: str, sizes: tuple[int, int, int, int], capability: tuple[int, int] = HOPPER, dtype: Dtype = "bfloat16",
    rounding: str = "", block: tuple[int, int] = (128, 128), **rule: float,
) -> Use:  # fmt: skip
    """Gated experts for `T` tokens, with biases if there is a rule; of float8 with a scale a block."""
    num, top_k, width, inner = sizes
    types = {
        "x": TensorType(dtype, ("T", width)), "expert_ids": TensorType("int64", ("T", top_k)),
        "expert_weights": TensorType(dtype, ("T", top_k)),
    }  # fmt: skip
    constants: dict[str, Any] = {"format": format, "activation": "silu", "gated": True, **rule}
    constants |= {"rounding": rounding} if rounding else {}
    for name, rows, columns in (("up", 2 * inner, width), ("down", width, inner)):
        types |= {f"{name}{part}": kind for part, kind in stored(format, num, rows, columns).items()}
        types |= {f"{name}_bias": TensorType(dtype, (num, rows))} if rule else {}
        if format in ("fp8", "int8"):
            constants[f"{name}_block"] = block
            shape = num, -(-rows // block[0]), -(-columns // block[1])
            types[f"{name}_scales"] = TensorType("float32", shape)
    constants |= {"zero_offset": 8} if format == "packed4" else {}
    args: dict[str, Any] = {name: Ref(name) for name in types}
    for name, value in constants.items():
        args[name] = Items(tuple(map(Const, value))) if isinstance(value, tuple) else Const(value)
    node = Node("precast.quantised_experts", args, (Value("y", types["x"]),))
    return use_of(node, types, Target("cuda", capability))


def launches_of(use: Use, tokens: int) -> tuple[Launch, ...]:
    """Those of a step of so many tokens."""
    record = resolve(use, {"T": tokens}).record
    assert not isinstance(record.runs, str)
    return record.runs(use)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("use", "tokens"),
    [
        (layer("mxfp4", GPT_OSS, **CLAMPED), 1),
        (layer("mxfp4", GPT_OSS, **CLAMPED), 64),
        (layer("mxfp4", GPT_OSS, **CLAMPED), 8192),
        (layer("fp8", QWEN), 64),
        (layer("nvfp4", QWEN), 8),
        (layer("packed4", QWEN), 1),
    ],
    ids=lambda value: value if isinstance(value, int) else str(value.constant("format")),
)
def test_what_models_need_is_compiled(use: Use, tokens: int, tmp_path: Path) -> None:
    types = {name: operand.type for name, operand in use.operands.items()} | {"out.0": use.result}
    products = [launch for launch in launches_of(use, tokens) if launch.kernel.endswith(":product_kernel")]
    assert len(products) == 2
    for launch in products:
        found = compiled(launch, types)
        ptx = found.asm["ptx"]

        assert found.metadata.shared <= shared_bytes(use.target.capability)
        assert stack_bytes(found, tmp_path) == 0  # registers hold all that a thread has
        assert "griddepcontrol.wait" in ptx
        assert launch.pdl
        # Products on the tensor cores, of values that are made two at once, of bytes that were loaded ahead.
        assert any(name in ptx for name in ("wgmma", "mma.sync"))
        assert any(name in ptx for name in ("mul.bf16x2", "sub.bf16x2"))
        assert "cp.async" in ptx


ROWS = (1, 1 << 20)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("tokens", [1, 64, 8192])
@pytest.mark.parametrize(
    ("use", "small", "large"),
    [
        (layer("fp8", QWEN, rounding="fp8_group"), "f16", "e4m3"),
        (layer("fp8", DEEPSEEK, rounding="fp8_group"), "f16", "e4m3"),
        (layer("fp8", DEEPSEEK, rounding="fp8_group_e8m0"), "f16", "e4m3"),
        (layer("fp8", QWEN, rounding="fp8_token", block=ROWS), "f16", "e4m3"),
        (layer("int8", QWEN, rounding="int8_token", block=ROWS), "s8", "s8"),
    ],
    ids=["Qwen", "DeepSeek", "DeepSeek-V3.1", "rows", "int8"],
)
def test_rows_of_eight_bits_are_multiplied_as_such(
    use: Use, small: str, large: str, tokens: int, tmp_path: Path
) -> None:
    """For few rows the compiler makes float16 of float8, exactly: on Hopper those of warp groups alone have it."""
    numbers = large if tokens > 64 else small
    types = {name: operand.type for name, operand in use.operands.items()} | {"out.0": use.result}
    own = (":product_kernel", ":round_kernel")
    launched = [launch for launch in launches_of(use, tokens) if launch.kernel.endswith(own)]

    assert [launch.kernel.rpartition(":")[2] for launch in launched] == ["round_kernel", "product_kernel"] * 2
    for launch in launched:
        found = compiled(launch, types)
        assert found.metadata.shared <= shared_bytes(use.target.capability)
        assert stack_bytes(found, tmp_path) <= 64  # a few addresses; registers hold the sums
        assert launch.pdl
        if launch.kernel.endswith(":product_kernel"):
            assert re.search(rf"mma\S*\.{numbers}\.{numbers}", found.asm["ptx"])
            assert "cp.async" in found.asm["ptx"]


@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 16, 17, 64, 65, 256, 257, 1024, 1025, 100_000])
def test_one_record_is_for_each_number_of_tokens(tokens: int) -> None:
    own = [record for record in records_of("precast.quantised_experts", 1) if record.kind == "triton"]
    ranges = [record.sizes["T"] for record in own]

    assert sum(low <= tokens and (high is None or tokens <= high) for low, high in ranges) == 1
    assert launches_of(layer("mxfp4", QWEN), tokens)


@pytest.mark.parametrize(
    "use",
    [
        layer("fp8", QWEN, AMPERE),
        layer("mxfp4", QWEN, dtype="float64"),
        layer("mxfp4", QWEN, (7, 5)),
        layer("packed4", QWEN, AMPERE, rounding="fp8_token"),
        layer("fp8", (8, 2, 1 << 16, 256), rounding="fp8_token"),
    ],
    ids=["float8", "dtype", "GPU", "float8 of rows", "long rows"],
)
def test_what_no_kernel_takes_is_dequantised(use: Use) -> None:
    (case,) = cases(use)

    assert case.choice.record.name == "torch.quantised_experts_of_read_groups"


def test_packed_integers_run_where_float8_does_not() -> None:
    assert all(case.choice.record.kind == "triton" for case in cases(layer("packed4", QWEN, AMPERE)))


@pytest.mark.parametrize("tokens", [1, 64, 8192])
@pytest.mark.parametrize("sizes", [QWEN, DEEPSEEK])
@pytest.mark.parametrize("rounding", ["fp8_group", "fp8_group_e8m0"])
def test_what_is_rounded_has_room_of_its_own(rounding: str, tokens: int, sizes: tuple[int, int, int, int]) -> None:
    """Parts of the workspace that launches write don't overlap, and end within it."""
    use = layer("fp8", sizes, rounding=rounding)
    record = resolve(use, {"T": tokens}).record
    assert not isinstance(record.runs, str)
    assert not isinstance(record.workspace, str)
    _, top_k, width, inner = sizes
    pairs = tokens * top_k
    rounds = [launch for launch in record.runs(use) if launch.kernel.endswith(":round_kernel")]
    products = [launch for launch in record.runs(use) if launch.kernel.endswith(":product_kernel")]
    parts = [
        (rounds[0].args[0], tokens * width), (rounds[0].args[1], 4 * tokens * -(-width // 128)),
        (rounds[1].args[0], pairs * inner), (rounds[1].args[1], 4 * pairs * -(-inner // 128)),
        (rounds[1].args[2], 2 * pairs * inner), (products[1].args[0], 2 * pairs * width),
    ]  # fmt: skip

    spans = sorted(
        (int(evaluate(part.offset, {"T": tokens})), size) for part, size in parts if isinstance(part, Pointer)
    )
    assert len(spans) == len(parts)
    begins = [begin for begin, _ in spans[1:]] + [int(evaluate(record.workspace(use), {"T": tokens}))]
    assert all(begin + size <= after for (begin, size), after in zip(spans, begins, strict=True))


# --- the PTX of values, on a CPU ---------------------------------------------------------------------------------


def run_ptx(text: str, *given: int) -> list[int]:
    """What the instructions leave in $0 and $1, of registers $2 and on; all hold 32 bits."""
    registers = {"$0": 0, "$1": 0} | {f"${i + 2}": value for i, value in enumerate(given)}
    for line in text.strip("{}\n").splitlines():
        name, *operands = re.findall(r"[\w.$]+", line)
        if name == ".reg":
            continue
        target, *values = operands
        a = [registers[each] if each in registers else int(each, 0) for each in values]
        registers[target] = _INSTRUCTIONS[name](*a) & 0xFFFFFFFF
    return [registers["$0"], registers["$1"]]


def _permuted(a: int, b: int, selector: int) -> int:
    taken = [(b << 32 | a) >> 8 * (selector >> 4 * i & 7) & 0xFF for i in range(4)]
    return sum(byte << 8 * i for i, byte in enumerate(taken))


def _and_or(a: int, b: int, c: int, table: int) -> int:
    assert table == 0xEA
    return a & b | c


def _pairs(of: Any) -> Any:
    """A function of bfloat16 for pairs of them."""

    def run(a: int, b: int) -> int:
        x, y = (torch.tensor([each & 0xFFFF, each >> 16]).to(torch.uint16).view(torch.bfloat16) for each in (a, b))
        low, high = of(x.float(), y.float()).to(torch.bfloat16).view(torch.uint16).tolist()
        return int(high << 16 | low)

    return run


_INSTRUCTIONS: dict[str, Any] = {
    "mov.b32": lambda a: a, "prmt.b32": _permuted, "shl.b32": lambda a, b: a << b, "shr.b32": lambda a, b: a >> b,
    "and.b32": lambda a, b: a & b, "lop3.b32": _and_or,
    "mul.bf16x2": _pairs(torch.mul), "sub.bf16x2": _pairs(torch.sub),
}  # fmt: skip


def made(text: str, of: torch.Tensor, by: torch.Tensor | None = None) -> torch.Tensor:
    """What the instructions make of bytes, 4 at once, and of a bfloat16 for each."""
    words = of.view(torch.int32).tolist()
    pairs = [[]] * len(words) if by is None else by.view(torch.int32).reshape(-1, 2).tolist()
    found = [run_ptx(text, word & 0xFFFFFFFF, *(each & 0xFFFFFFFF for each in pair))
             for word, pair in zip(words, pairs, strict=True)]  # fmt: skip
    low_and_high = [half for pair in found for each in pair for half in (each & 0xFFFF, each >> 16)]
    return torch.tensor(low_and_high).to(torch.uint16).view(torch.bfloat16)


BYTES = torch.arange(256, dtype=torch.uint8)


@pytest.mark.parametrize("exponent", [65, 66, 100, 127, 192])
def test_ptx_makes_numbers_of_four_bits(exponent: int) -> None:
    """And of scales all that bfloat16 holds 2^-64 times: `e8m0` less 127 is what the scale is a power of."""
    from precast.kernels.quantised_experts import triton_values as values

    blocks = BYTES.reshape(1, 16, 16)
    expected = dequantise(Quantised(blocks, torch.full((1, 16), exponent, dtype=torch.uint8), format="mxfp4"))
    bits = torch.full((256,), exponent + int(values.FP4_SHIFT.value) << 7, dtype=torch.int16)
    by = bits.view(torch.bfloat16)

    low, high = (made(text.value, BYTES, by).double() * 2.0**64 for text in (values._FP4_LOWER, values._FP4_UPPER))

    assert torch.equal(torch.stack((low, high), 1).flatten(), expected.flatten().double())


@pytest.mark.parametrize("taken", [0, 8, 23])
def test_ptx_makes_integers_of_four_bits(taken: int) -> None:
    from precast.kernels.quantised_experts import triton_values as values

    by = torch.full((256,), 128.0 + taken, dtype=torch.bfloat16)

    low, high = (made(text.value, BYTES, by) for text in (values._INT4_LOWER, values._INT4_UPPER))

    assert low.tolist() == [byte % 16 - taken for byte in range(256)]
    assert high.tolist() == [byte // 16 - taken for byte in range(256)]


def test_ptx_makes_numbers_of_eight_bits() -> None:
    from precast.kernels.quantised_experts import triton_values as values

    found, expected = made(values._FLOAT8.value, BYTES), BYTES.view(torch.float8_e4m3fn).float()

    numbers = ~expected.isnan()
    assert int(numbers.sum()) == 254
    assert torch.equal(found.float()[numbers], expected[numbers])
    assert found[~numbers].tolist() == [480.0, -480.0]
