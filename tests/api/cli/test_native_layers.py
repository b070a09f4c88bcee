"""Native layers and sealed choices from the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import families
import msgspec
import pytest
from recitation import Command

from precast.ir.artifact import Bundle, write_bundle
from precast.ir.bundle.attached import compose
from precast.ir.bundle.trust import Admitted, MadeHere, folder_of_layers
from precast.ir.native import NativeLayer
from precast.kernels.measured import Machine, Measured, Table, write_table
from precast.kernels.sealed import sealed_tables

H200 = Machine("NVIDIA H200", (9, 0), "580.95", "2.11.0", "3.6.0", 130100)
ROW = Measured("precast.rms_norm", "bfloat16", {"T": (1, None)}, ("triton.rms_norm",))


@pytest.fixture
def copy(bundle: Path, tmp_path: Path) -> Path:
    """A copy of the example model's bundle, to attach to."""
    shutil.copytree(bundle, tmp_path / "copy")
    return tmp_path / "copy"


def table(path: Path, machine: Machine = H200, rows: int = 1) -> Path:
    write_table(Table(machine, (ROW,) * rows), path)
    return path


def test_sealing_keeps_the_digest_and_can_be_repeated(copy: Path, tmp_path: Path, command: Command) -> None:
    before = Bundle.open(copy)
    newer = msgspec.structs.replace(H200, driver="590.10")

    first = command("seal", copy, "--choices", table(tmp_path / "a"), "--json")
    command("seal", copy, "--choices", table(tmp_path / "b", rows=2))  # takes the place of the first
    last = command("seal", copy, "--choices", table(tmp_path / "c", newer), "--json")

    after = Bundle.open(copy)
    assert (first.exit_code, last.exit_code, last.stderr) == (0, 0, "")
    assert after.digest == before.digest == json.loads(last.stdout)["digest"]
    assert after.provenance == before.provenance
    found = {each.machine.driver: len(each.choices) for each in sealed_tables(after.attached).values()}
    assert found == {"580.95": 2, "590.10": 1}
    assert {each["machine"]["driver"] for each in json.loads(last.stdout)["tables"]} == {"580.95", "590.10"}


def test_what_is_attached_as_a_table_and_is_none_counts_for_nothing(
    copy: Path, tmp_path: Path, command: Command, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever may attach could end every load with it."""
    caplog.set_level("INFO", "precast")
    assert command("seal", copy, "--choices", table(tmp_path / "a")).exit_code == 0
    bundle, kind = Bundle.open(copy), "application/vnd.precast.choices.v1+json"
    for layers in ([], [("application/json", b"{}")], [(kind, b"{}")], [(kind, b"\xff")]):
        odd = compose(bundle.descriptor, kind, layers)

        found = sealed_tables([odd, *bundle.attached])

        assert list(found.values()) == [Table(H200, (ROW,))]
        assert f"{odd.digest} are passed over" in caplog.text


def test_sealing_takes_a_table_only(copy: Path, tmp_path: Path, command: Command) -> None:
    (tmp_path / "x").write_text("{}")
    refused = command("seal", copy, "--choices", tmp_path / "x")

    assert refused.exit_code == 1
    assert "no table of measured choices" in refused.stderr


def test_inspect_shows_native_layers(bundle: Path, tmp_path: Path, command: Command) -> None:
    opened = Bundle.open(bundle)
    layer = NativeLayer("sm_90", 13000, {"ptxas": "12.8", "triton": "3.7.1"}, {}, (), {})
    made = write_bundle(
        tmp_path / "b", manifest_without_blobs=msgspec.structs.replace(opened.manifest, blobs=()), graph=opened.graph,
        constants=opened.constants, files=opened.files("tokenizer"), provenance={}, native=[layer],
    )  # fmt: skip

    shown = command("inspect", made.path, "--kernels")
    fields: dict[str, Any] = json.loads(command("inspect", made.path, "--kernels", "--json").stdout)

    (found,) = fields["native"]
    assert found["digest"] == made.native_digest("sm_90")
    assert (found["target"], found["cuda"], found["compilers"]) == ("sm_90", 13000, layer.compilers)
    last = shown.stdout.splitlines()[-1]
    assert all(text in last for text in ("sm_90", "13.0", "ptxas 12.8, triton 3.7.1", found["digest"]))
    assert "native" not in json.loads(command("inspect", bundle, "--kernels", "--json").stdout)


@pytest.mark.slow
def test_a_build_for_a_target_is_the_same_wherever_it_runs(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    families.make_config("llama").save_pretrained(tmp_path / "model")
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        options = ("--dtype", "bfloat16", "--target", "sm_80", "--choices", table(tmp_path / "choices"))
        built = command("build", tmp_path / "model", "-o", tmp_path / place / "bundle", *options)
        assert built.exit_code == 0, built.stderr
    command("build", tmp_path / "model", "-o", tmp_path / "plain", "--dtype", "bfloat16")

    first, second = (Bundle.open(tmp_path / place / "bundle") for place in ("a", "b"))
    assert first.digest == second.digest != Bundle.open(tmp_path / "plain").digest
    assert first.native_digest("sm_80") == second.native_digest("sm_80")
    admitted = MadeHere(folder_of_layers()).admits(first.digest, first.native_digest("sm_80"))
    assert admitted == Admitted("compiled by this user on this machine")


def test_a_build_for_no_gpu_is_refused_before_it_takes_its_time(tmp_path: Path, command: Command) -> None:
    families.make_config("llama").save_pretrained(tmp_path / "model")
    refused = command("build", tmp_path / "model", "-o", tmp_path / "b", "--target", "sm_75")

    assert refused.exit_code == 2
    assert "sm_75" in refused.stderr
    assert not (tmp_path / "b").exists()


def test_choices_of_a_build_go_with_a_target(tmp_path: Path, command: Command) -> None:
    assert command("build", "model", "-o", tmp_path / "b", "--choices", tmp_path / "x").exit_code == 2
