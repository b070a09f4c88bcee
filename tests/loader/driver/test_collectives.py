"""What a rank's program launches to put things together: what torch's backend launches, with the same numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

pytest.importorskip("cuda.bindings")

from precast.builder.build import build
from precast.ir.graph.logit_parts import in_parts
from precast.ir.graph.normed_sums import BOTH, GROUP, SUM
from precast.ir.graph.schema import Call, Const, Dtype, Graph, Node, Ref, TensorType, Value
from precast.ir.graph.world import bound
from precast.ir.memory import caches, strides
from precast.kernels.collectives.launches import Among, Kind, Norm, launch_of
from precast.kernels.collectives.peers import Peers
from precast.kernels.collectives.ways import half_bytes, ways_for
from precast.kernels.dtypes import BY_NAME
from precast.kernels.records import Pointer
from precast.kernels.use import GPU
from precast.loader.driver.collectives import ALL_GATHER, ALL_REDUCE, COPY_ROWS, GATHER, Collectives
from precast.loader.driver.coverage import Anywhere, covered
from precast.loader.driver.placed import WORKSPACE, At, NotCoveredError, Placed, Template
from precast.loader.sizing import EngineLimits

NORM = Norm(1e-5, 1.0, cast_before_scale=True)
LIMIT = 7_000_000_000
CALLS, PEERS = 1 << 40, [(2 + rank) << 40 for rank in range(8)]
"""Where the counter and the ranks' memory lie."""


class Noting(Peers):
    """Torch's group without its memory: launches are noted."""

    def __init__(self, among: Among) -> None:
        self.rank, self.size, self.ways = *among, ways_for(among.size)
        self._among, self._index, self.found = among, 0, list[tuple[Any, ...]]()
        self._others = SimpleNamespace(all_reduce=lambda out, x: self.found.append((ALL_REDUCE, x.data_ptr())))  # type: ignore[assignment]
        half = half_bytes(self.ways, self.size) // 16
        self._same = {"calls": CALLS, "half": half, "limit": LIMIT}
        self._same |= {f"peer.{rank}": PEERS[rank] for rank in range(self.size)}

    def _kernel(self, kind: Kind) -> Any:
        launch = launch_of(kind, self._among, pdl=True)
        given = ("x", "out.0", *(("out.1", "residual", "weight") if kind.norm else ()), "count")

        def note(grid: tuple[int, ...], values: tuple[int, ...], stream: int) -> None:
            named = self._same | dict(zip(given, values, strict=True))
            names = [arg.tensor if isinstance(arg, Pointer) else arg for arg in launch.args]
            numbers = tuple(None if name is None else named[name] for name in names)  # type: ignore[index]
            self.found.append((launch.kernel, tuple(launch.constants.items()), grid, numbers))

        return SimpleNamespace(launch=note)


@pytest.fixture(autouse=True)
def no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)


def resolved(templates: list[Template], tensors: dict[str, torch.Tensor]) -> list[tuple[Any, ...]]:
    """Launches as torch's are noted."""
    places = {"<calls>": CALLS} | {f"<peer {rank}>": PEERS[rank] for rank in range(8)}
    places |= {name: tensor.data_ptr() for name, tensor in tensors.items()}
    found: list[tuple[Any, ...]] = []
    for each in templates:
        values = tuple(places[v.base] + v.offset if isinstance(v, At) else v for v in each.values)
        if each.launch.library:
            found.append((each.launch.kernel, values[1]))
        else:
            found.append((each.launch.kernel, tuple(each.launch.constants.items()), each.grid, values))
    return found


def placed(tensors: dict[str, torch.Tensor], dtype: Dtype) -> dict[str, Placed]:
    return {name: Placed(name, 0, dtype, strides.contiguous(tensor.shape)) for name, tensor in tensors.items()}


def collectives(among: Among, *, has_peers: bool = True) -> Collectives:
    return Collectives(among, has_peers=has_peers, pdl=True, limit=LIMIT)


def node(op: str, kind: TensorType, *names: str, **args: Any) -> Node:
    made = tuple(Value(name, kind) for name in ("y", "s")[: 2 if op == BOTH else 1])
    constants = {name: Const(value) for name, value in args.items()}
    return Node(op, {**{name: Ref(name) for name in names}, **constants, "group": GROUP}, made)


SHAPES = [(1, 8), (3, 40), (1, 1, 4096), (1, 5, 4096), (300, 4096), (2100, 4096), (3, 5), (0, 4096)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("among", [Among(0, 2), Among(1, 2), Among(2, 3), Among(7, 8)], ids=str)
def test_sums_are_launched_as_torch_s_are(among: Among, shape: tuple[int, ...], dtype: Dtype) -> None:
    tensors = {name: torch.zeros(shape, dtype=BY_NAME[dtype]) for name in ("x", "out.0")}
    torchs = Noting(among)
    torchs.all_reduce(tensors["out.0"], tensors["x"])

    ours = collectives(among).summed(node(SUM, TensorType(dtype, shape), "x"), placed(tensors, dtype))

    assert resolved(ours, tensors) == torchs.found
    assert bool(torchs.found) == (0 not in shape)


@pytest.mark.parametrize("shape", [(1, 8), (3, 40), (1, 5, 4096), (1, 2100, 4096), (2, 16384), (2, 16392)], ids=str)
@pytest.mark.parametrize("among", [Among(1, 2), Among(3, 4)], ids=str)
def test_norms_of_sums_are_launched_as_torch_s_are(among: Among, shape: tuple[int, ...]) -> None:
    names = ("x", "residual", "out.0", "out.1")
    tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name in names}
    tensors["weight"] = torch.zeros(shape[-1:], dtype=torch.bfloat16)
    torchs = Noting(among)
    takes = torchs.all_reduce_norm(
        tensors["out.0"], tensors["out.1"], tensors["x"], tensors["residual"], tensors["weight"], NORM
    )
    wanted = node(BOTH, TensorType("bfloat16", shape), "x", "residual", "weight", **NORM._asdict())

    ours, left = collectives(among).normed(wanted, placed(tensors, "bfloat16"))

    assert (left is None) == takes == (shape[-1] <= 16384)
    if takes:
        assert resolved(ours, tensors) == torchs.found
        assert len(ours) > 0
    else:
        torchs.all_reduce(torch.zeros(shape, dtype=torch.bfloat16), tensors["x"])
        assert [each.launch.kernel for each in ours] == [each[0] for each in torchs.found]
        assert left == Placed(WORKSPACE, 0, "bfloat16", strides.contiguous(shape))


def test_without_peers_sums_are_nccl_s() -> None:
    tensors = {name: torch.zeros(5, 4096, dtype=torch.bfloat16) for name in ("x", "out.0")}

    (sum_of_all,) = collectives(Among(0, 2), has_peers=False).summed(
        node(SUM, TensorType("bfloat16", (5, 4096)), "x"), placed(tensors, "bfloat16")
    )

    assert (sum_of_all.launch.kernel, sum_of_all.launch.library) == (ALL_REDUCE, True)
    assert sum_of_all.values == (At("out.0", 0), At("x", 0), 5 * 4096, 9)


@pytest.mark.parametrize(("shape", "dim"), [((5, 6), 0), ((5, 6), -1), ((1, 4, 6), -1), ((1, 5), -1)])
def test_what_is_gathered_lies_in_order(shape: tuple[int, ...], dim: int) -> None:
    """As bytes are copied, of three ranks whose tensors are numbered."""
    size, whole = 3, list(shape)
    whole[dim] *= size
    parts = [torch.arange(torch.Size(shape).numel()).reshape(shape) + 1000 * rank for rank in range(size)]
    tensors = {"x": parts[1], "out.0": torch.full(whole, -1), WORKSPACE: torch.full((size, *shape), -1)}
    wanted = node(GATHER, TensorType("int64", tuple(whole)), "x", dim=dim, size=size)
    given = {
        "x": placed({"x": parts[1]}, "int64")["x"],
        "out.0": Placed("out.0", 0, "int64", strides.contiguous(whole)),
    }

    for each in collectives(Among(1, size)).gathered(wanted, given):
        if each.launch.kernel == ALL_GATHER:
            into, _, num_bytes = each.values
            assert isinstance(into, At)
            assert num_bytes == 8 * parts[1].numel()
            tensors[into.base].view(-1)[: 3 * parts[1].numel()] = torch.cat([part.reshape(-1) for part in parts])
            continue
        assert each.launch.kernel == COPY_ROWS
        target, target_step, source, source_step, width, rows = each.values
        assert isinstance(target, At)
        assert isinstance(source, At)
        for row in range(int(rows)):  # type: ignore[arg-type]
            first, begin = (target.offset + row * target_step) // 8, (source.offset + row * source_step) // 8  # type: ignore[operator]
            numbers = tensors[source.base].view(-1)[begin : begin + width // 8]  # type: ignore[operator]
            tensors[target.base].view(-1)[first : first + width // 8] = numbers  # type: ignore[operator]

    assert torch.equal(tensors["out.0"], torch.cat(parts, dim))


def test_a_view_with_gaps_is_not_put_together() -> None:
    gaps = Placed("x", 0, "bfloat16", strides.Layout((4, 8), (16, 1)))
    into = Placed("out.0", 0, "bfloat16", strides.contiguous((4, 8)))

    with pytest.raises(NotCoveredError, match=r"precast\.all_reduce takes a view of bfloat16 \[4, 8\] with gaps"):
        collectives(Among(0, 2)).summed(node(SUM, TensorType("bfloat16", (4, 8)), "x"), {"x": gaps, "out.0": into})


# --- in the program of a model ---------------------------------------------------------------------------------------

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    from transformers import AutoConfig

    path = tmp_path_factory.mktemp("built") / "bundle"
    return build(AutoConfig.for_model("llama", **SIZES), path, dtype="bfloat16").graph


def of_rank(graph: Graph, *, in_parts_of: bool) -> Graph:
    made = bound(graph, {"rank": 1, "tp": 2, "ep": 1})
    if in_parts_of:
        found = in_parts(made)
        assert found is not None
        made = found.graph
    return msgspec.structs.replace(made, caches=caches.with_slabs(made.caches))


@pytest.mark.parametrize("has_peers", [True, False], ids=["peers", "NCCL"])
def test_a_rank_s_program_puts_together_what_its_graph_says(graph: Graph, has_peers: bool) -> None:
    own, among = of_rank(graph, in_parts_of=has_peers), Among(1, 2)
    how = collectives(among, has_peers=has_peers)
    program, addresses = covered(own, GPU._replace(tp=2), EngineLimits(32, 128, 64), how)
    blocks = {block.name: [node.op for node in block.nodes] for block in own.blocks}
    ops = [op for step in own.main for op in (blocks[step.block] if isinstance(step, Call) else [step.op])]
    sizes = {symbol.name: 8 for symbol in own.symbols} | {pool.pages: 6 for pool in own.caches.pools}
    ready, _ = program.ready(sizes, Anywhere(own, how.names).of(sizes), addresses)

    kernels = [each.launch.kernel.rpartition("/")[2].rpartition(".")[2] for each in ready]
    assert ops.count(BOTH) == 6
    assert ops.count(SUM) == 1
    if has_peers:
        assert (kernels.count("cu:norm_one_shot"), kernels.count("cu:one_shot")) == (6, 1)
        assert not how.wants_nccl(own)
        keys = {key for _, key in program.launches()}
        assert {each.key for each in ready} <= keys
    else:
        assert (kernels.count(ALL_REDUCE), kernels.count(ALL_GATHER), kernels.count(COPY_ROWS)) == (7, 1, 2)
        assert kernels.count("triton:rms_norm_kernel") == 6 + 1
        assert how.wants_nccl(own)


def test_without_ranks_a_graph_of_ranks_is_torch_s(graph: Graph) -> None:
    with pytest.raises(NotCoveredError, match=r"is computed by torch\.all_reduce"):
        covered(of_rank(graph, in_parts_of=True), GPU._replace(tp=2), EngineLimits(32, 128, 64))
