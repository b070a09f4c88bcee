"""A graph as launches against the program of torch: the same kernels over the same grids, with the same numbers.

Both work on the same memory, so that even addresses are equal. Torch's program runs on a CPU with the records of a GPU,
and each of its launches is noted instead of made: what would be noted is what `precast.kernels.gpu_launch` launches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch

pytest.importorskip("cuda.bindings")

from precast.builder.build import build
from precast.ir.graph import symbols
from precast.ir.graph.schema import Arg, Block, Call, Const, Graph, Node, Ref, TensorType, Value
from precast.ir.memory import caches
from precast.ir.memory.addresses import Addresses
from precast.kernels import registry, step_memory
from precast.kernels.dtypes import BY_NAME
from precast.kernels.gpu_launch import At, _Given
from precast.kernels.launch import Launched
from precast.kernels.records import Stride
from precast.kernels.registry import Implementation
from precast.kernels.use import GPU, Use
from precast.loader.device import Buffer
from precast.loader.driver.coverage import covered, most_sizes
from precast.loader.driver.placed import ACTIVATIONS, OUTPUT, WORKSPACE, NotCoveredError
from precast.loader.driver.program import NativeProgram
from precast.loader.placement import Placement, bind_world
from precast.loader.program.restore import restore
from precast.loader.sizing import EngineLimits
from precast.loader.torch_device import CpuDevice

_DENSE: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _DENSE,
    "gemma3_text": {
        **_DENSE, "sliding_window": 16, "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    "qwen3_moe": {
        **_DENSE, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True,
    },
    "bamba": {
        **{name: value for name, value in _DENSE.items() if name != "head_dim"}, "attn_layer_indices": [1],
        "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_expand": 2,
    },
}  # fmt: skip
LIMITS = EngineLimits(max_num_seqs=32, max_num_tokens=128, max_seq_len=64)
STEPS = ((1, 1), (2, 2), (7, 3), (9, 1), (16, 16), (33, 32), (128, 5))
"""Tokens and sequences."""
PAGES = 6


class Noted(NamedTuple):
    """A launch that would be made."""

    kernel: str
    constants: tuple[tuple[str, object], ...]
    grid: tuple[int, ...]
    values: tuple[object, ...]


class Model(NamedTuple):
    """A graph with memory for all of it."""

    graph: Graph
    program: NativeProgram
    addresses: Addresses
    tensors: dict[str, torch.Tensor]
    activations: torch.Tensor
    workspace: torch.Tensor


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return made(request.param, FAMILIES[request.param], tmp_path_factory.mktemp("bundle"))


def made(family: str, config: Mapping[str, Any], folder: Path) -> Model:
    from transformers import AutoConfig

    opened = build(AutoConfig.for_model(family, **config), folder / "tiny.bundle", dtype="bfloat16")
    graph = bind_world(opened.graph, Placement(0, 1, 1, CpuDevice()))
    graph = msgspec.structs.replace(graph, caches=caches.with_slabs(graph.caches))
    program, addresses = covered(graph, GPU, LIMITS)
    sizes = {pool.pages: PAGES for pool in graph.caches.pools}
    params = ((param.name, param.type) for param in graph.params)
    others = ((value.name, value.type) for value in (*graph.constants, *caches.tensors(graph.caches)))
    tensors = {
        name: torch.zeros([symbols.evaluate(size, sizes) for size in kind.shape], dtype=BY_NAME[kind.dtype])
        for name, kind in (*params, *others)
    }
    activations = torch.empty(addresses.num_bytes, dtype=torch.uint8)
    workspace = torch.empty(program.workspace_bytes(most_sizes(graph, LIMITS)), dtype=torch.uint8)
    return Model(graph, program, addresses, tensors, activations, workspace)


def inputs_of(graph: Graph, num_tokens: int, num_seqs: int) -> dict[str, torch.Tensor]:
    sizes = {symbol.name: 8 for symbol in graph.symbols} | {"T": num_tokens, "B": num_seqs, "R": num_seqs}
    return {
        value.name: torch.zeros([symbols.evaluate(size, sizes) for size in value.type.shape],
                                dtype=BY_NAME[value.type.dtype])
        for value in graph.inputs
    }  # fmt: skip


def noted_by_torch(model: Model, inputs: Mapping[str, torch.Tensor]) -> tuple[list[Noted], torch.Tensor]:
    """What the program of torch launches, and its logits."""
    found: list[Noted] = []

    def choose(use: Use) -> Sequence[Implementation]:
        return [each._replace(function=noting(each.function)) for each in registry.implementations(use)]

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        if not isinstance(function, Launched):
            return function  # a view, or what no step of these sizes runs

        def note(*, sizes: Sequence[int] = (), out: Any = (), **tensors: Any) -> None:
            outs = (out,) if isinstance(out, torch.Tensor) else out
            tensors |= {f"out.{i}": each for i, each in enumerate(outs)}
            for name, listed in list(tensors.items()):
                if isinstance(listed, (list, tuple)):
                    tensors |= {f"{name}.{i}": each for i, each in enumerate(listed)}
            tensors["workspace"] = model.workspace
            places = {expr: i for i, expr in enumerate(function.expressions)}
            for launch in function._launches:
                given = _Given(launch, places)
                grid = tuple(given.grid(sizes))
                if 0 not in grid:
                    values = given.addresses(tensors, sizes) + given.numbers(tensors, sizes)
                    args = tuple(values[arg.place] if isinstance(arg, At) else arg for arg in given.args)
                    found.append(Noted(launch.kernel, tuple(launch.constants.items()), grid, args))

        return note

    cpu = torch.device("cpu")
    program = restore(model.graph, device=cpu, choose=choose, target=GPU)
    program.bind(model.tensors)
    program.place(model.addresses, model.activations)
    return found, program(**inputs)["logits"]


def noted_by_driver(model: Model, inputs: Mapping[str, torch.Tensor], logits: torch.Tensor) -> Iterator[Noted]:
    """What the driver's program launches, with its logits where torch's are."""
    graph = model.graph
    memory = {name: buffer_of(tensor) for name, tensor in (*model.tensors.items(), *inputs.items())}
    memory[ACTIVATIONS], memory[WORKSPACE] = buffer_of(model.activations), buffer_of(model.workspace)
    memory[OUTPUT + graph.outputs["logits"]] = buffer_of(logits)
    tokens, rows = inputs["input_ids"].shape[1], len(inputs["logit_rows"])
    pages = {pool.pages: PAGES for pool in graph.caches.pools}
    sizes = {symbol.name: 8 for symbol in graph.symbols} | pages | {"T": tokens, "B": rows, "R": rows}
    ready, outputs = model.program.ready(sizes, memory, model.addresses)
    assert outputs["logits"].layout.shape == logits.shape
    for each in ready:
        yield Noted(each.launch.kernel, tuple(each.launch.constants.items()), each.grid, each.values)


def buffer_of(tensor: torch.Tensor) -> Buffer:
    names = {dtype: name for name, dtype in BY_NAME.items()}
    return Buffer(tensor.data_ptr(), names[tensor.dtype], tuple(tensor.shape), tensor.stride(), tensor)


@pytest.mark.parametrize(("num_tokens", "num_seqs"), STEPS)
def test_launches_are_those_of_torch(model: Model, num_tokens: int, num_seqs: int) -> None:
    inputs = inputs_of(model.graph, num_tokens, num_seqs)

    expected, logits = noted_by_torch(model, inputs)
    found = list(noted_by_driver(model, inputs, logits))

    assert len(expected) > 10
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == theirs


def test_calls_whose_arguments_lie_otherwise_share_nothing() -> None:
    """Of two calls of a block one takes an exchanged value first, and the other one second."""

    def square(name: str) -> Value:
        return Value(name, TensorType("bfloat16", (64, 64)))

    def node(op: str, out: str, **args: Arg) -> Node:
        return Node(f"aten.{op}", args, (square(out),))

    block = Block(
        "f", (square("i"), square("j")), (), (), (node("add.Tensor", "o", self=Ref("i"), other=Ref("j")),), ("o",)
    )
    main = (
        node("exp.default", "a", self=Ref("x")),
        node("transpose.int", "t", self=Ref("a"), dim0=Const(0), dim1=Const(1)),
        Call("f", {"i": "t", "j": "x"}, (square("p"),)),
        Call("f", {"j": "t", "i": "x"}, (square("q"),)),
        node("add.Tensor", "z", self=Ref("p"), other=Ref("q")),
    )
    graph = Graph((), (square("x"),), (), (), (block,), main, {"logits": "z"})
    program = NativeProgram(graph, GPU.without_torch, {"T": 4, "B": 4, "R": 4})
    addresses = step_memory.addresses_of(graph, GPU.without_torch, {})
    names = ("x", ACTIVATIONS, WORKSPACE, OUTPUT + "z")
    memory = {name: Buffer(1 << 24 + i, "bfloat16", (64, 64), (64, 1), None) for i, name in enumerate(names)}

    _, first, second, _ = program.ready({}, memory, addresses)[0]

    strides = [
        [value for arg, value in zip(each.launch.args, each.values, strict=True) if isinstance(arg, Stride)]
        for each in (first, second)
    ]
    assert strides[0] != strides[1]


def test_addresses_hold_for_the_largest_step(model: Model) -> None:
    most = most_sizes(model.graph, LIMITS)
    assert model.addresses == step_memory.addresses_of(model.graph, GPU, most)


def test_an_op_that_torch_computes_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotCoveredError, match=r"aten\.max\.dim of bfloat16 is computed by torch\.max\.dim"):
        made("phimoe", {**_DENSE, "num_local_experts": 4}, tmp_path)
