"""Worlds of processes on a CPU: the tokens of one process, and a clean end whatever happens to one of them."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from file_server import serving
from lost_rank import lose_a_rank, lose_a_rank_whose_logits_are_wanted, lose_ranks_one_after_another
from tiny import random_weights, reference_answer, tiny_graph
from tiny_world import WEIGHTS, write, write_checkpoint

from precast.ir.errors import RequestError
from precast.loader.engine.engine import Engine
from precast.loader.engine.params import SamplingParams
from precast.loader.load import load
from precast.loader.world import ring as rings

PROMPTS = [[5], [9] * 17, [3, 1, 4, 1, 5, 9, 2, 6], [7, 7, 7], [40, 2] * 6]
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
DRAWN = [SamplingParams(max_tokens=10, temperature=1.5, seed=i, ignore_eos=True) for i in range(len(PROMPTS))]
LIMIT = 300
"""Seconds after which a test gives up on a process."""


@pytest.fixture(scope="module", autouse=True)
def one_thread_a_rank() -> Iterator[None]:
    """The machine that runs tests has few cores."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("world")
    write(path / "split.bundle")
    write(path / "state.bundle", tiny_graph(state=True, tp=True))
    write(path / "whole.bundle", tiny_graph())
    write(path / "mlp.bundle", tiny_graph(tp=True, mlp=True))
    write(path / "state-mlp.bundle", tiny_graph(state=True, tp=True, mlp=True))
    write_checkpoint(path / "ckpt")
    write_checkpoint(path / "mlp-ckpt", mlp=True)
    return path


def loaded(folder: Path, bundle: str = "split.bundle", *, device: str = "cpu", **options: Any) -> Engine:
    weights = folder / ("mlp-ckpt" if "mlp" in bundle else "ckpt")
    return load(folder / bundle, weights=weights, device=device, **options)


def tokens(engine: Engine, params: Any = GREEDY, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[list[int]]:
    return [output.token_ids for output in engine.generate(list(prompts), params)]


def expected(*, state: bool = False, mlp: bool = False) -> list[list[int]]:
    weights = random_weights(mlp=True) if mlp else WEIGHTS
    return [reference_answer(weights, prompt, 12, state=state) for prompt in PROMPTS]


def pid_of(engine: Engine, rank: int) -> int:
    lead = engine._runner._lead
    assert lead is not None
    assert lead._processes is not None
    return lead._processes[rank]


@pytest.mark.parametrize(
    ("world", "bundle", "slabs"),
    [
        ({"tp": 2}, "state.bundle", 10),
        ({"tp": 4}, "split.bundle", 14),
        ({"pp": 2}, "state.bundle", 10),
        ({"tp": 2, "pp": 2}, "split.bundle", 14),
    ],
    ids=str,
)
def test_ranks_give_the_tokens_of_one_process(world: dict[str, int], bundle: str, slabs: int, folder: Path) -> None:
    """With a cache that is too small for all prompts at once: pages are taken away, reused, and states are copied."""
    options: dict[str, Any] = {"max_num_tokens": 7, "max_num_seqs": 4, "cache_bytes": 1024 * slabs}
    with loaded(folder, bundle, **options) as alone:
        drawn, logits = tokens(alone, DRAWN), alone.logits(PROMPTS[1])
    with loaded(folder, bundle, **world, **options) as engine:
        wanted = expected(state=bundle == "state.bundle")
        assert tokens(engine) == wanted
        assert tokens(engine, DRAWN) == drawn
        assert engine.stats.preemptions > 0
        for _ in range(2):
            assert tokens(engine, prompts=PROMPTS[1:2]) == wanted[1:2]
        assert engine.stats.tokens_reused > 0
        torch.testing.assert_close(engine.logits(PROMPTS[1]), logits)
        num_ranks = world.get("tp", 1) * world.get("pp", 1)
        assert sorted(engine.timeline.to_dict()["ranks"]) == [str(rank) for rank in range(1, num_ranks)]
        processes = [pid_of(engine, rank) for rank in range(1, num_ranks)]
    for pid in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize(
    ("tp", "bundle", "slabs"), [(2, "state-mlp.bundle", 9), (2, "mlp.bundle", 9), (4, "mlp.bundle", 9)]
)
def test_ranks_with_sequences_of_their_own_give_the_tokens_of_one_process(
    tp: int, bundle: str, slabs: int, folder: Path
) -> None:
    """Each with a cache that is too small for all of its prompts at once; and of four ranks some have none."""
    options: dict[str, Any] = {"max_num_tokens": 7, "max_num_seqs": 4}
    wanted, prompts = expected(state="state" in bundle, mlp=True) * 2, PROMPTS * 2
    with loaded(folder, bundle, **options) as alone:
        drawn, logits = tokens(alone, DRAWN), alone.logits(PROMPTS[1])
    with loaded(folder, bundle, tp=tp, dp=tp, cache_bytes=1024 * slabs, **options) as engine:
        assert tokens(engine, prompts=prompts) == wanted
        assert engine.stats.preemptions > 0
        assert tokens(engine, DRAWN) == drawn
        reused = engine.stats.tokens_reused
        for _ in range(2):
            assert tokens(engine, prompts=PROMPTS[1:2]) == wanted[1:2]
        assert engine.stats.tokens_reused >= reused + 16
        torch.testing.assert_close(engine.logits(PROMPTS[1]), logits)
        assert engine.stats.slabs == tp * slabs


@pytest.mark.parametrize("capture", ["off", "background"])
def test_requests_that_come_and_go_on_ranks_with_sequences_of_their_own(capture: str, folder: Path) -> None:
    """Of all priorities, with prefixes in common, cancelled at any time: each answer is that of one process, as far as
    it came, and all pages come back."""
    draw, weights = random.Random(1), random_weights(mlp=True)
    options: dict[str, Any] = {"max_num_tokens": 9, "max_num_seqs": 2, "cache_bytes": 1024 * 13, "capture": capture}
    with loaded(folder, "state-mlp.bundle", tp=2, dp=2, **options) as engine:
        prompts: dict[int, list[int]] = {}
        found: dict[int, list[int]] = {}
        running: set[int] = set()
        while len(prompts) < 40 or running:
            if len(prompts) < 40 and draw.random() < 0.5:
                begin = draw.choice(PROMPTS)
                prompt = begin[: draw.randint(1, len(begin))] + [draw.randrange(48) for _ in range(draw.randrange(4))]
                params = SamplingParams(max_tokens=draw.randint(1, 14), ignore_eos=True)
                number = engine.submit(prompt, params, priority=draw.choice([0, 0, 0, 1]))
                prompts[number], found[number] = prompt, []
                running.add(number)
            if running and draw.random() < 0.05:
                engine.cancel(draw.choice(sorted(running)))
            for event in engine.step():
                found[event.request_id] += event.token_ids
                running -= {event.request_id} if event.finish_reason else set()
        for number, token_ids in found.items():
            assert token_ids == reference_answer(weights, prompts[number], len(token_ids), state=True)
        assert engine.stats.preemptions > 0
        engine.forget_prefixes()
        assert engine.stats.slabs_free == engine.stats.slabs == 26


def test_sequences_of_their_own_take_no_room_from_others(folder: Path) -> None:
    """Prompts that no cache of one rank holds together run together on two ranks."""
    options: dict[str, Any] = {"max_num_tokens": 16, "cache_bytes": 1024 * 10}
    prompts = [[5] * 15, [9] * 15]
    running = []
    for dp in (1, 2):
        with loaded(folder, "mlp.bundle", tp=2, dp=dp, **options) as engine:
            for prompt in prompts:
                engine.submit(prompt, SamplingParams(max_tokens=20, ignore_eos=True))
            most = 0
            while engine.has_work:
                engine.step()
                most = max(most, engine.stats.requests_running)
            running.append((most, engine.stats.preemptions > 0))
    assert running[1] == (2, False)
    assert running[0] != running[1]


@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_each_rank_reads_weights_from_a_server(axis: str, folder: Path) -> None:
    files = {f"m/{file.name}": file.read_bytes() for file in (folder / "ckpt").iterdir()}

    options: dict[str, Any] = {"device": "cpu", "weights_timeout": 60.0, axis: 2}

    with serving(files) as server, load(folder / "split.bundle", weights=f"{server.address}/m", **options) as engine:
        assert tokens(engine) == expected()


@pytest.mark.parametrize("world", [{"tp": 2}, {"pp": 2}, {"tp": 2, "dp": 2}], ids=str)
def test_the_order_of_a_step_leaves_before_the_tokens_of_the_step_before_are_waited_for(
    world: dict[str, int], folder: Path
) -> None:
    engine = loaded(folder, "mlp.bundle", **world)
    lead = engine._runner._lead
    assert lead is not None
    engine.submit([5], GREEDY)
    before, found = lead.num_orders, 0

    for step in range(1, 6):
        found += sum(len(event.token_ids) for event in engine.step())

        assert (lead.num_orders - before, found) == (step, step - 1)
    engine.close()


@pytest.mark.parametrize("world", [{"tp": 2}, {"pp": 2}], ids=str)
def test_captured_steps_run_on_all_ranks(world: dict[str, int], folder: Path) -> None:
    with loaded(folder, **world, max_num_tokens=16, capture="before") as engine:
        assert tokens(engine) == expected()
        stats = engine.stats
        assert (stats.graphs, stats.graphs_pending, stats.eager_steps) == (6, 0, 0)


def test_captured_steps_are_of_one_size_on_ranks_with_sequences_of_their_own(folder: Path) -> None:
    with loaded(folder, "mlp.bundle", tp=2, dp=2, max_num_tokens=16, max_num_seqs=4, capture="before") as engine:
        assert tokens(engine) == expected(mlp=True)
        stats = engine.stats
        assert (stats.graphs, stats.graphs_pending, stats.eager_steps) == (6, 0, 0)
        computed = stats.tokens_prefilled + stats.tokens_decoded
        assert (computed + stats.tokens_padded) % 2 == 0


@pytest.mark.parametrize("dp", [1, 2])
def test_ranks_on_other_hosts_get_orders_by_their_channel(
    dp: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rings, "create", lambda _: None)
    with loaded(folder, "mlp.bundle", tp=2, dp=dp, max_num_tokens=7) as engine:
        assert tokens(engine) == expected(mlp=True)


def needs_gpus(device: str = "cuda") -> None:
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA GPUs")


@pytest.mark.gpu
@pytest.mark.parametrize("capture", ["before", "background", "off"])
@pytest.mark.parametrize("world", [{"tp": 2}, {"pp": 2}], ids=str)
def test_two_gpus_give_the_tokens_of_one(world: dict[str, int], capture: str, folder: Path) -> None:
    needs_gpus()
    with loaded(folder, device="cuda", max_num_seqs=4, max_num_tokens=16) as alone:
        drawn = tokens(alone, DRAWN)
    options: dict[str, Any] = {**world, "max_num_seqs": 4, "max_num_tokens": 16, "capture": capture}
    with loaded(folder, "state.bundle", device="cuda", **options) as engine:
        assert tokens(engine) == expected(state=True)
    with loaded(folder, device="cuda", **options) as engine:
        assert tokens(engine) == expected()
        assert tokens(engine, DRAWN) == drawn
        assert (engine.stats.captured_steps > 0) == (capture != "off")
        assert (engine.stats.eager_steps > 0) == (capture != "before")


@pytest.mark.gpu
@pytest.mark.parametrize("capture", ["before", "background", "off"])
def test_two_gpus_with_sequences_of_their_own_give_the_tokens_of_one(capture: str, folder: Path) -> None:
    needs_gpus()
    options: dict[str, Any] = {"max_num_seqs": 4, "max_num_tokens": 16}
    with loaded(folder, "mlp.bundle", device="cuda", **options) as alone:
        drawn = tokens(alone, DRAWN)
    options |= {"tp": 2, "dp": 2, "capture": capture}
    with loaded(folder, "state-mlp.bundle", device="cuda", **options) as engine:
        assert tokens(engine) == expected(state=True, mlp=True)
    with loaded(folder, "mlp.bundle", device="cuda", **options) as engine:
        assert tokens(engine) == expected(mlp=True)
        assert tokens(engine, DRAWN) == drawn
        assert (engine.stats.captured_steps > 0) == (capture != "off")
        assert (engine.stats.eager_steps > 0) == (capture != "before")


@pytest.mark.gpu
def test_worlds_that_end_give_their_memory_back(folder: Path) -> None:
    """What all of the device has free after the second world is what it had after the first, but for a little."""
    needs_gpus()
    free, reserved = [], []
    for _ in range(3):
        with loaded(folder, device="cuda", tp=2, max_num_seqs=4, max_num_tokens=16) as engine:
            assert tokens(engine) == expected()
        free.append(torch.cuda.mem_get_info(0)[0])
        reserved.append(torch.cuda.memory_reserved(0))
    assert min(free[1:]) > free[0] - (32 << 20), f"free {free}, torch holds {reserved}"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_a_rank_that_is_lost_ends_the_world(axis: str, how: signal.Signals, device: str, folder: Path) -> None:
    if device == "cpu":
        lose_a_rank(folder, axis, how, device)
    else:
        in_a_process(lose_a_rank, folder, axis, how, device)


@pytest.mark.gpu
def test_worlds_that_lose_a_rank_give_their_memory_back(folder: Path) -> None:
    in_a_process(lose_ranks_one_after_another, folder)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_logits_are_not_given_when_a_rank_is_lost(device: str, folder: Path) -> None:
    if device == "cpu":
        lose_a_rank_whose_logits_are_wanted(folder, device)
    else:
        in_a_process(lose_a_rank_whose_logits_are_wanted, folder, device)


def in_a_process(call: Callable[..., None], *args: Any) -> None:
    """A GPU on which a kernel waits in vain must not keep this process from its own."""
    needs_gpus()
    process = multiprocessing.get_context("spawn").Process(target=call, args=args)
    process.start()
    process.join(LIMIT)
    process.kill()
    assert process.exitcode == 0


def test_a_port_that_is_taken(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RequestError, match=f"can't listen on port {port}") as error:
            loaded(folder, tp=2, world_port=port)
    assert error.value.code == "port-taken"


@pytest.mark.parametrize(
    ("bundle", "options", "message"),
    [
        ("split.bundle", {"tp": 3}, "tp is 3, and the bundle can be split over 1, 2, 4 ranks"),
        ("whole.bundle", {"tp": 2}, "tp is 2, and the bundle can be split over 1 ranks"),
        ("split.bundle", {"tp": 4, "ep": 3}, "ep is 3, and tp is 4: .*\n  fix: give an ep that divides tp"),
        ("split.bundle", {"pp": 9}, r"pp is 9, and the graph calls \d layers or parts of them: each stage takes"),
        ("whole.bundle", {"pp": 2}, "pp is 2, and the bundle was built without a plan of stages"),
        ("split.bundle", {"pp": 0}, "pp is 0, expected an integer of 1 to 1024"),
        ("mlp.bundle", {"tp": 4, "dp": 2}, "dp is 2, and tp is 4: .*; give 4, or 1"),
        ("mlp.bundle", {"dp": 2}, "dp is 2, and tp is 1: .*; give 1"),
        ("mlp.bundle", {"tp": 2, "pp": 2, "dp": 2}, "dp is 2, and pp is 2: stages share all sequences"),
        ("mlp.bundle", {"tp": 2, "dp": 0}, "dp is 0, expected an integer of 1 to 1024"),
        ("split.bundle", {"tp": 2, "dp": 2}, "nothing of this model's layers would stay split"),
        ("split.bundle", {"tp": 0}, "tp is 0, expected an integer of 1 to 1024"),
        ("split.bundle", {"tp": 2, "timeouts": {"joining": 3}}, "timeouts has 'joining', expected join, agree"),
        ("split.bundle", {"tp": 2, "world_port": 0}, "world_port is 0"),
    ],
)
def test_worlds_that_make_no_sense(bundle: str, options: dict[str, Any], message: str, folder: Path) -> None:
    with pytest.raises(RequestError, match=message) as error:
        loaded(folder, bundle, **options)
    assert error.value.code == "engine-option-invalid"


# --- processes that a launcher has started ---------------------------------------------------------------------------

RUN = "from precast.cli.main import main; main(prog_name='precast')"
LITTLE_MEMORY = f"""
from precast.loader.torch_device import CpuDevice
CpuDevice.free_bytes = lambda self: {{free}}
{RUN}"""


class Launcher:
    """Starts ranks as `torchrun` does, each with options of its own."""

    def __init__(self, num_ranks: int, port: int) -> None:
        self._world = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        self._processes: list[subprocess.Popen[str]] = []

    def start(self, rank: int, *arguments: str | Path, code: str = RUN) -> None:
        command = [sys.executable, "-P", "-c", code, "run", *map(str, arguments), "--device", "cpu"]
        self._processes.append(
            subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, **self._world, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
        )

    def ended(self) -> list[tuple[int, str, str]]:
        """Code, output and errors of each."""
        made = []
        for process in self._processes:
            out, err = process.communicate(timeout=LIMIT)
            made.append((process.returncode, out, err))
        return made

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    # Bound to a port, and not listening: whoever names it may listen there too, and nobody else is given it.
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        made = Launcher(2, held.getsockname()[1])
        try:
            yield made
        finally:
            made.kill()


def asked(folder: Path, bundle: str = "split.bundle") -> list[str | Path]:
    weights = folder / ("mlp-ckpt" if "mlp" in bundle else "ckpt")
    return [folder / bundle, "--weights", weights, "--token-ids", "5", "--max-tokens", "12", "--ignore-eos"]


@pytest.mark.parametrize("axis", [(), ("--pp", "2"), ("--dp", "2")], ids=["ranks", "stages", "own sequences"])
def test_ranks_that_a_launcher_has_started(axis: Sequence[str], folder: Path, launcher: Launcher) -> None:
    for rank in (0, 1):
        launcher.start(rank, *asked(folder, "mlp.bundle"), *axis, "--json")

    (code, out, err), follower = launcher.ended()

    assert (code, err, follower) == (0, "", (0, "", ""))
    answer = json.loads(out)
    assert answer["outputs"][0]["token_ids"] == expected(mlp=True)[0]
    assert list(answer["timeline"]["ranks"]) == ["1"]


def test_a_run_starts_the_processes_of_stages_itself(folder: Path) -> None:
    command = [
        sys.executable,
        "-P",
        "-c",
        RUN,
        "run",
        *map(str, asked(folder)),
        "--device",
        "cpu",
        "--pp",
        "2",
        "--json",
    ]

    ran = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)

    assert (ran.returncode, ran.stderr) == (0, "")
    assert json.loads(ran.stdout)["outputs"][0]["token_ids"] == expected()[0]


def test_a_launcher_has_started_too_few_for_all_stages(folder: Path, launcher: Launcher) -> None:
    launcher.start(0, *asked(folder), "--pp", "2", "--tp", "2")

    ((code, _, err),) = launcher.ended()

    assert code == 2
    assert re.search(r"tp is 2 and pp 2, and the launcher has started 2 processes|--tp 2", err)


def test_ranks_that_differ(folder: Path, launcher: Launcher) -> None:
    """All that differs is told at once, by every rank."""
    launcher.start(0, *asked(folder))
    launcher.start(1, *asked(folder, "state.bundle"), "--max-num-seqs", "3")
    for code, out, err in launcher.ended():
        assert (code, out) == (4, "")
        assert re.search("ranks differ in bundle: rank 0 sha256:.*, rank 1 sha256:.*; options: rank 0 .*, rank 1 ", err)
        assert "code: ranks-differ" in err


@pytest.mark.parametrize("free", [2048, 90_000])
def test_one_rank_with_less_memory(free: int, folder: Path, launcher: Launcher) -> None:
    """All take what it has room for; where that is too little, all refuse."""
    launcher.start(0, *asked(folder), "--json")
    launcher.start(1, *asked(folder), "--json", code=LITTLE_MEMORY.format(free=free))
    ended = launcher.ended()
    if free > 3000:
        assert [(code, err) for code, _, err in ended] == [(0, ""), (0, "")]
        assert json.loads(ended[0][1])["stats"]["slabs"] == free // 2 // 1024
        return
    for code, _, err in ended:
        assert code == 1
        assert "rank 1: the cache has 1 slabs" in err
        assert "; rank 0 bytes_free " in err
        assert "code: cache-too-small" in err


def test_a_rank_that_never_comes(folder: Path, launcher: Launcher) -> None:
    launcher.start(0, *asked(folder), "--timeout", "join=1")
    ((code, _, err),) = launcher.ended()
    assert code == 4
    assert "code: rank-missing" in err


def test_a_rendezvous_whose_port_is_taken(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        launcher = Launcher(2, port)
        try:
            launcher.start(0, *asked(folder))
            ((code, _, err),) = launcher.ended()
        finally:
            launcher.kill()
    assert code == 1
    assert f"127.0.0.1, port {port}: the port is taken" in err
    assert "code: port-taken" in err


GENERATE = """
import sys
import precast
with precast.load(sys.argv[1], weights=sys.argv[2], device="cpu", tp=2, max_num_tokens=7) as engine:
    for event in engine.stream([5], precast.SamplingParams(max_tokens=60, ignore_eos=True)):
        print("token", flush=True)
        sys.stdin.readline()
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_no_process_is_left_when_rank_0_ends(how: signal.Signals, folder: Path) -> None:
    """Standard error is closed once all that have it are gone."""
    command = [sys.executable, "-P", "-c", GENERATE, str(folder / "split.bundle"), str(folder / "ckpt")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"token\n"
        process.send_signal(how)
        process.communicate(timeout=LIMIT)
        assert process.returncode == -how
