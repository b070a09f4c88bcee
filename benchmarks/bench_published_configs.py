"""Claim: configs as their publishers have them build at full size, or are refused by the code that they must be, with
what to do about it.

Each is built in a fresh process, from its start to its end. What each must come to is written in
`tests/configs/expected.json`, beside the configs. With names on the command line, only those are built, and take the
place of their former results; what came to something else than is expected now is left out, as not measured.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from support import harness

CONFIGS = Path(__file__).parents[1] / "tests" / "configs"
RESULTS = harness.RESULTS / "published_configs.json"

_BUILD = """
import json, resource, sys, time
started = time.perf_counter()
import precast
from precast.ir.errors import BuildError
try:
    bundle = precast.build(sys.argv[1], sys.argv[2])
    result = {"outcome": "builds", "bundle_bytes": sum(blob.size for blob in bundle.manifest.blobs)}
except BuildError as error:
    message = error.message.replace(sys.argv[1] + ": ", "")
    result = {"outcome": error.code, "message": message, "fix": error.fix}
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
print(json.dumps({**result, "seconds": round(time.perf_counter() - started, 1), "peak_gib": round(peak, 2)}))
"""


def _outcome(expected: dict[str, Any]) -> str:
    """What the whole build must come to."""
    return str(expected.get("full_build", expected["outcome"]))


def measure(name: str, expected: str, folder: Path) -> dict[str, Any]:
    """One build. `expected`: the outcome that it must have."""
    try:
        found = harness.fresh_process(_BUILD, str(CONFIGS / name), str(folder / name))
    except subprocess.CalledProcessError as error:  # a traceback, or killed for its memory
        found = {"outcome": f"exit {error.returncode}", "message": str(error.stderr).strip()[-500:]}
    return {**found, "as_expected": found["outcome"] == expected}


def main(names: list[str]) -> None:
    """All configs, or those of these names."""
    expected = json.loads((CONFIGS / "expected.json").read_text(encoding="utf-8"))
    builds = _former(expected) if names else {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names or sorted(expected):
            builds[name] = measure(name, _outcome(expected[name]), Path(folder))
            print(name, json.dumps(builds[name]), file=sys.stderr, flush=True)
    figures = {
        "configs": len(builds),
        "built": sum(each["outcome"] == "builds" for each in builds.values()),
        "refused_with_a_fix": sum(bool(each.get("fix")) for each in builds.values()),
        "not_measured": sorted(expected.keys() - builds.keys()),
        "not_as_expected": [name for name, each in builds.items() if each["as_expected"] is False],
        "builds": dict(sorted(builds.items())),
    }
    harness.write(RESULTS, "published_configs", figures)


def _former(expected: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The results that are there, of configs that must still come to the same."""
    builds = json.loads(RESULTS.read_text(encoding="utf-8"))["figures"]["builds"] if RESULTS.exists() else {}
    return {
        name: found
        for name, found in builds.items()
        if name in expected and found["outcome"] == _outcome(expected[name])
    }


if __name__ == "__main__":
    main(sys.argv[1:])
