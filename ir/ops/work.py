"""Floating-point operations of single ops: two for each multiplication and addition of a matrix product, one for each
element of anything else, none for what only moves data.

Each of these takes a node and the shapes of all names in its sight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from precast.ir.graph.schema import Const, Node, Ref, Steps

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
Work = Callable[[Node, Shapes], float]


def nothing(node: Node, shapes: Shapes) -> float:
    """Of what moves data."""
    return 0.0


def elements(node: Node, shapes: Shapes) -> float:
    """One for each element of the largest result."""
    return float(max((math.prod(shapes[value.name]) for value in node.outputs), default=0))


def steps(node: Node, shapes: Shapes) -> float:
    """One for each element of the largest result and each step of a fused op."""
    body = node.args["steps"]
    assert isinstance(body, Steps), f"{node.op}: steps are steps"
    return len(body.steps) * elements(node, shapes)


def reduction(node: Node, shapes: Shapes) -> float:
    """One for each element of what is read, or of the result if that is larger."""
    read = [math.prod(shapes[arg.name]) for arg in node.args.values() if isinstance(arg, Ref)]
    return max(elements(node, shapes), *read)


def product(rows: str, *, halves: int = 1) -> Work:
    """Two for each element of the result and of the last dimension of the argument `rows`; as often as the product has
    `halves`, which one element of the result is made of."""
    return lambda node, shapes: 2.0 * halves * math.prod(_result(node, shapes)) * _of(node, rows, shapes)[-1]


def each(operations: int, of: str, by: str | None = None) -> Work:
    """So many for each element of the argument `of`, and of the last dimension of the argument `by`."""

    def work(node: Node, shapes: Shapes) -> float:
        return float(operations * math.prod(_of(node, of, shapes)) * (_of(node, by, shapes)[-1] if by else 1))

    return work


def attention(node: Node, shapes: Shapes) -> float:
    """2 T C H (D + E): C is how many keys a query sees on average."""
    query, out = _of(node, "q", shapes), _result(node, shapes)
    return 2 * query[1] * _keys(node, query[1]) * query[2] * (query[3] + out[3])


def latent_attention(node: Node, shapes: Shapes) -> float:
    """Attention, and the latents' expansion, 2 T H (Dn + Dv) C."""
    query, weight = _of(node, "q", shapes), _of(node, "weight", shapes)
    return attention(node, shapes) + 2 * query[1] * weight[0] * weight[1]


def selection(node: Node, shapes: Shapes) -> float:
    """2 T C H (D + 1): C is how many keys a query may see on average, each of which every head scores."""
    query = _of(node, "q", shapes)
    return 2 * query[1] * _keys(node, query[1]) * query[2] * (query[3] + 1)


def entry_attention(node: Node, shapes: Shapes) -> float:
    """4 T N H D, over N entries: those of its window, its selection, or half of all."""
    query = _of(node, "q", shapes)
    seen = _entries(node, query[1])
    if isinstance(node.args.get("selected"), Ref):
        seen = min(seen, _of(node, "selected", shapes)[2])
    return 4.0 * query[1] * seen * query[2] * query[3]


def entry_selection(node: Node, shapes: Shapes) -> float:
    """2 T N H (D + 1): N is how many entries a query may see on average, each of which every head scores."""
    query = _of(node, "q", shapes)
    return 2 * query[1] * _entries(node, query[1]) * query[2] * (query[3] + 1)


def _entries(node: Node, tokens: int) -> float:
    rate = node.args["rate"]
    return _keys(node, tokens) / (rate.value if isinstance(rate, Const) and type(rate.value) is int else 1)


def sparse_latent_attention(node: Node, shapes: Shapes) -> float:
    """Over N selected latents as keys and values of one head, 2 T N H (2 C + Dr), and the query's and the result's
    products with the weight, 2 T H (Dn + Dv) C."""
    query, weight = _of(node, "q", shapes), _of(node, "weight", shapes)
    selected, latent = _of(node, "selected", shapes)[2], weight[1]
    rope = query[3] + _result(node, shapes)[3] - weight[0] // query[2]
    over = query[1] * min(selected, query[1]) * query[2] * (2 * latent + rope)
    return 2.0 * (over + query[1] * weight[0] * latent)


def block_sparse_attention(node: Node, shapes: Shapes) -> float:
    """2 T N H (D + E): N is how many keys the selected blocks have, or a query sees on average, if that is less."""
    query, out, count = _of(node, "q", shapes), _result(node, shapes), _of(node, "selected", shapes)[3]
    size = node.args["block_size"]
    block_size = size.value if isinstance(size, Const) and type(size.value) is int else 1
    keys = min(_keys(node, query[1]), count * block_size)
    return 2 * query[1] * keys * query[2] * (query[3] + out[3])


def experts(node: Node, shapes: Shapes) -> float:
    """2 T k (up and gate, and down)."""
    chosen, up, down = (_of(node, name, shapes) for name in ("expert_ids", "up", "down"))
    return 2.0 * math.prod(chosen) * (up[1] * up[2] + down[1] * down[2])


def quantised_experts(node: Node, shapes: Shapes) -> float:
    """2 T k (up and gate, and down), of weights that are stored in some format; taking them out of it isn't counted."""
    chosen, x, up = (_of(node, name, shapes) for name in ("expert_ids", "x", "up"))
    opened = up[1]
    inner = opened // 2 if node.args["gated"] == Const(True) else opened
    return 2.0 * math.prod(chosen) * x[1] * (opened + inner)


def _keys(node: Node, tokens: int) -> float:
    given = node.args.get("window")
    window = given.value if isinstance(given, Const) and type(given.value) is int else tokens
    window = min(window, tokens)
    return window - window * (window - 1) / (2 * tokens)


def _of(node: Node, name: str, shapes: Shapes) -> Shape:
    arg = node.args[name]
    assert isinstance(arg, Ref), f"{node.op}: {name} is a tensor"
    return shapes[arg.name]


def _result(node: Node, shapes: Shapes) -> Shape:
    return shapes[node.outputs[0].name]
