"""Bundles and checkpoints that are made to take time and memory: what `bench_hostile.py` measures, and tests open.

Each is a graph, or a directory of files, that is valid but for its size, or as large as the limits allow.
"""

from __future__ import annotations

import itertools
import json
import os
import struct
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import zstandard

from precast.ir.artifact import ops_of
from precast.ir.bundle import codec, oci
from precast.ir.encoding import FORMAT
from precast.ir.graph.schema import (
    Apply,
    Block,
    Call,
    Cast,
    Const,
    Dequantise,
    Dim,
    Each,
    Expr,
    Graph,
    Items,
    Node,
    Param,
    Read,
    Ref,
    Stack,
    Symbol,
    TensorType,
    Value,
)  # fmt: skip
from precast.ir.manifest import Blob, Checkpoint, ConfigFacts, Manifest, ModelInfo
from precast.ir.weights import tensorfile


def write(path: Path, graph: Graph, rules: Checkpoint | None = None, raw: bytes | None = None) -> Path:
    """A bundle of this graph, with nothing checked; `raw` is the graph's encoding, where it is none."""
    plain = msgspec.msgpack.encode(graph, order="sorted") if raw is None else raw
    zero = (ONE.type.dtype, ONE.type.shape, bytes(4))
    parts = [
        ("graph", oci.GRAPH, zstandard.ZstdCompressor(level=3).compress(plain)),
        ("constants", oci.CONSTANTS, tensorfile.encode({ONE.name: zero})),
    ]
    blobs = tuple(Blob(name, name, oci.digest_of(data), len(data)) for name, _, data in parts)  # type: ignore[arg-type]
    model = ModelInfo("Hostile", "hostile", "float32", 32, 64, 1, 1)
    rules = Checkpoint() if rules is None else rules
    manifest = codec.encode_json(
        Manifest(FORMAT, model, ops_of(graph), rules, (), {}, blobs, config=ConfigFacts({"vocab_size": 32}))
    )
    layers = tuple(oci.describe(data, kind) for _, kind, data in parts)
    image = codec.encode_json(oci.image(oci.BUNDLE, oci.describe(manifest, oci.MANIFEST), layers))
    described = oci.describe(image, oci.IMAGE_TYPE, artifact_type=oci.BUNDLE)
    folder = path / oci.BLOBS / oci.ALGORITHM
    folder.mkdir(parents=True)
    for data in (manifest, image, *(data for _, _, data in parts)):
        (folder / oci.digest_of(data).removeprefix("sha256:")).write_bytes(data)
    (path / oci.INDEX_FILE).write_bytes(codec.encode_json(oci.Index((described,), 2, oci.INDEX_TYPE)))
    (path / oci.LAYOUT_FILE).write_bytes(oci.MARKER)
    return path


def value(name: str, *shape: Expr) -> Value:
    """A float32 value."""
    return Value(name, TensorType("float32", shape))


def relu(source: str, target: str, *shape: Expr) -> Node:
    """A node of one argument."""
    return Node("aten.relu.default", {"self": Ref(source)}, (value(target, *shape),))


ONE = value("one")
"""A constant of one element."""


def full(made: Value) -> Node:
    """A node that makes a value of any shape, from nothing that a step gives."""
    sizes = tuple(Const(size) if isinstance(size, int) else Dim(size) for size in made.type.shape)
    return Node("aten.expand.default", {"self": Ref(ONE.name), "size": Items(sizes)}, (made,))


def graph(
    *, symbols: Iterable[Symbol] = (), given: Iterable[Value] = (), params: Iterable[Param] = (),
    blocks: Iterable[Block] = (), main: Iterable[Node | Call] = (), output: str = "x", shape: tuple[Expr, ...] = ("T",),
) -> Graph:  # fmt: skip
    """A graph of the steps `main`, with what they are given, and `x` of this shape; and logits, without which it is
    refused for that."""
    made = [full(each) for each in (value("x", *shape), *given, value("logits", 1, "R", 32))]
    return Graph(
        (Symbol("T", 1), Symbol("R", 1), *symbols), (), tuple(params), (ONE,), tuple(blocks), (*made, *main),
        {"y": output, "logits": "logits"},
    )  # fmt: skip


def symbols(count: int) -> Graph:
    """So many symbols, none of them in use."""
    return graph(symbols=[Symbol(f"s{i}") for i in range(count)])


def params(count: int) -> Graph:
    """So many params."""
    return graph(params=[param(f"p{i}", (4,), Read(f"p{i}", (4,))) for i in range(count)])


def chain(count: int) -> Graph:
    """So many nodes, one after the other, all of one type."""
    nodes = [relu(f"x{i}" if i else "x", f"x{i + 1}", "T") for i in range(count)]
    return graph(main=nodes, output=f"x{count}")


def alive(count: int) -> Graph:
    """So many values of different sizes, all of them alive until the end."""
    given = [value(f"i{i}", "T", i + 1) for i in range(count)]
    nodes = [relu(f"i{i}", f"x{i}", "T", i + 1) for i in range(count)]
    ends = [relu(f"x{i}", f"y{i}", "T", i + 1) for i in range(count)]
    return graph(given=given, main=[*nodes, *ends])


def calls(count: int, nodes: int) -> Graph:
    """So many calls of a block of so many nodes."""
    steps = [relu(f"x{i}" if i else "x", f"x{i + 1}", "T") for i in range(nodes)]
    block = Block("block", (value("x", "T"),), (), (), tuple(steps), (f"x{nodes}",))
    main = [Call("block", {"x": f"h{i}" if i else "x"}, (value(f"h{i + 1}", "T"),)) for i in range(count)]
    return graph(blocks=[block], main=main, output=f"h{count}")


def joined_calls(count: int, times: int) -> Graph:
    """So many calls of a block that joins one value with itself so often."""
    items = Items((Ref("x"),) * times)
    node = Node("aten.cat.default", {"tensors": items, "dim": Const(1)}, (value("y", "T", times),))
    block = Block("block", (value("x", "T", 1),), (), (), (node,), ("y",))
    main = [Call("block", {"x": "x"}, (value(f"y{i}", "T", times),)) for i in range(count)]
    return graph(blocks=[block], main=main, shape=("T", 1))


def wide_call(count: int) -> Graph:
    """A call of a block that takes so many values and returns them, and a node that joins them."""
    taken = [value(f"i{i}", "T", 1) for i in range(count)]
    made = [value(f"o{i}", "T", 1) for i in range(count)]
    block = Block("block", tuple(taken), (), (), (), tuple(each.name for each in taken))
    call = Call("block", {each.name: each.name for each in taken}, tuple(made))
    joined = Node("aten.cat.default", {"tensors": Items(tuple(Ref(each.name) for each in made)), "dim": Const(1)},
                  (value("all", "T", count),))  # fmt: skip
    return graph(given=taken, blocks=[block], main=[call, joined], output="all")


def each(count: int, reads: int) -> Graph:
    """A param of an `each` of so many parts, each of so many reads."""
    parts = tuple(Read(f"e.*.{i}", (1,)) for i in range(reads))
    return graph(params=[param("p", (count, reads, 1), Each(Stack(parts, 0), 0, count))])


def one_read(count: int, times: int) -> Graph:
    """So many params, each of an `each` that reads one stored tensor so often."""
    made = Each(Read("w", (1,)), 0, times)
    return graph(params=[param(f"p{i}", (times, 1), made) for i in range(count)])


def matrices(count: int) -> Graph:
    """A `dequantise` of so many matrices."""
    of, scales = Read("q", (count, 6, 3, 16), "uint8"), Read("s", (count, 6, 3), "uint8")
    return graph(params=[param("p", (count, 6, 96), Dequantise(of, scales, "mxfp4"))])


def powers(count: int) -> Graph:
    """So many values whose sizes are products of sums, different ones each."""

    def size(i: int) -> Expr:
        return Apply("add", (i + 2, *(f"a{k}" for k in range(12))))

    given = [value(f"i{i}", *(size(i + k) for k in range(4))) for i in range(count)]
    return graph(symbols=[Symbol(f"a{k}", 1) for k in range(12)], given=given)


def nested(depth: int) -> Graph:
    """An expression of quotients in sums, so deep."""
    expr: Expr = "T"
    for i in range(depth):
        expr = Apply("floordiv", (Apply("add", (expr, "T")), i + 2))
    return graph(given=[value("i", expr)])


def reshapes(count: int) -> Graph:
    """So many reshapes to lists of 1,000 sizes."""
    sizes = Items((*(Const(1) for _ in range(15)), *(Const(1) for _ in range(985))))
    nodes = [
        Node("aten.reshape.default", {"self": Ref("x"), "shape": sizes}, (value(f"y{i}", "T"),)) for i in range(count)
    ]
    return graph(main=nodes)


def one_hash(count: int) -> Graph:
    """So many values whose types have one hash in Python."""
    shapes = itertools.islice(itertools.product((0, sys.hash_info.modulus), repeat=14), count)
    return graph(given=[value(f"i{i}", *shape) for i, shape in enumerate(shapes)])


def objects(count: int) -> bytes:
    """An encoding of so many empty lists."""
    return struct.pack(">BI", 0xDD, count) + b"\x90" * count


def param(name: str, shape: tuple[Expr, ...], recipe: Any) -> Param:
    """A float32 param."""
    return Param(name, TensorType("float32", shape), Cast(recipe, "float32"))


# --- checkpoints -----------------------------------------------------------------------------------------------------


def safetensors(path: Path, header: dict[str, Any] | bytes, data: bytes = b"") -> Path:
    """A checkpoint of one file with this header."""
    path.mkdir(parents=True)
    text = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def empty_tensors(path: Path, count: int) -> Path:
    """So many tensors without elements."""
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    return safetensors(path, {f"t{i}": entry for i in range(count)})


def shaped(path: Path, shape: list[int]) -> Path:
    """One tensor of this shape."""
    return safetensors(path, {"t": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}}, bytes(4))


def pipe(path: Path, name: str) -> Path:
    """A named pipe in place of a file."""
    path.mkdir(parents=True)
    os.mkfifo(path / name)
    return path


def nested_config(path: Path, depth: int) -> Path:
    """A `config.json` of objects in each other, beside a checkpoint."""
    safetensors(path, {"t": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, bytes(4))
    (path / "config.json").write_text('{"a":' * depth + "1" + "}" * depth)
    return path


def large_config(path: Path, count: int) -> Path:
    """A `config.json` of so many entries, beside a checkpoint."""
    safetensors(path, {"t": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, bytes(4))
    (path / "config.json").write_text(json.dumps({f"n{i}": 1 for i in range(count)}))
    return path


BUNDLES: dict[str, Callable[[Path], Path]] = {
    "900,000 symbols": lambda path: write(path, symbols(900_000)),
    "each of 65,536 over 1,000 reads": lambda path: write(path, each(65_536, 1_000)),
    "each of 8,192 over 128 reads": lambda path: write(path, each(8_192, 128)),
    "128 params of 8,192 reads of one tensor": lambda path: write(path, one_read(128, 8_192)),
    "4 params of 8,192 reads of one tensor": lambda path: write(path, one_read(4, 8_192)),
    "2^40 matrices": lambda path: write(path, matrices(2**40)),
    "16,384 params": lambda path: write(path, params(16_384)),
    "16,384 nodes": lambda path: write(path, chain(16_382)),
    "255 calls of 128 nodes": lambda path: write(path, calls(255, 128)),
    "8,000 calls that join 60,000 values": lambda path: write(path, joined_calls(8_000, 60_000)),
    "1,000 calls that join 100 values": lambda path: write(path, joined_calls(1_000, 100)),
    "a call of 6,500 values": lambda path: write(path, wide_call(6_500)),
    "10,000 calls of 5,000 nodes": lambda path: write(path, calls(10_000, 5_000)),
    "5,000 values alive": lambda path: write(path, alive(5_000)),
    "400 values alive": lambda path: write(path, alive(400)),
    "products of sums": lambda path: write(path, powers(60)),
    "quotients in quotients": lambda path: write(path, nested(25)),
    "reshapes to 1,000 sizes": lambda path: write(path, reshapes(240)),
    "2,000 types of one hash": lambda path: write(path, one_hash(2_000)),
    "500,000 values": lambda path: write(path, graph(), raw=objects(500_000)),
    "4,000,000 values": lambda path: write(path, graph(), raw=objects(4_000_000)),
}
"""By name, what writes each bundle to a path."""

ONE_TENSOR = ("128 params of 8,192 reads of one tensor", "4 params of 8,192 reads of one tensor")
"""The bundles that are tried with `one_tensor`, which has all that they read."""


def one_tensor(path: Path) -> Path:
    """A checkpoint of the tensor that `one_read` reads."""
    return safetensors(path, {"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, bytes(4))


CHECKPOINTS: dict[str, Callable[[Path], Path]] = {
    "a shape of 20 times 2^62": lambda path: shaped(path, [2**62] * 20),
    "a shape of 16 times 2^62": lambda path: shaped(path, [2**62] * 16),
    "200,000 dimensions": lambda path: shaped(path, [2**62] * 200_000),
    "900,000 empty tensors": lambda path: empty_tensors(path, 900_000),
    "131,072 empty tensors": lambda path: empty_tensors(path, 131_072),
    "a pipe for a checkpoint": lambda path: pipe(path, "model.safetensors"),
    "a pipe for an index": lambda path: pipe(path, "model.safetensors.index.json"),
    "a pipe for a config": lambda path: pipe(path, "config.json"),
    "a name of 10 MB": lambda path: safetensors(path, {"n" * 10_000_000: {"dtype": "F32"}}),
    "a config 900 deep": lambda path: nested_config(path, 900),
    "a config of 200,000 entries": lambda path: large_config(path, 200_000),
}
"""By name, what writes each checkpoint to a path; they are opened with an honest bundle."""
