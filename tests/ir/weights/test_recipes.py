"""What recipes read and make, and all the ways in which a checkpoint doesn't fit them, reported at once."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from examples import tiny_graph
from precast.ir import limits
from precast.ir.errors import RecipeError, WeightsError
from precast.ir.graph.schema import (
    Apply,
    Cast,
    Concat,
    Dequantise,
    Dtype,
    Each,
    Expr,
    Param,
    Read,
    Recipe,
    Repeat,
    Reshape,
    Slice,
    Stack,
    TensorType,
    Tie,
    Transpose,
)
from precast.ir.manifest import Checkpoint
from precast.ir.weights import recipes
from precast.ir.weights.checkpoint import CheckpointFiles, StoredTensor
from precast.ir.weights.recipes import Problem
from precast.ir.weights.sources import LocalFolder

R23, R43 = Read("a", (2, 3)), Read("b", (4, 3))
HALF = Apply("floordiv", ("H", "tp"))


def fitting(**changes: StoredTensor | None) -> CheckpointFiles:
    """A checkpoint that fits `tiny_graph()`, but for `changes`; None leaves a tensor out."""
    reads = [read for param in tiny_graph().params for read in recipes.leaves(param.recipe)]
    tensors: dict[str, StoredTensor | None] = {read.tensor: stored(read.shape) for read in reads}
    tensors |= changes
    return CheckpointFiles(
        LocalFolder("/ckpt"), {name: tensor for name, tensor in tensors.items() if tensor is not None}
    )


def stored(shape: tuple[int, ...], dtype: str = "float32") -> StoredTensor:
    return StoredTensor("model.safetensors", dtype, shape, 0, 0)


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

NO_RULES = Checkpoint()
NORM = "model.norm.weight"


# --- recipes ---------------------------------------------------------------------------------------------------


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


# --- names -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "there", "found"),
    [
        ("wte.weight", {"wte.weight"}, "wte.weight"),
        ("wte.weight", {"transformer.wte.weight"}, "transformer.wte.weight"),
        ("transformer.wte.weight", {"wte.weight"}, "wte.weight"),
        ("wte.weight", {"wte.weight", "transformer.wte.weight"}, "wte.weight"),
        ("wte.weight", {"model.wte.weight"}, None),
        ("wte.weight", {"transformer.transformer.wte.weight"}, None),
        ("wte.weight", {"x.wte.weight"}, "x.wte.weight"),
    ],
)
def test_optional_prefixes(name: str, there: set[str], found: str | None) -> None:
    assert recipes.resolve(name, there, Checkpoint(optional_prefixes=("transformer.", "x."))) == found


@pytest.mark.parametrize(
    ("name", "there", "found"),
    [
        ("model.norm", {"model.text.norm"}, "model.text.norm"),
        ("model.norm", {"model.norm", "model.text.norm"}, "model.norm"),
        ("model.text.norm", {"model.norm"}, None),
        ("lm_head", {"text.lm_head", "model.text.lm_head"}, None),
    ],
)
def test_other_prefixes(name: str, there: set[str], found: str | None) -> None:
    assert recipes.resolve(name, there, Checkpoint(prefixes={"model.": "model.text."})) == found


@pytest.mark.parametrize(
    ("pattern", "name", "fits"),
    [
        ("a.b", "a.b", True),
        ("a.b", "axb", False),
        ("*.b", "x.y.b", True),
        ("*.b", "b", False),
        ("a*", "a", True),
        ("a*a", "a", False),
        ("a*a", "aa", True),
        ("*", "", True),
        ("**", "x", True),
        ("h.*.attn.bias", "h.10.attn.bias", True),
        ("h.*.attn.bias", "h.10.attn.masked_bias", False),
        ("*a*b*", "xxbxxaxx", False),
        ("*a*b*", "xxaxxbxx", True),
        ("[ab]?.", "[ab]?.", True),
        ("[ab]?.", "ax.", False),
        ("x*\n", "x\n\n", True),
        ("*a" * 200 + "*c", "a" * 1000, False),
    ],
)
def test_patterns(pattern: str, name: str, fits: bool) -> None:
    assert recipes.matches(pattern, name) is fits


# --- a checkpoint ----------------------------------------------------------------------------------------------


def test_a_checkpoint_that_fits() -> None:
    assert recipes.problems(tiny_graph(), NO_RULES, fitting()) == []
    recipes.check(tiny_graph(), NO_RULES, fitting())
    assert recipes.require(tiny_graph(), NO_RULES, fitting())[NORM] == stored((16,))


def test_prefixes_are_seen_through() -> None:
    files = fitting()
    bare = {name.removeprefix("model."): tensor for name, tensor in files.tensors.items()}
    rules = Checkpoint(optional_prefixes=("model.",))

    found = recipes.require(tiny_graph(), rules, CheckpointFiles(files.folder, bare))

    assert found.keys() == files.tensors.keys()
    assert len(recipes.problems(tiny_graph(), NO_RULES, CheckpointFiles(files.folder, bare))) == 2 * len(bare)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_any_float_will_do(dtype: str) -> None:
    assert recipes.problems(tiny_graph(), NO_RULES, fitting(**{NORM: stored((16,), dtype)})) == []


@pytest.mark.parametrize("dtype", ["int64", "float8_e4m3fn", "U16", "bool"])
def test_no_other_dtype_will(dtype: str) -> None:
    (problem,) = recipes.problems(tiny_graph(), NO_RULES, fitting(**{NORM: stored((16,), dtype)}))

    assert (problem.kind, problem.tensor) == ("dtype", NORM)
    assert dtype in problem.message


@pytest.mark.parametrize("shape", [(), (8,), (1, 16), (16, 1)])
def test_wrong_shape(shape: tuple[int, ...]) -> None:
    problems = recipes.problems(tiny_graph(), NO_RULES, fitting(**{NORM: stored(shape)}))

    found = "[" + ", ".join(map(str, shape)) + "]"
    assert problems == [Problem("shape", NORM, f"expected [16], found {found}")]


def test_unused_tensors_are_not_unexpected() -> None:
    files = fitting(**{"vision.x": stored((5,)), "other.x": stored((5,))})

    (problem,) = recipes.problems(tiny_graph(), Checkpoint(unused=("vision.*",)), files)

    assert problem.tensor == "other.x"


def test_ignored_tensors() -> None:
    files = fitting(**{"model.layers.0.self_attn.rotary_emb.inv_freq": stored((2,)), "model.other": stored((2,))})

    (problem,) = recipes.problems(tiny_graph(), Checkpoint(ignored=("*.rotary_emb.inv_freq",)), files)

    assert (problem.kind, problem.tensor) == ("unexpected", "model.other")


def test_a_tied_tensor_may_be_stored_as_well() -> None:
    assert recipes.problems(tiny_graph(), NO_RULES, fitting(head=stored((32, 16)))) == []


def test_everything_is_reported_at_once() -> None:
    q = "model.layers.1.self_attn.q_proj.weight"
    files = fitting(**{NORM: None, q: stored((3,), "int8"), "extra.1": stored((1,)), "extra.2": stored((1,))})

    with pytest.raises(WeightsError) as caught:
        recipes.check(tiny_graph(), NO_RULES, files)

    assert caught.value.code == "weights-mismatch"
    assert caught.value.where == "/ckpt"
    assert caught.value.message.splitlines()[1:] == [
        "  1 tensor missing:",
        f"    {NORM}: expected floating point [16]",
        "  1 tensor of a wrong shape:",
        f"    {q}: expected [16, 16], found [3]",
        "  1 tensor of a wrong dtype:",
        f"    {q}: expected float64 or float32 or float16 or bfloat16 or F8_E8M0, found int8",
        "  2 tensors unexpected:",
        "    extra.1: float32 [1] in model.safetensors",
        "    extra.2: float32 [1] in model.safetensors",
    ]


def test_long_lists_are_cut_and_counted() -> None:
    files = fitting(**{f"extra.{i}": stored((1,)) for i in range(13)})

    with pytest.raises(WeightsError) as caught:
        recipes.require(tiny_graph(), NO_RULES, files)

    lines = caught.value.message.splitlines()
    assert lines[1] == "  13 tensors unexpected:"
    assert lines[-1] == "    and 5 more (precast verify BUNDLE --weights DIR lists all)"
    assert len(lines) == 8 + 3


def test_long_lists_are_whole_where_all_is_asked_for() -> None:
    files = fitting(**{f"extra.{i}": stored((1,)) for i in range(13)})

    with pytest.raises(WeightsError) as caught:
        recipes.check(tiny_graph(), NO_RULES, files, most=None)

    lines = caught.value.message.splitlines()
    assert [line.strip().partition(":")[0] for line in lines[2:]] == [f"extra.{i}" for i in range(13)]


class _Counted(dict[str, StoredTensor]):
    """Tensors by name that count how often one is looked for."""

    looked_for = 0

    def __contains__(self, name: object) -> bool:
        self.looked_for += 1
        return super().__contains__(name)


def test_no_more_problems_are_looked_for_than_anybody_reads() -> None:
    parts = tuple(Read(f"e.*.{i}", (1,), "uint8") for i in range(100))
    made = Cast(Each(Stack(parts, 0), 0, 8_000), "float32")
    graph = replace(tiny_graph(), params=(Param("p", TensorType("float32", (8_000, 100, 1)), made),))
    held = _Counted({"e.7999.99": stored((1,), "uint8")})  # of which nobody knows whether it is read

    with pytest.raises(WeightsError, match=f"{limits.MAX_PROBLEMS} or more tensors missing") as caught:
        recipes.check(graph, NO_RULES, CheckpointFiles(LocalFolder("/ckpt"), held))

    assert held.looked_for == limits.MAX_PROBLEMS
    assert "unexpected" not in caught.value.message
    assert len(caught.value.message.splitlines()) == 8 + 3


def test_a_name_is_looked_for_once() -> None:
    made = Cast(Each(Read("w", (1,)), 0, 1000), "float32")
    graph = replace(tiny_graph(), params=(Param("p", TensorType("float32", (1000, 1)), made),))
    held = _Counted(second=stored((1,)))

    recipes.check(graph, Checkpoint(tied={"second": "w"}), CheckpointFiles(LocalFolder("/ckpt"), held))

    assert held.looked_for < 10


def test_reads_are_made_one_by_one() -> None:
    reads = recipes.each_leaf(Cast(Each(Read("e.*", (1,)), 0, 2**62), "float32"))

    assert [next(reads).tensor, next(reads).tensor] == ["e.0", "e.1"]


def test_patterns_are_compared_so_often(monkeypatch: pytest.MonkeyPatch) -> None:
    files = fitting(**{f"extra.{i}": stored((1,)) for i in range(10)})
    rules = Checkpoint(ignored=("extra.*", "b.*", "c.*"), unused=("d.*",))
    monkeypatch.setattr(limits, "MAX_MATCHES", 40)
    assert recipes.problems(tiny_graph(), rules, files) == []

    monkeypatch.setattr(limits, "MAX_MATCHES", 39)

    with pytest.raises(WeightsError, match="10 tensors that nothing reads, to be compared with 4 patterns"):
        recipes.problems(tiny_graph(), rules, files)


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
