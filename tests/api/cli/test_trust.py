"""`precast sign`, `attest` and `verify`, as users call them."""

from __future__ import annotations

import datetime
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import signers
from recitation import Command

from precast.ir.artifact import Bundle

KEY, OTHER = signers.p256(), signers.ed()


@pytest.fixture
def own(bundle: Path, tmp_path: Path) -> Path:
    """A copy of the example's bundle, beside key pairs `key` and `other`."""
    for name, key in (("key", KEY), ("other", OTHER)):
        (tmp_path / f"{name}.pem").write_bytes(signers.private_pem(key))
        (tmp_path / f"{name}.pub").write_bytes(signers.public_pem(key))
    return shutil.copytree(bundle, tmp_path / "own.bundle")


def policy(own: Path, **rule: object) -> Path:
    path = own.parent / "trust.json"
    rules = [{"name": "ci", "scope": "any", "key": "key.pub", **rule}]
    path.write_text(json.dumps({"version": 1, "portable": "vouched", "rules": rules}))
    return path


def test_sign_and_verify(own: Path, command: Command) -> None:
    digest = Bundle.open(own).digest

    made = json.loads(command("sign", own, "--key", own.parent / "key.pem", "--json").stdout)
    seen = command("verify", own, "--key", own.parent / "other.pub", "--key", own.parent / "key.pub")

    fingerprint = signers.public(KEY).fingerprint
    assert (made["digest"], made["key"]) == (digest, fingerprint)
    assert made["attached"] in [each.digest for each in Bundle.open(own).attached]
    assert seen.exit_code == 0
    assert seen.stdout.splitlines() == [
        digest,
        "bundle: whole, canonical, and valid by every rule",
        f"signature: good, by key {fingerprint}",
        "portable layers: let in: portable layers are data, and taken from anyone",
    ]


def test_signing_again_replaces_what_the_key_said(own: Path, command: Command) -> None:
    before = {each.digest for each in Bundle.open(own).attached}
    keys = [own.parent / f"{name}.pem" for name in ("other", "key", "key")]
    signed = [json.loads(command("sign", own, "--key", key, "--json").stdout)["attached"] for key in keys]
    attested = [json.loads(command("attest", own, "--key", keys[1], "--json").stdout)["attached"] for _ in range(2)]

    after = {each.digest for each in Bundle.open(own).attached}
    assert after - before == {signed[0], signed[-1], *attested[-1].values()}
    for name in ("key", "other"):
        assert command("verify", own, "--key", own.parent / f"{name}.pub").exit_code == 0


def test_an_unsigned_bundle_is_refused_where_a_signature_is_asked_for(own: Path, command: Command) -> None:
    result = command("verify", own, "--key", own.parent / "key.pub")

    assert result.exit_code == 3
    assert result.stderr.endswith("\n  code: signature-missing\n")


def test_a_signature_by_another_key_is_refused(own: Path, command: Command) -> None:
    command("sign", own, "--key", own.parent / "other.pem")
    result = command("verify", own, "--key", own.parent / "key.pub", "--json")

    assert result.exit_code == 3
    assert json.loads(result.stdout)["error"]["code"] == "signature-invalid"


def test_attest_and_verify(own: Path, command: Command) -> None:
    run = ("--builder-id", "https://ci.example/x", "--run-id", "7")
    made = command("attest", own, "--key", own.parent / "other.pem", *run, "--json")
    wanted = ("--attestation", "provenance", "--attestation", "https://cyclonedx.org/bom")
    seen = command("verify", own, "--key", own.parent / "other.pub", *wanted, "--json")
    as_signature = command("verify", own, "--key", own.parent / "other.pub")

    assert set(json.loads(made.stdout)["attached"]) == {"provenance", "sbom"}
    provenance, sbom = json.loads(seen.stdout)["attestations"]
    assert provenance["type"] == "https://slsa.dev/provenance/v1"
    assert provenance["predicate"]["runDetails"]["builder"]["id"] == "https://ci.example/x"
    assert sbom["predicate"]["bomFormat"] == "CycloneDX"
    assert as_signature.exit_code == 3
    assert as_signature.stderr.endswith("\n  code: signature-invalid\n")


def test_one_attestation_alone(own: Path, command: Command) -> None:
    command("attest", own, "--key", own.parent / "key.pem", "--type", "sbom")
    given = ("verify", own, "--key", own.parent / "key.pub", "--attestation")

    assert [command(*given, type).exit_code for type in ("sbom", "provenance")] == [0, 3]


def test_an_authority(own: Path, command: Command) -> None:
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    root_key = signers.p256()
    root = signers.certificate("root", root_key, ca=True, start=now - day, end=now + day)
    leaf = signers.certificate("ci@acme.example", KEY, root, root_key, start=now - day, end=now + day)
    ca, certificate = own.parent / "ca.pem", own.parent / "leaf.pem"
    ca.write_bytes(signers.certificates_pem(root))
    certificate.write_bytes(signers.certificates_pem(leaf))

    command("sign", own, "--key", own.parent / "key.pem", "--certificate", certificate)

    seen = [
        command("verify", own, "--ca", ca, *options)
        for options in ((), ("--identity", "*@acme.example"), ("--identity", "*@other.example"))
    ]
    assert [each.exit_code for each in seen] == [0, 0, 3]
    assert "signature: good, by ci@acme.example\n" in seen[0].stdout


def test_a_policy_names_its_rule(own: Path, command: Command) -> None:
    unsigned = command("verify", own, "--trust", policy(own))
    command("sign", own, "--key", own.parent / "key.pem")
    signed = command("verify", own, "--trust", policy(own), "--json")
    elsewhere = command("verify", own, "--trust", policy(own, repositories=["ghcr.io/acme/*"]))
    there = command(
        "verify", own, "--trust", policy(own, repositories=["ghcr.io/acme/*"]), "--repository", "ghcr.io/acme/llama"
    )

    assert (unsigned.exit_code, elsewhere.exit_code, there.exit_code) == (3, 3, 0)
    assert unsigned.stderr.endswith("\n  code: untrusted\n")
    assert "rule 'ci' of" in unsigned.stderr
    assert json.loads(signed.stdout)["trust"]["portable"]["rule"] == "ci"


def test_the_users_policy_is_asked_without_an_option(
    own: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    (own.parent / "precast").mkdir()
    (own.parent / "precast" / "trust.json").write_text('{"version": 1, "portable": "vouched"}')
    monkeypatch.setenv("XDG_CONFIG_HOME", str(own.parent))

    for verb in (("verify",), ("bench", "kernels"), ("seal",)):
        assert command(*verb, own).stderr.endswith("\n  code: untrusted\n")


@pytest.mark.parametrize(
    ("exit_code", "code", "arguments"),
    [
        (1, "key-invalid", ("sign", "{own}", "--key", "{tmp}/key.pub")),
        (1, "key-invalid", ("sign", "{own}", "--key", "{tmp}/none.pem")),
        (1, "key-invalid", ("sign", "{own}", "--key", "{tmp}/key.pem", "--certificate", "{tmp}/key.pub")),
        (1, "key-passphrase", ("sign", "{own}", "--key", "{tmp}/locked.pem")),
        (3, "bundle-missing", ("sign", "{tmp}/none", "--key", "{tmp}/key.pem")),
        (1, "key-invalid", ("verify", "{own}", "--key", "{tmp}/key.pem")),
        (1, "key-invalid", ("verify", "{own}", "--ca", "{tmp}/key.pub")),
        (1, "trust-invalid", ("verify", "{own}", "--trust", "{tmp}/key.pub")),
        (1, "trust-invalid", ("verify", "{own}", "--trust", "{tmp}/none.json")),
    ],
)
def test_errors(exit_code: int, code: str, arguments: tuple[str, ...], own: Path, command: Command) -> None:
    (own.parent / "locked.pem").write_bytes(signers.private_pem(KEY, b"secret"))
    result = command(*(each.format(own=own, tmp=own.parent) for each in arguments))

    assert (result.exit_code, result.stdout) == (exit_code, "")
    assert result.stderr.endswith(f"\n  code: {code}\n")


@pytest.mark.parametrize("options", [("--identity", "x"), ("--attestation", "sbom")])
def test_options_that_go_with_others(options: tuple[str, ...], own: Path, command: Command) -> None:
    assert command("verify", own, *options).exit_code == 2


@pytest.mark.parametrize("variable", ["PRECAST_PASSPHRASE", "COSIGN_PASSWORD"])
def test_a_passphrase_in_the_environment(
    variable: str, own: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    (own.parent / "locked.pem").write_bytes(signers.private_pem(KEY, b"secret"))
    monkeypatch.setenv(variable, "secret")

    assert command("sign", own, "--key", own.parent / "locked.pem").exit_code == 0


def test_verifying_loads_neither_torch_nor_what_only_signing_needs(own: Path, command: Command) -> None:
    command("sign", own, "--key", own.parent / "key.pem")
    script = (
        "import sys\nfrom precast.cli.main import main\ntry:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
    )
    script += 'print(*{name.partition(".")[0] for name in sys.modules})'
    given = [sys.executable, "-c", script, "verify", str(own), "--key", str(own.parent / "key.pub")]

    loaded = subprocess.run(given, capture_output=True, text=True, check=True).stdout.splitlines()[-1].split()

    assert "cryptography" in loaded
    assert not {"torch", "transformers", "numpy", "nacl"} & set(loaded)
