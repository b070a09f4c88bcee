"""`precast bench startup`: how long a start takes, from a new process to its first token, beside what it could take.

Each run is a process of its own. Runs alternate: Precast, the floor (`precast.bench.floor`), torch used one thing after
the other, and whatever else is named. Time ends with the first output; the exit does not count.
"""

from __future__ import annotations

import json
import os
import re
import select
import selectors
import shlex
import signal
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from precast.bench import floor, page_cache
from precast.ir.errors import PrecastError, TargetError, shown

STAYED = 0.02
"""The share of pages that may stay in the page cache after they were dropped, before a cold run is no cold run."""

_SERIAL = """
import json, sys, time
started = time.perf_counter()
import torch
from safetensors import safe_open
imported = time.perf_counter()
torch.zeros(1, device=sys.argv[1])
opened = time.perf_counter()
held = []
for file in sys.argv[2:]:
    with safe_open(file, framework="pt", device=sys.argv[1]) as tensors:
        held += [tensors.get_tensor(name) for name in tensors.keys()]
if sys.argv[1] != "cpu":
    torch.cuda.synchronize()
else:
    held = [tensor.clone() for tensor in held]  # it was mapped, and not read
done = time.perf_counter()
print(json.dumps({"import": imported - started, "context": opened - imported, "read": done - opened}), flush=True)
import os
os._exit(0)
"""


class Participant(NamedTuple):
    """What is measured: its command, and how the seconds of its phases are read from the first line that it prints.

    `until`: its first line of output that counts, of standard output and error; None: the first of standard output.
    """

    name: str
    command: tuple[str, ...]
    phases: Callable[[str], dict[str, float]]
    until: re.Pattern[str] | None = None


class Start(NamedTuple):
    """One run: seconds from the new process to its first output, and of its phases."""

    seconds: float
    phases: dict[str, float]


class Result(msgspec.Struct, frozen=True):
    """All runs of one participant in one state of the page cache; times are medians, in seconds."""

    name: str
    cache: str
    seconds: float
    times: tuple[float, ...]
    times_the_floor: float
    phases: dict[str, float]


class Report(msgspec.Struct, frozen=True):
    """What was measured, on what. `notes` say what was not as it should be."""

    device: str
    checkpoint_bytes: int
    runs: int
    results: tuple[Result, ...]
    notes: tuple[str, ...]


def participants(
    bundle: Path | str, weights: Path, files: Sequence[Path], device: str, versus: Sequence[str], until: str | None
) -> list[Participant]:
    """Precast, the floor, torch, and each of the commands `versus`. Raises PrecastError (`option-invalid`)."""
    try:
        pattern = None if until is None else re.compile(until)
    except re.error as error:
        raise PrecastError("option-invalid", f"until is no regular expression: {error}") from None
    names = tuple(map(str, files))
    ours = ("run", str(bundle), "--weights", str(weights), "--device", device, "--token-ids", "1")
    found = [
        Participant(
            "precast", (sys.executable, "-m", "precast", *ours, "--max-tokens", "1", "--ignore-eos", "--json"),
            _phases_of_run,
        ),
        Participant("floor", (sys.executable, "-I", "-S", str(floor.__file__), device, *names), _phases_of_json),
        Participant("torch, serial", (sys.executable, "-c", _SERIAL, device, *names), _phases_of_json),
    ]  # fmt: skip
    for command in versus:
        try:
            words = tuple(shlex.split(command))
        except ValueError as error:
            raise PrecastError("option-invalid", f"vs is no command as a shell splits it: {error}") from None
        if not words:
            raise PrecastError("option-invalid", "vs is empty, expected a command")
        found.append(Participant(shown(command, 60), words, lambda _: {}, pattern))
    return found


def measure(
    each: Sequence[Participant],
    files: Sequence[Path],
    *,
    device: str,
    runs: int,
    caches: Sequence[str],
    timeout: float,
    say: Callable[[int, int], None] | None = None,
) -> Report:
    """`runs` starts of each participant in each state of the page cache, `warm` and `cold`, in turn.

    Raises PrecastError (`command-failed`) if one ends without output, or gives none for `timeout` seconds.
    """
    found: dict[tuple[str, str], list[Start]] = {}
    notes: list[str] = []
    libraries = page_cache.packages(Path(sysconfig.get_paths()["purelib"])) if "cold" in caches else []
    done, total = 0, len(each) * sum(runs + (cache == "warm") for cache in caches)
    for cache in caches:
        for run in range(-1 if cache == "warm" else 0, runs):  # the first warms the cache, libraries' files too
            for participant in each:
                if cache == "cold":
                    _drop(files, libraries, notes)
                else:
                    page_cache.warm(files)
                started = start(participant, timeout)
                if run >= 0:
                    found.setdefault((participant.name, cache), []).append(started)
                done += 1
                if say is not None:
                    say(done, total)
    size = sum(file.stat().st_size for file in files)
    return Report(device, size, runs, tuple(_results(found)), tuple(dict.fromkeys(notes)))


def start(participant: Participant, timeout: float) -> Start:
    """Start it once, wait for its first output, and end it. Raises PrecastError (`command-failed`)."""
    began = time.perf_counter()
    try:
        process = subprocess.Popen(
            participant.command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise _failed(participant, str(error.strerror)) from None
    try:
        line, ended = _first_output(process, participant, began + timeout)
        if line is None:
            raise _failed(participant, ended)
        seconds = time.perf_counter() - began
        if participant.until is None:
            line = _whole(line, process, began + timeout)
        return Start(seconds, _phases(participant, line))
    finally:
        _end(process)


def _first_output(process: subprocess.Popen[bytes], participant: Participant, until: float) -> tuple[str | None, str]:
    """The first line that counts, or None and what came instead."""
    assert process.stdout is not None
    assert process.stderr is not None
    seen = {process.stdout: b"", process.stderr: b""}
    with selectors.DefaultSelector() as ready:
        for pipe in seen:
            ready.register(pipe, selectors.EVENT_READ)
        while ready.get_map():
            left = until - time.perf_counter()
            if left <= 0:
                return None, "no output in time"
            for key, _ in ready.select(left):
                pipe = process.stdout if key.fileobj is process.stdout else process.stderr
                data = os.read(pipe.fileno(), 1 << 16)
                if not data:
                    ready.unregister(pipe)
                seen[pipe] = (seen[pipe] + data)[-(1 << 20) :]
                text = seen[pipe].decode(errors="replace")
                if participant.until is None:
                    if data and pipe is process.stdout:
                        return text, ""
                elif found := next((line for line in text.splitlines() if participant.until.search(line)), None):
                    return found, ""
    said = seen[process.stderr].decode(errors="replace").strip().splitlines()
    try:
        code = process.wait(max(0.0, until - time.perf_counter()))
    except subprocess.TimeoutExpired:  # it has closed what it says things on, and goes on
        return None, "no output in time"
    return None, f"it ended with {code}: {shown(' '.join(said[-3:]), 300) or 'it said nothing'}"


def _whole(line: str, process: subprocess.Popen[bytes], until: float) -> str:
    """The first line to its end, or what there is of it when it ends or the time is over."""
    assert process.stdout is not None
    while "\n" not in line and select.select([process.stdout], [], [], max(0.0, until - time.perf_counter()))[0]:
        data = os.read(process.stdout.fileno(), 1 << 16)
        if not data:
            break
        line += data.decode(errors="replace")
    return line


def _end(process: subprocess.Popen[bytes]) -> None:
    """End it and all that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
            break
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


def _failed(participant: Participant, why: str) -> PrecastError:
    message = f"{participant.name} was to be started: {why}"
    return PrecastError(
        "command-failed", message, where=shown(shlex.join(participant.command), 200), fix="run that command by itself"
    )


def _drop(files: Sequence[Path], libraries: Sequence[Path], notes: list[str]) -> None:
    page_cache.drop(libraries)
    page_cache.drop(files)
    share = page_cache.cached_share(files)
    if share is None:
        notes.append("cold: this system doesn't tell whether files are in the page cache, so cold runs may be warm")
    elif share > STAYED:
        notes.append("cold: the kernel kept files of the checkpoint in the page cache, so cold runs are partly warm")


def _phases(participant: Participant, line: str) -> dict[str, float]:
    """What the output says of phases. Raises PrecastError (`command-failed`) where it says none, but an error."""
    try:
        return participant.phases(line)
    except (KeyError, TypeError, ValueError):
        raise _failed(participant, _message_of(line)) from None


def _message_of(line: str) -> str:
    """What an error that was written with `--json` says; of any other line the line."""
    try:
        found: dict[str, dict[str, str]] = json.loads(line)
        return found["error"]["message"]
    except (KeyError, TypeError, ValueError):
        return f"it said {shown(line.strip(), 200)}"


def _phases_of_run(line: str) -> dict[str, float]:
    """What `precast run --json` says of its phases."""
    return {each["name"]: each["seconds"] for each in json.loads(line)["timeline"]["phases"]}


def _phases_of_json(line: str) -> dict[str, float]:
    found: dict[str, float] = json.loads(line)
    return found


def _results(found: Mapping[tuple[str, str], Sequence[Start]]) -> list[Result]:
    results = []
    for (name, cache), starts in found.items():
        lowest = statistics.median(start.seconds for start in found["floor", cache])
        median = statistics.median(start.seconds for start in starts)
        phases = {
            phase: statistics.median(start.phases.get(phase, 0.0) for start in starts) for phase in starts[0].phases
        }
        times = tuple(start.seconds for start in starts)
        results.append(Result(name, cache, median, times, median / lowest, phases))
    return results


def device_of(device: str | None) -> str:
    """The device that is meant: a GPU if the driver has one, else the CPU. Raises TargetError (`device-missing`)."""
    if device == "cpu":
        return device
    try:
        count = floor.CudaDriver().count()
    except floor.CudaError as error:
        if device is None:
            return "cpu"
        raise TargetError("device-missing", f"device is {device}: {error}", fix="use device='cpu'") from None
    return device or ("cuda" if count else "cpu")


def tensor_files(weights: Path) -> list[Path]:
    """The files of a local checkpoint that hold tensors that its headers name. Raises WeightsError."""
    from precast.ir.weights.checkpoint import CheckpointFiles
    from precast.ir.weights.sources import LocalFolder

    folder = LocalFolder(weights)
    return [folder.root / name for name in sorted(CheckpointFiles.open(folder).stamps)]


def fields(report: Report) -> dict[str, Any]:
    """The report as JSON has it, with the machine."""
    machine = {"python": sys.version.split()[0], "cores": len(os.sched_getaffinity(0)), "system": sys.platform}
    return {"machine": machine, **msgspec.to_builtins(report)}
