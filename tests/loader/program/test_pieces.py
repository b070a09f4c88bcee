"""A program in pieces: graphs between calls that read the host, and the memory that they hand to each other.

On a CPU what is captured keeps its memory; on a GPU a piece's memory is given to others as soon as the run lets it go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from graph_text import parse_graph

from precast.ir.errors import RequestError
from precast.ir.graph.schema import Node
from precast.kernels import step_memory
from precast.kernels.registry import Implementation, implementations, target_of
from precast.kernels.use import Use
from precast.loader.device import Device
from precast.loader.program.instructions import HostCall
from precast.loader.program.restore import Program, restore
from precast.loader.run.capture import CapturedStep, Captures, Memory, Size, SizedStep
from precast.loader.torch_device import open_device

TOKENS = 5
MEMORY = Memory(0, 1)

LAYERS = """
symbols { T: 1.. }
inputs { %x: float32[T, 4] %scale: float32[T, 4] }
params {
  %w0: float32[4, 4] = read("w0", [4, 4])
  %w1: float32[4, 4] = read("w1", [4, 4])
}
block layer {
  inputs { %h: float32[T, 4] %s: float32[T, 4] }
  params { %w: float32[4, 4] }
  %first = aten.tanh.default(self=%h)
  %mixed = aten.linear.default(input=%h, weight=%w)
  %second = aten.tanh.default(self=%mixed)
  %third = aten.tanh.default(self=%second)
  %both = aten.add.Tensor(self=%first, other=%second)
  %all = aten.add.Tensor(self=%both, other=%third)
  %out = aten.mul.Tensor(self=%all, other=%s)
  return %out
}
main {
  %a = call layer(h=%x, s=%scale, w=%w0)
  %b = call layer(h=%a, s=%scale, w=%w1)
  return y=%b
}
"""
"""In each layer three calls, of one function and one shape, whose results are all alive at once. Between the last two
nothing is computed."""


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Device:
    return open_device(request.param)


def reads_host(*, allocates: bool) -> Callable[[Use], tuple[Implementation, ...]]:
    """`aten.tanh` as a call that looks at its argument on the host."""

    def returned(self: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self) * (1.0 if self.sum().isfinite().item() else float("nan"))

    def written(self: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(returned(self))

    def choose(use: Use) -> tuple[Implementation, ...]:
        if use.node.op != "aten.tanh.default":
            return implementations(use)
        return (Implementation({}, returned if allocates else written, allocates, reads_host=True),)

    return choose


def bound(device: Device, *, allocates: bool = True, placed: bool = True) -> Program:
    """The layers with random weights; where they are `placed`, values lie at planned addresses."""
    on, graph = torch.device(device.name), parse_graph(LAYERS)
    program = restore(graph, device=on, choose=reads_host(allocates=allocates))
    program.bind({name: torch.randn(4, 4, device=on) for name in ("w0", "w1")})
    if placed:
        addresses = step_memory.addresses_of(graph, target_of(on), {"T": TOKENS})
        program.place(addresses, torch.full((addresses.num_bytes,), 0xFF, dtype=torch.uint8, device=on))
    return program


def captured(device: Device, program: Program, kept: torch.Tensor, inputs: dict[str, torch.Tensor]) -> CapturedStep:
    """The program captured over these inputs; a replay leaves the output in `kept`."""

    def pieces(run: Callable[..., Iterator[HostCall]]) -> Iterator[HostCall]:
        outputs: dict[str, torch.Tensor] = {}
        yield from run(outputs, **inputs)
        kept.copy_(outputs["y"])

    captures = Captures(device, [Size(TOKENS, 1)])
    with device.use():
        step = SizedStep(lambda: None, partial(pieces, program.warm_up), partial(pieces, program.cut))
        captures.capture_next(lambda size: step, MEMORY)
    return captures._steps[Size(TOKENS, 1)]


@pytest.mark.parametrize("placed", [False, True], ids=["anywhere", "placed"])
@pytest.mark.parametrize("allocates", [True, False], ids=["returns", "writes"])
def test_no_call_overwrites_what_another_has_left(device: Device, allocates: bool, placed: bool) -> None:
    """A known fault: a buffer overwritten by the next call that reads the host, while a later piece wants it.

    Each buffer is poisoned before each replay, so that nothing of an earlier one is taken either.
    """
    program = bound(device, allocates=allocates, placed=placed)
    inputs = {name: torch.randn(TOKENS, 4, device=program.device) for name in ("x", "scale")}
    kept = torch.empty(TOKENS, 4, device=program.device)
    step = captured(device, program, kept, inputs)
    calls = [part for part in step.parts if isinstance(part, HostCall)]
    assert (len(calls), step.num_graphs) == (6, 7)
    for _ in range(3):
        for tensor in (*inputs.values(), kept):
            tensor.normal_()
        with torch.inference_mode():
            for result in (result for call in calls for result in call.results):
                result.fill_(float("nan"))
            step.replay()
        assert torch.equal(kept, program(**inputs)["y"])


def test_pieces_take_their_inputs_by_name_only(device: Device) -> None:
    """A known fault: a positional shape that hides a keyword input."""
    program = bound(device)
    x = torch.randn(TOKENS, 4, device=program.device)
    with pytest.raises(TypeError):
        program.cut({}, x, x)  # type: ignore[call-arg]
    with pytest.raises(RequestError, match=r"scale"):
        next(program.cut({}, x=x))
    swapped, kept = torch.randn(TOKENS, 4, device=program.device), torch.empty(TOKENS, 4, device=program.device)
    step = captured(device, program, kept, {"scale": swapped, "x": x})
    with torch.inference_mode():
        step.replay()
    assert torch.equal(kept, program(x=x, scale=swapped)["y"])


TWO_RESULTS = """
symbols { T: 1.. }
inputs { %x: float32[T, 4] }
block layer {
  inputs { %h: float32[T, 4] }
  %out = aten.tanh.default(self=%h)
  %other = aten.neg.default(self=%out)
  return %out, %other
}
main {
  %a, %p = call layer(h=%x)
  %b, %q = call layer(h=%a)
  %c, %r = call layer(h=%b)
  %y = aten.add.Tensor(self=%c, other=%q)
  return y=%y
}
"""
"""The first call's second result is read by nobody, and the second call's is."""


@pytest.mark.parametrize(("text", "expected"), [(LAYERS, 3), (TWO_RESULTS, 2)], ids=["equal calls", "unread results"])
def test_a_warm_up_runs_a_block_once_and_all_the_rest(device: Device, text: str, expected: int) -> None:
    """Once with all of the results that later calls stand for; a call that lacks one of them runs as well."""
    on, graph, seen = torch.device(device.name), parse_graph(text), list[str]()

    def choose(use: Use) -> list[Implementation]:
        def noted(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
            def run(**arguments: torch.Tensor) -> torch.Tensor:
                seen.append(use.node.op)
                return function(**arguments)

            return run

        return [each._replace(function=noted(each.function)) for each in implementations(use)]

    program = restore(graph, device=on, choose=choose)
    program.bind({name: torch.randn(4, 4, device=on) for name in program.unbound})
    inputs = {value.name: torch.randn(TOKENS, 4, device=on) for value in graph.inputs}
    outputs: dict[str, torch.Tensor] = {}
    with torch.inference_mode():
        assert list(program.warm_up(outputs, **inputs)) == []

    assert seen.count("aten.tanh.default") == expected
    assert set(seen) == {node.op for block in graph.blocks for node in block.nodes} | {
        node.op for node in graph.main if isinstance(node, Node)
    }
    assert outputs["y"].shape == (TOKENS, 4)
