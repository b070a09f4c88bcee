"""What looks up embeddings: Triton on GPUs, the reference elsewhere."""

from __future__ import annotations

from msgspec.structs import replace

from precast.ir.graph.schema import Expr
from precast.ir.graph.symbols import add, mul, numel
from precast.ir.weights.tensorfile import element_bytes
from precast.kernels.embedding import part_launches, quantised_launches
from precast.kernels.gather_rows import launches
from precast.kernels.records import Condition, Launches, Record, reference
from precast.kernels.rows import COMPUTED, in_triton
from precast.kernels.use import Use, type_bytes


def _embedding(use: Use) -> Expr:
    """The rows before they are scaled, and the scale."""
    return 0 if use.constant("scale") in (None, 1.0) else add(type_bytes(use.result), 16)


def _has_one_row_of_ids(use: Use) -> bool:
    shape = use.shape("ids")
    return bool(shape) and all(size == 1 for size in shape[:-1]) and bool(use.number("weight", -1))


def _has_known_blocks(use: Use) -> bool:
    is_known = use.number("scales", 0) is not None and use.number("scales", 1) is not None
    return is_known and use.integers("block") is not None


def _sharded_embedding(use: Use) -> Expr:
    """Ids counted from the part on, once clamped, and two comparisons; the rows, scaled or not."""
    places = mul(2 * use.width("ids") + 3, numel(use.shape("ids")))
    return add(places, type_bytes(use.result), _embedding(use), 512)


def _quantised_embedding(use: Use) -> Expr:
    """At its most the stored values of all rows, the same in float32, and a scale for each of them, with those that
    were looked up for the rows. Later there are two copies in the result's type, which are less; but not of float64.
    """
    values, ids, each = numel(use.result.shape), numel(use.shape("ids")), element_bytes(use.result.dtype)
    of_rows = mul(use.width("scales") + 4, ids, use.shape("scales")[-1])
    places = add(mul(use.width("ids"), ids), mul(8, use.shape("weight")[-1]), 512)
    return add(mul(9 if each > 4 else 9 - each, values), of_rows, places)


def _quantised_sharded_embedding(use: Use) -> Expr:
    """The same, and ids counted from the part on, once clamped, and two comparisons."""
    return add(_quantised_embedding(use), mul(2 * use.width("ids") + 3, numel(use.shape("ids"))))


_ONE_ROW = Condition("one row of ids, and a weight of known width", _has_one_row_of_ids)
_BLOCKS = Condition("blocks and scales of sizes that are known at load", _has_known_blocks)
_RESULT = Condition(f"a result of {', '.join(COMPUTED)}", lambda use: use.result.dtype in COMPUTED)
_FLOAT8 = Condition("compute capability 8.9 or higher for float8", lambda use: use.target.capability >= (8, 9))


def _quantised(op: str, runs: Launches) -> Record:
    return in_triton(op, runs, ("scales",), _ONE_ROW, _BLOCKS, _RESULT, _FLOAT8)


RECORDS = (
    replace(
        in_triton("precast.embedding", launches.embedding, ("weight",), _ONE_ROW),
        dtypes={"weight": (*COMPUTED, "int64")},
    ),
    reference("precast.embedding", "embedding.embedding", _embedding),
    in_triton("precast.sharded_embedding", part_launches.sharded_embedding, ("weight",), _ONE_ROW),
    reference("precast.sharded_embedding", "embedding.sharded_embedding", _sharded_embedding),
    _quantised("precast.quantised_embedding", quantised_launches.quantised_embedding),
    reference("precast.quantised_embedding", "embedding.quantised_embedding", _quantised_embedding),
    _quantised("precast.quantised_sharded_embedding", quantised_launches.quantised_sharded_embedding),
    reference(
        "precast.quantised_sharded_embedding", "embedding.quantised_sharded_embedding", _quantised_sharded_embedding
    ),
)
