"""Launches as records give them, of a kernel that is made for these tests: in Triton's interpreter and on GPUs.

`test_triton.py` runs this file in a process of its own.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from graph_text import parse_graph

from precast.ir.graph.schema import Expr, TensorType
from precast.ir.graph.symbols import add, ceildiv, mul
from precast.kernels.launch import Launched, as_function, launched_of
from precast.kernels.records import Launch, Launches, Pointer, Record, Stride
from precast.kernels.registry import Implementation
from precast.kernels.use import Use
from precast.loader.program.restore import restore

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
ROWS = 4


@triton.jit
def scale_kernel(x_ptr, y_ptr, rows, stride_t, stride_d, scale, WIDTH: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """y = scale * x, some rows a program."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    x = tl.load(x_ptr + row * stride_t + column * stride_d, mask=row < rows)
    tl.store(y_ptr + row * WIDTH + column, x * scale, mask=row < rows)


def scaled(source: Pointer, target: Pointer, rows: Expr, strides: tuple[Stride | int, ...], scale: float) -> Launch:
    constants = {"WIDTH": 8, "ROWS": ROWS}
    return Launch(
        f"{__name__}:scale_kernel", (ceildiv(rows, ROWS),), (source, target, rows, *strides, scale), constants
    )


def times_six(use: Use) -> tuple[Launch, ...]:
    """`self` doubled into the workspace, behind a gap of 256 bytes, and that times three."""
    rows = use.shape("self")[0]
    between = Pointer("workspace", "float32", 256)
    strides = (Stride("self", 0), Stride("self", 1))
    return (
        scaled(Pointer("self"), between, rows, strides, 2.0),
        scaled(between, Pointer("out.0"), rows, (8, 1), 3.0),
    )


def record(runs: Launches, op: str = "aten.neg.default", num_bytes: Any = lambda use: 0) -> Record:
    return Record(name="triton.tried", op=op, runs=runs, workspace=num_bytes, kind="triton", allocates=False)


SIX = record(times_six, num_bytes=lambda use: add(256, mul(32, use.shape("self")[0])))


def test_launches_of_a_part_of_the_rows() -> None:
    """Arguments and results that begin where a part of them does."""
    x, y = torch.randn(7, 8, device=DEVICE), torch.full((7, 8), torch.nan, device=DEVICE)
    parts = ((0, 3, 2.0), (3, 4, 5.0))
    launched = Launched([
        scaled(Pointer("self", offset=32 * first), Pointer("out.0", offset=32 * first), rows, (8, 1), scale)
        for first, rows, scale in parts
    ])  # fmt: skip
    launched(self=x, out=y)

    assert torch.equal(y, torch.cat([2 * x[:3], 5 * x[3:]]))


@pytest.mark.parametrize("rows", [0, 1, 3, 4, 17])
def test_tensors_alone(rows: int) -> None:
    x = torch.randn(rows, 8, device=DEVICE)

    assert torch.equal(as_function(SIX)(self=x), 3 * (2 * x))


def test_strides_are_those_of_the_tensor() -> None:
    x = torch.randn(8, 5, device=DEVICE).t()

    assert torch.equal(as_function(SIX)(self=x), 3 * (2 * x))


def test_results_are_written_where_they_are_wanted() -> None:
    x, y = torch.randn(3, 8, device=DEVICE), torch.empty(3, 8, device=DEVICE)

    assert as_function(SIX)(x, out=y) is y
    assert torch.equal(y, 3 * (2 * x))


def test_sizes_of_a_step_reach_the_launches() -> None:
    """Grid, arguments and workspace are expressions over `T`, computed once a run."""
    graph = parse_graph(
        """
        symbols { T: 1.. }
        inputs { %x: float32[T, 8] }
        block one { inputs { %a: float32[T, 8] } %b = aten.neg.default(self=%a) return %b }
        main { %y = call one(a=%x) return y=%y }
        """
    )

    def choose(use: Use) -> tuple[Implementation, ...]:
        launched = launched_of(SIX, use)
        return (Implementation({}, launched, allocates=False, expressions=launched.expressions),)

    program = restore(graph, device=DEVICE, choose=choose)
    for rows in (1, 6, 9):
        x = torch.randn(rows, 8, device=DEVICE)
        assert torch.equal(program(x=x)["y"], 3 * (2 * x))


def test_tensors_of_a_list_and_several_results() -> None:
    launched = Launched([scaled(Pointer(f"tensors.{i}"), Pointer(f"out.{i}"), 3, (8, 1), i + 1.0) for i in range(2)])
    x = [torch.randn(3, 8, device=DEVICE) for _ in range(2)]
    out = tuple(torch.empty_like(each) for each in x)
    launched(tensors=x, out=out)

    assert torch.equal(out[0], x[0])
    assert torch.equal(out[1], 2 * x[1])


def test_an_op_without_results_returns_nothing() -> None:
    def write(use: Use) -> tuple[Launch, ...]:
        assert use.operands["k"].type == TensorType("float32", (1, 2, 1, 8))
        return (scaled(Pointer("k"), Pointer("v"), 2, (8, 1), 5.0),)

    k, v = (torch.randn(1, 2, 1, 8, device=DEVICE) for _ in range(2))
    cache = torch.zeros(1, 2, 1, 8, device=DEVICE)
    slots = torch.zeros(2, dtype=torch.int64, device=DEVICE)

    assert as_function(record(write, "precast.write_kv"))(k, v, cache, cache, slots) is None
    assert torch.equal(v, 5 * k)
