"""How long a load takes to end after Ctrl-C or SIGTERM, at random moments and while it waits for a server.

Claim: less than a second, whatever the load is doing. The seconds from the signal to the end of the process, of loads
of the example model that get one at a random moment of their time, and of loads from a server that never answers.

    python benchmarks/bench_stop.py [--moments 30] [--out FILE]
"""

from __future__ import annotations

import argparse
import http.server
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from support import harness

MODEL = Path(__file__).resolve().parents[1] / "examples" / "recite" / "model"
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Silent(http.server.BaseHTTPRequestHandler):
    """Takes requests, and never answers."""

    asked = threading.Event()
    over = threading.Event()

    def do_GET(self) -> None:
        self.asked.set()
        self.over.wait()


def started(bundle: Path, weights: str) -> subprocess.Popen[bytes]:
    """A load for one token."""
    command = [sys.executable, "-m", "precast", "run", str(bundle), "--weights", weights, "--device", "cpu"]
    command += ["--token-ids", "1", "--max-tokens", "1", "--weights-timeout", "3600"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def seconds_to_end(process: subprocess.Popen[bytes], number: signal.Signals) -> float:
    """From the signal to the end."""
    began = time.perf_counter()
    process.send_signal(number)
    process.wait()
    return time.perf_counter() - began


def at_moments(bundle: Path, moments: int) -> list[float]:
    """The signals come at random moments between the first line of Python and the end."""
    whole = harness.median_seconds(lambda: started(bundle, str(MODEL)).wait(), runs=3)
    draw = random.Random(0)
    found = []
    while len(found) < moments:
        process = started(bundle, str(MODEL))
        try:
            process.wait(draw.uniform(0.0, whole))
        except subprocess.TimeoutExpired:
            found.append(seconds_to_end(process, SIGNALS[len(found) % 2]))
    return found


def at_a_server(bundle: Path, times: int) -> list[float]:
    """The signals come when the server has been asked."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Silent) as server:
        server.daemon_threads, server.block_on_close = True, False
        threading.Thread(target=server.serve_forever, daemon=True).start()
        found = []
        for index in range(times):
            Silent.asked.clear()
            process = started(bundle, f"http://127.0.0.1:{server.server_port}/m")
            Silent.asked.wait()
            found.append(seconds_to_end(process, SIGNALS[index % 2]))
        Silent.over.set()
        server.shutdown()
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--moments", type=int, default=30)
    parser.add_argument("--out", type=Path, default=harness.RESULTS / "stop.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        import precast

        bundle = Path(folder) / "recite.bundle"
        precast.build(MODEL, bundle)
        cases = {"random moments": at_moments(bundle, options.moments), "silent server": at_a_server(bundle, 6)}
    figures = {
        name: {"times": len(found), "median_seconds": statistics.median(found), "longest_seconds": max(found)}
        for name, found in cases.items()
    }
    harness.write(options.out, "a load ends within a second", figures)


if __name__ == "__main__":
    main()
