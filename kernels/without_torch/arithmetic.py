"""Single pointwise ops, and sums along one dimension, as launches of the kernel of fused ops."""

from __future__ import annotations

from collections.abc import Sequence

from precast.ir.graph.schema import Const, Dim, Dtype, DtypeArg, Items, Ref, Step, Steps, TensorType
from precast.ir.ops import table as ops
from precast.ir.ops.checks import INTEGERS
from precast.ir.ops.rows_fused import EXPONENTS, FUNCTIONS, REDUCTIONS
from precast.kernels.fused.launches import MAX_AXES, MAX_ROW, launch_of, space_of
from precast.kernels.records import Launch
from precast.kernels.rows import COMPUTED
from precast.kernels.use import Use

OPS = (
    *(name for name in FUNCTIONS if name not in REDUCTIONS),
    "aten.bitwise_not.default", "aten.floor.default", "aten.full_like.default",
)  # fmt: skip
"""Pointwise ops, by their names in the op table."""
_Given = dict[str, tuple[str, Sequence[int]]]
"""What operands are called here, and the place of each of their axes."""
_KEPT: frozenset[Dtype] = frozenset((*INTEGERS, *COMPUTED))


def pointwise(use: Use) -> tuple[Launch, ...]:
    """One of `OPS`."""
    types, given = _operands(use)
    names = {name: Ref(x) for x, (name, _) in given.items()}
    others = {name: arg for name, arg in use.node.args.items() if isinstance(arg, (Const, DtypeArg, Items))}
    step = Step(use.node.op, {**names, **others})
    return (_launch(use, step, types | {"s0": use.result}, given),)


def is_pointwise(use: Use) -> bool:
    """Whether the kernel has the op's arguments."""
    dtypes = {use.result.dtype, *(each.type.dtype for each in use.operands.values())}
    exponent = use.node.args.get("exponent")
    if isinstance(exponent, Const) and exponent.value not in EXPONENTS:
        return False
    if use.node.op == "aten.bitwise_not.default" and use.result.dtype != "bool":
        return False
    if any(isinstance(arg, Dim) for arg in use.node.args.values()):  # the kernel has numbers as constants
        return False
    return dtypes <= _KEPT and len(space_of({"s0": use.result}).sizes) <= MAX_AXES


def along_dimension(use: Use) -> tuple[Launch, ...]:
    """One of `REDUCTIONS`, along one dimension: it takes the place of the columns."""
    axis = _summed(use)
    assert axis is not None
    shape = use.shape("self")
    order = [*(each for each in range(len(shape)) if each != axis), axis]
    types = {
        "x0": TensorType(use.operands["self"].type.dtype, tuple(shape[each] for each in order)),
        "s0": TensorType(use.result.dtype, (*(shape[each] for each in order[:-1]), 1)),
    }
    step = Step(use.node.op, {"self": Ref("x0"), "dim": Items((Const(-1),)), "keepdim": Const(True)})
    return (_launch(use, step, types, {"x0": ("self", order)}),)


def is_along_dimension(use: Use) -> bool:
    """Whether a program can hold what is summed, and the kernel has as many axes."""
    axis = _summed(use)
    count = None if axis is None else use.number("self", axis)
    others = [size for each, size in enumerate(use.shape("self")) if each != axis and size != 1]
    return count is not None and 0 < count <= MAX_ROW and len(others) <= MAX_AXES


def _operands(use: Use) -> tuple[dict[str, TensorType], _Given]:
    """The types of the tensors as a fused op names them, in the order of the op's signature, and what they are called
    here; none where nothing is read."""
    definition = ops.lookup(use.node.op, use.node.version)
    assert definition is not None, "verified: an op of the table"
    reads = use.node.op != "aten.full_like.default"
    names = [arg.name for arg in definition.args if reads and arg.name in use.operands]
    types = {f"x{i}": use.operands[name].type for i, name in enumerate(names)}
    return types, {f"x{i}": (name, range(len(types[f"x{i}"].shape))) for i, name in enumerate(names)}


def _summed(use: Use) -> int | None:
    """The dimension; None for several."""
    dims = use.node.args["dim"]
    listed = dims.items if isinstance(dims, Items) else (dims,)
    if len(listed) != 1 or not isinstance(listed[0], Const) or type(listed[0].value) is not int:
        return None
    return listed[0].value % len(use.shape("self"))


def _launch(use: Use, step: Step, types: dict[str, TensorType], given: _Given) -> Launch:
    steps = Steps((step,), ("s0",))
    return launch_of(steps, types, pdl=use.target.capability >= (9, 0), given=given)
