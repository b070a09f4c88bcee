"""cosign verifies what Precast signed, without knowing Precast. Skipped where there is no cosign of version 3.

It is looked for on the PATH and in `$PRECAST_TEST_TOOLS`. Without it `test_signing.py` still verifies what cosign once
signed.
"""

from __future__ import annotations

import datetime
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import signers
from fake_registry import FakeRegistry

from precast.ir.artifact import Bundle, attach
from precast.ir.trust import keys, signatures, statements
from precast.registry import attaching
from precast.registry.client import Repository
from precast.registry.pull import pull
from precast.registry.push import push
from precast.registry.reference import Reference
from precast.sign import predicates
from precast.sign.private_keys import private_key
from precast.sign.signing import attest, sign

PATH = os.pathsep.join(filter(None, (os.environ.get("PRECAST_TEST_TOOLS"), os.environ.get("PATH"))))
COSIGN = shutil.which("cosign", path=PATH)
pytestmark = pytest.mark.skipif(not COSIGN, reason="needs cosign 3, of which Debian sid has a package")

KEYS = {"p256": signers.p256(), "ed25519": signers.ed()}


@pytest.fixture
def own(bundle: Path, tmp_path: Path) -> Bundle:
    """A copy of the example's bundle, to attach something to."""
    return Bundle.open(shutil.copytree(bundle, tmp_path / "own.bundle"))


def cosign(home: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run cosign, with nothing of its own on this machine."""
    environment = {"HOME": str(home), "PATH": "/usr/bin:/bin", "TUF_ROOT": str(home / "tuf")}
    command = [str(COSIGN), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def verify(bundle: Bundle, key: signers.Key, home: Path, *verb: str) -> subprocess.CompletedProcess[str]:
    (home / "key.pub").write_bytes(signers.public_pem(key))
    options = ("--key", home / "key.pub", "--insecure-ignore-tlog=true", "--local-image", bundle.path)
    return cosign(home, *(verb or ("verify",)), *options)


@pytest.mark.parametrize("kind", KEYS)
def test_a_signature(own: Bundle, tmp_path: Path, kind: str) -> None:
    attach(own.path, sign(own, private_key(signers.private_pem(KEYS[kind])), name="ghcr.io/acme/llama"))

    right = verify(own, KEYS[kind], tmp_path)
    wrong = verify(own, signers.p256(), tmp_path)

    assert right.returncode == 0, right.stderr
    assert "signatures were verified against the specified public key" in right.stderr
    assert wrong.returncode != 0


def test_attestations(own: Bundle, tmp_path: Path) -> None:
    key = private_key(signers.private_pem(KEYS["p256"]))
    provenance = attest(own, key, statements.PROVENANCE, predicates.provenance(own))
    attach(own.path, provenance, attest(own, key, statements.CYCLONEDX, predicates.bill_of_materials(own)))

    for type in ("slsaprovenance1", "cyclonedx"):
        done = verify(own, KEYS["p256"], tmp_path, "verify-attestation", "--type", type)
        assert done.returncode == 0, done.stderr
    assert verify(own, KEYS["p256"], tmp_path, "verify-attestation", "--type", "spdxjson").returncode != 0


def test_a_signature_by_certificate(own: Bundle, tmp_path: Path) -> None:
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    root_key, between_key, key = signers.p256(), signers.p256(), signers.p256()
    dates = {"start": now - day, "end": now + day}
    root = signers.certificate("root", root_key, ca=True, **dates)
    between = signers.certificate("between", between_key, root, root_key, ca=True, **dates)
    leaf = signers.certificate("ci@acme.example", key, between, between_key, **dates)
    (tmp_path / "ca.pem").write_bytes(signers.certificates_pem(between, root))
    attach(own.path, sign(own, private_key(signers.private_pem(key)), certificate=signers.certificates_pem(leaf)))

    service = f"url=https://ca.acme.example,certificate-chain={tmp_path / 'ca.pem'},start-time={now - day:%FT%TZ}"
    made = cosign(tmp_path, "trusted-root", "create", "--fulcio", service, "--out", tmp_path / "root.json")
    assert made.returncode == 0, made.stderr

    def run(identity: str) -> subprocess.CompletedProcess[str]:
        return cosign(
            tmp_path, "verify", "--trusted-root", tmp_path / "root.json", "--certificate-identity", identity,
            "--certificate-oidc-issuer-regexp", ".*", "--insecure-ignore-sct", "--insecure-ignore-tlog",
            "--local-image", own.path,
        )  # fmt: skip

    right = run("ci@acme.example")
    assert right.returncode == 0, right.stderr
    assert run("eve@acme.example").returncode != 0


def test_a_key_that_cosign_makes(tmp_path: Path) -> None:
    environment = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "COSIGN_PASSWORD": "secret"}
    subprocess.run([str(COSIGN), "generate-key-pair"], cwd=tmp_path, env=environment, check=True, capture_output=True)

    read = private_key((tmp_path / "cosign.key").read_bytes(), "secret")

    assert signers.public_pem(read.key) == (tmp_path / "cosign.pub").read_bytes()


def test_why_attestations_want_a_key_of_their_own(own: Bundle, tmp_path: Path) -> None:
    # cosign's `verify` takes any statement for a signature. docs/trust.md says so; should it change, the page must.
    key = private_key(signers.private_pem(KEYS["p256"]))
    attach(own.path, attest(own, key, statements.PROVENANCE, predicates.provenance(own)))

    assert verify(own, KEYS["p256"], tmp_path).returncode == 0


@pytest.fixture
def pushed(own: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address, without `oci://`, of the bundle in a registry of the test's own."""
    monkeypatch.setenv("PRECAST_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    with FakeRegistry() as registry:
        yield push(own.path, f"{registry.host}/acme/llama:v1").reference


def test_what_cosign_signs_in_a_registry(pushed: str, tmp_path: Path) -> None:
    environment = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "COSIGN_PASSWORD": "secret"}

    def run(*arguments: object) -> None:
        done = subprocess.run([str(COSIGN), *map(str, arguments)], cwd=tmp_path, env=environment, capture_output=True)
        assert done.returncode == 0, done.stderr.decode()

    run("generate-key-pair")
    run("signing-config", "create", "--out", "services.json")
    run("sign", "--key", "cosign.key", "--signing-config", "services.json", "--yes", pushed)
    (tmp_path / "predicate.json").write_text('{"buildDefinition": {}}')
    attested = ("--predicate", "predicate.json", "--type", "slsaprovenance1")
    run("attest", "--key", "cosign.key", "--signing-config", "services.json", "--yes", *attested, pushed)
    pull(pushed, tmp_path / "pulled.bundle")

    bundle = Bundle.open(tmp_path / "pulled.bundle")
    found = signatures.attached_to(bundle.attached)
    key = keys.public_key((tmp_path / "cosign.pub").read_bytes())
    assert len(signatures.require(found, bundle.digest, [key])) == 1
    assert len(signatures.require(found, bundle.digest, [key], statements.PROVENANCE)) == 1


def test_what_precast_attaches_in_a_registry(pushed: str, own: Bundle, tmp_path: Path) -> None:
    repository = Repository(Reference.parse(pushed), writes=True)
    attaching.attach(repository, own.descriptor, sign(own, private_key(signers.private_pem(KEYS["p256"]))))
    (tmp_path / "key.pub").write_bytes(signers.public_pem(KEYS["p256"]))

    done = cosign(tmp_path, "verify", "--key", tmp_path / "key.pub", "--insecure-ignore-tlog=true", pushed)

    assert done.returncode == 0, done.stderr
    assert own.digest in done.stdout
