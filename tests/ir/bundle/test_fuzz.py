"""Random corruptions give an equal bundle or a BundleError, each within 1 s and 200 MB.

500 of them; `PRECAST_FUZZ=10000` in the environment runs that many.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = int(os.environ.get("PRECAST_FUZZ", "500"))


@pytest.mark.skipif(sys.platform != "linux", reason="the bounds are Linux's")
def test_random_corruptions(tmp_path: Path) -> None:
    script = Path(__file__).parents[1] / "fuzz.py"

    run = subprocess.run(
        [sys.executable, str(script), str(tmp_path), "0", str(CASES)],
        capture_output=True,
        text=True,
        timeout=CASES + 60,
    )

    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    assert report["failures"] == []
    assert sum(report["outcomes"].values()) == CASES
    # The cases reach what they are meant to reach: files, digests, decoders and the verifier.
    assert {"blob-digest", "blob-size", "layout-extra", "graph-encoding", "graph-invalid"} <= set(report["outcomes"])
