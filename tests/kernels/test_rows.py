"""Norms, gates and rotary embeddings as launches: what takes them, and what they are compiled to for Hopper.

`launched_rows.py` has what they compute.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from compiled_launches import compiled, stack_bytes
from op_calls import f32, t

from precast.ir.graph.schema import Const, Dtype, DtypeArg, Items, Node, Ref, TensorType, Value
from precast.ir.ops import table as ops
from precast.kernels.choices import resolve
from precast.kernels.records import Launch
from precast.kernels.use import GPU, Target, Use, use_of

Args = dict[str, Any]
HIDDEN, WEIGHT = t("bfloat16", 1, "T", 4096), t("bfloat16", 4096)
NORM: Args = {"x": HIDDEN, "weight": WEIGHT, "eps": 1e-5, "offset": 0.0, "cast_before_scale": True}
HEADS: Args = {**NORM, "x": t("bfloat16", 1, "T", 32, 128), "weight": t("bfloat16", 128)}
TABLE = t("bfloat16", 1, "T", 64)
PAGES, PAGES8 = t("bfloat16", "P", 16, 8, 128), t("float8_e4m3fn", "P", 16, 8, 128)
KV = t("bfloat16", 1, "T", 8, 128)
WRITE: Args = {
    "q": HEADS["x"], "k": KV, "v": KV, "cos": TABLE, "sin": TABLE, "q_weight": None, "k_weight": None,
    "k_cache": PAGES, "v_cache": PAGES, "slot_mapping": t("int64", "T"), "interleaved": False, "eps": None,
}  # fmt: skip
STORED: Args = {
    "ids": t("int64", 1, "T"), "weight": t("float8_e4m3fn", 1000, 4096), "format": "fp8", "dtype": "bfloat16",
}  # fmt: skip
CALLS: list[tuple[str, Args]] = [
    ("rms_norm", NORM),
    ("rms_norm", HEADS),
    ("rms_norm", {**NORM, "weight": None}),
    ("rms_norm", {**NORM, "offset": 1.0, "cast_before_scale": False}),
    ("residual_rms_norm", {**NORM, "residual": HIDDEN}),
    ("layer_norm", {"x": HIDDEN, "weight": WEIGHT, "bias": WEIGHT, "eps": 1e-5}),
    ("layer_norm", {"x": f32(1, "T", 5120), "weight": None, "bias": None, "eps": 1e-5}),
    *(("gated_activation", {"x": t("float16", 1, "T", 28672), "kind": kind}) for kind in ("silu", "gelu", "gelu_tanh")),
    ("rotary", {"x": HEADS["x"], "cos": TABLE, "sin": TABLE, "interleaved": False}),
    ("rotary", {"x": f32(1, "T", 7, 96), "cos": f32(1, "T", 10), "sin": f32(1, "T", 10), "interleaved": True}),
    ("norm_residual_norm", {**NORM, "residual": HIDDEN, "inner_weight": WEIGHT}),
    ("embedding", {"ids": t("int64", 1, "T"), "weight": t("bfloat16", 1000, 4096)}),
    ("embedding", {"ids": t("int32", 1, "T"), "weight": t("float16", 1000, 3840), "scale": 3840**0.5}),
    ("quantised_embedding", {**STORED, "scales": f32(1, 1), "block": (1000, 4096)}),
    ("quantised_embedding", {**STORED, "scales": f32(8, 32), "block": (128, 128), "scale": 3840**0.5}),
    ("quantised_sharded_embedding", {**STORED, "scales": f32(1000, 1), "block": (1, 4096), "start": 1000}),
    ("gather_rows", {"x": HIDDEN, "rows": t("int64", "R")}),
    ("rotary_write_kv", WRITE),
    ("rotary_write_kv", {**WRITE, "q_weight": t("bfloat16", 128), "k_weight": t("bfloat16", 128), "eps": 1e-6}),
    ("rotary_write_kv", {**WRITE, "k_cache": PAGES8, "v_cache": PAGES8}),
    ("rotary_tables", {"positions": t("int64", 1, "T"), "inv_freq": f32(64), "scale": 1.0, "dtype": "bfloat16"}),
    ("rotary_tables", {"positions": t("int64", 1, "T"), "inv_freq": f32(1, "T", 64), "scale": 1.0, "dtype": "float32"}),
]


PARAMS = frozenset(("weight", "inner_weight", "bias"))


def use(op: str, args: Args, target: Target = GPU, params: frozenset[str] = PARAMS) -> Use:
    """The use that a node of these arguments is, of which `params` are no values of the step."""
    types = {name: value for name, value in args.items() if isinstance(value, TensorType)}
    definition = ops.lookup(f"precast.{op}", 1)
    assert definition is not None
    defaults = {arg.name: arg.default for arg in definition.args if arg.has_default}
    outputs = definition.shape_rule({**defaults, **args})
    node = Node(
        definition.name,
        {name: Ref(name) if name in types else literal(name, value) for name, value in args.items()},
        tuple(Value(f"out.{i}", kind) for i, kind in enumerate(outputs)),
    )
    return use_of(node, types, target, params)


def literal(name: str, value: Any) -> DtypeArg | Items | Const:
    if name == "dtype":
        return DtypeArg(value)
    return Items(tuple(map(Const, value))) if isinstance(value, tuple) else Const(value)


def launches(found: Use) -> tuple[Launch, ...]:
    """What Triton's record launches."""
    record = resolve(found).record
    assert record.name.startswith("triton."), record.name
    assert not isinstance(record.runs, str)
    return record.runs(found)


def all_types(found: Use) -> dict[str, TensorType]:
    operands = {name: operand.type for name, operand in found.operands.items()}
    return operands | {value.name: value.type for value in found.node.outputs}


@pytest.mark.parametrize(("op", "args"), CALLS)
def test_a_row_is_one_launch_compiled_for_hopper(
    op: str, args: Args, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="Triton is published for Linux only")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    found = use(op, args)
    (launch,) = launches(found)
    ptx = compiled(launch, all_types(found)).asm["ptx"]

    # Whole vectors are read and written, but for pairs side by side, whose elements are two apart.
    if not args.get("interleaved"):
        assert re.search(r"ld\.global\S*\.v[24]\.b32", ptx) or op == "rotary_tables"
        assert re.search(r"st\.global\S*\.v[24]\.b(32|16)", ptx) or op == "rotary_tables"
    # The next kernel may begin first; then this one waits, and whatever it reads but for weights, and the step's inputs
    # where tokens are written, comes after that.
    reads_early = op == "rotary_write_kv" or (args.get("weight") is not None and "embedding" not in op)
    assert launch.pdl
    order = re.findall(r"griddepcontrol\.\w+|ld\.global|st\.global", ptx)
    waits, weights = order.index("griddepcontrol.wait"), [each for each in order if each == "ld.global"]
    assert order[waits - 1] == "griddepcontrol.launch_dependents"
    assert "st.global" not in order[:waits]
    assert order[waits:].count("ld.global") > 0
    assert ("ld.global" in order[:waits]) == reads_early
    assert len(weights) > 0


def test_a_row_of_nothing_stops_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read for it, and the next step fails."""
    pytest.importorskip("triton", reason="Triton is published for Linux only")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found = use("gather_rows", {"x": HIDDEN, "rows": t("int64", "R")})
    (launch,) = launches(found)
    ptx = compiled(launch, all_types(found)).asm["ptx"]

    trap, *_ = (match.start() for match in re.finditer(r"\btrap;", ptx))
    assert trap < ptx.index("ld.global.v")


@pytest.mark.parametrize("made", ["weight", "bias"])
def test_weights_that_the_step_makes_are_waited_for(made: str) -> None:
    """They would be read while the kernel that makes them still runs."""
    args: Args = {"x": HIDDEN, "weight": WEIGHT, "bias": WEIGHT, "eps": 1e-5}
    (launch,) = launches(use("layer_norm", args, params=PARAMS - {made}))

    assert not launch.pdl
    assert launch.constants["PDL"] is False


@pytest.mark.parametrize("made", ["weight", "inner_weight"])
def test_weights_of_two_norms_that_the_step_makes_are_waited_for(made: str) -> None:
    args: Args = {**NORM, "residual": HIDDEN, "inner_weight": WEIGHT}
    (launch,) = launches(use("norm_residual_norm", args, params=PARAMS - {made}))

    assert not launch.pdl


def test_nothing_waits_below_hopper() -> None:
    (launch,) = launches(use("rms_norm", NORM, Target("cuda", (8, 0))))

    assert not launch.pdl
    assert launch.constants["PDL"] is False


REFUSED: list[tuple[str, Args, str]] = [
    ("rms_norm", {**NORM, "x": t("float64", 1, "T", 4096)}, "x is float64, it takes float16, bfloat16, float32"),
    ("rms_norm", {**NORM, "weight": t("float64", 4096)}, "weight is float64"),
    ("rms_norm", {**NORM, "x": f32(2, "T", 3, 8), "weight": f32(8)}, "it wants x with at most two axes"),
    ("rms_norm", {**NORM, "x": f32(1, "T", 32769), "weight": f32(32769)}, "one of 1 to 32768 elements"),
    ("rms_norm", {**NORM, "x": f32(1, "T", 0), "weight": f32(0)}, "one of 1 to 32768 elements"),
    ("gated_activation", {"x": f32(2, "T", 3, 8), "kind": "silu"}, "it wants x with at most two axes"),
    ("rotary", {"x": f32(1, "T", 2, 0), "cos": f32(1, "T", 0), "sin": f32(1, "T", 0), "interleaved": True}, "it wants"),
]


@pytest.mark.parametrize(("op", "args", "why"), REFUSED)
def test_the_reference_computes_what_triton_does_not_take(op: str, args: Args, why: str) -> None:
    choice = resolve(use(op, args))

    assert choice.record.name == f"reference.{op}"
    assert why in choice.reason


@pytest.mark.parametrize(
    ("width", "rows", "block", "warps"),
    [(128, 8, 128, 4), (72, 8, 128, 4), (1, 1024, 1, 4), (4096, 1, 4096, 16), (5120, 1, 8192, 16)],
)
def test_a_program_takes_one_wide_row_or_several_narrow_ones(width: int, rows: int, block: int, warps: int) -> None:
    (launch,) = launches(use("rms_norm", {**NORM, "x": f32(1, 17, width), "weight": f32(width)}))

    assert (launch.constants["ROWS"], launch.constants["BLOCK"], launch.num_warps) == (rows, block, warps)
    assert launch.grid == (-(-17 // rows),)


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 2048), (3, 2880), (8, 4096)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_few_outputs_compile_for_hopper(
    outputs: int, inputs: int, dtype: Dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inputs are read as whole vectors, and nothing is read before the kernel in front has ended."""
    pytest.importorskip("triton", reason="Triton is published for Linux only")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    types = {"input": t(dtype, "T", inputs), "weight": t(dtype, outputs, inputs)}
    args = {name: Ref(name) for name in types}
    node = Node("aten.linear.default", args, (Value("y", t(dtype, "T", outputs)),))
    found = use_of(node, types, GPU, PARAMS)
    record = resolve(found, {"T": 64}).record
    assert record.name == "triton.linear"
    assert not isinstance(record.runs, str)
    (launch,) = record.runs(found)
    made = compiled(launch, types | {"out.0": t(dtype, "T", outputs)})
    ptx = made.asm["ptx"]

    assert re.search(r"ld\.global\S*\.v4\.b32", ptx)
    assert launch.pdl
    order = re.findall(r"griddepcontrol\.wait|ld\.global|st\.global", ptx)
    assert order[0] == "griddepcontrol.wait"
    assert stack_bytes(made, tmp_path) == 0
