"""Which kernels a bundle's steps can launch on a target, and for which arguments each is compiled.

Triton compiles a kernel apart for integers that are 1 and for addresses and integers that are multiples of 16. Here it
is asked of the launches of many steps what is always so: that alone is compiled in, so that the kernel takes the
launch of any step. Sizes of a step are never asked. Where strides are rounder in steps of a multiple of 16 tokens and
sequences, a second kernel is compiled for those. So a launch has two kernels at most, however many sizes there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from contextlib import suppress
from typing import NamedTuple

from precast.ir.errors import TargetError
from precast.ir.graph.logit_parts import in_parts
from precast.ir.graph.schema import Apply, Graph, Node, Quantise, Recipe, Repack, Transpose
from precast.ir.graph.world import bound
from precast.ir.memory.capture import MOST_TOKENS
from precast.ir.native import world_text
from precast.ir.weights import recipes
from precast.ir.weights.tensorfile import element_bytes
from precast.kernels.choices import Case, cases
from precast.kernels.collectives.launches import Among
from precast.kernels.collectives.ways import MAX_PEERS
from precast.kernels.dequantise.launches import PARTS, STORED, Block, Part, quantising, quantising_key
from precast.kernels.launch_key import ALIGNED, MOST_INT32
from precast.kernels.measured import Table
from precast.kernels.records import Launch, Pointer, Stride
from precast.kernels.rounded.fusing import with_rounded_inputs
from precast.kernels.sampling.launches import rows_apart
from precast.kernels.step_launches import (
    DrawnPart,
    GraphLaunches,
    LaunchAt,
    Sizes,
    drawing_launches,
    known_ids_launches,
    part_drawing_launches,
    sums_launched,
)
from precast.kernels.use import Target, types_in, uses_in
from precast.kernels.without_torch.copies import (
    REARRANGED,
    REPACKED,
    rearranged,
    rearranged_key,
    repacked,
    repacked_key,
)

_ODD = (1, 2, 3, 5, 17)
"""Numbers of tokens and sequences that make addresses and strides as uneven as they get."""
_ROUND = 16
MOST_SEQUENCES = 1024
"""That drawing is asked for: beyond, a row of logits is divided as it is for so many."""
MOST_STEP = 8192
"""Tokens of a step: the engine's default."""


_Choices = tuple[tuple[tuple[tuple[str, tuple[int, int | None]], ...], str], ...]
Places = tuple[int, ...]
"""Of arguments, among those of a launch."""


class Variant(NamedTuple):
    """A kernel to compile: of a launch with this key, for arguments that are multiples of 16 (`aligned`) and 1
    (`ones`), and integers that take 64 bits (`wide`); by their places."""

    launch: Launch
    key: str
    forms: tuple[str, ...]
    aligned: Places
    ones: Places
    wide: Places


class World(NamedTuple):
    """So many ranks share each layer, and over so many parts of them experts are split."""

    tp: int
    ep: int

    @property
    def text(self) -> str:
        """As options name it."""
        return world_text(self.tp, self.ep)


ALONE = World(1, 1)


def of_worlds(graph: Graph, target: Target, tables: Sequence[Table], worlds: Sequence[World]) -> list[Variant]:
    """The kernels for all steps of a bundle's graph on every rank of these worlds, each once: `variants` of each, by
    the choices of these tables and by those of none.

    So what is compiled for a world is what is compiled for it alone.
    """
    found: dict[tuple[object, ...], Variant] = {}
    for world in worlds:
        for rank in range(world.tp):
            of_rank = bound(graph, {"rank": rank, **world._asdict()})
            of_world = target._replace(tp=world.tp)
            of_rank = with_rounded_inputs(of_rank, of_world)
            among = Among(rank, world.tp) if world.tp > 1 else None
            for each in variants(of_rank, known_targets(of_rank, of_world, tables), among):
                found.setdefault((each.key, each.aligned, each.ones, each.wide), each)
    return sorted(found.values(), key=lambda each: (each.launch.kernel, each.key))


def variants(graph: Graph, targets: Sequence[Target], among: Among | None = None) -> list[Variant]:
    """The kernels for all steps of a graph that is bound to its world, in a fixed order.

    `targets` are one GPU with all tables of choices that it may be loaded with. `among`: of which rank it is.
    """
    seen: dict[str, _Seen] = {}
    for target in targets:
        launches = GraphLaunches(graph, target)
        for sizes in sample_sizes(graph, target):
            is_round = sizes["T"] % _ROUND == sizes["B"] % _ROUND == 0
            for launch in engine_launches(launches, sizes):
                if launch.key:
                    seen.setdefault(launch.key, _Seen(launch)).add(launch.values(), is_round=is_round)
    found: dict[str, list[Variant]] = {}
    if among is not None:
        for launch in _part_launches(graph, targets[0], among):
            seen.setdefault(launch.key, _Seen(launch)).add(launch.values(), is_round=False)
        named = sums_launched(graph, targets[0], among)
        found = {key: [Variant(launch, key, known, (), (), ())] for launch, key, known in named}
    found |= {variant.key: [variant] for variant in _of_load(graph)}
    found |= {key: list(each.variants()) for key, each in seen.items()}
    in_order = sorted(found, key=lambda key: (found[key][0].launch.kernel, key))
    return [variant for key in in_order for variant in found[key]]


def _of_load(graph: Graph) -> Iterator[Variant]:
    """What a load launches: copies of params whose rows and columns are exchanged, and of words in another order.

    Elements that lie side by side may be copied as larger ones.
    """
    turned = {element_bytes(param.type.dtype) for param in graph.params if _is_turned(param.recipe)}
    for size in REARRANGED:
        if size >= min(turned, default=size + 1):
            yield Variant(rearranged(), *rearranged_key(REARRANGED[size]), (), (), ())
    found = set[str]().union(*(_repacked(param.recipe) for param in graph.params))
    for part in REPACKED:
        if part in found:
            yield Variant(repacked(part), *repacked_key(part), (), (), ())
    yield from _quantising(graph)


def _quantising(graph: Graph) -> Iterator[Variant]:
    """What quantises weights of each type that a checkpoint may have, and brings the results to where they belong."""
    found = {each for param in graph.params for each in _quantised(param.recipe)}
    for size in sorted({element_bytes(PARTS[part]) for part, _ in found}):
        yield Variant(rearranged(), *rearranged_key(REARRANGED[size]), (), (), ())
    for part, block in sorted(found):
        for stored in STORED:
            yield Variant(quantising(part, block), *quantising_key(part, block, stored), (), (), ())


def _quantised(recipe: Recipe) -> Iterator[tuple[Part, Block]]:
    if isinstance(recipe, Quantise):
        yield recipe.part, recipe.block
    for part in recipes.parts(recipe):
        yield from _quantised(part)


def _is_turned(recipe: Recipe) -> bool:
    return isinstance(recipe, Transpose) or any(map(_is_turned, recipes.parts(recipe)))


def _repacked(recipe: Recipe) -> set[str]:
    own = {recipe.part} if isinstance(recipe, Repack) else set[str]()
    return own.union(*map(_repacked, recipes.parts(recipe)))


def _part_launches(graph: Graph, target: Target, among: Among) -> Iterator[LaunchAt]:
    """What draws on a rank that has a part of the logits, of all numbers of rows that it is divided differently for."""
    found = in_parts(graph) if 2 <= among.size <= MAX_PEERS else None
    if found is None:
        return
    logits = types_in(found.graph)[found.graph.outputs["logits"]]
    for rows in rows_apart(MOST_SEQUENCES):
        yield from part_drawing_launches(logits.dtype, target, rows, DrawnPart(among, found.size, found.columns))


def known_targets(graph: Graph, target: Target, tables: Sequence[Table]) -> list[Target]:
    """A GPU with each of these tables and with none; and where launches alone compute the graph, all of them without
    torch, which other implementations may then stand in for. Of those that choose alike, the first."""
    known = [target, *(target._replace(table=table) for table in tables)]
    found: dict[_Choices, Target] = {}
    for each in (*known, *(each.without_torch for each in known)):
        with suppress(TargetError):
            found.setdefault(_choices(graph, each), each)
    return list(found.values())


def _choices(graph: Graph, target: Target) -> _Choices:
    """What computes each node, by the sizes of a step. Raises TargetError for what nothing computes."""
    return tuple(
        (tuple(case.sizes.items()), case.choice.record.name) for use in uses_in(graph, target) for case in cases(use)
    )


def engine_launches(launches: GraphLaunches, sizes: Sizes) -> Iterator[LaunchAt]:
    """What an engine launches in a step: the graph's nodes, tokens put in their places, tokens drawn."""
    graph, target = launches.graph, launches.target
    yield from known_ids_launches(target, sizes["T"])
    for node in launches.step(sizes):
        yield from (*node.launches, *node.within)
    logits = types_in(graph).get(graph.outputs.get("logits", ""))
    if logits is not None:
        for captured in (False, True):
            yield from drawing_launches(logits, target, sizes["R"], captured=captured)


def sample_sizes(graph: Graph, target: Target) -> Iterator[dict[str, int]]:
    """Steps of all classes of sizes that choices tell apart, of even and uneven numbers."""
    ends = {symbol: {*_ODD, _ROUND} for symbol in ("T", "B", "R")}
    ends["T"] |= {48, MOST_TOKENS, MOST_STEP}
    ends["R"] |= {64, 256, MOST_SEQUENCES}
    least = set()
    for use in uses_in(graph, target):
        for case in cases(use):
            for symbol, (low, high) in case.sizes.items():
                ends[symbol] |= {max(low, 1)} | (set() if high is None else {high, max(high - 1, 1)})
            tokens, sequences = (case.sizes.get(symbol, (0, None))[0] for symbol in ("T", "B"))
            least.add((max(tokens, sequences, 1), max(sequences, 1)))
    steps = {(tokens, min(count, tokens)) for tokens in ends["T"] for count in (1, _ROUND, tokens)}
    steps |= {(max(count, tokens), count) for count in ends["B"] | ends["R"] for tokens in (1, 48)}
    steps |= {(-(-tokens // _ROUND) * _ROUND, _ROUND) for tokens in ends["T"]}
    for tokens, count in sorted(steps | least):
        others = {symbol.name: 8 * count + tokens % 2 for symbol in graph.symbols}
        sizes = others | {"T": tokens, "B": min(count, MOST_SEQUENCES), "R": min(count, MOST_SEQUENCES)}
        most = {symbol.name: symbol.max for symbol in graph.symbols if symbol.max is not None}
        yield {name: min(value, most.get(name, value)) for name, value in sizes.items()}


class _Seen:
    """A launch by its key, and what its arguments were in the steps that were asked."""

    def __init__(self, first: LaunchAt) -> None:
        self._launch, self._key, self._forms = first.launch, first.key, first.forms
        given = list(enumerate(first.launch.args))
        self._addresses = [i for i, arg in given if isinstance(arg, Pointer)]
        self._strides = [i for i, arg in given if isinstance(arg, Stride)]
        self._numbers = [i for i, arg in given if isinstance(arg, (Stride, int, str, Apply))]
        self._values: dict[bool, set[tuple[int, ...]]] = {False: set(), True: set()}

    @property
    def kernel(self) -> str:
        """Its name."""
        return self._launch.kernel

    def add(self, values: Sequence[int], *, is_round: bool) -> None:
        """One more launch."""
        self._values[is_round].add(tuple(values))

    def variants(self) -> Iterator[Variant]:
        """That for round steps, if there is more to say of them, and that for all."""
        every = self._values[False] | self._values[True]
        wide = tuple(i for i in self._numbers if any(values[i] > MOST_INT32 for values in every))
        said = [self._always(among, every) for among in (self._values[True], every) if among and not self._launch.block]
        for aligned, ones in dict.fromkeys(said or [((), ())]):
            yield Variant(self._launch, self._key, self._forms, aligned, ones, wide)

    def _always(self, among: Set[tuple[int, ...]], every: Set[tuple[int, ...]]) -> tuple[Places, Places]:
        """The arguments that are multiples of 16, and those that are 1: of strides `among` some launches."""
        ones = tuple(i for i in self._strides if all(values[i] == 1 for values in among))
        even = [i for i in self._addresses if all(values[i] % ALIGNED == 0 for values in every)]
        even += [i for i in self._strides if all(values[i] % ALIGNED == 0 for values in among)]
        return tuple(sorted(even)), ones


def nodes_without_launches(graph: Graph, target: Target) -> list[Node]:
    """Those that a function of Triton's kernels computes in some steps of up to `MOST_STEP` tokens: it compiles when it
    is called."""

    def compiles(case: Case) -> bool:
        record, (least, _) = case.choice.record, case.sizes.get("T", (0, None))
        is_unknown = isinstance(record.runs, str) and record.within is None
        return record.kind == "triton" and is_unknown and least <= MOST_STEP

    return [use.node for use in uses_in(graph, target) if any(map(compiles, cases(use)))]
