"""What a rank's program launches where ranks put together what they have: numbers, as all launches of the program.

GPUs that write each other's memory launch `kernels/collectives/peers.cu`, as torch's backend does, in the same way;
what these kernels don't do is NCCL's. Nothing here is connected: addresses of the ranks' memory have names until a step
runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property

from precast.ir.graph import schema as ir
from precast.ir.graph.normed_sums import BOTH, GROUP, SUM
from precast.ir.memory.strides import contiguous
from precast.ir.weights.tensorfile import element_bytes
from precast.kernels.collectives import launches
from precast.kernels.collectives.launches import Among, Kind, Piece
from precast.kernels.collectives.ways import MAX_PEERS, VECTOR_BYTES, Way, half_bytes, ways_for
from precast.kernels.launch_key import forms, launch_key
from precast.kernels.records import Launch, Pointer
from precast.loader.driver.nccl import DTYPES
from precast.loader.driver.placed import WORKSPACE, At, NotCoveredError, Placed, Template

GATHER = "precast.all_gather"
CALLS, PEER = "<calls>", "<peer {}>"
"""Memory that the kernels share beside the tensors: the counter, and that of each rank."""
ALL_REDUCE, ALL_GATHER, COPY_ROWS = "nccl:all_reduce", "nccl:all_gather", "driver:copy_rows"
"""What is called in the place of a kernel, by the names that launches have it by."""


class Collectives:
    """How the ranks of a world put things together, as one of them does it."""

    def __init__(self, among: Among, *, has_peers: bool, pdl: bool, limit: int) -> None:
        """`has_peers`: the ranks' GPUs write each other's memory. `limit`: nanoseconds that kernels wait for others."""
        assert not has_peers or 2 <= among.size <= MAX_PEERS, "so many ranks have peers"
        self.among, self.has_peers = among, has_peers
        self._pdl, self._limit = pdl, limit
        self._ways: tuple[Way, ...] = ways_for(among.size)
        self._kernels: dict[Kind, tuple[Launch, str]] = {}

    @property
    def memory_bytes(self) -> int:
        """Of the memory that each rank's GPU opens to the others."""
        return 2 * half_bytes(self._ways, self.among.size)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Of the memory that the launches share."""
        return (CALLS, *(PEER.format(rank) for rank in range(self.among.size))) if self.has_peers else ()

    def launched(self, graph: ir.Graph) -> list[tuple[Launch, str]]:
        """The kernels of a graph's steps of any size, each with its key."""
        if not self.has_peers:
            return []
        made = launches.graph_launches(graph, self.among, pdl=self._pdl)
        return [(launch, _key(launch)) for launch in made]

    def wants_nccl(self, graph: ir.Graph) -> bool:
        """Whether steps of a graph may call NCCL."""
        functions: list[ir.Graph | ir.Block] = [graph, *graph.blocks]
        return any(
            not self.has_peers or node.op == GATHER or not _is_of_vectors(node)
            for function in functions for node in _nodes(function) if is_collective(node)
        )  # fmt: skip

    def normed(self, node: ir.Node, tensors: Mapping[str, Placed]) -> tuple[list[Template], Placed | None]:
        """The launches of a sum with the norm after it; and the sum, in the workspace, where its norm is another
        launch."""
        x, y = tensors["x"], tensors["out.0"]
        _check_dense(node, x, tensors["residual"], tensors["weight"])
        rows, size = math.prod(x.layout.shape[:-1]), x.layout.shape[-1]
        norm = launches.norm_of(node)
        dtypes: list[ir.Dtype] = [tensors[name].dtype for name in ("x", "residual", "weight")]
        pieces = launches.norm_pieces(self._ways, self.among, dtypes, rows, size, norm) if self.has_peers else None
        if pieces is None:
            total = Placed(WORKSPACE, 0, x.dtype, contiguous(x.layout.shape))
            return list(self._sums(node, x, total)), total
        row_bytes = size * element_bytes(x.dtype)
        moving = {"x": x, "out.0": y, "out.1": tensors["out.1"], "residual": tensors["residual"]}
        return [self._piece(piece, row_bytes, moving, {"weight": tensors["weight"]}) for piece in pieces], None

    def summed(self, node: ir.Node, tensors: Mapping[str, Placed]) -> list[Template]:
        """The launches of a sum."""
        return list(self._sums(node, tensors["x"], tensors["out.0"]))

    def gathered(self, node: ir.Node, tensors: Mapping[str, Placed]) -> Iterator[Template]:
        """The launches that put all ranks' tensors one after another: into the workspace, and in order from there."""
        x, out = tensors["x"], tensors["out.0"]
        _check_dense(node, x)
        given = node.args["dim"]
        assert isinstance(given, ir.Const), "verified: a dimension"
        dim = int(given.value) % len(x.layout.shape)  # type: ignore[arg-type]
        outer = math.prod(x.layout.shape[:dim])
        if not x.num_bytes:
            return
        into = out.at() if outer == 1 else At(WORKSPACE, 0)
        yield _call(ALL_GATHER, into, x.at(), x.num_bytes)
        if outer > 1:
            row = x.num_bytes // outer
            for rank in range(self.among.size):
                target = out.at(rank * row)
                source = into._replace(offset=into.offset + rank * x.num_bytes)
                yield _call(COPY_ROWS, target, row * self.among.size, source, row, row, outer)

    def _sums(self, node: ir.Node, x: Placed, out: Placed) -> Iterator[Template]:
        _check_dense(node, x)
        pieces = launches.sum_pieces(self._ways, self.among, x.dtype, x.num_bytes) if self.has_peers else None
        if pieces is not None:
            yield from (self._piece(piece, VECTOR_BYTES, {"x": x, "out.0": out}, {}) for piece in pieces)
        elif x.dtype not in DTYPES:
            raise NotCoveredError(f"{node.op} of {x.dtype} is no sum of NCCL's")
        elif x.num_bytes:
            yield _call(ALL_REDUCE, out.at(), x.at(), math.prod(x.layout.shape), DTYPES[x.dtype])

    def _piece(
        self, piece: Piece, unit_bytes: int, moving: Mapping[str, Placed], still: Mapping[str, Placed]
    ) -> Template:
        """One launch. `moving` tensors begin at the piece's first unit, `still` ones at their beginning."""
        start, count, kind, blocks = piece
        launch, key = self._kernel(kind)
        first = {name: each.at(start * unit_bytes) for name, each in moving.items()}
        names: dict[str, At | int] = {**first, **{name: each.at() for name, each in still.items()}}
        names |= {launches.COUNT: count, launches.HALF: half_bytes(self._ways, self.among.size) // VECTOR_BYTES}
        names |= {launches.LIMIT: self._limit, "calls": At(CALLS, 0)}
        names |= {f"peer.{rank}": At(PEER.format(rank), 0) for rank in range(self.among.size)}
        return Template(launch, key, (blocks, 1, 1), tuple(_value(arg, names) for arg in launch.args))

    def _kernel(self, kind: Kind) -> tuple[Launch, str]:
        if kind not in self._kernels:
            launch = launches.launch_of(kind, self.among, pdl=self._pdl)
            self._kernels[kind] = launch, _key(launch)
        return self._kernels[kind]


def is_collective(node: ir.Node) -> bool:
    """Whether the node puts together what ranks have, in a way that is known here."""
    return node.op in (SUM, BOTH, GATHER) and node.args.get("group") == GROUP


def _key(launch: Launch) -> str:
    return launch_key(launch, forms(launch, lambda pointer: "uint8"))


def _nodes(function: ir.Graph | ir.Block) -> Iterable[ir.Node]:
    items: Sequence[ir.Node | ir.Call] = function.main if isinstance(function, ir.Graph) else function.nodes
    return (item for item in items if isinstance(item, ir.Node))


def _is_of_vectors(node: ir.Node) -> bool:
    """Whether the rows of what is added up are whole vectors, of a type that kernels add up."""
    kind = node.outputs[0].type
    size = kind.shape[-1]
    return (
        kind.dtype in launches.MACROS and isinstance(size, int) and size * element_bytes(kind.dtype) % VECTOR_BYTES == 0
    )


def _check_dense(node: ir.Node, *tensors: Placed) -> None:
    for each in tensors:
        if not each.layout.is_contiguous or each.offset % VECTOR_BYTES:
            raise NotCoveredError(f"{node.op} takes a view of {each.dtype} {list(each.layout.shape)} with gaps")


def _value(arg: object, names: Mapping[str, At | int]) -> At | int | None:
    if arg is None:
        return None
    name = arg.tensor if isinstance(arg, Pointer) else arg
    assert isinstance(name, str), "a pointer or a size of `launches.SIZES`"
    return names[name]


def _call(name: str, *values: At | int) -> Template:
    return Template(Launch(kernel=name, grid=(1,), args=(), library=True), "", (1, 1, 1), values)
