"""Programs whose values lie at planned addresses compute what they compute without: on random graphs, over NaN."""

from __future__ import annotations

import random

import pytest
import torch
from graph_text import parse_graph

from precast.ir.graph.schema import Graph
from precast.kernels import step_memory
from precast.kernels.registry import target_of
from precast.loader.program.restore import Program, restore

CPU = torch.device("cpu")
MOST = 9
"""Tokens of the largest step."""


def random_function(rng: random.Random, given: list[str], prefix: str, calls: str | None = None) -> tuple[str, str]:
    """Nodes over values `[T, 6]`, some of which look into others' memory; their text, and the name of the last."""
    names, lines = list(given), []
    for i in range(rng.randint(3, 12)):
        made, a, b = f"%{prefix}{i}", rng.choice(names[-6:]), rng.choice(names[-6:])
        kind = rng.choice(["exp", "neg", "add", "cat", "view", "own", "turned", "cast", "call"])
        if kind == "exp":
            lines.append(f"{made} = aten.sigmoid.default(self={a})")
        elif kind == "neg":
            lines.append(f"{made} = aten.neg.default(self={a})")
        elif kind == "own":
            lines.append(f"{made} = aten.masked_fill.Scalar(self={a}, mask=%mask, value=0.5)")
        elif kind == "cat":
            lines += [
                f"{made}c = aten.cat.default(tensors=[{a}, {b}], dim=1)",
                f"{made} = aten.slice.Tensor(self={made}c, dim=1, start=3, end=9)",
            ]
        elif kind == "view":
            lines += [
                f"{made}v = aten.reshape.default(self={a}, shape=[T, 3, 2])",
                f"{made} = aten.reshape.default(self={made}v, shape=[T, 6])",
            ]
        elif kind == "turned":
            lines += [
                f"{made}t = aten.transpose.int(self={a}, dim0=0, dim1=1)",
                f"{made}n = aten.neg.default(self={made}t)",
                f"{made} = aten.transpose.int(self={made}n, dim0=0, dim1=1)",
            ]
        elif kind == "cast":
            dtype = rng.choice(["float32", "float64"])
            lines += [
                f"{made}w = aten.to.dtype(self={a}, dtype={dtype})",
                f"{made} = aten.to.dtype(self={made}w, dtype=float32)",
            ]
        elif kind == "call" and calls is not None:
            other = f"{made}o"
            lines += [f"{made}, {other} = call {calls}(x={a}, y={b}, mask=%mask)"]
            names.append(other)
        else:
            lines.append(f"{made} = aten.add.Tensor(self={a}, other={b})")
        names.append(made)
    return "\n".join(lines), names[-1]


def random_graph(seed: int) -> Graph:
    rng = random.Random(seed)
    block, last = random_function(rng, ["%x", "%y"], "a")
    second = rng.choice([last, "%x", "%a0", "%y"])
    main, end = random_function(rng, ["%x", "%y"], "m", calls="inner")
    inputs = "inputs { %x: float32[T, 6]  %y: float32[T, 6]  %mask: bool[T, 6] }"
    return parse_graph(
        f"symbols {{ T: 1.. }} {inputs} block inner {{ {inputs} {block} return {last}, {second} }} "
        f"main {{ {main} return end={end} }}"
    )


def placed(graph: Graph) -> Program:
    program = restore(graph, device=CPU)
    addresses = step_memory.addresses_of(graph, target_of(CPU), {"T": MOST})
    program.place(addresses, torch.full((addresses.num_bytes,), 0xFF, dtype=torch.uint8))
    return program


@pytest.mark.parametrize("seed", range(60))
def test_random_graphs(seed: int) -> None:
    graph = random_graph(seed)
    found, expected = placed(graph), restore(graph, device=CPU)

    for tokens in (MOST, 1, 4, 4):
        given = {"x": torch.randn(tokens, 6), "y": torch.randn(tokens, 6), "mask": torch.rand(tokens, 6) > 0.5}
        assert torch.equal(found(**given)["end"], expected(**given)["end"])


def test_outputs_are_the_caller_s() -> None:
    """They are there after the next step."""
    program = placed(parse_graph(
        "symbols { T: 1.. } inputs { %x: float32[T, 6] } main { %a = aten.neg.default(self=%x) return end=%a }"
    ))  # fmt: skip
    x = torch.randn(2, 6)
    first = program(x=x)["end"]

    program(x=torch.zeros(2, 6))

    assert torch.equal(first, -x)


def test_values_lie_at_their_addresses() -> None:
    graph = parse_graph(
        "symbols { T: 1.. } inputs { %x: float32[T, 6] } "
        "main { %a = aten.neg.default(self=%x) %b = aten.neg.default(self=%a) return end=%b }"
    )
    program = restore(graph, device=CPU)
    addresses = step_memory.addresses_of(graph, target_of(CPU), {"T": MOST})
    memory = torch.zeros(addresses.num_bytes, dtype=torch.uint8)
    program.place(addresses, memory)
    x = torch.randn(3, 6)
    program(x=x)

    assert torch.equal(memory[addresses.main["a"] :][: 3 * 6 * 4].view(torch.float32).view(3, 6), -x)


def test_a_step_beyond_the_planned_sizes_is_a_bug() -> None:
    program = placed(random_graph(0))
    given = {"x": torch.randn(MOST + 1, 6), "y": torch.randn(MOST + 1, 6), "mask": torch.rand(MOST + 1, 6) > 0.5}

    with pytest.raises(AssertionError, match=f"T is {MOST + 1}, and addresses hold up to {MOST}"):
        program(**given)
