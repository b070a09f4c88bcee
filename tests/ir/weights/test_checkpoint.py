"""Headers of checkpoints: what is found, and a clear error for each thing that is wrong."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from precast.ir import limits
from precast.ir.errors import WeightsError
from precast.ir.weights.checkpoint import CheckpointFiles, StoredTensor


def safetensors(tensors: dict[str, tuple[str, list[int], bytes]], **more: Any) -> bytes:
    """A safetensors file, written by the book."""
    header: dict[str, Any] = dict(more)
    position = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + len(data)]}
        position += len(data)
    text = json.dumps(header, indent=1).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values())


def sharded(root: Path, shards: dict[str, dict[str, tuple[str, list[int], bytes]]]) -> None:
    """Shards and their index."""
    for name, tensors in shards.items():
        (root / name).write_bytes(safetensors(tensors))
    index(root, {tensor: name for name, tensors in shards.items() for tensor in tensors})


def index(root: Path, weight_map: dict[str, str]) -> None:
    text = json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map})
    (root / "model.safetensors.index.json").write_text(text)


def refusal(root: Path) -> WeightsError:
    with pytest.raises(WeightsError) as caught:
        CheckpointFiles.open(root)
    assert str(root) in str(caught.value)
    return caught.value


A, B = ("F32", [2, 3], bytes(range(24))), ("BF16", [4], b"abcdefgh")


def test_single_file(tmp_path: Path) -> None:
    data = safetensors({"a": A, "b": B}, __metadata__={"format": "pt"})
    (tmp_path / "model.safetensors").write_bytes(data)

    found = CheckpointFiles.open(tmp_path).tensors

    start = len(data) - 32
    assert found == {
        "a": StoredTensor("model.safetensors", "float32", (2, 3), start, 24),
        "b": StoredTensor("model.safetensors", "bfloat16", (4,), start + 24, 8),
    }
    assert data[start : start + 24] == A[2]


def test_file_instead_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(safetensors({"a": A}))

    assert list(CheckpointFiles.open(tmp_path / "x.safetensors").tensors) == ["a"]


def test_shards(tmp_path: Path) -> None:
    sharded(tmp_path, {"model-00001-of-00002.safetensors": {"a": A}, "model-00002-of-00002.safetensors": {"b": B}})
    (tmp_path / "stale.safetensors").write_bytes(safetensors({"a": A}))

    found = CheckpointFiles.open(str(tmp_path)).tensors

    assert {name: tensor.file for name, tensor in found.items()} == {
        "a": "model-00001-of-00002.safetensors",
        "b": "model-00002-of-00002.safetensors",
    }


def test_single_file_comes_before_an_index(tmp_path: Path) -> None:
    sharded(tmp_path, {"x.safetensors": {"a": A}})
    (tmp_path / "model.safetensors").write_bytes(safetensors({"b": B}))

    assert list(CheckpointFiles.open(tmp_path).tensors) == ["b"]


def test_files_of_other_names(tmp_path: Path) -> None:
    (tmp_path / "part-2.safetensors").write_bytes(safetensors({"b": B}))
    (tmp_path / "part-1.safetensors").write_bytes(safetensors({"a": A}))

    assert list(CheckpointFiles.open(tmp_path).tensors) == ["a", "b"]


def test_links_of_the_hub_cache(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "blobs" / "0123").write_bytes(safetensors({"a": A}))
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blobs/0123")

    assert list(CheckpointFiles.open(tmp_path / "snapshot").tensors) == ["a"]


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [
        ("F8_E4M3", "float8_e4m3fn"),
        ("F8_E5M2", "F8_E5M2"),
        ("U16", "U16"),
        ("BOOL", "bool"),
        ("I64", "int64"),
        ("NEW_TYPE", "NEW_TYPE"),
    ],
)
def test_dtypes(stored: str, dtype: str, tmp_path: Path) -> None:
    size = {"F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "BOOL": 1, "I64": 8}.get(stored, 3)
    (tmp_path / "model.safetensors").write_bytes(safetensors({"a": (stored, [1], bytes(size))}))

    assert CheckpointFiles.open(tmp_path).tensors["a"].dtype == dtype


def test_nothing_there(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none").code == "checkpoint-missing"


def test_empty_directory(tmp_path: Path) -> None:
    error = refusal(tmp_path)

    assert error.code == "checkpoint-missing"
    assert "an empty directory" in error.message


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.gguf", "consolidated.00.pth"])
def test_other_formats_say_how_to_convert(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"")
    (tmp_path / "config.json").write_bytes(b"{}")

    error = refusal(tmp_path)

    assert error.code == "checkpoint-format"
    assert name in error.message
    assert "save_pretrained" in str(error.fix)


def test_missing_shards_are_all_named(tmp_path: Path) -> None:
    index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"})

    error = refusal(tmp_path)

    assert error.code == "checkpoint-shard-missing"
    assert "2 of 2" in error.message
    assert "one.safetensors, two.safetensors" in error.message


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "sub/model.safetensors", "..", ""])
def test_shards_lie_beside_the_index(name: str, tmp_path: Path) -> None:
    index(tmp_path, {"a": name})

    assert refusal(tmp_path).code == "checkpoint-index"


@pytest.mark.parametrize("text", ["", "[]", "{", '{"weight_map": 1}', "{}", "[" * 100_000, '{"weight_map": {"a": 1}}'])
def test_index_that_does_not_parse(text: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)

    assert refusal(tmp_path).code == "checkpoint-index"


def test_index_that_contradicts_its_shards(tmp_path: Path) -> None:
    sharded(tmp_path, {"one.safetensors": {"a": A}, "two.safetensors": {"b": B}})
    index(tmp_path, {"a": "two.safetensors", "b": "two.safetensors", "c": "one.safetensors"})

    error = refusal(tmp_path)

    assert error.code == "checkpoint-index"
    assert "2 tensors" in error.message
    assert "a in two.safetensors, c in one.safetensors" in error.message


@pytest.mark.parametrize("indexed", [True, False])
def test_tensor_in_two_files(indexed: bool, tmp_path: Path) -> None:
    (tmp_path / "one.safetensors").write_bytes(safetensors({"a": A}))
    (tmp_path / "two.safetensors").write_bytes(safetensors({"a": A, "b": B}))
    if indexed:
        index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})

    error = refusal(tmp_path)

    assert error.code == "checkpoint-duplicate"
    assert "a in one.safetensors and two.safetensors" in error.message


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes


def file_of(header: Any, size: int = 8) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(size)


HEADERS: list[tuple[str, bytes, str]] = [
    ("empty file", b"", "at least 8 bytes"),
    ("cut in the length", b"\1\0\0", "at least 8 bytes"),
    ("cut in the header", file_of({"a": entry()})[:20], "the header ends at byte"),
    ("cut in the header's last byte", file_of({"a": entry()}, 0)[:-1], "the header ends at byte"),
    ("cut in the tensors", file_of({"a": entry()})[:-1], "the last tensor ends at byte"),
    ("more than the tensors", file_of({"a": entry()}) + b"\0", "the last tensor ends at byte"),
    ("header above the limit", struct.pack("<Q", 10**12) + bytes(100), "at most 33554432"),
    ("not JSON", file_of(b"\x80\x02}q\x00."), "doesn't parse"),
    ("a list", file_of([]), "doesn't parse"),
    ("nested deep", file_of(b'{"a":' + b"[" * 100_000), "doesn't parse"),
    ("metadata that is no text", file_of({"__metadata__": {"a": 1}, "a": entry()}), "doesn't parse"),
    ("unknown field", file_of({"a": entry(strides=[1])}), "doesn't parse"),
    ("missing field", file_of({"a": {"dtype": "F32", "shape": [2]}}), "doesn't parse"),
    ("float in the shape", file_of({"a": entry(shape=[2.0])}), "doesn't parse"),
    ("number of 5000 digits", file_of(b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,8]}}'),
     "doesn't parse"),
    ("20 sizes of 2^62", file_of({"a": entry(shape=[2**62] * 20)}), "length <= 16"),
    ("16 sizes of 2^62", file_of({"a": entry(shape=[2**62] * 16)}), "takes more than 2^61 bytes, found 8"),
    ("200,000 dimensions", file_of({"a": entry(shape=[1] * 200_000)}), "length <= 16"),
    ("size beyond 63 bits", file_of({"a": entry(shape=[2**63])}), "doesn't parse"),
    ("bytes beyond 63 bits", file_of({"a": entry(data_offsets=[0, 2**70])}), "doesn't parse"),
    ("long name", file_of({"n" * 10_000: entry()}), "has more than 1024 characters"),
    ("long dtype", file_of({"a": entry(dtype="F" * 10_000)}), "length <= 32"),
    ("many tensors", file_of(dict.fromkeys(map(str, range(limits.MAX_FILE_TENSORS + 1)), entry())), "at most 131072"),
    ("overlap", file_of({"a": entry(), "b": entry(data_offsets=[4, 12])}, 12), "overlap"),
    ("same bytes twice", file_of({"a": entry(), "b": entry()}), "overlap"),
    ("hole", file_of({"a": entry(), "b": entry(data_offsets=[12, 20])}, 20), "leave a hole"),
    ("hole at the start", file_of({"a": entry(data_offsets=[4, 12])}, 12), "leave a hole"),
    ("backwards", file_of({"a": entry(data_offsets=[0, -8])}), "negative"),
    ("negative size", file_of({"a": entry(shape=[-2])}), "negative"),
    ("wrong size", file_of({"a": entry(shape=[3])}), "takes 12 bytes, found 8"),
    ("bytes of no element", file_of({"a": entry(shape=[1])}), "takes 4 bytes, found 8"),
    ("many objects in one entry", file_of(b'{"a":{' + b'"x":{},' * (2 * limits.MAX_FILE_TENSORS) + b'"x":{}}}'),
     "more than 131072 tensors"),
    ("a name twice", file_of(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
                             b'"a":{"dtype":"F32","shape":[1],"data_offsets":[8,12]}}', 12), "leave a hole"),
]  # fmt: skip


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 4976698672\n"


@pytest.mark.parametrize(
    ("data", "code", "message", "fix"),
    [
        (LFS, "checkpoint-header", "it is a pointer of Git LFS", "git lfs pull"),
        (b"GGUF" + bytes(60), "checkpoint-format", "it is a GGUF file, expected a safetensors file", "gguf_file=NAME"),
        (b"PK\x03\x04" + bytes(60), "checkpoint-format", "it is a file of torch.save", "save_pretrained"),
        (b'{"model_type": "llama"}', "checkpoint-format", "it is JSON text", "pass the checkpoint's directory"),
    ],
)
@pytest.mark.parametrize("alone", [False, True], ids=["in its folder", "alone"])
def test_files_of_another_kind(data: bytes, code: str, message: str, fix: str, alone: bool, tmp_path: Path) -> None:
    """What would be a header of billions of bytes."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(data)

    error = refusal(file if alone else tmp_path)

    assert error.code == code
    assert error.message.startswith(message)
    assert error.where == str(file)
    assert fix in str(error.fix)


@pytest.mark.parametrize(("data", "message"), [row[1:] for row in HEADERS], ids=[row[0] for row in HEADERS])
def test_headers(data: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)

    error = refusal(tmp_path)

    assert error.code == "checkpoint-header"
    assert message in error.message
    assert "model.safetensors" in str(error.where)
    assert len(str(error)) < 2000


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "x.safetensors"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_only_regular_files_are_opened(make: Callable[[Path], None], name: str, tmp_path: Path) -> None:
    make(tmp_path / name)

    assert refusal(tmp_path).code in ("checkpoint-read", "checkpoint-missing")


def test_names_are_printed_in_one_line_and_cut(tmp_path: Path) -> None:
    forged = "a\n  code: fine\x1b[31m" + "x" * 900
    (tmp_path / "one.safetensors").write_bytes(safetensors({forged: A}))
    (tmp_path / "two.safetensors").write_bytes(safetensors({forged: A}))

    text = str(refusal(tmp_path))

    assert r"a\n  code: fine\x1b[31m" in text
    assert " characters)" in text
    assert [line for line in text.splitlines() if "code:" in line and "fine" not in line] == [
        "  code: checkpoint-duplicate"
    ]
    assert "\x1b" not in text


def test_tensors_and_files_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.safetensors").write_bytes(safetensors({name: A}))
    monkeypatch.setattr(limits, "MAX_CHECKPOINT_TENSORS", 2)
    assert len(CheckpointFiles.open(tmp_path).tensors) == 2

    monkeypatch.setattr(limits, "MAX_CHECKPOINT_TENSORS", 1)
    assert "more than 1 tensors" in refusal(tmp_path).message
    index(tmp_path, {f"t{i}": "one.safetensors" for i in range(3)})
    assert "more than 1 tensors" in refusal(tmp_path).message
    (tmp_path / "model.safetensors.index.json").unlink()

    monkeypatch.setattr(limits, "MAX_CHECKPOINT_FILES", 1)
    assert "more than 1 files" in refusal(tmp_path).message


def test_an_index_of_any_size_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one.safetensors").write_bytes(safetensors({"one": A}))
    index(tmp_path, {"one": "one.safetensors"})
    size = (tmp_path / "model.safetensors.index.json").stat().st_size
    monkeypatch.setattr(limits, "MAX_CHECKPOINT_INDEX_BYTES", size)
    CheckpointFiles.open(tmp_path)

    monkeypatch.setattr(limits, "MAX_CHECKPOINT_INDEX_BYTES", size - 1)

    assert refusal(tmp_path).message == f"more than {size - 1} bytes"


def test_path_that_the_system_refuses(tmp_path: Path) -> None:
    """As for a directory without permission; a test that runs as root meets none."""
    error = refusal(tmp_path / ("a" * 300))

    assert (error.code, error.message) == ("checkpoint-read", "expected a checkpoint: File name too long")
    assert error.fix is not None
