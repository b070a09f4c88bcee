"""Manifests that others attach to a bundle: read and written, of no effect on what the bundle is."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from forge import blob_of, digest

from examples import write_tiny
from precast.ir import limits
from precast.ir.artifact import Bundle, attach, detach
from precast.ir.bundle import oci
from precast.ir.bundle.attached import Attached, compose
from precast.ir.errors import BuildError, BundleError

SIGNATURE = "application/vnd.dev.sigstore.bundle.v0.3+json"


def signature(bundle: Bundle, content: bytes = b'{"signed":true}') -> Attached:
    """A manifest attached to the bundle, with this content."""
    return compose(bundle.descriptor, SIGNATURE, [(SIGNATURE, content)], {"dev.sigstore.bundle.content": "x"})


def names(path: Path) -> set[str]:
    """The blobs of a layout."""
    return set(os.listdir(path / "blobs" / "sha256"))


def test_attached_manifest_is_listed_with_its_content(tmp_path: Path) -> None:
    bundle = write_tiny(tmp_path / "x.bundle")

    returned = attach(bundle.path, signature(bundle))

    opened = Bundle.open(bundle.path)
    record, found = opened.attached
    assert record.artifact_type == oci.PROVENANCE
    assert found == signature(bundle)
    assert found.layers[0].data == b'{"signed":true}'
    assert found.annotations == {"dev.sigstore.bundle.content": "x"}
    assert json.loads(found.manifest)["subject"]["digest"] == bundle.digest
    assert (opened.digest, opened.provenance) == (bundle.digest, bundle.provenance)
    assert (returned.attached, returned.path) == (opened.attached, bundle.path)
    assert os.listdir(tmp_path) == ["x.bundle"]


def test_attaching_twice_is_attaching_once(tmp_path: Path) -> None:
    bundle = write_tiny(tmp_path / "x.bundle")
    attach(bundle.path, signature(bundle))
    before = (bundle.path / "index.json").read_bytes()

    attach(bundle.path, signature(bundle))

    assert (bundle.path / "index.json").read_bytes() == before
    assert len(Bundle.open(bundle.path).attached) == 2


def test_of_those_who_attach_at_once_none_is_lost(tmp_path: Path) -> None:
    bundle = write_tiny(tmp_path / "x.bundle")
    made = [signature(bundle, b'{"signed":%d}' % i) for i in range(12)]

    def attached(each: Attached) -> None:
        while True:
            try:
                attach(bundle.path, each)
            except BuildError as error:
                if error.code != "build-in-progress":
                    raise
            else:
                return

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(attached, made))

    assert {each.digest for each in made} <= {each.digest for each in Bundle.open(bundle.path).attached}


def test_order_of_attaching_does_not_matter(tmp_path: Path) -> None:
    first, second = write_tiny(tmp_path / "a.bundle"), write_tiny(tmp_path / "b.bundle")
    one, two = signature(first, b"1"), signature(first, b"2")

    attach(first.path, one, two)
    attach(second.path, two)
    attach(second.path, one)

    assert (first.path / "index.json").read_bytes() == (second.path / "index.json").read_bytes()


def test_detaching_removes_the_blobs_too(tmp_path: Path) -> None:
    bundle = write_tiny(tmp_path / "x.bundle")
    before = names(bundle.path)
    attached = attach(bundle.path, signature(bundle)).attached[1]

    detach(bundle.path, attached.digest, "sha256:" + "0" * 64)

    assert names(bundle.path) == before
    assert [extra.artifact_type for extra in Bundle.open(bundle.path).attached] == [oci.PROVENANCE]


def test_new_record_takes_the_place_of_the_old(tmp_path: Path) -> None:
    bundle = write_tiny(tmp_path / "x.bundle")

    attach(bundle.path, compose(bundle.descriptor, oci.PROVENANCE, [(oci.PROVENANCE, b'{"host":"other"}')]))

    assert Bundle.open(bundle.path).provenance == {"host": "other"}


def test_signed_bundle_is_found_by_cosign_and_replaced_by_a_build(tmp_path: Path) -> None:
    bundle = write_tiny(tmp_path / "x.bundle")
    attach(bundle.path, signature(bundle))
    index = json.loads((bundle.path / "index.json").read_bytes())

    write_tiny(bundle.path)

    assert index["manifests"][0]["annotations"]["kind"] == "dev.cosignproject.cosign/image"
    assert len(Bundle.open(bundle.path).attached) == 1


def test_signature_of_another_bundle_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    bundle, other = write_tiny(tmp_path / "x.bundle"), write_tiny(tmp_path / "y.bundle", num_layers=1)
    before = names(bundle.path)

    with pytest.raises(BundleError, match="its subject is not this bundle"):
        attach(bundle.path, signature(other))

    assert names(bundle.path) == before


def test_what_is_no_bundle_gets_nothing_attached(tmp_path: Path) -> None:
    bundle = write_tiny(tmp_path / "x.bundle")
    (bundle.path / "notes.txt").write_text("mine")

    with pytest.raises((BundleError, BuildError)):
        attach(bundle.path, signature(bundle))

    assert (bundle.path / "notes.txt").read_text() == "mine"


# --- what others write -----------------------------------------------------------------------------------------


def foreign(path: Path, change: Callable[[dict[str, Any]], object], content: bytes = b"{}") -> None:
    """Attach a manifest as another tool would write it: indented, changed by `change`, listed in index.json."""
    image = blob_of(path, "image").read_bytes()
    document: dict[str, Any] = {
        "schemaVersion": 2,
        "mediaType": oci.IMAGE_TYPE,
        "artifactType": SIGNATURE,
        "config": {"mediaType": oci.EMPTY_TYPE, "digest": digest(b"{}"), "size": 2, "data": "e30="},
        "layers": [{"mediaType": SIGNATURE, "digest": digest(content), "size": len(content), "urls": ["http://x"]}],
        "subject": {"mediaType": oci.IMAGE_TYPE, "digest": digest(image), "size": len(image)},
        "annotations": {"org.opencontainers.image.created": "2026-01-01T00:00:00Z"},
        "unknown": {"field": 1},
    }
    change(document)
    data = json.dumps(document, indent=2).encode()
    for blob in (data, content, b"{}"):
        (path / "blobs" / "sha256" / digest(blob).removeprefix("sha256:")).write_bytes(blob)
    index = json.loads((path / "index.json").read_bytes())
    entry = {"mediaType": oci.IMAGE_TYPE, "digest": digest(data), "size": len(data), "artifactType": oci.EMPTY_TYPE}
    index["manifests"].append(entry)
    (path / "index.json").write_text(json.dumps(index, indent=1))


def test_manifest_that_another_tool_wrote_opens(tmp_path: Path) -> None:
    bundle = write_tiny(tmp_path / "x.bundle")
    foreign(bundle.path, lambda document: None, b"signature")

    found = Bundle.open(bundle.path).attached[1]

    assert (found.artifact_type, found.layers[0].data) == (SIGNATURE, b"signature")


def test_without_an_artifact_type_the_configs_type_counts(tmp_path: Path) -> None:
    bundle = write_tiny(tmp_path / "x.bundle")
    foreign(bundle.path, lambda document: document.pop("artifactType"))

    assert Bundle.open(bundle.path).attached[1].artifact_type == oci.EMPTY_TYPE


def resized(document: dict[str, Any]) -> None:
    document["layers"][0]["size"] = limits.MAX_ATTACHED_BYTES


def outside(document: dict[str, Any]) -> None:
    document["layers"][0]["digest"] = "sha256:../../../../etc/passwd"


REFUSED: list[tuple[str, Callable[[dict[str, Any]], object], str]] = [
    ("of another bundle", lambda document: document["subject"].update(digest="sha256:" + "0" * 64), "index-invalid"),
    ("subject of another size", lambda document: document["subject"].update(size=1), "index-invalid"),
    ("subject of another type", lambda document: document["subject"].update(mediaType=oci.INDEX_TYPE), "index-invalid"),
    ("a bundle", lambda document: document.update(artifactType=oci.BUNDLE), "artifact-type"),
    ("a second record", lambda document: document.update(artifactType=oci.PROVENANCE), "index-invalid"),
    ("an index", lambda document: document.update(mediaType=oci.INDEX_TYPE), "image-invalid"),
    ("of schema 1", lambda document: document.update(schemaVersion=1), "image-invalid"),
    ("without a config", lambda document: document.pop("config"), "json-invalid"),
    ("blob outside", outside, "digest-invalid"),
    ("blobs too large", resized, "limit-exceeded"),
    ("too many layers", lambda document: document["layers"].extend(document["layers"] * 256), "limit-exceeded"),
    ("layer that is not there", lambda document: document["layers"][0].update(digest="sha256:" + "0" * 64),
     "blob-missing"),
    ("layer of another size", lambda document: document["layers"][0].update(size=3), "blob-size"),
    ("second bundle", lambda document: document.pop("subject"), "index-invalid"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "code"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_refused(change: Callable[[dict[str, Any]], object], code: str, tmp_path: Path) -> None:
    bundle = write_tiny(tmp_path / "x.bundle")
    foreign(bundle.path, change)

    with pytest.raises(BundleError) as caught:
        Bundle.open(bundle.path)

    assert caught.value.code == code
    assert str(bundle.path) in str(caught.value)


def test_manifest_that_is_listed_twice(tmp_path: Path) -> None:
    bundle = write_tiny(tmp_path / "x.bundle")
    attach(bundle.path, signature(bundle))
    index = json.loads((bundle.path / "index.json").read_bytes())
    index["manifests"].append(index["manifests"][2])
    (bundle.path / "index.json").write_text(json.dumps(index))

    with pytest.raises(BundleError, match="listed twice") as caught:
        Bundle.open(bundle.path)

    assert caught.value.code == "index-invalid"


def test_as_many_as_the_limit_open_and_one_more_is_refused(tmp_path: Path) -> None:
    bundle = write_tiny(tmp_path / "x.bundle")
    manifests = [signature(bundle, b"%d" % i) for i in range(limits.MAX_ATTACHED)]

    attach(bundle.path, *manifests[1:])
    with pytest.raises(BundleError) as caught:
        attach(bundle.path, manifests[0])

    assert caught.value.code == "limit-exceeded"
    assert "detach" in str(caught.value)
    assert len(Bundle.open(bundle.path).attached) == limits.MAX_ATTACHED


def test_damage_in_an_attached_blob_is_found(tmp_path: Path) -> None:
    bundle = write_tiny(tmp_path / "x.bundle")
    found = attach(bundle.path, signature(bundle)).attached[1]
    (bundle.path / oci.blob_path(found.layers[0].digest)).write_bytes(b'{"signed":TRUE}')

    with pytest.raises(BundleError) as caught:
        Bundle.open(bundle.path)

    assert caught.value.code == "blob-digest"


def test_blob_that_nothing_names_is_still_refused(tmp_path: Path) -> None:
    bundle = write_tiny(tmp_path / "x.bundle")
    attach(bundle.path, signature(bundle))
    (bundle.path / oci.blob_path("sha256:" + "0" * 64)).write_bytes(b"")

    with pytest.raises(BundleError) as caught:
        Bundle.open(bundle.path)

    assert caught.value.code == "layout-extra"
