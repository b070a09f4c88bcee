"""Norms, gates, rotary embeddings, linear layers with few outputs in Triton, and gates after products, against their
references: odd sizes, strided rows, mixed dtypes; in Triton's interpreter and on GPUs.

`test_triton.py` runs this file in a process of its own. The interpreter cuts what it converts to bfloat16 where devices
round, so that dtype is tried on GPUs only.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from op_samples.draw import Draw, Sample
from op_samples.table import samples_of

from precast.ir.graph.symbols import evaluate
from precast.kernels import registry
from precast.kernels.choices import records_of
from precast.kernels.embedding.drawn import known_ids
from precast.kernels.embedding.known_ids import launches as drawn_launches
from precast.kernels.gated_linear import rows_at_once
from precast.kernels.launch import Launched, as_function
from precast.kernels.spec import OpSpec

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
DTYPES = [torch.float32, torch.float16] + ([] if IS_INTERPRETED else [torch.bfloat16])
SPECS = {spec.name.removeprefix("precast."): spec for spec in registry.specs()}
OPS = (
    "rms_norm", "residual_rms_norm", "norm_residual_norm", "layer_norm", "gated_activation", "rotary", "rotary_tables",
    "embedding", "gather_rows", "sharded_embedding", "quantised_embedding", "quantised_sharded_embedding", "sinkhorn",
)  # fmt: skip

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_size = pytest.mark.parametrize(("rows", "width"), [(1, 96), (17, 72), (3, 1), (3, 1025), (2, 4096)])
quiet_overflow = pytest.mark.filterwarnings("ignore:overflow encountered in exp")


def launched(op: str) -> Callable[..., Any]:
    """The op's record of Triton's."""
    (record,) = (each for each in records_of(f"precast.{op}", 1) if each.name == f"triton.{op}")
    return as_function(record)


def at_home(sample: Sample) -> Sample:
    """The sample on the host, where the reference computes what is expected."""
    return {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in sample.items()}


def check(op: str, sample: Sample, same: Callable[[OpSpec, Any, Any], None]) -> None:
    found = launched(op)(**sample)
    moved = tuple(x.cpu() for x in found) if isinstance(found, tuple) else found.cpu()
    same(SPECS[op], moved, SPECS[op].reference(**at_home(sample)))


def strided(draw: Draw, rows: int, width: int) -> Iterator[torch.Tensor]:
    """So many rows, and twice as many in two axes, lying in five ways."""
    yield draw.normal(1, rows, width)
    yield draw.normal(rows, 2 * width + 5)[:, 3 : 3 + width]
    yield draw.normal(width, rows).t()
    yield draw.normal(1, rows, 4, width)[:, :, 1:3]
    yield draw.normal(1, rows, 2, width).transpose(1, 2)


@pytest.mark.parametrize("op", OPS)
@each_dtype
def test_samples(op: str, dtype: torch.dtype, same: Callable[..., None]) -> None:
    for sample in samples_of(SPECS[op], Draw(dtype, DEVICE)):
        check(op, sample, same)


@each_dtype
@each_size
def test_norms_of_rows_anywhere(rows: int, width: int, dtype: torch.dtype, same: Callable[..., None]) -> None:
    draw = Draw(dtype, DEVICE)
    weight, bias = draw.normal(width), draw.normal(2 * width)[::2]
    for x in strided(draw, rows, width):
        residual = draw.normal(*x.shape[:-1], 2 * width)[..., width:]
        check("rms_norm", {"x": x, "weight": weight, "eps": 1e-5, "cast_before_scale": True}, same)
        check("rms_norm", {"x": x, "weight": None, "eps": 1e-5, "cast_before_scale": True}, same)
        rule = {"eps": 1e-6, "offset": 1.0, "cast_before_scale": False}
        check("residual_rms_norm", {"x": x, "residual": residual, "weight": bias, **rule}, same)
        two = {"inner_weight": weight.sigmoid(), "weight": bias.sigmoid()}
        check("norm_residual_norm", {"x": x, "residual": residual, **two, **rule}, same)
        check("layer_norm", {"x": x, "weight": weight, "bias": bias, "eps": 1e-5}, same)


@pytest.mark.parametrize(("rows", "size"), [(1, 4), (70, 3), (3, 20), (2, 1)])
def test_matrices_of_rows_anywhere(rows: int, size: int, same: Callable[..., None]) -> None:
    for x in strided(Draw(torch.float32, DEVICE), rows, size * size):
        for eps in (0.0, 0.5):
            check("sinkhorn", {"x": x.abs() + 0.1, "size": size, "iterations": 4, "eps": eps}, same)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("cast_before_scale", [False, True])
@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
def test_norms_round_where_the_reference_does(
    dtype: torch.dtype, weight_dtype: torch.dtype, offset: float, cast_before_scale: bool
) -> None:
    """Sums differ in their last bits, which seldom shows in half precision; a rounding more or less does."""
    draw = Draw(dtype, DEVICE)
    sample = {"x": draw.normal(17, 512), "weight": draw.normal(512, dtype=weight_dtype), "eps": 1e-6, "offset": offset}
    reference = SPECS["rms_norm"].reference
    expected = reference(**at_home(sample), cast_before_scale=cast_before_scale)
    other = reference(**at_home(sample), cast_before_scale=not cast_before_scale)

    found = launched("rms_norm")(**sample, cast_before_scale=cast_before_scale).cpu()

    assert (found != expected).float().mean() < 0.01
    assert (other != expected).float().mean() > 0.1


@each_dtype
def test_the_sum_is_rounded_before_the_norm(dtype: torch.dtype) -> None:
    draw = Draw(dtype, DEVICE)
    x, residual, weight = draw.normal(1, 3, 96, scale=300.0), draw.normal(1, 3, 96), draw.normal(96)
    rule = {"eps": 1e-6, "offset": 0.0, "cast_before_scale": True}
    normed, total = launched("residual_rms_norm")(x, residual, weight, **rule)

    assert torch.equal(total, x + residual)
    assert torch.equal(normed, launched("rms_norm")(total, weight, **rule))


@each_dtype
def test_the_inner_norm_is_rounded_before_the_sum(dtype: torch.dtype) -> None:
    draw = Draw(dtype, DEVICE)
    x, residual = draw.normal(1, 3, 96), draw.normal(1, 3, 96, scale=9.0)
    inner_weight, weight = draw.normal(96), draw.normal(96)
    rule = {"eps": 1e-6, "offset": 1.0, "cast_before_scale": False}
    normed, total = launched("norm_residual_norm")(x, residual, inner_weight, weight, **rule)

    expected = residual + launched("rms_norm")(x, inner_weight, **rule)
    if dtype == torch.float32:  # a GPU may multiply and add with one rounding
        torch.testing.assert_close(total, expected, rtol=1e-6, atol=1e-6)
    else:
        assert torch.equal(total, expected)
    assert torch.equal(normed, launched("rms_norm")(total, weight, **rule))


@each_dtype
@each_size
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
@quiet_overflow
def test_gates_of_rows_anywhere(
    kind: str, rows: int, width: int, dtype: torch.dtype, same: Callable[..., None]
) -> None:
    for x in strided(Draw(dtype, DEVICE), rows, 2 * width):
        check("gated_activation", {"x": x, "kind": kind}, same)


@each_dtype
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 2048), (1, 1), (3, 100), (5, 1025), (8, 513)])
def test_few_outputs_of_rows_anywhere(outputs: int, inputs: int, dtype: torch.dtype, same: Callable[..., None]) -> None:
    """Into memory whose neighbours stay what they are."""
    (record,) = (each for each in records_of("aten.linear.default", 1) if each.name == "triton.linear")
    draw = Draw(dtype, DEVICE)
    weight, bias = draw.normal(outputs, 2 * inputs, scale=inputs**-0.5), draw.normal(2 * outputs)
    for given in (weight[:, :inputs].contiguous(), weight[:, ::2]):
        for x, b in itertools.product(strided(draw, 9, inputs), (None, bias[:outputs], bias[::2])):
            expected = torch.nn.functional.linear(*(None if y is None else y.cpu() for y in (x, given, b)))
            memory = torch.full((expected.numel() + 8,), torch.nan, dtype=dtype, device=DEVICE)
            out = memory[: expected.numel()].view(expected.shape)
            as_function(record)(input=x, weight=given, bias=b, out=out)

            same(SPECS["gated_linear"], out.cpu(), expected)
            assert memory[expected.numel() :].isnan().all()


@each_dtype
def test_a_row_with_few_outputs_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    (record,) = (each for each in records_of("aten.linear.default", 1) if each.name == "triton.linear")
    draw = Draw(dtype, DEVICE)
    x, weight = draw.normal(11, 700), draw.normal(2, 700)
    found = as_function(record)(input=x, weight=weight, bias=None)

    for row in (0, 6, 10):
        assert torch.equal(as_function(record)(input=x[row : row + 1], weight=weight, bias=None), found[row : row + 1])


@each_dtype
@pytest.mark.parametrize("most", [1, 4, 5, 16, 4096])
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
@quiet_overflow
def test_gated_products_of_some_rows_at_once(
    kind: str, most: int, dtype: torch.dtype, same: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of all rows or of fewer, into memory that is given, whose rows don't touch what comes after."""
    monkeypatch.setattr(rows_at_once, "MAX_ROWS_AT_ONCE", most)
    draw, spec = Draw(dtype, DEVICE), SPECS["gated_linear"]
    weight, bias = draw.normal(2 * 1025, 24, scale=0.2), draw.normal(2 * 1025)
    wide = draw.normal(1, 16, 50)
    for x, given in ((wide[..., :24], None), (wide[:, 3:, 1:49:2], bias), (wide[:, :1, :24], bias)):
        sample: Sample = {"input": x, "weight": weight, "bias": given, "kind": kind}
        expected = spec.reference(**at_home(sample))
        memory = torch.full((expected.numel() + 8,), torch.nan, dtype=dtype, device=DEVICE)
        out = memory[: expected.numel()].view(expected.shape)
        rows_at_once.gated_linear(**sample, out=out)

        same(spec, out.cpu(), expected)
        assert memory[expected.numel() :].isnan().all()


@each_dtype
@quiet_overflow
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
def test_gates_of_large_numbers(kind: str, dtype: torch.dtype, same: Callable[..., None]) -> None:
    gate = [-6e4, -200.0, -88.0, -12.0, -1e-4, 0.0, 1e-4, 12.0, 88.0, 200.0, 6e4]
    check("gated_activation", {"x": Draw(dtype, DEVICE).of([gate + [1.0] * 11], dtype), "kind": kind}, same)


@each_dtype
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])
@pytest.mark.parametrize(
    ("tokens", "heads", "size", "pairs"),
    [(1, 1, 72, 36), (3, 7, 96, 20), (17, 32, 128, 64), (3, 2, 5, 1), (2, 40, 8, 4)],
)
def test_rotary_of_heads_anywhere(
    tokens: int, heads: int, size: int, pairs: int, interleaved: bool, dtype: torch.dtype, same: Callable[..., None]
) -> None:
    draw = Draw(dtype, DEVICE)
    angle = draw.uniform(1, tokens, 2 * pairs, high=6.3, dtype=torch.float32)
    tables = {"cos": angle.cos()[..., ::2].to(dtype), "sin": angle.sin()[..., pairs:]}
    tables["cos"] = tables["cos"].to(tables["sin"].dtype)
    sliced = draw.normal(1, heads + 3, tokens, size + 1).transpose(1, 2)[:, :, 2:-1, 1:]
    for x in (draw.normal(1, tokens, heads, size), sliced):
        check("rotary", {"x": x, **tables, "interleaved": interleaved}, same)


@each_dtype
@pytest.mark.parametrize("each", [False, True], ids=["one set", "a set a token"])
def test_tables_of_far_positions(each: bool, dtype: torch.dtype, same: Callable[..., None]) -> None:
    draw = Draw(dtype, DEVICE)
    positions = draw.integers(0, 1 << 20, 1, 34)[:, ::2]
    inv_freq = draw.uniform(*((1, 17) if each else ()), 54, dtype=torch.float32)
    sample = {"positions": positions, "inv_freq": inv_freq, "scale": 1.25, "dtype": dtype}
    check("rotary_tables", sample, same)


@pytest.mark.parametrize("count", [1, 256, 300])
def test_ids_that_were_drawn(count: int) -> None:
    """-1 stands for what the first row drew, and so on; a row that drew no token gives token 0."""
    drawn = torch.tensor([7, -1, 2**40], device=DEVICE)
    ids = torch.tensor([-1, 5, 0, -2, 2**33, -3], device=DEVICE).repeat(50)[:count]
    launched = Launched(drawn_launches(has_pdl=not IS_INTERPRETED and torch.cuda.get_device_capability() >= (9, 0)))
    found = torch.full_like(ids, -9)
    launched(ids=ids, drawn=drawn, out=found, sizes=[evaluate(expr, {"T": count}) for expr in launched.expressions])

    assert found.tolist() == ([7, 5, 0, 0, 2**33, 2**40] * 50)[:count]
    assert torch.equal(known_ids(ids, drawn), found)


@pytest.mark.parametrize("width", [1, 1024, 2500])
@each_dtype
def test_rows_of_a_table_that_lies_anyhow(width: int, dtype: torch.dtype, same: Callable[..., None]) -> None:
    draw = Draw(dtype, DEVICE)
    ids = draw.of([[4, 0, 4]], torch.int64)
    for table in (draw.normal(5, 2 * width)[:, ::2], draw.normal(width, 5).t()):
        check("embedding", {"ids": ids, "weight": table, "scale": 3.3}, same)
        check("sharded_embedding", {"ids": ids + 7, "weight": table, "start": 8, "scale": 3.3}, same)
        check("sharded_embedding", {"ids": ids, "weight": table[:3], "start": 0, "scale": 1.0}, same)
        check("gather_rows", {"x": table[None], "rows": ids[0].repeat(2)[::2]}, same)


@pytest.mark.parametrize("block", [(5, 2500), (1, 2500), (2, 128), (3, 7), (1, 1)], ids=str)
@pytest.mark.parametrize("width", [1, 1024, 2500])
@each_dtype
def test_rows_of_a_table_in_few_bits(
    width: int, block: tuple[int, int], dtype: torch.dtype, same: Callable[..., None]
) -> None:
    """Scales of all, of rows, of blocks that no row ends with; tables that lie anyhow; all numbers of float8, but that
    the interpreter reads NaN as 480."""
    draw = Draw(dtype, DEVICE)
    codes = torch.arange(5 * width, device=DEVICE).reshape(5, width) % 256
    if IS_INTERPRETED:
        codes[codes % 128 == 127] = 0
    every = codes.to(torch.uint8).view(torch.float8_e4m3fn)
    scales = draw.uniform(-(-5 // block[0]), -(-width // block[1]), low=0.01, dtype=torch.float32)
    wide = torch.zeros(5, 2 * width, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn)[:, ::2]
    wide.view(torch.uint8).copy_(every.view(torch.uint8))
    given = {"ids": draw.of([[4, 0, 2, 4]], torch.int64), "format": "fp8", "block": block, "dtype": dtype}
    for table, of in ((every, scales), (wide, scales.t().contiguous().t()), (every, scales.to(dtype))):
        sample = {**given, "weight": table, "scales": of}
        check("quantised_embedding", {**sample, "scale": 3.3}, same)
        check("quantised_embedding", sample, same)
        ids = draw.of([[-1, 8, 12, 13, 7, 2**40]], torch.int64)
        check("quantised_sharded_embedding", {**sample, "ids": ids, "start": 8, "scale": 3.3}, same)
    memory = torch.full((4 * width + 9,), 7.0, dtype=dtype, device=DEVICE)
    launched("quantised_embedding")(**given, weight=every, scales=scales, out=memory[: 4 * width].view(1, 4, width))
    assert (memory[4 * width :] == 7).all(), "written after the last row"
