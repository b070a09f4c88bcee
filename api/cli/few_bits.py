"""How the weights of a bundle are stored that stay in few bits: format, bits, and what shares a scale."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from precast.ir.graph.schema import Call, Const, Expr, Graph, Items, Node, Ref
from precast.ir.graph.stored_parts import arg_name
from precast.ir.weights.quantised import MX_BLOCK, NVFP4_BLOCK, PACKED, PER_INT32

_WEIGHTS = {
    "precast.quantised_linear": ("weight",), "precast.quantised_experts": ("up", "down"),
    "precast.quantised_embedding": ("weight",),
}  # fmt: skip
_GROUPS = {"mxfp4": MX_BLOCK, "nvfp4": NVFP4_BLOCK, "nvfp4_divided": NVFP4_BLOCK}

Shapes = Mapping[str, tuple[Expr, ...]]


def stored_weights(graph: Graph) -> dict[str, int]:
    """How many weights of a graph of one rank are stored in each way, in words; those of experts count as one."""
    blocks = {block.name: block for block in graph.blocks}
    outer = {param.name: param.type.shape for param in graph.params}
    found: Counter[str] = Counter()
    for step in graph.main:
        if isinstance(step, Call):
            shapes = {value.name: value.type.shape for value in blocks[step.block].params}
            found.update(way for node in blocks[step.block].nodes for way in _ways(node, shapes))
        else:
            found.update(_ways(step, outer))
    return dict(found.most_common())


def _ways(node: Node, shapes: Shapes) -> Iterator[str]:
    format = node.args.get("format")
    for weight in _WEIGHTS.get(node.op, ()) if isinstance(format, Const) else ():
        assert isinstance(format, Const)
        kind = str(format.value)
        bits = 8 if kind in ("fp8", "int8", "packed8") else 4
        yield f"{kind} of {bits} bits, {_shared(kind, node, weight, shapes)}"


def _shared(format: str, node: Node, weight: str, shapes: Shapes) -> str:
    """What has one scale."""

    def shape(part: str) -> tuple[Expr, ...]:
        given = node.args.get(arg_name(node.op, weight, part))
        return shapes.get(given.name, ()) if isinstance(given, Ref) else ()

    values, scales, block = shape("of"), shape("scales"), node.args.get(arg_name(node.op, weight, "block"))
    if format in _GROUPS:
        return f"groups of {_GROUPS[format]}"
    if isinstance(block, Items):
        tile = tuple(each.value for each in block.items if isinstance(each, Const))
        if tile == values[-2:]:
            return "one scale a matrix"
        return "one scale a row" if tile[:1] == (1,) and tile[1:] == values[-1:] else f"blocks of {tile[0]} x {tile[1]}"
    if shape("groups"):
        return "groups in act order"
    dim = -2 if format == "gptq" else -1
    words, groups = (size[dim] if len(size) > 1 else None for size in (values, scales))
    if not isinstance(words, int) or not isinstance(groups, int) or groups < 2:
        return "one scale a row" if groups == 1 else "in groups"
    return f"groups of {words * PACKED.get(format, PER_INT32) // groups}"
