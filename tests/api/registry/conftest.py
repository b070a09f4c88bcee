"""A registry of each test's own, a store of its own, and no credentials but those that a test makes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_registry import FakeRegistry

sys.path.insert(0, str(Path(__file__).parents[2] / "ir"))

from examples import write_tiny
from precast.ir.artifact import Bundle, attach
from precast.ir.bundle.attached import compose
from precast.registry.client import Repository
from precast.registry.reference import Reference
from precast.registry.store import Store
from precast.registry.transport import Transport

SIGNATURE = "application/vnd.dev.sigstore.bundle.v0.3+json"


@pytest.fixture(autouse=True)
def _alone(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PRECAST_STORE", str(home / "store"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "config"))
    for name in ("REGISTRY_AUTH_FILE", "DOCKER_CONFIG", "XDG_RUNTIME_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def registry() -> Iterator[FakeRegistry]:
    """A registry without the referrers API, as most are."""
    with FakeRegistry() as registry:
        yield registry


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty store."""
    return Store(tmp_path / "store")


@pytest.fixture
def tiny(tmp_path: Path) -> Bundle:
    """A bundle with a provenance record and one signature."""
    bundle = write_tiny(tmp_path / "tiny.bundle")
    return attach(bundle.path, compose(bundle.descriptor, SIGNATURE, [(SIGNATURE, b'{"signed":true}')], {"a": "b"}))


@pytest.fixture
def waits() -> list[float]:
    """The seconds that clients of `client` would have waited."""
    return []


@pytest.fixture
def client(registry: FakeRegistry, waits: list[float]) -> Iterator[Callable[..., Repository]]:
    """`client("org/tiny:tag")`: a repository of `registry` that waits for nothing."""
    transports: list[Transport] = []

    def make(reference: str = "org/tiny:v1", **options: Any) -> Repository:
        wanted = Reference.parse(f"{registry.host}/{reference}")
        transport = Transport(wanted.server, pause=waits.append)
        transports.append(transport)
        return Repository(wanted, transport=transport, **({"writes": True} | options))

    yield make
    for transport in transports:
        transport.close()
