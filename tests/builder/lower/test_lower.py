"""From FX to the bundle's graph: names, sizes and arguments, and what the op table doesn't know."""

from __future__ import annotations

from pathlib import Path

import odd_models
import pytest
from fx_text import read_graph

from precast.builder.build import build
from precast.builder.lower.lower import lower, lower_flat, refuse_unknown_ops
from precast.ir.errors import BuildError
from precast.ir.graph.schema import Graph, Value
from precast.ir.graph.text import format_graph
from precast.ir.verify.verifier import verify

BATCH = """
input_ids: input(int64, 1, T)
cu_seqlens: input(int32, B1)
"""


def lowered(text: str) -> Graph:
    source = read_graph(text)
    graph = lower(source.graph, source.ctx)
    assert verify(graph) == ()
    return graph


def main_lines(text: str) -> list[str]:
    """The lines of main, without the results' types."""
    lines = format_graph(lowered(text)).partition("main {\n")[2].splitlines()[:-1]
    return [line.strip().partition(": ")[0] + " = " + line.partition(" = ")[2] for line in lines[:-1]]


# --- a graph -----------------------------------------------------------------------------------------------------


def test_inputs_params_and_constants() -> None:
    graph = lowered(
        """
        z: input(float32, 1, T, 8)
        a: input(float32, 1, T, 8)
        unused: input(float32, 1, T, 8)
        w: param(float32, 8)
        c: constant(float32, [0.5])
        x = aten.add.Tensor(z, a)
        y = aten.mul.Tensor(x, w)
        s = aten.mul.Tensor(y, c)
        return s
        """
    )

    assert [value.name for value in graph.inputs] == ["a", "z"]
    assert [param.name for param in graph.params] == ["w"]
    assert [value.name for value in graph.constants] == ["c"]
    assert graph.outputs == {"logits": "mul_1"}


def test_arguments_go_by_name_and_defaults_are_left_out() -> None:
    assert main_lines(
        """
        x: input(float32, 1, T, 8)
        w: param(float32, 6, 8)
        a = aten.linear(x, w)
        b = aten.linear(x, w, None)
        c = aten.gelu(a, approximate='none')
        d = aten.gelu(b, approximate='tanh')
        e = aten.add.Tensor(c, d, alpha=1)
        f = aten.to.dtype(e, bfloat16)
        return f
        """
    ) == [
        "%linear_0 = aten.linear.default@1(input=%x, weight=%w)",
        "%linear_1 = aten.linear.default@1(input=%x, weight=%w)",
        "%gelu_0 = aten.gelu.default@1(self=%linear_0)",
        '%gelu_1 = aten.gelu.default@1(self=%linear_1, approximate="tanh")',
        "%add_0 = aten.add.Tensor@1(self=%gelu_0, other=%gelu_1)",
        "%to_0 = aten.to.dtype@1(self=%add_0, dtype=bfloat16)",
    ]


def test_sizes_become_expressions() -> None:
    assert main_lines(
        """
        x: input(float32, 1, T, 8)
        size = aten.sym_size.int(x, 1)
        a = aten.reshape(x, [1, -1, 2, 4])
        b = aten.reshape(a, [1, size, 8])
        c = aten.unsqueeze(b, 1)
        d = aten.expand(c, [1, 3, -1, 8])
        e = aten.slice.Tensor(d, 2, 1, 9223372036854775807)
        f = aten.slice.Tensor(e, 3, 2, None, 2)
        return f
        """
    ) == [
        "%reshape_0 = aten.reshape.default@1(self=%x, shape=[1, T, 2, 4])",
        "%reshape_1 = aten.reshape.default@1(self=%reshape_0, shape=[1, T, 8])",
        "%unsqueeze_0 = aten.unsqueeze.default@1(self=%reshape_1, dim=1)",
        "%expand_0 = aten.expand.default@1(self=%unsqueeze_0, size=[1, 3, T, 8])",
        "%slice_0 = aten.slice.Tensor@1(self=%expand_0, dim=2, start=1, end=T)",
        "%slice_1 = aten.slice.Tensor@1(self=%slice_0, dim=3, start=2, end=8, step=2)",
    ]


def test_several_results_and_lists() -> None:
    lines = main_lines(
        """
        positions: input(int64, 1, T)
        inv_freq: constant(float32, [1.0, 0.5])
        c, s = precast.rotary_tables(positions, inv_freq, scale=1.0, dtype=bfloat16)
        y = aten.cat([c, s, c], -1)
        return y
        """
    )

    assert lines[0].startswith("%rotary_tables_0_0")
    assert "precast.rotary_tables@1(positions=%positions, inv_freq=%inv_freq, scale=1.0, dtype=bfloat16)" in lines[0]
    assert lines[1] == (
        "%cat_0 = aten.cat.default@1(tensors=[%rotary_tables_0_0, %rotary_tables_0_1, %rotary_tables_0_0], dim=-1)"
    )


def test_symbols_have_their_ranges() -> None:
    source = read_graph(BATCH + "y = aten.neg(cu_seqlens)\nreturn y")

    flat = lower_flat(source.graph, source.ctx)

    assert {symbol.name: symbol.min for symbol in flat.symbols} == {"B": 1, "T": 1}
    assert flat.inputs == (Value("cu_seqlens", flat.inputs[0].type),)


# --- what the table doesn't know ---------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def _known_to_transformers() -> None:
    odd_models.odd_config()


def refused(out: Path, *layers: tuple[str, ...]) -> BuildError:
    with pytest.raises(BuildError) as error:
        build(odd_models.odd_config(*layers), out / "bundle")
    assert list(out.iterdir()) == []
    return error.value


def test_a_model_of_known_ops_builds(tmp_path: Path) -> None:
    bundle = build(odd_models.odd_config(("tanh",)), tmp_path / "bundle")

    assert "aten.tanh.default" in bundle.manifest.ops


def test_all_unknown_ops_are_named_with_their_modules(tmp_path: Path) -> None:
    error = refused(tmp_path, ("fft", "digamma"), ("tanh",), ("digamma",))

    assert error.code == "op-unsupported"
    assert error.message == (
        "the model uses operations outside the op table: aten.digamma.default (used by layers.0.digamma, "
        "layers.2.digamma); aten.fft_fft.default (used by layers.0.fft); aten.real.default (used by layers.0.fft)"
    )
    assert error.fix == "docs/adding_an_op.md says how an operation is added"


def test_an_op_of_many_layers_names_a_few(tmp_path: Path) -> None:
    error = refused(tmp_path, *[("digamma",)] * 5)

    assert "(used by layers.0.digamma, layers.1.digamma, layers.2.digamma and 2 more)" in error.message


def test_an_argument_that_the_table_does_not_know(tmp_path: Path) -> None:
    error = refused(tmp_path, ("mean", "digamma"))

    assert error.code == "op-unsupported"
    assert "aten.digamma.default (used by layers.0.digamma)" in error.message
    assert "aten.mean.dim with dtype=torch.float32 (used by layers.0.mean)" in error.message


def test_an_op_outside_of_layers() -> None:
    source = read_graph("x: input(float32, 1, T, 8)\ny = aten.digamma(x)\nreturn y")

    with pytest.raises(BuildError, match=r"aten.digamma.default \(used by the model itself\)"):
        refuse_unknown_ops(source.graph)


def test_a_size_that_depends_on_values(tmp_path: Path) -> None:
    error = refused(tmp_path, ("nonzero",))

    assert error.code == "op-unsupported"
    assert "aten.nonzero.default (used by layers.0.nonzero)" in error.message


@pytest.mark.parametrize(
    ("part", "reason"), [("branch", "GuardOnDataDependentSymNode"), ("raise", "AttributeError: .*no_such_method")]
)
def test_code_that_cannot_be_traced(part: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=f"OddModel can't be traced: {reason}") as error:
        build(odd_models.odd_config((part,)), tmp_path / "bundle")

    assert error.value.code == "export-failed"
    assert list(tmp_path.iterdir()) == []
