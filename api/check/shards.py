"""The proof of a shard plan: all ranks' graphs, run together in one process, give the unsharded model's logits.

Each rank is bound, reads its slices of one checkpoint by its own recipes, and has its own caches, as on its own device;
threads and simulated collectives take the place of devices and their connection (`precast.kernels.collectives`).
"""

from __future__ import annotations

import tempfile
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from precast.check.agreement import relative_error
from precast.check.excerpt import in_float32, some_of_each_layer
from precast.check.random_checkpoint import checkpoint_numbers, random_checkpoint
from precast.ir.artifact import Bundle
from precast.ir.errors import TargetError
from precast.ir.graph.schema import Call, Node
from precast.ir.graph.world import unsharded as of_one_rank
from precast.ir.memory import caches
from precast.ir.weights.checkpoint import CheckpointFiles
from precast.kernels.collectives.group import Group
from precast.kernels.collectives.together import run_stages
from precast.kernels.registry import target_of
from precast.loader.cache.arena import Arena
from precast.loader.cache.memory import CacheMemory
from precast.loader.cache.tables import PageTables
from precast.loader.placement import Placement, bind_world, check_world
from precast.loader.program.restore import restore
from precast.loader.run.drawing import Drawing
from precast.loader.run.runner import Runner
from precast.loader.run.stages import stages_of
from precast.loader.schedule.requests import Chunk, Request, Sizes, Step
from precast.loader.sizing import EngineLimits
from precast.loader.torch_device import open_device
from precast.loader.torch_load import constant_tensors
from precast.loader.weights.stream import load_weights

PROMPTS = (
    (5, 9, 70, 33, 12, 88, 3, 41, 100, 7, 64, 20),
    (17, 2, 45, 9),
    (99, 4, 4, 120, 56, 31, 8, 77, 23, 61, 14, 90),
)
"""Token ids of three sequences; of a smaller vocabulary what is left of them."""

STEPS = ((6, 1, 10), (4, 1, 0), (1, 1, 1), (1, 1, 1))
"""Tokens of each sequence that a step computes: prompts packed, a chunk beside a decoded token, decoding alone."""

MOST_NUMBERS = 1 << 26
"""In the params of a model that is run as it is; of a larger one, one layer of each kind."""

TOLERANCE = 1e-4
"""Of logits in float32, relative: the norm of the difference over the norm of the unsharded model's."""


class Proof(NamedTuple):
    """How far the ranks' logits are from the unsharded model's: the largest relative error of a step.

    `rank_bytes` are the bytes of the checkpoint that each rank needs, `model_bytes` those of the whole model.
    """

    tp: int
    ep: int
    error: float
    rank_bytes: tuple[int, ...]
    model_bytes: int
    pp: int = 1
    dp: int = 1

    @property
    def text(self) -> str:
        """The world in words."""
        ranks = f"{self.tp} ranks" if self.pp == 1 else f"{self.pp} stages of {self.tp} rank{'s' * (self.tp > 1)}"
        ranks += f", and the experts into {self.ep} parts" if self.ep > 1 else ""
        return ranks + (", each with sequences of its own" if self.dp > 1 else "")

    @property
    def holds(self) -> bool:
        """Whether all logits are within the tolerance."""
        return self.error < TOLERANCE


class _Model(NamedTuple):
    """What all ranks have in common."""

    bundle: Bundle
    files: CheckpointFiles

    @classmethod
    def open(cls, bundle: Bundle, weights: Path) -> _Model:
        """The bundle, whose layers take inputs as they are. Rounded to few bits, some would go to another number where
        sums in another order differ in a last bit; and ranks round the part of a row that they have."""
        graph = bundle.graph
        blocks = tuple(msgspec.structs.replace(each, nodes=tuple(map(_unrounded, each.nodes))) for each in graph.blocks)
        main = tuple(step if isinstance(step, Call) else _unrounded(step) for step in graph.main)
        graph = msgspec.structs.replace(graph, blocks=blocks, main=main)
        return cls(msgspec.structs.replace(bundle, graph=graph), CheckpointFiles.open(weights))


_ROUNDS_BY = {
    "precast.quantised_linear": ("activation", "input_scale"), "precast.quantised_experts": ("rounding",),
}  # fmt: skip
"""The ops that round inputs, and the arguments that say how."""


def _unrounded(node: Node) -> Node:
    left_out = _ROUNDS_BY.get(node.op)
    if left_out is None:
        return node
    args = {name: arg for name, arg in node.args.items() if name not in left_out}
    return msgspec.structs.replace(node, args=args)


class _Found(NamedTuple):
    """The logits of each step, `[R, V]` in the order of the sequences, or this rank's columns of it, and the bytes that
    were needed for them."""

    logits: list[torch.Tensor]
    num_bytes: int


def unsharded(bundle: Bundle, weights: Path) -> _Found:
    """What one rank alone computes: it can be compared with several worlds."""
    return _compute(_Model.open(bundle, weights), _placement(0, 1, 1), {})


def prove(
    bundle: Bundle, weights: Path, *, tp: int, ep: int = 1, pp: int = 1, dp: int = 1, alone: _Found | None = None
) -> Proof:
    """Compare `pp` stages of `tp` ranks, `ep` of which share the experts, with one rank, on the CPU; `weights` are
    those of the bundle. With `dp` as many as `tp`, each rank has some of the sequences, and perhaps none.

    The graph should be one of float32: the error is that of sums in another order. Inputs of layers stay as they are,
    also those that the graph rounds to few bits. `alone` is `unsharded`, if that is known.

    Raises RequestError for a world that the bundle excludes, what loading raises, and RuntimeError where the ranks
    don't call the same collectives.
    """
    model = _Model.open(bundle, weights)
    expected = _compute(model, _placement(0, 1, 1), {}) if alone is None else alone
    found = run_stages(
        pp, tp, lambda groups: _compute(model, _placement(groups["tp"].rank, tp, ep, groups["pp"].rank, pp, dp), groups)
    )
    errors = [
        relative_error(_whole(parts[start : start + tp], wanted), wanted)
        for parts, wanted in zip(zip(*(each.logits for each in found), strict=True), expected.logits, strict=True)
        for start in range(0, pp * tp, tp)
    ]
    return Proof(tp, ep, max(errors), tuple(each.num_bytes for each in found), expected.num_bytes, pp, dp)


def proofs(bundle: Bundle, weights: Path, *, most: int) -> Iterator[Proof]:
    """All worlds of 2 ranks to `most` that share the layers of the bundle, one by one, and all numbers of stages."""
    alone: _Found | None = None
    for world in bundle.graph.shards.worlds:
        for ep in world.ep if 1 < world.tp <= most else ():
            alone = alone or unsharded(bundle, weights)
            yield prove(bundle, weights, tp=world.tp, ep=ep, alone=alone)
    for pipeline in bundle.graph.shards.pipelines:
        if len(pipeline.layers) <= most:
            alone = alone or unsharded(bundle, weights)
            yield prove(bundle, weights, tp=1, pp=len(pipeline.layers), alone=alone)


class Excerpt(NamedTuple):
    """What was proven of a bundle with random weights: `layers` of its `all_layers`, those of other kinds alike."""

    proof: Proof
    layers: int
    all_layers: int


def prove_with_random_weights(bundle: Bundle, *, tp: int, ep: int = 1, pp: int = 1, dp: int = 1) -> Excerpt:
    """Compare ranks with one in float32, for whoever has no checkpoint. Of a large model one layer of each kind is
    kept, with all its sizes, or as many as there are stages.

    Raises what `prove` raises, and TargetError (device-memory) where not even that fits this machine's memory.
    """
    check_world(tp, ep, bundle.graph, pp=pp, dp=dp)
    kept = in_float32(bundle)
    if checkpoint_numbers(of_one_rank(kept.graph)) > MOST_NUMBERS:
        kept = some_of_each_layer(kept, pp)
    plain = of_one_rank(kept.graph)
    _check_room(checkpoint_numbers(plain))
    with tempfile.TemporaryDirectory() as folder:
        weights = random_checkpoint(plain, Path(folder))
        proof = prove(kept, weights, tp=tp, ep=ep, pp=pp, dp=dp)
    return Excerpt(proof, *(sum(isinstance(step, Call) for step in each.graph.main) for each in (kept, bundle)))


def _check_room(num_numbers: int) -> None:
    """The float32 params of all ranks together, the bfloat16 file, which may lie in memory, and a rest."""
    wanted, free = 4 * num_numbers * 3 // 2 + (1 << 30), open_device("cpu").free_bytes()
    if wanted > free:
        raise TargetError(
            "device-memory",
            f"one layer of each kind has {num_numbers / 1e9:.1f} billion numbers; to compare ranks takes "
            f"{wanted / (1 << 30):.1f} GiB of memory, and {free / (1 << 30):.1f} GiB are free",
            fix="use a machine with more memory; `precast build --check` proves the plan on the model made tiny",
        )


def _placement(rank: int, tp: int, ep: int, stage: int = 0, pp: int = 1, dp: int = 1) -> Placement:
    return Placement(rank, tp, ep, open_device("cpu"), stage, pp, dp)


def _whole(parts: Sequence[torch.Tensor], wanted: torch.Tensor) -> torch.Tensor:
    """The logits of all ranks, [R, V]: each rank's columns side by side, or of ranks that have all the worst."""
    if parts[0].shape == wanted.shape:
        return max(parts, key=lambda part: relative_error(part, wanted))
    return torch.cat(list(parts), 1)[:, : wanted.shape[1]]


def _compute(model: _Model, placement: Placement, groups: Mapping[str, Group]) -> _Found:
    """Load one rank, and run all steps. Its caches begin as NaN: what a sequence didn't write must not matter."""
    graph, device = bind_world(model.bundle.graph, placement), placement.device
    rules, whole = model.bundle.manifest.checkpoint, model.bundle.graph
    weights = load_weights(graph, rules, model.files, device=device, whole=whole)
    program = restore(graph, device=torch.device("cpu"), groups=groups)
    program.bind(weights.tensors)
    program.bind(constant_tensors(graph, model.bundle.constants, device))
    longest = max(map(len, PROMPTS))
    num_slabs = caches.slabs_for(caches.with_slabs(graph.caches), len(PROMPTS), longest, longest)
    memory = CacheMemory(graph.caches, num_slabs, device)
    memory.arena.fill_(0xFF)  # NaN in every floating type
    program.bind(memory.tensors)
    tables = PageTables(memory.plan, Arena(num_slabs))
    size = model.bundle.manifest.model.vocab_size
    prompts = [array("q", [each % size for each in ids]) for ids in PROMPTS]
    requests = [Request(i, ids, len(ids) + 1) for i, ids in enumerate(prompts)]
    for request in requests:
        request.table = tables.new_table()
        tables.grow(request.table, len(request.token_ids))
    limits = EngineLimits(len(PROMPTS), sum(map(len, PROMPTS)), longest)
    on = torch.device("cpu")
    drawing = Drawing(graph, on, target_of(on), stages=stages_of(whole, placement, groups))
    runner = Runner(program, graph, memory, device, limits, drawing=drawing)
    share = _Share(placement.rank, placement.dp)
    return _Found([_logits_of_step(runner, requests, lengths, share) for lengths in STEPS], weights.bytes_needed)


class _Share(NamedTuple):
    """Of `dp` ranks that have sequences of their own, the rank: it has each `dp`-th one."""

    rank: int
    dp: int

    def of(self, rank: int, items: Sequence[int]) -> Sequence[int]:
        """Those of a rank, of one item for each sequence."""
        return items[rank % self.dp :: self.dp]

    def sizes(self, lengths: Sequence[int]) -> Sizes | None:
        """How large the step of each rank is made, for these tokens of each sequence; None: there are no others."""
        num_tokens = max(sum(self.of(rank, lengths)) for rank in range(self.dp))
        return Sizes(num_tokens, -(-len(lengths) // self.dp), num_tokens) if self.dp > 1 else None

    def rows(self, lengths: Sequence[int], num_rows: int) -> list[int]:
        """Where the logits of all sequences lie, in their order, among `num_rows` of each rank."""
        starts = [rank * num_rows for rank in range(self.dp)]
        found: list[int] = []
        for sequence, length in enumerate(lengths):
            start = starts[sequence % self.dp]
            found += range(start, start + length)
            starts[sequence % self.dp] += length
        return found


def _logits_of_step(runner: Runner, requests: Sequence[Request], lengths: Sequence[int], share: _Share) -> torch.Tensor:
    """Compute the next tokens of each request, or of those of a rank; the logits of all of them."""
    own = share.of(share.rank, range(len(requests)))
    chunks = [Chunk(requests[i], lengths[i], "all") for i in own if lengths[i]]
    sizes = share.sizes(lengths)
    ticket = runner.launch(Step([], chunks, sizes=sizes))
    for chunk in chunks:
        chunk.request.num_computed = chunk.end
    assert ticket.logits is not None, "a step that draws nothing gives its logits"
    rows = share.rows(lengths, sum(lengths) if sizes is None else sizes.num_rows)
    return ticket.logits.float()[rows]
