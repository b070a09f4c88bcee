"""Registries and their clients as others wrote them, for tests and demos to run against: Debian's packages, unpacked.

`python tests/support/real_tools.py FOLDER` makes FOLDER/bin, whose programs run as they are. Nothing is installed, and
no rights are needed. The packages come from the mirror that apt uses on this machine, are held against the digests
below, and are kept unpacked in the user's cache, so that the next checkout fetches nothing. Where a package can't be
had, it says why and goes on without: tests that need the program are skipped.

Debian removes a package from its mirrors when no release has it any more; `apt-cache show` names the next one.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

HELPER = Path("/usr/lib/apt/apt-helper")
_WAIT = ("-o", "Acquire::Retries=1", "-o", "Acquire::http::Timeout=20", "-o", "Acquire::https::Timeout=20")
_LIMIT_SECONDS = 300
_LIBRARY_FOLDERS = ("usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu")


class Package(NamedTuple):
    """A package: its file in the mirror's `pool/main`, and the SHA-256 of that file."""

    file: str
    sha256: str

    @property
    def name(self) -> str:
        return self.file.rpartition("/")[2]


class Tool(NamedTuple):
    """A program: its package, and those of the libraries that it needs beyond libc."""

    name: str
    package: Package
    libraries: tuple[Package, ...] = ()


_LIBRARIES = (
    Package(
        "g/gpgme1.0/libgpgme11_1.18.0-3+b1_amd64.deb",
        "dc075584050dc5c8ac27563fc222e8c1ea71128a019a6d129d5823e47ac1e55e",
    ),
    Package(
        "liba/libassuan/libassuan0_2.5.5-5_amd64.deb",
        "5912430927da16ccc831459679207fdbb9dfc5a206f2bab8d6f36d5a1ab53e25",
    ),
    Package(
        "libg/libgpg-error/libgpg-error0_1.46-1_amd64.deb",
        "89944ee11d7370ce6ef46fc52f094c4a6512eff8943ec4c6ebefeae6360ceada",
    ),
    Package(
        "l/lvm2/libdevmapper1.02.1_1.02.185-2_amd64.deb",
        "aaa78ca236055fedccf637eacf7bda02bf1980b2db668dccd202b04d0d2cfe04",
    ),
)
TOOLS = (
    # Of bookworm.
    Tool(
        "docker-registry",
        Package(
            "d/docker-registry/docker-registry_2.8.2+ds1-1_amd64.deb",
            "a9bd06c0e006854608f8469b4371743f40604ad90975532bb3b7ceeb72fe2913",
        ),
    ),
    Tool(
        "skopeo",
        Package(
            "s/skopeo/skopeo_1.9.3+ds1-1+b10_amd64.deb",
            "5c1978f6a95577b143be772bbe50c247a28132a5cc961c74d4d2a6f2b1ab4f3d",
        ),
        _LIBRARIES,
    ),
    # Of sid; they run wherever libc is 2.34 or newer.
    Tool(
        "oras",
        Package(
            "o/oras/oras_1.3.3-1_amd64.deb",
            "474f8451e880a64d7daed412baa52febd1c7d988ed778eadac00bdcbdad53af4",
        ),
    ),
    Tool(
        "crane",
        Package(
            "g/go-containerregistry/crane_0.20.7+ds1-5_amd64.deb",
            "2d4bdb12724eda42214bb8957aecc472e561317938da3c95402a9ee30c73fa3b",
        ),
    ),
    Tool(
        "cosign",
        Package(
            "c/cosign/cosign_3.1.1-2_amd64.deb",
            "d8622ebffce1d69197288fc030ff06a4c247af5507107f85c5a878870b686b23",
        ),
    ),
)


def fetch(
    folder: Path, cache: Path, tools: Sequence[Tool] = TOOLS, mirrors: Sequence[str] | None = None
) -> dict[str, str]:
    """Make `folder`/bin with the programs; for each tool that isn't there, by its name, why not.

    `cache` holds unpacked packages, by digest. `mirrors`: where to look, in place of where apt does.
    """
    packages = {each for tool in tools for each in (tool.package, *tool.libraries)}
    cache.mkdir(parents=True, exist_ok=True)
    missing = {each for each in packages if not _unpacked(cache, each).is_dir()}
    reasons = _fetch(missing, cache, mirrors) if missing else {}
    binaries = folder / "bin"
    shutil.rmtree(binaries, ignore_errors=True)
    binaries.mkdir(parents=True)
    found = {}
    for tool in tools:
        lacking = [each for each in (tool.package, *tool.libraries) if each in reasons]
        if lacking:
            found[tool.name] = f"{lacking[0].name}: {reasons[lacking[0]]}"
        else:
            _link(tool, binaries, cache)
    return found


def _fetch(packages: set[Package], cache: Path, mirrors: Sequence[str] | None) -> dict[Package, str]:
    """Unpack these packages into the cache; those that can't be had, and why."""
    if (reason := _why_not_here()) is not None:
        return dict.fromkeys(packages, reason)
    reasons = dict.fromkeys(packages, "apt knows no mirror here")
    with tempfile.TemporaryDirectory(dir=cache) as name:
        for mirror in _mirrors() if mirrors is None else mirrors:
            wanted = sorted(reasons)
            pairs = [(f"{mirror}/pool/main/{each.file}", str(Path(name) / each.name)) for each in wanted]
            said = _run([str(HELPER), *_WAIT, "download-file", *[x for url, to in pairs for x in (url, to, "")]])
            for each in wanted:
                reason = _take(Path(name) / each.name, each, cache)
                if reason is None:
                    del reasons[each]
                else:
                    reasons[each] = reason if (Path(name) / each.name).exists() else _last_error(said, each)
            if not reasons:
                break
    return reasons


def _why_not_here() -> str | None:
    if platform.machine() != "x86_64" or sys.platform != "linux":
        return f"these packages are for Linux on x86_64, and this is {sys.platform} on {platform.machine()}"
    if not HELPER.exists() or shutil.which("dpkg-deb") is None:
        return "this machine has no apt"
    return None


def _mirrors() -> list[str]:
    """Where apt gets packages from on this machine, also before it has got the lists of any."""
    command = ["apt-get", "indextargets", "--no-release-info", "--format", "$(SITE)", "Created-By: Packages"]
    return list(dict.fromkeys(line.rstrip("/") for line in _run(command).splitlines() if "://" in line))


def _take(file: Path, package: Package, cache: Path) -> str | None:
    """Unpack what was fetched into the cache, or say what is wrong with it."""
    if not file.is_file():
        return "it can't be fetched"
    if hashlib.sha256(file.read_bytes()).hexdigest() != package.sha256:
        return "what the mirror gives has another digest"
    unpacked = file.with_suffix(".unpacked")
    said = subprocess.run(["dpkg-deb", "-x", str(file), str(unpacked)], capture_output=True, text=True)
    if said.returncode != 0:
        return f"it can't be unpacked: {said.stderr.strip()}"
    try:
        unpacked.rename(_unpacked(cache, package))
    except OSError:  # somebody else was faster
        assert _unpacked(cache, package).is_dir()
    return None


def _unpacked(cache: Path, package: Package) -> Path:
    return cache / package.sha256[:32]


def _link(tool: Tool, binaries: Path, cache: Path) -> None:
    program, link = _unpacked(cache, tool.package) / "usr" / "bin" / tool.name, binaries / tool.name
    if not tool.libraries:
        link.symlink_to(program)
        return
    places = [_unpacked(cache, each) / place for each in tool.libraries for place in _LIBRARY_FOLDERS]
    path = ":".join(map(str, places))
    link.write_text(f'#!/bin/sh\nLD_LIBRARY_PATH="{path}" exec "{program}" "$@"\n')
    link.chmod(0o755)


def _run(command: list[str]) -> str:
    """What the command says; it may fail, and is ended where it takes too long."""
    environment = os.environ | {"LC_ALL": "C"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=_LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        return f"E: nothing came within {_LIMIT_SECONDS} seconds"
    return done.stdout + done.stderr


def _last_error(said: str, package: Package) -> str:
    """What apt says of the package, or of all of them."""
    lines = [line.strip() for line in said.splitlines()]
    about = [line.removeprefix("E: Failed to fetch ") for line in lines if line.startswith("E: Failed to fetch ")]
    own = [line.partition(" ")[2].strip() for line in about if package.name.partition("_")[0] + "_" in line]
    errors = [line.removeprefix("E: ") for line in lines if line.startswith("E: ")]
    return (own or errors or ["it can't be fetched"])[0]


def main(folder: Path) -> None:
    """Fetch what is missing, and say what there is."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    missing = fetch(folder, base / "precast" / "test-tools")
    there = [tool.name for tool in TOOLS if tool.name not in missing]
    lines = [f"tools: {', '.join(there) or 'none'} in {folder / 'bin'}"]
    lines += [f"tools: no {name}: {reason}; what needs it is skipped" for name, reason in missing.items()]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
