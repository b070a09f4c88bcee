"""The recipe of a release: whole, or nothing under the tag."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
import signers
import yaml
from fake_registry import FakeRegistry, status
from recitation import RECITE

from precast.cli.main import main
from precast.ir.artifact import Bundle
from precast.ir.trust import signatures, statements
from precast.registry.pull import pull

RECIPE = RECITE.parent / "ci" / "release.sh"
RELEASE, BUILDER = signers.p256(), signers.ed()
NAME = "acme/recite"


def release(first: Path, second: Path, registry: FakeRegistry, home: Path) -> subprocess.CompletedProcess[str]:
    """Run the recipe on two bundles, with keys of its own."""
    environment = {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), "/usr/bin", "/bin"]),
        "HOME": str(home),
        "PRECAST_STORE": str(home / "store"),
        "TMPDIR": str(home),
        "PRECAST_PASSPHRASE": "secret",
        "BUILDER_ID": "https://ci.example/build.yml",
        "RUN_ID": "run 7",
    }
    for who, key in (("RELEASE", RELEASE), ("BUILDER", BUILDER)):
        (home / f"{who}.pem").write_bytes(signers.private_pem(key, b"secret"))
        (home / f"{who}.pub").write_bytes(signers.public_pem(key))
        environment |= {f"{who}_KEY": str(home / f"{who}.pem"), f"{who}_PUB": str(home / f"{who}.pub")}
    command = ["sh", str(RECIPE), str(first), str(second), f"{registry.host}/{NAME}:v1"]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_a_release(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRECAST_STORE", str(tmp_path / "reader"))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    with FakeRegistry() as registry:
        done = release(bundle, bundle, registry, tmp_path)
        assert done.returncode == 0, done.stderr
        pull(f"{registry.host}/{NAME}:v1", tmp_path / "pulled.bundle")

    pulled = Bundle.open(tmp_path / "pulled.bundle")
    found = signatures.attached_to(pulled.attached)
    signature, *others = signatures.require(found, pulled.digest, [signers.public(RELEASE)])
    (provenance,) = signatures.require(found, pulled.digest, [signers.public(BUILDER)], statements.PROVENANCE)
    assert others == []
    assert signature.statement.subject[0].name == f"{registry.host}/{NAME}"
    assert provenance.statement.predicate["runDetails"]["metadata"]["invocationId"] == "run 7"
    assert not list(tmp_path.glob("tmp.*"))


def test_builds_that_differ_are_not_released(bundle: Path, other_bundle: Path, tmp_path: Path) -> None:
    with FakeRegistry() as registry:
        done = release(bundle, other_bundle, registry, tmp_path)

        assert done.returncode == 1
        assert "the builds differ" in done.stderr
        assert registry.manifests == {}


@pytest.mark.slow
def test_a_signature_that_is_not_stored_is_noticed(bundle: Path, tmp_path: Path) -> None:
    with FakeRegistry() as registry:
        # The registry takes the list of what is attached, and forgets it.
        registry.misbehave("PUT", r"manifests/sha256-", status(201))
        done = release(bundle, bundle, registry, tmp_path)

        assert done.returncode != 0
        assert (NAME, "v1") not in registry.manifests


WORKFLOWS = [RECIPE.with_name("github.yml"), RECIPE.with_name("gitlab-ci.yml")]


@pytest.mark.parametrize("file", WORKFLOWS, ids=[file.name for file in WORKFLOWS])
def test_workflows_call_what_there_is(file: Path) -> None:
    """Each command and option that a workflow or the recipe types is one of the command line's."""
    text = file.read_text(encoding="utf-8") + RECIPE.read_text(encoding="utf-8")
    yaml.safe_load(file.read_text(encoding="utf-8"))
    typed = re.findall(r"^[^#\n]*?(?:^|[\s(=])precast ([a-z]+)([^\n]*)", text, re.MULTILINE)

    assert {verb for verb, _ in typed} == {"build", "digest", "diff", "push", "pull", "sign", "attest", "verify"}
    for verb, rest in typed:
        options = {name for each in main.get_command(click.Context(main), verb).params for name in each.opts}
        assert set(re.findall(r"(?<= )--?[a-z][a-z-]*", rest)) <= options, (verb, rest)
    added = set(re.findall(r"--[a-z]+(?= \"\$TARGET\"| snapshots)", text))  # to `precast build "$@"`
    assert added == {"--target", "--snapshots"}
    assert added <= {name for each in main.get_command(click.Context(main), "build").params for name in each.opts}


def test_actions_are_pinned_to_commits() -> None:
    used = re.findall(r"uses: (\S+)", WORKFLOWS[0].read_text(encoding="utf-8"))

    assert used
    assert all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", each) for each in used)
