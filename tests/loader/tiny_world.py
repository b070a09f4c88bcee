"""The tiny model of `tiny.py` as a bundle on disk that any number of ranks can load, for tests of worlds."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save_file
from tiny import random_weights, tiny_graph, tiny_model
from tokenizers_by_hand import letters

from precast.ir.artifact import ops_of, write_bundle
from precast.ir.encoding import FORMAT
from precast.ir.graph.schema import Graph
from precast.ir.manifest import Checkpoint, Manifest

WEIGHTS = random_weights()


def write(path: Path, graph: Graph | None = None) -> Path:
    """The bundle of the tiny model with this graph; None: split over up to four ranks."""
    graph = tiny_graph(tp=True) if graph is None else graph
    inv_freq = WEIGHTS["inv_freq"]
    write_bundle(
        path,
        manifest_without_blobs=Manifest(FORMAT, tiny_model(), ops_of(graph), Checkpoint(), (), {}, ()),
        graph=graph,
        constants={"inv_freq": ("float32", tuple(inv_freq.shape), inv_freq.numpy().tobytes())},
        files={"tokenizer.json": letters(48)},
        provenance={},
    )
    return path


def write_checkpoint(path: Path, *, mlp: bool = False) -> Path:
    """The tiny model's weights."""
    path.mkdir(exist_ok=True)
    save_file(
        {name: tensor for name, tensor in random_weights(mlp=mlp).items() if name != "inv_freq"},
        path / "model.safetensors",
    )
    return path
