"""Snapshots of the pipeline: the graph as it is after a stage, on disk, under a key made of all that went in.

The key covers the config, the options that matter up to there, the passes that ran, the sources of this package, of
those under it and of a model that is none of transformers', and the versions of torch and transformers. A snapshot is
data with a digest; what does not read back whole is a miss, never an error and never a wrong graph.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import msgspec
import torch
import transformers
import zstandard
from transformers import PreTrainedConfig

from precast.builder.capture.capture import Captured
from precast.builder.capture.routing import trace_ops
from precast.builder.graph.context import Options
from precast.builder.graph.stored import StoredGraph, load, store
from precast.builder.passes.graph_pass import Pass
from precast.builder.source.model_class import model_class
from precast.builder.source.source import Source
from precast.ir.errors import BuildError
from precast.ir.graph.schema import Wire
from precast.ir.manifest import Checkpoint, ModelInfo, PassRecord

_MAGIC = b"precast-snapshot-3\n"


class _Snapshot(Wire, frozen=True):
    graph: StoredGraph
    model: ModelInfo
    checkpoint: Checkpoint
    history: tuple[PassRecord, ...]


def key(source: Source, options: Options, passes: tuple[Pass, ...]) -> str:
    """The content key of the pipeline's state after `passes`: 64 hexadecimal digits."""
    config = source.config.to_dict()
    config.pop("_name_or_path", None)  # where it was read from
    cached = [options.page_size, options.kv_dtype, options.kv_from_config]
    parts = {
        "config": config,
        "architecture": type(source.config).__name__,
        "code": _code_digests(source.config),
        "facts": source.facts,
        "beside": source.beside,
        "dtype": options.dtype,
        "quantise": options.quantise,
        "max_seq_len": options.max_seq_len,
        "caches": cached if any(each.stage == "cache" for each in passes) else None,
        "shard plan": [(each.pattern, each.choice) for each in options.overrides],
        "dequantise": options.dequantise,
        "activations": options.activations,
        "passes": [(each.name, each.version) for each in passes],
        "sources": _sources_digest(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _code_digests(config: PreTrainedConfig) -> dict[str, str]:
    """The sources of the classes of a model that somebody registered with transformers: whole packages of them.

    What was typed in and stands in no file is never the same twice.
    """
    kinds = {*type(config).__mro__, *(model_class(config) or object).__mro__}
    names = {kind.__module__.partition(".")[0] for kind in kinds} - {"torch", "transformers"}
    found = {}
    for name in sorted(names - sys.stdlib_module_names):
        module = sys.modules[name]
        folders = list(getattr(module, "__path__", ()))
        files = [file for folder in folders for file in sorted(Path(folder).rglob("*.py"))]
        if not files and getattr(module, "__file__", None):
            files = [Path(str(module.__file__))]
        found[name] = _digest_of(files) if files else os.urandom(16).hex()
    return found


def _digest_of(files: Iterable[Path]) -> str:
    total = hashlib.sha256()
    for file in files:
        total.update(file.read_bytes())
    return total.hexdigest()


@cache
def _sources_digest() -> str:
    """The sources of this package and of those that it stands on."""
    here = Path(__file__).parent
    folders = (here.parent / "ir", here.parent / "kernels", here)
    return _digest_of(file for folder in folders for file in sorted(folder.rglob("*.py")))


@dataclasses.dataclass(frozen=True)
class Store:
    """A directory of snapshots, one file a key."""

    path: Path

    def write(self, key: str, captured: Captured, history: tuple[PassRecord, ...]) -> bool:
        """Stores the state; False for a graph that a snapshot can't hold.

        Raises BuildError("write-failed") when the directory can't be written to.
        """
        graph = store(captured.graph, captured.ctx)
        if graph is None:
            return False
        content = msgspec.msgpack.encode(_Snapshot(graph, captured.model, captured.checkpoint, history))
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            # In place: half of it is a miss by its digest, and a build that is killed here leaves nothing else.
            (self.path / key).write_bytes(_MAGIC + _digest(key, content) + zstandard.compress(content))
        except OSError as error:
            message = f"the snapshot can't be written: {error.strerror}"
            fix = "name another directory for snapshots, or build without them"
            raise BuildError("write-failed", message, where=str(self.path), fix=fix) from error
        return True

    def read(self, key: str, options: Options) -> tuple[Captured, tuple[PassRecord, ...]] | None:
        """The state of this key, ready for the next pass; None when there is none, or it is damaged."""
        try:
            raw = (self.path / key).read_bytes()
        except OSError:
            return None
        head = len(_MAGIC) + 64
        if raw[: len(_MAGIC)] != _MAGIC:
            return None
        try:
            content = zstandard.decompress(raw[head:])
        except zstandard.ZstdError:
            return None
        if _digest(key, content) != raw[len(_MAGIC) : head]:
            return None
        stored = msgspec.msgpack.decode(content, type=_Snapshot)
        trace_ops()
        graph, ctx = load(stored.graph, options)
        return Captured(graph, ctx, stored.model, stored.checkpoint), stored.history


def _digest(key: str, content: bytes) -> bytes:
    """What ties a snapshot's content to its key: under another name it is another build's."""
    return hashlib.sha256(key.encode() + content).hexdigest().encode()
