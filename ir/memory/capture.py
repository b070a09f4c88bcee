"""Plans which sizes of steps are captured as graphs: tokens of a step, in the order in which they are wanted.

A captured step of `n` tokens serves all steps of up to `n`, whatever sequences these are of. Small sizes lie close, so
that little is padded; they end where a step's launches hide under the GPU's work anyway.
"""

from __future__ import annotations

from typing import NamedTuple

from precast.ir.graph.schema import Call, CapturePlan, Graph
from precast.ir.ops.flops import TOKENS, work

MOST_TOKENS = 1024
"""Of a captured step; its activations are in memory as long as the graphs are, and kernels that walk over a sequence's
tokens one by one end there."""
LEAST_TOKENS = 256
"""Captured whatever the model is: so many sequences may decode at once by default."""
NODE_SECONDS = 46e-6
"""Host time of a node that is run by itself, and launches three kernels: 581 nodes of an 8B model in 27 ms."""
WORK_PER_SECOND = 600e12
"""What a GPU does in bfloat16 at these sizes. A slower one hides launches earlier."""


class Cost(NamedTuple):
    """What a step of a graph costs: the nodes that it runs, and the floating-point operations for each token."""

    nodes: int
    work_per_token: float

    @property
    def launch_seconds(self) -> float:
        """Host time of a step that runs op by op."""
        return self.nodes * NODE_SECONDS

    @property
    def hidden_from(self) -> float:
        """From so many tokens on the GPU's work takes longer than that."""
        return self.launch_seconds * WORK_PER_SECOND / max(self.work_per_token, 1 / TOKENS)


def capture_plan(graph: Graph) -> CapturePlan:
    """The sizes for a graph, by how much work its nodes have for a token."""
    hidden = step_cost(graph).hidden_from
    most = next((size for size in spaced(MOST_TOKENS) if size >= hidden), MOST_TOKENS)
    return CapturePlan(in_order(max(most, LEAST_TOKENS)))


def step_cost(graph: Graph) -> Cost:
    """What the plan goes by, counted for one sequence of `TOKENS` tokens."""
    blocks = {block.name: len(block.nodes) for block in graph.blocks}
    nodes = sum(blocks[step.block] if isinstance(step, Call) else 1 for step in graph.main)
    return Cost(nodes, work(graph)[1] / TOKENS)


def in_order(most: int) -> tuple[int, ...]:
    """The sizes up to `most`: powers of two first, for batches that decode, then those between."""
    sizes = spaced(most)
    return tuple(sorted(sizes, key=lambda size: (size & (size - 1) != 0, size)))


def spaced(most: int) -> tuple[int, ...]:
    """Powers of two and what lies halfway, from 32 on four sizes to each doubling; the last is `most` or the next."""
    sizes = [1, 2, 4]
    while sizes[-1] < most:
        last = sizes[-1]
        sizes.append(last + max(4 if last < 16 else 8, (1 << last.bit_length() - 1) // 4))
    return tuple(sizes)


def cut(plan: CapturePlan, most: int) -> tuple[int, ...]:
    """The sizes that steps of at most `most` tokens fill, in the plan's order; the first above `most` becomes it."""
    if not plan.sizes or most >= max(plan.sizes):
        return plan.sizes
    last = min(size for size in plan.sizes if size >= most)
    return tuple(min(size, most) for size in plan.sizes if size <= last)
