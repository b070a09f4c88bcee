"""Bundles of the example model, built once a session, and the command line called in this process."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import click.testing
import pytest
from recitation import MODEL, Command

import precast
from precast.cli.main import main


@pytest.fixture(scope="module", autouse=True)
def _traced_once(request: pytest.FixtureRequest) -> None:
    """Commands begin where a build has ended, or show it. Files that don't build don't import the builder."""
    if "precast.builder.capture.capture" in sys.modules:
        request.getfixturevalue("traced_once")


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example model's bundle."""
    path = tmp_path_factory.mktemp("bundles") / "recite.bundle"
    precast.build(MODEL, path)
    return path


@pytest.fixture(scope="session")
def other_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model in bfloat16, with pages of 48 tokens and sequences of at most 200."""
    path = tmp_path_factory.mktemp("bundles") / "other.bundle"
    precast.build(MODEL, path, dtype="bfloat16", page_size=48, max_seq_len=200)
    return path


@pytest.fixture(scope="session")
def bare_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model from its config alone: a bundle without tokenizer files."""
    folder = tmp_path_factory.mktemp("bundles")
    shutil.copy(MODEL / "config.json", folder)
    precast.build(folder, folder / "bare.bundle")
    return folder / "bare.bundle"


@pytest.fixture
def command() -> Command:
    """`command("inspect", path)`: its exit code, standard output and standard error."""

    def call(*arguments: str | Path) -> click.testing.Result:
        result = click.testing.CliRunner().invoke(main, [str(argument) for argument in arguments])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
        return result

    return call
