"""The pages keep their word: links lead somewhere, pasted output is what the commands say, their Python code runs."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from recitation import MODEL, RECITE, run_precast

import precast
from precast.cli.main import main
from precast.ir.errors import CODES
from precast.loader.cache.tables import PoolUsage
from precast.loader.engine.results import EngineStats

ROOT = RECITE.parents[1]
PAGES = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.md")})
CAPTURE = (ROOT / "docs" / "capture.md").read_text(encoding="utf-8")
PYTHON_API = (ROOT / "docs" / "python_api.md").read_text(encoding="utf-8")
WALKTHROUGH = (ROOT / "docs" / "walkthrough.md").read_text(encoding="utf-8")

PRINTED = {"README.md": "first token", "docs/python_api.md": "token-out-of-range"}
"""The pages whose Python code is run, and what it prints near its end."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `recite.bundle`, as the walkthrough builds it."""
    path = tmp_path_factory.mktemp("walkthrough")
    precast.build(MODEL, path / "recite.bundle")
    return path


def pasted(command: str) -> list[str]:
    """The lines that the walkthrough shows below `$ COMMAND`, without cuts and blank lines."""
    return [line for line in indented(WALKTHROUGH, f"    $ {command}\n") if line not in ("", "...")]


def indented(text: str, opening: str) -> list[str]:
    """The indented lines that stand in the page behind `opening`, without their indent."""
    _, found, after = text.partition(opening)
    assert found, opening
    block = re.match(r"(?: {4}.*\n|\n)*", after)
    assert block is not None
    return [line.removeprefix("    ").rstrip() for line in block.group().splitlines()]


OPS = {op.partition("@")[0] for op in json.loads((ROOT / "tests" / "ir" / "schema_v1.json").read_text())["ops"]}
FOLDERS = ("api", "benchmarks", "builder", "docs", "examples", "ir", "kernels", "loader", "tests", ".ci")


MADE = ("dump/", "centred/", "application/")
"""Folders that the pages' own commands and examples make, and the media types."""
_PATH = re.compile(
    rf"({'|'.join(map(re.escape, FOLDERS))})/[\w./-]*|[\w.-]+/[\w./-]*\.(py|md|json|toml|txt|jinja|safetensors)"
)


def missing(span: str, folder: Path = ROOT) -> str | None:
    """What inline code of a page in `folder` names and is not there: a path of the repository or beside the page, a
    module or a name in one, an op."""
    if re.search(r"<[a-z]+>", span) and span.startswith(
        tuple(f"{folder}/" for folder in FOLDERS)
    ):  # `builder/passes/<stage>/`
        return None if any(ROOT.glob(re.sub(r"<\w+>", "*", span))) else span
    if _PATH.fullmatch(span):
        return None if span.startswith(MADE) or (ROOT / span).exists() or (folder / span).exists() else span
    if not re.fullmatch(r"precast(\.\w+)+", span) or span in OPS:
        return None
    names = span.split(".")[1:]
    place = ROOT if names[0] in FOLDERS else ROOT / "api"
    while names and (place / names[0]).is_dir() and not (place / f"{names[0]}.py").is_file():
        place /= names.pop(0)
    if names and (place / f"{names[0]}.py").is_file():
        place /= f"{names.pop(0)}.py"
    source = (place if place.is_file() else place / "__init__.py").read_text(encoding="utf-8")
    return span if names and not re.search(rf"\b{names[0]}\b", source) else None


@pytest.mark.parametrize(
    ("span", "found"),
    [
        ("ir/limits.py", True), ("ir/limit.py", False), ("docs/", True), ("tests/nowhere/", False), ("a/b", True),
        ("passes/nowhere.py", False), ("kernels/<family>/records.py", True), ("kernels/<family>/nowhere.py", False),
        ("builder/<room>/", True),  ("dump/03_cut.txt", True), ("recite/demo.py", False),
        ("precast.ir.errors.CODES", True), ("precast.ir.errors.CODE", False), ("precast.ir.mistakes", False),
        ("precast.load", True), ("precast.cli.main", True), ("precast.rms_norm", True), ("precast.rms_norms", False),
    ],
)  # fmt: skip
def test_what_is_missing(span: str, found: bool) -> None:
    assert (missing(span) is None) == found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_and_modules_that_pages_name_exist(page: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    spans = re.findall(r"`([^`\n]+)`", prose)
    # In headings and in the diagram of the walkthrough paths may stand without marks.
    plain = re.findall(r"^(?:#.*| {4,}.*-> .*)$", prose, flags=re.MULTILINE)
    spans += [word for line in plain for word in re.sub(r"[`,]", " ", line).split() if _PATH.fullmatch(word)]
    assert [span for span in spans if missing(span, page.parent)] == []


@pytest.mark.parametrize("view", ["--passes", "--cache"])
def test_tables_of_the_walkthrough_are_whole(view: str, folder: Path) -> None:
    shown = pasted(f"precast inspect recite.bundle {view}")

    printed = CliRunner().invoke(main, ["inspect", str(folder / "recite.bundle"), view]).stdout.splitlines()

    assert shown == [line for line in printed if line]


@pytest.mark.parametrize("view", ["--graph", "--weights"])
def test_views_of_the_walkthrough(view: str, folder: Path) -> None:
    shown = pasted(f"precast inspect recite.bundle {view}")

    printed = CliRunner().invoke(main, ["inspect", str(folder / "recite.bundle"), view]).stdout.splitlines()

    assert len(shown) > 3
    assert [line for line in shown if line not in printed] == []


@pytest.mark.parametrize("options", ["--kernels", "--kernels --target cpu", "--capture --target sm_75"])
def test_views_of_the_command_line(options: str, folder: Path) -> None:
    page = (ROOT / "docs" / "command_line.md").read_text(encoding="utf-8")
    shown = [line for line in indented(page, f"    $ precast inspect recite.bundle {options}\n") if line.strip(".")]
    printed = CliRunner().invoke(main, ["inspect", str(folder / "recite.bundle"), *options.split()]).stdout.splitlines()

    assert len(shown) > 0
    assert [line for line in shown if line not in printed] == []


def test_summary_of_the_walkthrough(folder: Path) -> None:
    """But for the digest, which changes with every version, and the size, to which the provenance belongs."""
    shown = pasted("precast build examples/recite/model -o recite.bundle --dump dump")

    printed = CliRunner().invoke(main, ["inspect", str(folder / "recite.bundle")]).stdout.splitlines()

    varies = ("bundle", "digest", "size", "built with", "provenance")
    assert [line for line in shown if not line.startswith(varies)] == [
        line for line in printed if line and not line.startswith(varies)
    ]


def test_answer_of_the_walkthrough(folder: Path) -> None:
    opening = "Four score and seven years ago"
    command = f'precast run recite.bundle --weights examples/recite/model --prompt "{opening}" --stop . --timeline'

    shown = pasted(command)
    arguments = ("--device", "cpu", "--prompt", opening, "--stop", ".", "--timeline")
    ran = run_precast("run", folder / "recite.bundle", "--weights", MODEL, *arguments)

    answer = ran.stdout.splitlines()
    assert shown[: len(answer)] == answer
    assert timed(shown[len(answer) :]) == timed(ran.stderr.splitlines())


def timed(timeline: list[str]) -> list[tuple[str, ...]]:
    """The name of each line's phase, and the names of its counters."""
    return [(line.split("  ")[0], *re.findall(r"(\w+)=", line)) for line in timeline]


@pytest.mark.parametrize("page", PRINTED)
def test_code_of_the_page_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of its Python code as one program, on the example model. What its threads raise is pytest's to report."""
    code = "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL))
    for name, here in (("Qwen/Qwen3-8B", str(MODEL)), ("/ckpt", str(MODEL)), ("cuda", "cpu")):
        assert f'"{name}"' in code
        code = code.replace(f'"{name}"', repr(here))

    monkeypatch.chdir(tmp_path)
    exec(compile(code, page, "exec"), {"__name__": "__main__"})  # noqa: S102 - it is the repository's own

    printed = capsys.readouterr().out
    assert "torch.Size([3, 512])" in printed
    assert PRINTED[page] in printed


@pytest.mark.parametrize(
    ("public", "heading"),
    [
        (precast.build, "Build"),
        (precast.load, "Load"),
        (precast.SamplingParams.__init__, "Ask"),
        (EngineStats, "Watch"),
        (PoolUsage, "Watch"),
    ],
    ids=["build", "load", "SamplingParams", "EngineStats", "PoolUsage"],
)
def test_tables_of_the_python_api_are_whole(public: Callable[..., object], heading: str) -> None:
    """What is no option stands in the text."""
    in_text = ("self", "source", "out", "bundle", "weights")
    options = [name for name in inspect.signature(public).parameters if name not in in_text]
    section = PYTHON_API.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `\.?(\w+)`", section, flags=re.MULTILINE)

    assert [name for name in options if name not in rows] == []


def test_table_of_refused_requests_is_whole() -> None:
    """The codes that the loader's sources raise as RequestError, but for that of a program that is called by hand."""
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "loader").rglob("*.py")]
    raised = {code for source in sources for code in re.findall(r'RequestError\(\s*"([\w-]+)"', source)}
    table = PYTHON_API.partition("\nWhat a request, or a call of the engine, can be refused for.")[2]

    rows = re.findall(r"^\| `([\w-]+)` \|", table, flags=re.MULTILINE)

    assert sorted(rows) == sorted(raised - {"input-mismatch"} | {"tokenizer-invalid"})


def test_codes_of_the_python_api_exist() -> None:
    rows = re.findall(r"^\| (`[\w-]+-[\w-]+`(?:, `[\w-]+`)*) \|", PYTHON_API, flags=re.MULTILINE)
    codes = [code.strip("`") for row in rows for code in row.split(", ")]

    assert len(codes) > 20
    assert [code for code in codes if code not in CODES] == []


def test_refusal_of_capture_is_what_the_build_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the dump has what the page shows of it: so many passes, these nodes."""
    model, dump = tmp_path / "centred", tmp_path / "graphs"
    model.mkdir()
    (model / "modeling.py").write_text("\n".join(indented(CAPTURE, "`centred/modeling.py` is\n")), encoding="utf-8")
    (model / "config.json").write_text("\n".join(indented(CAPTURE, "`centred/config.json`\n")), encoding="utf-8")
    command = "$ precast build centred -o centred.bundle --allow-remote-code --dump graphs\n"
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))

    ran = run_precast("build", model, "-o", tmp_path / "bundle", "--allow-remote-code", "--dump", dump)

    assert ran.stderr.splitlines() == [line for line in indented(CAPTURE, command) if line]
    (name,) = re.findall(r"Above, `(.*?)` has", CAPTURE)
    assert "aten.mean.dim](args = (%getitem_8, [1], True)" in (dump / name).read_text(encoding="utf-8")
    assert name == sorted(file.name for file in dump.iterdir())[-1]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
    local = [target for target in targets if "://" not in target]

    assert [target for target in local if not (page.parent / target).exists()] == []
