"""Lengths that change the rotation: where the rotary frequencies of a sequence depend on how many tokens it has.

Models with `longrope` have two sets of frequencies: one for sequences up to a length, one for longer ones. A sequence
that grows past that length needs all its keys rotated by the other set, so it is computed anew. With `dynamic` the
frequencies of a prompt longer than a limit are made from its length.
"""

from __future__ import annotations

from collections.abc import Iterator

from precast.ir.graph.schema import Const, Graph, Node

_OP = "precast.rope_frequencies"


class Rotations:
    """What a graph's rotary frequencies make of lengths.

    `restart_length` is the number of tokens at which a growing sequence is computed anew; None where there is none.
    """

    def __init__(self, graph: Graph) -> None:
        self._limits = tuple(sorted(set(_limits(graph))))
        self.restart_length = min((limit + 1 for kind, limit in self._limits if kind == "longrope"), default=None)

    def kind_of(self, prefill_length: int) -> tuple[int, ...]:
        """Sequences of one kind have equal keys where they have equal tokens.

        `prefill_length` tokens were known when the computation of the sequence began, or began anew.
        """
        return tuple(
            0 if prefill_length <= limit else 1 if kind == "longrope" else prefill_length
            for kind, limit in self._limits
        )


def _limits(graph: Graph) -> Iterator[tuple[str, int]]:
    """The kind of each op whose result depends on lengths, and the length up to which it doesn't."""
    nodes = [*graph.main, *(node for block in graph.blocks for node in block.nodes)]
    for node in nodes:
        if isinstance(node, Node) and node.op == _OP:
            kind, length = node.args["kind"], node.args["original_length"]
            # The verifier checks the kinds of arguments; what isn't constant is no length that we know.
            if isinstance(kind, Const) and isinstance(length, Const):
                assert isinstance(kind.value, str)
                assert isinstance(length.value, int)
                yield kind.value, length.value
