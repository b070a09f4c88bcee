"""What is answered: the tokens of the engine, whole and in streams, in OpenAI's words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from recitation import MODEL, OPENING, rest
from served import Served, served

import precast

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GREEDY = {"temperature": 0, "max_tokens": 40}
RECITE = {"role": "user", "content": "How does it begin?"}


@pytest.fixture(scope="module")
def engine(bundle: Path) -> Any:
    """The same bundle without a server."""
    with precast.load(bundle, weights=MODEL, device="cpu") as engine:
        yield engine


def test_a_completion_is_the_engine_s(server: Served, engine: Any) -> None:
    answer = server.ask(COMPLETIONS, {"model": "recite", "prompt": OPENING, **GREEDY})

    (output,) = engine.generate([OPENING], precast.SamplingParams(max_tokens=40))
    assert answer.status == 200
    assert answer.json["choices"] == [
        {"index": 0, "text": output.text, "logprobs": None, "finish_reason": output.finish_reason}
    ]
    counts = {"prompt_tokens": len(output.prompt_token_ids), "completion_tokens": len(output.token_ids)}
    assert answer.json["usage"] == counts | {"total_tokens": sum(counts.values())}
    assert answer.json["system_fingerprint"] == server.ask("/v1/models").json["data"][0]["root"]
    assert rest(OPENING).startswith(output.text)


def test_objects_are_openai_s(server: Served) -> None:
    chat = {"messages": [RECITE], **GREEDY}

    Completion.model_validate(server.ask(COMPLETIONS, {"prompt": OPENING, **GREEDY}).json, strict=True)
    ChatCompletion.model_validate(server.ask(CHAT, chat).json, strict=True)
    for body in (chat, chat | {"stream_options": {"include_usage": True}}):
        for chunk in server.ask(CHAT, body | {"stream": True}).chunks:
            ChatCompletionChunk.model_validate(chunk, strict=True)


def test_openai_s_client_is_served(server: Served) -> None:
    client = OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0)

    chat = client.chat.completions.create(model="recite", messages=[RECITE], max_completion_tokens=12, temperature=0)
    stream = client.chat.completions.create(
        model="recite", messages=[RECITE], max_completion_tokens=12, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)

    assert [model.id for model in client.models.list()] == ["recite"]
    assert client.models.retrieve("recite").id == "recite"
    said = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(said) == chat.choices[0].message.content
    assert chunks[-1].usage == chat.usage
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)


@pytest.mark.parametrize("stop", [None, "seven", "\n", "on this continent", "nowhere in it"])
@pytest.mark.parametrize("kind", [COMPLETIONS, CHAT])
def test_a_stream_is_the_whole_answer_in_parts(kind: str, stop: str | None, server: Served) -> None:
    asked = {"prompt": ["Four", OPENING]} if kind == COMPLETIONS else {"messages": [RECITE]}
    body = {**asked, **GREEDY, "n": 2, "stop": stop, "return_token_ids": True}

    whole = server.ask(kind, body).json
    *chunks, last = server.ask(kind, body | {"stream": True, "stream_options": {"include_usage": True}}).chunks

    texts: dict[int, str] = {}
    ids: dict[int, list[int]] = {}
    reasons = {}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        index, text = choice["index"], choice["delta"].get("content", "") if kind == CHAT else choice["text"]
        assert index not in reasons, "nothing comes after the reason"
        texts[index] = texts.get(index, "") + text
        ids.setdefault(index, []).extend(choice["token_ids"])
        if choice["finish_reason"] is not None:
            reasons[index] = choice["finish_reason"]
    wholes = {choice["index"]: choice for choice in whole["choices"]}
    assert len(wholes) == (4 if kind == COMPLETIONS else 2)
    assert texts == {i: each["message"]["content"] if kind == CHAT else each["text"] for i, each in wholes.items()}
    assert ids == {i: each["token_ids"] for i, each in wholes.items()}
    assert reasons == {i: each["finish_reason"] for i, each in wholes.items()}
    assert last["usage"] == whole["usage"]
    assert whole["usage"]["completion_tokens"] == sum(map(len, ids.values()))
    assert not stop or all(stop not in text for text in texts.values())


def test_a_chat_is_rendered_by_the_bundle_s_template(server: Served) -> None:
    from transformers import AutoTokenizer

    messages = [RECITE, {"role": "assistant", "content": "Four score"}, {"role": "user", "content": [
        {"type": "text", "text": "Go on."}]}]  # fmt: skip
    plain = [*messages[:2], {"role": "user", "content": "Go on."}]
    expected = AutoTokenizer.from_pretrained(MODEL).apply_chat_template(plain, add_generation_prompt=True)["input_ids"]

    tokens = server.ask("/tokenize", {"messages": messages}).json["tokens"]
    by_chat = server.ask(CHAT, {"messages": messages, **GREEDY}).json
    by_ids = server.ask(COMPLETIONS, {"prompt": expected, **GREEDY}).json

    assert tokens == expected
    assert by_chat["choices"][0]["message"]["content"] == by_ids["choices"][0]["text"]
    assert by_chat["usage"] == by_ids["usage"]


def test_seeds_decide_what_is_drawn(server: Served) -> None:
    body = {"prompt": "It is", "max_tokens": 30, "temperature": 3, "ignore_eos": True}

    def texts(**more: Any) -> list[str]:
        return [choice["text"] for choice in server.ask(COMPLETIONS, {**body, **more}).json["choices"]]

    both = texts(seed=5, n=2)
    assert texts(seed=5) + texts(seed=6) == both
    assert len(set(both)) == 2
    assert texts() != texts()


def test_prompts_come_back_if_they_are_asked_for(server: Served) -> None:
    ids = server.ask("/tokenize", {"prompt": OPENING}).json["tokens"]
    body = {"prompt": [ids], **GREEDY, "echo": True}

    (choice,) = server.ask(COMPLETIONS, body).json["choices"]
    streamed = "".join(chunk["choices"][0]["text"] for chunk in server.ask(COMPLETIONS, body | {"stream": True}).chunks)

    assert choice["text"].startswith(OPENING)
    assert streamed == choice["text"]


def test_without_saying_so_an_answer_is_as_long_as_openai_s(server: Served) -> None:
    completion = server.ask(COMPLETIONS, {"prompt": OPENING, "temperature": 0})
    chat = server.ask(CHAT, {"messages": [RECITE], "temperature": 0})

    assert completion.json["usage"]["completion_tokens"] == 16
    assert chat.json["choices"][0]["finish_reason"] == "stop"


def test_tokens_there_and_back(server: Served) -> None:
    tokenized = server.ask("/tokenize", {"prompt": OPENING}).json
    bare = server.ask("/tokenize", {"prompt": OPENING, "add_special_tokens": False}).json

    assert tokenized["count"] == len(tokenized["tokens"])
    assert tokenized["tokens"][1:] == bare["tokens"]
    assert tokenized["max_model_len"] == 1024
    assert server.ask("/detokenize", {"tokens": tokenized["tokens"]}).json == {"prompt": OPENING}


def test_a_stream_may_count_on(server: Served) -> None:
    body = {"prompt": OPENING, **GREEDY, "stream": True, "stream_options": {"continuous_usage_stats": True}}

    counts = [chunk["usage"]["completion_tokens"] for chunk in server.ask(COMPLETIONS, body).chunks]

    assert counts == sorted(counts)
    assert counts[-1] == 40
    assert counts[0] < 40


def test_a_bundle_without_a_tokenizer_takes_and_gives_token_ids(bare_bundle: Path, engine: Any) -> None:
    ids = engine.tokenizer.encode(OPENING)
    (output,) = engine.generate([ids], precast.SamplingParams(max_tokens=8))

    with served(bare_bundle) as server:
        answer = server.ask(COMPLETIONS, {"prompt": ids, "max_tokens": 8, "temperature": 0, "return_token_ids": True})
        refusals = [
            server.ask(COMPLETIONS, {"prompt": OPENING}), server.ask(CHAT, {"messages": [RECITE]}),
            server.ask("/detokenize", {"tokens": ids}),
        ]  # fmt: skip

        assert server.ask("/v1/models").json["data"][0]["id"] == "bare"
    assert answer.json["choices"][0]["token_ids"] == output.token_ids
    assert answer.json["choices"][0]["text"] == ""
    assert [refusal.error["code"] for refusal in refusals] == ["tokenizer-missing"] * 3
