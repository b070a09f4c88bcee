"""A build that is killed at any moment leaves the old bundle or the new one, whole, and nothing that stays."""

from __future__ import annotations

import os
import random
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import families
import pytest

from precast.ir.artifact import Bundle

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that can be forked and killed")

KILLS = 24
STAGES = ("config", "export", "passes", "caches", "lower", "pack", "done")

# Everything is imported once, and by a first build also what is imported late; each line on standard input is then a
# build in a process of its own.
SERVER = """
import os, sys
from precast.builder.build import build

def say(word):
    os.write(1, word.encode() + b"\\n")

def run(source, out, snapshots):
    pid = os.fork()
    if pid == 0:
        say(str(os.getpid()))
        build(source, out, snapshots=snapshots, progress=say)
        say("done")
        os._exit(0)
    os.waitpid(pid, 0)
    say("gone")

build(sys.argv[1], sys.argv[2])
for line in sys.stdin:
    run(*line.split())
"""


class Builder:
    """Builds in processes that can be killed."""

    def __init__(self, server: subprocess.Popen[str]) -> None:
        self.server = server

    def start(self, source: Path, out: Path, snapshots: Path) -> int:
        """Begins a build, and returns its process id."""
        assert self.server.stdin is not None
        self.server.stdin.write(f"{source} {out} {snapshots}\n")
        self.server.stdin.flush()
        return int(self.next())

    def next(self) -> str:
        """The next stage that begins: one of STAGES, or `gone` when the process has ended."""
        assert self.server.stdout is not None
        line = self.server.stdout.readline()
        assert line, "the server has ended"
        return line.strip()

    def finish(self, source: Path, out: Path, snapshots: Path) -> dict[str, float]:
        """A build that nobody interrupts: the seconds at which each stage began."""
        self.start(source, out, snapshots)
        begun = {stage: time.monotonic() for stage in iter(self.next, "gone")}
        assert "done" in begun, "the build failed"
        return begun

    def kill(self, source: Path, out: Path, snapshots: Path, stage: str, seconds: float) -> None:
        """Kills a build that long after the stage has begun, or as soon as it is through."""
        pid = self.start(source, out, snapshots)
        seen = self.next()
        while seen not in (stage, "done", "gone"):
            seen = self.next()
        if seen == stage:
            assert self.server.stdout is not None
            select.select([self.server.stdout], [], [], seconds)
            with suppress(ProcessLookupError):  # it was through, and the server has seen that already
                os.kill(pid, signal.SIGKILL)
        while seen != "gone":
            seen = self.next()


@pytest.fixture(scope="module")
def builder(sources: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builder]:
    first = tmp_path_factory.mktemp("first") / "bundle"
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, sources[0], first],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as server:
        yield Builder(server)
        assert server.stdin is not None
        server.stdin.close()


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models that are small to trace."""
    folder = tmp_path_factory.mktemp("models")
    for name, layers in (("one", 1), ("two", 2)):
        config = families.make_config("starcoder2")
        config.num_hidden_layers = layers
        config.save_pretrained(folder / name)
    return [folder / "one", folder / "two"]


def _moments(begun: dict[str, float]) -> Iterator[tuple[str, float]]:
    """Random moments of a build: half of them of all of it, half of them of its last stage, which publishes."""
    chance = random.Random(7)
    ends = dict(zip(begun, [*begun.values()][1:], strict=False))
    first, last = begun["config"], begun["done"]
    for count in range(KILLS):
        moment = chance.uniform(begun["pack"] if count % 2 else first, last)
        stage = max((stage for stage in ends if begun[stage] <= moment), key=begun.__getitem__)
        yield stage, moment - begun[stage]


@pytest.mark.slow
def test_a_killed_build_leaves_the_old_bundle_or_the_new_one(
    builder: Builder, sources: list[Path], tmp_path: Path
) -> None:
    snapshots, outputs = tmp_path / "snapshots", tmp_path / "outputs"
    outputs.mkdir()
    replaced, fresh = outputs / "replaced.bundle", outputs / "fresh.bundle"
    digests = set()
    for source in sources:
        whole = builder.finish(source, replaced, snapshots)
        digests.add(Bundle.open(replaced).digest)
    assert len(digests) == 2
    assert tuple(whole) == STAGES

    for count, (stage, seconds) in enumerate(_moments(whole)):
        source = sources[count % 4 // 2]
        # builds that are killed while they publish need not trace the model each time
        used = snapshots if stage == "pack" else tmp_path / f"snapshots{count}"
        out = fresh if count // 4 % 2 else replaced

        builder.kill(source, out, used, stage, seconds)

        if out.exists() or out is replaced:
            assert Bundle.open(out).digest in digests, f"killed {seconds} s after {stage} began"
        shutil.rmtree(fresh, ignore_errors=True)
        assert not used.exists() or all(len(file.name) == 64 for file in used.iterdir())

    for out in (replaced, fresh):
        builder.finish(sources[0], out, snapshots)
        assert Bundle.open(out).digest in digests
    assert sorted(outputs.iterdir()) == [fresh, replaced], "something of a killed build is left"
