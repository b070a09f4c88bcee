"""What computes linear layers beside torch: for few rows the weight stream, on Hopper; for few outputs Triton; else
cuBLASLt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from msgspec.structs import replace

from precast.ir.graph.schema import Dtype, Expr
from precast.ir.graph.symbols import add, ceildiv, mul
from precast.ir.weights.tensorfile import element_bytes
from precast.kernels.blocks import num_warps, power_of_two
from precast.kernels.linear import cublaslt
from precast.kernels.linear.stream_plan import MAX_ROWS, STEP, WAYS, Way, plan_of
from precast.kernels.records import Condition, Launch, Launches, Pointer, Record, Stride, nothing
from precast.kernels.rows import COMPUTED, has_rows, known, rows_of
from precast.kernels.use import Use

MOST_WORKSPACE_BYTES = 16 << 20
"""What cuBLASLt is given at most. It takes it where it splits sums over blocks, whose parts are kept in float32. That
pays where tiles are fewer than multiprocessors: a result of 256 rows and 4,096 columns is 32 tiles, or 4 MiB a part."""
_WORKSPACE_OF_A_COLUMN = 4096
"""Bytes for 8 parts of 128 rows."""
MAX_OUTPUTS = 8
"""Outputs that are few: reading the input takes longer than the multiplications, and a tile of cuBLASLt's is idle but
for one column in sixteen or more. Rows of so few bytes also leave it no fast kernel to write them with."""
_ROWS_AT_ONCE = 4
_PRODUCTS_AT_ONCE = 8192
"""Of a program, with all its rows and outputs: 64 for each of 128 threads."""


def stream(
    rows: Expr,
    outputs: int,
    inputs: int,
    dtype: Dtype,
    *,
    bias: bool = False,
    residual: bool = False,
    gate: str | None = None,
    most: int = MAX_ROWS,
    way: Way | None = None,
) -> Launch:
    """The weight stream, as `stream.cu` describes it, over an op's `input` [..., rows, inputs] and `weight` [outputs,
    inputs]; with its `bias` [outputs], its `residual` [..., rows, columns], and the `gate` of a gated feed-forward
    layer (silu, gelu, gelu_tanh), which makes half as many columns as there are outputs. `most`: of so many rows at
    most, which go their `way`, or the one that is known for them.

    Weight and bias must lie in row-major order and be written by no kernel of the step.
    """
    way = way or next(way for rows, way in WAYS.items() if most <= rows)
    plan = plan_of(way, most, outputs, inputs, is_gated=gate is not None)
    constants = {"BIAS": bias, "RESIDUAL": residual, "FLOAT16": dtype == "float16", "PASS": plan.tiles_a_pass}
    return Launch(
        "precast.kernels.linear/stream.cu:stream_linear",
        grid=(plan.grid,),
        args=(
            Pointer("out.0"), Pointer("input"), Pointer("weight"), Pointer("bias") if bias else None,
            Pointer("residual") if residual else None, Stride("input", -2), Stride("input", -1),
            Stride("residual", -2) if residual else 0, rows, outputs, inputs, *plan.args,
        ),
        constants=constants if gate is None else {**constants, "GATE": gate},
        block=plan.threads,
        shared_bytes=plan.shared_bytes,
        pdl=True,
    )  # fmt: skip


def launches(use: Use, most: int) -> tuple[Launch, ...]:
    """The weight stream for `most` rows, of a linear layer, or of a gated one, which names the `kind` of its gate."""
    outputs, inputs = use.number("weight", 0), use.number("weight", 1)
    gate = use.constant("kind")
    assert outputs is not None
    assert inputs is not None
    assert use.dtype is not None
    rows, kind = mul(*use.shape("input")[:-1]), None if gate is None else str(gate)
    return (stream(rows, outputs, inputs, use.dtype, bias=use.has("bias"), gate=kind, most=most),)


def few_outputs(use: Use) -> tuple[Launch, ...]:
    """One launch of Triton's kernel for `MAX_OUTPUTS` outputs at most, `_ROWS_AT_ONCE` rows of the input a program."""
    rows, outputs, inputs = rows_of(use, "input"), known(use, "weight", 0), known(use, "weight", 1)
    has_pdl, has_bias, places = use.target.capability >= (9, 0), use.has("bias"), power_of_two(outputs)
    block = min(power_of_two(inputs), _PRODUCTS_AT_ONCE // _ROWS_AT_ONCE // places)
    return (
        Launch(
            "precast.kernels.linear.triton:few_outputs_kernel",
            grid=(ceildiv(rows.total, _ROWS_AT_ONCE),),
            args=(
                Pointer("out.0"), Pointer("input"), Pointer("weight"), Pointer("bias") if has_bias else None,
                rows.total, rows.inner, *rows.strides, Stride("weight", 0), Stride("weight", 1),
                Stride("bias", 0) if has_bias else 0,
            ),
            constants={
                "OUTPUTS": outputs, "INPUTS": inputs, "ROWS": _ROWS_AT_ONCE, "PLACES": places, "BLOCK": block,
                "PDL": has_pdl,
            },
            num_warps=min(num_warps(_ROWS_AT_ONCE * places * block), 4),
            pdl=has_pdl,
        ),
    )  # fmt: skip


def workspace_bytes(outputs: int) -> int:
    """What cuBLASLt may take beside a result of so many columns. A step's layers have it one after the other."""
    return min(MOST_WORKSPACE_BYTES, _WORKSPACE_OF_A_COLUMN * outputs)


def workspace(use: Use) -> Expr:
    """The same for an op with the tensors of a linear layer."""
    outputs = use.number("weight", 0)
    assert outputs is not None
    return workspace_bytes(outputs)


def product(use: Use) -> tuple[Launch, ...]:
    """One call of cuBLASLt, of a linear layer."""
    return (product_into(use, Pointer("out.0"), Pointer("workspace")),)


def product_into(
    use: Use, out: Pointer, workspace: Pointer, part: tuple[Expr, Expr] | None = None,
    columns: tuple[int, int] | None = None,
) -> Launch:  # fmt: skip
    """The product of a linear layer, or of an op with its tensors, with `workspace_bytes` beside it.

    `part`: the first row, and how many, of an input without gaps; None: of all. `columns`: where the weight's outputs
    are some columns of a result, the first of them, and how many the result has.
    """
    outputs, inputs = use.number("weight", 0), use.number("weight", 1)
    assert outputs is not None
    assert inputs is not None
    assert use.dtype is not None
    has_bias, table = use.has("bias"), use.target.table
    first, rows = part or (0, mul(*use.shape("input")[:-1]))
    axis = _axis_of_rows(use)
    column, out_stride = columns or (0, outputs)
    each = element_bytes(use.dtype)
    # They were measured into rows without gaps, which begin at multiples of so many bytes.
    is_even = out_stride == outputs or each * out_stride % cublaslt.ALIGNED == 0
    measured = table.algorithms(use.dtype, outputs, inputs, bias=has_bias) if is_even else {}
    return Launch(
        "precast.kernels.linear.cublaslt:Product",
        grid=(rows,),
        args=(
            out._replace(offset=add(out.offset, each * column)),
            Pointer("input", offset=mul(use.width("input"), inputs, first)), Pointer("weight"),
            Pointer("bias", offset=each * column) if has_bias else None, workspace, rows,
            Stride("input", axis) if use.shape("input")[:-1] else inputs, Stride("input", -1),
        ),
        constants={
            "dtype": use.dtype, "outputs": outputs, "inputs": inputs, "bias": has_bias,
            "workspace_bytes": workspace_bytes(outputs),
            "algorithms": cublaslt.text_of(table.machine.cublaslt, measured),
            **({} if out_stride == outputs else {"out_stride": out_stride}),
        },
        library=True,
    )  # fmt: skip


def _axis_of_rows(use: Use) -> int:
    """The axis of the input that has the rows: the one before the last, if several have one index."""
    shape = use.shape("input")
    return next((axis - len(shape) for axis, size in enumerate(shape[:-2]) if size != 1), -2)


def _has_one_axis(use: Use) -> bool:
    return sum(size != 1 for size in use.shape("input")[:-1]) <= 1


def _has_steps(use: Use) -> bool:
    outputs, inputs = use.number("weight", 0), use.number("weight", 1)
    return outputs is not None and inputs is not None and inputs % STEP == 0


def _is_static(use: Use) -> bool:
    """It is read before the kernels in front have ended."""
    given = [use.operands[name] for name in ("weight", "bias") if use.has(name)]
    return all(each.is_contiguous and not each.is_activation for each in given)


def _has_numbers(use: Use) -> bool:
    return use.number("weight", 0) is not None and use.number("weight", 1) is not None


def _has_few_outputs(use: Use) -> bool:
    return _has_numbers(use) and 1 <= known(use, "weight", 0) <= MAX_OUTPUTS and known(use, "weight", 1) > 0


def _rows(symbol: str, of: str) -> Condition:
    def counts(use: Use) -> bool:
        shape = use.shape("input")
        return len(shape) > 1 and shape[-2] == symbol and all(size == 1 for size in shape[:-2])

    return Condition(f"rows that are {of}", counts)


_STATIC = Condition("weight and bias in row-major order that no op makes", _is_static)
_16_BITS: dict[str, tuple[Dtype, ...]] = dict.fromkeys(("input", "weight", "bias"), ("bfloat16", "float16"))


def streamed(name: str, op: str, symbol: str, of: str) -> Iterator[Record]:
    """The weight stream, of an op with the tensors of a linear layer, for up to `MAX_ROWS` rows that are counted by
    `symbol`: a record for each of its `WAYS`. `of` says what the rows are.
    """
    for low, most in zip((1, *(most + 1 for most in WAYS)), WAYS, strict=False):
        yield Record(
            name=name if low == 1 else f"{name}_from_{low}", op=op, runs=partial(launches, most=most),
            workspace=nothing, kind="cuda", devices=("cuda",), min_capability=(9, 0), max_capability=(9, 0),
            allocates=False, sizes={symbol: (low, most)}, dtypes=_16_BITS,
            takes=(
                _rows(symbol, of),
                Condition(f"an input of a multiple of {STEP} elements, and sizes of the weight known at load",
                          _has_steps),
                _STATIC,
            ),
        )  # fmt: skip


def library(
    name: str, op: str, symbol: str, of: str, *, most: int | None = None,
    more_than: int = MAX_ROWS, runs: Launches = product, held: Callable[[Use], Expr] = workspace,
    takes: tuple[Condition, ...] = (),
) -> Record:  # fmt: skip
    """cuBLASLt's product, of an op with the tensors of a linear layer, for `more_than` so many rows, up to `most`."""
    return Record(
        name=name, op=op, runs=runs, workspace=held, kind="library", devices=("cuda",), min_capability=(8, 0),
        allocates=False, sizes={symbol: (more_than + 1, most)}, dtypes=_16_BITS,
        takes=(_rows(symbol, of), Condition("sizes of the weight known at load", _has_numbers), _STATIC, *takes),
    )  # fmt: skip


def any_rows(name: str) -> Record:
    """cuBLASLt's product of a linear layer, in steps of all sizes: where nothing else is there."""
    one = library(name, "aten.linear.default", "T", "tokens")
    return replace(
        one, sizes={}, dtypes=dict.fromkeys(("input", "weight", "bias"), COMPUTED),
        takes=(Condition("an input with rows along one axis", _has_one_axis), *one.takes[1:]),
    )  # fmt: skip


LIBRARY = ("cublaslt.linear", "cublaslt.linear_of_logits", "cublaslt.gated_linear")
"""The names of the records whose algorithms are measured."""
RECORDS = (
    *streamed("cuda.linear", "aten.linear.default", "T", "tokens"),
    *streamed("cuda.linear_of_logits", "aten.linear.default", "R", "rows of logits"),
    Record(
        name="triton.linear", op="aten.linear.default", kind="triton", devices=("cuda",), min_capability=(8, 0),
        dtypes=dict.fromkeys(("input", "weight", "bias"), COMPUTED), allocates=False, workspace=nothing,
        runs=few_outputs,
        takes=(
            Condition(f"1 to {MAX_OUTPUTS} outputs, and sizes of the weight known at load", _has_few_outputs),
            Condition("an input with at most two axes of more than one row", lambda use: has_rows(use, "input")),
        ),
    ),
    library(LIBRARY[0], "aten.linear.default", "T", "tokens"),
    library(LIBRARY[1], "aten.linear.default", "R", "rows of logits"),
)  # fmt: skip
