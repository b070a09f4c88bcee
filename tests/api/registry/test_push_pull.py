"""What is pushed is what is pulled, byte for byte, with what is attached, by as few requests as there need be."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from fake_registry import FakeRegistry, cut_after, digest_of, hang_up, status

from examples import write_tiny
from precast.ir.artifact import Bundle, attach, detach
from precast.ir.bundle import oci
from precast.ir.bundle.attached import Attached, compose
from precast.ir.errors import BuildError, BundleError, RegistryError
from precast.registry import referrers
from precast.registry.client import Repository
from precast.registry.pull import pull, resolve
from precast.registry.push import Blob, push, upload_all
from precast.registry.store import Store

Client = Callable[..., Repository]


def content(path: Path) -> dict[str, bytes]:
    """All files of a directory."""
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_pulled_bundle_is_the_pushed_one(registry: FakeRegistry, tiny: Bundle, tmp_path: Path) -> None:
    pushed = push(tiny.path, f"{registry.host}/org/tiny:v1")
    pulled = pull(f"{registry.host}/org/tiny:v1", tmp_path / "out.bundle")

    assert pushed.reference == pulled.reference == f"{registry.host}/org/tiny@{tiny.digest}"
    assert pushed.digest == pulled.digest == Bundle.open(tmp_path / "out.bundle").digest == tiny.digest
    assert content(tmp_path / "out.bundle") == content(tiny.path)
    assert list(pulled.attached.values()) == [
        extra.artifact_type for extra in sorted(tiny.attached, key=lambda x: x.digest)
    ]
    assert pulled.notes == ()
    assert (pushed.uploaded, pushed.present, pushed.mounted) == (8, 0, 0)
    assert pulled.fetched_bytes == pushed.uploaded_bytes


@pytest.mark.parametrize("referrers_api", [True, False])
def test_attached_manifests_travel_with_and_without_the_api(referrers_api: bool, tiny: Bundle, tmp_path: Path) -> None:
    with FakeRegistry(referrers_api=referrers_api) as registry:
        push(tiny.path, f"{registry.host}/org/tiny:v1")
        pull(f"{registry.host}/org/tiny:v1", tmp_path / "out.bundle")
        tag = ("org/tiny", "sha256-" + tiny.digest[7:])
        has_tag = tag in registry.manifests

    assert Bundle.open(tmp_path / "out.bundle").attached == tiny.attached
    assert has_tag is not referrers_api


def test_list_under_the_tag_keeps_what_others_put_there(registry: FakeRegistry, tiny: Bundle) -> None:
    other = {
        "mediaType": oci.IMAGE_TYPE,
        "digest": "sha256:" + "0" * 64,
        "size": 9,
        "annotations": {"x": "y"},
        "urls": [],
    }
    index = {"schemaVersion": 2, "manifests": [other], "annotations": {"kept": "yes"}}
    tag = "sha256-" + tiny.digest[7:]
    registry.put_manifest("org/tiny", tag, json.dumps(index).encode(), oci.INDEX_TYPE)

    push(tiny.path, f"{registry.host}/org/tiny:v1")
    push(tiny.path, f"{registry.host}/org/tiny:v1")

    found = json.loads(registry.manifests["org/tiny", tag][0])
    assert found["manifests"][0] == other
    assert found["annotations"] == {"kept": "yes"}
    assert {entry["digest"] for entry in found["manifests"][1:]} == {extra.digest for extra in tiny.attached}
    assert len(found["manifests"]) == 3


@pytest.mark.parametrize("etags", [True, False])
def test_two_that_list_at_once_both_stay(etags: bool, client: Client, registry: FakeRegistry, tiny: Bundle) -> None:
    """Somebody writes the list between our reading and our writing; with ETags this is refused, without it is found."""
    registry.etags = etags
    tag = "sha256-" + tiny.digest[7:]
    other = {"mediaType": oci.IMAGE_TYPE, "digest": "sha256:" + "0" * 64, "size": 9}
    index = json.dumps({"schemaVersion": 2, "mediaType": oci.INDEX_TYPE, "manifests": [other]}).encode()
    registry.put_manifest("org/tiny", tag, b'{"schemaVersion":2,"manifests":[]}', oci.INDEX_TYPE)

    def somebody_else(handler: Any) -> bool:
        if not etags:
            return False
        registry.put_manifest("org/tiny", tag, index, oci.INDEX_TYPE)
        return False

    def over_ours(handler: Any) -> bool:
        if not etags:
            handler.answer(201)
            registry.put_manifest("org/tiny", tag, index, oci.INDEX_TYPE)
        return not etags

    registry.misbehave("PUT", tag, somebody_else if etags else over_ours, times=1)

    push(tiny.path, f"{registry.host}/org/tiny:v1", repository=client())

    found = json.loads(registry.manifests["org/tiny", tag][0])["manifests"]
    assert {entry["digest"] for entry in found} == {other["digest"], *(extra.digest for extra in tiny.attached)}


def test_list_that_changes_all_the_time_is_given_up(client: Client, registry: FakeRegistry, tiny: Bundle) -> None:
    tag = "sha256-" + tiny.digest[7:]
    registry.misbehave("PUT", tag, status(412))

    with pytest.raises(RegistryError) as caught:
        push(tiny.path, f"{registry.host}/org/tiny:v1", repository=client())

    assert caught.value.code == "registry-changed"
    assert registry.count("PUT", tag) == 5
    assert ("org/tiny", "v1") not in registry.manifests


def test_manifests_are_published_one_by_one(client: Client, registry: FakeRegistry, tiny: Bundle) -> None:
    bundle = detach(tiny.path, *(extra.digest for extra in tiny.attached))
    push(bundle.path, f"{registry.host}/org/tiny:v1")
    source, (_, extra) = client(), tiny.attached
    upload_all(source, [Blob(digest, len(data), lambda data=data: BytesIO(data)) for digest, data in blobs(extra)], [])

    referrers.publish(source, tiny.descriptor, (extra,))
    del registry.blobs["org/tiny", extra.layers[0].digest]

    assert [listed.data for listed in referrers.find(source, tiny.descriptor)[0]] == [extra.manifest]
    registry.misbehave("PUT", "manifests", status(201))
    with pytest.raises(RegistryError, match="does not have it"):
        referrers.publish(source, tiny.descriptor, (extra,))


def blobs(extra: Attached) -> list[tuple[str, bytes]]:
    """What an attached manifest names."""
    return [(digest, data) for digest, data in extra.blobs().items() if digest != extra.digest]


def test_wrong_types_in_the_list_are_not_believed(registry: FakeRegistry, tiny: Bundle, store: Store) -> None:
    # As cosign 3 and others write it.
    push(tiny.path, f"{registry.host}/org/tiny:v1")
    tag = ("org/tiny", "sha256-" + tiny.digest[7:])
    data = registry.manifests[tag][0].replace(b"application/vnd.dev.sigstore.bundle.v0.3+json", oci.EMPTY_TYPE.encode())
    registry.manifests[tag] = (data, oci.INDEX_TYPE)

    found = pull(f"{registry.host}/org/tiny:v1", store=store)

    assert "application/vnd.dev.sigstore.bundle.v0.3+json" in found.attached.values()


def test_pages_of_the_list_are_followed(registry: FakeRegistry, tiny: Bundle, store: Store) -> None:
    push(tiny.path, f"{registry.host}/org/tiny:v1")
    registry.referrers_api = True
    entries = registry.referrers_of("org/tiny", tiny.digest)

    def page(entry: dict[str, Any], link: str) -> Any:
        body = json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode()
        return status(200, body, Content_Type=oci.INDEX_TYPE, **({"Link": link} if link else {}))

    following = f'</v2/org/tiny/referrers/{tiny.digest}?n=2>; rel="next"'
    registry.misbehave("GET", r"referrers/[^?]*$", page(entries[0], following))
    registry.misbehave("GET", r"referrers/.*\?n=2", page(entries[1], ""))

    assert set(pull(f"{registry.host}/org/tiny:v1", store=store).attached) == {extra.digest for extra in tiny.attached}


def test_second_push_sends_nothing(registry: FakeRegistry, tiny: Bundle) -> None:
    push(tiny.path, f"{registry.host}/org/tiny:v1")
    posts = registry.count("POST")

    again = push(tiny.path, f"{registry.host}/org/tiny:v2")

    assert (again.uploaded, again.present, again.uploaded_bytes) == (0, 8, 0)
    assert registry.count("POST") == posts
    assert registry.manifests["org/tiny", "v2"] == registry.manifests["org/tiny", "v1"]


def test_blobs_are_mounted_from_another_repository(client: Client, registry: FakeRegistry, tiny: Bundle) -> None:
    push(tiny.path, f"{registry.host}/org/other")

    found = push(
        tiny.path, f"{registry.host}/org/tiny:v1", mount_from=["org/none", "org/other"],
        repository=client(mounted=["org/none", "org/other"]),
    )  # fmt: skip

    assert (found.uploaded, found.mounted) == (0, 8)
    assert registry.manifests["org/tiny", "v1"] == registry.manifests["org/other", tiny.digest]


def test_uploads_are_one_post_and_one_put(registry: FakeRegistry, tiny: Bundle) -> None:
    push(tiny.path, f"{registry.host}/org/tiny:v1")

    assert registry.count("POST") == registry.count("PUT", "blobs/uploads") == 8
    assert registry.count("PATCH") == 0
    assert all("If-Match" not in seen.headers for seen in registry.log if seen.path.endswith("/manifests/v1"))


def test_tag_is_written_when_all_else_is_there(registry: FakeRegistry, tiny: Bundle) -> None:
    push(tiny.path, f"{registry.host}/org/tiny:v1")

    puts = [seen.path for seen in registry.log if seen.method == "PUT"]
    assert puts[-1] == "/v2/org/tiny/manifests/v1"
    assert all("blobs" in path for path in puts[:8])


def test_push_by_digest_alone(registry: FakeRegistry, tiny: Bundle, store: Store) -> None:
    found = push(tiny.path, f"{registry.host}/org/tiny")

    assert found.tag is None
    assert pull(found.reference, store=store).digest == tiny.digest


def test_push_checks_the_digest_in_the_reference(registry: FakeRegistry, tiny: Bundle) -> None:
    push(tiny.path, f"{registry.host}/org/tiny:v1@{tiny.digest}")
    with pytest.raises(RegistryError) as caught:
        push(tiny.path, f"{registry.host}/org/tiny:v1@sha256:{'0' * 64}")

    assert caught.value.code == "reference-invalid"


def test_opened_bundle_that_was_replaced_is_not_pushed(registry: FakeRegistry, tiny: Bundle) -> None:
    opened = Bundle.open(tiny.path)
    push(opened, f"{registry.host}/org/tiny:v1")
    registry.log.clear()
    write_tiny(tiny.path, num_layers=1)

    with pytest.raises(BundleError, match="was replaced"):
        push(opened, f"{registry.host}/org/tiny:v1")

    assert registry.log == []


def test_damaged_bundle_is_not_pushed(registry: FakeRegistry, tiny: Bundle) -> None:
    blob = tiny.path / oci.blob_path(tiny.layers[0].digest)
    blob.write_bytes(blob.read_bytes()[:-1] + b"x")

    with pytest.raises(BundleError):
        push(tiny.path, f"{registry.host}/org/tiny:v1")

    assert registry.log == []


def test_bundle_pushed_over_by_another_is_found(client: Client, registry: FakeRegistry, tiny: Bundle) -> None:
    other = write_tiny(tiny.path.with_name("other.bundle"), num_layers=1)
    push(other.path, f"{registry.host}/org/tiny:other")
    stolen = registry.manifests["org/tiny", "other"]

    def over_ours(handler: Any) -> bool:
        registry.manifests["org/tiny", "v1"] = stolen
        return False

    registry.misbehave("HEAD", "manifests/v1", over_ours)

    with pytest.raises(RegistryError, match="leads to") as caught:
        push(tiny.path, f"{registry.host}/org/tiny:v1", repository=client())

    assert caught.value.code == "registry-changed"


def test_push_that_only_says_it_stored_is_found(client: Client, registry: FakeRegistry, tiny: Bundle) -> None:
    registry.misbehave("PUT", "blobs/uploads", status(201))
    registry.misbehave("PUT", "manifests/sha256:", status(201))
    registry.misbehave("GET", "manifests/sha256:", taken(tiny))

    with pytest.raises(RegistryError, match="does not have it") as caught:
        push(tiny.path, f"{registry.host}/org/tiny:v1", repository=client())

    assert caught.value.code == "registry-changed"
    assert ("org/tiny", "v1") not in registry.manifests


def taken(bundle: Bundle) -> Any:
    """A manifest is given back as if it had been stored."""

    def trick(handler: Any) -> bool:
        data = (bundle.path / oci.blob_path(handler.path.rpartition("/")[2])).read_bytes()
        handler.answer(200, data, Content_Type=oci.IMAGE_TYPE)
        return True

    return trick


def test_manifest_that_is_not_given_back_is_found(client: Client, registry: FakeRegistry, tiny: Bundle) -> None:
    registry.misbehave("PUT", "manifests/sha256:", status(201))

    with pytest.raises(RegistryError) as caught:
        push(tiny.path, f"{registry.host}/org/tiny:v1", repository=client())

    assert caught.value.code == "registry-missing"
    assert ("org/tiny", "v1") not in registry.manifests


# --- pull and the store ----------------------------------------------------------------------------------------


def test_what_the_store_has_takes_one_request_by_tag_and_none_by_digest(
    registry: FakeRegistry, tiny: Bundle, store: Store
) -> None:
    push(tiny.path, f"{registry.host}/org/tiny:v1")
    pull(f"{registry.host}/org/tiny:v1", store=store)
    registry.log.clear()

    by_tag = pull(f"{registry.host}/org/tiny:v1", store=store)
    requests = [(seen.method, seen.path) for seen in registry.log]
    by_digest = pull(f"{registry.host}/org/tiny@{tiny.digest}", store=store)

    assert requests == [("HEAD", "/v2/org/tiny/manifests/v1")]
    assert len(registry.log) == 1
    assert by_tag == by_digest
    assert (by_tag.fetched_bytes, set(by_tag.attached)) == (0, {extra.digest for extra in tiny.attached})


def test_registry_whose_head_gives_no_digest(registry: FakeRegistry, tiny: Bundle, store: Store) -> None:
    push(tiny.path, f"{registry.host}/org/tiny:v1")
    registry.misbehave("HEAD", "manifests", status(200))

    assert pull(f"{registry.host}/org/tiny:v1", store=store).digest == tiny.digest


def test_refresh_brings_what_was_attached_since(registry: FakeRegistry, tiny: Bundle, store: Store) -> None:
    reference = f"{registry.host}/org/tiny@{tiny.digest}"
    push(tiny.path, f"{registry.host}/org/tiny")
    pull(reference, store=store)
    later = compose(tiny.descriptor, "application/x", [("application/x", b"later")])
    attach(tiny.path, later)
    push(tiny.path, f"{registry.host}/org/tiny")

    assert later.digest not in pull(reference, store=store).attached
    assert later.digest in pull(reference, store=store, refresh=True).attached
    assert later.digest in {extra.digest for extra in store.open(tiny.digest).attached}


def test_bundles_share_blobs(registry: FakeRegistry, tiny: Bundle, store: Store) -> None:
    other = write_tiny(tiny.path.with_name("other.bundle"), files={"tokenizer.json": b'{"version": "1.0"}'})
    push(tiny.path, f"{registry.host}/org/tiny:v1")
    push(other.path, f"{registry.host}/org/tiny:v2")
    pull(f"{registry.host}/org/tiny:v1", store=store)

    found = pull(f"{registry.host}/org/tiny:v2", store=store)

    shared = {layer.digest: layer.size for layer in tiny.layers}
    expected = sum(shared[layer.digest] for layer in other.layers)
    assert found.shared_bytes >= expected
    assert registry.count("GET", "blobs/" + other.layers[0].digest) == 1


def test_tag_is_resolved_by_one_request(registry: FakeRegistry, tiny: Bundle) -> None:
    push(tiny.path, f"{registry.host}/org/tiny:v1")
    registry.log.clear()

    found = resolve(f"{registry.host}/org/tiny:v1")

    assert found.digest == tiny.digest
    assert len(registry.log) == 1
    assert resolve(found) == found


def test_tag_that_moves_while_it_is_pulled(registry: FakeRegistry, tiny: Bundle, store: Store) -> None:
    other = write_tiny(tiny.path.with_name("other.bundle"), num_layers=1)
    push(other.path, f"{registry.host}/org/tiny:other")
    push(tiny.path, f"{registry.host}/org/tiny:v1")

    def move(handler: Any) -> bool:
        registry.manifests["org/tiny", "v1"] = registry.manifests["org/tiny", "other"]
        return False

    registry.misbehave("GET", "manifests/sha256:", move, times=1)

    assert pull(f"{registry.host}/org/tiny:v1", store=store).digest == tiny.digest
    assert pull(f"{registry.host}/org/tiny:v1", store=store).digest == other.digest


def test_pull_replaces_a_bundle_and_nothing_else(registry: FakeRegistry, tiny: Bundle, tmp_path: Path) -> None:
    push(tiny.path, f"{registry.host}/org/tiny:v1")
    write_tiny(tmp_path / "a.bundle", num_layers=1)
    (tmp_path / "b.bundle").mkdir()
    (tmp_path / "b.bundle" / "thesis.tex").write_text("mine")
    registry.log.clear()

    with pytest.raises(BuildError) as caught:
        pull(f"{registry.host}/org/tiny:v1", tmp_path / "b.bundle")
    requests = len(registry.log)
    pull(f"{registry.host}/org/tiny:v1", tmp_path / "a.bundle")

    assert caught.value.code == "output-not-a-bundle"
    assert requests == 0
    assert (tmp_path / "b.bundle" / "thesis.tex").read_text() == "mine"
    assert Bundle.open(tmp_path / "a.bundle").digest == tiny.digest


def test_addresses_are_opened_by_way_of_the_store(registry: FakeRegistry, tiny: Bundle) -> None:
    push(tiny.path, f"{registry.host}/org/tiny:v1")

    first = Bundle.open(f"oci://{registry.host}/org/tiny:v1")
    registry.log.clear()
    second = Bundle.open(f"oci://{registry.host}/org/tiny@{tiny.digest}")

    assert first.digest == second.digest == tiny.digest
    assert first.attached == tiny.attached
    assert first.graph == tiny.graph
    assert registry.log == []
    assert str(first.path) == os.environ["PRECAST_STORE"]


def test_damage_in_the_store_is_mended(registry: FakeRegistry, tiny: Bundle) -> None:
    push(tiny.path, f"{registry.host}/org/tiny:v1")
    address = f"oci://{registry.host}/org/tiny@{tiny.digest}"
    Bundle.open(address)
    blob = Store().blob(tiny.layers[0].digest)
    blob.write_bytes(b"x" * blob.stat().st_size)

    assert Bundle.open(address).graph == tiny.graph
    assert Store().verify().problems == ()


def test_unknown_scheme_is_refused() -> None:
    with pytest.raises(BundleError, match="s3://") as caught:
        Bundle.open("s3://bucket/x")

    assert caught.value.code == "bundle-missing"


# --- resumed ---------------------------------------------------------------------------------------------------


def large(tmp_path: Path) -> Bundle:
    """A bundle with a blob of 3 MiB, larger than a block."""
    data = bytes(range(256)) * (12 << 10)
    return write_tiny(tmp_path / "large.bundle", files={"tokenizer.json": data})


def test_broken_download_goes_on_where_it_broke(
    client: Client, registry: FakeRegistry, tmp_path: Path, store: Store, waits: list[float]
) -> None:
    bundle = large(tmp_path)
    push(bundle.path, f"{registry.host}/org/tiny:v1")
    blob = bundle.layers[2]
    # Ten times, which are more than there are tries: each brings some of it.
    registry.misbehave("GET", blob.digest, cut_after(300_000, lambda: bundle.content(blob)), times=10)

    pull(f"{registry.host}/org/tiny:v1", store=store, repository=client())

    starts = [
        seen.headers.get("Range", "bytes=0-")
        for seen in registry.log
        if blob.digest in seen.path and seen.method == "GET"
    ]
    assert len(starts) == 11
    assert starts == sorted(starts, key=lambda text: int(text[6:-1]))
    assert store.open(bundle.digest).layers == bundle.layers
    assert len(waits) == 10


def test_pull_goes_on_with_what_an_earlier_one_left(
    client: Client, registry: FakeRegistry, tmp_path: Path, store: Store
) -> None:
    bundle = large(tmp_path)
    push(bundle.path, f"{registry.host}/org/tiny:v1")
    blob = bundle.layers[2]
    registry.misbehave("GET", blob.digest, cut_after(2_000_000, lambda: bundle.content(blob)), times=1)
    registry.misbehave("GET", blob.digest, hang_up, times=4)
    with pytest.raises(RegistryError) as caught:
        pull(f"{registry.host}/org/tiny:v1", store=store, repository=client())
    registry.log.clear()

    pull(f"{registry.host}/org/tiny:v1", store=store)

    assert caught.value.code == "registry-unreachable"
    ranges = [seen.headers.get("Range") for seen in registry.log if blob.digest in seen.path]
    assert len(ranges) == 1
    assert ranges[0] is not None
    assert int(ranges[0][6:-1]) > 1_000_000


def test_leftover_of_something_else_is_not_trusted(registry: FakeRegistry, tmp_path: Path, store: Store) -> None:
    bundle = large(tmp_path)
    push(bundle.path, f"{registry.host}/org/tiny:v1")
    with store.writing():
        (store.path / "incoming" / bundle.layers[2].digest[7:]).write_bytes(b"something else")

    pull(f"{registry.host}/org/tiny:v1", store=store)

    assert store.open(bundle.digest).layers == bundle.layers


@pytest.mark.parametrize("answers_range", [False, True])
def test_registry_without_ranges_begins_anew(
    answers_range: bool, client: Client, registry: FakeRegistry, tmp_path: Path, store: Store
) -> None:
    bundle = large(tmp_path)
    push(bundle.path, f"{registry.host}/org/tiny:v1")
    blob = bundle.layers[2]
    registry.misbehave("GET", blob.digest, cut_after(700_000, lambda: bundle.content(blob)), times=1)
    wrong = status(206, bundle.content(blob)[9:], Content_Range=f"bytes 9-{blob.size - 1}/{blob.size}")
    registry.misbehave("GET", blob.digest, wrong if answers_range else status(200, bundle.content(blob)), times=1)

    pull(f"{registry.host}/org/tiny:v1", store=store, repository=client())

    assert store.open(bundle.digest).layers == bundle.layers


def test_broken_upload_is_sent_again(client: Client, registry: FakeRegistry, tiny: Bundle, waits: list[float]) -> None:
    registry.misbehave("PUT", "blobs/uploads", hang_up, times=2)
    registry.misbehave("PUT", "blobs/uploads", status(503), times=1)
    progress: list[tuple[int, int]] = []

    found = push(tiny.path, f"{registry.host}/org/tiny:v1", repository=client(), progress=lambda *x: progress.append(x))

    assert found.uploaded == 8
    assert len(waits) == 3
    assert progress[-1] == (found.uploaded_bytes, found.uploaded_bytes)


def test_push_goes_on_where_it_ended(client: Client, registry: FakeRegistry, tiny: Bundle) -> None:
    last = tiny.layers[3].digest[7:]
    registry.misbehave("PUT", last, status(403))
    with pytest.raises(RegistryError) as caught:
        push(tiny.path, f"{registry.host}/org/tiny:v1", repository=client())
    there = len(registry.blobs)
    registry.behave()

    found = push(tiny.path, f"{registry.host}/org/tiny:v1")

    assert caught.value.code == "registry-denied"
    assert ("org/tiny", f"sha256:{last}") in registry.blobs
    assert found.present >= there


# --- images ----------------------------------------------------------------------------------------------------


def test_image_holds_the_bundle_as_one_layer(registry: FakeRegistry, tiny: Bundle, tmp_path: Path) -> None:
    import io
    import tarfile

    found = push(tiny.path, f"{registry.host}/org/tiny:image", as_image=True)

    index = json.loads(registry.manifests["org/tiny", "image"][0])
    assert found.digest == digest_of(registry.manifests["org/tiny", "image"][0])
    assert [entry["platform"]["architecture"] for entry in index["manifests"]] == ["amd64", "arm64"]
    assert index["annotations"] == {"dev.precast.bundle.digest": tiny.digest}
    manifests = [json.loads(registry.manifests["org/tiny", entry["digest"]][0]) for entry in index["manifests"]]
    layers = {manifest["layers"][0]["digest"] for manifest in manifests}
    (layer,) = layers
    config = json.loads(registry.blobs["org/tiny", manifests[0]["config"]["digest"]])
    assert config["rootfs"]["diff_ids"] == [layer]
    data = registry.blobs["org/tiny", layer]
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        assert {member.mtime for member in archive} == {0}
        archive.extractall(tmp_path / "mounted", filter="data")
    mounted = Bundle.open(tmp_path / "mounted")
    assert (mounted.digest, mounted.attached) == (tiny.digest, tiny.attached)


def test_image_is_the_same_every_time(registry: FakeRegistry, tiny: Bundle) -> None:
    first = push(tiny.path, f"{registry.host}/org/a:x", as_image=True)
    os.utime(tiny.path / "index.json", (0, 0))

    assert push(tiny.path, f"{registry.host}/org/b:x", as_image=True).digest == first.digest
    assert (
        push(
            detach(tiny.path, *(x.digest for x in tiny.attached)).path, f"{registry.host}/org/b:x", as_image=True
        ).digest
        != first.digest
    )


def test_image_is_not_pulled(registry: FakeRegistry, tiny: Bundle, store: Store) -> None:
    push(tiny.path, f"{registry.host}/org/tiny:image", as_image=True)

    with pytest.raises(BundleError, match="index of images") as caught:
        pull(f"{registry.host}/org/tiny:image", store=store)

    assert caught.value.code == "artifact-type"
