"""precast.lock: what it names, and when it is refused."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from precast.ir.errors import TrustError
from precast.ir.weights import lock
from precast.ir.weights.lock import Locked

ONE, TWO = (f"sha256:{digit * 64}" for digit in "12")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A directory with a config."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path


def code_of(checkpoint: Path) -> str:
    with pytest.raises(TrustError) as caught:
        lock.read(checkpoint)
    return caught.value.code


def test_what_is_written_is_read(checkpoint: Path) -> None:
    lock.add(checkpoint, Locked(TWO, "oci://ghcr.io/acme/llama@" + TWO, ("sm_90",)))
    lock.add(checkpoint, Locked(ONE))

    found = lock.read(checkpoint)

    assert found.bundles == (Locked(ONE), Locked(TWO, "oci://ghcr.io/acme/llama@" + TWO, ("sm_90",)))
    assert found.config == "sha256:" + hashlib.sha256(b'{"model_type": "llama"}').hexdigest()
    assert sorted(file.name for file in checkpoint.iterdir()) == ["config.json", "precast.lock"]


def test_an_entry_replaces_that_of_its_digest(checkpoint: Path) -> None:
    lock.add(checkpoint, Locked(ONE))
    lock.add(checkpoint, Locked(ONE, "", ("sm_90",)))

    assert lock.read(checkpoint).bundles == (Locked(ONE, "", ("sm_90",)),)


def test_a_lock_of_another_config_is_refused_and_written_anew(checkpoint: Path) -> None:
    lock.add(checkpoint, Locked(ONE))
    (checkpoint / "config.json").write_text('{"model_type": "qwen3"}')

    assert code_of(checkpoint) == "lock-mismatch"
    assert lock.add(checkpoint, Locked(TWO)).bundles == (Locked(TWO),)
    assert lock.read(checkpoint).bundles == (Locked(TWO),)


def test_a_checkpoint_without_lock_or_config(tmp_path: Path) -> None:
    assert code_of(tmp_path) == "lock-invalid"
    with pytest.raises(TrustError) as caught:
        lock.add(tmp_path, Locked(ONE))
    assert caught.value.code == "lock-invalid"


def test_what_lies_where_a_lock_is_made_is_not_written_through(checkpoint: Path, tmp_path_factory: Any) -> None:
    """Whoever made the checkpoint's directory can't have a file elsewhere overwritten."""
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "file"
    elsewhere.write_text("mine")
    (checkpoint / f".precast.lock.{os.getpid()}").symlink_to(elsewhere)
    (checkpoint / "precast.lock").symlink_to(elsewhere.with_name("none"))

    lock.add(checkpoint, Locked(ONE))

    assert elsewhere.read_text() == "mine"
    assert lock.read(checkpoint).bundles == (Locked(ONE),)
    assert sorted(file.name for file in checkpoint.iterdir()) == ["config.json", "precast.lock"]
    assert [file.name for file in elsewhere.parent.iterdir()] == ["file"]


@pytest.mark.parametrize(
    "changed",
    [
        {"version": 2},
        {"surprise": 1},
        {"bundles": [{"digest": "sha256:1"}]},
        {"bundles": [{"digest": ONE, "surprise": 1}]},
        {"bundles": None},
        {"bundles": [{"digest": ONE, "reference": "oci://ghcr.io/a\noci://ghcr.io/b"}]},
        {"bundles": [{"digest": ONE, "reference": "--help"}]},
        {"bundles": [{"digest": ONE, "targets": ["sm_90 sm_80"]}]},
    ],
)
def test_a_lock_is_read_strictly(checkpoint: Path, changed: dict[str, object]) -> None:
    lock.add(checkpoint, Locked(ONE))
    written = json.loads((checkpoint / "precast.lock").read_text())
    (checkpoint / "precast.lock").write_text(json.dumps(written | changed))

    assert code_of(checkpoint) == "lock-invalid"


@pytest.mark.parametrize(
    ("targets", "target", "expected"),
    [
        ((), None, True),
        ((), "sm_90", True),
        (("sm_90",), "sm_90", True),
        (("sm_80",), "sm_90", False),
        (("sm_80",), None, True),
    ],
)
def test_which_bundles_are_for_a_target(targets: tuple[str, ...], target: str | None, expected: bool) -> None:
    assert Locked(ONE, "", targets).is_for(target) is expected
