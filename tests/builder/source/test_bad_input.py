"""What a user can get wrong about a build: each is named with a code and a reason, and nothing is left behind."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import families
import pytest
import torch

from precast.builder.build import build
from precast.builder.pipeline import passes
from precast.ir.errors import BuildError

TINY = {"vocab_size": 131, "hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 80}
NESTED = b'{"model_type": ' + b"[" * 100_000
PANICKING = json.dumps({
    "version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": None, "post_processor": None,
    "decoder": None, "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]]},
}).encode()  # fmt: skip
"""A `tokenizer.json` without the result of a merge, at which the tokenizers library panics."""


@pytest.fixture(scope="module")
def llama() -> dict[str, Any]:
    entries = families.make_config("llama").to_dict()
    return {**entries, "num_hidden_layers": 1, "architectures": ["LlamaForCausalLM"]}


@pytest.fixture
def model(tmp_path: Path, llama: dict[str, Any]) -> Path:
    """A model directory that builds."""
    folder = tmp_path / "model"
    folder.mkdir()
    write(folder, llama)
    return folder


def write(folder: Path, entries: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(entries))


def refused(source: Any, code: str, message: str, **options: Any) -> str:
    """The message of a build that must fail, and must leave nothing."""
    around = source if isinstance(source, Path) else Path.cwd()
    out = options.pop("out", None) or around.parent / "llama.bundle"
    before = sorted(out.parent.iterdir()) if out.parent.is_dir() else None
    with pytest.raises(BuildError, match=message) as error:
        build(source, out, **options)
    assert error.value.code == code
    assert (sorted(out.parent.iterdir()) if out.parent.is_dir() else None) == before
    return str(error.value)


# --- the config --------------------------------------------------------------------------------------------------


def test_a_directory_without_a_config(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()

    text = refused(tmp_path / "model", "config-missing", "has no config.json")

    assert str(tmp_path / "model") in text


def test_a_file_that_is_no_config(model: Path) -> None:
    (model / "tokenizer.json").write_text("{}")

    refused(model / "tokenizer.json", "config-missing", "is a file, expected a config.json or a directory with one")


def test_a_config_that_is_not_there(tmp_path: Path) -> None:
    refused(tmp_path / "model" / "config.json", "config-missing", "config.json: no such file", out=tmp_path / "out")


@pytest.mark.parametrize("name", ["./no-such-directory", "/no/such/directory", "no such name!"])
def test_a_path_that_is_not_there(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    text = refused(name, "config-missing", "no directory here, and its form is not that of", out=tmp_path / "out")

    assert name in text
    assert "fix: name a directory with a config.json, or a model on the hub, such as" in text


class _Hub(BaseHTTPRequestHandler):
    """A hub that answers every question with one status."""

    status = 404

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.send_header("X-Error-Code", "RepoNotFound" if self.status == 404 else "GatedRepo")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.mark.parametrize(
    ("status", "message", "fix"),
    [
        (None, r"the hub, which was to be asked, can't be reached \(\w+\)", "connect to the network"),
        (
            404,
            r"doesn't give such a model \(RepositoryNotFoundError\)",
            "or a model on the hub, such as",
        ),
        (403, r"doesn't give such a model \(GatedRepoError\)", "log in with `hf auth login`"),
    ],
)
def test_a_hub_id_that_is_not_there(
    status: int | None, message: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = HTTPServer(("127.0.0.1", 0), type("Hub", (_Hub,), {"status": status}))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{hub.server_port}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    if status is None:
        hub.server_close()
    else:
        threading.Thread(target=hub.serve_forever, daemon=True).start()

    text = refused("somebody/model", "config-missing", message, out=tmp_path / "out")

    assert "somebody/model is no directory here, and " in text
    assert fix in text
    if status is not None:
        hub.shutdown()
        hub.server_close()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "config.json is no JSON: Expecting property name"),
        (b"", "config.json is no JSON"),
        (b"\xff\xfe", "config.json is no JSON"),
        (b"[]", "config.json is no JSON object"),
        (b"{}", "the config's model_type is missing, expected a name such as llama"),
        (b'{"model_type": 3}', "the config's model_type is 3, expected a name such as llama"),
        (NESTED, "config.json is nested more than 32 levels deep"),
        (b'{"model_type": "llama", "architectures": 6}', "architectures is 6, expected a list of names"),
        (
            b'{"model_type": "llama", "architectures": [["a"]]}',
            r"architectures is \[\['a'\]\], expected a list of names",
        ),
    ],
    ids=lambda value: None if value is NESTED else repr(value)[:30],
)
def test_a_config_that_cannot_be_read(content: bytes, message: str, model: Path) -> None:
    (model / "config.json").write_bytes(content)

    refused(model, "config-invalid", message)


def test_an_unknown_model_type(model: Path, llama: dict[str, Any]) -> None:
    write(model, {**llama, "model_type": "llama17"})

    text = refused(model, "model-unknown", r"transformers [\d.]+ doesn't know the config's model_type llama17")

    assert "update transformers" in text


FORGED = "llama\n  code: fine\n"


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"model_type": FORGED}, "model-unknown"),
        ({"model_type": "kimi", "auto_map": {FORGED: "own.Model"}}, "model-unsupported"),
        ({"model_type": "kimi", "auto_map": {"AutoConfig": FORGED}}, "remote-code"),
        ({"model_type": FORGED, "auto_map": {"AutoConfig": "own.Config"}}, "remote-code"),
        ({"architectures": [FORGED]}, "model-unsupported"),
        ({"hidden_act": FORGED}, "config-invalid"),
    ],
)
def test_names_from_a_config_forge_no_lines_of_a_message(
    changed: dict[str, Any], code: str, model: Path, llama: dict[str, Any]
) -> None:
    write(model, {**llama, **changed})

    text = refused(model, code, "llama", allow_remote_code=code == "model-unsupported")

    assert [line.strip().partition(": ")[0] for line in text.splitlines()[1:]] == ["fix", "code"]


def test_an_encoder(model: Path) -> None:
    write(model, {"model_type": "vit", **TINY})

    refused(model, "model-unsupported", "transformers has no causal language model for vit, expected a decoder")


def test_an_encoder_that_could_be_a_decoder(model: Path) -> None:
    write(model, {"model_type": "bert", **TINY})

    refused(model, "model-unsupported", "BertLMHeadModel: .*sees tokens that come later, expected a decoder")


@pytest.mark.parametrize("model_type", ["t5", "bart", "whisper"])
def test_an_encoder_and_decoder(model_type: str, model: Path) -> None:
    write(model, {"model_type": model_type, **TINY})

    refused(model, "model-unsupported", f"{model_type} is an encoder-decoder, expected a decoder")


def test_a_part_of_a_model_that_is_no_decoder(model: Path) -> None:
    write(model, {"model_type": "clip_text_model", **TINY})

    refused(model, "model-unsupported", "no causal language model for clip_text_model, expected a decoder")


def test_a_selection_of_keys_that_is_unknown(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to as many tokens as are selected it is full attention: a build with what the message says succeeds."""
    sizes = {
        **TINY, "num_key_value_heads": 4, "q_lora_rank": 20, "kv_lora_rank": 24, "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 6, "v_head_dim": 14, "first_k_dense_replace": 1, "max_position_embeddings": 256,
        "index_n_heads": 2, "index_head_dim": 12, "index_topk": 40,
    }  # fmt: skip
    write(model, {"model_type": "deepseek_v32", **sizes})

    monkeypatch.setattr(torch.nn.functional, "relu", torch.nn.functional.silu)  # what the model's code calls

    text = refused(model, "feature-unsupported", "layers.0.self_attn selects keys in a way that precast doesn't know")

    assert "fix: build with max_seq_len of at most 40: of so many tokens all keys are selected" in text
    build(model, model.parent / "short.bundle", max_seq_len=40)


def test_an_unknown_quantisation(model: Path, llama: dict[str, Any]) -> None:
    write(model, {**llama, "quantization_config": {"quant_method": "quip", "bits": 4}})

    refused(model, "feature-unsupported", "the checkpoint is quantised by quip; known are fp8, .*gptq")


_GROUP = {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}, "targets": ["Linear"]}


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        pytest.param(
            {"quant_method": "fp8", "modules_to_not_convert": ["lm_head", "*mlp.gate"]},
            r"'\*mlp.gate' in modules_to_not_convert, which is no regular expression \(nothing to repeat",
            id="a pattern",
        ),
        pytest.param(
            {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"-:.*(gate": {}}},
            r"'\.\*\(gate' in dynamic, which is no regular expression",
            id="a pattern of GPTQ's",
        ),
        pytest.param(
            {"quant_method": "compressed-tensors", "config_groups": {"a": _GROUP}, "ignore": ["*.gate", "re:*.gate"]},
            r"'\*.gate' in ignore, which is no regular expression",
            id="a pattern of compressed-tensors'",
        ),
        pytest.param(
            {"quant_method": "compressed-tensors", "config_groups": {"a": {**_GROUP, "targets": ["re:(mlp"]}}},
            r"'\(mlp' in config_groups.a.targets, which is no regular expression",
            id="a target",
        ),
        pytest.param(
            {"quant_method": "compressed-tensors", "config_groups": {"a": _GROUP}, "sparsity_config": ["dense"]},
            r"sparsity_config = \['dense'\]: this is not known",
            id="a list in place of a mapping",
        ),
        pytest.param(
            {
                "quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": [],
                "config_groups": {"a": {"weights": {"type": "float", "num_bits": [4], "group_size": 16}}},
            },
            r"config_groups.a",
            id="a list in place of a number",
        ),
    ],
)  # fmt: skip
def test_quantisation_that_says_what_nobody_can_mean(
    entries: dict[str, Any], reason: str, model: Path, llama: dict[str, Any]
) -> None:
    write(model, {**llama, "quantization_config": entries})

    refused(model, "feature-unsupported", f"the checkpoint is quantised by .*{reason}")


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        pytest.param({"hidden_size": "many"}, "'hidden_size' expected int, got str", id="a type"),
        pytest.param(
            {"num_attention_heads": 5}, "not a multiple of the number of attention heads", id="a contradiction"
        ),
        pytest.param({"hidden_act": "nope"}, "KeyError: 'nope'", id="a name"),
        pytest.param({"dtype": "nonsense"}, "nonsense", id="a dtype"),
        pytest.param({"dtype": []}, "IndexError|list index", id="a dtype of another kind"),
        pytest.param({"text_config": {"hidden_size": 4}}, "text_config", id="a part of a model that has none"),
    ],
)
def test_what_transformers_refuses(entries: dict[str, Any], reason: str, model: Path, llama: dict[str, Any]) -> None:
    write(model, {**llama, "head_dim": None, **entries})

    refused(model, "config-invalid", f"transformers .*{reason}")


@pytest.mark.parametrize("size", [0, -4])
@pytest.mark.parametrize(
    "name", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_key_value_heads"]
)
def test_a_size_that_is_none(name: str, size: int, model: Path, llama: dict[str, Any]) -> None:
    write(model, {**llama, name: size})

    text = refused(model, "config-invalid", f"the config's {name} is {size}, expected a number of at least 1")

    assert f"fix: correct {name} in the config" in text


@pytest.mark.parametrize(("kind", "name"), [("gpt2", "n_layer"), ("llama", "num_hidden_layers")])
@pytest.mark.parametrize("nested", [False, True])
def test_more_layers_than_transformers_can_list(kind: str, name: str, nested: bool, model: Path) -> None:
    entries = {"model_type": kind, name: 2**62}
    write(model, {"model_type": "gemma3", "text_config": entries} if nested else entries)

    refused(model, "config-invalid", f"the config's {name} is {2**62}, expected at most 4096")


def test_a_size_goes_by_the_name_in_the_config(model: Path) -> None:
    write(model, {**families.make_config("gpt2").to_dict(), "n_layer": -1})

    refused(model, "config-invalid", "the config's n_layer is -1, expected a number of at least 1")


@pytest.mark.parametrize("size", [1, 0, -1])
@pytest.mark.parametrize(("family", "name"), [("qwen3_next", "linear_conv_kernel_dim"), ("mamba", "conv_kernel")])
def test_a_convolution_without_a_state(family: str, name: str, size: int, model: Path) -> None:
    write(model, {**families.make_config(family).to_dict(), name: size})

    refused(model, "config-invalid", f"the config's {name} is {size}, expected a number of at least 2")


@pytest.mark.parametrize("name", ["head_dim", "num_attention_heads"])
def test_what_transformers_divides_by(name: str, model: Path, llama: dict[str, Any]) -> None:
    write(model, {**llama, name: 0})

    refused(model, "config-invalid", "transformers .* it holds a 0 in the place of a size")


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(
    ("family", "entries", "reason"),
    [
        pytest.param("llama", {"num_key_value_heads": 3}, "q: 4 heads are no multiple of 3 kv heads", id="heads"),
        pytest.param("deepseek_v3", {"kv_lora_rank": 0}, "latent_size: expected at least 1, found 0", id="rank"),
    ],
)
def test_a_config_whose_bundle_would_be_refused(family: str, entries: dict[str, Any], reason: str, model: Path) -> None:
    """It is the config's fault, and not that of a bundle that is there no more."""
    write(model, {**families.make_config(family).to_dict(), **entries})

    text = refused(model, "config-invalid", f"the config gives a bundle that would be refused(.|\n)*{reason}")

    assert "fix: check the numbers in the config" in text
    assert ".building" not in text


@pytest.mark.parametrize("size", [-1, 0, 10**23])
@pytest.mark.parametrize(
    ("model_type", "name"),
    [("mistral", "sliding_window"), ("gemma3_text", "sliding_window"), ("gemma3", "sliding_window"),
     ("llama4_text", "attention_chunk_size"), ("llama4", "attention_chunk_size")],
)  # fmt: skip
def test_a_window_that_is_none(model_type: str, name: str, size: int, model: Path) -> None:
    entries = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 256}
    entries |= {**TINY, name: size, "num_hidden_layers": 2}
    is_whole = model_type in ("gemma3", "llama4")
    whole = {"text_config": {**entries, "model_type": f"{model_type}_text"}} if is_whole else entries
    write(model, {"model_type": model_type, **whole})

    refused(
        model, "config-invalid", f"the config's {name} is {size}, expected a number of tokens from 1 to {2**63 - 1}\n"
    )


@pytest.mark.parametrize("size", [-1, 0, 10**23])
def test_a_window_that_no_layer_has(size: int, model: Path, tmp_path: Path) -> None:
    write(model, {"model_type": "qwen2", **TINY, "num_key_value_heads": 2, "use_sliding_window": False,
                  "sliding_window": size, "max_position_embeddings": 256})  # fmt: skip

    bundle = build(model, tmp_path / "qwen2.bundle")

    assert [group.spec.window for group in bundle.graph.caches.groups] == [None]


@pytest.mark.parametrize("content", [b"{", b"[]", NESTED], ids=["no JSON", "a list", "too deep"])
def test_a_generation_config_that_cannot_be_read(content: bytes, model: Path) -> None:
    (model / "generation_config.json").write_bytes(content)

    refused(model, "config-invalid", "generation_config.json is (no JSON|nested more than 32 levels)")


@pytest.mark.parametrize("eos", ['"</s>"', "[2, null]", "{}", "1.5"])
def test_an_end_that_is_no_token(eos: str, model: Path) -> None:
    (model / "generation_config.json").write_text(f'{{"eos_token_id": {eos}}}')

    refused(model, "config-invalid", "eos_token_id is .*, expected token ids")


# --- options -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["int8", "float64", "bf16", ""])
def test_a_dtype_that_is_none(dtype: str, model: Path) -> None:
    refused(model, "option-invalid", f"dtype is {dtype}, expected auto or one of float32, bfloat16", dtype=dtype)


def test_a_dtype_of_the_config(model: Path, llama: dict[str, Any]) -> None:
    write(model, {**llama, "dtype": "float64"})

    refused(model, "option-invalid", "the config's dtype is float64, expected one of float32")


@pytest.mark.parametrize("length", [0, -1, 1.5, "64", True])
def test_a_length_that_is_none(length: Any, model: Path) -> None:
    refused(model, "option-invalid", "max_seq_len is .*, expected a number of at least 1", max_seq_len=length)


def test_a_length_beyond_the_models(model: Path) -> None:
    text = refused(model, "option-invalid", "max_seq_len is 257, but .* is 256", max_seq_len=257)

    assert "fix: build with max_seq_len of at most 256" in text


def test_a_length_beyond_that_of_a_model_without_rope(model: Path) -> None:
    """It goes by the name in the config, and no advice is given that doesn't help."""
    write(model, {"model_type": "rwkv", **TINY, "context_length": 100})

    text = refused(model, "option-invalid", "but the config's context_length is 100", max_seq_len=101)

    assert "rope" not in text


@pytest.mark.parametrize("known", [0, -5])
def test_a_limit_of_the_config_that_is_none(known: int, model: Path, llama: dict[str, Any]) -> None:
    write(model, {**llama, "max_position_embeddings": known})

    refused(model, "config-invalid", f"the config's max_position_embeddings is {known}")


def test_a_limit_beyond_all_models(model: Path, llama: dict[str, Any]) -> None:
    write(model, {**llama, "max_position_embeddings": 10**18})

    refused(model, "option-invalid", f"max_position_embeddings is {10**18}, expected at most 16777216")


@pytest.mark.parametrize("page_size", [0, -1, 1025, 16.0, "16", True])
def test_a_page_size_that_is_none(page_size: Any, model: Path) -> None:
    refused(model, "option-invalid", "page_size is .*, expected 1 to 1024 tokens", page_size=page_size)


@pytest.mark.parametrize("option", ["snapshots", "dump"])
def test_a_directory_that_is_a_file(option: str, model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")

    with pytest.raises(BuildError, match=r"File exists|Not a directory") as error:
        build(model, tmp_path / "llama.bundle", **{option: tmp_path / "file"})

    assert error.value.code in ("write-failed", "option-invalid")
    assert (tmp_path / "file").read_text() == "mine"
    assert not (tmp_path / "llama.bundle").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full")
def test_a_dump_on_a_full_disk(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "dump" / f"00_{passes()[0].name}.txt"
    file.parent.mkdir()
    file.symlink_to("/dev/full")

    with pytest.raises(BuildError, match="the dump can't be written: No space left on device") as error:
        build(model, tmp_path / "llama.bundle", dump=tmp_path / "dump")

    assert (error.value.code, error.value.where) == ("write-failed", str(file))


# --- tokenizer files ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", b"{", "tokenizer.json is no JSON: "),
        ("tokenizer.json", b"\xff\xfe", "tokenizer.json is no JSON: "),
        ("tokenizer.json", b"[]", "tokenizer.json is no JSON object but a list"),
        ("tokenizer.json", b'{"version": "1.0"}', "tokenizer.json: the tokenizers library [0-9.]+ can't read it"),
        ("tokenizer.json", PANICKING, "tokenizer.json: the tokenizers library [0-9.]+ can't read it: "),
        ("tokenizer_config.json", b"x", "tokenizer_config.json is no JSON: "),
        ("tokenizer_config.json", NESTED, "tokenizer_config.json is nested more than 32 levels deep"),
        ("special_tokens_map.json", b"3", "special_tokens_map.json is no JSON object but a int"),
    ],
    ids=lambda value: None if value is NESTED else repr(value)[:30],
)
def test_a_tokenizer_file_that_is_none(file: str, content: bytes, message: str, model: Path) -> None:
    (model / file).write_bytes(content)

    refused(model, "tokenizer-invalid", message)


# --- the output --------------------------------------------------------------------------------------------------


def a_file(out: Path) -> None:
    out.write_text("mine")


def a_directory(out: Path) -> None:
    out.mkdir()
    (out / "thesis.tex").write_text("mine")


def a_link(out: Path) -> None:
    out.symlink_to(out.parent / "model")


@pytest.mark.parametrize("occupy", [a_file, a_directory, a_link])
def test_a_path_that_is_somebody_elses(occupy: Callable[[Path], None], model: Path, tmp_path: Path) -> None:
    out = tmp_path / "llama.bundle"
    occupy(out)

    refused(model, "output-not-a-bundle", "found something else; it is never overwritten")

    assert (out / "thesis.tex").read_text() == "mine" if occupy is a_directory else out.exists()
    assert out.is_symlink() == (occupy is a_link)


def test_a_directory_that_is_not_there(model: Path, tmp_path: Path) -> None:
    text = refused(model, "write-failed", "in a directory that exists", out=tmp_path / "no" / "such" / "bundle")

    assert f"fix: make the directory {tmp_path / 'no' / 'such'} first" in text
    assert not (tmp_path / "no").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="needs a directory that even root can't write to")
def test_a_directory_that_cannot_be_written_to(model: Path) -> None:
    out = Path("/proc/llama.bundle")

    with pytest.raises(BuildError, match="the bundle could not be written") as error:
        build(model, out)

    assert error.value.code == "write-failed"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_without_permission(model: Path, tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)

    refused(model, "write-failed", "Permission denied", out=tmp_path / "locked" / "bundle")


def test_a_path_that_is_somebody_elses_is_refused_before_the_work_is_done(model: Path, tmp_path: Path) -> None:
    stages: list[str] = []
    a_file(tmp_path / "llama.bundle")

    refused(model, "output-not-a-bundle", "it is never overwritten", progress=stages.append)

    assert stages == ["config"]
