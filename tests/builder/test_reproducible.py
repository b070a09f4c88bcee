"""One config, one digest: whatever the process's hash seed, directory, clock, language or number of threads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import families
import pytest
from transformers.convert_slow_tokenizer import bytes_to_unicode

from precast.builder.build import build

# Several model directories in one process: importing everything takes longer than the builds.
BUILD = """
import sys, time
shift = int(sys.argv[1])
now, calendar = time.time, time.gmtime
time.time = lambda: now() + shift
time.gmtime = lambda seconds=None: calendar(time.time() if seconds is None else seconds)

from precast.builder.build import build
for name in sys.argv[2:]:
    bundle = build(name, name + ".bundle", dtype="bfloat16")
    print(bundle.digest, bundle.provenance["built_at"], bundle.provenance["source"])
"""

VARIANTS = ("llama-tied-bias", "gemma2", "phi3-longrope", "gpt2")


def _write_models(folder: Path) -> None:
    for variant in VARIANTS:
        families.make_config(variant).save_pretrained(folder / variant)
    letters = {letter: index for index, letter in enumerate(bytes_to_unicode().values())}
    (folder / "gpt2" / "vocab.json").write_text(json.dumps({**letters, "he": 256, "<|endoftext|>": 257}))
    (folder / "gpt2" / "merges.txt").write_text("#version: 0.2\nh e\n")
    (folder / "llama-tied-bias" / "chat_template.jinja").write_text("{{ messages }}")


def _built_elsewhere(folder: Path, *, shift: int, **environment: str) -> list[list[str]]:
    """Digest, time and source of each bundle, built in a fresh process."""
    answer = subprocess.run(
        [sys.executable, "-c", BUILD, str(shift), *VARIANTS],
        cwd=folder,
        env={**os.environ, **environment},
        check=True,
        capture_output=True,
        text=True,
    )
    return [line.split() for line in answer.stdout.splitlines()]


@pytest.mark.slow
def test_two_processes_build_the_same(tmp_path: Path) -> None:
    here, there = tmp_path / "a", tmp_path / "somewhere" / "else"
    for folder in (here, there):
        folder.mkdir(parents=True)
        _write_models(folder)

    first = [build(here / name, here / f"{name}.bundle", dtype="bfloat16") for name in VARIANTS]
    second = _built_elsewhere(
        there, shift=400_000_000,
        PYTHONHASHSEED="2", TZ="Asia/Kathmandu", LC_ALL="C", OMP_NUM_THREADS="2", HOME=str(tmp_path / "b"),
    )  # fmt: skip

    assert [bundle.digest for bundle in first] == [line[0] for line in second]
    assert len({bundle.digest for bundle in first}) == len(VARIANTS)
    # the processes did differ: their clocks are years apart
    assert str(first[0].provenance["built_at"])[:4] != second[0][1][:4]
