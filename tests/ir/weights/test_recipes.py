"""What recipes read and make."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from precast.ir import limits
from precast.ir.errors import RecipeError
from precast.ir.graph.schema import (
    Apply,
    Cast,
    Concat,
    Dequantise,
    Dtype,
    Each,
    Expr,
    Read,
    Recipe,
    Repack,
    Repeat,
    Reshape,
    Slice,
    Stack,
    Tie,
    Transpose,
)
from precast.ir.weights import recipes

R23, R43 = Read("a", (2, 3)), Read("b", (4, 3))
HALF = Apply("floordiv", ("H", "tp"))


def whole(name: str, *shape: int, dtype: Dtype = "int32") -> Read:
    """A read of a quantised tensor or one of its parts."""
    return Read(name, shape, dtype)


EACH = Each(Concat((Read("e.*.gate", (4, 3)), Read("e.*.up", (2, 3))), 0), 0, 3, 7)
FP8 = Dequantise(whole("w", 10, 7, dtype="float8_e4m3fn"), Read("s", (3, 2)), "fp8", (4, 4))
MXFP4 = Dequantise(whole("b", 2, 6, 3, 16, dtype="uint8"), whole("s", 2, 6, 3, dtype="uint8"), "mxfp4")
AWQ = Dequantise(whole("q", 6, 2), Read("s", (3, 16)), "awq", zeros=whole("z", 3, 2))
GPTQ = Dequantise(whole("q", 2, 8), Read("s", (3, 8)), "gptq", None, whole("z", 3, 1), whole("g", 16), 1)
GPTQ_IN_ORDER = Dequantise(whole("q", 2, 8), Read("s", (4, 8)), "gptq", None, whole("z", 4, 1), None, 1)
NVFP4 = Dequantise(
    whole("w", 2, 6, 24, dtype="uint8"), whole("s", 2, 6, 3, dtype="float8_e4m3fn"), "nvfp4",
    global_scale=Read("t", (2, 1, 1)),
)  # fmt: skip
PACKED4 = Dequantise(whole("q", 6, 4), Read("s", (6, 2)), "packed4", zero_offset=8)
AFFINE = Dequantise(whole("q", 6, 4), Read("s", (6, 2)), "packed4", biases=Read("b", (6, 2)))
PACKED8 = Dequantise(whole("q", 6, 4), Read("s", (6, 3)), "packed8", None, whole("z", 2, 3), whole("g", 16))
INT8 = Dequantise(whole("w", 10, 7, dtype="int8"), Read("s", (10, 1)), "int8", (1, 7), whole("z", 10, 1, dtype="int8"))


@pytest.mark.parametrize(
    ("recipe", "shape"),
    [
        (R23, (2, 3)),
        (Cast(R23, "float16"), (2, 3)),
        (Concat((R23, R43), 0), (6, 3)),
        (Stack((R23, R23), 0), (2, 2, 3)),
        (Stack((R23, R23, R23), 2), (2, 3, 3)),
        (Transpose(R23, 0, 1), (3, 2)),
        (Reshape(R23, (6,)), (6,)),
        (Reshape(R23, (1, 3, 2)), (1, 3, 2)),
        (Slice(R43, 0, 1, 3), (3, 3)),
        (Slice(R43, 1, 3, 0), (4, 0)),
        (Slice(R43, 0, Apply("mul", ("rank", HALF)), HALF), (HALF, 3)),
        (Concat((Slice(R43, 0, 0, HALF), Slice(R43, 0, 0, HALF)), 0), (Apply("mul", (2, HALF)), 3)),
        (Concat((Transpose(R23, 0, 1), Reshape(R43, (3, 4))), 1), (3, 6)),
        (Repeat(R23, 1, 4), (2, 12)),
        (Repeat(R23, 0, HALF), (Apply("mul", (2, HALF)), 3)),
        (Repack(whole("q", 16, 3), "values"), (24, 2)),
        (Repack(whole("z", 5, 3), "zeros"), (3, 5)),
        (Repack(whole("z", 16, 3), "groups"), (2, 24)),
        (Each(Repack(whole("*.q", 16, 3), "values"), 0, 2), (2, 24, 2)),
        (EACH, (3, 6, 3)),
        (Each(R23, 2, 5), (2, 3, 5)),
        (FP8, (10, 7)),
        (MXFP4, (2, 6, 96)),
        (AWQ, (6, 16)),
        (GPTQ, (16, 8)),
        (GPTQ_IN_ORDER, (16, 8)),
        (NVFP4, (2, 6, 48)),
        (replace(NVFP4, format="nvfp4_divided"), (2, 6, 48)),
        (PACKED4, (6, 32)),
        (replace(PACKED4, zeros=whole("z", 1, 2)), (6, 32)),
        (PACKED8, (6, 16)),
        (AFFINE, (6, 32)),
        (replace(AFFINE, format="packed8"), (6, 16)),
        (INT8, (10, 7)),
        (replace(INT8, zeros=None), (10, 7)),
    ],
)
def test_shape(recipe: Recipe, shape: tuple[Expr, ...]) -> None:
    assert recipes.shape(recipe) == shape


@pytest.mark.parametrize(
    "recipe",
    [
        Read("a", (-1,)),
        Concat((), 0),
        Concat((R23, R43), 1),
        Concat((R23, R23), 2),
        Concat((R23, R23), -1),
        Concat((R23, Read("c", (2, 3, 1))), 0),
        Stack((), 0),
        Stack((R23, R43), 0),
        Stack((R23,), 3),
        Transpose(R23, 0, 2),
        Transpose(R23, -1, 0),
        Reshape(R23, (5,)),
        Reshape(R23, ("T", 3)),
        Repeat(R23, 2, 4),
        Repeat(R23, 0, 0),
        Repeat(R23, 0, -1),
        Repack(whole("q", 12, 3), "values"),
        Repack(whole("z", 12, 3), "groups"),
        Repack(whole("q", 16), "values"),
        Repack(whole("z", 16), "zeros"),
        Repack(whole("q", 2, 16, 3), "values"),
        Repack(Transpose(whole("q", 3, 16), 0, 1), "values"),
        Repack(Each(whole("*.z", 3), 0, 2), "zeros"),
        Slice(R23, 0, 1, 2),
        Slice(R23, 0, -1, 1),
        Slice(R23, 0, 0, -1),
        Slice(R23, 2, 0, 1),
        Tie("x"),
        Cast(Tie("x"), "float16"),
        Each(R23, 3, 2),
        Each(R23, 0, 0),
        Each(R23, 0, limits.MAX_EACH + 1),
        Each(R23, 0, 2, -1),
        Each(Transpose(Each(R23, 0, 2), 0, 1), 0, 2),
        replace(FP8, block=None),
        replace(FP8, block=(0, 4)),
        replace(FP8, block=(5, 4)),
        replace(FP8, scales=Read("s", (1, 3, 2))),
        replace(FP8, of=whole("w", 10, dtype="float8_e4m3fn")),
        replace(FP8, zeros=R23),
        replace(FP8, zero_offset=1),
        replace(FP8, of=Slice(FP8.of, 0, 0, HALF)),
        replace(MXFP4, block=(1, 32)),
        replace(MXFP4, scales=whole("s", 2, 6, 2, dtype="uint8")),
        replace(AWQ, zeros=None),
        replace(AWQ, zeros=whole("z", 3, 3)),
        replace(AWQ, scales=Read("s", (3, 2))),
        replace(AWQ, scales=Read("s", (4, 16)), zeros=whole("z", 4, 2)),
        replace(AWQ, groups=whole("g", 6)),
        replace(GPTQ, groups=None),  # 16 inputs are not three groups
        replace(GPTQ, groups=whole("g", 8)),
        replace(GPTQ, zeros=whole("z", 3)),
        replace(GPTQ, zeros=whole("z", 3, 2)),
        replace(NVFP4, global_scale=None),
        replace(NVFP4, global_scale=Read("t", (2, 1))),
        replace(NVFP4, scales=whole("s", 2, 6, 4, dtype="float8_e4m3fn")),
        replace(NVFP4, zeros=R23),
        replace(NVFP4, zero_offset=1),
        replace(FP8, global_scale=Read("t", (1, 1))),
        replace(PACKED4, scales=Read("s", (6, 3))),
        replace(PACKED4, scales=Read("s", (5, 2))),
        replace(PACKED4, zeros=whole("z", 6, 2)),
        replace(PACKED4, block=(1, 16)),
        replace(AFFINE, biases=Read("b", (6, 1))),
        replace(AFFINE, groups=whole("g", 32)),
        replace(GPTQ_IN_ORDER, biases=Read("b", (4, 8))),
        replace(PACKED8, groups=whole("g", 4)),
        replace(PACKED8, zeros=whole("z", 1, 3)),
        replace(INT8, zeros=whole("z", 10, 7, dtype="int8")),
        replace(INT8, groups=whole("g", 7)),
        replace(INT8, zeros=None, zero_offset=1),
    ],
)
def test_recipes_that_contradict_themselves(recipe: Recipe) -> None:
    with pytest.raises(RecipeError):
        recipes.shape(recipe)


@pytest.mark.parametrize(
    ("recipe", "dtype"),
    [
        (R23, None),
        (Read("a", (1,), "int8"), "int8"),
        (Cast(R23, "float16"), "float16"),
        (Transpose(Cast(R23, "float16"), 0, 1), "float16"),
        (Concat((Cast(R23, "float16"), Cast(R43, "float16")), 0), "float16"),
        (Concat((R23, R43), 0), None),
        (Repack(whole("q", 16, 3), "values"), "int32"),
        (Repack(whole("z", 16, 3), "groups"), "int32"),
        (EACH, None),
        (FP8, "float32"),
        (Each(MXFP4, 0, 2), "float32"),
        (AWQ, "float32"),
        (GPTQ, "float32"),
        (NVFP4, "float32"),
        (PACKED8, "float32"),
        (AFFINE, "float32"),
        (INT8, "float32"),
    ],
)
def test_dtype(recipe: Recipe, dtype: str | None) -> None:
    assert recipes.dtype(recipe) == dtype


def test_parts_of_different_dtypes() -> None:
    with pytest.raises(RecipeError, match="None, float16"):
        recipes.dtype(Concat((Cast(R23, "float16"), R43), 0))


@pytest.mark.parametrize(
    "recipe",
    [
        replace(FP8, of=R23),
        replace(FP8, scales=whole("s", 3, 2)),
        replace(FP8, scales=whole("s", 3, 2, dtype="uint8")),
        replace(INT8, scales=Read("s", (10, 1), "float8_e8m0fnu")),
        replace(MXFP4, scales=Read("s", (2, 6, 3))),
        replace(AWQ, zeros=Read("z", (3, 2))),
        replace(GPTQ, groups=whole("g", 16, dtype="int64")),
        replace(NVFP4, scales=Read("s", (2, 6, 3))),
        replace(NVFP4, global_scale=whole("t", 2, 1, 1)),
        replace(PACKED4, of=whole("q", 6, 4, dtype="uint8")),
        replace(PACKED8, zeros=whole("z", 2, 3, dtype="int8")),
        replace(AFFINE, biases=whole("b", 6, 2)),
        replace(INT8, zeros=whole("z", 10, 1)),
        Repack(Read("q", (16, 3)), "values"),
        Repack(whole("z", 5, 3, dtype="uint8"), "zeros"),
    ],
)
def test_parts_of_a_format_have_its_dtypes(recipe: Recipe) -> None:
    with pytest.raises(RecipeError):
        recipes.dtype(recipe)


def test_a_part_of_each_is_read_by_its_number() -> None:
    assert recipes.nth(EACH, 2) == Concat((Read("e.9.gate", (4, 3)), Read("e.9.up", (2, 3))), 0)
    assert [read.tensor for read in recipes.leaves(EACH)] == [
        f"e.{i}.{name}" for i in (7, 8, 9) for name in ("gate", "up")
    ]


def test_all_parts_of_a_quantised_tensor_are_read() -> None:
    assert [read.tensor for read in recipes.leaves(Cast(GPTQ, "bfloat16"))] == ["q", "s", "z", "g"]
    assert [read.tensor for read in recipes.leaves(AFFINE)] == ["q", "s", "b"]
    numbered = recipes.nth(
        Each(Dequantise(whole("*.q", 6, 2), Read("*.s", (3, 16)), "awq", zeros=whole("*.z", 3, 2)), 0, 2), 1
    )
    assert [read.tensor for read in recipes.leaves(numbered)] == ["1.q", "1.s", "1.z"]
    assert [read.tensor for read in recipes.leaves(NVFP4)] == ["w", "s", "t"]


def test_leaves_in_order() -> None:
    recipe = Stack((Cast(Concat((R43, R23), 0), "float16"), Slice(Transpose(R23, 0, 1), 0, 0, 1)), 0)

    assert recipes.leaves(recipe) == (R43, R23, R23)
    assert recipes.leaves(Tie("x")) == ()


def test_reads_are_made_one_by_one() -> None:
    reads = recipes.each_leaf(Cast(Each(Read("e.*", (1,)), 0, 2**62), "float32"))

    assert [next(reads).tensor, next(reads).tensor] == ["e.0", "e.1"]


def test_matrices_of_one_dequantise_are_counted() -> None:
    def made(matrices: int) -> Dequantise:
        return Dequantise(
            whole("q", matrices, 6, 3, 16, dtype="uint8"), whole("s", matrices, 6, 3, dtype="uint8"), "mxfp4"
        )

    assert recipes.shape(made(limits.MAX_EACH)) == (limits.MAX_EACH, 6, 96)
    with pytest.raises(RecipeError, match="matrices, expected at most"):
        recipes.shape(made(limits.MAX_EACH + 1))


def test_rows_of_one_matrix_are_no_matrices() -> None:
    rows = limits.MAX_EACH + 1
    made = Dequantise(whole("q", rows, 3, 16, dtype="uint8"), whole("s", rows, 3, dtype="uint8"), "mxfp4")

    assert recipes.shape(made) == (rows, 96)
