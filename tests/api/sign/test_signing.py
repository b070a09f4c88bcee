"""What signing attaches to a bundle, and what attestations say."""

from __future__ import annotations

import datetime
import json
import shutil
from pathlib import Path

import msgspec
import pytest
import signers
from signers import NOW

from precast.ir.artifact import Bundle, attach
from precast.ir.bundle.attached import compose
from precast.ir.errors import TrustError
from precast.ir.native import NativeLayer
from precast.ir.trust import keys, signatures, statements
from precast.sign import predicates
from precast.sign.private_keys import PrivateKey, private_key
from precast.sign.signing import attest, read_certificate, repeated, sign

COSIGN = Path(__file__).parent / "cosign"
COSIGNED = "sha256:dda6f56c2a79d846ea0891f2699ab8653915b7a8cf43b2f596a6754b049b4349"
KEY = signers.p256()


@pytest.fixture
def own(bundle: Path, tmp_path: Path) -> Bundle:
    """A copy of the example's bundle, to attach something to."""
    return Bundle.open(shutil.copytree(bundle, tmp_path / "own.bundle"))


def private(key: signers.Key = KEY) -> PrivateKey:
    return private_key(signers.private_pem(key))


def good(bundle: Bundle, *keys: signers.Key, type: str = statements.SIGNATURE) -> list[signatures.Verified]:
    found = signatures.attached_to(Bundle.open(bundle.path).attached)
    return signatures.verified(found, bundle.digest, [signers.public(key) for key in keys], type)[0]


def test_a_signature_is_attached_as_cosign_attaches_it(own: Bundle) -> None:
    made = sign(own, private(), now=NOW)
    attach(own.path, made)
    (entry,) = [each for each in Bundle.open(own.path).attached if each.digest == made.digest]
    written = json.loads(entry.manifest)

    assert Bundle.open(own.path).digest == own.digest
    assert written["subject"] == {
        "mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": own.digest, "size": own.descriptor.size,
    }  # fmt: skip
    assert written["artifactType"] == "application/vnd.dev.sigstore.bundle.v0.3+json"
    assert [layer["mediaType"] for layer in written["layers"]] == ["application/vnd.dev.sigstore.bundle.v0.3+json"]
    assert written["config"]["mediaType"] == "application/vnd.oci.empty.v1+json"
    assert written["annotations"] == {
        "dev.sigstore.bundle.content": "dsse-envelope",
        "dev.sigstore.bundle.predicateType": "https://sigstore.dev/cosign/sign/v1",
        "org.opencontainers.image.created": "2026-11-23T12:00:00Z",
    }
    assert good(own, KEY)[0].attached == made.digest


def test_several_signers(own: Bundle) -> None:
    other = signers.ed()
    attach(own.path, sign(own, private()), sign(own, private(other), name="ghcr.io/acme/llama"))

    assert len(good(own, KEY)) == len(good(own, other)) == 1
    assert good(own, other)[0].statement.subject[0].name == "ghcr.io/acme/llama"
    assert good(own, signers.p256()) == []


def test_what_says_the_same_by_the_same_key_is_repeated(own: Bundle) -> None:
    other, leaf = signers.ed(), signers.certificates_pem(signers.certificate("x@y", KEY))
    old = sign(own, private(), now=NOW)
    others = [
        sign(own, private(other)),
        sign(own, private(), name="ghcr.io/acme/llama"),
        sign(own, private(), certificate=leaf),
        attest(own, private(), statements.CYCLONEDX, {}),
    ]

    assert repeated([*others, old], sign(own, private()), private().public) == [old.digest]
    changed = attest(own, private(), statements.CYCLONEDX, {"version": 2})
    assert repeated([*others, old], changed, private().public) == [others[-1].digest]


def test_a_signature_with_a_log_entry_is_not_repeated(own: Bundle) -> None:
    """Without the entry, cosign would not take it any longer."""
    made = sign(own, private())
    document = json.loads(made.layers[0].data)
    document["verificationMaterial"]["tlogEntries"] = [{"logIndex": "1"}]
    logged = compose(own.descriptor, statements.BUNDLE_TYPE, [(statements.BUNDLE_TYPE, json.dumps(document).encode())])

    assert signatures.verified(signatures.attached_to([logged]), own.digest, [private().public])[0]
    assert repeated([logged], made, private().public) == []


def test_a_signature_by_certificate(own: Bundle, tmp_path: Path) -> None:
    root_key = signers.p256()
    root = signers.certificate("root", root_key, ca=True)
    leaf = signers.certificate("ci@acme.example", KEY, root, root_key)
    (tmp_path / "leaf.pem").write_bytes(signers.certificates_pem(leaf))

    made = sign(own, private(), certificate=read_certificate(tmp_path / "leaf.pem"))
    (found,) = signatures.attached_to([made])

    assert found.signed is not None
    assert len(found.signed.certificates) == 1


def test_a_certificate_of_another_key_is_refused(own: Bundle) -> None:
    pem = signers.certificates_pem(signers.certificate("x@y", signers.p256()))

    with pytest.raises(TrustError, match="the private key is sha256:"):
        sign(own, private(), certificate=pem)


def test_a_chain_is_no_certificate(tmp_path: Path) -> None:
    (tmp_path / "chain.pem").write_bytes(signers.certificates_pem(*[signers.certificate("x@y", KEY)] * 2))

    with pytest.raises(TrustError) as caught:
        read_certificate(tmp_path / "chain.pem")
    assert "--ca" in str(caught.value)


def test_what_cosign_3_signed_and_attested() -> None:
    key = keys.public_key((COSIGN / "cosign.pub").read_bytes())
    found = [signatures.read(name, (COSIGN / name).read_bytes()) for name in ("signature.json", "attestation.json")]

    (signature,) = signatures.require(found, COSIGNED, [key])
    (attestation,) = signatures.require(found, COSIGNED, [key], statements.PROVENANCE)

    assert (signature.attached, attestation.attached) == ("signature.json", "attestation.json")


def test_provenance_says_what_went_in(own: Bundle) -> None:
    found = predicates.provenance(own, builder_id="https://ci.example/build.yml", invocation_id="run 7")

    definition, run = found["buildDefinition"], found["runDetails"]
    uris = [each.get("uri", "") for each in definition["resolvedDependencies"]]
    assert definition["externalParameters"]["source"] == own.provenance["source"]
    assert definition["externalParameters"]["options"] == own.provenance["options"]
    assert {"name": "config", "digest": {"sha256": predicates.config_digest(own)}} in definition["resolvedDependencies"]
    assert f"pkg:pypi/transformers@{own.manifest.built_with['transformers']}" in uris
    assert run["builder"]["id"] == "https://ci.example/build.yml"
    assert run["metadata"]["invocationId"] == "run 7"
    datetime.datetime.fromisoformat(run["metadata"]["finishedOn"])


def test_the_bill_lists_every_layer_and_tool(own: Bundle) -> None:
    found = predicates.bill_of_materials(own)

    layers = {each["name"]: each["hashes"][0]["content"] for each in found["components"] if "description" in each}
    tools = {each["name"]: each["version"] for each in found["components"] if each["type"] == "library"}
    assert layers == {blob.name: blob.digest.removeprefix("sha256:") for blob in own.manifest.blobs}
    assert tools == own.manifest.built_with
    refs = [each["bom-ref"] for each in found["components"]]
    assert len(set(refs)) == len(refs)
    assert found["dependencies"] == [{"ref": own.digest, "dependsOn": refs}]


def test_both_say_what_native_layers_were_compiled_from(own: Bundle) -> None:
    layer = NativeLayer("sm_90", 12000, {"triton": "3.7.1"}, {"precast.kernels.rms_norm.triton": "cd" * 32}, (), {})
    compiled = msgspec.structs.replace(own, native={"sm_90": layer})

    provenance, bill = predicates.provenance(compiled), predicates.bill_of_materials(compiled)

    source, compiler = provenance["buildDefinition"]["resolvedDependencies"][-2:]
    assert provenance["buildDefinition"]["internalParameters"]["targets"] == ["sm_90"]
    assert source == {"name": "precast.kernels.rms_norm.triton", "digest": {"sha256": "cd" * 32}}
    assert compiler == {"name": "triton", "annotations": {"version": "3.7.1"}}
    parts = {each["bom-ref"]: each for each in bill["components"]}
    (made,) = [each for each in bill["dependencies"] if each["ref"] == "native:sm_90"]
    file, tool = (parts[ref] for ref in made["dependsOn"])
    assert file["hashes"] == [{"alg": "SHA-256", "content": "cd" * 32}]
    assert (tool["type"], tool["name"], tool["version"]) == ("application", "triton", "3.7.1")


def test_attestations_are_no_signatures_and_may_have_a_key_of_their_own(own: Bundle) -> None:
    other = signers.ed()
    attestation = attest(own, private(other), statements.PROVENANCE, predicates.provenance(own))
    attach(own.path, sign(own, private()), attestation)

    assert [len(good(own, key)) for key in (KEY, other)] == [1, 0]
    assert [len(good(own, key, type=statements.PROVENANCE)) for key in (KEY, other)] == [0, 1]
