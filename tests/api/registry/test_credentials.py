"""Credentials are found where docker and podman keep them, asked of helpers, and never quoted."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

import pytest

from precast.ir.errors import RegistryError
from precast.registry.credentials import Credentials, find


def encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A home of its own, and a folder of programs."""
    (tmp_path / "bin").mkdir()
    return {"HOME": str(tmp_path), "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}


def configure(path: Path, config: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(config if isinstance(config, str) else json.dumps(config))


def helper(tmp_path: Path, name: str, script: str) -> None:
    program = tmp_path / "bin" / f"docker-credential-{name}"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


def test_none_without_a_file(environment: dict[str, str]) -> None:
    assert find("ghcr.io", "org/name", environment) is None


@pytest.mark.parametrize(
    ("host", "key"),
    [
        ("ghcr.io", "ghcr.io"), ("ghcr.io", "https://ghcr.io"), ("ghcr.io", "https://ghcr.io/v2/"),
        ("ghcr.io", "ghcr.io/org"), ("ghcr.io", "ghcr.io/org/name"), ("localhost:5000", "localhost:5000"),
        ("docker.io", "https://index.docker.io/v1/"), ("docker.io", "docker.io"),
    ],
)  # fmt: skip
def test_entry_of_config(host: str, key: str, environment: dict[str, str], tmp_path: Path) -> None:
    configure(tmp_path / ".docker/config.json", {"auths": {key: {"auth": encoded("user:pass:word")}}, "other": 1})

    assert find(host, "org/name", environment) == Credentials("user", "pass:word")


def test_narrowest_entry_counts(environment: dict[str, str], tmp_path: Path) -> None:
    auths = {"ghcr.io": {"auth": encoded("a:1")}, "ghcr.io/org": {"auth": encoded("b:2")}}
    configure(tmp_path / ".docker/config.json", {"auths": auths})

    assert find("ghcr.io", "org/name", environment) == Credentials("b", "2")
    assert find("ghcr.io", "organ/name", environment) == Credentials("a", "1")


@pytest.mark.parametrize(
    ("variable", "file"),
    [("DOCKER_CONFIG", "config.json"), ("XDG_RUNTIME_DIR", "containers/auth.json"), ("REGISTRY_AUTH_FILE", None)],
)
def test_places(variable: str, file: str | None, environment: dict[str, str], tmp_path: Path) -> None:
    where = tmp_path / "elsewhere"
    configure(where / (file or "x.json"), {"auths": {"ghcr.io": {"auth": encoded("user:word")}}})
    environment[variable] = str(where / "x.json" if file is None else where)

    assert find("ghcr.io", "name", environment) == Credentials("user", "word")


def test_identity_token(environment: dict[str, str], tmp_path: Path) -> None:
    configure(tmp_path / ".docker/config.json", {"auths": {"ghcr.io": {"auth": "", "identitytoken": "abc"}}})

    assert find("ghcr.io", "name", environment) == Credentials("", "abc")


def test_helper_of_the_host(environment: dict[str, str], tmp_path: Path) -> None:
    configure(tmp_path / ".docker/config.json", {"credHelpers": {"ghcr.io": "mine"}, "credsStore": "other"})
    helper(tmp_path, "mine", 'read host; echo "{\\"Username\\":\\"$1\\",\\"Secret\\":\\"$host\\"}"')

    assert find("ghcr.io", "name", environment) == Credentials("get", "ghcr.io")


def test_helper_for_all_hosts_gives_an_identity_token(environment: dict[str, str], tmp_path: Path) -> None:
    configure(tmp_path / ".docker/config.json", {"credsStore": "mine"})
    helper(tmp_path, "mine", """echo '{"ServerURL":"x","Username":"<token>","Secret":"abc"}'""")

    assert find("ghcr.io", "name", environment) == Credentials("", "abc")


def test_helper_that_has_nothing(environment: dict[str, str], tmp_path: Path) -> None:
    configure(tmp_path / ".docker/config.json", {"credsStore": "mine"})
    helper(tmp_path, "mine", "echo credentials not found in native keychain; exit 1")

    assert find("ghcr.io", "name", environment) is None


BROKEN: list[tuple[str, Any, str]] = [
    ("no JSON", '{"auths": hunter2', "config.json"),
    ("another type", {"auths": {"ghcr.io": "hunter2"}}, "config.json"),
    ("no base64", {"auths": {"ghcr.io": {"auth": "hunter2!"}}}, "ghcr.io"),
    ("base64 of something else", {"auths": {"ghcr.io": {"auth": encoded("hunter2")}}}, "ghcr.io"),
    ("helper with a path", {"credsStore": "../hunter"}, "no name"),
    ("helper that is not there", {"credsStore": "absent"}, "docker-credential-absent"),
    ("helper that fails", {"credsStore": "failing"}, "exit code 3"),
    ("helper that prints something else", {"credsStore": "talking"}, "docker-credential-talking"),
]


@pytest.mark.parametrize(("config", "names"), [row[1:] for row in BROKEN], ids=[row[0] for row in BROKEN])
def test_broken(config: Any, names: str, environment: dict[str, str], tmp_path: Path) -> None:
    configure(tmp_path / ".docker/config.json", config)
    helper(tmp_path, "failing", "echo hunter2; exit 3")
    helper(tmp_path, "talking", "echo hunter2")

    with pytest.raises(RegistryError) as caught:
        find("ghcr.io", "name", environment)

    assert caught.value.code == "credentials-invalid"
    assert names in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_unreadable_file(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / ".docker" / "config.json").mkdir(parents=True)

    with pytest.raises(RegistryError, match=r"config\.json"):
        find("ghcr.io", "name", environment)


def test_credentials_don_t_show() -> None:
    assert "word" not in repr(Credentials("user", "word"))
    assert "word" not in str([Credentials("user", "word")])
