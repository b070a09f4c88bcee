"""Claim: a bundle that a key signed is opened and verified in 50 ms without torch, imports of cryptography included.

Each figure is the median over fresh processes, in seconds of the processor, of which one thread takes all: to open the
bundle; the first check, which imports `cryptography`; and the next one. Beside them, likewise, the whole command with
and without `--key`, and cosign's, if there is one on the PATH or in `$PRECAST_TEST_TOOLS`.
"""

from __future__ import annotations

import datetime
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from support import harness, shapes

RUNS = 7
CHECK = """
import json, sys, time
from pathlib import Path
from precast.ir.artifact import Bundle
from precast.ir.trust import certificates, keys, signatures

bundle, kind, file = sys.argv[1:]
started = time.process_time()
bundle = Bundle.open(bundle)
opened = time.process_time() - started
seconds = []
for _ in range(2):
    started = time.process_time()
    pem = Path(file).read_bytes()
    who = keys.public_key(pem) if kind == "key" else certificates.authority(pem)
    signatures.require(signatures.attached_to(bundle.attached), bundle.digest, [who])
    seconds.append(time.process_time() - started)
print(json.dumps({"open": opened, "seconds": seconds, "torch": "torch" in sys.modules}))
"""


def processor_seconds(*command: str) -> float:
    """The seconds of the processor that a command takes, of all its threads: the median of some runs."""
    found = []
    for _ in range(RUNS):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return round(statistics.median(found), 3)


def signed(bundle: Path, folder: Path) -> dict[str, tuple[str, Path]]:
    """Sign the bundle with a key of each kind and by a certificate below two others: what verifies each."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
    import signers

    from precast.ir.artifact import Bundle, attach
    from precast.sign.private_keys import private_key
    from precast.sign.signing import sign

    opened = Bundle.open(bundle)
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    dates: dict[str, Any] = {"start": now - day, "end": now + day}
    root_key, between_key, leaf_key = signers.p256(), signers.p256(), signers.p256()
    root = signers.certificate("root", root_key, ca=True, **dates)
    between = signers.certificate("between", between_key, root, root_key, ca=True, **dates)
    leaf = signers.certificate("ci@acme.example", leaf_key, between, between_key, **dates)
    (folder / "ca.pem").write_bytes(signers.certificates_pem(between, root))
    made = [sign(opened, private_key(signers.private_pem(leaf_key)), certificate=signers.certificates_pem(leaf))]
    found = {"certificate, two above it": ("ca", folder / "ca.pem")}
    for name, key in (("key, ECDSA P-256", signers.p256()), ("key, Ed25519", signers.ed())):
        file = folder / f"{len(made)}.pub"
        file.write_bytes(signers.public_pem(key))
        made.append(sign(opened, private_key(signers.private_pem(key))))
        found[name] = ("key", file)
    attach(bundle, *made)
    return found


def main() -> None:
    """The 8B shape's bundle, with three signatures of which each check wants one."""
    import precast

    path = os.pathsep.join(filter(None, (os.environ.get("PRECAST_TEST_TOOLS"), os.environ.get("PATH"))))
    cosign, cli = shutil.which("cosign", path=path), str(Path(sys.executable).with_name("precast"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bundle = folder / "b"
        precast.build(shapes.write_config("llama-3.1-8b", folder / "config"), bundle)
        checks = {}
        for what, (kind, file) in signed(bundle, folder).items():
            runs = [harness.fresh_process(CHECK, str(bundle), kind, str(file)) for _ in range(RUNS)]
            assert not any(run["torch"] for run in runs)
            first, again = ([run["seconds"][i] for run in runs] for i in (0, 1))
            whole = [run["open"] + run["seconds"][0] for run in runs]
            checks[what] = {
                "first": round(statistics.median(first), 4), "again": round(statistics.median(again), 5),
                "with_open": round(statistics.median(whole), 4),
            }  # fmt: skip
        key = str(folder / "1.pub")
        commands = {
            "precast verify": processor_seconds(cli, "verify", str(bundle)),
            "precast verify --key": processor_seconds(cli, "verify", str(bundle), "--key", key),
        }
        if cosign:
            options = ("--key", key, "--insecure-ignore-tlog=true", "--local-image", str(bundle))
            commands["cosign verify --key"] = processor_seconds(cosign, "verify", *options)
    harness.write(
        harness.RESULTS / "trust.json",
        "a bundle that a key signed is opened and verified in 50 ms without torch",
        {"checks_cpu_seconds": checks, "commands_cpu_seconds": commands, "goals": {"with_open": 0.05}, "runs": RUNS},
    )


if __name__ == "__main__":
    main()
