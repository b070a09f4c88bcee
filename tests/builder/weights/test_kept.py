"""What is kept of quantised weights: parts that make, dequantised, what the recipe made of dequantised values."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import evaluate
from stored_weights import config_of

from precast.builder.capture.factory import make_module
from precast.builder.weights.kept import Misfit, fit_together, granule, kept, storage, stored
from precast.builder.weights.recipes import ModelCheckpoint
from precast.ir.graph import symbols
from precast.ir.graph.schema import (
    Cast,
    Concat,
    Dequantise,
    Dtype,
    Each,
    Read,
    Recipe,
    Repack,
    Repeat,
    Reshape,
    Slice,
    Stack,
    Transpose,
)
from precast.ir.weights import recipes

Tensors = dict[str, torch.Tensor]


class Files:
    """The tensors of a checkpoint, filled with random bits of what recipes read."""

    def __init__(self) -> None:
        self.tensors: Tensors = {}

    def read(self, name: str, *shape: int, dtype: Dtype = "int32") -> Read:
        if dtype == "float32":
            self.tensors[name] = torch.rand(shape) + 0.5
        else:
            bits = torch.randint(0, 120, (*shape, 4 if dtype == "int32" else 1)).to(torch.uint8)
            self.tensors[name] = bits.view(getattr(torch, dtype)).reshape(shape)
        return Read(name, shape, dtype)

    def number(self, recipe: Recipe, count: int) -> None:
        """Tensors for the numbers of an `Each`, of the same types."""
        for read in recipes.leaves(recipe):
            for number in range(count):
                made = self.read("x", *read.shape, dtype=read.dtype or "float32")
                self.tensors[read.tensor.replace("*", str(number))] = self.tensors.pop(made.tensor)


def weight(format: str, name: str, rows: int, columns: int, files: Files, group: int = 16, **kinds: bool) -> Recipe:
    """The recipe of a weight [rows, columns]; `kinds`: `zeros`, `groups`, and `whole`: one scale for all."""
    values, scales = f"{name}.q", f"{name}.s"
    groups = 1 if kinds.get("whole") else columns // group
    if format in ("fp8", "int8"):
        block = (rows, columns) if kinds.get("whole") else (group, group)
        count = -(-rows // block[0]), -(-columns // block[1])
        dtype: Dtype = "float8_e4m3fn" if format == "fp8" else "int8"
        zeros = files.read(f"{name}.z", *count, dtype="int8") if kinds.get("zeros") else None
        of = files.read(values, rows, columns, dtype=dtype)
        return Dequantise(of, files.read(scales, *count, dtype="float32"), format, block, zeros)  # type: ignore[arg-type]
    if format == "mxfp4":
        of, exponents = files.read(values, rows, columns // 32, 16, dtype="uint8"), (rows, columns // 32)
        return Dequantise(of, files.read(scales, *exponents, dtype="uint8"), "mxfp4")
    if format == "nvfp4":
        of = files.read(values, rows, columns // 2, dtype="uint8")
        each = files.read(scales, rows, columns // 16, dtype="float8_e4m3fn")
        total = Reshape(files.read(f"{name}.t", dtype="float32"), (1, 1))
        return Dequantise(of, each, "nvfp4", global_scale=total)
    in_groups = None
    if kinds.get("groups"):
        in_groups = files.read(f"{name}.g", columns)
        files.tensors[f"{name}.g"] = (torch.randperm(columns) // (columns // groups)).int()
    if format == "packed4":
        of, each = files.read(values, rows, columns // 8), files.read(scales, rows, groups, dtype="float32")
        zeros = files.read(f"{name}.z", -(-rows // 8), groups) if kinds.get("zeros") else None
        return Dequantise(of, each, "packed4", None, zeros, in_groups, 0 if zeros else 8)
    each, zeros = files.read(scales, groups, rows, dtype="float32"), files.read(f"{name}.z", groups, rows // 8)
    if format == "awq":
        return Transpose(Dequantise(files.read(values, columns, rows // 8), each, "awq", zeros=zeros), 0, 1)
    of = files.read(values, columns // 8, rows)
    return Transpose(Dequantise(of, each, "gptq", None, zeros, in_groups, 1), 0, 1)


KINDS: dict[str, Callable[[str, int, int, Files], Recipe]] = {
    "fp8 in blocks": lambda *given: weight("fp8", *given),
    "fp8, one scale": lambda *given: weight("fp8", *given, whole=True),
    "int8 with zeros": lambda *given: weight("int8", *given, zeros=True),
    "mxfp4": lambda *given: weight("mxfp4", *given),
    "nvfp4": lambda *given: weight("nvfp4", *given),
    "packed4": lambda *given: weight("packed4", *given),
    "packed4 with zeros": lambda *given: weight("packed4", *given, zeros=True),
    "packed4 by channels": lambda *given: weight("packed4", *given, whole=True),
    "packed4 in any order": lambda *given: weight("packed4", *given, groups=True),
    "awq": lambda *given: weight("awq", *given),
    "gptq": lambda *given: weight("gptq", *given),
    "gptq in any order": lambda *given: weight("gptq", *given, groups=True),
}


def again(recipe: Recipe, dtype: Dtype = "float32") -> Recipe:
    """The recipe that dequantises what is kept."""
    whole = kept(recipe, dtype)
    params, block = stored(whole, "w")
    parts = {name: param.recipe for name, param in params.items()}
    assert all(recipes.shape(param.recipe) == param.type.shape for param in params.values())
    made = Dequantise(**parts, format=whole.format, block=block, zero_offset=whole.zero_offset)  # type: ignore[arg-type]
    return Transpose(made, 0, 1) if whole.format == "gptq" else made


def is_kept(recipe: Recipe, files: Files) -> bool:
    """Whether it is kept, and makes the same values then."""
    try:
        made = again(recipe)
    except Misfit:
        return False
    assert torch.equal(evaluate(made, files.tensors), evaluate(recipe, files.tensors))
    return True


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_and_its_cast(kind: str) -> None:
    files = Files()
    recipe = KINDS[kind]("w", 48, 64, files)

    assert is_kept(recipe, files)
    assert is_kept(Cast(Cast(recipe, "float32"), "float32"), files)


def test_gptq_in_order_is_kept_as_packed4() -> None:
    """Its words lie along inputs: rows and columns are exchanged, and nothing else."""
    whole = kept(weight("gptq", "w", 48, 64, Files()), "float16")

    params, _ = stored(whole, "w", "float16")

    assert (whole.format, whole.zero_offset) == ("packed4", 1)
    assert {name: param.recipe for name, param in params.items()} == {
        "of": Transpose(Read("w.q", (8, 48), "int32"), 0, 1),
        "scales": Transpose(Read("w.s", (4, 48), "float32"), 0, 1),
        "zeros": Transpose(Read("w.z", (4, 6), "int32"), 0, 1),
    }


def test_awq_is_kept_as_packed4() -> None:
    """Its words lie along outputs: others are made of their values."""
    whole = kept(weight("awq", "w", 48, 64, Files()), "float16")

    params, _ = stored(whole, "w", "float16")

    assert (whole.format, whole.zero_offset) == ("packed4", 0)
    assert {name: param.recipe for name, param in params.items()} == {
        "of": Repack(Read("w.q", (64, 6), "int32"), "values"),
        "scales": Transpose(Read("w.s", (4, 48), "float32"), 0, 1),
        "zeros": Repack(Read("w.z", (4, 6), "int32"), "zeros"),
    }


def test_awq_of_gemv_is_kept_as_packed4() -> None:
    """Its values lie in rows, and are read as they are; of its zeros other words are made."""
    config, name = config_of("llama", intermediate_size=96), "model.layers.0.mlp.down_proj.weight"
    entries = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv"}
    recipe = ModelCheckpoint(make_module(config, "float32"), entries).recipes([name])[name]

    params, _ = stored(kept(recipe, "float32"), "w", "float16")

    stem = name.removesuffix("weight")
    assert {part: param.recipe for part, param in params.items()} == {
        "of": Read(stem + "qweight", (64, 12), "int32"),
        "scales": Cast(Slice(Read(stem + "scales", (64, 32)), 1, 0, 3), "float16"),
        "zeros": Slice(Repack(Read(stem + "qzeros", (64, 4), "int32"), "groups"), 1, 0, 3),
    }


def test_gptq_in_any_order_is_kept_as_it_is() -> None:
    whole = kept(weight("gptq", "w", 48, 64, Files(), groups=True), "float16")

    params, _ = stored(whole, "w", "float16")

    assert (whole.format, whole.zero_offset) == ("gptq", 1)
    assert params["of"].recipe == Read("w.q", (8, 48), "int32")


@pytest.mark.parametrize("kind", KINDS)
def test_cuts_between_blocks(kind: str) -> None:
    files = Files()
    recipe = KINDS[kind]("w", 48, 128, files)

    assert is_kept(Slice(recipe, 0, 16, 32), files)
    assert is_kept(Slice(recipe, 1, 32, 64), files)


@pytest.mark.parametrize("kind", ["fp8 in blocks", "fp8, one scale", "int8 with zeros", "packed4", "awq", "gptq"])
def test_cuts_within_blocks_make_scales_finer(kind: str) -> None:
    files = Files()
    recipe = KINDS[kind]("w", 48, 64, files)

    assert is_kept(Slice(recipe, 1, 8, 32), files)


@pytest.mark.parametrize(
    ("kind", "dim", "start", "reason"),
    [
        ("mxfp4", 1, 16, "multiples of 16, inside of 32 values"),
        ("nvfp4", 1, 8, "multiples of 8, inside of 16 values"),
        ("packed4", 1, 4, "multiples of 4, inside of 8 values"),
        ("packed4 with zeros", 0, 4, "multiples of 4, inside of 8 values"),
        ("awq", 0, 4, "multiples of 4, inside of 8 values"),
        ("gptq", 1, 4, "multiples of 4, inside of 8 values"),
    ],
)
def test_cuts_within_what_is_stored_together(kind: str, dim: int, start: int, reason: str) -> None:
    recipe = Slice(KINDS[kind]("w", 48, 64, Files()), dim, start, 16)

    with pytest.raises(Misfit, match=re.escape(reason)):
        kept(recipe, "float32")


def test_a_rank_reads_blocks_of_its_own() -> None:
    """Starts over the world are divided as they are: in units of blocks where all of them are multiples of one."""
    recipe = weight("fp8", "w", 64, 64, Files())
    start = symbols.mul(32, "rank")

    whole = kept(Slice(recipe, 0, start, 32), "float32")

    assert whole.parts["scales"].recipe == Slice(Read("w.s", (4, 4), "float32"), 0, symbols.mul(2, "rank"), 2)
    assert whole.parts["of"].recipe == Slice(Read("w.q", (64, 64), "float8_e4m3fn"), 0, start, 32)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "in any order" not in kind])
def test_joined_rows(kind: str) -> None:
    files = Files()
    parts = [KINDS[kind](name, rows, 64, files) for name, rows in (("q", 48), ("k", 16), ("v", 16))]

    assert is_kept(Concat(tuple(parts), 0), files)
    assert fit_together(parts, "float32")


def test_what_has_one_scale_gets_one_a_row() -> None:
    files = Files()
    parts = tuple(KINDS["fp8, one scale"](name, rows, 64, files) for name, rows in (("q", 48), ("k", 16)))

    params, block = stored(kept(Concat(parts, 0), "float32"), "w")

    assert block == (1, 64)
    assert params["scales"].recipe == Concat(
        (Repeat(Read("q.s", (1, 1), "float32"), 0, 48), Repeat(Read("k.s", (1, 1), "float32"), 0, 16)), 0
    )


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("gptq in any order", "gptq in any order"),
        ("gptq", "gptq in any order"),
        ("packed4 in any order", "packed4 in any order"),
        ("packed4", "packed4 with zeros"),
        ("fp8 in blocks", "nvfp4"),
    ],
)
def test_what_does_not_join(first: str, second: str) -> None:
    files = Files()
    parts = [KINDS[first]("q", 48, 64, files), KINDS[second]("k", 16, 64, files)]

    assert not is_kept(Concat(tuple(parts), 0), files)
    assert not fit_together(parts, "float32")


def test_what_is_not_quantised_joins_only_its_like() -> None:
    plain = Read("n", (16, 64), "float32")

    assert fit_together([plain, plain], "float32")
    assert not fit_together([plain, weight("fp8", "w", 48, 64, Files())], "float32")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "order" not in kind])
def test_experts(kind: str) -> None:
    """Gate and up of experts that are stored one by one, above each other in each of them."""
    files = Files()
    parts = []
    for name in ("gate", "up"):
        recipe = KINDS[kind](f"{name}.*", 32, 64, files)
        files.number(recipe, 3)
        parts.append(Each(recipe, 0, 3))
    joined = Concat(tuple(parts), 1)
    params, block = stored(kept(joined, "float32"), "up")
    expected = evaluate(joined, files.tensors)

    for expert in range(3):
        one = {name: Reshape(Slice(param.recipe, 0, expert, 1), param.type.shape[1:]) for name, param in params.items()}
        whole = kept(joined, "float32")
        made = Dequantise(**one, format=whole.format, block=block, zero_offset=whole.zero_offset)  # type: ignore[arg-type]
        assert torch.equal(evaluate(made, files.tensors), expected[expert])


@pytest.mark.parametrize("kind", ["fp8 in blocks", "mxfp4", "nvfp4", "packed4"])
def test_rows_in_another_order(kind: str) -> None:
    """Rows that lie alternately, as GPT-OSS has gate and up, one kind after the other."""
    files = Files()
    apart = Transpose(Reshape(KINDS[kind]("w", 48, 64, files), (24, 2, 64)), 0, 1)

    assert is_kept(Reshape(apart, (48, 64)), files)
    assert is_kept(Reshape(Slice(Reshape(KINDS[kind]("w", 48, 64, files), (1, 3, 16, 64)), 2, 4, 8), (24, 64)), files)


@pytest.mark.parametrize(
    "recipe",
    [
        Read("w", (4, 4)),
        Concat((Read("w", (4, 4)), Read("w", (4, 4))), 0),
        Cast(Cast(weight("fp8", "w", 16, 16, Files()), "float16"), "bfloat16"),
        Transpose(weight("mxfp4", "w", 32, 32, Files()), 0, 1),
        Transpose(weight("awq", "w", 32, 32, Files()), 0, 1),
        Reshape(weight("nvfp4", "w", 32, 32, Files()), (16, 64)),
        Reshape(weight("packed4", "w", 32, 32, Files()), (1024,)),
        Stack((weight("fp8", "a", 32, 32, Files()), weight("fp8", "b", 32, 32, Files(), whole=True)), 0),
        Dequantise(Read("w", (8, 4), "int32"), Read("s", (8, 1)), "packed4", biases=Read("b", (8, 1))),
    ],
)
def test_what_is_dequantised(recipe: Recipe) -> None:
    with pytest.raises(Misfit):
        stored(kept(recipe, "bfloat16"), "w")


def test_what_two_layers_must_have_in_common() -> None:
    files = Files()
    blocks, other = weight("fp8", "a", 32, 32, files), weight("fp8", "b", 32, 32, files)

    assert storage(blocks, "float32") == storage(other, "float32") != storage(Read("w", (32, 32)), "float32")
    assert storage(blocks, "float32") != storage(weight("fp8", "a", 32, 32, files, whole=True), "float32")
    assert storage(Cast(Cast(blocks, "float16"), "bfloat16"), "bfloat16") == "dequantised"


@pytest.mark.parametrize(
    ("kind", "dim", "block", "least"),
    [
        ("fp8 in blocks", 0, 16, 1),
        ("fp8, one scale", 1, 1, 1),
        ("mxfp4", 1, 32, 32),
        ("nvfp4", 1, 16, 16),
        ("packed4", 1, 16, 8),
        ("packed4 with zeros", 0, 8, 8),
        ("gptq", 0, 8, 8),
        ("gptq", 1, 16, 8),
        ("gptq in any order", 1, 8, 8),
    ],
)
def test_what_is_stored_together(kind: str, dim: int, block: int, least: int) -> None:
    assert granule(KINDS[kind]("w", 64, 64, Files()), "float32", dim) == (block, least)


@st.composite
def changed(draw: st.DrawFn) -> tuple[Recipe, Files]:
    """A weight after a few steps, none of which knows of blocks."""
    files = Files()
    kind = draw(st.sampled_from(sorted(KINDS)))
    recipe = KINDS[kind]("a", 64, 64, files)
    for step in range(draw(st.integers(1, 4))):
        rows, columns = (int(size) for size in recipes.shape(recipe))  # type: ignore[arg-type]
        what = draw(st.sampled_from(("slice", "join", "turn", "split")))
        dim = draw(st.integers(0, 1))
        size = (rows, columns)[dim]
        if what == "slice":
            unit = draw(st.sampled_from([unit for unit in (1, 2, 8, 16, 32) if size % unit == 0]))
            start = unit * draw(st.integers(0, size // unit - 1))
            recipe = Slice(recipe, dim, start, unit * draw(st.integers(1, (size - start) // unit)))
        elif what == "join":
            other = draw(st.sampled_from(("itself", "another")))
            more = (
                recipe if other == "itself" else Slice(KINDS[kind](f"b{step}", 64, 64, files), 1, 0, min(64, columns))
            )
            if recipes.shape(more)[1] == columns:
                recipe = Concat((recipe, more), 0 if other == "another" else dim)
        elif what == "turn":
            recipe = Transpose(Transpose(recipe, 0, 1), 1, 0)
        elif rows % 2 == 0:
            recipe = Reshape(Transpose(Reshape(recipe, (rows // 2, 2, columns)), 0, 1), (rows, columns))
    return recipe, files


@given(changed())
def test_what_is_kept_is_exact(case: tuple[Recipe, Files]) -> None:
    is_kept(*case)


@pytest.mark.parametrize(
    ("recipe", "dtype"),
    [
        (Dequantise(Read("w", (8, 8), "int8"), Read("s", (8, 1)), "int8", (1, 8)), "float32"),
        (Dequantise(Read("w", (8, 2), "int32"), Read("s", (8, 1)), "packed4", zero_offset=8), "float16"),
    ],
)
def test_what_holds_scales_of_any_type(recipe: Recipe, dtype: Dtype) -> None:
    params, _ = stored(kept(recipe, "bfloat16"), "w", scales="float16")

    assert params["scales"].type.dtype == dtype
    assert params["scales"].recipe == Cast(Read("s", (8, 1)), dtype)
