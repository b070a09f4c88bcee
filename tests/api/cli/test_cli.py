"""The command line: what each verb answers, where it says so, and with which exit code it ends."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import click
import families
import msgspec
import pytest
import remote_model
from recitation import MODEL, OPENING, RECITE, Command, rest, run_precast
from safetensors.torch import load_file, save_file

from precast.builder import pipeline
from precast.cli.main import main
from precast.ir.artifact import Bundle, write_bundle
from precast.ir.errors import CODES

VERBS = (
    *("attest", "bench kernels", "bench startup", "build", "diff", "digest", "doctor", "find", "inspect", "link"),
    *("pull", "push", "run", "seal", "serve", "sign", "store gc", "store ls", "store verify", "verify"),
)
TRUST = {
    "portable": {"admitted": True, "rule": None, "why": "portable layers are data, and taken from anyone"}
}  # fmt: skip
VIEWS = ("--graph", "--passes", "--weights", "--cache", "--kernels", "--capture")
DOCUMENTED = (RECITE.parents[1] / "docs" / "command_line.md").read_text(encoding="utf-8")

LIST_MODULES = """
import sys
from precast.cli.main import main
try:
    main(sys.argv[1:])
finally:
    print(*{name.partition(".")[0] for name in sys.modules}, file=sys.stderr)
"""


def verbs() -> dict[str, click.Command]:
    """Every command by its name, those of groups too."""
    found: dict[str, click.Command] = {}
    for name, verb in main.commands.items():
        inner = verb.commands.items() if isinstance(verb, click.Group) else ()
        found |= {f"{name} {each}": command for each, command in inner} or {name: verb}
    return found


def broken(bundle: Path, to: Path) -> Path:
    """A copy of the bundle with one byte of its largest blob changed."""
    shutil.copytree(bundle, to)
    blob = max((to / "blobs" / "sha256").iterdir(), key=lambda file: file.stat().st_size)
    data = bytearray(blob.read_bytes())
    data[len(data) // 2] ^= 1
    blob.write_bytes(data)
    return to


# --- what each verb answers ------------------------------------------------------------------------------------


def test_verbs_are_documented_with_all_their_options(command: Command) -> None:
    assert tuple(sorted(verbs())) == VERBS
    for verb, each in verbs().items():
        assert command(*verb.split(), "--help").exit_code == 0
        section = DOCUMENTED.partition(f"## {verb}\n")[2].partition("\n## ")[0]
        options = [name for param in each.params for name in param.opts if name.startswith("--")]
        assert [name for name in options if f"`{name}" not in section] == []


def test_version(command: Command) -> None:
    assert command("--version").stdout == "precast, version 0.1.0\n"


def test_build_answers_with_the_summary(bundle: Path, tmp_path: Path, command: Command) -> None:
    built = command("build", MODEL, "-o", tmp_path / "b", "--json")

    assert (built.exit_code, built.stderr) == (0, "")
    assert json.loads(built.stdout)["digest"] == Bundle.open(tmp_path / "b").digest == Bundle.open(bundle).digest


def test_build_takes_its_options(other_bundle: Path, tmp_path: Path, command: Command) -> None:
    options = ("--dtype", "bfloat16", "--page-size", "48", "--max-seq-len", "200")
    folders = ("--snapshots", tmp_path / "snapshots", "--dump", tmp_path / "dump")

    result = command("build", MODEL, "-o", tmp_path / "b", *options, *folders)

    assert result.exit_code == 0, result.stderr
    assert Bundle.open(other_bundle).digest in result.stdout
    assert any((tmp_path / "snapshots").iterdir())
    assert any("rms_norm" in file.read_text() for file in (tmp_path / "dump").iterdir())


def test_build_says_which_dtype_it_chose(tmp_path: Path) -> None:
    shutil.copytree(MODEL, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    for name in ("dtype", "torch_dtype"):
        config.pop(name, None)
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))

    built = run_precast("build", tmp_path / "model", "-o", tmp_path / "b", "--json")

    assert built.returncode == 0
    assert built.stderr.startswith(f"warning: {tmp_path / 'model'}: the config names no dtype; float32 was chosen")
    assert json.loads(built.stdout)["provenance"]["notes"] == [built.stderr.strip().partition("model: ")[2]]


def test_build_takes_a_model_type(tmp_path: Path, command: Command) -> None:
    result = command("build", MODEL, "-o", tmp_path / "b", "--model-type", "no-such", "--json")

    assert result.exit_code == 2
    assert json.loads(result.stdout)["error"]["code"] == "option-invalid"


def test_build_with_keys_and_values_of_8_bits(bundle: Path, tmp_path: Path, command: Command) -> None:
    result = command("build", MODEL, "-o", tmp_path / "b", "--kv-dtype", "fp8_e4m3", "--page-size", "16")

    assert result.exit_code == 0, result.stderr
    narrow, wide = (
        json.loads(command("inspect", path, "--cache", "--json").stdout) for path in (tmp_path / "b", bundle)
    )
    assert [group["spec"]["dtype"] for group in narrow["groups"]] == ["float8_e4m3fn"]
    assert [group["bytes_per_token"] * 4 for group in narrow["groups"]] == [wide["groups"][0]["bytes_per_token"]]
    rows = [line.split() for line in command("inspect", tmp_path / "b", "--cache").stdout.splitlines()]
    assert "dtype" in rows[0]
    assert "float8_e4m3fn" in rows[1]
    lines = json.loads(command("diff", bundle, tmp_path / "b", "--json").stdout)["differences"]
    assert any(line.startswith("cache group full: 4 layers") and "float8_e4m3fn" in line for line in lines)


@pytest.mark.parametrize(("options", "dtypes"), [((), {"float8_e4m3fn", "float32"}), (("--dequantise",), {"float32"})])
def test_build_keeps_what_is_quantised(
    options: tuple[str, ...], dtypes: set[str], tmp_path: Path, command: Command
) -> None:
    config = json.loads((MODEL / "config.json").read_text())
    entries = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 16]}}
    (tmp_path / "config.json").write_text(json.dumps(config | entries))

    result = command("build", tmp_path, "-o", tmp_path / "b", *options, "--json")

    assert set(json.loads(result.stdout)["weights_bytes"]) == dtypes


@pytest.mark.parametrize(("options", "activations"), [((), "fp8_token"), (("--activations", "none"), "none")])
def test_build_rounds_inputs_as_the_config_says(
    options: tuple[str, ...], activations: str, tmp_path: Path, command: Command
) -> None:
    config = json.loads((MODEL / "config.json").read_text())
    entries = {"quantization_config": {"quant_method": "fp8", "weight_block_size": None}}
    (tmp_path / "config.json").write_text(json.dumps(config | entries))

    result = command("build", tmp_path, "-o", tmp_path / "b", *options, "--json")

    assert set(json.loads(result.stdout)["activations"]) == {activations}


def test_build_names_the_choices_of_activations(tmp_path: Path, command: Command) -> None:
    result = command("build", MODEL, "-o", tmp_path / "b", "--activations", "fp8", "--json")

    assert result.exit_code == 2
    error = json.loads(result.stdout)["error"]
    assert error["message"] == "--activations fp8: this is not known, expected published or none"


def test_build_names_the_kv_dtypes_that_it_knows(tmp_path: Path, command: Command) -> None:
    result = command("build", MODEL, "-o", tmp_path / "b", "--kv-dtype", "fp8_e5m2", "--json")

    assert result.exit_code == 2
    error = json.loads(result.stdout)["error"]
    assert (error["code"], error["message"]) == (
        "option-invalid", "--kv-dtype is fp8_e5m2, expected one of auto, model, fp8_e4m3",
    )  # fmt: skip
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("quantise", "stored", "inputs"),
    [
        ("fp8", "fp8 of 8 bits, blocks of 128 x 128", "as they are in"),
        ("fp8-channel", "fp8 of 8 bits, one scale a row", "rounded by fp8_token in"),
    ],
)
def test_build_with_weights_of_8_bits(
    quantise: str, stored: str, inputs: str, tmp_path: Path, command: Command
) -> None:
    """Of no more than a model of ours: what the option does is tried in `tests/e2e/test_quantise_at_load.py`."""
    result = command("build", MODEL, "-o", tmp_path / "b", "--quantise", quantise)

    assert result.exit_code == 0, result.stderr
    graph = command("inspect", tmp_path / "b", "--graph").stdout
    assert "quantise(values, read(" in graph
    assert "precast.quantised_linear@1(" in graph
    text = " ".join(command("inspect", tmp_path / "b").stdout.split())
    assert f"few bits {stored}: " in text
    assert f"inputs {inputs}" in text
    assert Bundle.open(tmp_path / "b").provenance["options"]["quantise"] == quantise


def test_build_names_the_formats_that_it_quantises_to(tmp_path: Path, command: Command) -> None:
    result = command("build", MODEL, "-o", tmp_path / "b", "--quantise", "int4", "--json")

    assert result.exit_code == 2
    error = json.loads(result.stdout)["error"]
    assert (error["code"], error["message"]) == (
        "option-invalid", "--quantise int4: this is not known, expected fp8 or fp8-channel",
    )  # fmt: skip


@pytest.mark.parametrize("variant", ["qwen2-window-tied", "gpt2"])
def test_build_needs_nothing_but_the_config(variant: str, tmp_path: Path, command: Command) -> None:
    families.make_config(variant).save_pretrained(tmp_path / "model")
    assert [file.name for file in (tmp_path / "model").iterdir()] == ["config.json"]

    from_directory = command("build", tmp_path / "model", "-o", tmp_path / "a", "--json")
    from_file = command("build", tmp_path / "model" / "config.json", "-o", tmp_path / "b", "--json")

    assert (from_directory.exit_code, from_directory.stderr) == (0, "")
    first, second = json.loads(from_directory.stdout), json.loads(from_file.stdout)
    assert first["digest"] == second["digest"] == Bundle.open(tmp_path / "a").digest
    assert not first["provenance"]["remote_code"]


def test_build_runs_a_models_own_code_if_it_is_told_to(tmp_path: Path, command: Command) -> None:
    """What happens then is in tests/builder/source/test_remote_code.py."""
    model = remote_model.write_model(tmp_path / "model")

    result = command("build", model, "-o", tmp_path / "b", "--json")

    assert result.exit_code == 1
    assert json.loads(result.stdout)["error"]["code"] == "remote-code"
    assert "--allow-remote-code" in json.loads(result.stdout)["error"]["fix"]
    help_text = " ".join(command("build", "--help").stdout.split())
    assert "It runs here, in the builder, with your rights; none of it enters the bundle." in help_text


def test_verify_a_bundle(bundle: Path, command: Command) -> None:
    digest = Bundle.open(bundle).digest

    assert command("verify", bundle).stdout.splitlines()[0] == digest
    assert json.loads(command("verify", bundle, "--json").stdout) == {"digest": digest, "trust": TRUST}


def test_verify_against_a_checkpoint(bundle: Path, command: Command) -> None:
    result = command("verify", bundle, "--weights", MODEL, "--json")

    assert result.exit_code == 0
    digest = Bundle.open(bundle).digest
    assert json.loads(result.stdout) == {"digest": digest, "trust": TRUST, "params": 26, "tensors": 38}
    assert "all 26 params" in command("verify", bundle, "--weights", MODEL).stdout


def test_verify_lists_all_that_the_config_says_otherwise(bundle: Path, tmp_path: Path, command: Command) -> None:
    shutil.copytree(MODEL, tmp_path / "model")
    config = json.loads((MODEL / "config.json").read_text())
    config |= {"rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))

    result = command("verify", bundle, "--weights", tmp_path / "model")

    assert (result.exit_code, result.stdout) == (1, "")
    for text in (
        "config-mismatch",
        "2 entries differ",
        "rms_norm_eps: 1e-06 in the bundle, 1e-05 here",
        "rope_parameters.rope_theta: 10000.0 in the bundle, 500000.0 here",
    ):
        assert text in result.stderr


def test_verify_goes_on_to_the_tensors_where_the_config_may_differ(
    bundle: Path, tmp_path: Path, command: Command
) -> None:
    config = json.loads((MODEL / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))
    shutil.copy(MODEL / "model.safetensors", tmp_path)
    arguments = ("verify", bundle, "--weights", tmp_path, "--allow-config-mismatch")

    fits = command(*arguments)
    save_file({"surprise": load_file(MODEL / "model.safetensors")["model.norm.weight"]}, tmp_path / "model.safetensors")
    misfits = command(*arguments)

    assert (fits.exit_code, misfits.exit_code) == (0, 1)
    assert "all 26 params" in fits.stdout
    assert "model.layers.2.mlp.up_proj.weight" in misfits.stderr
    assert "weights-mismatch" in misfits.stderr
    assert command("verify", bundle, "--allow-config-mismatch").exit_code == 2


def test_verify_names_everything_that_is_wrong_with_a_checkpoint(
    bundle: Path, tmp_path: Path, command: Command
) -> None:
    tensors = load_file(MODEL / "model.safetensors")
    del tensors["model.layers.2.mlp.up_proj.weight"]
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()
    tensors["surprise"] = tensors["model.norm.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")

    result = command("verify", bundle, "--weights", tmp_path)

    assert result.exit_code == 1
    assert result.stdout == ""
    for name in ("model.layers.2.mlp.up_proj.weight", "model.norm.weight", "surprise", "weights-mismatch"):
        assert name in result.stderr


def test_digest_is_one_line(bundle: Path, command: Command) -> None:
    digest = Bundle.open(bundle).digest

    assert command("digest", bundle).stdout == f"{digest}\n"
    assert json.loads(command("digest", bundle, "--json").stdout) == {"digest": digest}


def test_run_streams_one_answer(bundle: Path) -> None:
    ran = run_precast(
        "run", bundle, "--weights", MODEL, "--device", "cpu", "--prompt", OPENING, "--stop", "\n", "--timeline"
    )

    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == rest(OPENING).partition("\n")[0] + "\n"
    phases = [line.split()[0] for line in ran.stderr.splitlines()]
    assert phases == ["import", "context", "bundle", "weights", "pools", "first"]


@pytest.mark.parametrize("count", [1, 2])
def test_an_answer_that_failed_is_in_the_fields_and_in_the_exit_code(
    bundle: Path, tmp_path: Path, count: int, command: Command
) -> None:
    shutil.copytree(MODEL, tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.norm.weight"][:] = float("nan")
    save_file(tensors, weights, {"format": "pt"})

    result = command(
        "run", bundle, "--weights", weights.parent, "--device", "cpu", "--json", *["--prompt", OPENING] * count
    )

    assert result.exit_code == 1
    outputs = json.loads(result.stdout)["outputs"]
    assert [output["error"]["code"] for output in outputs] == ["logits-not-finite"] * count


def test_run_in_fields(bundle: Path, command: Command) -> None:
    result = command(
        "run", bundle, "--weights", MODEL, "--device", "cpu", "--json", "--prompt", OPENING, "--token-ids", "1",
        "--max-tokens", "5", "--max-num-seqs", "2", "--max-num-tokens", "7", "--max-prefill-tokens", "3",
        "--cache-bytes", "4000000",
    )  # fmt: skip

    assert (result.exit_code, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    assert set(found) == {"outputs", "stats", "timeline"}
    first, second = found["outputs"]
    assert set(first) == {"prompt_token_ids", "token_ids", "text", "finish_reason"}
    assert first["finish_reason"] == "length"
    assert rest(OPENING).startswith(first["text"])
    assert second["prompt_token_ids"] == [1]
    assert (OPENING + rest(OPENING)).startswith(second["text"])
    assert [len(output["token_ids"]) for output in found["outputs"]] == [5, 5]
    assert (found["stats"]["tokens_sampled"], found["stats"]["prefill_budget"]) == (10, 3)
    phases = {phase["name"]: phase for phase in found["timeline"]["phases"]}
    assert list(phases) == ["import", "context", "bundle", "weights", "pools", "first token"]
    assert all(phase["seconds"] >= 0 for phase in phases.values())
    counters = phases["pools"]["counters"]
    assert counters["bytes_for_cache"] == 4_000_000 // counters["slab_bytes"] * counters["slab_bytes"]


def test_run_prints_several_answers_beside_their_prompts(bundle: Path, command: Command) -> None:
    prompts = ("--prompt", "Now we are engaged in a great civil", "--token-ids", "1")

    result = command(
        "run", bundle, "--weights", MODEL, "--device", "cpu", *prompts, "--stop", " war", "--stop", "seven"
    )

    assert result.stdout == "'Now we are engaged in a great civil' -> ''\n[1] -> 'Four score and '\n"


def test_run_answers_prompts_in_the_order_of_the_command_line(bundle: Path, command: Command) -> None:
    prompts = ("--token-ids", "1", "--prompt", OPENING, "--token-ids=2", "--prompt", "Now", "--token-ids", "1,15")

    result = command("run", bundle, "--weights", MODEL, "--device", "cpu", *prompts, "--max-tokens", "1")
    wrong = command("run", bundle, "--weights", MODEL, "--device", "cpu", *prompts, "--token-ids", "512")

    asked = [line.split(" -> ")[0] for line in result.stdout.splitlines()]
    assert asked == ["[1]", repr(OPENING), "[2]", "'Now'", "[1, 15]"]
    assert "prompt 5" in wrong.stderr


def test_run_puts_special_tokens_around_a_prompt_once_or_not_at_all(bundle: Path, command: Command) -> None:
    ask = (*RUN, "--prompt", OPENING, "--prompt", f"<|bos|>{OPENING}", "--max-tokens", "1", "--json")
    arguments = [argument.format(bundle=bundle) for argument in ask]

    (plain, begun), (bare, written) = (
        [output["prompt_token_ids"] for output in json.loads(command(*arguments, *more).stdout)["outputs"]]
        for more in ((), ("--no-special-tokens",))
    )

    assert plain == begun == written
    assert plain[1:] == bare


def test_run_without_a_tokenizer_prints_token_ids(bare_bundle: Path, command: Command) -> None:
    one = command("run", bare_bundle, "--weights", MODEL, "--device", "cpu", "--token-ids", "1", "--max-tokens", "4")
    two = command(
        "run", bare_bundle, "--weights", MODEL, "--device", "cpu", "--token-ids", "1", "--token-ids", "1,441",
        "--max-tokens", "4",
    )  # fmt: skip

    tokens = [int(word) for word in one.stdout.split()]
    assert len(tokens) == 4
    assert one.stdout == " ".join(map(str, tokens)) + "\n"
    assert two.stdout.splitlines()[0] == f"[1] -> {tokens}"
    assert two.stdout.splitlines()[1].startswith("[1, 441] -> [")


# --- what goes wrong -------------------------------------------------------------------------------------------

RUN = ("run", "{bundle}", "--weights", str(MODEL), "--device", "cpu")
_BUILD = ("option-invalid", "build", str(MODEL), "-o", "{tmp}/b")
_ASK, _LOAD = ("sampling-invalid", *RUN, "--prompt", "a"), ("engine-option-invalid", *RUN, "--prompt", "a")
OPTIONS = (
    # values that click lets through
    (*_BUILD, "--dtype", "int4"),
    (*_BUILD, "--max-seq-len", "9999"),
    (*_BUILD, "--max-seq-len", "0"),
    (*_BUILD, "--page-size", "1025"),
    (*_BUILD, "--kv-dtype", "fp8_e5m2"),
    (*_BUILD, "--snapshot-after", "match"),
    (*_BUILD, "--snapshots", "{tmp}/kept", "--snapshot-after", "lower"),
    (*_BUILD, "--disable-pass", "match_nothing"),
    (*_BUILD, "--dump", "{tmp}/file/dump"),
    (*_ASK, "--temperature", "-0.5"),
    (*_ASK, "--max-tokens", "0"),
    (*_ASK, "--top-k", "-2"),
    (*_ASK, "--top-p", "1.5"),
    (*_ASK, "--min-p", "-1"),
    (*_LOAD, "--max-num-seqs", "0"),
    (*_LOAD, "--max-num-tokens", "0"),
    (*_LOAD, "--cache-bytes", "0"),
    (*_LOAD, "--device", "abacus"),
)
WRONG = {
    "no such model": (1, "config-missing", "build", "{tmp}/nothing", "-o", "{tmp}/b"),
    "output is something else": (1, "output-not-a-bundle", "build", str(MODEL), "-o", str(MODEL)),
    "no such folder": (1, "write-failed", "build", str(MODEL), "-o", "{tmp}/no/b"),
    "checkpoint without tensors": (1, "checkpoint-missing", "verify", "{bundle}", "--weights", "{tmp}"),
    "no such checkpoint": (1, "checkpoint-missing", "run", "{bundle}", "--weights", "{tmp}/nothing", "--prompt", "a"),
    "empty prompt": (1, "prompt-empty", *RUN, "--prompt", ""),
    "token outside the vocabulary": (1, "token-out-of-range", *RUN, "--token-ids", "1,512"),
    "prompt too long": (1, "prompt-too-long", *RUN, "--token-ids", ",".join(["7"] * 1025)),
    "text without tokenizer": (1, "tokenizer-missing", "run", "{bare}", *RUN[2:], "--prompt", "a"),
    **{f"{' '.join(case[-2:])}": (2, *case) for case in OPTIONS},
    "too few bytes": (2, "cache-too-small", *RUN, "--prompt", "a", "--cache-bytes", "1"),
    "no such bundle": (3, "bundle-missing", "inspect", "{tmp}/nothing"),
    "file in place of a bundle": (3, "bundle-not-a-directory", "digest", "{tmp}/file"),
    "inspect a checkpoint": (3, "layout-missing", "inspect", str(MODEL)),
    "verify a checkpoint": (3, "layout-missing", "verify", str(MODEL)),
    "digest of a checkpoint": (3, "layout-missing", "digest", str(MODEL)),
    "flipped bit": (3, "blob-digest", "verify", "{broken}"),
    "second of a pair is bad": (3, "blob-digest", "diff", "{bundle}", "{broken}"),
    "bad bundle to run": (3, "blob-digest", "run", "{broken}", *RUN[2:], "--prompt", "a"),
}


@pytest.mark.parametrize(
    ("fix", "arguments"),
    [
        ("give --cache-bytes of at least ", (*RUN, "--prompt", "a", "--cache-bytes", "1")),
        ("pass the beginning-of-sequence token id: --token-ids ", (*RUN, "--prompt", "")),
        ("download model.safetensors into it, or pass the directory", ("verify", "{bundle}", "--weights", "{tmp}")),
    ],
)
def test_fixes_can_be_typed(
    fix: str, arguments: tuple[str, ...], bundle: Path, tmp_path: Path, command: Command
) -> None:
    result = command(*(argument.format(bundle=bundle, tmp=tmp_path) for argument in arguments), "--json")

    assert fix in json.loads(result.stdout)["error"]["fix"]
    assert fix in result.stderr


def test_weights_may_be_one_file(bundle: Path, command: Command) -> None:
    assert command("verify", bundle, "--weights", MODEL / "model.safetensors").exit_code == 0


def test_output_is_checked_before_torch_is_imported(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "precast", "build", str(MODEL), "-o", str(tmp_path / "no" / "b")],
        capture_output=True, text=True,
    )  # fmt: skip

    assert ran.returncode == 1
    assert "write-failed" in ran.stderr
    assert not [line for line in ran.stderr.splitlines() if line.endswith("| torch")]


@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        ("token-out-of-range", ("--token-ids", "1,512")),
        ("prompt-too-long", ("--token-ids", ",".join(["7"] * 1025))),
        ("prompt-empty", ("--prompt", "a", "--prompt", "")),
    ],
)
def test_prompts_are_checked_before_the_weights(
    code: str, arguments: tuple[str, ...], bundle: Path, tmp_path: Path, command: Command
) -> None:
    result = command("run", bundle, "--weights", tmp_path / "nothing", "--device", "cpu", *arguments)

    assert result.exit_code == 1
    assert result.stderr.endswith(f"\n  code: {code}\n")


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
@pytest.mark.parametrize("case", WRONG)
def test_errors_have_a_code_and_an_exit_code(
    case: str, as_json: bool, bundle: Path, bare_bundle: Path, tmp_path: Path, command: Command
) -> None:
    exit_code, code, *arguments = WRONG[case]
    (tmp_path / "file").write_text("no bundle")
    paths = {"bundle": bundle, "bare": bare_bundle, "tmp": tmp_path, "broken": broken(bundle, tmp_path / "broken")}

    result = command(*(argument.format(**paths) for argument in arguments), *(["--json"] if as_json else []))

    assert result.exit_code == exit_code
    assert result.stderr.startswith("error: ")
    assert result.stderr.endswith(f"\n  code: {code}\n")
    assert "Traceback" not in result.stderr
    assert code in CODES
    if not as_json:
        assert result.stdout == ""
        return
    error = json.loads(result.stdout)["error"]
    assert set(error) == {"code", "message", "where", "fix"}
    assert error["code"] == code
    assert error["message"] in result.stderr
    assert not (tmp_path / "b").exists()


def test_what_the_system_refuses_is_an_error_like_others(tmp_path: Path, command: Command) -> None:
    """A directory stands where the first dump is to be written."""
    first = f"00_{pipeline.passes()[0].name}.txt"
    (tmp_path / "dump" / first).mkdir(parents=True)

    result = command("build", MODEL, "-o", tmp_path / "b", "--dump", tmp_path / "dump")

    assert (result.exit_code, result.stdout) == (1, "")
    assert first in result.stderr
    assert result.stderr.endswith("\n  code: write-failed\n")
    assert not (tmp_path / "b").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full")
@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect", "{bundle}", "--graph"),
        ("inspect", "{bundle}", "--json"),
        (*RUN, "--token-ids", "1"),
        ("--help",),
        ("--version",),
        ("store", "--help"),
        ("inspect", "--help"),
    ],
    ids=["text", "json", "stream", "help", "version", "help of a group", "help of a verb"],
)
def test_answer_on_a_full_disk(arguments: tuple[str, ...], bundle: Path) -> None:
    given = [sys.executable, "-m", "precast", *(argument.format(bundle=bundle) for argument in arguments)]

    with open("/dev/full", "w") as full:
        ran = subprocess.run(given, stdout=full, stderr=subprocess.PIPE, text=True)

    assert ran.returncode == 1
    message, fix, code = ran.stderr.splitlines()
    assert message == "error: standard output: the answer can't be written: No space left on device"
    assert "room on its disk" in fix
    assert code == "  code: write-failed"


@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full")
def test_an_error_on_a_full_disk_is_told_all_the_same() -> None:
    with open("/dev/full", "w") as full:
        given = [sys.executable, "-m", "precast", "digest", "no such bundle", "--json"]
        ran = subprocess.run(given, stdout=full, stderr=subprocess.PIPE, text=True)

    assert (ran.returncode, ran.stderr.splitlines()[-1]) == (3, "  code: bundle-missing")
    assert "Traceback" not in ran.stderr


def test_interrupt_ends_with_130(bundle: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(path: Path) -> Bundle:
        raise KeyboardInterrupt

    monkeypatch.setattr(Bundle, "open", interrupted)

    result = command("inspect", bundle)

    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "\ninterrupted\n")


def test_paths_are_read_by_the_verbs_alone() -> None:
    """What can't be read is then an error with a code, and not one of usage."""
    paths = [param.type for verb in main.commands.values() for param in verb.params if param.type.name == "path"]

    assert len(paths) >= len(VERBS)
    assert not any(path.readable for path in paths if isinstance(path, click.Path))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read anything")
def test_bundle_without_permission(tmp_path: Path, command: Command) -> None:
    (tmp_path / "locked").mkdir(mode=0o000)

    result = command("inspect", tmp_path / "locked", "--json")

    assert result.exit_code == 3
    assert json.loads(result.stdout)["error"]["code"] == "bundle-unreadable"


def test_a_model_that_cannot_be_traced_gives_its_error_alone(
    tmp_path: Path, command: Command, capfd: pytest.CaptureFixture[str]
) -> None:
    """torch logs a traceback of its own for that; tests/e2e/test_documents.py sees a whole process refuse a model."""
    config = families.make_config("qwen3_moe")
    config.num_experts_per_tok = 50
    config.save_pretrained(tmp_path / "model")

    ran = command("build", tmp_path / "model", "-o", tmp_path / "b")

    assert ran.exit_code == 1
    assert ran.stderr.startswith("error: Qwen3MoeForCausalLM can't be traced: ")
    assert "Traceback" not in ran.stderr
    assert capfd.readouterr() == ("", "")


USAGE: dict[str, tuple[str, ...]] = {
    "no such verb": ("cast",),
    "no such option": ("digest", "{bundle}", "--fast"),
    "no bundle": ("inspect",),
    "no output": ("build", str(MODEL)),
    "no prompt": RUN,
    "no weights": ("run", "{bundle}", "--prompt", "a"),
    "no number": (*RUN, "--prompt", "a", "--max-tokens", "many"),
    "no number of tokens": ("build", str(MODEL), "-o", "b", "--max-seq-len", "long"),
    "no number of bytes": (*RUN, "--prompt", "a", "--cache-bytes", "1GB"),
    "token ids in words": (*RUN, "--token-ids", "one"),
    "no target": ("inspect", "{bundle}", "--kernels", "--target", "abacus"),
    "target of no view": ("inspect", "{bundle}", "--target", "cpu"),
    "dump into a file": ("build", str(MODEL), "-o", "b", "--dump", str(MODEL / "config.json")),
    "snapshots in a file": ("build", str(MODEL), "-o", "b", "--snapshots", str(MODEL / "config.json")),
}


@pytest.mark.parametrize("case", USAGE)
def test_wrong_usage_ends_with_2(case: str, bundle: Path, command: Command) -> None:
    result = command(*(argument.format(bundle=bundle) for argument in USAGE[case]))

    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("Usage: ")


def test_no_gpu_ends_with_4(bundle: Path) -> None:
    """In a process that can't see a GPU, whatever the machine has."""
    hidden = {"CUDA_VISIBLE_DEVICES": "", "PATH": "", "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", "precast", "run", str(bundle), "--weights", str(MODEL), "--prompt", "a"]

    ran = subprocess.run([*command, "--device", "cuda"], env=hidden, capture_output=True, text=True)

    assert (ran.returncode, ran.stdout) == (4, "")
    assert ran.stderr.startswith("error: device is cuda")
    assert ran.stderr.endswith("\n  code: device-missing\n")


def test_errors_of_a_real_process(tmp_path: Path) -> None:
    """As the tests above in a process of its own: the exit code is the shell's, the two streams are apart."""
    plain, as_json = (run_precast("digest", tmp_path / "nothing", *more) for more in ([], ["--json"]))

    assert (plain.returncode, as_json.returncode) == (3, 3)
    assert plain.stdout == ""
    assert plain.stderr == as_json.stderr
    assert plain.stderr.splitlines()[0] == f"error: {tmp_path}/nothing: expected a bundle, found nothing"
    assert json.loads(as_json.stdout)["error"]["where"] == f"{tmp_path}/nothing"


def test_terminal_is_not_obeyed_to_names_in_a_bundle(bundle: Path, tmp_path: Path, command: Command) -> None:
    opened = Bundle.open(bundle)
    model = msgspec.structs.replace(opened.manifest.model, architecture="\x1b[31mred\x07")
    manifest = msgspec.structs.replace(opened.manifest, model=model, blobs=())
    write_bundle(
        tmp_path / "red", manifest_without_blobs=manifest, graph=opened.graph, constants=opened.constants, files={},
        provenance={},
    )  # fmt: skip

    assert "\\x1b[31mred\\x07, 4 layers" in command("inspect", tmp_path / "red").stdout
    assert not [letter for letter in command("diff", bundle, tmp_path / "red").stdout if letter in "\x1b\x07"]
    assert not [letter for letter in command("digest", tmp_path / "\x1b[31m").stderr if letter == "\x1b"]


# --- what the verbs load ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect", "{bundle}"),
        *(("inspect", "{bundle}", view) for view in VIEWS),
        ("verify", "{bundle}", "--weights", str(MODEL)),
        ("diff", "{bundle}", "{bundle}", "--json"),
        ("digest", "{bundle}"),
    ],
    ids=" ".join,
)
def test_verbs_that_look_import_no_torch(arguments: tuple[str, ...], bundle: Path) -> None:
    given = [argument.format(bundle=bundle) for argument in arguments]

    ran = subprocess.run([sys.executable, "-c", LIST_MODULES, *given], capture_output=True, text=True)

    assert ran.returncode == 0, ran.stderr
    assert ran.stdout != ""
    loaded = set(ran.stderr.split())
    assert "precast" in loaded
    assert loaded & {"torch", "transformers", "numpy", "safetensors", "tokenizers", "rich"} == set()


@pytest.mark.parametrize(
    "option",
    [("--dtype", "float12"), ("--kv-dtype", "int8"), ("--page-size", "0"), ("--activations", "fp8"),
     ("--quantise", "int4"), ("--target", "sm_12"), ("--target", "sm_90", "--world", "tp=x")],
    ids=" ".join,
)  # fmt: skip
def test_a_wrong_option_of_a_build_is_told_before_torch_is_imported(option: tuple[str, ...], tmp_path: Path) -> None:
    given = ["build", str(MODEL), "-o", str(tmp_path / "b"), *option, "--json"]

    ran = subprocess.run([sys.executable, "-c", LIST_MODULES, *given], capture_output=True, text=True)

    assert ran.returncode == 2
    assert json.loads(ran.stdout)["error"]["code"] == "option-invalid"
    loaded = set(ran.stderr.splitlines()[-1].split())
    assert "precast" in loaded
    assert loaded & {"torch", "transformers"} == set()


def test_build_without_transformers_ends_with_4(tmp_path: Path) -> None:
    block = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "transformers":
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
from precast.cli.main import main
main(["build", {str(MODEL)!r}, "-o", {str(tmp_path / "b")!r}, "--json"])
"""
    ran = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True)

    assert ran.returncode == 4
    assert json.loads(ran.stdout)["error"]["code"] == "dependency-missing"
    assert "pip install 'precast[build]'" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_help_lists_verbs_in_the_order_of_use() -> None:
    listed = main.list_commands(click.Context(main))

    assert listed[0] == "build"
    assert listed[-2:] == ["run", "serve"]
    assert sorted(listed) == sorted(main.commands)


def test_every_verb_reports_as_json() -> None:
    """What a script relies on: it is one flag for all of them."""
    for verb in verbs().values():
        assert "--json" in [name for param in verb.params for name in param.opts]
