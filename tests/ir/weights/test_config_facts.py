"""A checkpoint's config against what a bundle keeps of the config that it was built from."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from examples import tiny_manifest
from precast.ir import encoding, limits
from precast.ir.artifact import Bundle
from precast.ir.errors import WeightsError
from precast.ir.manifest import ConfigFacts
from precast.ir.weights.config_facts import Difference, check, differences, entries, read_config

GOLDEN = Path(__file__).parents[2] / "golden" / "v1.0" / "recite.bundle"
FACTS = ConfigFacts(
    values={
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
        "head_dim": 128,
        "layer_types": ("full", "sliding", "full"),
        "use_sliding_window": True,
        "final_logit_softcapping": None,
        "rope_parameters.rope_theta": 500000.0,
        "rope_parameters.rope_type": "llama3",
        "rope_parameters.factor": 8.0,
    },
    same={"head_dim": (None,), "sliding_window": (0,)},
    absent={"rms_norm_eps": 1e-5, "rope_parameters.rope_type": "default"},
    absent_objects={"rope_parameters.rope_theta": 10000.0},
    spellings={
        "rope_theta": ("rope_parameters.rope_theta",),
        "rope_scaling": ("rope_parameters",),
        "norm_eps": ("rms_norm_eps",),
    },
)
ROPE = {"rope_theta": 500000, "rope_type": "llama3", "factor": 8}
SAME: dict[str, Any] = {"rms_norm_eps": 1e-6, "rope_parameters": ROPE}

EQUAL: list[tuple[str, dict[str, Any]]] = [
    ("entries that are left out and mean the same", SAME),
    ("integers for floats", SAME | {"sliding_window": 4096.0}),
    ("null where it means the value", SAME | {"head_dim": None}),
    ("another way to say it", SAME | {"sliding_window": 0}),
    ("the decoder's part of a larger config", {"text_config": SAME, "rms_norm_eps": 3.0}),
    ("old names", {"norm_eps": 1e-6, "rope_theta": 5e5, "rope_scaling": {"type": "llama3", "factor": 8}}),
    ("an old name beside the new one, which counts", SAME | {"rope_theta": 1.0}),
    ("an entry that the model does not have", SAME | {"made_by": "somebody", "conv_size": 3}),
    ("training, versions and token ids", SAME | {"resid_pdrop": 0.5, "torch_dtype": "float16", "eos_token_id": 7}),
    ("what a rope without more says", SAME | {"rope_parameters": ROPE | {"partial_rotary_factor": 1, "beta": None}}),
]  # fmt: skip


@pytest.mark.parametrize("config", [row[1] for row in EQUAL], ids=[row[0] for row in EQUAL])
def test_configs_that_mean_the_same(config: dict[str, Any]) -> None:
    assert differences(FACTS, config) == []


OTHER: list[tuple[dict[str, Any], list[Difference]]] = [
    (SAME | {"rms_norm_eps": 1e-5}, [Difference("rms_norm_eps", 1e-6, 1e-5)]),
    (SAME | {"final_logit_softcapping": 30.0}, [Difference("final_logit_softcapping", None, 30.0)]),
    (SAME | {"sliding_window": None}, [Difference("sliding_window", 4096, None)]),
    (SAME | {"use_sliding_window": 1}, [Difference("use_sliding_window", True, 1)]),
    (SAME | {"layer_types": ["full", "full", "full"]}, [Difference("layer_types[1]", "sliding", "full")]),
    (SAME | {"layer_types": ["full"]}, [Difference("layer_types", ("full", "sliding", "full"), ("full",))]),
    ({"rope_parameters": ROPE}, [Difference("rms_norm_eps", 1e-6, 1e-5)]),
    ({"rms_norm_eps": 1e-6}, [Difference("rope_parameters.rope_theta", 500000.0, 10000.0)]),
    (
        {"rms_norm_eps": 1e-6, "rope_theta": 1e4},
        [
            Difference("rope_parameters.rope_theta", 500000.0, 10000.0),
            Difference("rope_parameters.rope_type", "llama3", "default"),
        ],
    ),
    (SAME | {"rope_parameters": ROPE | {"mscale": 0.7}}, [Difference("rope_parameters.mscale", None, 0.7)]),
    ({"text_config": {"norm_eps": 2.0, "rope_parameters": ROPE}}, [Difference("rms_norm_eps", 1e-6, 2.0)]),
]


@pytest.mark.parametrize(("config", "expected"), OTHER)
def test_configs_that_differ(config: dict[str, Any], expected: list[Difference]) -> None:
    assert differences(FACTS, config) == expected


def test_the_part_of_a_larger_model() -> None:
    facts = ConfigFacts({"scale": 2}, part=("thinker", "text"))

    assert differences(facts, {"thinker": {"text": {"scale": 3}}, "scale": 2}) == [Difference("scale", 2, 3)]
    assert differences(facts, {"scale": 2}) == []  # the decoder saved alone


def test_how_quantised_numbers_are_read() -> None:
    facts = ConfigFacts({"quantization_config.checkpoint_format": "gptq"})

    def config(form: str) -> dict[str, Any]:
        return {"text_config": {}, "quantization_config": {"checkpoint_format": form, "dataset": "c4"}}

    assert differences(facts, config("gptq")) == []
    (found,) = differences(facts, config("gptq_v2"))
    assert found == Difference("quantization_config.checkpoint_format", "gptq", "gptq_v2")


@pytest.mark.parametrize(
    ("said", "form"),
    [
        ({}, "gptq"),
        ({"format": "gptq"}, "gptq"),
        ({"checkpoint_format": None, "format": "gptq_v2"}, "gptq_v2"),
        ({"checkpoint_format": "gptq_v2", "format": "gptq_v2"}, "gptq_v2"),
        ({"checkpoint_format": "gptq", "format": "gptq_v2"}, "gptq and gptq_v2"),
    ],
)
def test_the_format_of_gptq_has_two_names_and_a_default(said: dict[str, Any], form: str) -> None:
    facts = ConfigFacts({"quantization_config.checkpoint_format": "gptq"})

    found = differences(facts, {"quantization_config": {"quant_method": "gptq"} | said})

    assert [each.checkpoint for each in found] == ([] if form == "gptq" else [form])


def test_inputs_of_fp8_are_rounded_by_scales_of_their_own_unless_the_config_says_static() -> None:
    facts = ConfigFacts({"quantization_config.activation_scheme": "dynamic"})

    def found(**said: Any) -> list[Any]:
        config = {"quantization_config": {"quant_method": "fp8"} | said}
        return [each.checkpoint for each in differences(facts, config)]

    assert found() == found(activation_scheme=None) == found(activation_scheme="dynamic") == []
    assert found(activation_scheme="static") == ["static"]


def test_entries_are_flat_and_have_an_encoding() -> None:
    odd = {
        "nested": {"a": [{"b": 1}, {"b": [1, 2]}], "dropout": 1},
        "limit": [0.0, float("inf"), {"__float__": "NaN"}],
        "huge": 10**30,
    }

    assert entries(odd) == {
        "nested.a.0.b": 1,
        "nested.a.1.b": (1, 2),
        "limit": (0.0, "Infinity", "NaN"),
        "huge": str(10**30),
    }
    manifest = msgspec.structs.replace(tiny_manifest(), config=ConfigFacts(entries(odd)))
    assert encoding.decode_manifest(encoding.encode_manifest(manifest)) == manifest


# --- on disk -----------------------------------------------------------------------------------------------------


def test_all_differences_are_in_one_message(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SAME | {"rms_norm_eps": 1e-5, "sliding_window": 7}))

    with pytest.raises(WeightsError) as caught:
        check(FACTS, tmp_path)

    assert caught.value.code == "config-mismatch"
    assert caught.value.where == str(tmp_path / "config.json")
    assert "2 entries differ" in caught.value.message
    assert "rms_norm_eps: 1e-06 in the bundle, 1e-05 here" in caught.value.message
    assert "sliding_window: 4096 in the bundle, 7 here" in caught.value.message
    assert "allow_config_mismatch" in str(caught.value.fix)
    assert str(caught.value.fix).startswith("build a bundle from this config")


def test_another_model_is_named_as_such_first(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SAME | {"model_type": "gpt2"}))
    facts = msgspec.structs.replace(FACTS, values=FACTS.values | {"model_type": "llama"})

    with pytest.raises(WeightsError) as caught:
        check(facts, tmp_path)

    assert str(caught.value.fix).startswith("this is another model: name the checkpoint of the bundle's, or build a")


def test_the_config_beside_a_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SAME | {"rms_norm_eps": 1e-5}))
    (tmp_path / "model.safetensors").touch()

    with pytest.raises(WeightsError, match="1 entry differs"):
        check(FACTS, tmp_path / "model.safetensors")


def test_nothing_to_compare(tmp_path: Path) -> None:
    check(FACTS, tmp_path)  # a checkpoint without a config.json
    (tmp_path / "config.json").write_text("no JSON, and nobody reads it")
    check(None, tmp_path)


def test_bundles_of_format_1_0_have_no_facts() -> None:
    assert Bundle.open(GOLDEN).manifest.config is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "expected JSON"),
        (b"[]", "expected a JSON object"),
        (b"\xff", "expected JSON"),
        (b"[" * 10**6, "expected JSON"),
        (b'{"a": ' + b"[" * 400 + b"]" * 400 + b"}", "nested more than 32 levels deep"),
    ],
    ids=["cut", "list", "bytes", "deep", "less deep"],
)
def test_a_config_that_cannot_be_read(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(content)

    with pytest.raises(WeightsError, match=message) as caught:
        check(FACTS, tmp_path)

    assert caught.value.code == "checkpoint-config"


def test_a_config_of_any_size_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_CONFIG_BYTES", 10)
    (tmp_path / "config.json").write_bytes(b'{"a": "bcd"}')

    with pytest.raises(WeightsError, match="more than 10 bytes"):
        read_config(tmp_path)


def test_a_config_that_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()

    with pytest.raises(WeightsError, match="can't be read"):
        read_config(tmp_path)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_only_a_regular_file_is_opened(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / "config.json")

    with pytest.raises(WeightsError) as caught:
        read_config(tmp_path)

    assert caught.value.code == "checkpoint-config"
    assert "regular file" in caught.value.message


@pytest.mark.parametrize("pair", [('{"a":', "}"), ("[", "]")])
def test_nesting_ends(pair: tuple[str, str], tmp_path: Path) -> None:
    opening, closing = pair

    def config(depth: int) -> None:
        text = '{"x":' + opening * (depth - 1) + "0" + closing * (depth - 1) + "}"
        (tmp_path / "config.json").write_text(text)

    config(limits.MAX_JSON_NESTING)
    assert read_config(tmp_path) is not None
    for depth in (limits.MAX_JSON_NESTING + 1, 900, 100_000):
        config(depth)
        with pytest.raises(WeightsError) as caught:
            read_config(tmp_path)
        assert caught.value.code == "checkpoint-config"


def test_other_names_of_entries_do_not_multiply_them(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = ConfigFacts({"vocab_size": 1}, spellings={"a": tuple(f"t{i}" for i in range(10))})
    config = {"a": {f"n{i}": 1 for i in range(10)}, "b": 1}
    monkeypatch.setattr(limits, "MAX_CONFIG_ENTRIES", 200)
    differences(facts, config)

    monkeypatch.setattr(limits, "MAX_CONFIG_ENTRIES", 50)

    with pytest.raises(WeightsError, match="more than 50 entries"):
        differences(facts, config)


def test_entries_of_long_names_are_passed_over() -> None:
    """The codec of bundles refuses longer strings: no facts have them."""
    longest = "n" * limits.MAX_STRING_BYTES

    found = entries({longest: 1, longest + "n": 2, "inner": {"a" * limits.MAX_STRING_BYTES: 3}})

    assert found == {longest: 1}


def test_names_stay_in_their_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"rope_parameters": {"a\nerror: b\x1b": 1}}))

    with pytest.raises(WeightsError) as caught:
        check(ConfigFacts({}), tmp_path)

    assert r"rope_parameters.a\nerror: b\x1b" in str(caught.value)
