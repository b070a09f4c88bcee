"""Readers of what registries, their clients and the local store say, as functions of bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from precast.ir.bundle import attached, oci
from precast.ir.bundle.layout import check_attached
from precast.registry import credentials, referrers
from precast.registry.reference import Reference
from precast.registry.store import Store
from precast.registry.tokens import challenges_of
from precast.registry.transport import Transport

SUBJECT = oci.Descriptor(oci.IMAGE_TYPE, "sha256:" + "0" * 64, 7)


def signature() -> dict[str, Any]:
    """A manifest that is attached to `SUBJECT`, as another tool writes it."""
    empty = {"mediaType": oci.EMPTY_TYPE, "digest": oci.digest_of(oci.EMPTY), "size": 2, "data": "e30="}
    return {
        "schemaVersion": 2, "mediaType": oci.IMAGE_TYPE, "artifactType": "application/x", "config": empty,
        "layers": [{"mediaType": "application/x", "digest": oci.digest_of(b"x"), "size": 1, "annotations": {"a": "b"}}],
        "subject": {"mediaType": oci.IMAGE_TYPE, "digest": SUBJECT.digest, "size": SUBJECT.size},
        "annotations": {"org.opencontainers.image.created": "2026-01-01T00:00:00Z"},
    }  # fmt: skip


def read_signature(data: bytes, _: Path) -> None:
    """A manifest that somebody attached."""
    document = attached.decode(data)
    check_attached(data, document, SUBJECT)
    attached.check_together([document])


def read_list(data: bytes, _: Path) -> None:
    """The list of what is attached, as it is read, and as it is written anew."""
    referrers.decode_list(data)
    json.dumps(referrers.index_of(data))


def read_reference(data: bytes, _: Path) -> None:
    """What a user types."""
    found = Reference.parse(data.decode(errors="replace"))
    assert Reference.parse(str(found)) == found


def read_challenge(data: bytes, _: Path) -> None:
    """What a registry wants of whoever asks, and where its token service is."""
    wanted = challenges_of(data.decode(errors="replace"))
    Transport("127.0.0.1").target("http://127.0.0.1/v2/", wanted.get("bearer", {}).get("realm", ""))


def read_credentials(data: bytes, folder: Path) -> None:
    """Docker's config; no helper is installed."""
    (folder / "config.json").write_bytes(data)
    credentials.find("ghcr.io", "org/name", {"DOCKER_CONFIG": str(folder), "HOME": str(folder), "PATH": ""})


def read_store(data: bytes, folder: Path) -> None:
    """The list of a stored bundle's manifests."""
    store = Store(folder)
    with store.writing():
        (folder / "bundles" / f"{'0' * 64}.json").write_bytes(data)
    store.listing()
    assert store.verify().problems
    store.collect()
