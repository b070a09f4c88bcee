"""All the ways in which a checkpoint doesn't fit recipes, reported at once."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from examples import tiny_graph
from precast.ir import limits
from precast.ir.errors import WeightsError
from precast.ir.graph.schema import (
    Cast,
    Each,
    Param,
    Read,
    Stack,
    TensorType,
)
from precast.ir.manifest import Checkpoint
from precast.ir.weights import fit, recipes
from precast.ir.weights.checkpoint import CheckpointFiles, StoredTensor
from precast.ir.weights.fit import Problem
from precast.ir.weights.sources import LocalFolder

NO_RULES = Checkpoint()
NORM = "model.norm.weight"


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
    assert fit.resolve(name, there, Checkpoint(optional_prefixes=("transformer.", "x."))) == found


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
    assert fit.resolve(name, there, Checkpoint(prefixes={"model.": "model.text."})) == found


# --- a checkpoint ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "there", "found"),
    [
        ("a.s", {"a.s"}, "a.s"),
        ("a.s", {"a.t"}, "a.t"),
        ("a.s", {"a.s", "a.t"}, "a.s"),
        ("model.a.s", {"a.t"}, "a.t"),
        ("a.t", {"a.s"}, None),
        ("a.s.b", {"a.t.b"}, None),
    ],
)
def test_other_endings(name: str, there: set[str], found: str | None) -> None:
    assert fit.resolve(name, there, Checkpoint(optional_prefixes=("model.",), endings={".s": ".t"})) == found


ENDINGS = Checkpoint(endings={".weight": ".other"})


@pytest.mark.parametrize("name", [NORM, "model.norm.other"])
@pytest.mark.parametrize(("shape", "fits"), [((1, 16), True), ((16, 1, 1), True), ((4, 4), False), ((), False)])
def test_what_has_another_ending_may_have_dimensions_of_size_1(name: str, shape: tuple[int, ...], fits: bool) -> None:
    files = fitting(**{NORM: None, name: stored(shape)})

    found = "[" + ", ".join(map(str, shape)) + "]"
    assert fit.problems(tiny_graph(), ENDINGS, files) == [Problem("shape", name, f"expected [16], found {found}")] * (
        not fits
    )
    if fits:
        assert fit.require(tiny_graph(), ENDINGS, files)[NORM].shape == (16,)


def test_what_is_missing_is_named_with_its_other_ending() -> None:
    assert fit.problems(tiny_graph(), ENDINGS, fitting(**{NORM: None})) == [
        Problem("missing", NORM, "expected floating point [16], or model.norm.other")
    ]


def test_both_endings_at_once_are_not_expected() -> None:
    files = fitting(**{"model.norm.other": stored((16,))})

    assert [problem.kind for problem in fit.problems(tiny_graph(), ENDINGS, files)] == ["unexpected"]


def test_a_checkpoint_that_fits() -> None:
    assert fit.problems(tiny_graph(), NO_RULES, fitting()) == []
    fit.check(tiny_graph(), NO_RULES, fitting())
    assert fit.require(tiny_graph(), NO_RULES, fitting())[NORM] == stored((16,))


def test_prefixes_are_seen_through() -> None:
    files = fitting()
    bare = {name.removeprefix("model."): tensor for name, tensor in files.tensors.items()}
    rules = Checkpoint(optional_prefixes=("model.",))

    found = fit.require(tiny_graph(), rules, CheckpointFiles(files.folder, bare))

    assert found.keys() == files.tensors.keys()
    assert len(fit.problems(tiny_graph(), NO_RULES, CheckpointFiles(files.folder, bare))) == 2 * len(bare)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_any_float_will_do(dtype: str) -> None:
    assert fit.problems(tiny_graph(), NO_RULES, fitting(**{NORM: stored((16,), dtype)})) == []


@pytest.mark.parametrize("dtype", ["int64", "float8_e4m3fn", "U16", "bool"])
def test_no_other_dtype_will(dtype: str) -> None:
    (problem,) = fit.problems(tiny_graph(), NO_RULES, fitting(**{NORM: stored((16,), dtype)}))

    assert (problem.kind, problem.tensor) == ("dtype", NORM)
    assert dtype in problem.message


@pytest.mark.parametrize(("wanted", "found"), [((), (1,)), ((1,), ()), ((1, 1), (1,)), ((1,), (1, 1, 1))])
def test_one_number_has_any_shape_of_ones(wanted: tuple[int, ...], found: tuple[int, ...]) -> None:
    param = Param("scale", TensorType("float32", wanted), Read("s", wanted, "float32"))
    graph, files = replace(tiny_graph(), params=(param,)), CheckpointFiles(LocalFolder("/ckpt"), {"s": stored(found)})

    assert fit.problems(graph, NO_RULES, files) == []
    assert fit.require(graph, NO_RULES, files)["s"].shape == wanted


@pytest.mark.parametrize("shape", [(), (8,), (1, 16), (16, 1)])
def test_wrong_shape(shape: tuple[int, ...]) -> None:
    problems = fit.problems(tiny_graph(), NO_RULES, fitting(**{NORM: stored(shape)}))

    found = "[" + ", ".join(map(str, shape)) + "]"
    assert problems == [Problem("shape", NORM, f"expected [16], found {found}")]


def test_unused_tensors_are_not_unexpected() -> None:
    files = fitting(**{"vision.x": stored((5,)), "other.x": stored((5,))})

    (problem,) = fit.problems(tiny_graph(), Checkpoint(unused=("vision.*",)), files)

    assert problem.tensor == "other.x"


def test_ignored_tensors() -> None:
    files = fitting(**{"model.layers.0.self_attn.rotary_emb.inv_freq": stored((2,)), "model.other": stored((2,))})

    (problem,) = fit.problems(tiny_graph(), Checkpoint(ignored=("*.rotary_emb.inv_freq",)), files)

    assert (problem.kind, problem.tensor) == ("unexpected", "model.other")


def test_a_tied_tensor_may_be_stored_as_well() -> None:
    assert fit.problems(tiny_graph(), NO_RULES, fitting(head=stored((32, 16)))) == []


def test_everything_is_reported_at_once() -> None:
    q = "model.layers.1.self_attn.q_proj.weight"
    files = fitting(**{NORM: None, q: stored((3,), "int8"), "extra.1": stored((1,)), "extra.2": stored((1,))})

    with pytest.raises(WeightsError) as caught:
        fit.check(tiny_graph(), NO_RULES, files)

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


@pytest.mark.parametrize(("dtype", "is_told"), [("float8_e4m3fn", True), ("int32", True), ("bfloat16", False)])
def test_what_to_do_of_a_quantised_checkpoint(dtype: str, is_told: bool) -> None:
    """Its config may be the bundle's, and say something else."""
    with pytest.raises(WeightsError) as error:
        fit.check(tiny_graph(), NO_RULES, fitting(**{NORM: stored((17,), dtype)}))

    assert ("quantization_config" in str(error.value.fix)) == is_told


def test_long_lists_are_cut_and_counted() -> None:
    files = fitting(**{f"extra.{i}": stored((1,)) for i in range(13)})

    with pytest.raises(WeightsError) as caught:
        fit.require(tiny_graph(), NO_RULES, files)

    lines = caught.value.message.splitlines()
    assert lines[1] == "  13 tensors unexpected:"
    assert lines[-1] == "    and 5 more (precast verify BUNDLE --weights DIR [--allow-config-mismatch] lists all)"
    assert len(lines) == 8 + 3


def test_long_lists_are_whole_where_all_is_asked_for() -> None:
    files = fitting(**{f"extra.{i}": stored((1,)) for i in range(13)})

    with pytest.raises(WeightsError) as caught:
        fit.check(tiny_graph(), NO_RULES, files, most=None)

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
        fit.check(graph, NO_RULES, CheckpointFiles(LocalFolder("/ckpt"), held))

    assert held.looked_for == limits.MAX_PROBLEMS
    assert "unexpected" not in caught.value.message
    assert len(caught.value.message.splitlines()) == 8 + 3


def test_a_name_is_looked_for_once() -> None:
    made = Cast(Each(Read("w", (1,)), 0, 1000), "float32")
    graph = replace(tiny_graph(), params=(Param("p", TensorType("float32", (1000, 1)), made),))
    held = _Counted(second=stored((1,)))

    fit.check(graph, Checkpoint(tied={"second": "w"}), CheckpointFiles(LocalFolder("/ckpt"), held))

    assert held.looked_for < 10


def test_patterns_are_compared_so_often(monkeypatch: pytest.MonkeyPatch) -> None:
    files = fitting(**{f"extra.{i}": stored((1,)) for i in range(10)})
    rules = Checkpoint(ignored=("extra.*", "b.*", "c.*"), unused=("d.*",))
    monkeypatch.setattr(limits, "MAX_MATCHES", 40)
    assert fit.problems(tiny_graph(), rules, files) == []

    monkeypatch.setattr(limits, "MAX_MATCHES", 39)

    with pytest.raises(WeightsError, match="10 tensors that nothing reads, to be compared with 4 patterns"):
        fit.problems(tiny_graph(), rules, files)
