"""The sizes of experts whose weights stay as they are stored. No torch and no triton here."""

from __future__ import annotations

from typing import NamedTuple

from precast.ir.graph.schema import Expr
from precast.ir.graph.symbols import floordiv, mul
from precast.kernels.use import Use


class Sizes(NamedTuple):
    """Experts, rows of the first product, width between the products, width of the activations, pairs of token and
    expert."""

    num_experts: Expr
    opened: Expr
    inner: Expr
    width: Expr
    pairs: Expr


def sizes_of(use: Use) -> Sizes:
    """The sizes of `precast.quantised_experts`."""
    opened = use.shape("up")[1]
    inner = floordiv(opened, 2) if use.constant("gated") else opened
    tokens, width = use.shape("x")
    return Sizes(use.shape("up")[0], opened, inner, width, mul(tokens, use.shape("expert_ids")[1]))
