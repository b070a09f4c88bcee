"""The small files beside a config that a bundle takes along: tokenizer, chat template, generation config.

They are taken as they are, once they are seen to be what their names say. A tokenizer that is stored in an older
form only is converted, so that a bundle that has a tokenizer has a `tokenizer.json`: the loader reads no other form.
What was checked is what is taken or converted.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import tokenizers

from precast.builder.limits import MAX_VOCABULARY
from precast.builder.source.json_object import parse_object
from precast.builder.source.small_files import GENERATION, read_small
from precast.ir import limits
from precast.ir.errors import BuildError, is_failure

FILE_NAME = "tokenizer.json"

TAKEN = (
    FILE_NAME, "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "chat_template.json",
    GENERATION,
)  # fmt: skip

_OLDER_FORMS = (("tokenizer.model",), ("vocab.json", "merges.txt"))
_ADDED = "added_tokens.json"
_OLDER = (*(file for form in _OLDER_FORMS for file in form), _ADDED)

READ = (*TAKEN, *_OLDER)
"""All files that are looked at: what a download has to bring."""

_SENTENCEPIECE = {"sentencepiece": "sentencepiece", "protobuf": "google.protobuf"}
"""What transformers reads a `tokenizer.model` with: package -> module."""


def read_files(folder: Path, name: str) -> dict[str, bytes]:
    """The files that a bundle takes from `folder`, by name. `name` is what the user called the folder.

    Raises BuildError: `tokenizer-invalid` (a file is not what its name says, or the tokenizer can't be converted),
    `config-invalid` (the generation config can't be read), `dependency-missing` (a package that the conversion needs is
    not installed).
    """
    files = _read_all(folder, TAKEN, name)
    for file in files:
        if file.endswith(".json") and file != GENERATION:
            parse_object(files[file], f"{name}/{file}", code="tokenizer-invalid")
    if FILE_NAME in files:
        _check_tokenizer(files[FILE_NAME], f"{name}/{FILE_NAME}")
        return files
    older = _read_all(folder, _OLDER, name)
    for form in _OLDER_FORMS:
        if all(file in older for file in form):
            for file in ("vocab.json", _ADDED):
                if file in older:
                    _check_ids(older[file], f"{name}/{file}")
            beside = _read_all(folder, ("config.json",), name)  # it may name the tokenizer's class
            return {FILE_NAME: _convert({**beside, **older, **files}, form, name), **files}
    return files


def _read_all(folder: Path, names: Iterable[str], name: str) -> dict[str, bytes]:
    """The content of those of these files that there are."""
    read = ((file, _read(folder / file, f"{name}/{file}")) for file in names)
    return {file: data for file, data in read if data is not None}


def _read(path: Path, what: str) -> bytes | None:
    if path.name == GENERATION:
        return read_small(path, what, most=limits.MAX_CONFIG_BYTES, code="config-invalid")
    return read_small(path, what, most=limits.MAX_TOKENIZER_BYTES, code="tokenizer-invalid")


def _check_ids(data: bytes, where: str) -> None:
    for token, number in parse_object(data, where, code="tokenizer-invalid").items():
        if type(number) is not int or not 0 <= number < MAX_VOCABULARY:
            message = f"the id of {token!r:.100} is {number!r:.100}, expected 0 to {MAX_VOCABULARY - 1}"
            raise BuildError("tokenizer-invalid", message, where=where)


def _check_tokenizer(data: bytes, where: str) -> None:
    try:
        tokenizers.Tokenizer.from_str(data.decode())
    except BaseException as error:  # the library raises plain Exception, and nothing narrower; or it panics
        if not is_failure(error):
            raise
        raise BuildError(
            "tokenizer-invalid", f"the tokenizers library {tokenizers.__version__} can't read it: {error}", where=where
        ) from error


def _convert(files: Mapping[str, bytes], form: tuple[str, ...], name: str) -> bytes:
    """The `tokenizer.json` of the tokenizer that transformers makes of these files, and of no other in the folder."""
    from transformers import AutoTokenizer

    if form == ("tokenizer.model",):
        _require_sentencepiece(name)
    stored = " and ".join(form)
    fix = "save the tokenizer as a tokenizer.json beside the config, with save_pretrained of its fast form"
    with tempfile.TemporaryDirectory() as folder:
        for file, data in files.items():
            (Path(folder) / file).write_bytes(data)
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        except BaseException as error:  # tokenizers raises plain Exception through it, or panics
            if not is_failure(error):
                raise
            message = f"transformers can't read the tokenizer in {stored}: {type(error).__name__}: {error}"
            raise BuildError("tokenizer-invalid", message, where=name, fix=fix) from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        message = f"the tokenizer in {stored} is a {type(tokenizer).__name__}, which has no tokenizer.json form"
        raise BuildError("tokenizer-invalid", message, where=name, fix=fix)
    text: str = backend.to_str()
    return text.encode()


def _require_sentencepiece(name: str) -> None:
    missing = [package for package, module in _SENTENCEPIECE.items() if not _installed(module)]
    if missing:
        raise BuildError(
            "dependency-missing",
            f"the tokenizer is stored as a tokenizer.model, which can't be read without {' and '.join(missing)}",
            where=name,
            fix=f"pip install {' '.join(missing)}, or save the tokenizer as a tokenizer.json beside the config",
        )


def _installed(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True
