"""`precast bench startup`: real starts of a small model, beside the floor and other commands."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from recitation import MODEL, Command

from precast.bench import floor, page_cache, startup
from precast.bench.startup import Participant, device_of, start, tensor_files
from precast.ir.errors import PrecastError, TargetError

LONG = 300.0
"""Seconds after which a test gives up on a process."""
PHASES = ["import", "context", "bundle", "weights", "pools", "first token"]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from precast import build

    path = tmp_path_factory.mktemp("bundle") / "b"
    build(MODEL, path)
    return path


def measured(command: Command, bundle: Path, *options: object) -> dict[str, object]:
    """The report of one run of each."""
    result = command("bench", "startup", bundle, "--weights", MODEL, "--device", "cpu", "--runs", 1, *options, "--json")
    assert result.exit_code == 0, result.stderr
    found: dict[str, object] = json.loads(result.stdout)
    return found


@pytest.mark.slow
def test_each_is_started_in_both_states_of_the_page_cache(bundle: Path, tmp_path: Path, command: Command) -> None:
    other = f"{sys.executable} -c \"print('loading'); print('ready'); input()\""

    found = measured(command, bundle, "--vs", other, "--until", "^read", "-o", tmp_path / "s.html")

    results = found["results"]
    assert isinstance(results, list)
    names = ["precast", "floor", "torch, serial", other]
    assert [(each["cache"], each["name"][:20]) for each in results] == [
        (cache, name[:20]) for cache in ("warm", "cold") for name in names
    ]
    assert [list(each["phases"]) for each in results[:4]] == [PHASES, ["read"], ["import", "context", "read"], []]
    for each in results:
        (lowest,) = (
            other["seconds"] for other in results if (other["name"], other["cache"]) == ("floor", each["cache"])
        )
        assert each["times"] == [each["seconds"]]
        assert each["times_the_floor"] == pytest.approx(each["seconds"] / lowest)
        assert sum(each["phases"].values()) <= each["seconds"]
    assert found["checkpoint_bytes"] == (MODEL / "model.safetensors").stat().st_size
    page = (tmp_path / "s.html").read_text(encoding="utf-8")
    assert page.count('class="bar"') == len(results)


def participant(code: str, until: str | None = None) -> Participant:
    import re

    return Participant("other", (sys.executable, "-c", code), lambda _: {}, re.compile(until) if until else None)


def test_time_ends_with_the_first_output() -> None:
    """The command goes on for ever; a line on standard error counts only if it is the one that is waited for."""
    code = "import sys; sys.stderr.write('no\\n'); print({!r}, flush=True); input(); open(0).read()"

    start(participant(code.format("yes")), LONG)
    start(participant("import sys, signal; sys.stderr.write('a\\nready now\\n'); signal.pause()", "^ready"), LONG)


def test_an_output_that_is_no_whole_line_is_one() -> None:
    """The rest of the line is waited for as long as for its begin."""
    lines: list[str] = []

    def phases(line: str) -> dict[str, float]:
        lines.append(line)
        return {}

    for rest in ("print('s', flush=True); signal.pause()", "sys.exit()"):
        code = f"import sys, signal; print('ye', end='', flush=True); {rest}"
        start(participant(code)._replace(phases=phases), LONG)
    pause = [sys.executable, "-c", "import signal; signal.pause()"]
    with subprocess.Popen(pause, stdout=subprocess.PIPE) as process:
        lines.append(startup._whole("ye", process, until=time.perf_counter()))
        process.kill()

    assert lines == ["yes\n", "ye", "ye"]


def test_another_line_than_the_one_that_is_waited_for_is_no_output() -> None:
    with pytest.raises(PrecastError, match="it ended with 3: not yet"):
        start(participant("import sys; print('not yet', file=sys.stderr); raise SystemExit(3)", "^ready"), LONG)


def test_what_it_started_ends_too(tmp_path: Path) -> None:
    """A pipe that it and its child hold has no writer left when both are gone."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    code = f"""
import subprocess, sys
pipe = open({str(pipe)!r}, "w")
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], pass_fds=[pipe.fileno()])
print("ready", flush=True)
child.wait()
"""
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        start(participant(code), LONG)

        assert select.select([reader], [], [], LONG)[0] == [reader]
    finally:
        os.close(reader)


@pytest.mark.parametrize(
    ("code", "seconds", "message"),
    [
        ("raise SystemExit('no such model')", LONG, "it ended with 1: no such model"),
        ("pass", LONG, "it ended with 0: it said nothing"),
        ("import signal; signal.pause()", 0.5, "no output in time"),
        ("import os, signal; os.close(1); os.close(2); signal.pause()", 2.0, "no output in time"),
        ("import sys; sys.stderr.write('no\\n'); raise SystemExit(3)", LONG, "it ended with 3: no"),
    ],
)
def test_commands_without_output(code: str, seconds: float, message: str) -> None:
    with pytest.raises(PrecastError) as caught:
        start(participant(code), seconds)

    assert (caught.value.code, caught.value.message) == ("command-failed", f"other was to be started: {message}")


@pytest.mark.parametrize(
    ("options", "exit_code", "code"),
    [
        (("--runs", "0"), 2, "option-invalid"),
        (("--vs", " "), 2, "option-invalid"),
        (("--vs", "'"), 2, "option-invalid"),
        (("--until", "("), 2, "option-invalid"),
        (("--timeout", "nan"), 2, "option-invalid"),
        (("--timeout", "0"), 2, "option-invalid"),
        (("--timeout", "inf"), 2, "option-invalid"),
        (("--vs", "/no/such/command", "--cache", "warm", "--runs", "1"), 1, "command-failed"),
    ],
)
def test_what_can_not_be_measured(
    options: tuple[str, ...], exit_code: int, code: str, bundle: Path, command: Command
) -> None:
    result = command("bench", "startup", bundle, "--weights", MODEL, "--device", "cpu", *options, "--json")

    assert (result.exit_code, json.loads(result.stdout)["error"]["code"]) == (exit_code, code)


def test_a_checkpoint_that_is_refused(bundle: Path, tmp_path: Path, command: Command) -> None:
    """The message is what `run` says of it."""
    shutil.copytree(MODEL, tmp_path / "ckpt")
    config = json.loads((tmp_path / "ckpt" / "config.json").read_text())
    (tmp_path / "ckpt" / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.25}))
    options = ("--device", "cpu", "--runs", 1, "--cache", "warm", "--json")

    result = command("bench", "startup", bundle, "--weights", tmp_path / "ckpt", *options)

    error = json.loads(result.stdout)["error"]
    assert (result.exit_code, error["code"]) == (1, "command-failed")
    assert error["message"].startswith("precast was to be started: ")
    assert "rms_norm_eps" in error["message"]


def test_an_output_that_says_no_phases_is_an_error() -> None:
    with pytest.raises(PrecastError, match="other was to be started: it said ready"):
        start(participant("print('ready')")._replace(phases=json.loads), LONG)


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floor, "LIBRARY", "libno-such-driver.so")

    assert device_of(None) == device_of("cpu") == "cpu"
    with pytest.raises(TargetError) as caught:
        device_of("cuda")
    assert caught.value.code == "device-missing"


# --- the floor ---------------------------------------------------------------------------------------------------


def test_the_floor_reads_every_byte(tmp_path: Path) -> None:
    contents = [os.urandom(size) for size in (floor.JOB_BYTES + 3, 0, 17)]
    files = [tmp_path / str(index) for index in range(3)]
    for file, content in zip(files, contents, strict=True):
        file.write_bytes(content)

    jobs, total = floor.jobs_of([str(file) for file in files])

    assert floor.read_to_host(jobs, total, 3) == b"".join(contents)


@pytest.mark.gpu
def test_the_floor_runs_on_a_gpu(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(os.urandom(20 * floor.JOB_BYTES + 5))

    ran = start(
        Participant("floor", (sys.executable, str(floor.__file__), "cuda", str(tmp_path / "f")), json.loads), LONG
    )

    assert list(ran.phases) == ["context", "read"]


def test_files_are_those_with_tensors() -> None:
    assert tensor_files(MODEL) == tensor_files(MODEL / "model.safetensors") == [MODEL / "model.safetensors"]


# --- the page cache ----------------------------------------------------------------------------------------------


def test_warm_files_are_cached(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(bytes(1 << 20))

    page_cache.drop([file])
    page_cache.warm([file])

    assert page_cache.cached_share([file]) in (1.0, None)
    assert page_cache.cached_share([]) is None


def test_large_files_of_packages_are_listed(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "large.so").write_bytes(bytes(1 << 16))
    (tmp_path / "a" / "small.py").write_bytes(b"1")
    (tmp_path / "dangling").symlink_to("nowhere")

    assert page_cache.packages(tmp_path) == [tmp_path / "a" / "large.so"]
