"""FX graphs and nodes as passes see them.

torch types a node's arguments as the union of all that any op takes; a pass knows what its op takes. At run time
`FxGraph` and `FxNode` are torch's own classes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import fx

if TYPE_CHECKING:

    class FxNode(fx.Node):
        """A node whose arguments are what its op takes."""

        args: Any
        kwargs: Any
        target: Any
        users: dict[FxNode, None]  # type: ignore[assignment]
        all_input_nodes: list[FxNode]  # type: ignore[assignment]

    class FxGraph(fx.Graph):
        """A graph of such nodes."""

        nodes: Iterable[FxNode]  # type: ignore[assignment]

        def call_function(self, *args: Any, **kwargs: Any) -> FxNode: ...

        def placeholder(self, *args: Any, **kwargs: Any) -> FxNode: ...

else:
    FxGraph, FxNode = fx.Graph, fx.Node
