"""The launches that draw a token for each row of logits without sorting: see `precast.kernels.sampling.triton`."""

from __future__ import annotations

from typing import NamedTuple

from precast.ir.graph import symbols
from precast.ir.graph.schema import Dtype, Expr
from precast.ir.graph.symbols import floordiv, maximum, minimum, mul, numel
from precast.kernels.collectives.launches import Among, peers
from precast.kernels.records import Launch, Pointer, Stride
from precast.kernels.rows import known, overlaps
from precast.kernels.sampling import limits
from precast.kernels.use import Use


class _Workspace(NamedTuple):
    """The parts of the workspace in their order, int64 first: [R, n] by split, some by pass too."""

    sums: Pointer
    maxima: Pointer
    tops: Pointer
    least: Pointer
    places: Pointer
    scores: Pointer
    drawn: Pointer
    plan: Pointer
    limits: Pointer


def workspace(use: Use) -> Expr:
    """Bytes that the launches hold: lists of each row, whose sizes don't depend on the vocabulary's."""
    return mul(limits.row_bytes(), numel(use.shape("logits")[:-1]))


class _Rows(NamedTuple):
    """What the launches of some rows of a vocabulary of `size` tokens share."""

    num_rows: Expr
    size: int
    splits: Expr
    pdl: bool

    @property
    def held(self) -> _Workspace:
        return _divided(self.num_rows)

    def scan(self, logits: str, own: _Own) -> Launch:
        held = self.held
        return Launch(
            kernel=f"{_KERNELS}:scan_kernel",
            grid=(self.num_rows, own.splits),
            args=(*_line(logits), held.tops, held.least, held.places, held.maxima, own.first_split),
            constants={**self._sizes, **own.tokens, "OWN_GROUPS": limits.OWN_GROUPS, "BLOCK": limits.BLOCK},
            num_warps=limits.NUM_WARPS,
            pdl=self.pdl,
        )

    def prepare(self) -> Launch:
        held = self.held
        scanned = (held.tops, held.least, held.places, held.maxima)
        parameters: tuple[Pointer | Stride, ...] = (*map(Pointer, _ASKED), *(Stride(name, 0) for name in _ASKED))
        return Launch(
            kernel=f"{_KERNELS}:prepare_kernel",
            grid=(self.num_rows,),
            args=(Pointer("out.0"), *parameters, *scanned, held.plan, held.limits, self.splits),
            constants={**self._sizes, "OWN_GROUPS": limits.OWN_GROUPS, "GROUPS": limits.GROUPS},
            num_warps=limits.NUM_WARPS,
            pdl=self.pdl,
        )

    def one_pass(self, number: int, logits: str, own: _Own, serves: int) -> Launch:
        return Launch(
            kernel=f"{_KERNELS}:pass_kernel",
            grid=(self.num_rows, own.splits),
            args=(*_line(logits), *self._passed, self.splits, own.first_split),
            constants={
                **self._sizes,
                **own.tokens,
                **_lists(),
                "PASS": number,
                "BLOCK": limits.BLOCK,
                "SERVES": serves,
            },
            num_warps=limits.NUM_WARPS,
            pdl=self.pdl,
        )

    def finish(self, logits: str) -> Launch:
        return Launch(
            kernel=f"{_KERNELS}:finish_kernel",
            grid=(self.num_rows,),
            args=(Pointer("out.0"), *_line(logits), *self._passed, self.splits),
            constants={**self._sizes, **_lists(), "SHORT": limits.SHORT, "BLOCK": limits.CAPACITY},
            num_warps=limits.NUM_WARPS,
            pdl=self.pdl,
        )

    @property
    def _passed(self) -> tuple[Pointer, ...]:
        held = self.held
        keys = held.maxima._replace(dtype="int64")
        return held.sums, held.scores, held.drawn, held.plan, held.limits, keys

    @property
    def _sizes(self) -> dict[str, int | float | bool | str]:
        return {"SIZE": self.size, "SPLITS": limits.MAX_SPLITS, "PDL": self.pdl}


class _Own(NamedTuple):
    """The tokens that logits have, and which of the programs of a row go over them."""

    first: int
    last: int
    splits: Expr
    first_split: int = 0

    @property
    def tokens(self) -> dict[str, int | float | bool | str]:
        """The constants that say so."""
        return {"FIRST": self.first, "LAST": self.last}


_KERNELS = "precast.kernels.sampling.triton"
_ASKED = ("temperature", "top_k", "top_p", "min_p", "seeds", "steps")
ALL, ALONE, SHARED = 0, 1, 2
"""Which rows a pass serves: see `pass_kernel`."""


def _line(logits: str) -> tuple[Pointer | Stride, ...]:
    return Pointer(logits), Stride(logits, 0), Stride(logits, 1)


def _lists() -> dict[str, int | float | bool | str]:
    return {"CAPACITY": limits.CAPACITY, "KEYS": row_keys(), "PASSES": limits.PASSES}


def row_keys() -> int:
    """Places for listed tokens that a row has, in the memory of its maxima."""
    return limits.MAX_SPLITS * limits.OWN_GROUPS // 2


def num_splits(rows: Expr) -> Expr:
    """Programs that share a row."""
    return minimum(limits.MAX_SPLITS, maximum(limits.MIN_SPLITS, floordiv(limits.PROGRAMS, maximum(rows, 1))))


def sample(use: Use) -> tuple[Launch, ...]:
    """The launches of version 2 of the op: a scan, what it tells of each row, passes over the row, and the end."""
    count, size = numel(use.shape("logits")[:-1]), known(use, "logits", -1)
    rows = _Rows(count, size, num_splits(count), overlaps(use))
    own = _Own(0, size, rows.splits)
    passes = (rows.one_pass(i, "logits", own, ALL) for i in range(limits.PASSES))
    return (rows.scan("logits", own), rows.prepare(), *passes, rows.finish("logits"))


def rows_apart(most_rows: int) -> list[int]:
    """Numbers of rows, up to so many, one of each kind that programs divide differently."""
    first = {symbols.evaluate(num_splits(rows), {}): rows for rows in range(most_rows, 0, -1)}
    return sorted({*first.values(), most_rows})


class OfParts(NamedTuple):
    """The launches of a rank that has a part of the vocabulary, and how many programs of a row it has.

    They work on a rank's `logits`, on memory `held` of `row_bytes` a row, and on `whole` rows. After `scan` the ranks
    put together what it has found, after `list` the best scores, lists, and rows that have top_p alone.
    """

    scan: tuple[Launch, ...]
    list: tuple[Launch, ...]
    finish: tuple[Launch, ...]
    splits: int


def sample_part(num_rows: int, size: int, columns: int, rank: int, num_ranks: int, *, pdl: bool) -> OfParts:
    """Version 2 of the op for `num_rows` rows of `size` tokens, of which each rank has so many `columns`."""
    all_splits = symbols.evaluate(num_splits(num_rows), {})
    splits = max(1, all_splits // num_ranks)
    rows = _Rows(num_rows, size, splits * num_ranks, pdl)
    own = _Own(rank * columns, min((rank + 1) * columns, size), splits, rank * splits)
    whole = _Own(0, size, splits * num_ranks)
    passes = (rows.one_pass(i, "whole", whole, SHARED) for i in range(limits.PASSES))
    made = OfParts(
        (rows.scan("logits", own),), (rows.prepare(), rows.one_pass(0, "logits", own, ALONE)),
        (*passes, rows.finish("whole")), splits,
    )  # fmt: skip
    scan, lists, finish = (tuple(map(_in_held, each)) for each in (made.scan, made.list, made.finish))
    return OfParts(scan, lists, finish, splits)


def constants_of(
    rank: int, ranks: int, size: int, columns: int, dtype: Dtype
) -> tuple[tuple[str, int | float | bool | str], ...]:
    """What `parts.cu`, between these launches, is compiled with."""
    return (
        ("RANK", rank), ("RANKS", ranks), ("SIZE", size), ("COLUMNS", columns), ("WIDE", dtype == "float32"),
        ("SPLITS", limits.MAX_SPLITS), ("OWN_GROUPS", limits.OWN_GROUPS), ("PASSES", limits.PASSES),
        ("CAPACITY", limits.CAPACITY), ("KEYS", row_keys()), ("PLAN", limits.PLAN),
    )  # fmt: skip


PARTS = "precast.kernels.sampling/parts.cu"
PARTS_THREADS, PARTS_BLOCKS = 256, 32


def told(name: str, among: Among, size: int, columns: int, dtype: Dtype, *, pdl: bool) -> Launch:
    """The launch of `scanned` or `drawn` of `parts.cu` on a rank: what ranks tell each other between those of
    `sample_part`.

    Its tensors are named as the kernel's arguments; `peer.0`, ... are the ranks' memory. Numbers are symbols of these
    names, too: `stride` is that of the rank's logits from row to row.
    """
    pointers = {"scanned": ("tops", "least", "places", "maxima"), "drawn": ("scores", "drawn", "plan", "maxima")}[name]
    given: tuple[Pointer | Expr, ...] = tuple(map(Pointer, pointers))
    if name == "drawn":
        given = (*given, Pointer("logits"), "stride", Pointer("whole"), "rows")
    grid: Expr = minimum("rows", PARTS_BLOCKS) if name == "drawn" else "rows"
    return Launch(
        kernel=f"{PARTS}:{name}", grid=(grid,),
        args=(*given, "splits", "most_rows", Pointer("calls"), "limit", *peers(among)),
        constants=dict(constants_of(*among, size, columns, dtype)), block=PARTS_THREADS, pdl=pdl,
    )  # fmt: skip


def told_bytes(ranks: int, columns: int, element_bytes: int, most_rows: int) -> int:
    """The memory of each rank that `told` writes to the others, for up to so many rows of logits."""
    scan = limits.MAX_SPLITS // ranks * (3 + limits.OWN_GROUPS)
    row = -(-columns * element_bytes // 4)
    return 8 * ranks * (most_rows * (2 * scan + 1 + 2 * limits.CAPACITY) + 2 * PARTS_BLOCKS * row)


def _in_held(launch: Launch) -> Launch:
    """The launch with memory that it is given in the place of workspace."""
    args = [arg._replace(tensor="held") if isinstance(arg, Pointer) and arg.tensor == "workspace" else arg
            for arg in launch.args]  # fmt: skip
    return launch._replace(args=tuple(args))


def held_offsets(num_rows: int) -> dict[str, int]:
    """Where the parts of what is held begin, in bytes, by name."""
    found = _divided(num_rows)._asdict()
    return {name: symbols.evaluate(pointer.offset, {}) for name, pointer in found.items()}


def _divided(rows: Expr) -> _Workspace:
    """One piece of memory, divided: `limits.row_bytes` for each row."""
    splits, passes = limits.MAX_SPLITS, limits.PASSES
    parts: list[tuple[Dtype, int]] = [
        ("int64", splits * passes), ("float32", splits * limits.OWN_GROUPS), ("float32", splits), ("float32", splits),
        ("int32", splits), ("float32", splits * passes), ("int32", splits * passes), ("int32", limits.PLAN),
        ("float32", limits.LIMITS),
    ]  # fmt: skip
    found, offset = [], 0
    for dtype, count in parts:
        found.append(Pointer("workspace", dtype, mul(offset, rows)))
        offset += count * (8 if dtype == "int64" else 4)
    assert offset == limits.row_bytes()
    return _Workspace(*found)
