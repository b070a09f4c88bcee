"""Runs the steps of a release here: two builds of examples/recite, keys made for the occasion, a registry in memory.

What `release.sh` says is printed; the exit code is its own. Needs the packages of the development environment.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TAG = "acme/recite:v1"


def main(folder: Path) -> int:
    """Build twice, release, and verify what the tag leads to."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from fake_registry import FakeRegistry
    from signers import p256, private_pem, public_pem

    binaries = str(Path(sys.executable).parent)
    environment = os.environ | {"PATH": binaries + os.pathsep + os.environ["PATH"], "HOME": str(folder)}
    environment |= {"PRECAST_STORE": str(folder / "store"), "BUILDER_ID": "https://example.com/demo", "RUN_ID": "1"}
    for who in ("RELEASE", "BUILDER"):
        key = p256()
        private, public = folder / f"{who}.pem", folder / f"{who}.pub"
        private.write_bytes(private_pem(key, b"demo"))
        public.write_bytes(public_pem(key))
        environment |= {f"{who}_KEY": str(private), f"{who}_PUB": str(public)}
    environment["PRECAST_PASSPHRASE"] = "demo"

    def run(*command: object) -> int:
        return subprocess.run([*map(str, command)], env=environment).returncode

    for name in ("first", "second"):
        if code := run("precast", "build", ROOT / "examples" / "recite" / "model", "-o", folder / name, "--json"):
            return code
    with FakeRegistry() as registry:
        reference = f"{registry.host}/{TAG}"
        released = run("sh", Path(__file__).parent / "release.sh", folder / "first", folder / "second", reference)
        return released or run("precast", "verify", f"oci://{reference}", "--key", environment["RELEASE_PUB"])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        sys.exit(main(Path(name)))
