"""The files of a checkpoint: which tensors there are, where their bytes lie. Only headers are read.

A checkpoint is a folder as `save_pretrained` and the Hugging Face hub lay it out: `model.safetensors`, or
`model.safetensors.index.json` and the shards that it names, or, if there is neither, all `*.safetensors` files of a
directory. The folder may be on a server, which is asked for these names and lists nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePosixPath
from typing import Literal, TypeVar

import msgspec

from precast.ir import limits
from precast.ir.errors import WeightsError, shown, some
from precast.ir.files import LFS_FIX, LFS_POINTER
from precast.ir.graph.schema import Dtype
from precast.ir.waits import ended
from precast.ir.weights.sources import Folder, Source, Stamp, as_folder, read_small
from precast.ir.weights.tensorfile import TensorEntry, TensorFileError, read_header

T = TypeVar("T")
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
StoredDtype = Dtype | Literal["F8_E8M0"]
"""The element types that weights are read from. F8_E8M0 (float8_e8m0fnu) are exponents, of scales: e stands for
2 ^ (e - 127), and 255 for no number. All of them are float32's."""

_SAME_BITS = {"U32": "int32"}
"""Types of files whose tensors are read as those of a type of the schema: words that values are packed in, which some
quantisers call signed and others don't."""
_OTHER_FORMATS = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".npz", ".onnx")
_CONVERT = (
    "convert it once: transformers.AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR) "
    "writes safetensors; then pass NEW_DIR"
)

_CONVERT_GGUF = (
    "pass the safetensors checkpoint that the GGUF file was made from; or convert it once: "
    "transformers.AutoModelForCausalLM.from_pretrained(DIR, gguf_file=NAME).save_pretrained(NEW_DIR) writes safetensors"
)
_BEGINNINGS = (
    ((b"GGUF",), "a GGUF file", _CONVERT_GGUF),
    ((b"PK\x03\x04",), "a file of torch.save", _CONVERT),
    ((b'{"', b"{\n", b"{\r", b"{ "), "JSON text", "pass the checkpoint's directory, or its safetensors file"),
)
"""What files of other kinds begin with, and what to do about them."""


class StoredTensor(msgspec.Struct, frozen=True):
    """A tensor of a checkpoint: `nbytes` bytes from byte `offset` of `file` on, row-major, little endian.

    `file` is a name in the checkpoint's folder; `dtype` is in the schema's words, or the file's own name of a type that
    the schema doesn't know. Tensors of uint32 count as int32, of the same bits.
    """

    file: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class CheckpointFiles(msgspec.Struct, frozen=True):
    """The tensors of a checkpoint by name, file by file in file order; the stamps of its files, by their names."""

    folder: Folder
    tensors: dict[str, StoredTensor]
    stamps: dict[str, Stamp] = {}

    @staticmethod
    def open(checkpoint: str | os.PathLike[str] | Folder) -> CheckpointFiles:
        """Read the headers of the checkpoint in a directory, of the single file at a path, or in a folder.

        Raises WeightsError: `checkpoint-missing`, `checkpoint-format`, `checkpoint-index`, `checkpoint-shard-missing`,
        `checkpoint-header`, `checkpoint-duplicate` or `checkpoint-read`; of a folder on a server also
        `checkpoint-unreachable` and `checkpoint-denied`.
        """
        return _opened(as_folder(checkpoint))

    def source(self, file: str) -> Source:
        """One of its files, opened; it is closed by whoever asks. Raises WeightsError, also if it has changed since."""
        return self.folder.open(file, self.stamps.get(file))


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _opened(folder: Folder) -> CheckpointFiles:
    if folder.only is not None:
        return _collect(folder, [folder.only])
    single, indexed = at_once(folder, folder.has, [SINGLE, INDEX])
    if single:
        return _collect(folder, [SINGLE])
    if indexed:
        return _indexed(folder)
    names = [name for name in folder.names() or () if PurePosixPath(name).match("*.safetensors")]
    if not names:
        raise _nothing(folder)
    return _collect(folder, names)


def _nothing(folder: Folder) -> WeightsError:
    """The error for a folder without safetensors files."""
    names = folder.names()
    if names is None:
        fix = "pass the address of the folder that has one of them; all else beside it is found by its name"
        message = f"expected {SINGLE} or {INDEX}, and the server has neither"
        return WeightsError("checkpoint-missing", message, where=folder.name, fix=fix)
    other = [name for name in names if name.endswith(_OTHER_FORMATS)]
    if other:
        message = f"expected {SINGLE}, found {', '.join(map(shown, other[:3]))}: only safetensors are read"
        fix = _CONVERT_GGUF if other[0].endswith(".gguf") else _CONVERT
        return WeightsError("checkpoint-format", message, where=folder.name, fix=fix)
    held = ", ".join(map(shown, names[:5])) + (", ..." if len(names) > 5 else "") if names else "an empty directory"
    message = f"expected {SINGLE} or {INDEX} and its shards, found {held}"
    fix = f"download {SINGLE} into it, or pass the directory that has it"
    return WeightsError("checkpoint-missing", message, where=folder.name, fix=fix)


def _indexed(folder: Folder) -> CheckpointFiles:
    """The tensors of the shards that the index names, compared with what the index says."""
    weight_map, where = _read_index(folder)
    shards = sorted(set(weight_map.values()))
    odd = [name for name in shards if name != os.path.basename(name) or name in ("", ".", "..")]
    if odd:
        message = f"expected names of files beside the index, found {', '.join(map(repr, map(shown, odd[:3])))}"
        raise WeightsError("checkpoint-index", message, where=where)
    if len(shards) > limits.MAX_CHECKPOINT_FILES:
        raise _too_many(limits.MAX_CHECKPOINT_FILES, "files", folder.name)
    there = at_once(folder, folder.has, shards)
    missing = [name for name, found in zip(shards, there, strict=True) if not found]
    if missing:
        message = f"{len(missing)} of {len(shards)} shards are missing: {', '.join(some(missing))}"
        fix = "download or copy the rest of the checkpoint"
        raise WeightsError("checkpoint-shard-missing", message, where=folder.name, fix=fix)
    found = _collect(folder, shards)
    wrong = [
        f"{name} in {file}"
        for name, file in weight_map.items()
        if (tensor := found.tensors.get(name)) is None or tensor.file != file
    ]
    if wrong:
        message = f"{len(wrong)} tensors are not where the index says: {', '.join(some(wrong))}"
        raise WeightsError("checkpoint-index", message, where=where)
    return found


def _read_index(folder: Folder) -> tuple[dict[str, str], str]:
    """The file of each tensor, by the index; and how messages call the index."""
    with folder.open(INDEX) as source:
        data = read_small(source, limits.MAX_CHECKPOINT_INDEX_BYTES)
    try:
        if len(data) > limits.MAX_CHECKPOINT_INDEX_BYTES:
            message = f"more than {limits.MAX_CHECKPOINT_INDEX_BYTES} bytes"
            raise WeightsError("checkpoint-index", message, where=source.name)
        # Each entry has four quotation marks; what else an index holds has few.
        if data.count(b'"') > 5 * limits.MAX_CHECKPOINT_TENSORS:
            raise _too_many(limits.MAX_CHECKPOINT_TENSORS, "tensors", source.name)
        return msgspec.json.decode(data, type=_Index).weight_map, source.name
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        message = f"the index doesn't parse: {shown(str(error))}"
        raise WeightsError("checkpoint-index", message, where=source.name) from None


def _too_many(limit: int, what: str, where: str) -> WeightsError:
    return WeightsError("checkpoint-index", f"more than {limit} {what}", where=where)


def _collect(folder: Folder, names: list[str]) -> CheckpointFiles:
    """The tensors of these files; a name that is in two of them is refused."""
    if len(names) > limits.MAX_CHECKPOINT_FILES:
        raise _too_many(limits.MAX_CHECKPOINT_FILES, "files", folder.name)
    found = CheckpointFiles(folder, {}, {})
    twice = []
    headers = at_once(folder, lambda name: _header_of(folder, name), names)
    for name, (header, stamp) in zip(names, headers, strict=True):
        found.stamps[name] = stamp
        for tensor, entry in header.items():
            if tensor in found.tensors:
                twice.append(f"{tensor} in {found.tensors[tensor].file} and {name}")
            dtype = _SAME_BITS.get(entry.dtype, entry.dtype)
            found.tensors[tensor] = StoredTensor(name, dtype, entry.shape, entry.start, entry.nbytes)
        if len(found.tensors) > limits.MAX_CHECKPOINT_TENSORS:
            raise _too_many(limits.MAX_CHECKPOINT_TENSORS, "tensors", folder.name)
    if twice:
        message = f"{len(twice)} tensors are in two files: {', '.join(some(twice))}"
        fix = f"move one of the files away, or have {INDEX} name only those that count"
        raise WeightsError("checkpoint-duplicate", message, where=folder.name, fix=fix)
    return found


def _header_of(folder: Folder, name: str) -> tuple[dict[str, TensorEntry], Stamp]:
    with folder.open(name) as source:
        try:
            return read_header(source), source.stamp
        except TensorFileError as error:
            raise _no_tensors(source, str(error)) from None


def _no_tensors(source: Source, message: str) -> WeightsError:
    """The error for a file without a valid header: what it is instead, where its first bytes say it."""
    first = read_small(source, len(LFS_POINTER) - 1)
    if first == LFS_POINTER:
        message = "it is a pointer of Git LFS, not the file that it stands for"
        return WeightsError("checkpoint-header", message, where=source.name, fix=LFS_FIX)
    for beginnings, what, fix in _BEGINNINGS:
        if first.startswith(beginnings):
            message = f"it is {what}, expected a safetensors file"
            return WeightsError("checkpoint-format", message, where=source.name, fix=fix)
    fix = "the file is damaged or incomplete: download or copy it again"
    return WeightsError("checkpoint-header", message, where=source.name, fix=fix)


def at_once(folder: Folder, look: Callable[[str], T], names: Sequence[str]) -> Iterator[T]:
    """What `look` gives for each name, in their order; a folder on a server is asked for several at once."""
    if folder.readers is None:
        yield from map(look, names)
        return
    with ThreadPoolExecutor(folder.readers, thread_name_prefix="precast-headers") as pool:
        try:
            futures = [pool.submit(look, name) for name in names]
            yield from map(ended, futures)
        except BaseException:
            folder.stop()
            pool.shutdown(cancel_futures=True)
            raise
