"""`make registry-demo`: from a config to a bundle that was released by way of a registry, and recites.

Built twice and compared, pushed by digest, signed, attested, read back, verified and tagged, by the recipe for
continuous integration (`examples/ci/release.sh`); then, as on another machine, pulled into an empty store, verified and
run. Each step is the command that a user would type, in a folder that was empty.

The registry is docker-registry, looked for on the PATH and in `$PRECAST_TEST_TOOLS`, else the one of the tests, in this
process. Where cosign is, it verifies the signature too, and knows nothing of Precast.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples" / "recite" / "model"
RECIPE = ROOT / "examples" / "ci" / "release.sh"
TOOLS = os.pathsep.join(filter(None, (os.environ.get("PRECAST_TEST_TOOLS"), os.environ.get("PATH"))))
OPENING_WORDS = 6
PASSPHRASE = "demo"


def main(folder: Path) -> int:
    """Each step in turn; the first that fails ends the demo with its exit code."""
    text = (MODEL.parent / "text.txt").read_text(encoding="utf-8").strip()
    opening = " ".join(text.split()[:OPENING_WORDS])
    os.environ |= {"HOME": str(folder), "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    make_keys(folder)
    os.chdir(folder)
    with registry(folder) as host:
        for name in ("first", "second"):
            run("precast", "build", str(MODEL), "-o", f"{name}.bundle")
        run("sh", str(RECIPE), "first.bundle", "second.bundle", f"{host}/demo/recite:v1")

        os.environ["PRECAST_STORE"] = str(folder / "another-machine")
        pulled = run("precast", "pull", f"{host}/demo/recite:v1", "-o", "pulled.bundle").splitlines()[0]
        run("precast", "verify", "pulled.bundle", "--key", "RELEASE.pub", "--weights", str(MODEL))
        attestations = ("--attestation", "provenance", "--attestation", "sbom")
        run("precast", "verify", "pulled.bundle", "--key", "BUILDER.pub", *attestations)
        if shutil.which("cosign", path=TOOLS) is not None:
            run("cosign", "verify", "--key", "RELEASE.pub", "--insecure-ignore-tlog=true", pulled)
        # The store has it by now: no registry is asked.
        answer = run(
            "precast", "run", f"oci://{pulled}", "--weights", str(MODEL), "--device", "cpu", "--max-tokens", "600",
            "--prompt", opening,
        )  # fmt: skip
    if opening + answer.removesuffix("\n") != text:
        print("this is not the text that the model has learned", file=sys.stderr)
        return 1
    print("\nRecited to the letter, from a bundle that was released by way of a registry.")
    return 0


def make_keys(folder: Path) -> None:
    """Two pairs of keys in the folder, one to sign and one to attest, and the environment that the recipe wants."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from signers import p256, private_pem, public_pem

    for who in ("RELEASE", "BUILDER"):
        key = p256()
        private, public = folder / f"{who}.pem", folder / f"{who}.pub"
        private.write_bytes(private_pem(key, PASSPHRASE.encode()))
        public.write_bytes(public_pem(key))
        os.environ |= {f"{who}_KEY": str(private), f"{who}_PUB": str(public)}
    os.environ |= {"PRECAST_PASSPHRASE": PASSPHRASE, "BUILDER_ID": "https://example.com/demo", "RUN_ID": "1"}


def run(program: str, *arguments: str) -> str:
    """Run the command and show it; what it printed."""
    print(f"\n$ {program} {' '.join(arguments)}", flush=True)
    found = shutil.which(program, path=f"{os.environ['PATH']}{os.pathsep}{TOOLS}") or program
    done = subprocess.run([found, *arguments], stdout=subprocess.PIPE, text=True)
    print(done.stdout, end="", flush=True)
    if done.returncode != 0:
        sys.exit(done.returncode)
    return done.stdout


@contextlib.contextmanager
def registry(folder: Path) -> Iterator[str]:
    """The host and port of a registry on this machine."""
    from fake_registry import FakeRegistry
    from real_registries import docker_registry

    program = shutil.which("docker-registry", path=TOOLS)
    if program is None:
        print("The registry is the one of the tests: docker-registry is not installed.")
        with FakeRegistry() as fake:
            yield fake.host
        return
    version = subprocess.run([program, "--version"], capture_output=True, text=True).stdout.split()[-1]
    print(f"The registry is docker-registry {version}.")
    with docker_registry(program, folder) as host:
        yield host


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        sys.exit(main(Path(name)))
