"""The graph inputs that passes add for caches: one-dimensional, over the symbols of a batch or new ones."""

from __future__ import annotations

from typing import Any

import torch

from precast.builder.graph.context import FxGraph, FxNode, PassContext, tensor
from precast.ir.graph.schema import Pool


def new_pool(number: int) -> Pool:
    """Pool `number` of a plan, and the symbol that counts its pages."""
    return Pool(f"pool{number}", f"P_pool{number}")


class MetadataInputs:
    """Makes graph inputs over symbols; asked for one that is there already, gives that."""

    def __init__(self, graph: FxGraph, ctx: PassContext) -> None:
        self.graph, self.ctx = graph, ctx
        places = {node.name: node for node in graph.nodes if node.op == "placeholder"}
        self.after = places["cu_seqlens"]
        bounds = tensor(self.after).shape[0]
        self.inputs = places
        self.known: dict[str, Any] = {"T": tensor(places["input_ids"]).shape[1], "B": bounds - 1, "B + 1": bounds}

    def symbol(self, name: str) -> Any:
        """The size of this name; a new one is unknown to the exporter, and enters its table of symbols."""
        if name not in self.known:
            self.known[name] = self.ctx.new_symbol(name)
        return self.known[name]

    def add_input(self, name: str, dtype: str, size: str, entries: Any = None) -> FxNode:
        """A one-dimensional graph input."""
        if name not in self.inputs:
            length = entries if size == "N" else self.known[size]
            fake = self.ctx.empty((length,), getattr(torch, dtype))
            self.inputs[name] = self.ctx.new_input(self.after, name, fake)
        return self.inputs[name]
