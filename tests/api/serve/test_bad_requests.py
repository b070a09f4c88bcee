"""What is refused, with the field that is wrong, in OpenAI's form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from served import Served, served

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


def nested(depth: int) -> list[Any]:
    """A list in a list in a list."""
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


BODIES: dict[str, tuple[str, Any, str | None]] = {
    # case: (route, body, the field that is named)
    "no JSON": (COMPLETIONS, b"{", None),
    "no object": (COMPLETIONS, b"[]", None),
    "no text": (COMPLETIONS, b'{"prompt": "\xff"}', None),
    "deep": (COMPLETIONS, b'{"metadata":' + b"[" * 100_000, None),
    "no prompt": (COMPLETIONS, {}, "prompt"),
    "prompt of another kind": (COMPLETIONS, {"prompt": [1, "a"]}, "prompt"),
    "prompt of flags": (COMPLETIONS, {"prompt": [True]}, "prompt"),
    "empty list of prompts": (COMPLETIONS, {"prompt": []}, "prompt"),
    "no tokens": (COMPLETIONS, {"prompt": [[]]}, "prompt"),
    "no such token": (COMPLETIONS, {"prompt": [10**6]}, "prompt"),
    "huge token": (COMPLETIONS, {"prompt": [10**30]}, "prompt"),
    "prompt that is too long": (COMPLETIONS, {"prompt": [5] * 1024}, "prompt"),
    "field of nobody": (COMPLETIONS, {"prompt": "a", "temprature": 1}, "temprature"),
    "field of another type": (COMPLETIONS, {"prompt": "a", "max_tokens": "many"}, "max_tokens"),
    "field of a field": (COMPLETIONS, {"prompt": "a", "stream_options": {"a": 1}}, "stream_options.a"),
    "temperature below 0": (COMPLETIONS, {"prompt": "a", "temperature": -1}, "temperature"),
    "no answers": (COMPLETIONS, {"prompt": "a", "n": 0}, "n"),
    "many answers": (COMPLETIONS, {"prompt": "a", "n": 129}, "n"),
    "answers of no length": (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, "max_tokens"),
    "chat of no length": (CHAT, {"messages": HI, "max_completion_tokens": 0}, "max_completion_tokens"),
    "no share": (CHAT, {"messages": HI, "top_p": 0}, "top_p"),
    "stop at nothing": (COMPLETIONS, {"prompt": "a", "stop": [""]}, "stop"),
    "many stops": (COMPLETIONS, {"prompt": "a", "stop": ["x"] * 17}, "stop"),
    "long stop": (COMPLETIONS, {"prompt": "a", "stop": "x" * 1025}, "stop"),
    "many prompts": (COMPLETIONS, {"prompt": [[]] * 129}, "prompt"),
    "deep messages": (CHAT, {"messages": [{"role": "user", "content": "a", "b": nested(700)}]}, "messages"),
    "huge priority": (COMPLETIONS, {"prompt": "a", "priority": 10**30}, "priority"),
    "field of nobody, beside a null": (COMPLETIONS, {"prompt": "a", "nothing": None, "foo": 1}, "foo"),
    "chat that is too long": (CHAT, {"messages": [{"role": "user", "content": "a b " * 600}]}, "messages"),
    "fewest tokens": (CHAT, {"messages": HI, "min_tokens": 2}, "min_tokens"),
    "special tokens in the text": (CHAT, {"messages": HI, "skip_special_tokens": False}, "skip_special_tokens"),
    "priority in words": (COMPLETIONS, {"prompt": "a", "priority": "high"}, "priority"),
    "best of several": (COMPLETIONS, {"prompt": "a", "best_of": 2}, "best_of"),
    "log-probabilities": (COMPLETIONS, {"prompt": "a", "logprobs": 1}, "logprobs"),
    "log-probabilities of none but its own": (COMPLETIONS, {"prompt": "a", "logprobs": 0}, "logprobs"),
    "suffix": (COMPLETIONS, {"prompt": "a", "suffix": "z"}, "suffix"),
    "penalty": (CHAT, {"messages": HI, "presence_penalty": 0.5}, "presence_penalty"),
    "bias": (CHAT, {"messages": HI, "logit_bias": {"5": 1}}, "logit_bias"),
    "log-probabilities of a chat": (CHAT, {"messages": HI, "logprobs": True}, "logprobs"),
    "echo of a chat": (CHAT, {"messages": HI, "echo": True}, "echo"),
    "special tokens around a chat": (CHAT, {"messages": HI, "add_special_tokens": True}, "add_special_tokens"),
    "tools": (CHAT, {"messages": HI, "tools": [{"type": "function"}]}, "tools"),
    "JSON": (CHAT, {"messages": HI, "response_format": {"type": "json_object"}}, "response_format"),
    "no messages": (CHAT, {"messages": []}, "messages"),
    "message without a role": (CHAT, {"messages": [{"content": "hi"}]}, "messages[0]"),
    "message without content": (CHAT, {"messages": [*HI, {"role": "user"}]}, "messages[1]"),
    "message with a number": (CHAT, {"messages": [*HI, {"role": "user", "content": 5}]}, "messages[1]"),
    "image": (CHAT, {"messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}]}]}, "messages[0]"),
    "role that the template refuses": (CHAT, {"messages": [{"role": "system", "content": "x"}]}, "messages"),
    "template": (CHAT, {"messages": HI, "chat_template": "{{ 1 }}"}, "chat_template"),
    "template among its variables": (
        CHAT, {"messages": HI, "chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
    "prompt and messages": ("/tokenize", {"prompt": "a", "messages": HI}, "prompt"),
    "neither of them": ("/tokenize", {}, "prompt"),
    "tokens in words": ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
    "token that can't be": ("/detokenize", {"tokens": [-1]}, "tokens"),
    "token of no text": ("/detokenize", {"tokens": [1, 10**6]}, "tokens"),
}  # fmt: skip


@pytest.mark.parametrize("case", BODIES)
def test_bodies(case: str, server: Served) -> None:
    route, body, param = BODIES[case]

    answer = server.ask(route, body)

    assert answer.status == 400, answer.body
    assert answer.error["param"] == param
    assert answer.error["type"] == "invalid_request_error"
    assert answer.error["message"]
    assert server.ask(COMPLETIONS, {"prompt": "a", "max_tokens": 1, "n": 4}).status == 200, "all places are free"


def test_what_says_nothing_is_taken(server: Served) -> None:
    nothing = {
        "frequency_penalty": 0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": {}, "n": 1,
        "user": "somebody", "metadata": {"a": "b"}, "service_tier": "auto", "stop": None, "seed": None, "top_k": -1,
        "response_format": {"type": "text"}, "stream": False, "stream_options": None, "skip_special_tokens": True,
        "min_tokens": 0, "stop_token_ids": [], "whatever_it_is": None,
    }  # fmt: skip
    chat = {
        "messages": HI,
        "max_tokens": 2,
        "tools": [],
        "tool_choice": "none",
        "logprobs": False,
        "modalities": ["text"],
    }

    assert server.ask(COMPLETIONS, {"prompt": "a", "max_tokens": 2, "best_of": 1, **nothing}).status == 200
    assert server.ask(CHAT, {**chat, **nothing, "parallel_tool_calls": True, "echo": False}).status == 200


def test_models_that_are_not_here(server: Served) -> None:
    answers = [
        server.ask(COMPLETIONS, {"model": "gpt-5", "prompt": "a"}), server.ask("/v1/models/gpt-5"),
        server.ask(CHAT, {"model": "gpt-5", "messages": HI}), server.ask("/tokenize", {"model": "x", "prompt": "a"}),
    ]  # fmt: skip

    assert [(answer.status, answer.error["code"]) for answer in answers] == [(404, "model_not_found")] * 4
    assert "recite" in answers[0].error["message"]


def test_routes_that_are_not_there(server: Served) -> None:
    assert server.ask("/v1/embeddings", {}).status == 404
    assert server.ask("/").error["message"] == "there is no GET / here"
    assert server.ask("/health/").status == 404
    assert server.ask(COMPLETIONS).headers["Allow"] == "POST"
    assert server.ask(COMPLETIONS).status == 405
    assert server.ask(COMPLETIONS, b"prompt=a", Content_Type="application/x-www-form-urlencoded").status == 415


def test_bodies_without_end_are_refused(server: Served) -> None:
    answer = server.ask(COMPLETIONS, b" " * (17 << 20))

    assert answer.status == 413
    assert server.ask("/health").status == 200


def test_keys(bundle: Path, tmp_path: Path) -> None:
    """Whoever has none gets nothing but what probes need, whatever the route."""
    (tmp_path / "keys").write_text("first\n\n  schlüssel \n", encoding="utf-8")
    routes = ["/v1/models", "/v1/models/x", COMPLETIONS, CHAT, "/tokenize", "/detokenize", "/metrics", "/version", "/x"]

    with served(bundle, "--api-key-file", tmp_path / "keys", PRECAST_API_KEY="not this") as server:
        assert [server.ask(route).status for route in ("/health", "/ready")] == [200, 200]
        for route in routes:
            assert server.ask(route).status == 401
            assert server.ask(route, {}).status == 401
        for wrong in (
            "",
            "first",
            "Bearer",
            "Bearer ",
            "Bearer firs",
            "Bearer first2",
            "Basic first",
            "Bearer not this",
        ):
            assert server.ask("/version", Authorization=wrong).error["code"] == "invalid_api_key"
        for right in ("Bearer first", "bearer first", "Bearer schlüssel".encode().decode("latin-1")):
            assert server.ask("/version", Authorization=right).status == 200
        with_path = server.ask("/health/../version")
        assert with_path.status == 401


def test_the_key_of_the_environment(bundle: Path) -> None:
    """A file that it comes from may end with a line."""
    with served(bundle, PRECAST_API_KEY="secret\n", waits=False) as server:
        assert server.ask("/version").status == 401
        assert server.ask("/version", Authorization="Bearer secret").status == 200


def test_requests_have_names(server: Served) -> None:
    names = [server.ask("/version", X_Request_Id=name).headers["X-Request-Id"] for name in ("mine", "x" * 500, "")]

    assert names[0] == "mine"
    assert [len(name) for name in names[1:]] == [32, 32]
    assert server.ask(COMPLETIONS, {"prompt": 5}, X_Request_Id="bad").headers["X-Request-Id"] == "bad"


def test_what_clients_choose_makes_no_series(server: Served) -> None:
    def num_series() -> int:
        server.ask("/x")
        server.ask(COMPLETIONS, {"prompt": "a", "model": "x"})
        return len(server.ask("/metrics").body.splitlines())

    num_series()  # which counts itself from now on
    before = num_series()
    for i in range(20):
        server.ask(f"/{i}")
        server.ask(COMPLETIONS, {"prompt": "a", "model": f"model {i}", "user": f"user {i}"})
        server.ask(f"/v1/models/{i}")

    assert num_series() == before
    assert json.loads(server.ask("/version").body)["version"]
