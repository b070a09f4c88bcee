"""Every reader of what strangers write gives clean errors, within 1 s and 200 MB, over its corpus and random mutations.

The same seed makes the same mutations. `make fuzz` is guided by coverage and takes an hour; `make fuzz-random
COUNT=1000000` corrupts a bundle that often.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bounds import finding
from targets import TARGETS

from precast.ir.errors import BundleError

SCRIPT = Path(__file__).parent / "run.py"
CORPUS = SCRIPT.parent / "corpus"
NEED_TRANSFORMERS = ("config", "generation-config", "tokenizer-model", "tokenizer-vocab")
"""These share a process: importing transformers takes longer than their mutations."""
REFUSED = {
    "bundle-graph": {"states": "manifest-invalid"},
    "graph-load": {"latent": "graph-invalid", "states": "graph-invalid"},
}
"""Files of the corpus that are not accepted: the readers beyond these errors are reached by others."""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the bounds are Linux's")


def run(*arguments: str) -> Any:
    """What a verb of the script prints. Findings make its exit code 1, and are compared by the caller."""
    done = subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=900)
    assert done.returncode in (0, 1), done.stderr
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "names",
    [NEED_TRANSFORMERS, *((name,) for name in TARGETS if name not in NEED_TRANSFORMERS)],
    ids=" ".join,
)
def test_readers_give_clean_errors(names: tuple[str, ...]) -> None:
    reports = run("random", "100", "1", *names)

    assert list(reports) == list(names)
    for name, report in reports.items():
        assert report["findings"] == {}, "\n".join(report["findings"].values())
        assert report["refused"] == REFUSED.get(name, {})
        assert report["tried"] > 100


def test_random_corruptions_of_a_bundle_give_clean_errors() -> None:
    report = run("bundles", "0", "500")

    assert report["failures"] == []
    assert sum(report["outcomes"].values()) == 500
    # The cases reach what they are meant to reach: files, digests, decoders and the verifier.
    assert {"blob-digest", "blob-size", "layout-extra", "graph-encoding", "graph-invalid"} <= set(report["outcomes"])


def test_each_target_has_a_corpus_and_the_corpus_is_small() -> None:
    files = [file for file in CORPUS.rglob("*") if file.is_file()]

    assert {target.corpus for target in TARGETS.values()} == {folder.name for folder in CORPUS.iterdir()}
    assert max(file.stat().st_size for file in files) < 8192


# --- what counts as a finding ------------------------------------------------------------------------------------


def raise_(error: BaseException) -> None:
    raise error


def endless() -> None:
    while True:
        pass


def test_a_clean_error_is_no_finding() -> None:
    assert finding(lambda: raise_(BundleError("graph-invalid", "it is"))) is None
    assert finding(lambda: None) is None


@pytest.mark.parametrize("error", [KeyError("x"), RecursionError(), AssertionError(), BaseException("a panic")])
def test_any_other_error_is_one(error: BaseException) -> None:
    found = finding(lambda: raise_(error))

    assert found is not None
    assert found.key.startswith(f"{type(error).__name__} in tests/fuzz/test_fuzz.py:raise_")
    assert "in raise_" in found.report


def test_too_much_time_or_memory_is_one() -> None:
    slow, large = finding(endless, 0.01), finding(lambda: bytearray(1 << 30))

    assert slow is not None
    assert slow.key.startswith("OvertimeError")
    assert large is not None
    assert large.key.startswith("MemoryError")
