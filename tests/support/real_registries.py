"""Registries that others wrote, in processes of their own. Each takes a port that is free, and says which."""

from __future__ import annotations

import re
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

LONG = 300.0
"""Seconds after which a registry that doesn't say where it listens is given up."""


@contextmanager
def docker_registry(program: str, folder: Path) -> Iterator[str]:
    """Host and port of docker-registry, which keeps its files in this folder. `program`: its path."""
    config = folder / "registry.yml"
    config.write_text(
        "version: 0.1\nlog: {level: info}\n"
        f"storage: {{filesystem: {{rootdirectory: {folder / 'registry'}}}, delete: {{enabled: true}}}}\n"
        'http: {addr: "127.0.0.1:0"}\n'
    )
    with _serving([program, "serve", str(config)], r"listening on 127\.0\.0\.1:(\d+)") as host:
        yield host


@contextmanager
def crane_registry(program: str) -> Iterator[str]:
    """Host and port of crane's registry, which keeps all in memory. `program`: crane's path."""
    with _serving([program, "registry", "serve", "--address", "127.0.0.1:0"], r"serving on port (\d+)") as host:
        yield host


@contextmanager
def _serving(command: Sequence[str], pattern: str) -> Iterator[str]:
    """Host and port of a server on this machine, which says its port on standard error. It is killed at the end."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        # It would end if nobody read what it says.
        reading = threading.Thread(target=server.stderr.read, daemon=True)
        patience = threading.Timer(LONG, server.kill)
        patience.start()
        try:
            said: list[str] = []
            while (found := re.search(pattern, "".join(said[-1:]))) is None:
                said.append(server.stderr.readline())
                assert said[-1], f"{command[0]} doesn't say where it listens, but: {''.join(said)}"
            patience.cancel()
            reading.start()
            yield f"127.0.0.1:{found[1]}"
        finally:
            patience.cancel()
            server.kill()
            if reading.ident is not None:
                reading.join()
