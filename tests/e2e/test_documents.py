"""The pages keep their word: links lead somewhere, pasted output is what the commands say, the README's code runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from recitation import MODEL, RECITE, run_precast

import precast
from precast.cli import main

ROOT = RECITE.parents[1]
PAGES = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.md")})
WALKTHROUGH = (ROOT / "docs" / "walkthrough.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `recite.bundle`, as the walkthrough builds it."""
    path = tmp_path_factory.mktemp("walkthrough")
    precast.build(MODEL, path / "recite.bundle")
    return path


def pasted(command: str) -> list[str]:
    """The lines that the walkthrough shows below `$ COMMAND`, without cuts and blank lines."""
    _, found, after = WALKTHROUGH.partition(f"    $ {command}\n")
    assert found, command
    block = re.match(r"(?: {4}.*\n|\n)*", after)
    assert block is not None
    lines = [line.removeprefix("    ").rstrip() for line in block.group().splitlines()]
    return [line for line in lines if line not in ("", "...")]


@pytest.mark.parametrize("view", ["--passes", "--cache", "--graph", "--weights"])
def test_views_of_the_walkthrough(view: str, folder: Path) -> None:
    shown = pasted(f"precast inspect recite.bundle {view}")

    printed = CliRunner().invoke(main, ["inspect", str(folder / "recite.bundle"), view]).stdout.splitlines()

    assert len(shown) > 3
    assert [line for line in shown if line not in printed] == []


def test_summary_of_the_walkthrough(folder: Path) -> None:
    """But for the digest, which changes with every version, and the size, to which the provenance belongs."""
    shown = pasted("precast build examples/recite/model -o recite.bundle --dump dump")

    printed = CliRunner().invoke(main, ["inspect", str(folder / "recite.bundle")]).stdout.splitlines()

    compared = [line for line in shown if line.split()[0] in ("model", "limits", "graph", "caches", "tokenizer")]
    assert len(compared) == 5
    assert [line for line in compared if line not in printed] == []


def test_answer_of_the_walkthrough(folder: Path) -> None:
    opening = "Four score and seven years ago"
    command = f'precast run recite.bundle --weights examples/recite/model --prompt "{opening}" --stop . --timeline'

    shown = pasted(command)
    arguments = ("--device", "cpu", "--prompt", opening, "--stop", ".", "--timeline")
    ran = run_precast("run", folder / "recite.bundle", "--weights", MODEL, *arguments)

    answer = ran.stdout.splitlines()
    assert shown[: len(answer)] == answer
    phases = [line.split("  ")[0] for line in shown[len(answer) :]]
    assert phases == [line.split("  ")[0] for line in ran.stderr.splitlines()]


def test_code_of_the_readme_runs(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    for name, here in (("meta-llama/Llama-3.1-8B", str(MODEL)), ("/ckpt", str(MODEL)), ("cuda", "cpu")):
        assert f'"{name}"' in code
        code = code.replace(f'"{name}"', repr(here))

    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, encoding="utf-8")

    assert ran.returncode == 0, ran.stderr
    assert "torch.Size([3, 512])" in ran.stdout
    assert "first token" in ran.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
    local = [target for target in targets if "://" not in target]

    assert [target for target in local if not (page.parent / target).exists()] == []
