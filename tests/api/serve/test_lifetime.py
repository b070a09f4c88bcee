"""A server's life: loading, clients that hang up, a queue that is full, an engine that is lost, and the end."""

from __future__ import annotations

import http.client
import os
import select
import shutil
import signal
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from file_server import Request, ranged, serving, silent
from process_ends import LONG, ends
from recitation import MODEL, OPENING, run_precast
from served import Served, send_request, served

import precast
from precast.ir.artifact import Bundle, write_bundle

COMPLETIONS = "/v1/completions"
ENDLESS = {"prompt": OPENING, "max_tokens": 1000, "temperature": 0, "ignore_eos": True}
"""An answer that takes a second at least."""


@contextmanager
def begun(server: Served) -> Iterator[http.client.HTTPResponse]:
    """A stream of which the first line has come."""
    with closing(server.connect()) as connection:
        send_request(connection, COMPLETIONS, {**ENDLESS, "stream": True})
        with connection.getresponse() as response:
            assert response.status == 200
            assert response.readline().startswith(b"data: {")
            yield response


def test_it_answers_while_it_loads(bundle: Path) -> None:
    """The checkpoint's server is silent from the first tensor on."""
    files = {f"m/{file.name}": file.read_bytes() for file in MODEL.iterdir()}

    def hangs(request: Request) -> None:
        (ranged if request.headers["Range"].startswith("bytes=0-") else silent)(request)

    with serving(files, hangs) as checkpoint:
        weights = f"{checkpoint.address}/m"
        with served(bundle, "--weights-timeout", "3600", weights=weights, waits=False) as server:
            answers = [server.ask(route) for route in ("/health", "/ready")]
            answers += [server.ask(COMPLETIONS, ENDLESS), server.ask("/tokenize", {"prompt": "a"})]

            assert [answer.status for answer in answers] == [503] * 4
            assert answers[0].json["status"] == "loading"
            assert answers[2].headers["Retry-After"]
            assert answers[2].error["code"] == "loading"
            assert server.ask("/metrics").status == 200
            server.until(lambda: server.ask("/health").json["phase"] == "weights")
            assert server.ask("/v1/models").error["code"] == "loading"
            engine = server.engine_process
            assert server.end() == 0
    assert ends(engine)


@pytest.mark.parametrize("more", [{"stream": True}, {}, {"n": 4}, {"n": 4, "stream": True}], ids=str)
def test_who_hangs_up_is_forgotten(more: dict[str, Any], server: Served) -> None:
    """Its pages, and its places: the server has four."""
    cancelled = server.metric("precast_requests_cancelled_total")
    while server.metric("precast_requests_cancelled_total") == cancelled:  # one that has ended is asked again
        with closing(server.connect()) as connection:
            send_request(connection, COMPLETIONS, {**ENDLESS, **more})
            while server.metric("precast_requests_running") < more.get("n", 1) and not has_answer(connection):
                pass
        server.until(lambda: server.metric("precast_requests_running") == 0)

    assert server.metric("precast_requests_waiting") == 0
    assert server.ask(COMPLETIONS, {"prompt": "a", "max_tokens": 1, "n": 4}).status == 200


def has_answer(connection: http.client.HTTPConnection) -> bool:
    """Whether something has come back."""
    return bool(select.select([connection.sock], [], [], 0)[0])


def test_who_does_not_read_keeps_no_place(bundle: Path) -> None:
    """More is streamed than the system's buffers hold: each chunk has the model's name."""
    name = "recite" * 1000
    places = ("--max-num-seqs", "4", "--max-queued", "0")
    with served(bundle, "--model-name", name, *places) as server, closing(server.connect()) as connection:
        connection.sock = socket.socket()
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.sock.connect((connection.host, connection.port))
        send_request(connection, COMPLETIONS, {**ENDLESS, "max_tokens": 300, "n": 4, "stream": True})

        server.until(lambda: server.ask(COMPLETIONS, {"prompt": "a", "max_tokens": 1, "n": 4}).status == 200)


def test_a_full_queue_turns_away(bundle: Path) -> None:
    with served(bundle, "--max-num-seqs", "1", "--max-queued", "1") as server:
        engine = server.engine_process
        with begun(server), closing(server.connect()) as waiting:
            os.kill(engine, signal.SIGSTOP)
            send_request(waiting, COMPLETIONS, ENDLESS)
            # A request that comes before that one waits for ever, so it doesn't stay.
            server.until(lambda: server.glance(COMPLETIONS, ENDLESS) == 503)

            full = server.ask(COMPLETIONS, ENDLESS)
            too_many = server.ask(COMPLETIONS, {**ENDLESS, "n": 3})

            assert (full.status, full.error["code"], full.headers["Retry-After"]) == (503, "queue-full", "1")
            assert (too_many.status, too_many.error["code"]) == (503, "queue-full")
            assert server.ask("/ready").status == 200
        os.kill(engine, signal.SIGCONT)
        server.until(lambda: server.ask(COMPLETIONS, {**ENDLESS, "max_tokens": 1}).status == 200)
        assert server.ask(COMPLETIONS, {**ENDLESS, "n": 3}).error["param"] == "n"


def test_a_signal_lets_answers_end(bundle: Path) -> None:
    with served(bundle, "--shutdown-timeout", str(10 * LONG)) as server:
        engine = server.engine_process
        with begun(server) as response:
            os.kill(engine, signal.SIGSTOP)
            server.process.send_signal(signal.SIGTERM)
            assert server.said("draining") == "1"
            health, ready, asked = server.ask("/health"), server.ask("/ready"), server.ask(COMPLETIONS, ENDLESS)
            os.kill(engine, signal.SIGCONT)
            text = response.read()

        assert (health.status, ready.status, ready.json["status"]) == (200, 503, "draining")
        assert (asked.status, asked.error["code"]) == (503, "draining")
        assert b'"finish_reason":"length"' in text
        assert text.endswith(b"data: [DONE]\n\n")
        assert server.process.wait(LONG) == 0
        assert server.faults() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_second_signal_ends_at_once(number: signal.Signals, bundle: Path) -> None:
    with served(bundle, "--shutdown-timeout", str(10 * LONG)) as server, begun(server):
        engine = server.engine_process
        os.kill(engine, signal.SIGSTOP)  # the answer will never end
        server.process.send_signal(number)
        assert server.said("draining") == "1"

        assert server.end(number) == 0
        assert ends(engine)
        assert server.faults() == []


def test_who_hangs_up_while_it_asks_is_no_error(bundle: Path) -> None:
    with served(bundle) as server:
        gone, stays = server.connect(), server.connect()
        for connection in (gone, stays):
            connection.putrequest("POST", COMPLETIONS)
            connection.putheader("Content-Length", "100")
            connection.endheaders(b'{"pro')
        gone.close()
        assert server.ask("/health").status == 200

        assert server.end() == 0
        stays.close()
        assert server.faults() == []


def test_it_ends_in_order_where_nobody_hears_what_it_says(bundle: Path) -> None:
    with served(bundle) as server:
        assert server.process.stdout is not None
        server.process.stdout.close()

        assert server.end() == 0


@pytest.mark.parametrize("signals", [1, 2])
def test_clients_hear_that_their_answers_are_cut_off(signals: int, bundle: Path) -> None:
    """After the time that answers have, or at a second signal."""
    seconds = "0.1" if signals == 1 else str(10 * LONG)
    with served(bundle, "--shutdown-timeout", seconds) as server, begun(server) as response:
        with closing(server.connect()) as connection:
            send_request(connection, COMPLETIONS, {**ENDLESS, "n": 2})
            server.until(lambda: server.metric("precast_requests_running") == 3)
            os.kill(server.engine_process, signal.SIGSTOP)
            server.process.send_signal(signal.SIGTERM)
            assert server.said("draining") == "3"
            if signals == 2:
                server.process.send_signal(signal.SIGTERM)
            assert server.said("cutting") == "2"
            whole = connection.getresponse()
            refusal = msgspec.json.decode(whole.read())["error"]
            text = response.read()

        assert (whole.status, refusal["code"], whole.headers["Retry-After"]) == (503, "draining", "1")
        assert whole.headers["X-Request-Id"]
        assert b'"code":"draining"' in text
        assert text.endswith(b"data: [DONE]\n\n")
        assert server.process.wait(LONG) == 0
        assert server.faults() == []


def test_whoever_sends_signals_to_all_processes_ends_it_in_order(bundle: Path) -> None:
    """As systemd does."""
    with served(bundle) as server, begun(server) as response:
        os.kill(server.engine_process, signal.SIGTERM)
        server.process.send_signal(signal.SIGTERM)

        assert response.read().endswith(b"data: [DONE]\n\n")
        assert server.process.wait(LONG) == 0


def test_an_engine_that_is_lost_ends_the_server(bundle: Path) -> None:
    with served(bundle) as server, begun(server) as response:
        os.kill(server.engine_process, signal.SIGKILL)

        assert b"engine-failed" in response.read()
        assert server.process.wait(LONG) == 4
        assert server.process.stderr is not None
        told = server.process.stderr.read()
        assert "POST /v1/completions failed: engine-failed: the engine's process was ended by SIGKILL" in told
        faults = [line for line in told.splitlines() if any(word in line for word in ("Traceback", "ERROR", "error"))]
        assert faults == ["error: the engine's process was ended by SIGKILL"]


def test_an_engine_that_hangs_is_unhealthy(bundle: Path) -> None:
    """Whether or not its clients wait."""
    with served(bundle, "--stuck-after", "1") as server:
        engine = server.engine_process
        with begun(server):
            os.kill(engine, signal.SIGSTOP)
        server.until(lambda: server.ask("/health").status == 503)
        assert server.glance(COMPLETIONS, ENDLESS) is None
        assert server.ask("/ready").json["status"] == "stuck"

        os.kill(engine, signal.SIGCONT)
        server.until(lambda: server.ask("/health").status == 200)


@pytest.mark.parametrize(
    ("name", "data"),
    [("chat_template.jinja", "{% for %}"), ("tokenizer_config.json", "[]")],
    ids=["template", "config"],
)
def test_a_tokenizer_that_can_not_be_read_ends_it(name: str, data: str, tmp_path: Path) -> None:
    shutil.copytree(MODEL, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    precast.build(tmp_path / "model", tmp_path / "b", model_type="llama")
    opened = Bundle.open(tmp_path / "b")
    files = opened.files("tokenizer") | {name: data.encode()}
    write_bundle(
        tmp_path / "b", manifest_without_blobs=msgspec.structs.replace(opened.manifest, blobs=()), graph=opened.graph,
        constants=opened.constants, files=files, provenance={},
    )  # fmt: skip

    ran = run_precast("serve", tmp_path / "b", "--weights", MODEL, "--device", "cpu", "--port", "0")

    assert ran.returncode == 3
    assert "code: tokenizer-invalid" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_an_engine_whose_server_is_killed_ends(bundle: Path) -> None:
    with served(bundle) as server, begun(server):
        engine = server.engine_process

        server.process.kill()

        assert ends(engine)


def test_what_keeps_it_from_loading_is_said(bundle: Path, tmp_path: Path) -> None:
    def refused(*arguments: str | Path) -> tuple[int, str]:
        ran = run_precast("serve", *arguments, "--device", "cpu", "--port", "0")
        return ran.returncode, ran.stderr

    no_bundle = refused(tmp_path / "b", "--weights", MODEL)
    no_weights = refused(bundle, "--weights", tmp_path)
    no_option = refused(bundle, "--weights", MODEL, "--max-num-seqs", "0")
    no_keys = refused(bundle, "--weights", MODEL, "--api-key-file", tmp_path / "keys")
    (tmp_path / "keys").write_text("\n")
    empty = refused(bundle, "--weights", MODEL, "--api-key-file", tmp_path / "keys")

    assert [code for code, _ in (no_bundle, no_weights, no_option, no_keys, empty)] == [3, 1, 2, 2, 2]
    assert "bundle-missing" in no_bundle[1]
    assert "checkpoint-missing" in no_weights[1]
    assert "max_num_seqs" in no_option[1] or "--max-num-seqs" in no_option[1]
    assert "can't be read" in no_keys[1]
    assert "has no key" in empty[1]
    assert all("Traceback" not in text for _, text in (no_bundle, no_weights, no_option, no_keys, empty))


def test_a_port_that_is_taken(bundle: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ran = run_precast("serve", bundle, "--weights", MODEL, "--device", "cpu", "--port", str(port))

    assert ran.returncode == 4
    assert f"can't listen on port {port} of 127.0.0.1" in ran.stderr
    assert "code: port-taken" in ran.stderr


def test_a_host_that_is_not_this_one(bundle: Path) -> None:
    """An address that is set aside for documents."""
    ran = run_precast("serve", bundle, "--weights", MODEL, "--device", "cpu", "--port", "0", "--host", "192.0.2.1")

    assert ran.returncode == 4
    assert "code: host-unknown" in ran.stderr


@pytest.mark.parametrize("option", ["--shutdown-timeout=nan", "--stuck-after=nan", "--model-name="])
def test_options_that_say_nothing_are_refused(option: str, bundle: Path) -> None:
    ran = run_precast("serve", bundle, "--weights", MODEL, option)

    assert ran.returncode == 2
    assert option.partition("=")[0] in ran.stderr


def test_a_launcher_s_processes_are_refused(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)

    ran = run_precast("serve", bundle, "--weights", MODEL, "--device", "cpu", "--tp", "2")

    assert ran.returncode == 2
    assert "precast serve --tp N" in ran.stderr


@pytest.mark.slow
def test_two_ranks_answer_as_one(bundle: Path, server: Served) -> None:
    body = {"prompt": OPENING, "max_tokens": 30, "temperature": 0}
    with served(bundle, "--tp", "2") as both:
        answer = both.ask(COMPLETIONS, body)
        assert both.end() == 0
        assert both.faults() == []

    assert answer.json["choices"] == server.ask(COMPLETIONS, body).json["choices"]
