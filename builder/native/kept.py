"""Compiled kernels on disk, beside snapshots of the pipeline: under a key of all that a kernel is made from.

What does not read back whole is a miss, and is compiled again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from precast.builder.native.worker import Job, Made
from precast.ir.errors import BuildError
from precast.kernels.sources import file_digest, kernel_sources

_DIGEST_BYTES = 32


class Kept(NamedTuple):
    """A folder of kernels, for compilers of these versions."""

    folder: Path
    versions: Mapping[str, str]

    def read(self, job: Job) -> tuple[Made, bytes] | None:
        """What became of a job, and its image."""
        try:
            content = self._file(job).read_bytes()
        except OSError:
            return None
        digest, content = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        if hashlib.sha256(content).digest() != digest:
            return None
        return msgspec.msgpack.decode(content, type=tuple[Made, bytes])

    def write(self, job: Job, made: Made, image: bytes) -> None:
        """Keep it. Raises BuildError `write-failed` where the folder can't be written to."""
        content = msgspec.msgpack.encode((made, image))
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file(job).write_bytes(hashlib.sha256(content).digest() + content)
        except OSError as error:
            message = f"a compiled kernel can't be kept: {error.strerror}"
            raise BuildError("write-failed", message, where=str(self.folder)) from error

    def _file(self, job: Job) -> Path:
        sources = {name: file_digest(name) for name in kernel_sources(job.kernel)}
        key = msgspec.json.encode((job, sources, self.versions), order="sorted")
        return self.folder / hashlib.sha256(key).hexdigest()
