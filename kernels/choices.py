"""Chooses the implementation of a node: the first of the op's records that takes it, or the fastest that was measured.

A choice depends on the node's types, the target, and where records say so on the sizes of a step. No torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Literal, NamedTuple

from precast.ir.errors import BundleError, TargetError
from precast.ir.graph import symbols
from precast.ir.graph.schema import Dtype, Expr
from precast.ir.ops import table as ops
from precast.kernels.measured import Measured
from precast.kernels.records import Ranges, Record
from precast.kernels.use import COUNTS, Target, Use, of_one_rank, size, type_bytes

_FAMILIES: dict[str, tuple[str, ...]] = {
    "attention": ("paged_attention", "attention", "write_kv"),
    "block_sparse_attention": (
        "paged_select_blocks", "paged_block_sparse_attention", "select_blocks", "block_sparse_attention",
    ),
    "causal_conv": ("stateful_causal_conv", "causal_conv"),
    "collectives": (
        "send", "receive", "all_reduce", "all_gather", "reduce_scatter", "all_reduce_residual_rms_norm",
    ),
    "compress": ("stateful_compress", "compress"),
    "delta_rule": ("stateful_delta_rule", "delta_rule"),
    "embedding": ("embedding", "sharded_embedding", "quantised_embedding", "quantised_sharded_embedding"),
    "entries": (
        "paged_entry_attention", "paged_select_entries", "write_entries", "entry_attention", "select_entries",
    ),
    "experts": ("experts", "grouped_linear"),
    "fused": ("fused",),
    "gated_activation": ("gated_activation",),
    "gated_linear": ("gated_linear",),
    "gather_rows": ("gather_rows",),
    "latent_attention": ("latent_attention", "paged_latent_attention", "write_latent"),
    "layer_norm": ("layer_norm",),
    "linear_attention": ("stateful_linear_attention", "linear_attention"),
    "linear_recurrence": ("stateful_linear_recurrence", "linear_recurrence"),
    "quantised_experts": ("quantised_experts",),
    "quantised_linear": ("quantised_linear", "rounded_linear"),
    "rms_norm": ("rms_norm", "residual_rms_norm", "norm_residual_norm"),
    "rotary": ("rotary", "rotary_tables", "rope_frequencies"),
    "rotary_write_kv": ("rotary_write_kv",),
    "rounded": ("rounded_rms_norm", "rounded_residual_rms_norm", "rounded_gated_activation"),
    "route": ("route",),
    "sampling": ("sample",),
    "selective_scan": ("stateful_selective_scan", "selective_scan"),
    "sinkhorn": ("sinkhorn",),
    "sparse_attention": (
        "paged_select_keys", "paged_sparse_latent_attention", "write_index_keys", "select_keys",
        "sparse_latent_attention",
    ),
    "state_space_scan": ("stateful_state_space_scan", "state_space_scan"),
    "wkv": ("stateful_wkv", "wkv"),
}  # fmt: skip
"""The folders of this room, and the ops of Precast whose records each has in a module `records`: it is imported when
one of its ops is first asked for."""
_OF_ATEN: tuple[str, ...] = (
    "precast.kernels.linear.records",
    "precast.kernels.aten",
    "precast.kernels.without_torch.records",
)
"""Where records of PyTorch's ops are: what stands in for torch comes last."""

CPU_COPIES = 16
"""How often a CPU may hold an op's results and the activations that it takes, copied, widened and sorted."""
CPU_COPIES_OF_OTHERS = 4
"""The same of weights and of the cache's pages in use, which libraries copy in an order of their own."""


class Choice(NamedTuple):
    """The record that computes a node, and why this one."""

    record: Record
    reason: str


class Case(NamedTuple):
    """What computes a node in steps of these sizes; none are named if one record computes it in all."""

    sizes: Ranges
    choice: Choice


@cache
def all_records() -> tuple[Record, ...]:
    """Every record, family by family, the fastest of an op first."""
    modules = [*(f"precast.kernels.{family}.records" for family in _FAMILIES), *_OF_ATEN]
    return tuple(record for module in modules for record in import_module(module).RECORDS)


def records_of(op: str, version: int) -> tuple[Record, ...]:
    """The records of a version of an op, the fastest first.

    Raises BundleError `op-unknown` for a name or version that isn't in the op table.
    """
    if ops.lookup(op, version) is None:
        raise BundleError(
            "op-unknown",
            f"op {op}@{version} is not in the op table",
            fix="load the bundle with the Precast that built it, or a newer one",
        )
    return tuple(record for record in _records_of(op) if version in record.op_versions)


@cache
def _records_of(op: str) -> tuple[Record, ...]:
    """Of all versions."""
    namespace, _, name = op.partition(".")
    modules = _OF_ATEN
    if namespace == "precast":
        modules = tuple(f"precast.kernels.{family}.records" for family, names in _FAMILIES.items() if name in names)
    return tuple(record for module in modules for record in import_module(module).RECORDS if record.op == op)


def runnable(
    op: str,
    version: int,
    target: Target,
    *,
    control: Literal["static"] | None = None,
    dtypes: Mapping[str, Dtype] | None = None,
) -> tuple[Record, ...]:
    """The records of an op that run on a target, the fastest first; they may not take all types and sizes.

    Those in CUDA C++ are left out: they are made for few sizes.

    `control` "static": those that can be captured. `dtypes`: those that take these arguments in these element types.
    """
    wanted = (record for record in records_of(op, version) if control in (None, record.control))
    given = (dtypes or {}).items()
    taking = (record for record in wanted if all(dtype in record.dtypes.get(name, (dtype,)) for name, dtype in given))
    return tuple(record for record in taking if record.kind != "cuda" and _unfit(record, target) is None)


def fastest(
    op: str,
    version: int,
    target: Target,
    *,
    control: Literal["static"] | None = None,
    dtypes: Mapping[str, Dtype] | None = None,
) -> Record:
    """The first of the records that are `runnable`, for whoever has no node."""
    return runnable(op, version, target, control=control, dtypes=dtypes)[0]


def resolve(use: Use, sizes: Mapping[str, int] | None = None, *, records: Sequence[Record] | None = None) -> Choice:
    """What computes a use in a step of these sizes: of `records`, those of its op, the first that takes it.

    What was measured on the target may put others first. Raises TargetError `implementation-missing`, with what each
    record wants.
    """
    use, ranks = of_one_rank(use)
    return _resolve(use, _of_all(sizes or {}, ranks), records, _measured(use))


def _resolve(
    use: Use, sizes: Mapping[str, int], records: Sequence[Record] | None, measured: Sequence[Measured],
    known: Mapping[str, str | None] | None = None,
) -> Choice:  # fmt: skip
    """`known`: why records, by name, take the use in no step."""
    given = records_of(use.node.op, use.node.version) if records is None else records
    row = next((row for row in measured if _within(row.sizes, sizes)), None)
    order = () if row is None else row.order
    tried = sorted(given, key=lambda record: order.index(record.name) if record.name in order else len(order))
    refused: list[tuple[str, str]] = []
    for record in tried:
        why = (_refusal_of_any_size(record, use) if known is None else known[record.name]) or _out_of(record, sizes)
        if why is None:
            rivals = sum(_unfit(each, use.target) is None for each in tried)
            basis = "the only one" if rivals == 1 else f"the fastest of {rivals}"
            said = basis if row is None or record.name not in order else _figure(row, record.name)
            return Choice(record, "; ".join([said, *_told(refused)]))
        refused.append((record.name, why))
    why_not = "; ".join(_told(refused)) or "no records"
    message = f"nothing computes {use.node.op}@{use.node.version} on {use.target.text}: {why_not}"
    raise TargetError("implementation-missing", message)


def _told(refused: Iterable[tuple[str, str]]) -> list[str]:
    """Names with the reason; those that follow for the same reason have a "nor" alone."""
    told = []
    for why, group in itertools.groupby(refused, lambda each: each[1]):
        first, *others = (name for name, _ in group)
        told += [f"not {first}: {why}", *([f"nor {', '.join(others)}"] if others else [])]
    return told


def fitting(use: Use, sizes: Mapping[str, int] | None = None) -> tuple[Record, ...]:
    """The op's records that take a use in a step of these sizes; None: in steps of some."""
    use, ranks = of_one_rank(use)
    sizes = None if sizes is None else _of_all(sizes, ranks)
    wanted = records_of(use.node.op, use.node.version)
    refused = (_refusal_of_any_size(each, use) if sizes is None else _refusal(each, use, sizes) for each in wanted)
    return tuple(record for record, why in zip(wanted, refused, strict=True) if why is None)


def cases(use: Use, *, records: Sequence[Record] | None = None) -> tuple[Case, ...]:
    """The choice in steps of all sizes: one case, or one for each class of sizes that records or measurements tell
    apart. These mean the tokens that the op has; a use with the tokens of all ranks has more than a step of one."""
    use, ranks = of_one_rank(use)
    given = records_of(use.node.op, use.node.version) if records is None else records
    rows = _measured(use)
    known = {record.name: _refusal_of_any_size(record, use) for record in given}
    taking = [record for record in given if known[record.name] is None]
    found = []
    for sizes in _classes([*(record.sizes for record in taking), *(row.sizes for row in rows)]):
        least = {symbol: low for symbol, (low, _) in sizes.items()}
        own = _of_each(sizes, ranks)
        if all(high is None or low <= high for low, high in own.values()):
            found.append(Case(own, _resolve(use, least, given, rows, known)))
    if len({case.choice.record.name for case in found}) == 1:
        return (Case({}, found[0].choice),)
    return tuple(found)


def _of_all(sizes: Mapping[str, int], ranks: int) -> Mapping[str, int]:
    """What an op has, of so many ranks in whose steps `sizes` are."""
    return {symbol: ranks * size if symbol in COUNTS else size for symbol, size in sizes.items()}


def _of_each(ranges: Ranges, ranks: int) -> Ranges:
    """The sizes of each rank's step in which an op with all ranks' tokens has such; some have none."""
    return {
        symbol: (-(-low // ranks), None if high is None else high // ranks) if symbol in COUNTS else (low, high)
        for symbol, (low, high) in ranges.items()
    }


def case_for(found: Sequence[Case], sizes: Mapping[str, int]) -> Case:
    """Of the `cases` of a use, the one in steps of these sizes."""
    return next(case for case in found if _within(case.sizes, sizes))


def workspace(use: Use) -> Expr:
    """Bytes beside its results that the op holds at most, in steps of all sizes.

    On a GPU the records say it, tensor by tensor, and tests measure it. On a CPU it is a generous bound and no promise:
    what PyTorch's libraries convert and pack there depends on the CPU.
    """
    if use.target.device == "cpu":
        own = [size(operand) for operand in use.operands.values() if operand.is_activation]
        others = [size(operand) for operand in use.operands.values() if not operand.is_activation]
        made = [type_bytes(value.type) for value in use.node.outputs]
        return symbols.add(symbols.mul(CPU_COPIES, symbols.add(*own, *made)),
                           symbols.mul(CPU_COPIES_OF_OTHERS, symbols.add(*others)))  # fmt: skip
    chosen = {case.choice.record.name: case.choice.record for case in cases(use)}
    sums = [record.workspace(use) for record in chosen.values()]
    return sums[0] if len(sums) == 1 else symbols.largest(sums)


def _unfit(record: Record, target: Target) -> str | None:
    """Why the record doesn't run on a target; None if it does."""
    if target.device not in record.devices:
        return f"it runs on {' and '.join(record.devices)}"
    # A function is called with tensors of torch's, whatever it launches; of a view nothing but strides is left, and a
    # group has a form for each backend.
    is_called = isinstance(record.runs, str) and record.kind not in ("view", "group")
    wanted = (record.kind, "torch") if is_called else (record.kind,)
    if missing := next((kind for kind in wanted if kind not in target.kinds), None):
        return f"{missing} is not installed"
    if target.device == "cuda":
        if target.capability < record.min_capability:
            return f"it wants compute capability {_capability(record.min_capability)} or higher"
        if record.max_capability is not None and target.capability > record.max_capability:
            return f"it wants compute capability {_capability(record.max_capability)} or lower"
    return None


def _refusal(record: Record, use: Use, sizes: Mapping[str, int]) -> str | None:
    """Why the record doesn't take the use in a step of these sizes; None if it does."""
    return _refusal_of_any_size(record, use) or _out_of(record, sizes)


def _out_of(record: Record, sizes: Mapping[str, int]) -> str | None:
    """Why the record isn't for a step of these sizes; None if it is."""
    for symbol, (low, high) in record.sizes.items():
        if not _within({symbol: (low, high)}, sizes):
            return f"{symbol} is {sizes.get(symbol, 'not known')}, it takes {low} to {'any' if high is None else high}"
    return None


def _refusal_of_any_size(record: Record, use: Use) -> str | None:
    """Why the record takes the use in no step; None if it may take it."""
    if (why := _unfit(record, use.target)) is not None:
        return why
    for name, dtypes in record.dtypes.items():
        if name in use.operands and use.operands[name].type.dtype not in dtypes:
            return f"{name} is {use.operands[name].type.dtype}, it takes {', '.join(dtypes)}"
    for condition in record.takes:
        if not condition.holds(use):
            return f"it wants {condition.text}"
    return None


def _capability(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def _measured(use: Use) -> list[Measured]:
    """What the target's table says of the use, in steps of some sizes each."""
    if not use.target.table.choices:
        return []
    text = use.text
    return [
        row
        for row in use.target.table.choices
        if (row.op, row.dtype) == (use.node.op, use.dtype) and row.arguments in ("", text)
    ]


def _figure(row: Measured, name: str) -> str:
    """What was measured of a record."""
    times = dict(zip(row.order, row.microseconds, strict=False))
    return f"measured: {times[name]:.1f} us" if name in times else "measured"


def _within(ranges: Ranges, sizes: Mapping[str, int]) -> bool:
    return all(
        symbol in sizes and low <= sizes[symbol] and (high is None or sizes[symbol] <= high)
        for symbol, (low, high) in ranges.items()
    )


def _classes(ranges: Sequence[Ranges]) -> Iterator[Ranges]:
    """The classes of sizes that these ranges tell apart: none of them begins or ends inside of one."""
    begins: dict[str, set[int]] = {}
    for each in ranges:
        for symbol, (low, high) in each.items():
            begins.setdefault(symbol, {0}).update({low} if high is None else {low, high + 1})
    parts = []
    for symbol, found in begins.items():
        lows = sorted(found)
        highs = [*(low - 1 for low in lows[1:]), None]
        parts.append([(symbol, pair) for pair in zip(lows, highs, strict=True)])
    return (dict(chosen) for chosen in itertools.product(*parts))
