"""Only regular files of bounded size are read beside a config: whatever else has their name is refused at once."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import families
import pytest

from precast.builder.source import quantised_files, tokenizer_files
from precast.builder.source.source import open_source
from precast.ir import limits
from precast.ir.errors import BuildError

CONFIGS = ("config.json", "generation_config.json", *quantised_files.FILES)
TOKENIZERS = tuple(file for file in tokenizer_files.READ if file not in CONFIGS)
CODES = dict.fromkeys(CONFIGS, "config-invalid") | dict.fromkeys(TOKENIZERS, "tokenizer-invalid")
"""All files that a build reads, and the code of the refusal."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model directory with a config and nothing else."""
    families.make_config("llama").save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    return tmp_path


def refused(folder: Path, file: str, message: str) -> None:
    with pytest.raises(BuildError, match=message) as error:
        open_source(folder)
    assert error.value.code == CODES[file]
    assert file in error.value.message


def pipe(path: Path) -> None:
    os.mkfifo(path)


def directory(path: Path) -> None:
    path.mkdir()


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def unix_socket(path: Path) -> None:
    where = os.open(path.parent, os.O_RDONLY)  # addresses of sockets are short, and paths of tests are not
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(f"/proc/self/fd/{where}/{path.name}")
    os.close(where)


@pytest.mark.parametrize("make", [pipe, directory, device])
@pytest.mark.parametrize("file", CODES)
def test_what_is_no_file_is_refused_and_never_waited_for(file: str, make: Callable[[Path], None], folder: Path) -> None:
    (folder / file).unlink(missing_ok=True)
    make(folder / file)

    refused(folder, file, "can't be read: expected a regular file, found a directory, pipe, socket or device")


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs Linux's /proc")
def test_a_socket(folder: Path) -> None:
    unix_socket(folder / "tokenizer.json")

    refused(folder, "tokenizer.json", "can't be read: ")


@pytest.mark.parametrize("file", CODES)
def test_a_pointer_of_git_lfs(file: str, folder: Path) -> None:
    (folder / file).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")

    refused(folder, file, "is a pointer of Git LFS(.|\n)*")


def test_a_gguf_file_is_no_model(folder: Path) -> None:
    (folder / "model.gguf").write_bytes(b"GGUF")
    (folder / "config.json").unlink()

    for source in (folder / "model.gguf", folder):
        with pytest.raises(BuildError) as error:
            open_source(source)
        assert error.value.code == "config-missing"
        assert "GGUF file" in str(error.value)
        assert "was made" in str(error.value.fix)


@pytest.mark.parametrize("file", CODES)
def test_a_file_beyond_all_sizes(file: str, folder: Path) -> None:
    """Its bytes are a hole: nobody has memory for them."""
    with (folder / file).open("wb") as stream:
        stream.truncate(1 << 40)

    most = limits.MAX_CONFIG_BYTES if file in CONFIGS else limits.MAX_TOKENIZER_BYTES
    refused(folder, file, f"has more than {most} bytes")


@pytest.mark.parametrize("file", CODES)
def test_a_link_that_leads_nowhere_is_no_file(file: str, folder: Path) -> None:
    (folder / file).unlink(missing_ok=True)
    (folder / file).symlink_to(folder / "nowhere")

    if file == "config.json":
        with pytest.raises(BuildError, match=r"has no config\.json") as error:
            open_source(folder)
        assert error.value.code == "config-missing"
    else:
        assert file not in open_source(folder).files


def test_a_link_to_a_file_is_followed(folder: Path) -> None:
    """The hub's cache has nothing else."""
    (folder / "config.json").rename(folder / "blob")
    (folder / "config.json").symlink_to("blob")

    assert open_source(folder).config.hidden_size == 48


@pytest.mark.parametrize("file", ["config.json", "model"])
def test_a_pipe_as_the_source(file: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / file)

    with pytest.raises(BuildError, match=r"expected a (regular file|config.json or a directory with one)"):
        open_source(tmp_path / file)


def test_a_config_that_leads_to_another_file(folder: Path) -> None:
    """transformers would read that one, of which nothing was checked."""
    text = (folder / "config.json").read_text()
    (folder / "config.4.0.0.json").write_text(text)
    (folder / "config.json").write_text(text.replace("{", '{"configuration_files": ["config.4.0.0.json"],', 1))

    refused(folder, "config.json", "leads to other files")
