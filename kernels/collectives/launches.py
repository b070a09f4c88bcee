"""The launches of `peers.cu`, by which GPUs that write each other's memory add up what they have. No torch.

Their tensors: `x`, `out.0`, of a norm `out.1`, `residual` and `weight`; `calls`, a counter with a word that ends who
waits; and `peer.0`, `peer.1`, ...: the memory of each rank. Sizes of a call are the symbols of `SIZES`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from precast.ir.graph.normed_sums import BOTH, NORM, SUM
from precast.ir.graph.schema import Block, Const, Dtype, Graph, Node, Ref, TensorType
from precast.ir.weights.tensorfile import element_bytes
from precast.kernels.collectives.ways import LAUNCH_BYTES, MAX_PEERS, VECTOR_BYTES, Way, way_of, ways_for
from precast.kernels.records import Launch, Pointer
from precast.kernels.use import types_in

FILE = "precast.kernels.collectives/peers.cu"
THREADS = 512
MOST_HELD = 4
"""Vectors of a row that a thread holds at most, of a norm."""
MACROS: Mapping[Dtype, str | None] = {"bfloat16": None, "float16": "FLOAT16", "float32": "FLOAT32"}
"""The element types that are added up, and what says so."""
BLOCKS, COUNT, HALF, LIMIT = SIZES = ("blocks", "count", "half", "limit")
"""Of a call: blocks, vectors or rows, vectors of a half of a rank's memory, nanoseconds to wait."""


class Among(NamedTuple):
    """A rank, one of `size` that share a layer."""

    rank: int
    size: int


class Norm(NamedTuple):
    """The numbers of `precast.rms_norm`."""

    eps: float
    offset: float
    cast_before_scale: bool


class Kind(NamedTuple):
    """What a kernel is compiled for. `width`: vectors of a row, of a norm."""

    way: Way
    dtype: Dtype
    width: int = 0
    norm: Norm | None = None


class Piece(NamedTuple):
    """What one launch takes of a call: from which vector, or row, how many; by which kernel, over how many blocks."""

    start: int
    num_units: int
    kind: Kind
    blocks: int


def launch_of(kind: Kind, among: Among, *, pdl: bool) -> Launch:
    """One launch of a kernel on this rank."""
    macro, norm = MACROS[kind.dtype], kind.norm
    constants: dict[str, int | float | bool | str] = {"RANK": among.rank, "RANKS": among.size, "DEPTH": kind.way.ahead}
    if macro:
        constants[macro] = True
    name, threads = str(kind.way.kernel), THREADS
    given: tuple[Pointer, ...] = (Pointer("x"), Pointer("out.0"))
    if norm is not None:
        name, threads = f"norm_{name}", min(THREADS, -(-kind.width // 32) * 32)
        given = (*given, Pointer("out.1"), Pointer("residual"), Pointer("weight"))
        constants |= {"WIDTH": kind.width, "THREADS": threads, "EPS": norm.eps, "OFFSET": norm.offset}
        constants["CAST_BEFORE_SCALE"] = norm.cast_before_scale
    return Launch(
        kernel=f"{FILE}:{name}", grid=(BLOCKS,), args=(*given, COUNT, Pointer("calls"), HALF, LIMIT, *peers(among)),
        constants=constants, block=threads, pdl=pdl,
    )  # fmt: skip


def peers(among: Among) -> tuple[Pointer | None, ...]:
    """The ranks' memory as kernels take it: of 8 ranks, those that there are."""
    return (*(Pointer(f"peer.{rank}") for rank in range(among.size)), *[None] * (MAX_PEERS - among.size))


def sum_pieces(ways: Sequence[Way], among: Among, dtype: Dtype, num_bytes: int) -> list[Piece] | None:
    """What adds up so many bytes; None: NCCL does."""
    way = way_of(tuple(ways), num_bytes)
    if way.kernel == "nccl" or dtype not in MACROS or num_bytes % VECTOR_BYTES:
        return None
    return [
        Piece(start, count, Kind(_fitting(way, count, among), dtype), min(way.num_blocks, -(-count // THREADS)))
        for start, count in _divided(way, num_bytes // VECTOR_BYTES, LAUNCH_BYTES // VECTOR_BYTES, among)
    ]


def norm_pieces(
    ways: Sequence[Way], among: Among, dtypes: Sequence[Dtype], num_rows: int, size: int, norm: Norm
) -> list[Piece] | None:
    """What adds up and norms `num_rows` rows of `size` elements; `dtypes` are those of x, residual and weight. None:
    these kernels don't."""
    row_bytes = size * element_bytes(dtypes[0])
    way, width = way_of(tuple(ways), num_rows * row_bytes), row_bytes // VECTOR_BYTES
    fits = row_bytes % VECTOR_BYTES == 0 and 0 < width <= MOST_HELD * THREADS
    if way.kernel == "nccl" or dtypes[0] not in MACROS or not fits or len(set(dtypes)) > 1:
        return None
    return [
        Piece(start, count, Kind(_fitting(way, count, among), dtypes[0], width, norm), min(way.num_blocks, count))
        for start, count in _divided(way, num_rows, max(1, LAUNCH_BYTES // row_bytes), among)
    ]


def graph_launches(graph: Graph, among: Among, *, pdl: bool) -> list[Launch]:
    """What a graph that is bound to a rank launches of these kernels in steps of any size, each of it once."""
    ways, kinds = ways_for(among.size), dict[Kind, None]()
    functions: list[Graph | Block] = [graph, *graph.blocks] if 2 <= among.size <= MAX_PEERS else []
    for function in functions:
        types = types_in(function)
        for node in function.main if isinstance(function, Graph) else function.nodes:
            if isinstance(node, Node) and node.op in (SUM, BOTH):
                kinds |= dict.fromkeys(_kinds(node, types, ways, among))
    return [launch_of(kind, among, pdl=pdl) for kind in kinds]


def norm_of(node: Node) -> Norm:
    """The numbers of the norm in an `all_reduce_residual_rms_norm`."""
    eps, offset, cast = (node.args.get(name) for name in ("eps", "offset", "cast_before_scale"))
    assert isinstance(eps, Const), "verified: a number"
    given = offset.value if isinstance(offset, Const) else 0.0
    return Norm(float(eps.value), float(given), isinstance(cast, Const) and bool(cast.value))  # type: ignore[arg-type]


def norm_after(node: Node) -> Node:
    """The norm of an `all_reduce_residual_rms_norm`, whose `x` is the sum already."""
    args = {name: arg for name, arg in node.args.items() if name != "group"}
    return msgspec.structs.replace(node, op=NORM, args=args)


def dtypes_of(node: Node, types: Mapping[str, TensorType]) -> list[Dtype]:
    """Those of the tensors of an `all_reduce_residual_rms_norm`: x, residual and weight."""
    args = (node.args[name] for name in ("x", "residual", "weight"))
    return [types[arg.name].dtype for arg in args if isinstance(arg, Ref)]


def _kinds(node: Node, types: Mapping[str, TensorType], ways: Sequence[Way], among: Among) -> Iterator[Kind]:
    """The kernels of calls of all the sizes that ways tell apart."""
    kind = node.outputs[0].type
    size = kind.shape[-1]
    if not isinstance(size, int):
        return
    most = [way.up_to or LAUNCH_BYTES for way in ways]
    for num_bytes in (*most, *(each + LAUNCH_BYTES for each in most), size * element_bytes(kind.dtype)):
        rows = max(1, num_bytes // (size * element_bytes(kind.dtype)))
        for count in {1, rows, among.size - 1, among.size}:
            if node.op == SUM:
                made = sum_pieces(ways, among, kind.dtype, count * size * element_bytes(kind.dtype))
            else:
                made = norm_pieces(ways, among, dtypes_of(node, types), count, size, norm_of(node))
            yield from (piece.kind for piece in made or ())


def _divided(way: Way, count: int, most: int, among: Among) -> Iterator[tuple[int, int]]:
    """The first, and how many, of what each launch takes; none is shorter than the ranks are many, if it can be."""
    start = 0
    while start < count:
        size = min(most, count - start)
        if way.kernel == "two_shot" and 0 < count - start - size < among.size < size:
            size -= among.size
        yield start, size
        start += size


def _fitting(way: Way, count: int, among: Among) -> Way:
    """The way of a launch: where there is not even one for each rank to add up, one shot."""
    return way._replace(kernel="one_shot") if count < among.size else way
