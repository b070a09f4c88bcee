"""Steps as graphs: what is captured, what a replay computes, and what must not leak, on the CPU and on a GPU.

On the CPU a capture records what torch does, op by op, and what reads the host there cuts a step into pieces.
"""

from __future__ import annotations

import pytest
import torch
from tiny import VOCAB
from tiny_engine import SIZES, Interrupts, engine_on

from precast.loader.device import Device
from precast.loader.engine.engine import Engine
from precast.loader.engine.params import SamplingParams
from precast.loader.run.capture import Memory, Size
from precast.loader.torch_device import open_device, unowned

PROMPTS = [[5], [7, 7, 30, 2, 41], list(range(3, 40)), [9] * 13]
GREEDY = SamplingParams(max_tokens=20)
DRAWN = SamplingParams(max_tokens=20, temperature=0.9, top_p=0.9, top_k=30, seed=3)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Device:
    return open_device(request.param)


def answers(engine: Engine, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [output.token_ids for output in engine.generate(PROMPTS, params)]


def expected(device: Device, params: SamplingParams = GREEDY) -> list[list[int]]:
    """The answers of an engine that captures nothing and waits for each step."""
    return answers(engine_on(device, sizes=(), runs_ahead=False), params)


# --- the same tokens -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("runs_ahead", [False, True], ids=["waits", "ahead"])
@pytest.mark.parametrize("when", ["off", "before", "meanwhile"])
@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_tokens_do_not_depend_on_capture_and_on_running_ahead(
    device: Device, params: SamplingParams, when: str, runs_ahead: bool
) -> None:
    engine = engine_on(device, sizes=() if when == "off" else SIZES, runs_ahead=runs_ahead)
    if when == "before":
        engine.wait_until_captured()
    assert answers(engine, params) == expected(device, params)
    stats = engine.stats
    replayed = stats.captured_steps + stats.piecewise_steps
    assert replayed + stats.eager_steps == stats.steps
    assert bool(replayed) == (when != "off")
    # Of the whole, only the chunk of more tokens than any size.
    assert stats.eager_reasons == {"off": {"capture is off": stats.steps}, "before": {LARGE: 1}}.get(
        when, {LARGE: 1, "not captured yet": stats.eager_steps - 1}
    )


LARGE = "more tokens than any captured size"


def test_a_replay_gives_the_bits_of_the_same_step_op_by_op(device: Device) -> None:
    """A captured step of 8 tokens, then some of 2; and the program called on the very places that each replay read."""
    engine = engine_on(device, sizes=(2, 8), runs_ahead=False)
    engine.wait_until_captured()
    for prompt in PROMPTS[:2]:
        engine.submit(prompt, GREEDY)
    runner = engine._runner
    _, memory, _ = runner.opened()
    seen = []
    for num_tokens in (6, 2, 2, 2, 2):
        before = memory.arena.clone()
        engine.step()
        after, drawn = memory.arena.clone(), runner._drawn.clone()
        memory.arena.copy_(before)
        with torch.inference_mode():
            for call in runner._pieces(runner.captures.size_for(num_tokens) or Size(0, 0)):
                call.replay()
        seen.append((torch.equal(after, memory.arena), torch.equal(drawn, runner._drawn)))
        memory.arena.copy_(after)
    assert seen == [(True, True)] * 5
    assert engine.stats.eager_steps == 0


def test_every_size_serves_what_fits_it(device: Device) -> None:
    """A prompt of each length, alone: padding of up to half a step changes nothing."""
    for length in range(1, 33):
        prompt = [(3 * i + length) % VOCAB for i in range(length)]
        engine = engine_on(device)
        engine.wait_until_captured()
        (found,) = engine.generate([prompt], SamplingParams(max_tokens=3))
        (plain,) = engine_on(device, sizes=(), runs_ahead=False).generate([prompt], SamplingParams(max_tokens=3))
        assert found.token_ids == plain.token_ids
        assert engine.stats.eager_steps == 0
        assert engine.stats.tokens_padded == min(size for size in SIZES if size >= length) - length


# --- padding and empty slots -----------------------------------------------------------------------------------


def test_what_places_hold_beyond_a_step_changes_nothing(device: Device) -> None:
    """Everything behind a step's own inputs is written over with padding, whatever a larger step left there."""
    engine = engine_on(device, runs_ahead=False)
    engine.wait_until_captured()
    _, _, places = engine._runner.opened()
    for tensor in places.widest.tensors.values():
        tensor.fill_(31)
    assert answers(engine) == expected(device)


def test_captures_write_no_cache(device: Device) -> None:
    engine = engine_on(device)
    engine.generate([PROMPTS[2]], GREEDY)
    _, memory, _ = engine._runner.opened()
    before = memory.arena.clone()
    engine.wait_until_captured()
    assert torch.equal(memory.arena, before)


def test_captures_leave_what_was_drawn_for_the_step_in_flight(device: Device) -> None:
    """Captured between two steps of which one is in flight: its tokens are the next step's inputs."""
    engine = engine_on(device)
    request = engine.submit(PROMPTS[1], GREEDY)
    events = engine.step()
    assert engine._flights
    engine.wait_until_captured()
    while engine.has_work:
        events += engine.step()
    assert [token for event in events if event.request_id == request for token in event.token_ids] == expected(device)[
        1
    ]


# --- sizes -----------------------------------------------------------------------------------------------------


def test_the_largest_is_captured_first_and_a_step_takes_the_least_that_is_near(device: Device) -> None:
    engine = engine_on(device)
    runner = engine._runner
    sizes = [None, (32, 8), (32, 8), (2, 2), (4, 4)]
    found = [runner.captures.size_for(count) for count in (1,)]
    for tokens in (16, 20, 2, 3):
        if not runner.captures.num_captured or tokens < 16:
            runner.capture_next()
        if tokens == 2:  # 1 came before it
            runner.capture_next()
        found.append(runner.captures.size_for(tokens))
    assert found == sizes
    assert runner.captures.size_for(33) is None
    assert runner.captures.size_for(15) is None, "more than twice its tokens"


# --- what goes wrong -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [1, 4, 5, 8, 9, 13])
def test_an_interrupted_capture_is_tried_again(device: Device, call: int) -> None:
    engine = engine_on(device, choose=Interrupts(KeyboardInterrupt(), call))
    with pytest.raises(KeyboardInterrupt):
        engine.wait_until_captured()
    pending = engine.stats.graphs_pending
    engine.wait_until_captured()
    assert pending > 0
    assert engine.stats.graphs == len(SIZES)
    assert answers(engine) == expected(device)


@pytest.mark.parametrize("call", [2, 4], ids=["warm-up", "capture"])
def test_out_of_memory_ends_capturing_and_serving_goes_on(device: Device, call: int) -> None:
    engine = engine_on(device, choose=Interrupts(torch.OutOfMemoryError("no memory"), call))
    engine.wait_until_captured()
    stats = engine.stats
    assert (stats.graphs, stats.graphs_pending) == (0, 0)
    assert answers(engine) == expected(device)
    assert "memory ran out for graphs" in engine.stats.eager_reasons


def test_a_capture_that_fails_between_steps_is_said_once_and_serving_goes_on(
    device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_on(device, choose=Interrupts(RuntimeError("not in a capture\nmore lines"), 11))
    assert answers(engine) == expected(device)
    assert [record.getMessage() for record in caplog.records] == [
        "warning: capture failed: a step of 32 tokens: not in a capture"
    ]
    assert engine.stats.graphs_pending == 0
    assert engine.stats.eager_reasons["capture failed"] > 0


def test_a_capture_that_fails_as_it_is_waited_for_is_raised(device: Device) -> None:
    engine = engine_on(device, choose=Interrupts(RuntimeError("not in a capture"), 4))
    with pytest.raises(RuntimeError, match="not in a capture"):
        engine.wait_until_captured()
    assert engine.stats.graphs_pending == len(SIZES)
    engine.wait_until_captured()
    assert answers(engine) == expected(device)


def test_a_replay_for_inputs_elsewhere_is_an_error(device: Device) -> None:
    engine = engine_on(device)
    engine.wait_until_captured()
    captures = engine._runner.captures
    size = captures.size_for(1)
    assert size is not None
    with pytest.raises(RuntimeError, match="a step of 1 tokens was captured for inputs at 0x"):
        captures.replay(size, Memory(64, 1))


def test_a_program_bound_anew_is_not_replayed_on_its_old_tensors(device: Device) -> None:
    engine = engine_on(device)
    engine.wait_until_captured()
    program, memory, _ = engine._runner.opened()
    program.bind({name: tensor.clone() for name, tensor in memory.tensors.items()})
    with pytest.raises(RuntimeError, match="bound to other tensors"):
        engine.generate([[5]], GREEDY)


def test_two_engines_share_nothing(device: Device) -> None:
    one, other = engine_on(device), engine_on(device, seqs=3)
    one.wait_until_captured()
    running = one.stream(PROMPTS[1], GREEDY)
    first = [next(running).token_ids[0] for _ in range(3)]
    other.wait_until_captured()
    assert answers(other) == expected(device)
    other.close()
    assert first + [event.token_ids[0] for event in running] == expected(device)[1]


def test_a_closed_engine_gives_up_its_graphs(device: Device) -> None:
    engine = engine_on(device)
    engine.wait_until_captured()
    engine.close()
    assert (engine._runner.captures.num_captured, engine._runner.captures.num_pending) == (0, 0)


def test_pieces_are_cut_where_the_host_is_read() -> None:
    """On a CPU attention reads its lengths: three layers make four pieces, with a call between each two."""
    engine = engine_on(open_device("cpu"), sizes=(4,))
    engine.wait_until_captured()
    assert engine._runner.captures.num_pieces == 4
    engine.generate([[5]], GREEDY)
    assert engine.stats.captured_steps == 0
    assert engine.stats.piecewise_steps == 0, "one token takes no size of four"
    engine.generate([[5, 6, 7]], GREEDY)
    assert engine.stats.piecewise_steps == 1


@pytest.mark.gpu
def test_a_step_without_such_calls_is_one_graph() -> None:
    engine = engine_on(open_device("cuda"), sizes=(4,))
    engine.wait_until_captured()
    assert engine._runner.captures.num_pieces == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_unowned_memory_is_the_same_memory(dtype: torch.dtype) -> None:
    tensor = torch.arange(24, device="cuda").reshape(4, 6).to(dtype)[1:, 1:4]
    same = unowned(tensor)
    assert (same.data_ptr(), same.shape, same.stride(), same.dtype) == (
        tensor.data_ptr(), tensor.shape, tensor.stride(), dtype,
    )  # fmt: skip
    assert torch.equal(same, tensor)


def test_what_reads_the_host_cannot_be_captured_on_a_cpu_either() -> None:
    device = open_device("cpu")
    x = torch.arange(3)
    for reads in (lambda: x.nonzero(), lambda: x[x > 1], lambda: bool(x.sum() > 1)):
        with pytest.raises(RuntimeError, match="reads on the host"), device.capture():
            reads()
    with device.capture() as graph:
        y = x[torch.tensor([2, 0])] + 1
    x += 10
    graph.replay()
    assert y.tolist() == [13, 11]
