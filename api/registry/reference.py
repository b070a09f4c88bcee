"""References to bundles in registries: HOST[:PORT]/NAME[:TAG][@DIGEST]."""

from __future__ import annotations

import ipaddress
import re

import msgspec

from precast.ir.errors import RegistryError, shown

SCHEME = "oci://"
_HOST = re.compile(r"([A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9a-fA-F:.]+\])(?::([0-9]{1,5}))?")
_NAME = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*)*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_MAX_NAME = 255
# The name that everybody types, and the host that answers.
_DOCKER_HUB = {"docker.io": "registry-1.docker.io", "index.docker.io": "registry-1.docker.io"}


class Reference(msgspec.Struct, frozen=True):
    """A repository of a registry, and what of it is meant: a tag, a digest, both (the digest counts), or neither."""

    host: str
    name: str
    tag: str | None = None
    digest: str | None = None

    @staticmethod
    def parse(text: str) -> Reference:
        """The reference in `text`, with or without `oci://` before it.

        Raises RegistryError (`reference-invalid`).
        """
        host, slash, rest = text.removeprefix(SCHEME).partition("/")
        if "@" in host or not _is_host(host):
            shown_host = "one with a user's name" if "@" in host else shown(repr(host[:300]))
            fix = "begin with the registry's host: ghcr.io/org/name:tag, localhost:5000/name"
            raise RegistryError("reference-invalid", f"expected a host, found {shown_host}", fix=fix)
        rest, at, digest = rest.partition("@")
        name, colon, tag = rest.partition(":")
        if not slash or not _NAME.fullmatch(name) or len(name) > _MAX_NAME:
            message = f"expected a repository's name in lower case after the host, found {shown(repr(name[:300]))}"
            raise RegistryError("reference-invalid", message)
        if colon and not _TAG.fullmatch(tag):
            raise RegistryError("reference-invalid", f"expected a tag, found {shown(repr(tag[:200]))}")
        if at and not _DIGEST.fullmatch(digest):
            message = f"expected sha256: and 64 hexadecimal digits after @, found {shown(repr(digest[:100]))}"
            raise RegistryError("reference-invalid", message)
        return Reference(host, name, tag or None, digest or None)

    def __str__(self) -> str:
        tag, digest = (f":{self.tag}" if self.tag else ""), (f"@{self.digest}" if self.digest else "")
        return f"{self.host}/{self.name}{tag}{digest}"

    @property
    def server(self) -> str:
        """The host and port that requests go to."""
        return _DOCKER_HUB.get(self.host, self.host)

    def at(self, digest: str) -> Reference:
        """The same repository at this digest."""
        return Reference(self.host, self.name, self.tag, digest)


def is_local(host: str) -> bool:
    """Whether a host (with or without a port) is this machine by its very name: `localhost`, 127.0.0.1, [::1]."""
    name = re.sub(r":[0-9]+$", "", host).strip("[]").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _is_host(text: str) -> bool:
    match = _HOST.fullmatch(text)
    if match is None or int(match[2] or 1) not in range(1, 1 << 16):
        return False
    # As docker has it: a first part without any of these would be a name on Docker Hub.
    return "." in match[1] or ":" in text or match[1] == "localhost"
