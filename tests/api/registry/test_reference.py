"""References are read as docker reads them, and refused without being quoted where secrets may be in them."""

from __future__ import annotations

import pytest

from precast.ir.errors import RegistryError
from precast.registry.reference import Reference, is_local

HEX = "sha256:" + "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ghcr.io/org/name", ("ghcr.io", "org/name", None, None)),
        ("ghcr.io/org/name:v1.0", ("ghcr.io", "org/name", "v1.0", None)),
        (f"ghcr.io/org/name@{HEX}", ("ghcr.io", "org/name", None, HEX)),
        (f"oci://ghcr.io/name:_a@{HEX}", ("ghcr.io", "name", "_a", HEX)),
        ("localhost/name", ("localhost", "name", None, None)),
        ("localhost:5000/a/b/c__d-e.f:t", ("localhost:5000", "a/b/c__d-e.f", "t", None)),
        ("[::1]:5000/name", ("[::1]:5000", "name", None, None)),
        ("registry:5000/name", ("registry:5000", "name", None, None)),
    ],
)
def test_read(text: str, expected: tuple[str | None, ...]) -> None:
    found = Reference.parse(text)

    assert (found.host, found.name, found.tag, found.digest) == expected
    assert str(found) == text.removeprefix("oci://")


@pytest.mark.parametrize(
    "text",
    [
        "", "name", "org/name", "ghcr.io", "ghcr.io/", "ghcr.io//name", "ghcr.io/Org/name", "ghcr.io/name:",
        "ghcr.io/name@", "ghcr.io/name:a:b", "ghcr.io/name@sha256:abc", f"ghcr.io/name@{HEX.upper()}",
        f"ghcr.io/name@{HEX}\n",
        "ghcr.io/../name", "ghcr.io/a?b", "ghcr.io/" + "a" * 256, "ghcr.io/name:" + "a" * 129, "ghcr.io:0/name",
        "ghcr.io:99999/name", "https://ghcr.io/name", "-x.io/name", "ghcr.io/name:tag/x", "ghcr.io\r\n/name",
    ],
)  # fmt: skip
def test_refused(text: str) -> None:
    with pytest.raises(RegistryError) as caught:
        Reference.parse(text)

    assert (caught.value.code, caught.value.exit_code) == ("reference-invalid", 2)


def test_password_is_not_repeated() -> None:
    with pytest.raises(RegistryError) as caught:
        Reference.parse("user:hunter2@ghcr.io/name")

    assert "hunter2" not in str(caught.value)


def test_docker_hub_has_another_server() -> None:
    assert Reference.parse("docker.io/org/name").server == "registry-1.docker.io"


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost", True), ("localhost:5000", True), ("127.0.0.1:1", True), ("127.9.9.9", True), ("[::1]:80", True),
        ("x.localhost", True), ("localhost.evil.com", False), ("10.0.0.1", False), ("127.0.0.1.evil.com", False),
    ],
)  # fmt: skip
def test_this_machine_is_known_by_its_name(host: str, expected: bool) -> None:
    assert is_local(host) is expected
