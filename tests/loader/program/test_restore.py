"""Graphs in text form, restored and run, compared with the same arithmetic written in torch."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graph_text import parse_graph
from torch.utils._python_dispatch import TorchDispatchMode

from precast.ir.errors import BundleError, RequestError, TargetError
from precast.ir.graph.schema import Graph, Node, Ref, TensorType, Value
from precast.kernels.collectives.group import Group
from precast.kernels.collectives.together import run_ranks
from precast.kernels.registry import Implementation
from precast.kernels.use import Use
from precast.loader.program.restore import Program, restore

CPU = torch.device("cpu")

TWO_LAYERS = """
symbols { T: 1.. }
inputs { %x: float32[1, T, 4] }
params {
  %w0: float32[4, 4] = read("w0", [4, 4])
  %w1: float32[4, 4] = read("w1", [4, 4])
}
block layer {
  inputs { %h: float32[1, T, 4] }
  params { %w: float32[4, 4] }
  %mixed = aten.linear.default(input=%h, weight=%w)
  %active = aten.tanh.default(self=%mixed)
  %out = aten.add.Tensor(self=%active, other=%h)
  return %out
}
main {
  %first = call layer(h=%x, w=%w0)
  %second = call layer(h=%first, w=%w1)
  return y=%second
}
"""

CACHED = """
symbols { T: 1..  P_main: 1.. }
inputs {
  %k: float32[1, T, 2, 4]
  %slots: int64[T]
}
pool main(pages=P_main)
group full(pool=main, spec=paged(num_kv_heads=2, head_size=4, value_size=4, dtype=float32, page_size=8, window=none),
           page_indices=%a, page_indptr=%b, page_start=%c, slot_mapping=%slots) {
  slot layer(%k_cache: float32[P_main, 8, 2, 4], %v_cache: float32[P_main, 8, 2, 4])
}
main {
  precast.write_kv@1(k=%k, v=%k, k_cache=%k_cache, v_cache=%v_cache, slot_mapping=%slots)
  %flat = aten.reshape.default(self=%k_cache, shape=[(P_main * 8), 8])
  return rows=%flat
}
"""


def program(text: str, device: torch.device = CPU, **tensors: torch.Tensor) -> Program:
    """The graph of the text, bound to `tensors`."""
    restored = restore(parse_graph(text), device=device)
    restored.bind({name: tensor.to(device) for name, tensor in tensors.items()})
    return restored


def main_of(body: str, *, inputs: str = "%x: float32[2, T]", params: str = "", blocks: str = "") -> str:
    """A graph over T with these parts."""
    return f"symbols {{ T: 1.. }} inputs {{ {inputs} }} params {{ {params} }} {blocks} main {{ {body} }}"


def layer(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """What block `layer` of TWO_LAYERS says."""
    return torch.tanh(h @ w.T) + h


# --- what a program computes -------------------------------------------------------------------------------------


def test_each_call_of_a_block_has_its_own_params() -> None:
    w0, w1, x = torch.randn(4, 4), torch.randn(4, 4), torch.randn(1, 3, 4)

    out = program(TWO_LAYERS, w0=w0, w1=w1)(x=x)

    assert list(out) == ["y"]
    torch.testing.assert_close(out["y"], layer(layer(x, w0), w1))


def test_one_program_serves_all_sizes() -> None:
    w0, w1 = torch.randn(4, 4), torch.randn(4, 4)
    restored = program(TWO_LAYERS, w0=w0, w1=w1)

    for length in (1, 7, 2, 7):
        x = torch.randn(1, length, 4)
        torch.testing.assert_close(restored(x=x)["y"], layer(layer(x, w0), w1))


def test_integers_follow_the_sizes_of_each_run() -> None:
    restored = program(
        main_of("""
        %flat = aten.reshape.default(self=%x, shape=[(2 * T)])
        %head = aten.slice.Tensor(self=%flat, dim=0, start=T, end=(2 * T))
        return flat=%flat, second_row=%head
        """)
    )

    for length in (3, 5):
        x = torch.randn(2, length)
        out = restored(x=x)
        assert torch.equal(out["flat"], x.flatten())
        assert torch.equal(out["second_row"], x[1])


def test_a_block_computes_with_sizes() -> None:
    block = """
    block half {
      inputs { %a: float32[2, T] }
      %flat = aten.reshape.default(self=%a, shape=[(2 * T)])
      %top = aten.slice.Tensor(self=%flat, dim=0, start=0, end=T)
      return %top
    }
    """
    restored = program(main_of("%y = call half(a=%x)  return y=%y", blocks=block))

    for length in (4, 7):
        x = torch.randn(2, length)
        assert torch.equal(restored(x=x)["y"], x[0])


def test_constants_of_every_kind_reach_the_op() -> None:
    restored = program(
        main_of("""
        %wide = aten.to.dtype(self=%x, dtype=float64)
        %p = aten.softmax.int(self=%wide, dim=1)
        %clamped = aten.clamp.default(self=%x, min=-0.5, max=inf)
        %mean = aten.mean.dim(self=%x, dim=[1], keepdim=true)
        %gelu = aten.gelu.default(self=%x, approximate="tanh")
        %less = aten.sub.Tensor(self=%x, other=2)
        return p=%p, clamped=%clamped, mean=%mean, gelu=%gelu, less=%less
        """)
    )
    x = torch.randn(2, 5)

    out = restored(x=x)

    expected = {
        "p": x.double().softmax(1),
        "clamped": x.clamp(min=-0.5),
        "mean": x.mean(1, keepdim=True),
        "gelu": torch.nn.functional.gelu(x, approximate="tanh"),
        "less": x - 2,
    }
    torch.testing.assert_close(out, expected)
    assert out["p"].dtype == torch.float64


def test_lists_of_tensors_mix_values_and_params() -> None:
    restored = program(
        main_of(
            "%n = aten.neg.default(self=%x)  %y = aten.cat.default(tensors=[%n, %w, %n, %x], dim=1)  return y=%y",
            params='%w: float32[2, 3] = read("w", [2, 3])',
        ),
        w=torch.ones(2, 3),
    )
    x = torch.randn(2, 2)

    assert torch.equal(restored(x=x)["y"], torch.cat((-x, torch.ones(2, 3), -x, x), 1))


def test_several_results_go_to_their_names() -> None:
    restored = program(
        main_of(
            "%n, %s = precast.residual_rms_norm(x=%x, residual=%r, weight=%w, eps=1e-06, cast_before_scale=true)"
            " return norm=%n, sum=%s",
            inputs="%x: float32[1, T, 4]  %r: float32[1, T, 4]",
            params='%w: float32[4] = read("w", [4])',
        ),
        w=torch.ones(4),
    )
    x, r = torch.randn(1, 3, 4), torch.randn(1, 3, 4)

    out = restored(x=x, r=r)

    torch.testing.assert_close(out["sum"], x + r)
    torch.testing.assert_close(out["norm"], torch.nn.functional.rms_norm(x + r, (4,), eps=1e-6))


def test_a_result_that_nobody_reads_is_dropped() -> None:
    restored = program(
        main_of(
            "%n, %s = precast.residual_rms_norm(x=%x, residual=%x, weight=%w, eps=1e-06, cast_before_scale=true)"
            " return sum=%s",
            inputs="%x: float32[1, T, 4]",
            params='%w: float32[4] = read("w", [4])',
        ),
        w=torch.ones(4),
    )
    x = torch.randn(1, 2, 4)

    torch.testing.assert_close(restored(x=x), {"sum": 2 * x})


def test_an_output_may_be_an_input_a_param_or_twice_the_same_value() -> None:
    restored = program(
        main_of(
            "%n = aten.neg.default(self=%x)  return a=%n, b=%n, x=%x, w=%w",
            params='%w: float32[3] = read("w", [3])',
        ),
        w=torch.ones(3),
    )
    x = torch.randn(2, 3)

    out = restored(x=x)

    assert list(out) == ["a", "b", "x", "w"]
    assert out["a"] is out["b"]
    assert torch.equal(out["a"], -x)
    assert torch.equal(out["x"], x)
    assert torch.equal(out["w"], torch.ones(3))


def test_a_block_takes_values_for_params_statics_for_inputs_and_returns_its_input() -> None:
    block = """
    block scale {
      inputs { %a: float32[2, T] }
      params { %b: float32[2, T] }
      %c = aten.mul.Tensor(self=%a, other=%b)
      return %c, %a
    }
    """
    restored = program(
        main_of(
            """
            %n = aten.neg.default(self=%x)
            %one, %same = call scale(a=%x, b=%n)
            %two, %w_again = call scale(a=%w, b=%one)
            return one=%one, same=%same, two=%two, w=%w_again
            """,
            params='%w: float32[2, T] = read("w", [2, 4])',
            blocks=block,
        ),
        w=torch.full((2, 4), 3.0),
    )
    x = torch.randn(2, 4)

    out = restored(x=x)

    torch.testing.assert_close(out, {"one": -x * x, "same": x, "two": -3 * x * x, "w": torch.full((2, 4), 3.0)})


def test_caches_are_written_in_place_and_count_the_pages() -> None:
    k_cache, v_cache = torch.zeros(3, 8, 2, 4), torch.zeros(3, 8, 2, 4)
    restored = program(CACHED, k_cache=k_cache, v_cache=v_cache)
    k = torch.randn(1, 2, 2, 4)

    out = restored(k=k, slots=torch.tensor([17, 3]))

    assert out["rows"].shape == (24, 8)
    assert torch.equal(k_cache[2, 1], k[0, 0])
    assert torch.equal(v_cache[0, 3], k[0, 1])
    assert k_cache.count_nonzero() == 16


def test_outputs_take_no_part_in_autograd() -> None:
    w = torch.randn(4, 4, requires_grad=True)

    out = program(TWO_LAYERS, w0=w, w1=w)(x=torch.randn(1, 1, 4))

    assert not out["y"].requires_grad


# --- memory ------------------------------------------------------------------------------------------------------


class LiveResults(TorchDispatchMode):
    """Counts, after each op, the results of all ops so far that something still holds."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[weakref.ref[torch.Tensor]] = []
        self.live: list[int] = []

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if "out" not in (kwargs or {}):  # else it was made by `empty`, in front of the op
            self.results.append(weakref.ref(out))
        if func is not torch.ops.aten.empty.memory_format:
            self.live.append(sum(result() is not None for result in self.results))
        return out


def live_results(restored: Program, **inputs: torch.Tensor) -> list[int]:
    """The number of results alive after each op of a run."""
    with LiveResults() as mode:
        out = restored(**inputs)
    del out
    return mode.live


def test_a_value_is_freed_after_its_last_use() -> None:
    chain = " ".join(f"%v{i + 1} = aten.neg.default(self=%v{i})" for i in range(5))
    text = main_of(f"%v0 = aten.exp.default(self=%x) {chain} %y = aten.add.Tensor(self=%v5, other=%v3) return y=%y")

    live = live_results(program(text), x=torch.randn(2, 3))

    # v3 lives on until the sum; the others go one op after they were made
    assert live == [1, 2, 2, 2, 2, 3, 3]


def test_a_value_that_dies_in_a_block_is_not_held_by_its_caller() -> None:
    block = """
    block deep {
      inputs { %a: float32[2, T] }
      %b = aten.neg.default(self=%a)
      %c = aten.neg.default(self=%b)
      %d = aten.neg.default(self=%c)
      return %d
    }
    """
    text = main_of("%h = aten.exp.default(self=%x) %y = call deep(a=%h) %z = call deep(a=%y) return z=%z", blocks=block)

    live = live_results(program(text), x=torch.randn(2, 3))

    assert live == [1, 2, 2, 2, 2, 2, 2]


def test_a_list_of_tensors_is_freed_with_its_op() -> None:
    text = main_of("""
        %a = aten.neg.default(self=%x)
        %b = aten.cat.default(tensors=[%a, %a], dim=0)
        %c = aten.neg.default(self=%b)
        %d = aten.neg.default(self=%c)
        return d=%d
    """)

    live = live_results(program(text), x=torch.randn(2, 3))

    assert live == [1, 2, 2, 2]


# --- what does not fit -------------------------------------------------------------------------------------------


def refused(call: Callable[[], object]) -> str:
    """The message of the input-mismatch that the call raises."""
    with pytest.raises(RequestError) as caught:
        call()
    assert caught.value.code == "input-mismatch"
    return str(caught.value)


def test_all_inputs_that_do_not_fit_are_reported_together() -> None:
    text = main_of(
        "return a=%a",
        inputs="%a: float32[1, T]  %b: int64[T]  %c: int32[4]  %d: float32[T, T]  %e: int64[T]",
    )
    restored = program(text)

    message = refused(
        lambda: restored(
            a=torch.zeros(1, 5),
            b=torch.zeros(6, dtype=torch.int64),
            c=torch.zeros(4, dtype=torch.int64),
            d=torch.zeros(5),
            f=torch.zeros(1),
        )
    )

    assert "5 tensors do not fit" in message
    assert "e: missing, expected int64 [T]" in message
    assert "f: unexpected" in message
    assert "b: expected int64 [T] (T = 5 from a), found int64 [6]" in message
    assert "c: expected int32 [4], found int64 [4]" in message
    assert "d: expected float32 [T, T] (T = 5 from a), found float32 [5]" in message
    assert "a: " not in message


def test_a_symbol_outside_its_range_is_refused() -> None:
    restored = program(main_of("return x=%x"))

    assert "T is 0, allowed is 1 to any" in refused(lambda: restored(x=torch.zeros(2, 0)))


def test_an_input_on_another_device_is_refused() -> None:
    restored = program(main_of("return x=%x"))

    assert "x: expected on cpu, found on meta" in refused(lambda: restored(x=torch.zeros(2, 1, device="meta")))


def test_a_symbol_is_read_off_a_size_that_is_linear_in_it() -> None:
    text = """
    symbols { B: 1.. }
    inputs { %x: float32[(1 + (2 * B))] }
    main { %y = aten.slice.Tensor(self=%x, dim=0, start=0, end=B) return y=%y }
    """
    restored = program(text)

    assert restored(x=torch.zeros(7))["y"].shape == (3,)
    assert "x: expected float32 [(1 + (2 * B))]" in refused(lambda: restored(x=torch.zeros(6)))
    assert "B is 0, allowed is 1 to any" in refused(lambda: restored(x=torch.zeros(1)))


def test_inputs_are_given_by_name_only() -> None:
    restored = program(main_of("return x=%x"))

    with pytest.raises(TypeError):
        restored(torch.zeros(2, 1))  # type: ignore[call-arg]


def test_a_program_that_is_not_wholly_bound_does_not_run() -> None:
    restored = restore(parse_graph(TWO_LAYERS), device=CPU)
    restored.bind({"w0": torch.zeros(4, 4)})

    assert restored.unbound == ("w1",)
    assert "w1" in refused(lambda: restored(x=torch.zeros(1, 1, 4)))

    restored.bind({"w1": torch.zeros(4, 4)})
    assert restored.unbound == ()
    restored(x=torch.zeros(1, 1, 4))


def test_tensors_that_do_not_fit_are_not_bound() -> None:
    w = torch.randn(4, 4)
    restored = program(TWO_LAYERS, w0=w, w1=w)
    x = torch.randn(1, 2, 4)
    before = restored(x=x)["y"]

    message = refused(lambda: restored.bind({"w0": torch.zeros(4, 5), "w1": torch.zeros(4, 4), "w2": torch.zeros(1)}))

    assert "w0: expected float32 [4, 4], found float32 [4, 5]" in message
    assert "w2: unexpected" in message
    assert torch.equal(restored(x=x)["y"], before)


def test_caches_may_be_bound_anew_with_other_pages_but_only_together() -> None:
    restored = program(CACHED, k_cache=torch.zeros(3, 8, 2, 4), v_cache=torch.zeros(3, 8, 2, 4))

    message = refused(lambda: restored.bind({"k_cache": torch.zeros(5, 8, 2, 4)}))
    assert (
        "v_cache: expected float32 [P_main, 8, 2, 4] (P_main = 5 from k_cache), found float32 [3, 8, 2, 4]" in message
    )

    restored.bind({"k_cache": torch.zeros(5, 8, 2, 4), "v_cache": torch.zeros(5, 8, 2, 4)})
    assert restored(k=torch.zeros(1, 1, 2, 4), slots=torch.tensor([0]))["rows"].shape == (40, 8)


def test_a_symbol_that_no_shape_gives_a_value_is_refused_at_restore() -> None:
    text = """
    symbols { T: 1.. N: 0.. }
    inputs { %x: float32[T] }
    main { %y: float32[N] = aten.slice.Tensor(self=%x, dim=0, start=0, end=N) return y=%y }
    """
    with pytest.raises(BundleError, match="gives a value to N") as caught:
        restore(parse_graph(text), device=CPU)
    assert caught.value.code == "symbol-unbound"


def test_an_op_outside_the_table_is_refused_at_restore() -> None:
    value = Value("y", TensorType("float32", (1,)))
    graph = Graph(
        (), (Value("x", value.type),), (), (), (), (Node("os.system", {"x": Ref("x")}, (value,)),), {"y": "y"}
    )

    with pytest.raises(BundleError, match=r"os\.system") as caught:
        restore(graph, device=CPU)
    assert caught.value.code == "op-unknown"


def test_an_error_inside_an_op_says_which_one_and_in_which_call() -> None:
    block = """
    block pick {
      inputs { %a: float32[1, T, 2]  %i: int64[T] }
      %b = aten.neg.default(self=%a)
      %picked = precast.gather_rows(x=%b, rows=%i)
      return %picked
    }
    """
    text = main_of(
        "%y = call pick(a=%x, i=%rows) return y=%y", inputs="%x: float32[1, T, 2] %rows: int64[T]", blocks=block
    )

    with pytest.raises((IndexError, RuntimeError)) as caught:
        program(text)(x=torch.zeros(1, 2, 2), rows=torch.tensor([0, 9]))

    assert caught.value.__notes__ == [
        "in precast.gather_rows that makes picked",
        "in the call of block pick that makes y",
    ]


# --- what computes a node ----------------------------------------------------------------------------------------


def scaled(factor: float, calls: list[torch.Tensor]) -> Callable[..., torch.Tensor]:
    """In the place of an op: writes the argument times a factor into what it is given."""

    def function(self: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        calls.append(out)
        return torch.mul(self, factor, out=out)

    return function


def chosen_by_rows(calls: list[torch.Tensor]) -> Callable[[Use], tuple[Implementation, ...]]:
    """Up to 2 tokens doubled, up to 5 tripled, more of them times ten; each into a given tensor."""
    ranges = {2.0: (0, 2), 3.0: (3, 5), 10.0: (6, None)}
    return lambda use: tuple(
        Implementation({"T": sizes}, scaled(factor, calls), allocates=False) for factor, sizes in ranges.items()
    )


def test_what_does_not_allocate_writes_into_tensors_of_the_node_s_type() -> None:
    calls: list[torch.Tensor] = []
    choose = chosen_by_rows(calls)
    graph = parse_graph(main_of("%y = aten.neg.default(self=%x) return y=%y"))
    restored = restore(graph, device=CPU, choose=lambda use: choose(use)[:1])
    x = torch.randn(2, 9)

    y = restored(x=x)["y"]

    assert y is calls[0]
    assert torch.equal(y, 2 * x)


def test_results_of_several_are_given_as_a_tuple() -> None:
    def divided(self: torch.Tensor, dim: int, out: tuple[torch.Tensor, torch.Tensor]) -> None:
        out[0].copy_(self.amax(dim)), out[1].copy_(self.argmax(dim))

    graph = parse_graph(main_of("%most, %at = aten.max.dim(self=%x, dim=1) return most=%most, at=%at"))
    restored = restore(graph, device=CPU, choose=lambda use: [Implementation({}, divided, allocates=False)])
    x = torch.randn(2, 9)

    found = restored(x=x)

    assert torch.equal(found["most"], x.amax(1))
    assert torch.equal(found["at"], x.argmax(1))


@pytest.mark.parametrize("calls_a_block", [False, True])
def test_sizes_of_a_step_choose_what_computes_a_node(calls_a_block: bool) -> None:
    block = "block one { inputs { %a: float32[2, T] } %b = aten.neg.default(self=%a) return %b }"
    body = "%y = call one(a=%x) return y=%y" if calls_a_block else "%y = aten.neg.default(self=%x) return y=%y"
    graph = parse_graph(main_of(body, blocks=block if calls_a_block else ""))
    restored = restore(graph, device=CPU, choose=chosen_by_rows([]))

    for length, factor in ((1, 2), (2, 2), (3, 3), (5, 3), (6, 10), (50, 10), (2, 2)):
        x = torch.randn(2, length)
        assert torch.equal(restored(x=x)["y"], factor * x)


def test_a_node_that_nothing_computes_is_refused_at_restore() -> None:
    value = Value("y", TensorType("float8_e4m3fn", (2, 2)))
    node = Node("aten.matmul.default", {"self": Ref("x"), "other": Ref("x")}, (value,))
    graph = Graph((), (Value("x", value.type),), (), (), (), (node,), {"y": "y"})

    with pytest.raises(TargetError, match="self is float8_e4m3fn") as caught:
        restore(graph, device=CPU)
    assert caught.value.code == "implementation-missing"


# --- a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_program_runs_on_a_gpu() -> None:
    cuda = torch.device("cuda")
    w0, w1, x = torch.randn(4, 4), torch.randn(4, 4), torch.randn(1, 3, 4)
    restored = program(TWO_LAYERS, cuda, w0=w0, w1=w1)

    assert restored.device == torch.device("cuda", torch.cuda.current_device())
    torch.testing.assert_close(restored(x=x.cuda())["y"].cpu(), layer(layer(x, w0), w1), rtol=1e-3, atol=1e-3)
    assert f"x: expected on {restored.device}, found on cpu" in refused(lambda: restored(x=x))


# --- groups of ranks ---------------------------------------------------------------------------------------------

SUMMED = """
symbols { T: 1.. }
inputs { %x: float32[1, T, 4] }
params { %w: float32[3, 4] = read("w", [3, 4]) }
block layer {
  inputs { %h: float32[1, T, 4] }
  params { %w: float32[3, 4] }
  %part = aten.linear.default(input=%h, weight=%w)
  %sum = precast.all_reduce(x=%part, group="tp")
  return %sum
}
main {
  %sum = call layer(h=%x, w=%w)
  %both = precast.all_gather(x=%sum, dim=1, group="tp", size=2)
  return y=%both
}
"""


def test_collectives_go_through_the_group_that_the_program_is_given() -> None:
    x, weights = torch.randn(1, 5, 4), torch.randn(2, 3, 4)

    def run(group: Group) -> torch.Tensor:
        made = restore(parse_graph(SUMMED), device=CPU, groups={"tp": group})
        made.bind({"w": weights[group.rank]})
        return made(x=x)["y"]

    expected = (x @ weights.sum(0).T).repeat(1, 2, 1)
    for found in run_ranks(2, run):
        torch.testing.assert_close(found, expected)


def test_a_collective_without_its_group_is_refused() -> None:
    with pytest.raises(
        TargetError, match=r"makes sum of what all ranks of the group 'tp' have, .* with no others"
    ) as error:
        restore(parse_graph(SUMMED), device=CPU)
    assert error.value.code == "group-missing"
