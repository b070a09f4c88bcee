"""Structs to bytes and back: one encoding for each value, and the limits of what is decoded."""

from __future__ import annotations

import json
import struct
import sys

import msgspec
import pytest
import zstandard

from examples import tiny_constants, tiny_graph, tiny_manifest
from precast.ir import encoding, limits
from precast.ir.bundle import codec
from precast.ir.bundle.scan import scan
from precast.ir.errors import BundleError
from precast.ir.graph.schema import Apply, CachePlan, Cast, Const, Graph, Param, Read, Symbol, TensorType, Value
from precast.ir.weights import tensorfile
from precast.ir.weights.tensorfile import TensorFileError


def raw_of(graph: Graph) -> bytes:
    """The graph's encoding before compression."""
    return zstandard.ZstdDecompressor().decompress(encoding.encode_graph(graph))


def empty_graph(**parts: object) -> Graph:
    """A graph of nothing but `parts`."""
    nothing = {"symbols": (), "inputs": (), "params": (), "constants": (), "blocks": (), "main": (), "outputs": {}}
    return Graph(**(nothing | parts))  # type: ignore[arg-type]


def refusal(data: bytes) -> str:
    """The code of the error that the scan gives."""
    with pytest.raises(BundleError) as caught:
        scan(data, "graph")
    return caught.value.code


# --- graphs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_layers", [0, 1, 2, 126])
def test_graph_round_trip(num_layers: int) -> None:
    graph = tiny_graph(num_layers)

    data = encoding.encode_graph(graph)

    assert encoding.decode_graph(data) == graph
    assert encoding.encode_graph(encoding.decode_graph(data)) == data


def test_equal_graphs_have_one_encoding() -> None:
    # msgspec leaves a default out only when it is the very object: an equal one must not make other bytes.
    left = empty_graph()
    right = empty_graph(caches=CachePlan())

    assert left == right
    assert encoding.encode_graph(left) == encoding.encode_graph(right)


def test_order_of_arguments_is_no_part_of_the_encoding() -> None:
    graph = tiny_graph()
    first = graph.main[0]
    turned = msgspec.structs.replace(first, args=dict(reversed(first.args.items())))

    assert encoding.encode_graph(
        msgspec.structs.replace(graph, main=(turned, *graph.main[1:]))
    ) == encoding.encode_graph(graph)


def test_keys_stand_in_order() -> None:
    plain = msgspec.msgpack.decode(raw_of(tiny_graph()))

    def check(value: object) -> None:
        if isinstance(value, dict):
            assert list(value) == sorted(value)
        for child in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            check(child)

    check(plain)
    assert list(plain) == ["blocks", "caches", "constants", "inputs", "main", "outputs", "params", "symbols"]


def test_frame_is_of_the_documented_form() -> None:
    data = encoding.encode_graph(tiny_graph())

    frame = zstandard.get_frame_parameters(data)
    assert frame.content_size == len(raw_of(tiny_graph()))
    assert (frame.dict_id, frame.has_checksum) == (0, False)


@pytest.mark.parametrize(
    ("graph", "code"),
    [
        (empty_graph(symbols=(Symbol("T", max=2**63),)), "graph-encoding"),
        (empty_graph(symbols=(Symbol("T", max=2**64),)), "graph-encoding"),
        (empty_graph(symbols=(Symbol("T", max=10**30),)), "graph-encoding"),
        (empty_graph(symbols=(Symbol("T" * 1025),)), "limit-exceeded"),
        (empty_graph(symbols=(Symbol(1),)), "graph-encoding"),  # type: ignore[arg-type]
        (empty_graph(symbols=[Symbol("T", True)]), "graph-encoding"),
    ],
)
def test_what_cannot_be_decoded_is_not_encoded(graph: Graph, code: str) -> None:
    with pytest.raises(BundleError) as caught:
        encoding.encode_graph(graph)

    assert caught.value.code == code


def test_not_a_number_is_not_encoded() -> None:
    graph = tiny_graph()
    node = graph.main[0]
    changed = msgspec.structs.replace(node, args={**node.args, "scale": Const(float("nan"))})

    with pytest.raises(BundleError, match="NaN") as caught:
        encoding.encode_graph(msgspec.structs.replace(graph, main=(changed, *graph.main[1:])))

    assert caught.value.code == "graph-encoding"


@pytest.mark.parametrize("depth", [100, 1000, 100_000])
def test_deep_recipe_is_not_encoded(depth: int) -> None:
    recipe: object = Read("x", (1,))
    for _ in range(depth):
        recipe = Cast(recipe, "bfloat16")  # type: ignore[arg-type]
    graph = empty_graph(params=(Param("p", TensorType("bfloat16", (1,)), recipe),))  # type: ignore[arg-type]

    with pytest.raises(BundleError) as caught:
        encoding.encode_graph(graph)

    assert caught.value.code == "graph-nesting"
    del graph
    while isinstance(recipe, Cast):  # A chain of this length would be freed recursively.
        recipe = recipe.of


def test_deep_expression_is_not_encoded() -> None:
    size: object = "T"
    for _ in range(40):
        size = Apply("add", (size, 1))  # type: ignore[arg-type]

    with pytest.raises(BundleError) as caught:
        encoding.encode_graph(empty_graph(inputs=(Value("x", TensorType("int64", (size,))),)))  # type: ignore[arg-type]

    assert caught.value.code == "graph-nesting"


# --- the scan --------------------------------------------------------------------------------------------------


def test_scan_takes_everything_that_the_encoder_writes() -> None:
    numbers = [0, 1, 127, 128, 255, 256, 65535, 65536, 2**32 - 1, 2**32, 2**63 - 1]
    negative = [-1, -32, -33, -128, -129, -32768, -32769, -(2**31), -(2**31) - 1, -(2**63)]
    strings = ["", "x", "x" * 31, "x" * 32, "x" * 255, "x" * 256, "\u20ac" * 300]
    lists = [[0] * count for count in (0, 1, 15, 16, 65535, 65536)]
    maps = [{str(i): i for i in range(count)} for count in (0, 1, 15, 16, 65535, 65536)]
    value = [None, True, False, 1.5, float("inf"), numbers, negative, strings, lists, maps]

    scan(msgspec.msgpack.encode(value), "graph")


def test_scan_stops_at_the_depth_limit() -> None:
    scan(b"\x91" * limits.MAX_NESTING + b"\xc0", "graph")

    assert refusal(b"\x91" * (limits.MAX_NESTING + 1) + b"\xc0") == "graph-nesting"


def test_scan_counts_objects() -> None:
    fits = struct.pack(">BI", 0xDD, limits.MAX_GRAPH_OBJECTS)
    above = struct.pack(">BI", 0xDD, limits.MAX_GRAPH_OBJECTS + 1)

    scan(fits + b"\xc0" * limits.MAX_GRAPH_OBJECTS, "graph")
    assert refusal(above + b"\xc0" * (limits.MAX_GRAPH_OBJECTS + 1)) == "limit-exceeded"


def test_every_prefix_of_a_graph_is_refused() -> None:
    raw = raw_of(tiny_graph(1))

    codes = {refusal(raw[:end]) for end in range(len(raw))}

    assert codes == {"graph-encoding"}


@pytest.mark.parametrize("marker", [0xC1, 0xC4, 0xC5, 0xC6, 0xC7, 0xC8, 0xC9, 0xCA, 0xD4, 0xD5, 0xD6, 0xD7, 0xD8])
def test_types_that_are_not_in_use(marker: int) -> None:
    assert refusal(bytes([marker]) + bytes(20)) == "graph-encoding"


# --- JSON ------------------------------------------------------------------------------------------------------


def test_manifest_round_trip() -> None:
    manifest = tiny_manifest()

    data = encoding.encode_manifest(manifest)

    assert encoding.decode_manifest(data) == manifest
    assert json.dumps(json.loads(data), sort_keys=True, separators=(",", ":")).encode() == data


def test_recursion_in_a_deep_caller_is_an_error_of_the_bundle() -> None:
    # The stack may be nearly used up where a bundle is opened.
    def nested(depth: int) -> None:
        if depth:
            nested(depth - 1)
        else:
            codec.decode_json(b"[" * 900 + b"]" * 900, list, "x")

    with pytest.raises(BundleError):
        nested(300)


def test_what_hides_below_a_key_that_stands_twice_is_an_error_of_the_bundle() -> None:
    """The second value takes the place of the first, however deep that is: one parser gets through, one may not."""
    codes = set()
    for depth in range(1, sys.getrecursionlimit() + 1):
        with pytest.raises(BundleError) as caught:
            codec.decode_foreign_json(b'{"a":%b%b,"a":1}' % (b"[" * depth, b"]" * depth), dict, "document", 1 << 16)
        codes.add(caught.value.code)

    assert codes == {"json-duplicate-key", "json-invalid"}


# --- tensor files ----------------------------------------------------------------------------------------------


def test_tensors_round_trip() -> None:
    tensors = {
        "z": ("float32", (2, 2), struct.pack("<4f", 1, 2, 3, 4)),
        "a": ("bool", (3,), b"\0\1\0"),
        "b": ("bfloat16", (1, 0), b""),
        "s": ("int64", (), struct.pack("<q", -5)),
    }

    data = tensorfile.encode(tensors)

    found = tensorfile.decode(data)
    assert {name: (dtype, shape, bytes(content)) for name, (dtype, shape, content) in found.items()} == tensors
    assert list(found) == ["s", "z", "b", "a"]
    assert tensorfile.encode(dict(reversed(tensors.items()))) == data


def test_tensors_lie_where_their_elements_are_aligned() -> None:
    tensors = {"a": ("uint8", (3,), b"abc"), "b": ("float64", (1,), bytes(8)), "c": ("float16", (1,), bytes(2))}

    entries = tensorfile.read_header(tensorfile.encode(tensors))

    assert all(entry.start % tensorfile.element_bytes(entry.dtype) == 0 for entry in entries.values())


def test_safetensors_reads_what_is_written() -> None:
    safetensors = pytest.importorskip("safetensors")

    found = dict(safetensors.deserialize(tensorfile.encode(tiny_constants())))

    assert found["inv_freq"]["dtype"] == "F32"
    assert found["inv_freq"]["shape"] == [2]
    assert bytes(found["inv_freq"]["data"]) == tiny_constants()["inv_freq"][2]


def test_content_of_a_wrong_size_is_not_encoded() -> None:
    with pytest.raises(TensorFileError, match="takes 8 bytes, found 7"):
        tensorfile.encode({"x": ("float32", (2,), bytes(7))})
