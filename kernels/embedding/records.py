"""What looks up embeddings: Triton on GPUs, the reference elsewhere."""

from __future__ import annotations

from msgspec.structs import replace

from precast.ir.graph.schema import Expr
from precast.ir.graph.symbols import add, mul, numel
from precast.kernels.embedding import part_launches
from precast.kernels.gather_rows import launches
from precast.kernels.records import Condition, reference
from precast.kernels.rows import COMPUTED, in_triton
from precast.kernels.use import Use, type_bytes


def _embedding(use: Use) -> Expr:
    """The rows before they are scaled, and the scale."""
    return 0 if use.constant("scale") in (None, 1.0) else add(type_bytes(use.result), 16)


def _has_one_row_of_ids(use: Use) -> bool:
    shape = use.shape("ids")
    return bool(shape) and all(size == 1 for size in shape[:-1]) and bool(use.number("weight", -1))


def _sharded_embedding(use: Use) -> Expr:
    """Ids counted from the part on, once clamped, and two comparisons; the rows, scaled or not."""
    places = mul(2 * use.width("ids") + 3, numel(use.shape("ids")))
    return add(places, type_bytes(use.result), _embedding(use), 512)


_ONE_ROW = Condition("one row of ids, and a weight of known width", _has_one_row_of_ids)

RECORDS = (
    replace(
        in_triton("precast.embedding", launches.embedding, ("weight",), _ONE_ROW),
        dtypes={"weight": (*COMPUTED, "int64")},
    ),
    reference("precast.embedding", "embedding.embedding", _embedding),
    in_triton("precast.sharded_embedding", part_launches.sharded_embedding, ("weight",), _ONE_ROW),
    reference("precast.sharded_embedding", "embedding.sharded_embedding", _sharded_embedding),
)
