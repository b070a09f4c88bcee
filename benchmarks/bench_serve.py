"""Claim: `precast serve` streams more tokens than a GPU draws, and a long prompt holds up nobody.

    python benchmarks/bench_serve.py [--out FILE]

- Streams: 256 answers at once from a stand-in for the engine that has the next token for each as soon as it is taken,
  to hold against what a GPU draws (results/gpu_served.json). Tokens that wait are sent together.
- Beside the engine: 32 answers of the example model over HTTP, and by `generate` in a process of its own, in turn.
- Probes: `/health` while nothing happens, and while texts of 5 MB are encoded.
"""

from __future__ import annotations

import argparse
import http.client
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from support import harness

MODEL = Path(__file__).resolve().parents[1] / "examples" / "recite" / "model"
STREAMS, TOKENS = 256, 256
ANSWERS, ANSWER_TOKENS = 32, 128
PROBES = 400
RUNS = 5
LONG_TEXT_BYTES = 5_000_000

STAND_IN = f"""
import socket, sys
import msgspec
from precast.ir.manifest import ModelInfo
from precast.serve.messages import *
connection = socket.socket(fileno=int(sys.argv[1]))
stream = connection.makefile("rb")
decoder = msgspec.msgpack.Decoder(ToEngine)
def message():
    (length,) = LENGTH.unpack(stream.read(LENGTH.size))
    return decoder.decode(stream.read(length))
message()
model = ModelInfo("A", "a", "float32", 512, 100000, 1, 1)
for each in (Opened("sha256:" + "0" * 64, model, {{}}), Ready(0.0)):
    connection.sendall(framed(each))
while True:
    numbers = []
    while len(numbers) < {STREAMS}:
        asked = message()
        if isinstance(asked, End):
            sys.exit()
        if isinstance(asked, Ask):
            connection.sendall(framed(Taken(asked.number)))
            numbers.append(asked.number)
    for step in range({TOKENS}):
        reason = "length" if step == {TOKENS} - 1 else None
        connection.sendall(framed(News([Told(number, (17,), " token", reason, None) for number in numbers])))
"""
STAND_IN_SERVER = """
import functools, sys
from precast.serve import http_process
from precast.serve.app import Options
from precast.serve.link import Link
from precast.serve.messages import Load
http_process.Link = functools.partial(Link, (sys.executable, "-c", sys.argv[1]))
say = lambda event, value: print('{"event": "%s", "value": "%s"}' % (event, value), flush=True)
options = Options(("m",), 10_000, 300.0)
http_process.serve(Load("", None, {}), options, host="127.0.0.1", port=0, shutdown_seconds=5.0, say=say)
"""
GENERATE = """
import json, sys, time
import precast
bundle, model, answers, tokens, runs = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
params = precast.SamplingParams(max_tokens=tokens, ignore_eos=True)
with precast.load(bundle, weights=model, device="cpu") as engine:
    def run():
        began = time.perf_counter()
        engine.generate([[1, 5 + i] for i in range(answers)], params)
        return time.perf_counter() - began
    run()
    print(json.dumps({"seconds": sorted(run() for _ in range(runs))[runs // 2]}))
"""


@contextmanager
def served(command: Sequence[str]) -> Iterator[tuple[str, int]]:
    """The host and port of a server, once it is ready."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        listening, ready = (json.loads(process.stdout.readline()) for _ in range(2))
        assert ready["event"] == "ready"
        place = urlsplit(listening["value"])
        yield place.hostname or "", place.port or 0
    finally:
        process.terminate()
        process.wait()


def request(path: str, body: dict[str, Any]) -> bytes:
    """A POST as bytes."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    return head.encode() + b"Connection: close\r\n\r\n" + data


def stream_all(place: tuple[str, int], bodies: Sequence[dict[str, Any]]) -> float:
    """The seconds from the first request of all at once to the last one's end."""
    connections = [socket.create_connection(place) for _ in bodies]
    found = [b""] * len(bodies)

    def read(i: int) -> None:
        while part := connections[i].recv(1 << 16):
            found[i] = (found[i] + part)[-64:]

    threads = [threading.Thread(target=read, args=(i,)) for i in range(len(bodies))]
    for thread in threads:
        thread.start()
    began = time.perf_counter()
    for connection, body in zip(connections, bodies, strict=True):
        connection.sendall(request("/v1/completions", body))
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    assert all(b"[DONE]" in end for end in found), found
    for connection in connections:
        connection.close()
    return seconds


def probe_milliseconds(place: tuple[str, int]) -> dict[str, float]:
    """Median, 99th percentile and maximum of `/health`."""
    times, connection = [], http.client.HTTPConnection(*place)
    for _ in range(PROBES):
        began = time.perf_counter()
        connection.request("GET", "/health")
        response = connection.getresponse()
        response.read()
        times.append(1000 * (time.perf_counter() - began))
        assert response.status == 200
        time.sleep(0.005)
    connection.close()
    times.sort()
    return {
        "median": round(statistics.median(times), 2), "p99": round(times[int(0.99 * PROBES)], 2),
        "most": round(times[-1], 2),
    }  # fmt: skip


def probes_beside_long_texts(place: tuple[str, int]) -> dict[str, Any]:
    """Probes while one text after the other is encoded, and how long each takes."""
    over, seconds = threading.Event(), []
    body = request("/tokenize", {"prompt": "Four score and seven years ago, " * (LONG_TEXT_BYTES // 32)})

    def encode() -> None:
        while not over.is_set():
            began = time.perf_counter()
            with socket.create_connection(place) as connection:
                connection.sendall(body)
                while connection.recv(1 << 20):
                    pass
            seconds.append(time.perf_counter() - began)

    thread = threading.Thread(target=encode)
    thread.start()
    found = probe_milliseconds(place)
    over.set()
    thread.join()
    return {"milliseconds": found, "texts": len(seconds), "seconds_a_text": round(statistics.median(seconds), 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=harness.RESULTS / "serve.json")
    out = parser.parse_args().out
    import precast

    many = [{"prompt": [1], "max_tokens": TOKENS, "stream": True}] * STREAMS
    with served([sys.executable, "-c", STAND_IN_SERVER, STAND_IN]) as place:
        seconds = [stream_all(place, many) for _ in range(1 + RUNS)][1:]
    streams = {"streams": STREAMS, "tokens_per_second": round(STREAMS * TOKENS / statistics.median(seconds))}

    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder) / "recite.bundle"
        precast.build(MODEL, bundle)
        command = [sys.executable, "-m", "precast", "serve", str(bundle), "--weights", str(MODEL), "--device", "cpu"]
        bodies = [
            {"prompt": [1, 5 + i], "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
            for i in range(ANSWERS)
        ]
        with served([*command, "--port", "0", "--json"]) as place:
            over_http = statistics.median([stream_all(place, bodies) for _ in range(1 + RUNS)][1:])
            idle, beside = probe_milliseconds(place), probes_beside_long_texts(place)
        numbers = map(str, (ANSWERS, ANSWER_TOKENS, RUNS))
        alone = harness.fresh_process(GENERATE, str(bundle), str(MODEL), *numbers)["seconds"]
    engine = {
        "answers": ANSWERS, "tokens": ANSWER_TOKENS, "seconds": round(over_http, 3),
        "generate_seconds": round(alone, 3), "ratio": round(over_http / alone, 3),
    }  # fmt: skip
    claim = "HTTP streams more tokens than a GPU draws; a long prompt holds up nobody"
    harness.write(out, claim, {"streams": streams, "beside_the_engine": engine, "probes_idle": idle,
                               "probes_beside_texts_of_5_mb": beside})  # fmt: skip


if __name__ == "__main__":
    main()
