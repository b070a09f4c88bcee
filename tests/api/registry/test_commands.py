"""`precast push`, `pull` and `store`: what they print, as text and as JSON, and how they end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_registry import FakeRegistry, status
from recitation import Command

from precast.ir.artifact import Bundle
from precast.ir.bundle import oci


def test_push_and_pull(registry: FakeRegistry, tiny: Bundle, command: Command, tmp_path: Path) -> None:
    pushed = command("push", tiny.path, f"{registry.host}/org/tiny:v1")
    pulled = command("pull", f"{registry.host}/org/tiny:v1", "-o", tmp_path / "out.bundle")

    assert (pushed.exit_code, pulled.exit_code) == (0, 0)
    reference = f"{registry.host}/org/tiny@{tiny.digest}"
    assert pushed.output.splitlines()[0] == pulled.output.splitlines()[0] == reference
    assert "8 uploaded" in pushed.output
    assert "2 manifests" in pushed.output
    assert Bundle.open(tmp_path / "out.bundle").digest == tiny.digest


def test_json(registry: FakeRegistry, tiny: Bundle, command: Command) -> None:
    pushed = json.loads(command("push", tiny.path, f"{registry.host}/org/tiny:v1", "--json").stdout)
    pulled = json.loads(command("pull", f"{registry.host}/org/tiny:v1", "--json").stdout)

    attached = {extra.digest: extra.artifact_type for extra in tiny.attached}
    assert pushed == {
        "reference": f"{registry.host}/org/tiny@{tiny.digest}", "digest": tiny.digest, "tag": "v1", "uploaded": 8,
        "present": 0, "mounted": 0, "uploaded_bytes": pulled["fetched_bytes"], "attached": list(attached),
    }  # fmt: skip
    assert pulled == {
        "reference": pushed["reference"], "digest": tiny.digest, "path": None, "shared_bytes": 0,
        "fetched_bytes": pushed["uploaded_bytes"], "attached": attached, "notes": [],
    }  # fmt: skip


def test_store(registry: FakeRegistry, tiny: Bundle, command: Command) -> None:
    empty = command("store", "ls")
    command("push", tiny.path, f"{registry.host}/org/tiny:v1")
    command("pull", f"{registry.host}/org/tiny:v1")

    listed = json.loads(command("store", "ls", "--json").stdout)
    whole = command("store", "verify")
    blob = Path(os.environ["PRECAST_STORE"]) / oci.blob_path(tiny.layers[0].digest)
    blob.write_bytes(b"x" * blob.stat().st_size)
    damaged = command("store", "verify")
    removed = json.loads(command("store", "gc", "--unused-days", "0", "--json").stdout)

    assert "empty" in empty.output
    assert [entry["digest"] for entry in listed["bundles"]] == [tiny.digest]
    assert (whole.exit_code, damaged.exit_code) == (0, 3)
    assert "1 bundles, 11 blobs" in whole.output
    assert tiny.layers[0].digest in damaged.output
    assert removed["bundles"] == [tiny.digest]
    assert command("store", "gc", "--unused-days", "-1").exit_code == 2


def test_addresses_in_place_of_paths(registry: FakeRegistry, tiny: Bundle, command: Command) -> None:
    command("push", tiny.path, f"{registry.host}/org/tiny:v1")
    address = f"oci://{registry.host}/org/tiny:v1"

    assert command("digest", address).output.strip() == tiny.digest
    shown = json.loads(command("inspect", address, "--json").stdout)
    assert shown["bytes"]["total"] > sum(layer.size for layer in tiny.layers)
    assert list(shown["attached"].values()) == ["application/vnd.dev.sigstore.bundle.v0.3+json"]
    assert command("inspect", address).stdout.splitlines()[0].split() == ["bundle", address]
    assert command("verify", address).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "code", "exit_code"),
    [
        (("pull", "nothing"), "reference-invalid", 2),
        (("pull", "HOST/org/none:v1"), "registry-missing", 1),
        (("pull", "HOST/org/tiny:v1", "-o", "/nowhere/out"), "write-failed", 1),
        (("push", "/nowhere", "HOST/org/tiny:v1"), "bundle-missing", 3),
    ],
)
def test_errors(
    arguments: tuple[str, ...], code: str, exit_code: int, registry: FakeRegistry, command: Command
) -> None:
    found = command(*(text.replace("HOST", registry.host) for text in arguments), "--json")

    assert found.exit_code == exit_code
    assert json.loads(found.stdout)["error"]["code"] == code
    assert "Traceback" not in found.stderr


def test_registry_that_refuses(registry: FakeRegistry, tiny: Bundle, command: Command) -> None:
    registry.misbehave("POST", "uploads", status(403, b'{"errors":[{"code":"DENIED","message":"not yours"}]}'))

    found = command("push", tiny.path, f"{registry.host}/org/tiny:v1")

    assert found.exit_code == 1
    assert "DENIED: not yours" in found.stderr
    assert "docker login" in found.stderr
    assert "code: registry-denied" in found.stderr


def test_without_urllib3(tiny: Bundle) -> None:
    absent = "import sys; sys.modules['urllib3'] = None; from precast.cli.main import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", absent, "push", str(tiny.path), "ghcr.io/org/name:v1"]

    done = subprocess.run(command, capture_output=True, text=True)

    assert done.returncode == 4
    assert "pip install 'precast[registry]'" in done.stderr
    assert "code: dependency-missing" in done.stderr


def test_image_and_mounts(registry: FakeRegistry, tiny: Bundle, command: Command) -> None:
    command("push", tiny.path, f"{registry.host}/org/other")

    mounted = json.loads(
        command("push", tiny.path, f"{registry.host}/org/tiny:v1", "--mount-from", "org/other", "--json").stdout
    )
    image = command("push", tiny.path, f"{registry.host}/org/tiny:image", "--image")

    assert (mounted["mounted"], mounted["uploaded"]) == (8, 0)
    assert tiny.digest not in image.output
    assert ("org/tiny", "image") in registry.manifests


@pytest.mark.parametrize(
    "verb", [("push", "{}", "ghcr.io/a/b"), ("diff", "{}", "."), ("diff", ".", "{}"), ("seal", "{}")]
)
def test_verbs_that_take_no_address_say_so(verb: tuple[str, ...], command: Command) -> None:
    found = command(*(word.format("oci://ghcr.io/org/tiny:v1") for word in verb))

    assert found.exit_code == 2
    assert "expected a bundle's directory, found the address oci://ghcr.io/org/tiny:v1; `precast pull" in found.stderr


def test_days_that_are_no_number(command: Command) -> None:
    found = command("store", "gc", "--unused-days", "nan")

    assert found.exit_code == 2
    assert "nan is no number of days" in found.stderr
