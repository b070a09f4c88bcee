"""Links from weights to bundles, and signatures that are attached in a registry."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import signers
from fake_registry import FakeRegistry
from recitation import Command

from precast.ir.artifact import Bundle, attach
from precast.ir.bundle import attached, oci
from precast.ir.errors import RegistryError, TrustError
from precast.ir.weights.lock import Locked
from precast.registry import attaching, links
from precast.registry.client import Repository
from precast.registry.pull import pull
from precast.registry.push import push
from precast.registry.reference import Reference
from precast.sign.private_keys import private_key
from precast.sign.signing import sign

Client = Callable[..., Repository]
ONE, TWO, THREE = (f"sha256:{digit * 64}" for digit in "123")
KEY = signers.p256()


@pytest.fixture
def weights(client: Client, registry: FakeRegistry) -> Repository:
    """The repository of some weights, tagged v1."""
    put_weights(registry, "org/weights")
    return client("org/weights:v1")


def put_weights(registry: FakeRegistry, name: str, **changed: Any) -> str:
    empty = {"mediaType": oci.EMPTY_TYPE, "digest": oci.digest_of(b"{}"), "size": 2}
    image = {"schemaVersion": 2, "mediaType": oci.IMAGE_TYPE, "config": empty, "layers": [], **changed}
    return registry.put_manifest(name, "v1", json.dumps(image).encode(), image["mediaType"])


def bundle(digest: str, name: str = "acme/llama") -> Reference:
    return Reference("ghcr.io", name, None, digest)


def test_what_is_linked_is_found(weights: Repository) -> None:
    links.link(weights, bundle(ONE), ("sm_90",))
    links.link(weights, bundle(TWO))
    links.link(weights, bundle(THREE), ("sm_100", "sm_80"))

    assert links.find(weights, "sm_90") == [
        Locked(ONE, f"oci://ghcr.io/acme/llama@{ONE}", ("sm_90",)),
        Locked(TWO, f"oci://ghcr.io/acme/llama@{TWO}", ()),
    ]
    assert [each.digest for each in links.find(weights)] == [ONE, TWO, THREE]
    assert [each.digest for each in links.find(weights, "sm_80")] == [THREE, TWO]


def test_a_link_leaves_the_weights_as_they_are(weights: Repository, registry: FakeRegistry) -> None:
    before = weights.resolve("v1")
    link = links.link(weights, bundle(ONE), ("sm_90",))
    written = json.loads(weights.manifest(link).data)

    assert weights.resolve("v1") == written["subject"]["digest"] == before
    assert written["artifactType"] == "application/vnd.precast.link.v1"
    assert written["annotations"] == {
        "dev.precast.bundle.digest": ONE,
        "dev.precast.bundle.repository": "ghcr.io/acme/llama",
        "dev.precast.bundle.targets": "sm_90",
    }


def test_linking_twice_is_linking_once(weights: Repository) -> None:
    assert links.link(weights, bundle(ONE)) == links.link(weights, bundle(ONE))
    assert len(links.find(weights)) == 1


def test_nothing_for_the_target(weights: Repository) -> None:
    for expected in ("found no link to a bundle", "found bundles for sm_100 alone"):
        with pytest.raises(TrustError, match=expected) as caught:
            links.find(weights, "sm_90")
        assert caught.value.code == "link-missing"
        links.link(weights, bundle(ONE), ("sm_100",))


@pytest.mark.parametrize(
    "annotations",
    [
        {},
        {links.DIGEST: "sha256:1", links.REPOSITORY: "ghcr.io/acme/llama"},
        {links.DIGEST: ONE},
        {links.DIGEST: ONE, links.REPOSITORY: "../../etc"},
        {links.DIGEST: ONE, links.REPOSITORY: "ghcr.io/acme/llama:v1"},
        {links.DIGEST: ONE, links.REPOSITORY: "ghcr.io/acme/llama", links.TARGETS: "sm_90\x1b[2J"},
    ],
)
def test_links_of_strangers_that_say_nothing_sensible_are_passed_over(
    annotations: dict[str, str], weights: Repository
) -> None:
    found = weights.manifest("v1")
    subject = oci.Descriptor(oci.IMAGE_TYPE, found.digest, len(found.data))
    attaching.attach(weights, subject, attached.compose(subject, links.LINK, [(oci.EMPTY_TYPE, b"{}")], annotations))

    with pytest.raises(TrustError):
        links.find(weights)


def test_other_attached_manifests_are_no_links(weights: Repository) -> None:
    found = weights.manifest("v1")
    subject = oci.Descriptor(oci.IMAGE_TYPE, found.digest, len(found.data))
    other = {links.DIGEST: ONE, links.REPOSITORY: "ghcr.io/acme/llama"}
    attaching.attach(weights, subject, attached.compose(subject, "text/plain", [("text/plain", b"x")], other))
    links.link(weights, bundle(TWO))

    assert [each.digest for each in links.find(weights)] == [TWO]


def test_an_index_is_no_manifest_of_weights(client: Client, registry: FakeRegistry) -> None:
    registry.put_manifest("org/many", "v1", b'{"schemaVersion": 2, "manifests": []}', oci.INDEX_TYPE)

    with pytest.raises(RegistryError) as caught:
        links.link(client("org/many:v1"), bundle(ONE))
    assert caught.value.code == "registry-answer"


def test_the_command_line(registry: FakeRegistry, tiny: Bundle, tmp_path: Path, command: Command) -> None:
    put_weights(registry, "org/weights")
    push(tiny.path, f"{registry.host}/org/tiny:v1")
    address, where = f"oci://{registry.host}/org/tiny:v1", f"oci://{registry.host}/org/weights:v1"

    by_path = command("link", tiny.path, where)
    linked = command("link", address, where)
    seen = command("find", where, "--target", "sm_90")

    assert by_path.exit_code == 2
    assert "push it" in by_path.stderr
    assert linked.exit_code == 0, linked.stderr
    assert seen.stdout == f"oci://{registry.host}/org/tiny@{tiny.digest}\n"


def test_beside_a_checkpoint(registry: FakeRegistry, tiny: Bundle, tmp_path: Path, command: Command) -> None:
    (tmp_path / "config.json").write_text("{}")
    push(tiny.path, f"{registry.host}/org/tiny:v1")

    linked = command("link", f"oci://{registry.host}/org/tiny:v1", tmp_path)
    seen = command("find", tmp_path, "--json")
    (tmp_path / "config.json").write_text("{} ")
    changed = command("find", tmp_path)

    assert linked.stdout == f"{tmp_path}/precast.lock: links {tiny.digest}\n"
    assert json.loads(seen.stdout) == {
        "bundles": [{"digest": tiny.digest, "reference": f"oci://{registry.host}/org/tiny@{tiny.digest}"}]
    }
    assert changed.exit_code == 1
    assert changed.stderr.endswith("\n  code: lock-mismatch\n")


@pytest.mark.parametrize("name", ["none", "model.safetensors"])
def test_what_is_no_directory_of_a_checkpoint_gets_no_lock(
    name: str, tiny: Bundle, tmp_path: Path, command: Command
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")

    found = command("link", tiny.path, tmp_path / name)

    assert found.exit_code == 1
    assert found.stderr.endswith("fix: name a checkpoint's directory\n  code: lock-invalid\n")
    assert not (tmp_path / "precast.lock").exists()


def test_a_signature_in_the_registry(registry: FakeRegistry, tiny: Bundle, tmp_path: Path, command: Command) -> None:
    (tmp_path / "key.pem").write_bytes(signers.private_pem(KEY))
    (tmp_path / "key.pub").write_bytes(signers.public_pem(KEY))
    push(tiny.path, f"{registry.host}/org/tiny:v1")
    address = f"oci://{registry.host}/org/tiny@{tiny.digest}"
    verify = ("verify", address, "--key", tmp_path / "key.pub")

    before = command(*verify)  # and so the store has the bundle without the signature
    signed = command("sign", address, "--key", tmp_path / "key.pem")
    after = command(*verify)

    assert [before.exit_code, signed.exit_code, after.exit_code] == [3, 0, 0]
    assert signers.public(KEY).fingerprint in after.stdout
    assert len(Bundle.open(tiny.path).attached) == 2  # the directory knows nothing of it


def test_rules_see_where_an_address_leads(
    registry: FakeRegistry, tiny: Bundle, tmp_path: Path, command: Command
) -> None:
    attach(tiny.path, sign(tiny, private_key(signers.private_pem(KEY))))
    push(tiny.path, f"{registry.host}/org/tiny:v1")
    rule = {"name": "ci", "scope": "any", "key": signers.public_pem(KEY).decode(), "repositories": ["*/org/tiny"]}
    policy = tmp_path / "trust.json"
    policy.write_text(json.dumps({"version": 1, "portable": "vouched", "rules": [rule]}))

    by_address = command("verify", f"oci://{registry.host}/org/tiny:v1", "--trust", policy)
    pull(f"{registry.host}/org/tiny:v1", tmp_path / "out.bundle")
    by_path = command("verify", tmp_path / "out.bundle", "--trust", policy)

    assert (by_address.exit_code, by_path.exit_code) == (0, 3)
    assert "where this one is from isn't said" in by_path.stderr
