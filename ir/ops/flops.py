"""How much floating-point work a graph does, and how much of it in ops that kernels are written for.

The work is counted for one sequence of `TOKENS` tokens: two operations for each multiplication and addition of a
matrix product, one for each element of anything else; moving data is none. Canonical are all `precast` ops and the
linear layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from precast.ir.graph import symbols
from precast.ir.graph.schema import Block, Call, Const, Graph, Node, Ref, TensorType, Value
from precast.ir.graph.symbols import evaluate

TOKENS = 1024
"""Of the one sequence that is counted; attention looks back over it."""

_LINEAR = ("aten.linear.default", "aten.addmm.default")

_MOVES = frozenset(
    f"aten.{name}"
    for name in (
        "reshape.default", "transpose.int", "permute.default", "unsqueeze.default", "squeeze.dim", "expand.default",
        "slice.Tensor", "select.int", "cat.default", "stack.default", "to.dtype", "split.Tensor", "index.Tensor",
        "split_with_sizes.default", "chunk.default", "clone.default", "contiguous.default", "repeat.default",
        "gather.default", "index_select.default", "embedding.default", "arange.default", "full.default",
        "zeros.default", "ones.default", "where.self", "masked_fill.Scalar", "repeat_interleave.self_int",
        "constant_pad_nd.default", "pad.default", "flip.default", "roll.default", "movedim.int", "unbind.int",
    )
) | {"precast.write_kv", "precast.write_latent", "precast.embedding", "precast.gather_rows"}  # fmt: skip

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]


def canonical_share(graph: Graph) -> float:
    """The part of the graph's floating-point work, 0 to 1, that `precast` ops and linear layers do."""
    canonical, total = work(graph)
    return canonical / total if total else 1.0


def work(graph: Graph) -> tuple[float, float]:
    """Floating-point operations for one sequence of `TOKENS` tokens: in canonical ops, and in all."""
    sizes = {symbol.name: max(symbol.min, 1) for symbol in graph.symbols} | {"T": TOKENS, "B": 1, "R": TOKENS}
    blocks = {block.name: _sum(block.nodes, _block_values(block), sizes) for block in graph.blocks}
    nodes = [step for step in graph.main if isinstance(step, Node)]
    canonical, total = _sum(nodes, _main_values(graph), sizes)
    for step in graph.main:
        if isinstance(step, Call):
            canonical, total = canonical + blocks[step.block][0], total + blocks[step.block][1]
    return canonical, total


def _block_values(block: Block) -> list[Value]:
    made = [value for node in block.nodes for value in node.outputs]
    return [*block.inputs, *block.params, *block.caches, *made]


def _main_values(graph: Graph) -> list[Value]:
    params = [Value(param.name, param.type) for param in graph.params]
    made = [value for step in graph.main for value in step.outputs]
    return [*graph.inputs, *params, *graph.constants, *made]


def _sum(nodes: tuple[Node, ...] | list[Node], values: list[Value], sizes: Mapping[str, int]) -> tuple[float, float]:
    shapes = {value.name: _shape(value.type, sizes) for value in values}
    canonical = total = 0.0
    for node in nodes:
        count = node_work(node, shapes)
        total += count
        if node.op.startswith("precast.") or node.op in _LINEAR:
            canonical += count
    return canonical, total


def _shape(kind: TensorType, sizes: Mapping[str, int]) -> Shape:
    unknown = {name: 1 for size in kind.shape for name in symbols.free_symbols(size)}
    return tuple(evaluate(size, unknown | dict(sizes)) for size in kind.shape)


def node_work(node: Node, shapes: Shapes) -> float:
    """Floating-point operations of one node, given the shapes of all names."""
    if node.op in _MOVES:
        return 0.0
    count = _COUNTED.get(node.op.replace(".paged_", ".").replace(".stateful_", "."))
    if count is not None:
        return float(count(node, shapes))
    names = [arg.name for arg in node.args.values() if isinstance(arg, Ref)]
    read = max((_numel(shapes[name]) for name in names if name in shapes), default=0)
    made = max((_numel(shapes[value.name]) for value in node.outputs), default=0)
    return float(max(made, read if _reduces(node) else 0))


def _reduces(node: Node) -> bool:
    return node.op.startswith(("aten.sum", "aten.mean", "aten.cumsum", "aten.amax"))


def _numel(shape: Shape) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _of(node: Node, name: str, shapes: Shapes) -> Shape:
    arg = node.args[name]
    assert isinstance(arg, Ref), f"{node.op}: {name} is a tensor"
    return shapes[arg.name]


def _constant(node: Node, name: str) -> int | None:
    arg = node.args.get(name)
    return arg.value if isinstance(arg, Const) and type(arg.value) is int else None


def _result(node: Node, shapes: Shapes) -> Shape:
    return shapes[node.outputs[0].name]


def _linear(node: Node, shapes: Shapes) -> int:
    return 2 * _numel(_result(node, shapes)) * _of(node, "input", shapes)[-1]


def _addmm(node: Node, shapes: Shapes) -> int:
    return 2 * _numel(_result(node, shapes)) * _of(node, "mat1", shapes)[-1]


def _matmul(node: Node, shapes: Shapes) -> int:
    return 2 * _numel(_result(node, shapes)) * _of(node, "self", shapes)[-1]


def _attention(node: Node, shapes: Shapes) -> float:
    """2 T C H (D + E): C is how many keys a query sees on average."""
    query, out = _of(node, "q", shapes), _result(node, shapes)
    return 2 * query[1] * _keys(node, query[1]) * query[2] * (query[3] + out[3])


def _keys(node: Node, tokens: int) -> float:
    window = min(_constant(node, "window") or tokens, tokens)
    return window - window * (window - 1) / (2 * tokens)


def _latent_attention(node: Node, shapes: Shapes) -> float:
    """Attention, and the latents' expansion, 2 T H (Dn + Dv) C."""
    query, out, weight = _of(node, "q", shapes), _result(node, shapes), _of(node, "weight", shapes)
    scores = 2 * query[1] * _keys(node, query[1]) * query[2] * (query[3] + out[3])
    return scores + 2 * query[1] * weight[0] * weight[1]


def _causal_conv(node: Node, shapes: Shapes) -> int:
    return 2 * _numel(_of(node, "x", shapes)) * _of(node, "weight", shapes)[-1]


def _scan(node: Node, shapes: Shapes) -> int:
    """For each element of the state and token: decay, input and its addition, output: 6 operations."""
    return 6 * _numel(_of(node, "x", shapes)) * _of(node, "b", shapes)[-1]


def _delta_rule(node: Node, shapes: Shapes) -> int:
    """As a scan over `[D, E]`, and what the state already holds for the key: 8 operations."""
    return 8 * _numel(_of(node, "v", shapes)) * _of(node, "k", shapes)[-1]


def _linear_attention(node: Node, shapes: Shapes) -> int:
    return 6 * _numel(_of(node, "v", shapes)) * _of(node, "k", shapes)[-1]


def _recurrence(node: Node, shapes: Shapes) -> int:
    return 2 * _numel(_of(node, "x", shapes))


def _wkv(node: Node, shapes: Shapes) -> int:
    """Of both sums: decay, addition, and the token's own; their quotient."""
    return 8 * _numel(_of(node, "v", shapes))


def _experts(node: Node, shapes: Shapes) -> int:
    """2 T k (up and gate, and down)."""
    chosen, up, down = (_of(node, name, shapes) for name in ("expert_ids", "up", "down"))
    return 2 * _numel(chosen) * (up[1] * up[2] + down[1] * down[2])


def _grouped_linear(node: Node, shapes: Shapes) -> int:
    return 2 * _numel(_result(node, shapes)) * _of(node, "x", shapes)[-1]


def _baddbmm(node: Node, shapes: Shapes) -> int:
    return 2 * _numel(_result(node, shapes)) * _of(node, "batch1", shapes)[-1]


def _convolution(node: Node, shapes: Shapes) -> int:
    weight = _of(node, "weight", shapes)
    return 2 * _numel(_result(node, shapes)) * _numel(weight[1:])


_COUNTED: dict[str, Callable[[Node, Shapes], float]] = {
    "aten.linear.default": _linear,
    "aten.addmm.default": _addmm,
    "aten.matmul.default": _matmul,
    "aten.bmm.default": _matmul,
    "aten.mm.default": _matmul,
    "aten.baddbmm.default": _baddbmm,
    "aten.conv1d.default": _convolution,
    "precast.attention": _attention,
    "precast.latent_attention": _latent_attention,
    "precast.causal_conv": _causal_conv,
    "precast.selective_scan": _scan,
    "precast.state_space_scan": _scan,
    "precast.delta_rule": _delta_rule,
    "precast.linear_attention": _linear_attention,
    "precast.linear_recurrence": _recurrence,
    "precast.wkv": _wkv,
    "precast.experts": _experts,
    "precast.grouped_linear": _grouped_linear,
}
