"""What an op that takes weights in few bits takes: the parts of each format, over sizes of one rank and of any."""

from __future__ import annotations

from typing import Any

import pytest
from op_calls import BLOCK_EXPERTS, NVFP4_EXPERTS, PACKED_EXPERTS, Args, f32, t

from precast.ir.graph.schema import Apply, Dtype, Expr, TensorType
from precast.ir.graph.symbols import add, mul
from precast.ir.ops import table as ops
from precast.ir.ops.op import ShapeError
from precast.ir.ops.rows_experts import EXPERT_FORMATS

F8: Dtype = "float8_e4m3fn"


def infer(args: Args) -> tuple[TensorType, ...]:
    definition = ops.lookup("precast.quantised_experts")
    assert definition is not None
    return definition.shape_rule(args)


def experts(format: str, width: int, **parts: Any) -> Args:
    """A call over `T` tokens without biases; `parts` are those of the weights."""
    return {
        "x": f32("T", width), "expert_ids": t("int64", "T", 2), "expert_weights": f32("T", 2), "format": format,
        "activation": "silu", "gated": True, **parts,
    }  # fmt: skip


def mxfp4(num: Expr, blocks: Expr, up_rows: Expr) -> Args:
    """Of width 64, and between the products of so many blocks of 32."""
    return experts(
        "mxfp4", 64,
        up=t("uint8", num, up_rows, 2, 16), up_scales=t("uint8", num, up_rows, 2),
        down=t("uint8", num, 64, blocks, 16), down_scales=t("uint8", num, 64, blocks),
    )  # fmt: skip


PACKED8 = experts(
    "packed8", 12, up=t("int32", 3, 8, 3), up_scales=t("float16", 3, 8, 4),
    down=t("int32", 3, 12, 1), down_scales=t("float16", 3, 12, 2), zero_offset=128,
)  # fmt: skip
INT8 = {
    **BLOCK_EXPERTS, "up": t("int8", 3, 8, 6), "down": t("int8", 3, 6, 4), "format": "int8",
    "up_zeros": t("int8", 3, 3, 2), "down_zeros": t("int8", 3, 2, 2),
}  # fmt: skip
MXFP4 = mxfp4(3, 1, 64)
CALLS = {
    "fp8": BLOCK_EXPERTS, "mxfp4": MXFP4, "nvfp4": NVFP4_EXPERTS,
    "nvfp4_divided": {**NVFP4_EXPERTS, "format": "nvfp4_divided"}, "packed4": PACKED_EXPERTS, "packed8": PACKED8,
    "int8": INT8,
}  # fmt: skip
each_call = pytest.mark.parametrize("args", CALLS.values(), ids=CALLS)


def test_every_format_has_a_call() -> None:
    assert set(CALLS) == set(EXPERT_FORMATS)


@each_call
def test_a_call_gives_what_it_takes(args: Args) -> None:
    assert infer(args) == (args["x"],)


@each_call
def test_every_part_has_a_size_that_is_checked(args: Args) -> None:
    """One element more along any axis of any part, or one axis more."""
    parts = {name: value for name, value in args.items() if isinstance(value, TensorType) and name != "x"}
    for name, kind in parts.items():
        changed = [(*kind.shape, 1), kind.shape[1:]]
        changed += [(*kind.shape[:i], add(size, 1), *kind.shape[i + 1 :]) for i, size in enumerate(kind.shape)]
        for shape in changed:
            if name.startswith("expert_") and shape[1:] != kind.shape[1:]:
                continue  # the number of a token's experts is any
            with pytest.raises(ShapeError):
                infer({**args, name: TensorType(kind.dtype, shape)})


@each_call
def test_every_part_has_a_dtype_that_is_checked(args: Args) -> None:
    for name, kind in args.items():
        if isinstance(kind, TensorType):
            with pytest.raises(ShapeError, match="expected dtype"):
                infer({**args, name: TensorType("bool", kind.shape)})


@pytest.mark.parametrize(
    ("args", "message"),
    [
        *(
            ({**PACKED_EXPERTS, "format": name}, f"format: expected one of fp8, mxfp4, .* found '{name}'")
            for name in ("nf4", "awq", "gptq")
        ),
        ({**MXFP4, "up_zeros": f32(3, 1)}, "up: mxfp4: zeros is not part of the format"),
        ({**MXFP4, "down_block": (1, 1)}, "down: mxfp4: block is not part of the format"),
        ({**MXFP4, "zero_offset": 8}, "zero_offset without zeros"),
        ({**NVFP4_EXPERTS, "up_global_scale": None}, "up: nvfp4: global_scale is missing"),
        ({**NVFP4_EXPERTS, "down_global_scale": f32(3, 2, 1)}, "down: nvfp4: .* don't fit"),
        ({**BLOCK_EXPERTS, "up_block": None}, "up: fp8: block is missing"),
        ({**BLOCK_EXPERTS, "up_block": (3, 0)}, "up: fp8: a block of"),
        ({**MXFP4, "up": t("uint8", 3, 64, 2, 2, 8)}, "up: .*"),
        ({**PACKED_EXPERTS, "up_scales": f32(3, 16, 3), "up_zeros": t("int32", 3, 2, 3)}, "up: packed4: .* don't fit"),
        ({**MXFP4, "x": f32("T", 48)}, "up's last dimension, dequantised: expected shape"),
        ({**MXFP4, "down_scales": t("uint8", 4, 64, 1)}, "down's scales: experts: expected shape"),
        (mxfp4(3, 1, 96), "down, dequantised: expected shape"),
        ({**MXFP4, "activation": "swish"}, "activation: expected one of silu"),
        ({**MXFP4, "limit": 0.0}, "limit: expected None or more than 0"),
        ({**MXFP4, "up_bias": f32(3, 32)}, "up_bias: expected shape"),
        ({**MXFP4, "down_bias": t("float16", 3, 64)}, "down_bias: expected dtype"),
        ({**MXFP4, "up": t("uint8", 3, 63, 2, 16), "up_scales": t("uint8", 3, 63, 2)}, "gate and up in one"),
    ],
)
def test_what_does_not_fit_is_refused(args: Args, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        infer(args)


def test_zeros_of_packed_values_and_of_int8_may_be_absent() -> None:
    for args in (PACKED_EXPERTS, {**INT8, "zero_offset": 0}):
        assert infer({**args, "up_zeros": None, "down_zeros": None}) == (args["x"],)


def test_ranks_may_have_some_of_the_experts_and_some_of_their_channels() -> None:
    """Each rank's part is of whole blocks, and all sizes are so many of them."""
    experts, blocks = Apply("floordiv", (32, "ep")), Apply("floordiv", (Apply("mul", (2, "ep")), "tp"))

    assert infer(mxfp4(experts, blocks, mul(64, blocks))) == (f32("T", 64),)


def test_sizes_that_depend_on_a_step_are_no_sizes_of_weights() -> None:
    with pytest.raises(ShapeError, match="down, dequantised: expected shape"):
        infer(mxfp4(3, "T", 64))
