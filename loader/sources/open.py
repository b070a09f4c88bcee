"""Which folder a checkpoint's address means: a directory here, or one of the kinds of servers."""

from __future__ import annotations

import os
import re

from precast.ir import limits
from precast.ir.errors import RequestError, WeightsError, shown, shown_value
from precast.ir.weights.sources import Folder, LocalFolder
from precast.loader.sources.remote import RemoteFolder, Waits

_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]+)://")
SCHEMES = ("https", "http", "s3", "gs")


def is_remote(address: str | os.PathLike[str]) -> bool:
    """Whether it is an address of a server rather than a path."""
    return isinstance(address, str) and _SCHEME.match(address) is not None


def folder_of(checkpoint: str | os.PathLike[str], waits: Waits | None = None) -> Folder:
    """The folder of a checkpoint: a path of a directory or a file here, or the address of one on a server.

    No server is asked yet. Raises WeightsError (`checkpoint-address`) for an address of no or an unknown kind,
    RequestError for a timeout that is none, TargetError (`dependency-missing`) where a library is not installed.
    """
    waits = waits or Waits()
    timeout = waits.timeout
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout <= limits.MAX_SECONDS:
        expected = f"seconds above 0, and at most {limits.MAX_SECONDS}"
        message = f"weights_timeout is {shown_value(timeout)}, expected {expected}"
        raise RequestError("engine-option-invalid", message)
    scheme = _SCHEME.match(checkpoint) if isinstance(checkpoint, str) else None
    if scheme is None:
        return LocalFolder(checkpoint)
    kind, address = scheme[1].lower(), str(checkpoint)
    if kind in ("http", "https"):
        from precast.loader.sources.http import HttpServer, http_address

        folder, only = http_address(address)
        return RemoteFolder(HttpServer(folder, timeout), only, waits)
    if kind in ("s3", "gs"):
        from precast.loader.sources.objects import ObjectServer

        folder, _, last = address.rpartition("/")
        only = last if last.endswith(".safetensors") else None
        return RemoteFolder(ObjectServer(address if only is None else folder, timeout), only, waits)
    expected = ", ".join(f"{each}://" for each in SCHEMES)
    message = f"addresses with {shown(kind, 40)}:// are not read, expected a path or one of {expected}"
    raise WeightsError("checkpoint-address", message, fix="download the checkpoint, and pass its directory")
