"""The `aten` ops that routers are written in: `tests/ir/ops/test_rules_experts.py` has their cases."""

from __future__ import annotations

ROUTER_OPS = frozenset(
    (
        *(f"aten.{name}.{other}" for name in ("eq", "ne", "ge", "gt", "le", "lt") for other in ("Scalar", "Tensor")),
        *(f"aten.{name}.default" for name in ("topk", "sort", "argmax", "cumsum", "gather", "one_hot", "full_like")),
        *(f"aten.{name}.default" for name in ("logical_not", "bitwise_not")),
        *("aten.max.dim", "aten.scatter.src", "aten.scatter.value", "aten.masked_fill.Scalar", "aten.where.self"),
    )
)
