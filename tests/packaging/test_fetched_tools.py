"""The programs of others that tests run against are what their digests say, or are not there, with a reason."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import real_tools
from real_tools import Package, Tool, fetch

HERE = pytest.mark.skipif(
    not real_tools.HELPER.exists() or shutil.which("dpkg-deb") is None, reason="this machine has no apt"
)


@pytest.fixture
def mirror(tmp_path: Path) -> str:
    """A mirror on the disk, with a package `hello` of one program that prints a library's folder."""
    root = tmp_path / "package"
    (root / "DEBIAN").mkdir(parents=True)
    (root / "DEBIAN" / "control").write_text(
        "Package: hello\nVersion: 1\nArchitecture: all\nMaintainer: A <a@example.com>\nDescription: says hello\n"
    )
    (root / "usr" / "bin").mkdir(parents=True)
    (root / "usr" / "bin" / "hello").write_text('#!/bin/sh\necho "hello $1 $LD_LIBRARY_PATH"\n')
    (root / "usr" / "bin" / "hello").chmod(0o755)
    pool = tmp_path / "mirror" / "pool" / "main" / "h" / "hello"
    pool.mkdir(parents=True)
    subprocess.run(["dpkg-deb", "-b", str(root), str(pool / "hello_1_all.deb")], check=True, capture_output=True)
    return f"copy://{tmp_path / 'mirror'}"


def package(mirror: str) -> Package:
    file = "h/hello/hello_1_all.deb"
    data = (Path(mirror.removeprefix("copy://")) / "pool" / "main" / file).read_bytes()
    return Package(file, hashlib.sha256(data).hexdigest())


@HERE
def test_program_is_fetched_once(mirror: str, tmp_path: Path) -> None:
    tools = (Tool("hello", package(mirror)),)

    assert fetch(tmp_path / "tools", tmp_path / "cache", tools, [mirror]) == {}
    assert fetch(tmp_path / "tools", tmp_path / "cache", tools, []) == {}

    said = subprocess.run([tmp_path / "tools" / "bin" / "hello", "you"], capture_output=True, text=True)
    assert said.stdout.split()[:2] == ["hello", "you"]
    assert len(os.listdir(tmp_path / "cache")) == 1


@HERE
def test_program_finds_its_libraries(mirror: str, tmp_path: Path) -> None:
    tools = (Tool("hello", package(mirror), (package(mirror),)),)

    fetch(tmp_path / "tools", tmp_path / "cache", tools, [mirror])

    said = subprocess.run([tmp_path / "tools" / "bin" / "hello", "you"], capture_output=True, text=True)
    assert str(tmp_path / "cache") in said.stdout


@HERE
def test_other_bytes_are_not_unpacked(mirror: str, tmp_path: Path) -> None:
    tools = (Tool("hello", package(mirror)._replace(sha256="0" * 64)),)

    found = fetch(tmp_path / "tools", tmp_path / "cache", tools, [mirror])

    assert "another digest" in found["hello"]
    assert os.listdir(tmp_path / "tools" / "bin") == []
    assert os.listdir(tmp_path / "cache") == []


@HERE
def test_package_that_is_gone_leaves_the_others(mirror: str, tmp_path: Path) -> None:
    gone = Tool("gone", Package("g/gone/gone_1_all.deb", "0" * 64))

    found = fetch(tmp_path / "tools", tmp_path / "cache", (gone, Tool("hello", package(mirror))), [mirror])

    assert list(found) == ["gone"]
    assert found["gone"].startswith("gone_1_all.deb: ")
    assert os.listdir(tmp_path / "tools" / "bin") == ["hello"]


def test_machine_without_apt_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_tools, "HELPER", tmp_path / "none")

    found = fetch(tmp_path / "tools", tmp_path / "cache")

    assert set(found) == {tool.name for tool in real_tools.TOOLS}
    assert all("Linux on x86_64" in reason or "no apt" in reason for reason in found.values())
