"""Where each fact of a config is read, and what its numbers, architectures and files may be."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import families
import pytest
from transformers import AutoConfig

from precast.builder.build import build
from precast.builder.capture.factory import make_module
from precast.builder.source.config_facts import config_facts
from precast.builder.source.facts import Facts
from precast.builder.source.shrink import shrink
from precast.builder.source.source import Source, open_source
from precast.builder.weights.recipes import ModelCheckpoint
from precast.ir.artifact import Bundle
from precast.ir.errors import BuildError
from precast.ir.weights.config_facts import differences


def entries_of(family: str, **changes: Any) -> dict[str, Any]:
    return {**families.make_config(family).to_dict(), **changes}


def opened(folder: Path, entries: dict[str, Any], *, model_type: str | None = None, **files: Any) -> Source:
    """The source that these entries make; `files` stand beside them, by their names without `.json`."""
    for name, content in {"config": entries, **files}.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / f"{name}.json").write_text(text)
    return open_source(folder, model_type=model_type)


def refused(folder: Path, entries: dict[str, Any], code: str, message: str, **files: Any) -> BuildError:
    with pytest.raises(BuildError, match=message) as error:
        opened(folder, entries, **files)
    assert error.value.code == code
    return error.value


def nested(decoder: dict[str, Any], **top: Any) -> dict[str, Any]:
    """A multimodal config with this decoder: as it is published, with what the classes add left out."""
    sizes = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", **sizes, **decoder}, **top}


# --- dtype -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_the_dtype_of_a_nested_config(name: str, tmp_path: Path) -> None:
    facts = opened(tmp_path, nested({name: "bfloat16"})).facts

    assert (facts.dtype, facts.dtype_note) == ("bfloat16", None)


def test_the_decoders_own_dtype_counts(tmp_path: Path) -> None:
    assert opened(tmp_path, nested({"dtype": "float16"}, dtype="bfloat16")).facts.dtype == "float16"


def test_a_quantised_checkpoint_without_a_dtype(tmp_path: Path) -> None:
    entries = entries_of(
        "llama", dtype=None, quantization_config={"quant_method": "fp8", "weight_block_size": [16, 16]}
    )

    facts = opened(tmp_path, entries).facts

    assert facts.dtype == "bfloat16"
    note = "the config names no dtype; bfloat16 was chosen as for any quantised checkpoint (--dtype)"
    assert facts.dtype_note == note


def test_a_build_says_which_dtype_it_chose(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = opened(tmp_path, entries_of("llama", dtype=None))
    told_by: list[tuple[str, int]] = []

    chosen = build(
        source.config, tmp_path / "chosen", progress=lambda stage: told_by.append((stage, len(caplog.records)))
    )
    told = [record.getMessage() for record in caplog.records if record.name == "precast"]
    build(source.config, tmp_path / "named", dtype="float32")

    (note,) = chosen.provenance["notes"]
    assert note.startswith("the config names no dtype; float32 was chosen")
    assert told == [f"warning: LlamaConfig: {note}"]
    assert dict(told_by)["export"] == 1  # before the build takes its time
    assert "notes" not in Bundle.open(tmp_path / "named").provenance
    assert len([record for record in caplog.records if record.name == "precast"]) == 1


def test_dequantise_of_what_is_not_quantised_is_told_and_changes_nothing(tmp_path: Path) -> None:
    source = opened(tmp_path, entries_of("llama"))

    whole, plain = (
        build(source.config, tmp_path / name, dtype="float32", dequantise=name == "whole")
        for name in ("whole", "plain")
    )

    assert whole.digest == plain.digest
    assert whole.provenance["notes"] == [
        "the config says nothing of quantised weights: with or without dequantise it is the same bundle"
    ]
    assert "notes" not in plain.provenance


# --- tokens ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entries", "generation", "expected"),
    [
        (nested({"eos_token_id": 7}, eos_token_id=[1, 106]), {}, (1, 106)),
        (nested({"eos_token_id": 7}, eos_token_id=None), {}, (7,)),
        (nested({"eos_token_id": 7}), {"eos_token_id": 9}, (9,)),
        (nested({"eos_token_id": 7}, eos_token_id=8), {"eos_token_id": 9}, (9,)),
        (nested({"eos_token_id": 7}), {"eos_token_id": None}, (7,)),
        (nested({}), {}, (1,)),  # the default of transformers' class
        (nested({"eos_token_id": -1}), {}, ()),  # as some write that there is none
    ],
)
def test_where_the_end_is_read(
    entries: dict[str, Any], generation: dict[str, Any], expected: tuple[int, ...], tmp_path: Path
) -> None:
    assert opened(tmp_path, entries, generation_config=generation).facts.eos_token_ids == expected


def test_the_first_token_is_read_as_the_last(tmp_path: Path) -> None:
    assert opened(tmp_path, nested({"bos_token_id": 7}, bos_token_id=3)).facts.bos_token_id == 3
    assert opened(tmp_path, nested({"bos_token_id": 7})).facts.bos_token_id == 7


@pytest.mark.parametrize("name", ["eos_token_id", "bos_token_id"])
@pytest.mark.parametrize("value", [-5, 2**40, 2**70, [2, -1], "2"])
def test_a_token_that_is_none(name: str, value: Any, tmp_path: Path) -> None:
    error = refused(tmp_path, nested({}, **{name: value}), "config-invalid", f"{name} is .* in the config, expected")

    assert error.fix == f"correct {name} in the config"


TINY_VOCABULARY = {"model_type": "gpt2", "vocab_size": 50}  # of whose class the default is 50256


@pytest.mark.parametrize(
    ("entries", "generation", "ends", "begin", "left_out"),
    [
        (nested({}, eos_token_id=[299, 300]), {}, (299,), 2, ["eos_token_id 300 (the config)"]),
        (nested({"eos_token_id": 300}), {}, (), 2, ["eos_token_id 300 (the config's text_config)"]),
        (nested({}), {"eos_token_id": [1, 300, 2**30]}, (1,), 2,
         ["eos_token_id 300, 1073741824 (generation_config.json)"]),
        (nested({}, bos_token_id=300), {}, (1,), None, ["bos_token_id 300 (the config)"]),
        (nested({}, bos_token_id=299, eos_token_id=0), {}, (0,), 299, []),
        (TINY_VOCABULARY, {}, (), None,
         ["eos_token_id 50256 (transformers' default)", "bos_token_id 50256 (transformers' default)"]),
    ],
)  # fmt: skip
def test_tokens_beyond_the_vocabulary_are_left_out(
    entries: dict[str, Any],
    generation: dict[str, Any],
    ends: tuple[int, ...],
    begin: int | None,
    left_out: list[str],
    tmp_path: Path,
) -> None:
    """Models are published that name some: they work, and end where they are told to."""
    facts = opened(tmp_path, entries, generation_config=generation).facts

    size = entries.get("vocab_size", 300)
    assert (facts.eos_token_ids, facts.bos_token_id) == (ends, begin)
    assert list(facts.notes) == [
        f"{each} is left out: of a vocabulary of {size} tokens it is never drawn" for each in left_out
    ]


def test_a_build_says_which_tokens_it_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = opened(tmp_path, entries_of("llama", eos_token_id=[2, 131], dtype="float32"))

    bundle = build(source.config, tmp_path / "bundle", dtype="bfloat16")

    (note,) = bundle.provenance["notes"]
    assert note.startswith("eos_token_id 131 (the config) is left out")
    assert f"warning: LlamaConfig: {note}" in [record.getMessage() for record in caplog.records]
    assert bundle.manifest.model.eos_token_ids == (2,)


@pytest.mark.parametrize("value", [300, -2, 2**70])
def test_a_padding_token_outside_of_the_vocabulary(value: int, tmp_path: Path) -> None:
    """The one of the top level counts, as for the other tokens."""
    error = refused(
        tmp_path, nested({"pad_token_id": 0}, pad_token_id=value), "config-invalid",
        f"pad_token_id is {value} in the config, expected a token of the vocabulary, 0 to 299, or -1 or null for none",
    )  # fmt: skip

    assert error.fix == "correct pad_token_id in the config"
    refused(tmp_path, nested({"pad_token_id": value}), "config-invalid", "in the config's text_config, expected a tok")


@pytest.mark.parametrize("value", [0, 130, -1, None])
def test_a_padding_token_changes_nothing(value: int | None, tmp_path: Path) -> None:
    """Some publishers write none as -1, which torch takes for the last row of the embedding."""
    without = build(opened(tmp_path, entries_of("llama", pad_token_id=None)).config, tmp_path / "without")

    found = build(opened(tmp_path, entries_of("llama", pad_token_id=value)).config, tmp_path / "with")

    assert found.graph == without.graph


def test_of_a_default_padding_token_the_models_code_is_the_judge(tmp_path: Path) -> None:
    source = opened(tmp_path, {"model_type": "phi3", "vocab_size": 50})  # 32000 is the default of its class

    with pytest.raises(BuildError, match="adding_idx") as error:
        make_module(source.config, "float32")

    assert error.value.code == "config-invalid"


# --- numbers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_theta": 0}, "rope_theta is 0, expected a number above 0"),
        ({"rope_theta": -1e4}, "rope_theta is -10000.0, expected a number above 0"),
        ({"rope_theta": float("nan")}, "rope_theta is nan, expected a finite number above 0"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps is inf, expected a finite number of at least 0"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps is -1e-06, expected a number of at least 0"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000, expected at most 4096"),
        ({"vocab_size": 10**12}, "vocab_size is 1000000000000, expected a number .* at most 16777216"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.0}}, r"\.factor is 0.0, expected a number above 0"),
        ({"rope_scaling": {"rope_type": "linear", "factor": float("nan")}}, r"\.factor is nan, expected"),
    ],
)
def test_a_number_out_of_range(changes: dict[str, Any], expected: str, tmp_path: Path) -> None:
    entries = {**entries_of("llama"), **changes}
    entries.pop("rope_parameters", None)

    refused(tmp_path, entries, "config-invalid", expected)


def test_a_bound_may_be_infinite(tmp_path: Path) -> None:
    limits = {"__float__": "Infinity"}

    source = opened(tmp_path, {**entries_of("mamba2"), "time_step_limit": [0.0, limits]})

    assert list(source.config.time_step_limit) == [0.0, float("inf")]


def test_a_bound_is_a_number(tmp_path: Path) -> None:
    entries = {**entries_of("mamba2"), "time_step_limit": [0.0, {"__float__": "NaN"}]}

    refused(tmp_path, entries, "config-invalid", r"time_step_limit\.1 is nan, expected a finite number")


# --- files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [40, 100_000])
@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("config", "config-invalid"),
        ("generation_config", "config-invalid"),
        ("hf_quant_config", "config-invalid"),
        ("quantize_config", "config-invalid"),
        ("tokenizer", "tokenizer-invalid"),
        ("tokenizer_config", "tokenizer-invalid"),
        ("special_tokens_map", "tokenizer-invalid"),
        ("chat_template", "tokenizer-invalid"),
    ],
)
def test_json_that_is_nested_without_end(file: str, code: str, depth: int, tmp_path: Path) -> None:
    bomb = '{"model_type": "llama", "inner": ' + "[" * depth + "]" * depth + "}"

    refused(tmp_path, entries_of("llama"), code, "nested more than 32 levels deep", **{file: bomb})


# --- which model it is -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "architecture",
    ["LlamaForSequenceClassification", "LlamaModel", "T5ForConditionalGeneration", "LlamaForRewardModel"],
)
def test_an_architecture_that_is_no_decoder(architecture: str, tmp_path: Path) -> None:
    entries = entries_of("llama", architectures=[architecture])

    error = refused(
        tmp_path, entries, "model-unsupported", f"architecture is {architecture}, expected .* LlamaForCausalLM"
    )

    assert error.fix is not None


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "LLaMAForCausalLM", None])
def test_an_architecture_that_is_the_decoder(architecture: str | None, tmp_path: Path) -> None:
    named = None if architecture is None else [architecture]

    assert opened(tmp_path, entries_of("llama", architectures=named)).entries["architectures"] == named


def test_a_whole_model_is_a_decoder_of_its_type(tmp_path: Path) -> None:
    whole = opened(tmp_path, nested({}, architectures=["Gemma3ForConditionalGeneration"]))

    assert whole.config.model_type == "gemma3"


def test_a_class_that_is_spelt_otherwise_needs_no_code(tmp_path: Path) -> None:
    entries = entries_of("llama", architectures=["LLaMA_ForCausalLM"], auto_map={"AutoModelForCausalLM": "own.Model"})

    assert not opened(tmp_path, entries).has_code


def test_a_flat_config_of_a_model_that_reads_a_nested_one(tmp_path: Path) -> None:
    entries = {**nested({})["text_config"], "model_type": "gemma3"}

    refused(tmp_path, entries, "config-invalid", "is 300 at the config's top level, where no Gemma3Config reads it")


CODE = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}


def test_a_model_type_in_place_of_the_configs_own(tmp_path: Path) -> None:
    entries = entries_of("llama", model_type="kimi_llama", architectures=["LlamaForCausalLM"], auto_map=CODE)
    error = refused(tmp_path, entries, "remote-code", "names code to run")
    assert error.fix is not None
    assert "model_type='llama'" in error.fix

    source = opened(tmp_path, entries, model_type="llama")

    assert (source.config.model_type, source.has_code) == ("llama", False)
    assert differences(config_facts(source), entries) == []
    other = {**entries, "model_type": "mistral"}
    assert [each.name for each in differences(config_facts(source), other)] == ["model_type"]


def test_a_model_type_that_transformers_does_not_know(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="doesn't know the model_type no-such") as error:
        opened(tmp_path, entries_of("llama"), model_type="no-such")
    assert error.value.code == "option-invalid"


def test_a_model_type_for_a_config_object() -> None:
    with pytest.raises(BuildError, match="goes with files") as error:
        open_source(families.make_config("llama"), model_type="llama")
    assert error.value.code == "option-invalid"


def test_parts_that_no_text_goes_through_need_no_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 3n's images go through a model of the package timm."""
    import transformers.models.timm_wrapper.modeling_timm_wrapper as timm

    def missing(*_: Any) -> None:
        raise ImportError("it requires the timm library:")

    monkeypatch.setattr(timm, "requires_backends", missing)
    config = shrink(AutoConfig.for_model("gemma3n"))

    module = make_module(config, "float32")

    assert "model.vision_tower.*" in ModelCheckpoint(module).known_names().ignored
    assert [name for name in module.state_dict() if name.startswith("model.vision_tower.")] == []


# --- quantisation ------------------------------------------------------------------------------------------------

FLOAT8 = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
BITS = {"group_size": 64, "bits": 4}


def test_modelopts_float8_in_a_file_of_its_own(tmp_path: Path) -> None:
    facts = opened(tmp_path, entries_of("llama"), hf_quant_config={"quantization": FLOAT8}).facts

    assert facts.quantisation == {"quant_method": "modelopt", **FLOAT8}


@pytest.mark.parametrize(
    ("changes", "files", "message"),
    [
        (
            {},
            {"hf_quant_config": {"quantization": {"quant_algo": "NVFP4"}}},
            "by modelopt, with no list of the modules",
        ),
        ({}, {"hf_quant_config": {"quantization": {"quant_algo": "FP8"}}}, "by modelopt, with no list of the modules"),
        ({"quantization_config": {"quant_algo": "INT4_AWQ"}}, {}, "by modelopt, with quant_algo = 'INT4_AWQ'"),
        ({"quantization": {"bits": 4}}, {}, "by mlx, with no group_size, or no bits"),
        ({"quantization": BITS | {"bits": 3}, "quantization_config": BITS | {"bits": 3}}, {}, "by mlx, with bits = 3"),
        ({"quantization": BITS | {"mode": "mxfp4"}}, {}, "by mlx, with mode = 'mxfp4'"),
        (
            {"quantization": BITS | {"model.layers.0.mlp.down_proj": {"bits": 8}}},
            {},
            "by mlx, with model.layers.0.mlp.down_proj = ",
        ),
        ({"quantization": "int8"}, {}, "quantised by int8; known are fp8"),
        ({"quantization_config": BITS}, {}, r"by a method that isn't named \(group_size, bits\)"),
        (
            {"compression_config": {"format": "pack-quantized"}},
            {},
            "by compressed-tensors, with no config_groups",
        ),
        ({}, {"quantize_config": {"bits": 3, "group_size": 128}}, "by gptq, with bits = 3"),
        ({}, {"quant_config": {"w_bit": 3, "q_group_size": 128}}, "by awq, with w_bit = 3"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 16]}},
            {"hf_quant_config": {"quantization": {"quant_algo": "NVFP4"}}},
            "by NVFP4 in hf_quant_config.json, and by fp8 in config.json",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    changes: dict[str, Any], files: dict[str, Any], message: str, tmp_path: Path
) -> None:
    refused(tmp_path, entries_of("llama", **changes), "feature-unsupported", message, **files)


GPTQ = {"bits": 4, "group_size": 128, "desc_act": False}


@pytest.mark.parametrize(
    ("said", "files", "message"),
    [
        (GPTQ, {"quantize_config": GPTQ | {"bits": 8}}, "with bits = 8 in quantize_config.json, and with bits = 4"),
        (GPTQ, {"quantize_config": GPTQ | {"desc_act": True}}, "with desc_act = True in quantize_config.json"),
        (GPTQ, {"quant_config": {"w_bit": 4}}, "by awq in quant_config.json, and by gptq in config.json"),
        (
            {"quant_method": "awq", "bits": 4, "group_size": 64}, {"quant_config": {"w_bit": 4, "q_group_size": 128}},
            "with group_size = 128 in quant_config.json, and with group_size = 64 in config.json",
        ),
        (
            {"quant_method": "awq", "bits": 4}, {"quant_config": {"w_bit": 4, "version": "GEMV"}},
            "with checkpoint_format = 'gemv' in quant_config.json, and with checkpoint_format = 'gemm' in config.json",
        ),
        (
            GPTQ, {"quantize_config": GPTQ | {"checkpoint_format": "gptq_v2"}},
            "with checkpoint_format = 'gptq_v2' in quantize_config.json, and with checkpoint_format = 'gptq' in config",
        ),
        (
            GPTQ | {"format": "gptq_v2"}, {"quantize_config": GPTQ | {"format": "gptq"}},
            "with checkpoint_format = 'gptq' in quantize_config.json, and with checkpoint_format = 'gptq_v2' in config",
        ),
        (
            GPTQ, {"quantize_config": GPTQ | {"checkpoint_format": "gptq", "format": "gptq_v2"}},
            "checkpoint_format = 'gptq' and format = 'gptq_v2': both are names of one option",
        ),
    ],
)  # fmt: skip
def test_files_that_contradict_the_config(
    said: dict[str, Any], files: dict[str, Any], message: str, tmp_path: Path
) -> None:
    entries = entries_of("llama", quantization_config={"quant_method": "gptq"} | said)

    refused(tmp_path, entries, "feature-unsupported", message, **files)


@pytest.mark.parametrize(
    ("said", "file", "message"),
    [
        (
            {}, {"ignore": None, "exclude_modules": ["*down_proj", "lm_head"]},
            r"but for other layers in hf_quant_config.json \(such as \*down_proj\) than in config.json",
        ),
        (
            {"kv_cache_quant_algo": "FP8"}, {"kv_cache_quant_algo": "INT8"},
            "with keys and values of INT8 in hf_quant_config.json, and of float8_e4m3fn in config.json",
        ),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, {"kv_cache_quant_algo": "NVFP4"}, "values of NVFP4 in"),
        (
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "FP8"}}},
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "NVFP4"}}},
            r"quantised with other formats of layers in hf_quant_config.json \(such as of a\) than in config.json",
        ),
        ({"ignore": []}, {}, r"but for other layers in hf_quant_config.json \(such as lm_head\) than in config.json"),
        ({"exclude_modules": []}, {}, r"ignore = \['lm_head'\] and exclude_modules = \[\]: both are names of one"),
    ],
)  # fmt: skip
def test_modelopts_file_contradicts_the_config(
    said: dict[str, Any], file: dict[str, Any], message: str, tmp_path: Path
) -> None:
    both = {"quant_algo": "FP8", "ignore": ["lm_head"]}
    entries = entries_of("llama", quantization_config={"quant_method": "modelopt"} | both | said)

    refused(tmp_path, entries, "feature-unsupported", message, hf_quant_config={"quantization": both | file})


def test_files_that_agree_with_the_config(tmp_path: Path) -> None:
    said = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
    file = {"w_bit": 4, "q_group_size": 128, "zero_point": True, "version": "GEMM"}

    found = opened(tmp_path, entries_of("llama", quantization_config=said), quant_config=file).facts.quantisation

    assert found is not None
    assert found["group_size"] == 128


@pytest.mark.parametrize("entries", [{}, {"producer": {"name": "modelopt"}}, {"quantization": {}}])
@pytest.mark.parametrize("file", ["hf_quant_config", "quantize_config", "quant_config"])
def test_files_that_say_nothing(file: str, entries: dict[str, Any], tmp_path: Path) -> None:
    message = f"{file}.json doesn't say how the checkpoint is quantised"

    refused(tmp_path, entries_of("llama"), "config-invalid", message, **{file: entries})


@pytest.mark.parametrize("said", [[1], [{"quant_method": "fp8"}], "fp8", 8, []])
def test_a_quantisation_that_is_no_object(said: Any, tmp_path: Path) -> None:
    message = re.escape(f"config.json: quantization_config is {said!r}, expected an object")

    refused(tmp_path, entries_of("llama", quantization_config=said), "config-invalid", message)


def test_a_file_beside_the_config_says_how_it_is_quantised(tmp_path: Path) -> None:
    entries = {"bits": 4, "group_size": 128, "desc_act": False, "sym": True, "model_name_or_path": None}

    assert opened(tmp_path, entries_of("llama"), quantize_config=entries).facts.quantisation == {
        "quant_method": "gptq", **entries,
    }  # fmt: skip


def test_outputs_that_are_not_rounded_are_told(tmp_path: Path) -> None:
    weights = {"num_bits": 8, "type": "float", "strategy": "channel"}
    groups = {"a": {"targets": ["Linear"], "weights": weights, "output_activations": weights}}
    said = {
        "quant_method": "compressed-tensors",
        "config_groups": groups | {"b": {"targets": ["x"], "weights": weights}},
    }

    facts = opened(tmp_path, entries_of("llama", quantization_config=said)).facts

    assert facts.notes == ("config_groups.a.output_activations: outputs of layers are not rounded",)


FLOAT8_KEYS = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


@pytest.mark.parametrize(
    ("said", "dtype", "note"),
    [
        ({"kv_cache_quant_algo": "FP8"}, "float8_e4m3fn", None),
        ({"kv_cache_scheme": FLOAT8_KEYS | {"observer": "minmax"}}, "float8_e4m3fn", None),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}}, "float8_e4m3fn", None),
        ({"kv_cache_scheme": "FP8"}, "float8_e4m3fn", None),
        ({"kv_cache_scheme": None, "kv_cache_quant_algo": None}, None, None),
        ({}, None, None),
        ({"kv_cache_quant_algo": "NVFP4"}, None, "kv_cache_quant_algo is 'NVFP4', which is not known"),
        ({"kv_cache_scheme": FLOAT8_KEYS | {"type": "int"}}, None, "kv_cache_scheme is {'num_bits': 8, 'type': 'int'"),
        ({"kv_cache_scheme": FLOAT8_KEYS | {"dynamic": True}}, None, "which is not known: keys and values keep"),
        ({"kv_cache_scheme": FLOAT8_KEYS | {"strategy": "attn_head"}}, None, "which is not known"),
        ({"kv_cache_scheme": {"num_bits": 8}}, None, "kv_cache_scheme is {'num_bits': 8}, which is not known"),
        ({"kv_cache_scheme": "static"}, None, "kv_cache_scheme is 'static'"),
    ],
)
def test_what_a_config_says_of_keys_and_values(
    said: dict[str, Any], dtype: str | None, note: str | None, tmp_path: Path
) -> None:
    entries = {"quant_method": "modelopt", "quant_algo": None, **said}

    facts = opened(tmp_path, entries_of("llama", quantization_config=entries)).facts

    assert facts.kv_dtype == dtype
    assert len(facts.notes) == (note is not None)
    assert note is None or note in facts.notes[0]


@pytest.mark.parametrize(
    ("said", "dtype"), [({}, "float8_e4m3fn"), ({"kv_cache_quant_algo": None}, None), ({"kv_cache_scheme": None}, None)]
)
def test_modelopts_file_says_of_keys_and_values_what_the_config_does_not(
    said: dict[str, Any], dtype: str | None, tmp_path: Path
) -> None:
    method = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}

    facts = opened(
        tmp_path, entries_of("llama", quantization_config=method | said), hf_quant_config={"quantization": FLOAT8}
    ).facts

    assert facts.kv_dtype == dtype
    assert facts.quantisation is not None
    assert facts.quantisation["ignore"] == ["lm_head"]


@pytest.mark.parametrize("said", [{}, {"ignore": None}, {"exclude_modules": None}])
def test_modelopts_file_lists_the_layers_that_stay_where_the_config_does_not(
    said: dict[str, Any], tmp_path: Path
) -> None:
    entries = {"quant_method": "modelopt", "quant_algo": "FP8", **said}

    facts = opened(
        tmp_path, entries_of("llama", quantization_config=entries), hf_quant_config={"quantization": FLOAT8}
    ).facts

    assert facts.quantisation is not None
    assert facts.quantisation["ignore"] == ["lm_head"]


@pytest.mark.parametrize("fmt", ["e4m3", "float8_e4m3fn"])
def test_spellings_of_a_float8_format(fmt: str, tmp_path: Path) -> None:
    entries = {"quant_method": "fp8", "fmt": fmt, "weight_block_size": [16, 16]}

    assert opened(tmp_path, entries_of("llama", quantization_config=entries)).facts.quantisation == entries


def test_a_refusal_names_the_group_of_layers_and_no_more(tmp_path: Path) -> None:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "observer": "minmax"}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    entries = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}
    told = "config_groups.group_0.weights: num_bits = 4, type = 'int', strategy = 'group', group_size = 128"

    error = refused(tmp_path, entries_of("llama", quantization_config=entries), "feature-unsupported", told)

    assert "observer" not in error.message


def test_facts_of_a_config_object() -> None:
    facts = open_source(families.make_config("llama")).facts

    assert isinstance(facts, Facts)
    assert facts.quantisation is None
