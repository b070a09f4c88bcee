"""`make models`: the lines that it prints, and the page that it writes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from model_sweep import Row, worlds_text
from models_page import PAGE, green_types, line, main, oldest_of, page, with_columns, with_oldest, with_rows

from precast.builder.versions import OLDEST
from precast.check.shards import Proof

ROWS = (
    Row("b", "BForCausalLM", "red", builds=True, share=0.5, reason="logits differ by 1e-02 | <far>"),
    Row("a", "AForCausalLM", "green", builds=True, logits=True, tokens=True, share=0.9876),
    Row("c", "CModel", "out of scope", reason="an encoder"),
)


def test_page_has_a_row_for_each_type_by_name() -> None:
    found = page(ROWS)

    assert found.splitlines()[-3:] == [
        "| `a` | AForCausalLM | green | yes | yes | yes | 98.8 % |  |  |  |  |",
        "| `b` | BForCausalLM | red | yes | no | no | 50.0 % |  |  |  | logits differ by 1e-02 \\| &lt;far> |",
        "| `c` | CModel | out of scope |  |  |  |  |  |  |  | an encoder |",
    ]
    assert "has 3 model types" in found
    assert "**1 is green**, 1 is not, 1 is out of scope" in found
    assert "**2 are green**, 0 are not" in page((ROWS[1], Row("d", "D", "green")))


def test_green_types_are_read_back() -> None:
    assert green_types(page(ROWS)) == ("a",)


def test_line_of_a_row() -> None:
    assert line(ROWS[1]).split() == ["a", "green", "98.8", "%"]
    assert line(ROWS[2]).endswith("out of scope           an encoder")


def test_columns_are_filled_and_nothing_else_changes() -> None:
    before, begin = page(ROWS), "| `a` | AForCausalLM | green | yes | yes | yes | 98.8 % |"

    split = with_columns(before, [Row("a", "", "green", ranks="2, 4; experts 2", whole="attention, other")], "split")
    both = with_columns(split, [Row("a", "", "green", without_torch="yes")], "resolve")

    assert split.splitlines()[-3] == f"{begin} 2, 4; experts 2 | attention, other |  |  |"
    assert both.splitlines()[-3] == f"{begin} 2, 4; experts 2 | attention, other | yes |  |"
    assert (
        with_columns(with_columns(both, [Row("a", "", "green")], "split"), [Row("a", "", "green")], "resolve") == before
    )


def test_a_row_is_replaced_and_the_counts_follow() -> None:
    now = Row("b", "BForCausalLM", "green", builds=True, logits=True, tokens=True, share=0.5)
    more = Row("d", "DForCausalLM", "red", reason="new")

    assert with_rows(page(ROWS), [now, more]) == page((now, ROWS[1], ROWS[2], more))


def test_chosen_types_are_written_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("models_page.PAGE", tmp_path / "models.md")
    (tmp_path / "models.md").write_text(page(ROWS), encoding="utf-8")

    ran = CliRunner().invoke(main, ["--write", "bart"])

    assert ran.exit_code == 0
    expected = page((*ROWS, Row("bart", "BartForCausalLM", "out of scope", reason="an encoder-decoder")))
    assert (tmp_path / "models.md").read_text(encoding="utf-8") == expected


def test_the_oldest_version_is_said_of_green_types_and_stays() -> None:
    written = page([*ROWS, *(Row(name, "D", "green") for name in "def")])
    found = [Row("a", "A", "green"), Row("d", "D", "red", reason="export-failed: x | y"), Row("b", "B", "green")]

    said = with_oldest(written, "5.17.0", found)

    assert "With 5.17.0, the oldest that is supported, 1 of the 4 green" in said
    assert "\n- it has no `e` and `f`\n- `d`: export-failed: x \\| y\n" in said
    assert with_oldest(said, "5.17.0", found) == said
    assert with_rows(said, []) == said
    assert page([*ROWS, *(Row(name, "D", "green") for name in "def")], oldest_of(said)) == said
    assert said.replace(oldest_of(said), "") == written
    assert "green; those that aren't:\n\n- none\n" in with_oldest(page(ROWS), "5.17.0", found[:1])


def test_the_page_says_which_types_the_oldest_version_builds() -> None:
    assert f"With {'.'.join(map(str, OLDEST))}." in oldest_of(PAGE.read_text(encoding="utf-8"))


def test_another_version_is_not_taken_for_the_oldest() -> None:
    ran = CliRunner().invoke(main, ["--oldest"])

    assert ran.exit_code == 2
    assert re.search(r"transformers 5\.\S+ is installed, expected 5\.17", ran.stderr)


def test_worlds_in_words() -> None:
    held = [Proof(2, 1, 1e-6, (), 1), Proof(4, 1, 1e-6, (), 1), Proof(4, 2, 1e-6, (), 1)]

    assert worlds_text(held) == "2, 4; experts 2"
    assert worlds_text(held[:2]) == "2, 4"
    assert worlds_text([]) == "1"
    assert worlds_text([*held, Proof(8, 2, 0.25, (), 1)]) == (
        "no: 8 ranks, and the experts into 2 parts, logits differ by 2e-01"
    )


def test_text_of_the_page_is_what_is_written_today() -> None:
    """But for its numbers, which are of the day when it was written."""
    written = PAGE.read_text(encoding="utf-8")

    assert words(written) == words(with_rows(written, []))


def words(text: str) -> str:
    return re.sub(r"[\d.]+", "0", text.partition("|---")[0])


def test_chosen_types_are_printed_and_write_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("models_page.PAGE", tmp_path / "models.md")

    ran = CliRunner().invoke(main, ["bart"])

    assert ran.exit_code == 0
    assert ran.stdout.split() == ["bart", "out", "of", "scope", "an", "encoder-decoder"]
    assert not (tmp_path / "models.md").exists()


def test_all_types_write_the_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("models_page.PAGE", tmp_path / "models.md")
    monkeypatch.setattr("models_page.model_types", lambda: ("bart",))

    ran = CliRunner().invoke(main, [])

    assert ran.exit_code == 0
    assert "| `bart` | BartForCausalLM | out of scope |" in (tmp_path / "models.md").read_text(encoding="utf-8")


def test_unknown_type_is_refused() -> None:
    ran = CliRunner().invoke(main, ["llam"])

    assert ran.exit_code == 2
    assert "has no causal language model of type llam" in ran.stderr
