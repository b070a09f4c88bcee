"""`precast models`: its lines, its fields, and the page that it writes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from recitation import Command

from precast.check.coverage import Row
from precast.check.models_page import green_types, line, page

ROWS = (
    Row("b", "BForCausalLM", "red", builds=True, share=0.5, reason="logits differ by 1e-02 | <far>"),
    Row("a", "AForCausalLM", "green", builds=True, logits=True, tokens=True, share=0.9876),
    Row("c", "CModel", "out of scope", reason="an encoder"),
)


def test_page_has_a_row_for_each_type_by_name() -> None:
    found = page(ROWS)

    assert found.splitlines()[-3:] == [
        "| `a` | AForCausalLM | green | yes | yes | yes | 98.8 % |  |",
        "| `b` | BForCausalLM | red | yes | no | no | 50.0 % | logits differ by 1e-02 \\| &lt;far> |",
        "| `c` | CModel | out of scope |  |  |  |  | an encoder |",
    ]
    assert "has 3 model types" in found
    assert "**1 are green**, 1 are not, 1 are out of scope" in found


def test_green_types_are_read_back() -> None:
    assert green_types(page(ROWS)) == ("a",)


def test_line_of_a_row() -> None:
    assert line(ROWS[1]).split() == ["a", "green", "98.8", "%"]
    assert line(ROWS[2]).endswith("out of scope           an encoder")


def test_command_prints_and_writes(tmp_path: Path, command: Command) -> None:
    ran = command("models", "--only", "bart", "--write", tmp_path / "models.md")
    as_json = command("models", "--only", "bart", "--json")

    assert ran.exit_code == 0
    assert ran.stdout.split() == ["bart", "out", "of", "scope", "an", "encoder-decoder"]
    assert "| `bart` | BartForCausalLM | out of scope |" in (tmp_path / "models.md").read_text(encoding="utf-8")
    (row,) = json.loads(as_json.stdout)["models"]
    assert (row["model_type"], row["status"], row["reason"]) == ("bart", "out of scope", "an encoder-decoder")


@pytest.mark.parametrize("place", ["no/models.md", "."])
def test_page_that_cannot_be_written_is_refused_before_the_work(place: str, tmp_path: Path, command: Command) -> None:
    ran = command("models", "--only", "bart", "--write", tmp_path / place)

    assert (ran.exit_code, ran.stdout) == (1, "")
    assert f"{tmp_path / place}: the page can't be written: " in ran.stderr
    assert ran.stderr.endswith("\n  code: write-failed\n")


def test_page_is_left_alone_by_what_fails(tmp_path: Path, command: Command) -> None:
    (tmp_path / "old.md").write_text("old")

    codes = [command("models", "--only", "llam", "--write", tmp_path / name).exit_code for name in ("old.md", "new.md")]

    assert codes == [1, 1]
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("old.md", "old")]


@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full")
def test_page_on_a_full_disk(command: Command) -> None:
    ran = command("models", "--only", "bart", "--write", "/dev/full")

    assert ran.exit_code == 1
    assert "/dev/full: the page can't be written: No space left on device" in ran.stderr


def test_unknown_type_is_refused(command: Command) -> None:
    ran = command("models", "--only", "llam")

    assert ran.exit_code == 1
    assert "has no causal language model of type llam" in ran.stderr
