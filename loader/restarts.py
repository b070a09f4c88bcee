"""When a sequence is computed anew: where the rotation of all its tokens changes with its length.

Models with `longrope` have two sets of rope frequencies: one for sequences up to a length, one for longer ones. A
sequence that grows past that length needs all its keys rotated by the other set.
"""

from __future__ import annotations

from precast.ir.schema import Const, Graph, Node

_OP = "precast.rope_frequencies"


def restart_length(graph: Graph) -> int | None:
    """The number of tokens at which a growing sequence is computed anew; None for graphs without such a length."""
    nodes = [*graph.main, *(node for block in graph.blocks for node in block.nodes)]
    switches = [_switch(node) for node in nodes if isinstance(node, Node) and node.op == _OP]
    return min((length for length in switches if length is not None), default=None)


def _switch(node: Node) -> int | None:
    kind, length = node.args["kind"], node.args["original_length"]
    if not isinstance(kind, Const) or not isinstance(length, Const) or kind.value != "longrope":
        return None
    assert isinstance(length.value, int)  # the verifier checks the kinds of arguments
    return length.value + 1
