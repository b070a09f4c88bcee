"""Credentials as docker, podman and their helpers keep them. None is ever part of a message."""

from __future__ import annotations

import base64
import binascii
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import msgspec

from precast.ir.bundle.codec import peek_json
from precast.ir.errors import BundleError, RegistryError

_MAX_CONFIG_BYTES = 1 << 20
_HELPER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_HELPER_SECONDS = 60
# Under these names docker keeps what belongs to Docker Hub.
_DOCKER_HUB = ("https://index.docker.io/v1/", "index.docker.io", "docker.io")


class Credentials(msgspec.Struct, frozen=True):
    """A user's name and password; or, without a name, an identity token that an OAuth2 server takes."""

    user: str
    secret: str

    def __repr__(self) -> str:
        return "Credentials(...)"

    def basic(self) -> str:
        """The value of an `Authorization` header."""
        return "Basic " + base64.b64encode(f"{self.user}:{self.secret}".encode()).decode()


class _Entry(msgspec.Struct):
    auth: str = ""
    username: str = ""
    password: str = ""
    identitytoken: str = ""


class _Config(msgspec.Struct, rename="camel"):
    auths: dict[str, _Entry] = {}
    creds_store: str = ""
    cred_helpers: dict[str, str] = {}


class _Given(msgspec.Struct, rename={"user": "Username", "secret": "Secret"}):
    """What a helper prints."""

    user: str = ""
    secret: str = ""


def config_files(environment: Mapping[str, str]) -> list[Path]:
    """Where credentials may be, the first that has some counts: podman's variable alone where it is set."""
    if file := environment.get("REGISTRY_AUTH_FILE"):
        return [Path(file)]
    home = Path(environment.get("HOME") or Path.home())
    docker = Path(environment.get("DOCKER_CONFIG") or home / ".docker") / "config.json"
    runtime = environment.get("XDG_RUNTIME_DIR")
    return [docker, *([Path(runtime) / "containers" / "auth.json"] if runtime else [])]


def find(host: str, name: str, environment: Mapping[str, str] | None = None) -> Credentials | None:
    """The credentials for a repository of a registry, or None where there are none: requests are then anonymous.

    Raises RegistryError (`credentials-invalid`).
    """
    environment = os.environ if environment is None else environment
    for file in config_files(environment):
        config = _read(file)
        found = None if config is None else _in_config(config, host, name, environment, str(file))
        if found is not None:
            return found
    return None


def _read(file: Path) -> _Config | None:
    try:
        with file.open("rb") as stream:
            data = stream.read(_MAX_CONFIG_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise RegistryError("credentials-invalid", f"{error.strerror}", where=str(file)) from None
    try:
        return peek_json(data, _Config, "credentials", _MAX_CONFIG_BYTES)
    except BundleError:  # whose message may quote the file
        message = "expected docker's config.json: JSON with `auths`, `credsStore`, `credHelpers`"
        raise RegistryError("credentials-invalid", message, where=str(file)) from None


def _in_config(config: _Config, host: str, name: str, environment: Mapping[str, str], where: str) -> Credentials | None:
    keys = _keys(host, name)
    for key in keys:
        if helper := config.cred_helpers.get(key):
            return _ask(helper, key, environment)
    if config.creds_store:
        for key in keys[-1:] if host not in _DOCKER_HUB else _DOCKER_HUB[:1]:
            if found := _ask(config.creds_store, key, environment):
                return found
    auths = {_plain(key): entry for key, entry in config.auths.items()}
    for key in keys:
        if (entry := auths.get(_plain(key))) is not None and (found := _decoded(entry, key, where)):
            return found
    return None


def _keys(host: str, name: str) -> list[str]:
    """Names that an entry may have, the narrowest first: podman keeps some for parts of a registry."""
    if host in _DOCKER_HUB:
        return list(_DOCKER_HUB)
    parts = name.split("/")
    return [*(f"{host}/{'/'.join(parts[:count])}" for count in range(len(parts), 0, -1)), host]


def _plain(key: str) -> str:
    """An entry's name without scheme and version, as older dockers wrote them."""
    return (
        key.removeprefix("https://").removeprefix("http://").removesuffix("/").removesuffix("/v1").removesuffix("/v2")
    )


def _decoded(entry: _Entry, key: str, where: str) -> Credentials | None:
    if entry.identitytoken:
        return Credentials("", entry.identitytoken)
    if entry.username and entry.password:
        return Credentials(entry.username, entry.password)
    if not entry.auth:
        return None
    try:
        user, colon, secret = base64.b64decode(entry.auth, validate=True).decode().partition(":")
    except (binascii.Error, ValueError):
        colon, user, secret = "", "", ""
    if not colon:
        message = f"the entry of {key}: expected `auth` to be the base64 of USER:PASSWORD"
        raise RegistryError("credentials-invalid", message, where=where, fix="log in again")
    return Credentials(user, secret)


def _ask(helper: str, key: str, environment: Mapping[str, str]) -> Credentials | None:
    """What the credential helper of this name says; None where it has nothing."""
    if not _HELPER.fullmatch(helper):
        raise RegistryError("credentials-invalid", f"a credential helper is named {helper[:100]!r}, which is no name")
    program = f"docker-credential-{helper}"
    try:
        done = subprocess.run(
            [program, "get"], input=key.encode(), capture_output=True, timeout=_HELPER_SECONDS, env=dict(environment)
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = "it took too long" if isinstance(error, subprocess.TimeoutExpired) else error.strerror
        message = f"the credential helper {program} can't be asked: {reason}"
        raise RegistryError("credentials-invalid", message, fix="install it, or take it out of config.json") from None
    if done.returncode != 0:
        # Helpers say by text alone that they have nothing, and may say secrets otherwise.
        if b"not found" in done.stdout + done.stderr:
            return None
        message = f"the credential helper {program} failed with exit code {done.returncode}"
        raise RegistryError("credentials-invalid", message, fix=f"try it: echo {key} | {program} get")
    try:
        given = msgspec.json.decode(done.stdout[:_MAX_CONFIG_BYTES], type=_Given)
    except (msgspec.DecodeError, ValueError):
        message = f"the credential helper {program} printed something else than JSON with Username and Secret"
        raise RegistryError("credentials-invalid", message) from None
    return Credentials("" if given.user == "<token>" else given.user, given.secret) if given.secret else None
