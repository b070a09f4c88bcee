"""What a step of several stages ends with: the last one has logits and draws, and all others are given what it drew."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from precast.ir.graph import symbols
from precast.ir.graph.schema import Graph, TensorType
from precast.kernels.collectives.group import Group
from precast.kernels.dtypes import BY_NAME
from precast.kernels.use import types_in
from precast.loader.placement import Placement


class Stages:
    """The ranks that have the same part of each layer, one of each stage, as one of them sees them."""

    def __init__(self, group: Group, logits: TensorType, device: torch.device) -> None:
        """`logits`: the type of the last stage's output, `[1, R, V]`."""
        self._group = group
        self._logits = logits
        self._device = device

    @property
    def is_last(self) -> bool:
        """Whether this is the stage that draws."""
        return self._group.rank == self._group.size - 1

    def share(self, tensor: torch.Tensor) -> None:
        """Put what the last stage has in `tensor`, contiguous, there on all others; all stages call it."""
        last = self._group.size - 1
        if not self.is_last:
            self._group.receive(tensor, last)
            return
        for stage in range(last):
            self._group.send(tensor, stage)

    def new_logits(self, num_rows: int) -> torch.Tensor:
        """Memory for logits that are shared: `[num_rows, V]`."""
        _, _, size = self._logits.shape
        shape = num_rows, symbols.evaluate(size, {})
        return torch.empty(shape, dtype=BY_NAME[self._logits.dtype], device=self._device)


def stages_of(graph: Graph, placement: Placement, groups: Mapping[str, Group]) -> Stages | None:
    """The stages of a placement, connected by its group `pp`; None where there is one. `graph` is the bundle's."""
    if placement.pp == 1:
        return None
    kind = types_in(graph)[graph.outputs["logits"]]
    shape = tuple(symbols.substitute(size, placement.world) for size in kind.shape)
    return Stages(groups["pp"], TensorType(kind.dtype, shape), torch.device(placement.device.name))
