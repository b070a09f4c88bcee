"""Every reader of what strangers write, as a function of bytes.

A target hands the bytes to the reader and raises what the reader raises: `precast.ir.errors` is clean, all else is a
finding (`bounds.py`). What only the loader or the builder needs is imported where it is used, so that a target of the
`ir` starts without torch.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import registry_readers
import trust_readers
from forge import Forgery, compressed
from graph_text import parse_graph

from examples import tiny_graph, write_tiny
from precast.ir import encoding
from precast.ir.artifact import Bundle
from precast.ir.graph.schema import Graph
from precast.ir.graph.text import format_graph
from precast.ir.manifest import Checkpoint, ConfigFacts
from precast.ir.verify.verifier import check
from precast.ir.weights import config_facts, fit, recipes, tensorfile
from precast.ir.weights.checkpoint import INDEX, SINGLE, CheckpointFiles, StoredTensor
from precast.ir.weights.sources import LocalFolder

if TYPE_CHECKING:
    from precast.loader.engine.tokenizer import Tokenizer

FACTS = ConfigFacts(
    values={
        "rms_norm_eps": 1e-6, "sliding_window": 4096, "layer_types": ("full", "sliding"), "logits_scale": None,
        "rope_parameters.rope_theta": 500000.0, "rope_parameters.rope_type": "llama3",
        "rope_parameters.factor": 8.0,
    },
    same={"sliding_window": (0,)},
    absent={"rms_norm_eps": 1e-5},
    absent_objects={"rope_parameters.rope_theta": 10000.0},
    spellings={"rope_scaling": ("rope_parameters",), "norm_eps": ("rms_norm_eps",)},
)  # fmt: skip
MAX_TENSOR_BYTES = 1 << 30
"""The largest tensor of a checkpoint that fits recipes: work may grow with the bytes on disk."""
TEXTS = ("hello w", "", "\N{GREEK SMALL LETTER ALPHA}\0\n", "a" * 300)


class Target(NamedTuple):
    """A reader: what it reads in an empty folder of its own, the form of its bytes (`mutate.FORMS`), its corpus."""

    read: Callable[[bytes, Path], object]
    form: str
    corpus: str


# --- bundles ---------------------------------------------------------------------------------------------------


def _part(name: str) -> Callable[[bytes, Path], object]:
    """A reader of a bundle in which this part is the bytes; all digests fit."""

    def read(data: bytes, folder: Path) -> None:
        forgery = Forgery()
        if hasattr(forgery, name):
            setattr(forgery, name, data)
        else:
            forgery.edit(name, lambda _: data)
        forgery.write(folder / "x.bundle")
        Bundle.open_whole(folder / "x.bundle")

    return read


def _graph(data: bytes) -> Graph:
    """The graph of this encoding, decoded and verified."""
    graph = encoding.decode_graph(compressed(data))
    check(graph)
    return graph


def _verify(data: bytes, _: Path) -> None:
    _graph(data)


@cache
def _opened() -> Bundle:
    from tempfile import mkdtemp

    folder = Path(mkdtemp())
    try:
        return write_tiny(folder / "x.bundle", 1)
    finally:
        shutil.rmtree(folder)


def _show(data: bytes, folder: Path) -> None:
    """What `precast inspect` and `precast diff` do with a graph that the verifier accepts."""
    from precast.cli import capture_view, compare, show
    from precast.kernels.use import GPU

    bundle = msgspec.structs.replace(_opened(), path=folder, graph=_graph(data))
    for report in (show.summary, show.graph, show.passes, show.weights, show.cache):
        report(bundle)
    capture_view.capture(bundle, GPU)
    compare.difference(_opened(), bundle)


def _load(data: bytes, _: Path) -> None:
    """What `precast.load` does with a graph before it reads a tensor."""
    import torch

    from precast.ir.memory import caches
    from precast.loader import sizing
    from precast.loader.placement import bind_world, place
    from precast.loader.program.restore import restore
    from precast.loader.run.batch import BatchInputs

    placement = place("cpu")
    graph = bind_world(_graph(data), placement)
    graph = msgspec.structs.replace(graph, caches=caches.with_slabs(graph.caches))
    limits = sizing.EngineLimits(16, 512, 64, 1 << 20)
    sizing.check_limits(graph, limits)
    restore(graph, device=torch.device("cpu"))
    sizing.size_arena(graph, limits, placement.device, free=1 << 30)
    BatchInputs(graph)  # last, though `load` asks it first: it refuses all graphs whose inputs have other names


def _recipes(data: bytes, folder: Path) -> None:
    """The params of a graph, and what `precast.load` makes of their recipes and of a checkpoint that fits them."""
    from precast.loader.weights.parts import Assembly, param_parts
    from precast.loader.weights.read_plan import plan_reads

    raw = msgspec.msgpack.encode(tiny_graph(1))
    plain = msgspec.msgpack.decode(raw)
    try:
        plain["params"] += msgspec.msgpack.decode(data)
        encoded = msgspec.msgpack.encode(plain, order="sorted")
    except (ValueError, TypeError, RecursionError, OverflowError):
        return  # nothing that stands in a graph
    params = _graph(encoded).params
    stored = {}
    for read in (read for param in params for read in recipes.leaves(param.recipe)):
        size = tensorfile.element_bytes(read.dtype or "float32")
        for extent in read.shape:
            size *= extent
        if size > MAX_TENSOR_BYTES:
            return
        stored[read.tensor] = StoredTensor(SINGLE, read.dtype or "float32", read.shape, 8, size)
    files = CheckpointFiles(LocalFolder(folder), stored)
    graph = msgspec.structs.replace(tiny_graph(1), params=params)
    fit.check(graph, Checkpoint(), files)
    found = fit.require(graph, Checkpoint(), files)
    assembly = param_parts(params, lambda name: found[name].dtype)
    plan_reads(assembly, found.__getitem__)
    inputs = Assembly(lambda name: found[name].dtype)
    for computed in assembly.computed:
        inputs.add_inputs(computed)
    plan_reads(inputs, found.__getitem__)


def _text(data: bytes, _: Path) -> None:
    graph = parse_graph(data.decode(errors="replace"))
    encoding.encode_graph(graph)
    assert parse_graph(format_graph(graph)) == graph
    check(graph)


# --- checkpoints -----------------------------------------------------------------------------------------------


def _tensors(data: bytes, folder: Path) -> None:
    (folder / SINGLE).write_bytes(data)
    CheckpointFiles.open(folder)


def _index(data: bytes, folder: Path) -> None:
    (folder / INDEX).write_bytes(data)
    for name in ("a", "b"):
        content = tensorfile.encode({name: ("uint8", (2,), b"xy")})
        (folder / f"{name}.safetensors").write_bytes(content)
    CheckpointFiles.open(folder)


def _checkpoint_config(data: bytes, folder: Path) -> None:
    (folder / config_facts.CONFIG).write_bytes(data)
    config_facts.check(FACTS, folder)


def _facts(data: bytes, folder: Path) -> None:
    """What a bundle says of its config, and the config of a checkpoint: one JSON object of both."""
    try:
        both = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        facts = msgspec.json.decode(both["facts"], type=ConfigFacts)
        (folder / config_facts.CONFIG).write_bytes(both["config"])
    except (ValueError, KeyError, RecursionError):
        return  # no facts that a manifest can have: that is the manifest's target
    config_facts.check(facts, folder)


# --- what a build reads ----------------------------------------------------------------------------------------


def _config(data: bytes, folder: Path) -> None:
    from precast.builder.source.facts import limit
    from precast.builder.source.source import open_source

    (folder / "config.json").write_bytes(data)
    limit(open_source(folder).config, None)


def _generation_config(data: bytes, folder: Path) -> None:
    """The JSON beside a config: what says how answers end, and how the checkpoint is quantised."""
    from precast.builder.source.quantised_files import FILES
    from precast.builder.source.small_files import GENERATION
    from precast.builder.source.source import open_source

    (folder / "config.json").write_text('{"model_type": "llama"}')
    names = (GENERATION, *FILES)
    beside = folder / names[len(data) % len(names)]
    beside.write_bytes(data)
    try:
        open_source(folder)
    finally:
        beside.unlink()


def _tokenizer_settings(data: bytes, folder: Path) -> None:
    from precast.builder.source.tokenizer_files import TAKEN, read_files

    for name in TAKEN[1:]:
        (folder / name).write_bytes(data)
        read_files(folder, "x")
        (folder / name).unlink()


def _tokenizer(data: bytes, folder: Path) -> None:
    """A `tokenizer.json`, at build, and as the engine uses it."""
    from precast.builder.source.tokenizer_files import FILE_NAME, read_files
    from precast.loader.engine.tokenizer import Tokenizer

    (folder / FILE_NAME).write_bytes(data)
    found = Tokenizer.from_files(read_files(folder, "x"))
    assert found is not None
    for text in TEXTS:
        _answer(found, found.encode(text))


def _tokenizer_at_load(data: bytes, _: Path) -> None:
    from precast.loader.engine.tokenizer import FILE_NAME, check_tokenizer

    check_tokenizer({FILE_NAME: data})


def _answer(tokenizer: Tokenizer, prompt: list[int]) -> None:
    from precast.loader.engine.tokenizer import AnswerText

    answer = AnswerText(tokenizer, prompt, ["stop"])
    for token in (*prompt[:20], 0, 1, 5, 2**31 - 1):
        answer.push(token)
        answer.read()
    answer.read(final=True)


def _older_tokenizer(*names: str) -> Callable[[bytes, Path], object]:
    """The files of an older form; for two, a JSON object has their texts by name."""

    def read(data: bytes, folder: Path) -> None:
        from precast.builder.source.tokenizer_files import read_files

        kind = "llama" if len(names) == 1 else "gpt2"
        (folder / "config.json").write_text(json.dumps({"model_type": kind}), encoding="utf-8")
        for name, content in _split(data, names).items():
            (folder / name).write_bytes(content)
        read_files(folder, "x")

    return read


def _split(data: bytes, names: tuple[str, ...]) -> dict[str, bytes]:
    if len(names) == 1:
        return {names[0]: data}
    try:
        found: dict[str, Any] = json.loads(data)
        return {name: _bytes(found[name]) for name in names}
    except (ValueError, KeyError, TypeError, RecursionError):
        return dict.fromkeys(names, data)


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else json.dumps(value).encode()


def _shard_plan(data: bytes, folder: Path) -> None:
    """A user's plan file, and what it says of a graph."""
    from precast.builder.passes.shard.shard import shard
    from precast.builder.shard.overrides import read_overrides

    (folder / "plan.json").write_bytes(data)
    shard(tiny_graph(1), read_overrides(folder / "plan.json"))


def _choices(data: bytes, folder: Path) -> None:
    """A table of measured choices, and what is read of it again."""
    from precast.kernels.measured import read_table, write_table

    (folder / "table.json").write_bytes(data)
    table = read_table(folder / "table.json")
    write_table(table, folder / "again.json")
    assert read_table(folder / "again.json") == table


TARGETS: dict[str, Target] = {
    # the container of a bundle, and its documents
    "bundle-marker": Target(_part("marker"), "json", "bundle-marker"),
    "bundle-index": Target(_part("index_bytes"), "json", "bundle-index"),
    "bundle-image": Target(_part("image_bytes"), "json", "bundle-image"),
    "bundle-attached": Target(_part("attached_bytes"), "json", "bundle-attached"),
    "bundle-provenance": Target(_part("provenance"), "json", "bundle-provenance"),
    "bundle-manifest": Target(_part("manifest_bytes"), "json", "bundle-manifest"),
    "bundle-constants": Target(_part("constants"), "safetensors", "bundle-constants"),
    "bundle-graph": Target(_part("graph"), "bytes", "bundle-graph"),
    # the graph in it: the decoder and the verifier; the commands; the load
    "graph": Target(_verify, "graph", "graph"),
    "graph-show": Target(_show, "graph", "graph"),
    "graph-load": Target(_load, "graph", "graph"),
    "recipes": Target(_recipes, "msgpack", "recipes"),
    "text": Target(_text, "text", "text"),
    # registries, and the store of what came from them
    "registry-attached": Target(registry_readers.read_signature, "json", "registry-attached"),
    "registry-list": Target(registry_readers.read_list, "json", "registry-list"),
    "registry-reference": Target(registry_readers.read_reference, "text", "registry-reference"),
    "registry-challenge": Target(registry_readers.read_challenge, "text", "registry-challenge"),
    "registry-credentials": Target(registry_readers.read_credentials, "json", "registry-credentials"),
    "store-list": Target(registry_readers.read_store, "json", "bundle-index"),
    # who vouches for a bundle
    "trust-statement": Target(trust_readers.read_statement, "json", "trust-statement"),
    "trust-certificate": Target(trust_readers.read_certificate, "bytes", "trust-certificate"),
    "trust-key": Target(trust_readers.read_key, "text", "trust-key"),
    "trust-authority": Target(trust_readers.read_authority, "text", "trust-authority"),
    "trust-policy": Target(trust_readers.read_policy, "json", "trust-policy"),
    "lock": Target(trust_readers.read_lock, "json", "lock"),
    # a checkpoint
    "checkpoint-header": Target(_tensors, "safetensors", "checkpoint-header"),
    "checkpoint-index": Target(_index, "json", "checkpoint-index"),
    "checkpoint-config": Target(_checkpoint_config, "json", "checkpoint-config"),
    "config-facts": Target(_facts, "json", "config-facts"),
    # what was measured on a machine
    "choices": Target(_choices, "json", "choices"),
    # the folder that a build starts from
    "config": Target(_config, "json", "config"),
    "shard-plan": Target(_shard_plan, "json", "shard-plan"),
    "generation-config": Target(_generation_config, "json", "generation-config"),
    "tokenizer": Target(_tokenizer, "json", "tokenizer"),
    "tokenizer-load": Target(_tokenizer_at_load, "json", "tokenizer"),
    "tokenizer-settings": Target(_tokenizer_settings, "json", "tokenizer-settings"),
    "tokenizer-model": Target(_older_tokenizer("tokenizer.model"), "bytes", "tokenizer-model"),
    "tokenizer-vocab": Target(_older_tokenizer("vocab.json", "merges.txt"), "json", "tokenizer-vocab"),
}
"""All readers, by name."""


def attempt(target: Target, data: bytes, folder: Path) -> None:
    """Have the reader read the bytes in `folder`, which is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    target.read(data, folder)
