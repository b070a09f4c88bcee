"""What can't be traced is refused in one line that says what was met and where; the exporter itself says nothing."""

from __future__ import annotations

from pathlib import Path

import odd_models
import pytest
import torch.export._trace as exporter
from torch.fx.experimental.symbolic_shapes import log

from precast.builder.build import build
from precast.ir.errors import BuildError


def refused(part: str, out: Path) -> str:
    with pytest.raises(BuildError) as error:
        build(odd_models.odd_config((part,)), out / "bundle")
    assert error.value.code == "export-failed"
    return error.value.message


def test_a_branch_names_its_line_and_gives_no_advice(tmp_path: Path) -> None:
    message = refused("branch", tmp_path)

    assert message.startswith(
        "OddModel can't be traced: GuardOnDataDependentSymNode: Could not guard on data-dependent expression Eq(u0, 1)"
        ', at "branch": lambda x: x if bool(x.sum() > 0) else -x, (support/odd_models.py:'
    )
    assert "\n" not in message
    for advice in ("TORCH_LOGS", "TORCHDYNAMO", "unhinted", "Size-like", "draft_export", "guard_or_false"):
        assert advice not in message


def test_a_mistake_in_the_models_code_is_its_message(tmp_path: Path) -> None:
    message = refused("raise", tmp_path)

    assert message == "OddModel can't be traced: AttributeError: 'FakeTensor' object has no attribute 'no_such_method'"


def test_nothing_reaches_the_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The exporter would print the graph up to the branch, twice."""
    refused("branch", tmp_path)

    assert capfd.readouterr() == ("", "")


def test_the_exporter_is_left_as_it_was(tmp_path: Path) -> None:
    refused("branch", tmp_path)

    assert "print" not in vars(exporter)
    assert not log.disabled
