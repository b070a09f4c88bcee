"""Faults that systems of this kind had, one test for each, on the CPU and on a GPU.

Others are caught beside what they belong to: buffers between pieces in `../program/test_pieces.py`, requests whose step
is in flight in `../engine/test_ahead.py`, replays on other addresses and what two engines share in `test_capture.py`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest
import torch
from tiny import random_weights, tiny_graph
from tiny_engine import SIZES, WEIGHTS, Interrupts, engine_on, poison

from precast.ir.graph import symbols
from precast.ir.graph.schema import Graph, TensorType, Value
from precast.kernels.choices import runnable
from precast.kernels.registry import Implementation, function_of, implementations
from precast.kernels.use import Use
from precast.loader.device import Device
from precast.loader.engine.engine import Engine
from precast.loader.engine.params import SamplingParams
from precast.loader.program.instructions import HostCall
from precast.loader.program.restore import Program
from precast.loader.run.capture import Size
from precast.loader.run.steps import Ticket
from precast.loader.schedule.requests import Step
from precast.loader.torch_device import open_device

PROMPTS = [[5, 6, 7], [7, 7, 30, 2, 41], list(range(3, 26))]
"""Together they have no more tokens than the largest size."""
GREEDY = SamplingParams(max_tokens=8)
NUM_LAYERS, NUM_BLOCKS = 3, 2


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Device:
    return open_device(request.param)


def answers(engine: Engine) -> list[list[int]]:
    """All together, and then the second one alone."""
    return [output.token_ids for prompts in (PROMPTS, PROMPTS[1:2]) for output in engine.generate(prompts, GREEDY)]


def expected(device: Device, **options: Any) -> list[list[int]]:
    """The answers of an engine that captures nothing and waits for each step."""
    return answers(engine_on(device, sizes=(), runs_ahead=False, **options))


# --- warm-up, capture, replay ------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [2, NUM_BLOCKS + 1, NUM_BLOCKS + 3], ids=["warming up", "warmed up", "half captured"])
def test_what_was_only_warmed_up_is_not_taken_for_captured(device: Device, call: int) -> None:
    """A known fault: entries created during warm-up and taken for captured."""
    engine = engine_on(device, sizes=(4,), choose=Interrupts(KeyboardInterrupt(), call))
    with pytest.raises(KeyboardInterrupt):
        engine.wait_until_captured()
    assert (engine.stats.graphs, engine.stats.graphs_pending) == (0, 1)
    engine.submit([5, 6, 7], GREEDY)
    engine.step()
    assert engine.stats.eager_reasons == {"not captured yet": 1}


@pytest.mark.parametrize("call", [NUM_BLOCKS, NUM_BLOCKS + 2], ids=["warm-up", "capture"])
def test_ctrl_c_in_a_capture_between_steps_loses_nothing(device: Device, call: int) -> None:
    """Steps 1 to 3 run op by op, and the second one's call hands out the first token; the third one's captures, while
    its tokens are in flight, and is interrupted.

    The capture is tried again at the next step, and what was drawn is the next step's input all the same.
    """
    engine = engine_on(device, choose=Interrupts(KeyboardInterrupt(), 3 * NUM_LAYERS + call))
    number = engine.submit(PROMPTS[1], GREEDY)
    events = [*engine.step(), *engine.step()]
    assert [len(event.token_ids) for event in events] == [1]
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert (engine.stats.graphs, engine.stats.graphs_pending) == (0, len(SIZES))
    while engine.has_work:
        events += engine.step()
    assert [token for event in events if event.request_id == number for token in event.token_ids] == expected(device)[1]
    engine.wait_until_captured()
    assert (engine.stats.graphs, engine.stats.graphs_pending) == (len(SIZES), 0)


def test_out_of_memory_leaves_fewer_sizes_and_is_said_once(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    """Memory runs out as the third size is warmed up: two stay, and what fits neither runs op by op."""
    call = 2 * (NUM_BLOCKS + NUM_LAYERS) + 1
    engine = engine_on(device, choose=Interrupts(torch.OutOfMemoryError("no memory\nmore lines"), call))
    engine.wait_until_captured()
    assert (engine.stats.graphs, engine.stats.graphs_pending) == (2, 0)
    assert answers(engine) == expected(device)
    engine.wait_until_captured()
    assert [record.getMessage() for record in caplog.records] == [
        "warning: memory ran out for graphs: a step of 2 tokens: no memory"
    ]
    stats = engine.stats
    assert stats.eager_reasons == {"memory ran out for graphs": stats.eager_steps}
    assert stats.captured_steps + stats.piecewise_steps > 0


def test_no_step_runs_op_by_op_in_silence(device: Device) -> None:
    """A known fault: silent eager fallback. Each such step is counted under its reason, and there are no others."""
    engine = engine_on(device, sizes=(2, 32))
    engine.wait_until_captured()
    engine.generate([[5] * 40], GREEDY)
    engine.generate([[5] * 9, [5] * 9], SamplingParams(max_tokens=1))
    engine.generate([[5] * 9], SamplingParams(max_tokens=1))
    engine.logits([5])
    stats = engine.stats
    assert stats.eager_reasons == {"more tokens than any captured size": 1, "no captured size is near enough": 1}
    assert stats.eager_steps == 2
    assert stats.captured_steps + stats.piecewise_steps == stats.steps - 2


# --- the hot path ------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_replayed_steps_wait_for_no_device_and_ask_for_no_memory(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two known faults: full-device synchronisation after each replay; memory probes left in the hot path.

    Nor is anything allocated, captured, or a stream or event made. On a GPU torch refuses what waits for it, too.
    """
    engine, right = engine_on(device), expected(device)
    engine.wait_until_captured()
    probes = ("mem_get_info", "memory_stats", "memory_allocated", "memory_reserved", "max_memory_allocated")
    refused = {device: ("synchronize", "free_bytes", "alloc", "capture", "pool", "stream", "event"),
               torch.cuda: ("synchronize", "empty_cache", *probes)}  # fmt: skip
    for owner, names in refused.items():
        for name in names:
            monkeypatch.setattr(owner, name, refusing(name))
    try:
        if device.kind == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        found = answers(engine)
    finally:
        if device.kind == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert found == right
    assert engine.stats.eager_steps == 0


def refusing(name: str) -> Callable[..., None]:
    """A function that nobody may call."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError(f"{name} was called")

    return refuse


def test_all_pieces_are_captured_on_one_stream_and_from_one_pool(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A known fault: side streams inside captured pieces. On a GPU each op says on which stream it runs, too."""
    used: list[tuple[object, object]] = []
    capture = device.capture

    def noted(stream: object, pool: object) -> Any:
        used.append((stream, pool))
        return capture(stream, pool)

    monkeypatch.setattr(device, "capture", noted)
    if device.kind == "cpu":  # whose streams and pools are None
        stream = object()
        monkeypatch.setattr(device, "capture_stream", lambda: stream)
        monkeypatch.setattr(device, "pool", object)
    streams: set[object] = set()
    engine = engine_on(device, choose=watching(lambda: streams.add(capturing_stream(device))))
    engine.wait_until_captured()
    assert len(used) == len(SIZES) * engine._runner.captures.num_pieces
    assert set(used) == {used[0]}
    assert None not in used[0]
    if device.kind == "cuda":
        assert streams == {None, used[0][0]}


def test_a_pool_without_a_graph_is_not_used_again(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch gives up a pool with its last graph: what is captured after an interrupted first one has a new one."""
    used: list[object] = []
    capture = device.capture

    def noted(stream: object, pool: object) -> Any:
        used.append(pool)
        return capture(stream, pool)

    monkeypatch.setattr(device, "capture", noted)
    if device.kind == "cpu":  # whose pools are None
        monkeypatch.setattr(device, "pool", object)
    interrupts = Interrupts(KeyboardInterrupt(), NUM_BLOCKS + NUM_LAYERS)
    engine = engine_on(device, choose=interrupts)
    for left in (2 * (NUM_BLOCKS + NUM_LAYERS), 0):  # as the second size is captured; never
        with pytest.raises(KeyboardInterrupt):
            engine.wait_until_captured()
        interrupts.left = left
    engine.wait_until_captured()
    first, second = dict.fromkeys(used)
    assert used == [first] * used.count(first) + [second] * used.count(second)


def capturing_stream(device: Device) -> object:
    """The stream of the capture that is under way, if one is."""
    if device.kind == "cpu" or not torch.cuda.is_current_stream_capturing():
        return None
    return torch.cuda.current_stream()


def watching(look: Callable[[], object]) -> Callable[[Use], list[Implementation]]:
    """For `choose`: looks before each op runs."""

    def choose(use: Use) -> list[Implementation]:
        return [each._replace(function=looked(each.function)) for each in implementations(use)]

    def looked(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(**arguments: Any) -> Any:
            look()
            return function(**arguments)

        return run

    return choose


@pytest.mark.parametrize("fails", [False, True])
def test_no_garbage_is_collected_in_a_capture(device: Device, fails: bool) -> None:
    """What is freed there may belong to the GPU, which a capture doesn't survive."""
    enabled: set[bool] = set()
    look, raising = watching(lambda: enabled.add(gc.isenabled())), Interrupts(KeyboardInterrupt(), 5 if fails else 0)
    engine = engine_on(device, choose=lambda use: look(use) if use.node.op != "precast.rms_norm" else raising(use))
    assert gc.isenabled()
    if fails:
        with pytest.raises(KeyboardInterrupt):
            engine.wait_until_captured()
    else:
        engine.wait_until_captured()
    assert enabled == {False}
    assert gc.isenabled()


# --- inputs ------------------------------------------------------------------------------------------------------


class Watched:
    """A program whose inputs are noted as it is warmed up and cut into pieces."""

    def __init__(self, program: Program) -> None:
        self.program, self.seen = program, list[dict[str, torch.Tensor]]()

    @property
    def num_binds(self) -> int:
        """As `Program` has it."""
        return self.program.num_binds

    def __call__(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return self.program(**inputs)

    def warm_up(self, outputs: dict[str, torch.Tensor], **inputs: torch.Tensor) -> Iterator[HostCall]:
        """As `Program` has it."""
        self.seen.append(inputs)
        yield from self.program.warm_up(outputs, **inputs)

    def cut(self, outputs: dict[str, torch.Tensor], **inputs: torch.Tensor) -> Iterator[HostCall]:
        """As `Program` has it."""
        self.seen.append(inputs)
        yield from self.program.cut(outputs, **inputs)


@pytest.mark.parametrize("seqs", [1, 3, 4, 8])
def test_each_input_has_its_own_length_though_others_are_as_long(device: Device, seqs: int) -> None:
    """A known fault: a wrong guess of the dimension to narrow. With 4 tokens there are 4 bounds of 3 sequences, and of
    4 sequences as many lengths as tokens."""
    graph = tiny_graph(state=True)
    options: dict[str, Any] = {"graph": graph, "weights": random_weights(1, NUM_LAYERS), "seqs": seqs}
    watched: list[Watched] = []

    def wrap(program: Program) -> Watched:
        watched.append(Watched(program))
        return watched[0]

    engine = engine_on(device, sizes=(4,), wrap=wrap, **options)
    engine.wait_until_captured()
    rows = min(seqs, 4)
    for value in graph.inputs:
        if not value.name.startswith("page_indices"):
            shape = tuple(symbols.evaluate(size, {"T": 4, "B": rows, "R": rows}) for size in value.type.shape)
            assert [tuple(inputs[value.name].shape) for inputs in watched[0].seen] == [shape] * 2, value.name
    assert answers(engine) == expected(device, **options)
    assert engine.stats.piecewise_steps + engine.stats.captured_steps > 0


def test_an_input_that_was_added_reaches_captured_steps_by_name(device: Device) -> None:
    """A known fault: a positional shape that hides a keyword input. The added one stands first."""
    added = Value("rope_lengths", TensorType("int64", (1, "T")))
    graph: Graph = tiny_graph()
    graph = msgspec.structs.replace(graph, inputs=(added, *graph.inputs))
    watched: list[Watched] = []

    def wrap(program: Program) -> Watched:
        watched.append(Watched(program))
        return watched[0]

    engine = engine_on(device, graph=graph, wrap=wrap)
    engine.wait_until_captured()
    runner = engine._runner
    for inputs in watched[0].seen:
        layout = runner._layout_of(Size(inputs["input_ids"].shape[-1], inputs["kv_lens"].shape[0]))
        assert {name: tensor.data_ptr() for name, tensor in inputs.items() if name != "input_ids"} == {
            value.name: layout.tensors[value.name].data_ptr() for value in graph.inputs if value.name != "input_ids"
        }
    assert answers(engine) == expected(device)


# --- padding -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("garbage", [-1000, 1 << 30])
def test_unused_slots_with_garbage_lengths_are_emptied(device: Device, garbage: int) -> None:
    """Before each step all places hold garbage: lengths, bounds, pages, positions, seeds. A step sees none of it."""
    engine = engine_on(device)
    engine.wait_until_captured()
    runner = engine._runner
    _, _, places = runner.opened()
    launch = runner.launch

    def launched(step: Step, *rest: Any, **options: Any) -> Ticket:
        poison(places, garbage)
        ticket = launch(step, *rest, **options)
        size = step.num_tokens + ticket.padding
        layout = runner._layout_of(Size(size, min(size, 8)))
        for name, (length, _) in layout.padding.items():
            assert len(layout.tensors[name]) == length
            assert not (layout.tensors[name] == garbage).any(), name
        return ticket

    runner.launch = launched  # type: ignore[method-assign]
    assert answers(engine) == expected(device)
    assert engine.stats.eager_steps == 0
    assert engine.stats.tokens_padded > 0


@pytest.mark.parametrize("state", [False, True], ids=["pages", "states"])
def test_poisoned_padding_reaches_no_logits_and_no_cache(device: Device, state: bool) -> None:
    """Padding is token 0, whose embedding is NaN here: all that is computed of padded rows is NaN, and stays theirs."""
    weights = WEIGHTS if not state else random_weights(1, NUM_LAYERS)
    weights = weights | {"embed": weights["embed"].clone(), "head": weights["head"].clone()}
    weights["embed"][0], weights["head"][0] = float("nan"), 0
    options: dict[str, Any] = {"graph": tiny_graph(state=state), "weights": weights}
    right = expected(device, **options)
    assert not any(0 in answer for answer in right), "an answer has the poisoned token itself"
    engine = engine_on(device, **options)
    _, memory, _ = engine._runner.opened()
    memory.arena.zero_()
    engine.wait_until_captured()
    assert answers(engine) == right
    assert engine.stats.eager_steps == 0
    assert engine.stats.tokens_padded > 0
    assert not any(tensor.isnan().any() for tensor in memory.tensors.values())


# --- pieces on a GPU ---------------------------------------------------------------------------------------------


def host_attention(use: Use) -> Sequence[Implementation]:
    """For `choose`: attention by the implementation that reads its lengths on the host."""
    if use.node.op != "precast.paged_attention":
        return implementations(use)
    records = runnable(use.node.op, use.node.version, use.target)
    record = next(record for record in records if record.control == "host")
    return [Implementation({}, function_of(record), record.allocates, reads_host=True)]


@pytest.mark.parametrize("state", [False, True], ids=["pages", "states"])
def test_pieces_give_the_bits_of_the_same_step_op_by_op(device: Device, state: bool) -> None:
    """A step is cut in front of each attention. What pieces and calls leave to each other is poisoned before each
    replay, and each replay is compared with the program called on the very places that it read."""
    weights = WEIGHTS if not state else random_weights(1, NUM_LAYERS)
    engine = engine_on(
        device,
        sizes=(2, 8, 32),
        runs_ahead=False,
        choose=host_attention,
        graph=tiny_graph(state=state),
        weights=weights,
    )
    engine.wait_until_captured()
    runner = engine._runner
    assert runner.captures.num_pieces >= NUM_LAYERS + 1
    for prompt in PROMPTS[:2]:
        engine.submit(prompt, GREEDY)
    program, memory, _ = runner.opened()
    assert program._main._activations is not None
    _, activations = program._main._activations
    for num_tokens in (6, 2, 2, 2):
        size = runner.captures.size_for(num_tokens)
        assert size is not None
        activations.fill_(0xFF)
        with torch.inference_mode():
            for part in runner.captures._steps[size].parts:
                for result in part.results if isinstance(part, HostCall) else ():
                    result.fill_(float("nan"))
        before = memory.arena.clone()
        engine.step()
        after, drawn = memory.arena.clone(), runner._drawn.clone()
        memory.arena.copy_(before)
        with torch.inference_mode():
            for call in runner._pieces(size):
                call.replay()
        assert torch.equal(after, memory.arena)
        assert torch.equal(drawn[: size.num_seqs], runner._drawn[: size.num_seqs])
    assert engine.stats.eager_steps == 0
    assert engine.stats.piecewise_steps == 4
