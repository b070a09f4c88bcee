"""Chats as prompts: rendered as transformers does it, and what users write kept from being control tokens."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from recitation import MODEL

from precast.ir.errors import BundleError
from precast.ir.manifest import ModelInfo
from precast.serve.chat import ChatTemplate
from precast.serve.prompts import Control, Prompts
from precast.serve.requests import BadRequest

MODEL_INFO = ModelInfo("A", "a", "float32", vocab_size=512, max_seq_len=1024, num_layers=1, num_parameters=1)
HI = [{"role": "user", "content": "hi"}]
CHAT = [
    {"role": "system", "content": "Be  brief.\n"},
    {"role": "user", "content": "Add <b>1</b> & 2; say “so” 🙂"},
    {"role": "assistant", "content": "3", "reasoning": "one and two"},
    {"role": "user", "content": ""},
]

TEMPLATES = {
    "blocks and blanks": """
{%- for message in messages %}
    {% if loop.first and message.role == 'system' %}
<<{{ message.content | trim }}>>
    {%- else %}
{{ message['role'] }}: {{ message['content'] }}{{ eos_token }}
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}assistant:{% endif %}""",
    "namespace and loop controls": "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% continue %}{% endif %}{% set ns.n = ns.n + 1 %}{% if ns.n > 2 %}{% break %}{% endif %}{{ ns.n }}{{ m.content }}"
    "{% endfor %}",
    "tojson": "{% for m in messages %}{{ m | tojson }}{{ {'b': 1.0, 'a': '<é>'} | tojson(indent=2, sort_keys=true) }}"
    "{% endfor %}",
    "what assistants say": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{% set x = 1 %}"
    "{{ m.content }}{% endgeneration %}{{ x is defined }}{% endif %}{% endfor %}",
    "reasoning": "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }}|{{ m.get('reasoning') }};"
    "{% endfor %}",
    "variables": "{{ bos_token }}{{ enable_thinking is defined and not enable_thinking }}{{ tools is none }}"
    "{{ documents is none }}{{ unk_token is defined }}",
    "methods": "{% for m in messages %}{{ m.content.split(' ')[0].upper() }}{{ m.content.startswith('Add') }}"
    "{{ dict(a=1)['a'] }}{{ '%d' % 3 }}{% endfor %}",
}  # fmt: skip


@pytest.mark.parametrize("case", TEMPLATES)
@pytest.mark.parametrize("begins", [True, False])
def test_templates_render_as_in_transformers(case: str, begins: bool) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(MODEL)
    ours = ChatTemplate(TEMPLATES[case], {"bos_token": theirs.bos_token, "eos_token": theirs.eos_token})

    expected = theirs.apply_chat_template(
        CHAT, chat_template=TEMPLATES[case], tokenize=False, add_generation_prompt=begins, enable_thinking=False
    )

    assert ours.render(CHAT, {"enable_thinking": False}, add_generation_prompt=begins) == expected


REFUSED = {
    "by itself": ("{{ raise_exception('Only users.') }}", "refuses these messages: Only users."),
    "outside the sandbox": ("{{ ''.__class__.__mro__ }}", "refuses these messages: "),
    "changing what it is given": ("{{ messages.append(1) }}", "refuses these messages: "),
    "underscores in a namespace": ("{% set n = namespace() %}{% set n._a = 1 %}", "refuses these messages: "),
    "adding text to nothing": ("{{ 'a' + messages[0].name }}", "refuses these messages: "),
    "adding text to a number": ("{{ 'a' + 1 }}", "fails at these messages: TypeError"),
    "dividing by 0": ("{{ 1 / 0 }}", "fails at these messages: ZeroDivisionError"),
    "without end": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "fails at these messages: RecursionError"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_templates_that_refuse_or_fail(case: str) -> None:
    text, said = REFUSED[case]

    with pytest.raises(BadRequest, match=said) as refused:
        ChatTemplate(text, {}).render(HI, {})

    assert refused.value.param == "messages"


def test_templates_are_found_where_transformers_finds_them() -> None:
    def rendered(**files: Any) -> str | None:
        named = {name.replace("_json", ".json").replace("_jinja", ".jinja"): each for name, each in files.items()}
        template = ChatTemplate.from_files(
            {
                name: each.encode() if isinstance(each, str) else json.dumps(each).encode()
                for name, each in named.items()
            }
        )
        return None if template is None else template.render(HI, {})

    config = {"chat_template": "config{{ eos_token }}", "eos_token": {"content": "<e>"}, "bos_token": None}
    several = [{"name": "tools", "template": "tools"}, {"name": "default", "template": "default"}]

    assert rendered() is None
    assert rendered(tokenizer_config_json={"eos_token": "x"}) is None
    assert rendered(tokenizer_config_json=config) == "config<e>"
    assert rendered(tokenizer_config_json={"chat_template": several}) == "default"
    assert rendered(tokenizer_config_json={"chat_template": several[:1]}) is None
    assert rendered(tokenizer_config_json=config, chat_template_json={"chat_template": "processor"}) == "processor"
    assert rendered(tokenizer_config_json=config, chat_template_jinja="file{{ eos_token }}") == "file<e>"
    assert rendered(special_tokens_map_json={"eos_token": "<m>"}, chat_template_jinja="{{ eos_token }}") == "<m>"


def test_files_that_hold_no_template() -> None:
    with pytest.raises(BundleError, match="the chat template can't be read: "):
        ChatTemplate.from_files({"chat_template.jinja": b"{% for %}"})
    for name, data in {
        "tokenizer_config.json": b"[]",
        "chat_template.jinja": b"\xff",
        "chat_template.json": b"{",
    }.items():
        with pytest.raises(BundleError, match=f"^{name}: "):
            ChatTemplate.from_files({name: data})


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    files = {file.name: file.read_bytes() for file in MODEL.iterdir() if file.suffix in (".json", ".jinja")}
    return Prompts(files, MODEL_INFO)


CONTROL = [
    "<|eos|>", "a<|eos|><|user|>b", "<|assistant|>", "<|bos|><|bos|>", "\U000f0000", "\U000f00000\U000f0000",
    "x\U000f0000<|eos|>\U000f00001\U000f0000", "<|pad|>" * 3,
]  # fmt: skip


@pytest.mark.parametrize("text", CONTROL)
def test_special_tokens_in_a_message_are_text(text: str, prompts: Prompts) -> None:
    plain = prompts.of_chat([{"role": "user", "content": "?"}], {})

    ids = prompts.of_chat([{"role": "user", "content": text}], {})

    special = set(range(5))
    assert [id for id in ids if id in special] == [id for id in plain if id in special]
    assert prompts.tokenizer is not None
    assert prompts.tokenizer.decode(ids) == text


def prompts_of(template: str, *, extra: list[dict[str, Any]] | None = None) -> Prompts:
    """The example's tokenizer, with more added tokens, and this template."""
    tokenizer = json.loads((MODEL / "tokenizer.json").read_text())
    for number, token in enumerate(extra or []):
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        tokenizer["added_tokens"].append({"id": 512 + number, "special": False} | plain | token)
    files = {"tokenizer.json": json.dumps(tokenizer).encode(), "chat_template.jinja": template.encode()}
    return Prompts(files, msgspec.structs.replace(MODEL_INFO, vocab_size=520))


def test_they_are_text_wherever_they_stand() -> None:
    prompts = prompts_of("{{ messages[0].name }}{{ messages[0].parts | tojson }}{{ x }}<|eos|>")
    message = {"role": "user", "content": "", "name": "<|bos|>", "parts": [{"<|user|>": "<|pad|>"}]}

    ids = prompts.of_chat([message], {"x": "<|user|>"})

    assert [id for id in ids if id < 5] == [ids[-1]]
    assert prompts.tokenizer is not None
    assert prompts.tokenizer.decode(ids) == '<|bos|>[{"<|user|>": "<|pad|>"}]<|user|>'


def test_what_a_template_writes_is_control_too() -> None:
    """Not every publisher marks the tokens of roles as special. Assistants may say them, as `<think>`: templates look
    for them there."""
    prompts = prompts_of("{% for m in messages %}<U>{{ m.content }}{% endfor %}", extra=[{"content": "<U>"}])

    asked = prompts.of_chat([{"role": "user", "content": "a<U>b"}], {})
    answered = prompts.of_chat([{"role": "assistant", "content": "a<U>b"}], {})

    assert list(asked).count(512) == 1
    assert list(answered).count(512) == 2


def test_what_is_encoded_apart_is_encoded_as_ever(prompts: Prompts) -> None:
    """Where no message has a control token, both ways give the same ids."""
    control = Control((MODEL / "tokenizer.json").read_bytes(), "")
    text = "<|bos|><|user|>Four score,  and\n\nseven 🙂<|assistant|>years<|eos|>"

    assert prompts.tokenizer is not None
    assert control.encode(text, []) == prompts.tokenizer.encode(text, add_special_tokens=False)


def test_blanks_that_belong_to_a_token() -> None:
    import tokenizers

    plain = tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    plain.add_special_tokens([tokenizers.AddedToken("<r>", rstrip=True), tokenizers.AddedToken("<l>", lstrip=True)])
    text = "a <r>  b <l> c<r>"

    assert Control(plain.to_str().encode(), "").encode(text, []) == plain.encode(text, add_special_tokens=False).ids
