"""`make registry-demo`: a bundle through a registry: built, pushed by digest, pulled, verified, recited.

The registry is docker-registry where it is installed, else the one of the tests, in this process. Each step is the
command that a user would type.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples" / "recite" / "model"
OPENING_WORDS = 6


def main() -> int:
    """Each step in turn; the first that fails ends the demo with its exit code."""
    text = (MODEL.parent / "text.txt").read_text(encoding="utf-8").strip()
    opening = " ".join(text.split()[:OPENING_WORDS])
    with tempfile.TemporaryDirectory() as name, registry(Path(name)) as host:
        folder = Path(name)
        os.environ["PRECAST_STORE"] = str(folder / "store")
        precast("build", str(MODEL), "-o", str(folder / "recite.bundle"))
        # By digest: there is no tag that somebody could move.
        pushed = precast("push", str(folder / "recite.bundle"), f"{host}/demo/recite").splitlines()[0]
        precast("pull", pushed, "-o", str(folder / "pulled.bundle"))
        precast("verify", str(folder / "pulled.bundle"), "--weights", str(MODEL))
        # The store has it by now: no registry is asked.
        answer = precast(
            "run", f"oci://{pushed}", "--weights", str(MODEL), "--device", "cpu", "--max-tokens", "600",
            "--prompt", opening,
        )  # fmt: skip
    if opening + answer.removesuffix("\n") != text:
        print("this is not the text that the model has learned", file=sys.stderr)
        return 1
    print("\nRecited to the letter, from a bundle that went through a registry.")
    return 0


def precast(*arguments: str) -> str:
    """Run the command and show it; what it printed."""
    print(f"\n$ precast {' '.join(arguments)}", flush=True)
    done = subprocess.run([sys.executable, "-m", "precast", *arguments], stdout=subprocess.PIPE, text=True)
    print(done.stdout, end="", flush=True)
    if done.returncode != 0:
        sys.exit(done.returncode)
    return done.stdout


@contextlib.contextmanager
def registry(folder: Path) -> Iterator[str]:
    """The host and port of a registry on this machine."""
    program = shutil.which("docker-registry")
    if program is None:
        sys.path.insert(0, str(ROOT / "tests" / "support"))
        from fake_registry import FakeRegistry

        with FakeRegistry() as fake:
            yield fake.host
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (folder / "registry.yml").write_text(
        f"version: 0.1\nlog: {{level: info}}\nstorage: {{filesystem: {{rootdirectory: {folder / 'registry'}}}}}\n"
        f'http: {{addr: "127.0.0.1:{port}"}}\n'
    )
    command = [program, "serve", str(folder / "registry.yml")]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        next((line for line in server.stderr if "listening on" in line), None)
        threading.Thread(target=server.stderr.read, daemon=True).start()
        yield f"127.0.0.1:{port}"
        server.send_signal(signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
