"""Norms and gates that round what they make, and the linear layers behind them, in Triton, against their definitions:
in Triton's interpreter and on GPUs. `test_triton.py` runs this file in a process of its own.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from cublaslt_by_hand import CublasLt
from op_samples import quantised
from op_samples.draw import Draw, Sample
from op_samples.table import samples_of
from plain_rounding import POWERS_OF_TWO

from precast.ir.ops.rows_rounded import ROUNDINGS, in_groups
from precast.kernels import registry
from precast.kernels.choices import fitting, records_of
from precast.kernels.launch import Launched, as_function, use_of_tensors
from precast.kernels.linear import cublaslt
from precast.kernels.named import named
from precast.kernels.quantised_linear import float8
from precast.kernels.quantised_linear.quantised_linear import few_bits, from_few_bits
from precast.kernels.quantised_linear.rounded_linear import rounded_linear
from precast.kernels.records import Pointer
from precast.kernels.rounded.few_bits import divided, divided_groups, in_few_bits, scales_of_groups, store_where_made

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
DTYPES = [torch.float16] + ([] if IS_INTERPRETED else [torch.bfloat16])
SPECS = {spec.name.removeprefix("precast."): spec for spec in registry.specs()}
MAKERS = ("rounded_rms_norm", "rounded_residual_rms_norm", "rounded_gated_activation")
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_rounding = pytest.mark.parametrize("activation", ROUNDINGS)


def launched(op: str) -> Callable[..., Any]:
    """The op's record of Triton's."""
    (record,) = (each for each in records_of(f"precast.{op}", 1) if each.name == f"triton.{op}")
    return as_function(record)


def on_cpu(sample: Sample) -> Sample:
    return {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in sample.items()}


def check(op: str, sample: Sample, same: Callable[..., None]) -> None:
    """Values and scales apart, and what they mean together: next to each other in few bits, at most."""
    found = tuple(x.cpu() for x in launched(op)(**sample))

    expected = SPECS[op].reference(**on_cpu(sample))
    same(SPECS[op], found, expected)
    meant, wanted = (from_few_bits(values, scales, sample["activation"]) for values, scales, *_ in (found, expected))
    step = wanted.abs() / 8 + wanted.abs().amax(-1, keepdim=True) / 100
    assert ((meant - wanted).abs() <= 1.02 * step).all()
    assert (meant == wanted).float().mean() > 0.9 or not meant.numel()  # ties and last bits are few


@pytest.mark.parametrize("op", MAKERS)
@each_dtype
def test_samples(op: str, dtype: torch.dtype, same: Callable[..., None]) -> None:
    for sample in samples_of(SPECS[op], Draw(dtype, DEVICE)):
        check(op, sample, same)


def static(draw: Draw, activation: str) -> torch.Tensor | None:
    return draw.uniform(1, low=0.004, high=0.008, dtype=torch.float32) if activation == "fp8_tensor" else None


@each_rounding
@pytest.mark.parametrize(("rows", "width"), [(1, 96), (17, 72), (3, 1), (3, 1025), (2, 4096)])
@each_dtype
def test_rows_anywhere(rows: int, width: int, activation: str, dtype: torch.dtype, same: Callable[..., None]) -> None:
    draw = Draw(dtype, DEVICE)
    more = {"input_scale": static(draw, activation), "activation": activation}
    rule = {"weight": draw.normal(width), "eps": 1e-5, "cast_before_scale": True}
    x = draw.normal(rows, 2 * width + 5)[:, 3 : 3 + width]
    check("rounded_rms_norm", {"x": x, **rule, **more}, same)
    check("rounded_residual_rms_norm", {"x": x, "residual": draw.normal(width, rows).t(), **rule, **more}, same)
    check("rounded_gated_activation", {"x": draw.normal(2 * width, rows).t(), "kind": "silu", **more}, same)


@triton.jit
def rounding_kernel(  # type: ignore[no-untyped-def]
    values_ptr, scales_ptr, x_ptr, given_ptr, COUNT: tl.constexpr, KIND: tl.constexpr, IS_GIVEN: tl.constexpr,
    POWERS_OF_TWO: tl.constexpr,
):  # fmt: skip
    """COUNT groups of 128 numbers, with scales of their own, or given ones."""
    place = tl.arange(0, COUNT)[:, None] * 128 + tl.arange(0, 128)[None, :]
    x = tl.load(x_ptr + place)
    if IS_GIVEN:
        scales = tl.load(given_ptr + tl.arange(0, COUNT))
        x = divided(x, scales[:, None], True)
    else:
        scales = scales_of_groups(x, KIND, POWERS_OF_TWO)
        x = divided_groups(x, scales)
    tl.store(values_ptr + place, in_few_bits(x, KIND, values_ptr.dtype.element_ty))
    store_where_made(scales_ptr + tl.arange(0, COUNT), scales, tl.arange(0, COUNT) < COUNT)


def groups_of_any_size(count: int) -> torch.Tensor:
    """[count, 128], float32: ties between values of few bits, and numbers of any size and much smaller ones."""
    draw = torch.Generator().manual_seed(0)
    sizes = torch.randint(-149, 120, (count, 1), generator=draw)
    x = torch.ldexp(torch.randn(count, 128, generator=draw), sizes)
    x[:, ::3] *= torch.ldexp(torch.ones(count, 43), torch.randint(-30, 1, (count, 43), generator=draw))
    whole = torch.randint(-448 * 16, 448 * 16 + 1, (count // 2, 128), generator=draw)
    x[::2] = torch.ldexp(whole.float(), sizes[::2])
    x[0] = 0.0
    return x


@pytest.mark.parametrize("activation", ["fp8_group", "fp8_group_e8m0", "fp8_tensor", "int8_token"])
def test_groups_are_rounded_as_by_the_definition(activation: str) -> None:
    """Bit for bit, but where the definition has no number; the interpreter's float8 has no -0."""
    x = groups_of_any_size(256)
    given = 0.7 * x.abs().amax(-1) / 448 if activation == "fp8_tensor" else torch.ones(256)
    kind = "int8" if activation == "int8_token" else "fp8"
    values = torch.empty(256, 128, dtype=torch.int8 if kind == "int8" else torch.float8_e4m3fn, device=DEVICE)
    scales = torch.full((256,), torch.nan, device=DEVICE)

    rounding_kernel[(1,)](
        values, scales, x.to(DEVICE), given.to(DEVICE), COUNT=256, KIND=kind, IS_GIVEN=activation == "fp8_tensor",
        POWERS_OF_TWO=activation == "fp8_group_e8m0",
    )  # fmt: skip

    expected = [few_bits(group, activation, scale) for group, scale in zip(x, given, strict=True)]
    wanted = torch.stack([each[0] for each in expected])
    assert torch.equal(scales.cpu(), torch.cat([each[1] for each in expected]))
    found = values.cpu()
    if IS_INTERPRETED:
        assert torch.equal(found.float(), wanted.float())
    else:
        assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy's, in the interpreter
def test_scales_that_are_powers_of_two() -> None:
    """Bit for bit those that were made by hand, and 0 of the groups that are left."""
    x, expected = torch.zeros(32, 128), torch.zeros(32)
    for i, (most, scale) in enumerate(POWERS_OF_TWO):
        x[i, 3 * i], x[i, 127], expected[i] = -most, most / 3, scale
    values = torch.empty(32, 128, dtype=torch.float8_e4m3fn, device=DEVICE)
    scales = torch.full((32,), torch.nan, device=DEVICE)

    rounding_kernel[(1,)](
        values, scales, x.to(DEVICE), scales, COUNT=32, KIND="fp8", IS_GIVEN=False, POWERS_OF_TWO=True
    )

    torch.testing.assert_close(scales.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("activation", [each for each in ROUNDINGS if not (IS_INTERPRETED and each == "fp8_tensor")])
@each_dtype
def test_what_is_no_number_does_not_become_one(activation: str, dtype: torch.dtype) -> None:
    """All that shares a scale with NaN or infinity is NaN, as by the definition, or by its own value what has a scale
    for all; the interpreter's float8 has no NaN."""
    draw = Draw(dtype, DEVICE)
    x = draw.normal(5, 2 * 200)
    x[1, 3], x[2, 140], x[3, 250], x[4] = torch.nan, torch.inf, -torch.inf, torch.nan
    sample = {"x": x, "kind": "silu", "input_scale": static(draw, activation), "activation": activation}

    values, scales = launched("rounded_gated_activation")(**sample)

    wanted = from_few_bits(*SPECS["rounded_gated_activation"].reference(**on_cpu(sample)), activation)
    meant = from_few_bits(values.cpu(), scales.cpu(), activation)
    assert torch.equal(meant.isfinite(), wanted.isfinite())
    assert not meant[1].isfinite().all()


@pytest.mark.parametrize(("activation", "width"), [("fp8_token", 32768), ("int8_token", 20000), ("fp8_group", 40001)])
@each_dtype
def test_wide_gates(activation: str, width: int, dtype: torch.dtype, same: Callable[..., None]) -> None:
    """Of more than a program of a norm holds, where one program does not have the whole row."""
    x = Draw(dtype, DEVICE).normal(2, 2 * width)
    check("rounded_gated_activation", {"x": x, "kind": "silu", "input_scale": None, "activation": activation}, same)


@pytest.mark.parametrize("rows", [0, 1, 9, 33, 130, 257])
@pytest.mark.parametrize(
    ("activation", "weight"),
    [
        ("fp8_token", "rows"), ("fp8_tensor", "all"), ("fp8_tensor", "rows"), ("fp8_group", "blocks"),
        ("fp8_group_e8m0", "blocks"), ("int8_token", "int8"),
    ],
)  # fmt: skip
@each_dtype
def test_layers_are_those_that_round_themselves(rows: int, activation: str, weight: str, dtype: torch.dtype) -> None:
    """Bit for bit: the same launches but the first."""
    draw = Draw(dtype, DEVICE)
    block = {"rows": (1, 256), "all": (70, 256), "blocks": (128, 128), "int8": (1, 256)}[weight]
    made = (quantised.int8 if weight == "int8" else quantised.fp8)(draw, 70, 256, block)
    scale, bias, x = static(draw, activation), draw.normal(70), draw.normal(1, rows, 256)
    own = quantised.call(x, made, input_scale=scale, activation=activation, bias=bias)
    values, scales = (part.contiguous() for part in few_bits(x.float(), activation, scale))
    given = {
        "input": values, "input_scales": scales.clone(), **made, "input_scale": scale, "bias": bias, "dtype": dtype,
        "activation": activation,
    }  # fmt: skip

    def by_triton(op: str, sample: Sample) -> torch.Tensor:
        use = use_of_tensors(f"precast.{op}", 1, sample)
        record = next(record for record in fitting(use, {"T": rows}) if record.kind == "triton")
        found: torch.Tensor = as_function(record)(**sample)
        return found

    assert torch.equal(by_triton("rounded_linear", given), by_triton("quantised_linear", own))


@pytest.mark.parametrize("rows", [3, 4, 18])
@pytest.mark.parametrize(
    ("activation", "block"), [("fp8_token", (208, 1536)), ("fp8_group", (128, 128)), ("fp8_group_e8m0", (128, 128))]
)
def test_what_cublaslt_is_given(activation: str, block: tuple[int, int], rows: int) -> None:
    """Scales as what rounds the input lays them, and in blocks the last rows, in memory for four."""
    draw = Draw(torch.float16, DEVICE)
    x, weight = draw.normal(1, rows, 1536), quantised.fp8(draw, 208, 1536, block)
    values, scales = (part.contiguous() for part in few_bits(x.float(), activation))
    own = quantised.call(x, weight, activation=activation)
    given = {
        "input": values, "input_scales": scales.clone(), **weight, "input_scale": None, "bias": None,
        "dtype": torch.float16, "activation": activation,
    }  # fmt: skip

    def laid(op: str, sample: Sample) -> list[torch.Tensor]:
        """What the product is given: scales of the weight, of the input, and the input's last rows."""
        use = use_of_tensors(f"precast.{op}", 1, sample)
        first, product = float8.launches(use)
        memory = torch.full((int(float8.workspace(use)),), 0x7F, dtype=torch.uint8, device=DEVICE)
        args = tuple(
            arg._replace(tensor="out.0") if isinstance(arg, Pointer) and arg.tensor == "workspace" else arg
            for arg in first.args
        )
        Launched([first._replace(args=args)])(**{k: v for k, v in sample.items() if v is not None}, out=memory)
        counts = 208, 12 * -(-rows // 4) * 4 if in_groups(activation) else rows
        scales = [
            memory[arg.offset :].view(torch.float32)[:count] if arg.tensor == "workspace"
            else sample[arg.tensor].flatten()[:count]
            for arg, count in zip(product.args[4:6], counts, strict=True) if isinstance(arg, Pointer)
        ]  # fmt: skip
        if not in_groups(activation):
            return scales
        last, spare = product.args[7:9]
        assert isinstance(last, Pointer)
        assert isinstance(spare, Pointer)
        assert rows % 4 == 0 or last.offset + 4 * 1536 <= spare.offset  # type: ignore[operator]
        return [*scales, memory[last.offset :][: rows % 4 * 1536]]

    found = laid("rounded_linear", given)
    for each, expected in zip(found, laid("quantised_linear", own), strict=True):
        torch.testing.assert_close(each, expected, rtol=0, atol=0, equal_nan=True)
    if in_groups(activation):
        assert torch.equal(found[2], values.view(torch.uint8)[0, rows // 4 * 4 :].flatten())


@pytest.mark.skipif(not IS_INTERPRETED, reason="test_cublaslt.py multiplies on GPUs")
@pytest.mark.parametrize("rows", [3, 4, 18])
@pytest.mark.parametrize(
    ("activation", "block"), [("fp8_token", (208, 512)), ("fp8_group", (128, 128)), ("fp8_group_e8m0", (128, 128))]
)
def test_cublaslt_multiplies_what_it_is_given(
    activation: str, block: tuple[int, int], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All launches, with the library by hand. Nothing is read behind the input."""
    found = CublasLt(7)
    monkeypatch.setattr(cublaslt, "_library", lambda: found)
    monkeypatch.setattr(cublaslt, "_handle_here", lambda: ctypes.c_void_p(1))
    monkeypatch.setattr(cublaslt, "_copy", lambda to, source, count, stream: ctypes.memmove(to, source, count))
    draw = Draw(torch.float16, DEVICE)
    values, scales = few_bits(draw.normal(1, rows, 512).float(), activation)
    behind = torch.full((1, 4, 512), torch.nan).to(values.dtype)
    stored = torch.cat([each.view(torch.uint8) for each in (values, behind)], 1).view(values.dtype)
    given = {
        "input": stored[:, :rows], "input_scales": scales.clone(), **quantised.fp8(draw, 208, 512, block),
        "input_scale": None, "bias": draw.normal(208), "dtype": torch.float16, "activation": activation,
    }  # fmt: skip
    use = use_of_tensors("precast.rounded_linear", 1, given)
    first, product = float8.launches(use)
    memory = torch.full((int(float8.workspace(use)),), 0x7F, dtype=torch.uint8)
    y = torch.full((1, rows, 208), torch.nan, dtype=torch.float16)
    tensors = {name: x for name, x in given.items() if isinstance(x, torch.Tensor)}
    in_memory = tuple(
        arg._replace(tensor="out.0") if isinstance(arg, Pointer) and arg.tensor == "workspace" else arg
        for arg in first.args
    )
    Launched([first._replace(args=in_memory)])(**{name: x for name, x in given.items() if x is not None}, out=memory)
    addresses = [
        (tensors | {"workspace": memory, "out.0": y})[arg.tensor].data_ptr() + int(arg.offset)  # type: ignore[arg-type]
        if isinstance(arg, Pointer) else arg
        for arg in product.args
    ]  # fmt: skip

    named(product.kernel)(**product.constants)(*addresses, stream=0)

    torch.testing.assert_close(y, rounded_linear(**given), rtol=2e-3, atol=2e-3)
