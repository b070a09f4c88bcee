"""Rows of tables in float8: by hand, and as `embedding` has them of a table that was dequantised before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from op_samples.draw import Draw
from op_samples.quantised import fp8

from precast.ir.graph.schema import Const, Dtype, DtypeArg, Items, Node, Ref, TensorType, Value
from precast.kernels.choices import resolve
from precast.kernels.dequantise.dequantise import Quantised, dequantise
from precast.kernels.embedding.embedding import embedding
from precast.kernels.embedding.quantised_embedding import quantised_embedding
from precast.kernels.embedding.quantised_sharded_embedding import quantised_sharded_embedding
from precast.kernels.embedding.sharded_embedding import sharded_embedding
from precast.kernels.use import Target, use_of

BLOCKS = [(13, 33), (1, 33), (4, 8), (64, 8), (5, 64)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def table(block: tuple[int, int]) -> dict[str, Any]:
    return fp8(Draw(torch.float32, torch.device("cpu")), 13, 33, block)


def dequantised(parts: dict[str, Any], dtype: torch.dtype) -> torch.Tensor:
    return dequantise(Quantised(**parts)).to(dtype)


def test_by_hand() -> None:
    """Blocks of two rows and two columns; 0.3 in bfloat16 is 0.30078125."""
    weight = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]], dtype=torch.float32).to(torch.float8_e4m3fn)
    scales = torch.tensor([[0.5, 2.0], [10.0, 0.25]])
    given = {"weight": weight, "scales": scales, "format": "fp8", "block": (2, 2)}
    ids = torch.tensor([[2, 0, 1, 2]])

    found = quantised_embedding(ids, **given, dtype=torch.float32)
    scaled = quantised_embedding(ids[0, 1:2], **given, dtype=torch.bfloat16, scale=0.3)
    part = quantised_sharded_embedding(ids + 4, **given, start=5, dtype=torch.float32)

    rows = [[70.0, 80.0, 2.25], [0.5, 1.0, 6.0], [2.0, 2.5, 12.0]]
    assert found.tolist() == [[rows[0], rows[1], rows[2], rows[0]]]
    assert scaled.tolist() == [[0.150390625, 0.30078125, 1.8046875]]
    assert part.tolist() == [[rows[2], [0.0, 0.0, 0.0], rows[1], rows[2]]]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 33**0.5])
def test_the_bits_are_those_of_a_table_that_was_dequantised(
    block: tuple[int, int], dtype: torch.dtype, scale: float
) -> None:
    parts = table(block)
    ids = torch.tensor([[12, 0, 7, 7], [3, 1, 4, 11]])
    how = {"dtype": dtype, "scale": scale}

    assert torch.equal(quantised_embedding(ids, **parts, **how), embedding(ids, dequantised(parts, dtype), scale=scale))
    ids = torch.arange(-3, 40, dtype=torch.int32)
    expected = sharded_embedding(ids, dequantised(parts, dtype), start=9, scale=scale)
    assert torch.equal(quantised_sharded_embedding(ids, **parts, start=9, **how), expected)


@pytest.mark.parametrize("ids", [[13], [-1], [0, 2**40]], ids=str)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_an_id_of_no_row_is_an_error(ids: list[int], block: tuple[int, int]) -> None:
    with pytest.raises(IndexError):
        quantised_embedding(torch.tensor(ids), **table(block), dtype=torch.float32)


def test_a_part_without_rows_is_zeros() -> None:
    parts = table((1, 33))
    none = {**parts, "weight": parts["weight"][:0], "scales": parts["scales"][:0]}

    found = quantised_sharded_embedding(torch.tensor([[0, 5]]), **none, start=0, dtype=torch.float16)

    assert torch.equal(found, torch.zeros(1, 2, 33, dtype=torch.float16))


@pytest.mark.parametrize(
    ("target", "ids", "dtype", "name"),
    [
        (Target("cpu"), (1, "T"), "bfloat16", "reference.quantised_embedding"),
        (Target("cuda", (8, 0)), (1, "T"), "bfloat16", "reference.quantised_embedding"),
        (Target("cuda", (8, 9)), (1, "T"), "bfloat16", "triton.quantised_embedding"),
        (Target("cuda", (9, 0)).without_torch, (1, "T"), "float32", "triton.quantised_embedding"),
        (Target("cuda", (9, 0)), (1, "T"), "float64", "reference.quantised_embedding"),
        (Target("cuda", (9, 0)), (2, "T"), "bfloat16", "reference.quantised_embedding"),
    ],
)
def test_which_record_computes_it(target: Target, ids: tuple[int | str, ...], dtype: Dtype, name: str) -> None:
    types = {
        "ids": TensorType("int64", ids), "weight": TensorType("float8_e4m3fn", (99, 27)),
        "scales": TensorType("float32", (25, 4)),
    }  # fmt: skip
    given = {name: Ref(name) for name in types}
    constants = {"format": Const("fp8"), "block": Items((Const(4), Const(8))), "dtype": DtypeArg(dtype)}
    node = Node("precast.quantised_embedding", {**given, **constants}, (Value("y", TensorType(dtype, (*ids, 27))),))

    assert resolve(use_of(node, types, target, {"weight", "scales"})).record.name == name
