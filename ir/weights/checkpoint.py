"""The files of a checkpoint: which tensors there are, where their bytes lie. Only headers are read.

A checkpoint is a directory as `save_pretrained` and the Hugging Face hub lay it out: `model.safetensors`, or
`model.safetensors.index.json` and the shards that it names, or, if there is neither, all `*.safetensors` files.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from precast.ir import files, limits
from precast.ir.errors import WeightsError, shown, some
from precast.ir.weights.tensorfile import TensorEntry, TensorFileError, read_header

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_OTHER_FORMATS = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".npz", ".onnx")
_CONVERT = (
    "convert it once: transformers.AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR) "
    "writes safetensors; then pass NEW_DIR"
)


class StoredTensor(msgspec.Struct, frozen=True):
    """A tensor of a checkpoint: `nbytes` bytes from byte `offset` of `file` on, row-major, little endian.

    `dtype` in the schema's words, or the file's own name of a type that the schema doesn't know.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class CheckpointFiles(msgspec.Struct, frozen=True):
    """The tensors of a checkpoint by name, file by file in file order."""

    path: Path
    tensors: dict[str, StoredTensor]

    @staticmethod
    def open(path: str | os.PathLike[str]) -> CheckpointFiles:
        """Read the headers of the checkpoint in the directory `path`, or of the single file `path`.

        Raises WeightsError: `checkpoint-missing`, `checkpoint-format`, `checkpoint-index`,
        `checkpoint-shard-missing`, `checkpoint-header`, `checkpoint-duplicate` or `checkpoint-read`.
        """
        root = Path(path)
        try:
            return CheckpointFiles(root, _tensors(root))
        except OSError as error:  # a directory without permission, above all
            message = f"expected a checkpoint: {error.strerror}"
            raise WeightsError("checkpoint-read", message, where=str(root)) from None


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _tensors(root: Path) -> dict[str, StoredTensor]:
    if root.is_file():
        return _collect(root.parent, [root.name])
    if not root.is_dir():
        message = "expected a directory with a checkpoint, found nothing"
        raise WeightsError("checkpoint-missing", message, where=str(root), fix="pass the checkpoint's directory")
    if (root / SINGLE).is_file():
        return _collect(root, [SINGLE])
    if (root / INDEX).is_file():
        return _indexed(root)
    names = sorted(file.name for file in root.glob("*.safetensors"))
    if not names:
        raise _nothing(root)
    return _collect(root, names)


def _nothing(root: Path) -> WeightsError:
    """The error for a directory without safetensors files."""
    names = sorted(file.name for file in root.iterdir())
    other = [name for name in names if name.endswith(_OTHER_FORMATS)]
    if other:
        message = f"expected {SINGLE}, found {', '.join(map(shown, other[:3]))}: only safetensors are read"
        return WeightsError("checkpoint-format", message, where=str(root), fix=_CONVERT)
    held = ", ".join(map(shown, names[:5])) + (", ..." if len(names) > 5 else "") if names else "an empty directory"
    message = f"expected {SINGLE} or {INDEX} and its shards, found {held}"
    fix = f"download {SINGLE} into it, or pass the directory that has it"
    return WeightsError("checkpoint-missing", message, where=str(root), fix=fix)


def _indexed(root: Path) -> dict[str, StoredTensor]:
    """The tensors of the shards that the index names, compared with what the index says."""
    weight_map = _read_index(root / INDEX)
    shards = sorted(set(weight_map.values()))
    odd = [name for name in shards if name != os.path.basename(name) or name in ("", ".", "..")]
    if odd:
        message = f"expected names of files beside the index, found {', '.join(map(repr, map(shown, odd[:3])))}"
        raise WeightsError("checkpoint-index", message, where=str(root / INDEX))
    missing = [name for name in shards if not (root / name).is_file()]
    if missing:
        message = f"{len(missing)} of {len(shards)} shards are missing: {', '.join(some(missing))}"
        fix = "download or copy the rest of the checkpoint"
        raise WeightsError("checkpoint-shard-missing", message, where=str(root), fix=fix)
    tensors = _collect(root, shards)
    wrong = [
        f"{name} in {file}"
        for name, file in weight_map.items()
        if (found := tensors.get(name)) is None or found.file.name != file
    ]
    if wrong:
        message = f"{len(wrong)} tensors are not where the index says: {', '.join(some(wrong))}"
        raise WeightsError("checkpoint-index", message, where=str(root / INDEX))
    return tensors


def _read_index(file: Path) -> dict[str, str]:
    try:
        data = files.read_file(file, limits.MAX_CHECKPOINT_INDEX_BYTES)
        if len(data) > limits.MAX_CHECKPOINT_INDEX_BYTES:
            message = f"more than {limits.MAX_CHECKPOINT_INDEX_BYTES} bytes"
            raise WeightsError("checkpoint-index", message, where=str(file))
        # Each entry has four quotation marks; what else an index holds has few.
        if data.count(b'"') > 5 * limits.MAX_CHECKPOINT_TENSORS:
            raise _too_many(limits.MAX_CHECKPOINT_TENSORS, "tensors", file)
        return msgspec.json.decode(data, type=_Index).weight_map
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        message = f"the index doesn't parse: {shown(str(error))}"
        raise WeightsError("checkpoint-index", message, where=str(file)) from None
    except OSError as error:
        raise WeightsError("checkpoint-read", f"{error.strerror}", where=str(file)) from None


def _too_many(limit: int, what: str, where: Path) -> WeightsError:
    return WeightsError("checkpoint-index", f"more than {limit} {what}", where=str(where))


def _collect(root: Path, names: list[str]) -> dict[str, StoredTensor]:
    """The tensors of these files; a name that is in two of them is refused."""
    if len(names) > limits.MAX_CHECKPOINT_FILES:
        raise _too_many(limits.MAX_CHECKPOINT_FILES, "files", root)
    tensors: dict[str, StoredTensor] = {}
    twice = []
    for name in names:
        file = root / name
        for tensor, entry in _header_of(file).items():
            if tensor in tensors:
                twice.append(f"{tensor} in {tensors[tensor].file.name} and {name}")
            tensors[tensor] = StoredTensor(file, entry.dtype, entry.shape, entry.start, entry.nbytes)
        if len(tensors) > limits.MAX_CHECKPOINT_TENSORS:
            raise _too_many(limits.MAX_CHECKPOINT_TENSORS, "tensors", root)
    if twice:
        message = f"{len(twice)} tensors are in two files: {', '.join(some(twice))}"
        fix = f"move one of the files away, or have {INDEX} name only those that count"
        raise WeightsError("checkpoint-duplicate", message, where=str(root), fix=fix)
    return tensors


def _header_of(file: Path) -> dict[str, TensorEntry]:
    try:
        return read_header(file)
    except TensorFileError as error:
        fix = "the file is damaged or incomplete: download or copy it again"
        raise WeightsError("checkpoint-header", str(error), where=str(file), fix=fix) from None
    except OSError as error:
        raise WeightsError("checkpoint-read", f"{error.strerror}", where=str(file)) from None
