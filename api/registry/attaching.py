"""Attaching one more manifest to what is in a registry already."""

from __future__ import annotations

import functools
import io

from precast.ir.bundle.attached import Attached
from precast.ir.bundle.oci import Descriptor
from precast.registry import referrers
from precast.registry.client import Repository
from precast.registry.push import Blob, upload_all


def attach(repository: Repository, subject: Descriptor, made: Attached) -> None:
    """Put the manifest and the blobs that it names, and have the registry list it under its subject.

    Raises RegistryError.
    """
    blobs = [
        Blob(digest, len(data), functools.partial(io.BytesIO, data))
        for digest, data in made.blobs().items()
        if digest != made.digest
    ]
    upload_all(repository, blobs, ())
    referrers.list_by_tag(repository, subject.digest, referrers.put_all(repository, subject, (made,)))
