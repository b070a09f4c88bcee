"""The other side of the protocol as others wrote it: docker-registry, skopeo, oras, crane.

Debian has them: docker-registry and skopeo in bookworm, oras and crane in sid. Where one is missing its tests are
skipped. They are looked for on the PATH and in `$PRECAST_TEST_TOOLS`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_registries import crane_registry, docker_registry

from precast.ir.artifact import Bundle, detach
from precast.registry.pull import pull
from precast.registry.push import push
from precast.registry.store import Store

PATH = os.pathsep.join(filter(None, (os.environ.get("PRECAST_TEST_TOOLS"), os.environ.get("PATH"))))


def tool(name: str) -> str:
    """The program of this name, or the test is skipped."""
    found = shutil.which(name, path=PATH)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def run(name: str, *arguments: str) -> str:
    """The standard output of a tool that ends well."""
    done = subprocess.run([tool(name), *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def host(tmp_path: Path) -> Iterator[str]:
    """docker-registry on a port of its own."""
    with docker_registry(tool("docker-registry"), tmp_path) as host:
        yield host


def test_docker_registry(host: str, tiny: Bundle, tmp_path: Path) -> None:
    pushed = push(tiny.path, f"{host}/org/tiny:v1")
    again = push(tiny.path, f"{host}/org/other:v1", mount_from=["org/tiny"])
    pull(f"{host}/org/tiny:v1", tmp_path / "out.bundle", store=Store(tmp_path / "store"))

    out = Bundle.open(tmp_path / "out.bundle")
    assert (out.digest, out.attached) == (tiny.digest, tiny.attached)
    assert (pushed.uploaded, again.mounted, again.uploaded) == (8, 8, 0)


def test_skopeo_reads_what_was_pushed(host: str, tiny: Bundle, tmp_path: Path) -> None:
    push(tiny.path, f"{host}/org/tiny:v1")

    run(
        "skopeo",
        "--insecure-policy",
        "copy",
        "--src-tls-verify=false",
        f"docker://{host}/org/tiny:v1",
        f"oci:{tmp_path / 'copy'}:latest",
    )

    assert Bundle.open(tmp_path / "copy").digest == tiny.digest


def test_what_skopeo_pushed_is_pulled(host: str, tiny: Bundle, tmp_path: Path) -> None:
    run(
        "skopeo",
        "--insecure-policy",
        "copy",
        "--dest-tls-verify=false",
        f"oci:{tiny.path}:latest",
        f"docker://{host}/org/tiny:v1",
    )

    assert pull(f"{host}/org/tiny:v1", store=Store(tmp_path / "store")).digest == tiny.digest


def test_oras_takes_what_is_attached_along(host: str, tiny: Bundle, tmp_path: Path) -> None:
    push(tiny.path, f"{host}/org/tiny:v1")

    run(
        "oras", "cp", "-r", "--from-plain-http", "--to-oci-layout", f"{host}/org/tiny:v1", f"{tmp_path / 'copy'}:latest"
    )
    found = json.loads(run("oras", "discover", "--plain-http", "--format", "json", f"{host}/org/tiny:v1"))

    listed = found.get("referrers", found.get("manifests"))
    assert {entry["digest"] for entry in listed} == {extra.digest for extra in tiny.attached}
    (tmp_path / "copy" / "ingest").exists() and (tmp_path / "copy" / "ingest").rmdir()
    assert Bundle.open(tmp_path / "copy").digest == tiny.digest
    assert len(Bundle.open(tmp_path / "copy").attached) == 2


def test_what_oras_pushed_is_pulled(host: str, tiny: Bundle, tmp_path: Path) -> None:
    run("oras", "cp", "-r", "--from-oci-layout", "--to-plain-http", f"{tiny.path}:latest", f"{host}/org/tiny:v1")

    found = pull(f"{host}/org/tiny:v1", tmp_path / "out.bundle", store=Store(tmp_path / "store"))

    assert found.digest == tiny.digest
    assert Bundle.open(tmp_path / "out.bundle").attached == tiny.attached


def test_what_oras_attached_comes_along(host: str, tiny: Bundle, tmp_path: Path) -> None:
    push(tiny.path, f"{host}/org/tiny:v1")
    (tmp_path / "note.txt").write_text("seen")

    options = ("--plain-http", "--disable-path-validation", "--artifact-type", "application/x-note")
    run("oras", "attach", *options, f"{host}/org/tiny:v1", str(tmp_path / "note.txt"))
    found = pull(f"{host}/org/tiny:v1", tmp_path / "out.bundle", store=Store(tmp_path / "store"))

    assert "application/x-note" in found.attached.values()
    assert len(Bundle.open(tmp_path / "out.bundle").attached) == 3


def test_crane_reads_what_was_pushed(host: str, tiny: Bundle, tmp_path: Path) -> None:
    push(tiny.path, f"{host}/org/tiny:v1")
    push(tiny.path, f"{host}/org/tiny:image", as_image=True)

    assert run("crane", "digest", "--insecure", f"{host}/org/tiny:v1").strip() == tiny.digest
    run("crane", "export", "--insecure", "--platform", "linux/arm64", f"{host}/org/tiny:image", str(tmp_path / "x.tar"))
    with tarfile.open(tmp_path / "x.tar") as archive:
        archive.extractall(tmp_path / "mounted", filter="data")
    assert Bundle.open(tmp_path / "mounted").attached == tiny.attached


def test_cranes_registry(tiny: Bundle, tmp_path: Path) -> None:
    with crane_registry(tool("crane")) as host:
        push(tiny.path, f"{host}/org/tiny:v1")
        pull(f"{host}/org/tiny:v1", tmp_path / "out.bundle", store=Store(tmp_path / "store"))

    assert Bundle.open(tmp_path / "out.bundle").attached == tiny.attached


def test_crane_copies_what_was_pushed(host: str, tiny: Bundle, tmp_path: Path) -> None:
    push(tiny.path, f"{host}/org/tiny:v1")

    run("crane", "pull", "--insecure", "--format", "oci", f"{host}/org/tiny:v1", str(tmp_path / "copy"))

    assert Bundle.open(tmp_path / "copy").digest == tiny.digest
    pull(f"{host}/org/tiny:v1", tmp_path / "copy", store=Store(tmp_path / "store"))  # is ours to replace


def test_what_crane_pushed_is_pulled(host: str, tiny: Bundle, tmp_path: Path) -> None:
    bare = detach(tiny.path, *(extra.digest for extra in tiny.attached))  # crane pushes layouts of one manifest
    run("crane", "push", "--insecure", str(bare.path), f"{host}/org/tiny:v1")
    run("crane", "copy", "--insecure", f"{host}/org/tiny:v1", f"{host}/org/copy:v2")

    assert pull(f"{host}/org/tiny:v1", store=Store(tmp_path / "store")).digest == tiny.digest
    assert pull(f"{host}/org/copy:v2", store=Store(tmp_path / "other")).digest == tiny.digest
