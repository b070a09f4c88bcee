"""Code that comes with a model: refused, unless it is allowed; then it runs in the builder, and nowhere else."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click.testing
import families
import pytest
import remote_model
import torch

from precast.builder.build import build
from precast.builder.source.model_class import from_config
from precast.builder.source.shrink import random_model
from precast.builder.source.source import open_source
from precast.check.agreement import PROMPTS, hf_logits, relative_error
from precast.check.check import compare
from precast.cli.main import main
from precast.ir.artifact import Bundle
from precast.ir.errors import BuildError


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where transformers copies a model's code to, and imports it from; forgotten after each test."""
    place = tmp_path / "modules"
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(place))
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield place
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
        del sys.modules[name]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The directory of a model with its own code, without weights."""
    return remote_model.write_model(tmp_path / "model")


def refused(source: Any, code: str, message: str, out: Path, **options: Any) -> str:
    with pytest.raises(BuildError, match=message) as error:
        build(source, out, **options)
    assert error.value.code == code
    assert not out.exists()
    return str(error.value)


# --- not allowed -------------------------------------------------------------------------------------------------


def test_code_does_not_run(model: Path, modules: Path, tmp_path: Path) -> None:
    for file in model.glob("*.py"):
        file.write_text("raise SystemExit('this must not run')")

    text = refused(
        model, "remote-code", r"for tally models of the architectures \['TallyForCausalLM'\]", tmp_path / "bundle"
    )

    assert "AutoConfig: configuration_tally.TallyConfig, AutoModelForCausalLM: modeling_tally.TallyForCausalLM" in text
    assert "fix: use a model that transformers has itself, or read that code and allow it (--allow-remote-code)" in text
    assert not modules.exists()


def test_a_build_that_allowed_it_allows_no_other(model: Path, tmp_path: Path) -> None:
    build(model, tmp_path / "first", allow_remote_code=True)

    refused(model, "remote-code", "names code to run", tmp_path / "second")


def test_a_config_object_that_names_code(model: Path, tmp_path: Path) -> None:
    config = open_source(model, allow_code=True).config

    refused(config, "remote-code", "TallyConfig: the config names code to run", tmp_path / "bundle")

    assert build(config, tmp_path / "bundle", allow_remote_code=True).manifest.model.architecture == "TallyForCausalLM"


@pytest.mark.parametrize("architectures", [["MyLlamaForCausalLM"], ["LlamaForCausalLM", "MyLlama"], None])
def test_code_under_a_known_model_type(architectures: Any, tmp_path: Path) -> None:
    entries = {**families.make_config("llama").to_dict(), "architectures": architectures}
    code = {"AutoModelForCausalLM": "modeling.MyLlama"}
    (tmp_path / "config.json").write_text(json.dumps({**entries, "auto_map": code}))

    refused(tmp_path, "remote-code", "which transformers does not have itself", tmp_path / "bundle")


# --- allowed -----------------------------------------------------------------------------------------------------


def test_a_bundle_needs_none_of_it(model: Path, modules: Path, tmp_path: Path) -> None:
    """The logits are those of the code; a process that can import neither it nor transformers computes them."""
    own = random_model(open_source(model, allow_code=True).config)
    own.save_pretrained(tmp_path / "checkpoint")
    ran = click.testing.CliRunner().invoke(
        main, ["build", str(model), "-o", str(tmp_path / "bundle"), "--allow-remote-code", "--dtype", "float32"]
    )
    assert ran.exit_code == 0, ran.output
    for file in [*model.glob("*.py"), *(tmp_path / "checkpoint").glob("*.py"), *modules.rglob("*.py")]:
        file.unlink()

    script = f"""
import sys, torch
sys.modules["transformers"] = None
import precast
with precast.load({str(tmp_path / "bundle")!r}, weights={str(tmp_path / "checkpoint")!r}, device="cpu") as engine:
    torch.save([engine.logits(list(prompt)) for prompt in {PROMPTS!r}], {str(tmp_path / "logits")!r})
assert not [name for name in sys.modules if "tally" in name]
"""
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)

    assert loaded.returncode == 0, loaded.stderr
    for found, expected in zip(torch.load(tmp_path / "logits"), hf_logits(own, PROMPTS), strict=True):
        assert relative_error(found, expected) < 1e-4
    plain = from_config(families.make_config("llama"), dtype=torch.float32)
    assert relative_error(hf_logits(own, PROMPTS)[0], hf_logits(plain, PROMPTS)[0]) > 0.1


def test_provenance_says_so(model: Path, tmp_path: Path) -> None:
    build(model, tmp_path / "bundle", allow_remote_code=True)
    build(families.make_config("llama"), tmp_path / "plain", allow_remote_code=True)

    assert Bundle.open(tmp_path / "bundle").provenance["remote_code"] is True
    assert Bundle.open(tmp_path / "plain").provenance["remote_code"] is False


def test_a_model_that_transformers_has_itself_takes_no_code(tmp_path: Path) -> None:
    entries = {**families.make_config("llama").to_dict(), "architectures": ["LlamaForCausalLM"]}
    code = {"AutoConfig": "modeling.MyConfig", "AutoModelForCausalLM": "modeling.MyLlama"}
    (tmp_path / "config.json").write_text(json.dumps({**entries, "auto_map": code}))

    bundle = build(tmp_path, tmp_path / "bundle", allow_remote_code=True)

    assert bundle.provenance["remote_code"] is False


def test_no_snapshots_are_kept(model: Path, tmp_path: Path) -> None:
    """The code is read anew by each build."""
    build(model, tmp_path / "first", allow_remote_code=True, snapshots=tmp_path / "snapshots")
    code = model / "modeling_tally.py"
    code.write_text(code.read_text().replace("** layer_idx", "** (2 * layer_idx)"))
    build(model, tmp_path / "second", allow_remote_code=True, snapshots=tmp_path / "snapshots")

    assert not (tmp_path / "snapshots").exists()
    assert Bundle.open(tmp_path / "first").digest != Bundle.open(tmp_path / "second").digest


def test_it_is_checked_as_any_other(model: Path) -> None:
    compare(open_source(model, allow_code=True).config)


# --- code that can't be used -------------------------------------------------------------------------------------


def test_its_own_checks_are_shown(tmp_path: Path) -> None:
    model = remote_model.write_model(tmp_path / "model", depth_scale=-1.0)

    refused(
        model, "config-invalid", r"its own code refuses the config: depth_scale is -1.0, expected at least 0",
        tmp_path / "bundle", allow_remote_code=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("code", "reason"), [("import", "invalid syntax"), ("1 / 0", "division by zero"), ("x = 1", "TallyForCausalLM")]
)
def test_code_that_cannot_be_imported(code: str, reason: str, model: Path, tmp_path: Path) -> None:
    (model / "modeling_tally.py").write_text(code)

    refused(model, "config-invalid", f"own code can't be used: .*{reason}", tmp_path / "bundle", allow_remote_code=True)


def test_code_that_is_not_there(model: Path, tmp_path: Path) -> None:
    (model / "modeling_tally.py").unlink()

    refused(model, "config-invalid", r"modeling_tally\.py", tmp_path / "bundle", allow_remote_code=True)


def test_code_without_a_causal_language_model(tmp_path: Path) -> None:
    code = {"AutoConfig": "configuration_tally.TallyConfig", "AutoModel": "modeling_tally.TallyModel"}
    model = remote_model.write_model(tmp_path / "model", auto_map=code)

    refused(
        model, "model-unsupported", r"its own code has no causal language model \(auto_map: AutoConfig, AutoModel\)",
        tmp_path / "bundle", allow_remote_code=True,
    )  # fmt: skip
