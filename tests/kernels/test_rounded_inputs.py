"""Where norms and gates round the inputs of layers behind them, and the kernels that do, as they are compiled."""

from __future__ import annotations

from pathlib import Path

import pytest
from graph_text import parse_graph

from precast.ir.graph.schema import Graph, Node, TensorType
from precast.ir.graph.text import format_graph
from precast.ir.ops.rows_rounded import in_groups
from precast.ir.verify import verifier
from precast.kernels.choices import cases
from precast.kernels.rounded.fusing import with_rounded_inputs
from precast.kernels.step_launches import Address, step_launches
from precast.kernels.use import GPU, Target, types_in, use_of
from precast.loader.weights.stored_checks import checks

ADA = GPU._replace(capability=(8, 9))
GRAPH = """
symbols { T: 1.. }
inputs { %x: bfloat16[1, T, 256] }
params {
  %n: bfloat16[256] = cast(read("n", [256]), bfloat16)
  %w: float8_e4m3fn[512, 256] = read("w", [512, 256], float8_e4m3fn)
  %s: float32[512, 1] = read("s", [512, 1], float32)
  %i: float32[1] = read("i", [1], float32)
  %j: float32[1] = read("j", [1], float32)
}
main {
  BODY
}
"""
NORM = "%y = precast.rms_norm(x=%x, weight=%n, eps=1e-05, cast_before_scale=true)\n"
LAYER = '%{} = precast.quantised_linear(input=%{}, weight=%w, scales=%s, format="fp8", block=[1, 256], {})\n'
TOKEN, GROUP = 'activation="fp8_token"', 'activation="fp8_group"'
STATIC, OTHER = 'activation="fp8_tensor", input_scale=%i', 'activation="fp8_tensor", input_scale=%j'
GATE = '%g = precast.gated_activation(x=%p, kind="silu")\n'


def graph_of(*lines: str) -> Graph:
    return parse_graph(GRAPH.replace("BODY", "".join(lines)))


def ops(graph: Graph) -> list[str]:
    return [step.op.removeprefix("precast.") for step in graph.main if isinstance(step, Node)]


@pytest.mark.parametrize("rounding", [TOKEN, STATIC])
def test_a_norm_and_a_gate_round_for_the_layers_behind_them(rounding: str) -> None:
    layers = LAYER.format("p", "y", rounding), LAYER.format("q", "y", rounding), GATE, LAYER.format("r", "g", rounding)
    graph = graph_of(NORM, *layers, "return p=%p, q=%q, r=%r")

    made = with_rounded_inputs(graph, GPU)

    verifier.check(made)
    first = ["rounded_rms_norm", "rounded_linear", "rounded_linear", "rounded_gated_activation", "rounded_linear"]
    assert ops(made) == first
    assert list(checks(made)) == list(checks(graph))  # of scales, while they are read
    assert with_rounded_inputs(made, GPU) is made
    assert parse_graph(format_graph(made)) == made


@pytest.mark.parametrize(
    "lines",
    [
        (NORM, LAYER.format("p", "y", TOKEN), "return p=%p, y=%y"),
        (NORM, LAYER.format("p", "y", TOKEN), LAYER.format("q", "y", STATIC), "return p=%p, q=%q"),
        (NORM, LAYER.format("p", "y", STATIC), LAYER.format("q", "y", OTHER), "return p=%p, q=%q"),
        (NORM, LAYER.format("p", "y", 'activation="none"'), "return p=%p"),
        (NORM, LAYER.format("p", "y", TOKEN), "%z = aten.relu.default(self=%y)\n", "return p=%p, z=%z"),
        (NORM, "%z = aten.relu.default(self=%y)\n", "return z=%z"),
        (LAYER.format("p", "x", TOKEN), "return p=%p"),
    ],
    ids=["returned", "two ways", "two scales", "not rounded", "another op", "no layer", "no norm"],
)
def test_what_something_else_takes_stays(lines: tuple[str, ...]) -> None:
    graph = graph_of(*lines)

    assert with_rounded_inputs(graph, GPU) is graph


WIDE = """
symbols {{ T: 1.. }}
inputs {{ %x: bfloat16[1, T, {taken}] }}
params {{
  %n: bfloat16[{width}] = cast(read("n", [{width}]), bfloat16)
  %w: float8_e4m3fn[512, {width}] = read("w", [512, {width}], float8_e4m3fn)
  %s: float32[{scales}] = read("s", [{scales}], float32)
}}
main {{
  {first}
  %y = precast.quantised_linear(input=%g, weight=%w, scales=%s, format="fp8", block=[{block}], activation="{how}")
  return y=%y
}}
"""


def wide(first: str, width: int, how: str) -> Graph:
    """A layer of so many inputs, behind a gate or a norm."""
    scales, block = (f"4, {width // 128}", "128, 128") if in_groups(how) else ("512, 1", f"1, {width}")
    taken, line = {
        "gate": (2 * width, '%g = precast.gated_activation(x=%x, kind="silu")'),
        "norm": (
            width,
            "%g, %sum = precast.residual_rms_norm(x=%x, residual=%x, weight=%n, eps=1e-05, cast_before_scale=true)",
        ),
    }[first]
    return parse_graph(WIDE.format(first=line, taken=taken, width=width, scales=scales, block=block, how=how))


@pytest.mark.parametrize(
    ("how", "width", "target", "is_fused"),
    [("fp8_token", 32768, ADA, True), ("fp8_token", 33280, ADA, False), ("fp8_token", 53248, GPU, True),
     ("fp8_group", 53248, GPU, True), ("fp8_group_e8m0", 53248, GPU, True)],
)  # fmt: skip
def test_wide_gates_round_what_a_program_holds(how: str, width: int, target: Target, is_fused: bool) -> None:
    """In groups, any width: a program has as much of a row as it likes. By token on Hopper, too: a cluster has it."""
    found = ops(with_rounded_inputs(wide("gate", width, how), target))

    fused = ["rounded_gated_activation", "rounded_linear"]
    assert found == (fused if is_fused else ["gated_activation", "quantised_linear"])


@pytest.mark.parametrize("how", ["fp8_group", "fp8_group_e8m0"])
def test_rounded_rows_are_multiplied_where_they_lie_without_torch(how: str) -> None:
    """In blocks of four of them: copies of the last are in the workspace, as the launch in front puts them there."""
    graph = with_rounded_inputs(wide("norm", 512, how), GPU)

    norm, layer = step_launches(graph, GPU.without_torch, {"T": 258})

    (rounding,), (lay, product) = norm.launches, layer.launches
    values, scales = rounding.args[:2]
    _, input, _, _, _, of_input, _, last, spare, rows = product.args
    laid, copied, _, laid_from, copied_from, _, rows_laid = lay.args
    assert (input, copied_from, laid_from, rows, rows_laid) == (values, values, scales, 258, 258)
    assert (laid, copied) == (of_input, last)
    begins = [each.offset for each in (last, of_input, spare) if isinstance(each, Address)]
    assert begins == [0, 4 * 512, 4 * 512 + 4352]


def test_layers_of_sizes_that_are_not_known_at_load_are_the_definition_s() -> None:
    """Their records say so."""
    graph = with_rounded_inputs(graph_of(NORM, LAYER.format("p", "y", TOKEN), "return p=%p"), GPU)
    node = graph.main[-1]
    assert isinstance(node, Node)
    types = types_in(graph)
    unknown = {"w": TensorType("float8_e4m3fn", ("N", 256)), "s": TensorType("float32", ("N", 1))}

    given = use_of(node, types | unknown, GPU, {"w", "s"})

    assert {case.choice.record.name for case in cases(given)} == {"reference.rounded_linear"}


@pytest.mark.parametrize("target", [Target("cpu"), Target("cuda", (8, 0))])
def test_where_no_kernel_rounds_nothing_changes(target: Target) -> None:
    graph = graph_of(NORM, LAYER.format("p", "y", TOKEN), "return p=%p")

    assert with_rounded_inputs(graph, target) is graph


def test_a_scale_that_an_op_makes_stays_behind_it() -> None:
    graph = graph_of(
        NORM, "%k = aten.abs.default(self=%i)\n", LAYER.format("p", "y", STATIC.replace("%i", "%k")), "return p=%p"
    )

    assert with_rounded_inputs(graph, GPU) is graph


@pytest.mark.parametrize("rounding", [TOKEN, STATIC])
def test_kernels_compile_for_hopper(rounding: str, tmp_path: Path) -> None:
    """Without spilling registers to memory; NaN stays what it is between bounds, and becomes that of float8."""
    layers = LAYER.format("p", "y", rounding), GATE, LAYER.format("r", "g", rounding)
    graph = with_rounded_inputs(graph_of(NORM, *layers, "return r=%r"), GPU)

    found = kernels_compiled(graph, tmp_path)

    keeps_nan = {name for name, ptx in found.items() if "cvt.rn.satfinite.e4m3x2.f32" in ptx}
    assert keeps_nan == found.keys() - {"product_kernel"} == {"rounded_norm_kernel", "rounded_gate_kernel"}
    assert {name for name, ptx in found.items() if "min.NaN" in ptx} == (keeps_nan if rounding == STATIC else set())


@pytest.mark.parametrize("how", ["fp8_token", "fp8_group", "fp8_group_e8m0"])
@pytest.mark.parametrize(("first", "width"), [("norm", 4096), ("norm", 16384), ("gate", 14336), ("gate", 32768)])
def test_kernels_of_long_rows_compile_for_hopper(first: str, width: int, how: str, tmp_path: Path) -> None:
    graph = with_rounded_inputs(wide(first, width, how), GPU)

    assert kernels_compiled(graph, tmp_path, "rounded_").keys() == {f"rounded_{first}_kernel"}


def kernels_compiled(graph: Graph, folder: Path, prefix: str = "") -> dict[str, str]:
    """PTX of Triton's kernels of such names that the graph's steps launch. None keeps registers in memory."""
    pytest.importorskip("triton", reason="Triton is published for Linux only")
    from compiled_launches import compiled, stack_bytes

    found = dict[str, str]()
    for step in graph.main:
        assert isinstance(step, Node)
        use = use_of(step, types_in(graph), GPU, {"n", "w", "s", "i"})
        types = {name: each.type for name, each in use.operands.items()}
        types |= {f"out.{i}": value.type for i, value in enumerate(step.outputs)}
        for case in cases(use):
            if case.choice.record.kind == "triton":
                for launch in case.choice.record.runs(use):  # type: ignore[operator]
                    name = launch.kernel.partition(":")[2]
                    if name.startswith(prefix):
                        made = compiled(launch, types)
                        assert stack_bytes(made, folder) == 0, name
                        found[name] = made.asm["ptx"]
    return found
