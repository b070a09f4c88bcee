"""What computes gated linear layers: for few rows the weight stream, which gates what it multiplied; for more cuBLASLt
and a launch that gates its products, of all rows or of one half and then the other; for many torch's product and the
gate a part of the rows at a time; else the reference."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from precast.ir.graph.schema import Const, Expr, Node, Ref, TensorType, Value
from precast.ir.graph.symbols import add, ceildiv, floordiv, minimum, mul, numel
from precast.ir.memory.liveness import Operand
from precast.kernels.gated_activation.launches import gated_activation
from precast.kernels.gated_linear.limits import MAX_ROWS_AT_ONCE
from precast.kernels.linear import records as linear
from precast.kernels.records import Condition, Launch, Launches, Pointer, Record, Stride, Within, reference
from precast.kernels.rows import COMPUTED
from precast.kernels.use import Use, copied, size, wide, width


def _input(use: Use) -> Expr:
    """The input without gaps."""
    given = use.operands["input"]
    return 0 if given.is_contiguous else size(given)


def _at_once(use: Use) -> Expr:
    """The products of as many rows as are gated at once."""
    rows = minimum(numel(use.shape("input")[:-1]), MAX_ROWS_AT_ONCE)
    return add(mul(use.width("input"), rows, use.shape("weight")[0]), _input(use))


def _beside_cublaslt(use: Use) -> Expr:
    """What the library takes, and the products of a step, or of half a step that has more rows than are held."""
    rows = minimum(numel(use.shape("input")[:-1]), MAX_ROWS_AT_ONCE)
    return add(linear.workspace(use), mul(use.width("input"), rows, use.shape("weight")[0]))


def product_and_gate(use: Use) -> tuple[Launch, ...]:
    """cuBLASLt's product into the workspace, and the launch that gates it."""
    return _part(use, 0, numel(use.shape("input")[:-1]))


def gate(use: Use) -> tuple[Launch, ...]:
    """The launch that gates products in row-major order, whose rows are T."""
    outputs, dtype = use.number("weight", 0), use.dtype
    assert outputs is not None
    assert dtype is not None
    product, result = (TensorType(dtype, ("T", width)) for width in (outputs, outputs // 2))
    node = Node("precast.gated_activation", {"x": Ref("x"), "kind": Const(use.constant("kind"))}, (Value("y", result),))
    return gated_activation(Use(node, {"x": Operand(product, is_contiguous=True)}, use.target))


def in_two(use: Use) -> tuple[Launch, ...]:
    """The same of the first half of the rows, and then of the others in the same memory."""
    rows = numel(use.shape("input")[:-1])
    return *_part(use, 0, ceildiv(rows, 2)), *_part(use, ceildiv(rows, 2), floordiv(rows, 2))


def _part(use: Use, first: Expr, rows: Expr) -> tuple[Launch, Launch]:
    """The product of so many rows from the `first` on, and its gate."""
    outputs, dtype = use.number("weight", 0), use.dtype
    assert outputs is not None
    assert dtype is not None
    products = Pointer("workspace", dtype, linear.workspace_bytes(outputs))  # behind what the library takes, aligned
    shape, width = (rows, outputs), outputs // 2
    node = Node("precast.gated_activation", {"x": Ref("x"), "kind": Const(use.constant("kind"))},
                (Value("y", TensorType(dtype, (rows, width))),))  # fmt: skip
    (gate,) = gated_activation(Use(node, {"x": Operand(TensorType(dtype, shape), is_contiguous=True)}, use.target))
    into, strides = Pointer("out.0", offset=mul(use.width("input"), width, first)), (outputs, 1)
    others: dict[Pointer | Stride | Expr | float | None, Pointer] = {Pointer("x"): products, Pointer("out.0"): into}
    return (
        linear.product_into(use, products, Pointer("workspace"), (first, rows)),
        gate._replace(
            args=tuple(strides[arg.axis] if isinstance(arg, Stride) else others.get(arg, arg) for arg in gate.args)
        ),
    )


def _reference(use: Use) -> Expr:
    """The product, its wide copy, the activated gate, the gated product before it is rounded."""
    given = use.operands["input"]
    total = 2 * width(given) + 2 * copied(given) + 2 * wide(given)
    return add(mul(total - width(given), numel(use.result.shape)), _input(use))


def _beside_half(use: Use) -> Expr:
    """What the library takes, and the products of half of the rows."""
    rows = ceildiv(numel(use.shape("input")[:-1]), 2)
    return add(linear.workspace(use), mul(use.width("input"), rows, use.shape("weight")[0]))


def _of_any(name: str, sizes: tuple[int, int | None], runs: Launches, held: Callable[[Use], Expr]) -> Record:
    """The product and its gate, for all types and so many tokens."""
    one = linear.library(f"{name}_of_any", "precast.gated_linear", "T", "tokens", runs=runs, held=held)
    return replace(one, sizes={"T": sizes}, dtypes=dict.fromkeys(("input", "weight", "bias"), COMPUTED))


_KNOWN = Condition("outputs whose number is known at load", lambda use: bool(use.number("weight", 0)))
_CONTIGUOUS = Condition("an input without gaps", lambda use: use.operands["input"].is_contiguous)

RECORDS = (
    *linear.streamed("cuda.gated_linear", "precast.gated_linear", "T", "tokens"),
    linear.library(
        linear.LIBRARY[2], "precast.gated_linear", "T", "tokens", most=MAX_ROWS_AT_ONCE, runs=product_and_gate,
        held=_beside_cublaslt,
    ),
    linear.library(
        "cublaslt.gated_linear_in_two", "precast.gated_linear", "T", "tokens", more_than=MAX_ROWS_AT_ONCE,
        most=2 * MAX_ROWS_AT_ONCE, runs=in_two, held=_beside_cublaslt, takes=(_CONTIGUOUS,),
    ),
    Record(
        name="triton.gated_linear", op="precast.gated_linear", kind="triton", devices=("cuda",), min_capability=(8, 0),
        dtypes=dict.fromkeys(("input", "weight", "bias"), COMPUTED), takes=(_KNOWN,), allocates=False,
        workspace=_at_once, runs="precast.kernels.gated_linear.rows_at_once:gated_linear",
        within=Within(gate, "precast.kernels.gated_linear.rows_at_once:gating_with"),
    ),
    reference("precast.gated_linear", "gated_linear.gated_linear", _reference),
    # Where torch is not installed: of all types, in steps of all sizes.
    _of_any(linear.LIBRARY[2], (0, MAX_ROWS_AT_ONCE), product_and_gate, _beside_cublaslt),
    _of_any("cublaslt.gated_linear_in_two", (MAX_ROWS_AT_ONCE + 1, None), in_two, _beside_half),
)  # fmt: skip
