"""The pages' figures are those of `benchmarks/results`."""

from __future__ import annotations

from pathlib import Path

import figures
import pytest


def pictures() -> list[str]:
    """Those that there is something to draw from for."""
    return [name for name, (claim, _) in figures.PICTURES.items() if (figures.RESULTS / f"{claim}.json").exists()]


@pytest.mark.parametrize("page", [*figures.PAGES, *pictures()])
def test_pages_say_what_was_measured(page: str) -> None:
    text = (figures.ROOT / page).read_text(encoding="utf-8")

    assert text == figures.filled(page), "run `python benchmarks/figures.py`"


def test_a_figure_that_was_changed_by_hand_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = f"{figures.result('restore')['seconds']['total']:.3f} s"
    text = (figures.ROOT / "README.md").read_text(encoding="utf-8")
    assert text.count(seconds) == 1
    (tmp_path / "README.md").write_text(text.replace(seconds, "0.001 s"), encoding="utf-8")
    monkeypatch.setattr(figures, "ROOT", tmp_path)

    assert figures.filled("README.md") == text


def test_a_page_without_marks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "README.md").write_text(figures.BEGIN, encoding="utf-8")
    monkeypatch.setattr(figures, "ROOT", tmp_path)

    with pytest.raises(ValueError, match=r"README\.md: the marks"):
        figures.filled("README.md")
