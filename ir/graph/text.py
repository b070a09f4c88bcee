"""The text form of a graph: stable, readable, one line a node. Equal texts are equal graphs.

    symbols {
      T: 1..
    }
    inputs {
      %x: bfloat16[1, T, 16]
    }
    params {
      %w: bfloat16[16] = cast(read("norm.weight", [16]), bfloat16)
    }
    block layer {
      inputs {
        %x: bfloat16[1, T, 16]
      }
      params {
        %w: bfloat16[16]
      }
      %y: bfloat16[1, T, 16] = precast.rms_norm@1(x=%x, weight=%w, eps=1e-06, cast_before_scale=true)
      return %y
    }
    main {
      %h: bfloat16[1, T, 16] = call layer(x=%x, w=%w)
      return hidden=%h
    }

A `%` marks the name of a tensor; a name that is no plain name is quoted. Integers and floats are literals, a bare
word or an operation is a size over symbols, `dim(3)` a size that is the constant 3. The steps of a fused op stand in
braces: `{%s0 = aten.neg.default@1(self=%x0), return %s0}`. Nothing here reads text, or checks that a graph is valid.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import get_args

from precast.ir.graph import schema, symbols
from precast.ir.ops import table as ops

RESERVED = frozenset((*get_args(schema.Dtype), "none", "true", "false", "inf", "nan"))
"""Bare words that stand for something other than a symbol where an argument is expected."""


def format_graph(graph: schema.Graph) -> str:
    """The whole graph as text, ending in a newline. No two graphs have the same text."""
    return "\n".join(_graph(graph)) + "\n"


def format_type(tensor: schema.TensorType) -> str:
    """A type: `bfloat16[1, T, 4096]`; `float32[]` has no dimensions."""
    return tensor.dtype + _sizes(tensor.shape)


def format_value(value: schema.Value) -> str:
    """A value with its type: `%x: bfloat16[1, T, 4096]`."""
    return f"{_ref(value.name)}: {format_type(value.type)}"


def format_step(step: schema.Node | schema.Call, order: Sequence[str] = ()) -> str:
    """A node or call, in one line: arguments of a node in the order of its op's signature, of a call in `order`,
    and those that are in neither by name."""
    results = ", ".join(map(format_value, step.outputs))
    if isinstance(step, schema.Node):
        what = _call(step.op, step.version, step.args, order)
    else:
        names = _ordered(step.args, order)
        what = f"call {_name(step.block)}({', '.join(f'{_name(n)}={_ref(step.args[n])}' for n in names)})"
    return f"{results} = {what}" if results else what


def _call(op: str, version: int, args: Mapping[str, schema.Arg], order: Sequence[str] = ()) -> str:
    definition = ops.lookup(op, version)
    names = _ordered(args, [arg.name for arg in definition.args] if definition else order)
    # Ops of the table have a dot; another name could read as `call` or `return`.
    name = _name(op) if "." in op else json.dumps(op)
    return f"{name}@{version}({', '.join(f'{_name(n)}={_arg(args[n])}' for n in names)})"


def format_arg(arg: schema.Arg) -> str:
    """An argument as it stands in a step."""
    return _arg(arg)


def format_recipe(recipe: schema.Recipe) -> str:
    """How a param is made: `cast(concat([read("q", [8, 4]), read("k", [2, 4])], dim=0), bfloat16)`."""
    match recipe:
        case schema.Read(tensor, shape, dtype):
            return f"read({json.dumps(tensor)}, {_sizes(shape)}{f', {dtype}' if dtype else ''})"
        case schema.Slice(of, dim, start, length):
            bounds = f"start={symbols.text(start)}, length={symbols.text(length)}"
            return f"slice({format_recipe(of)}, dim={dim}, {bounds})"
        case schema.Concat(parts, dim):
            return f"concat([{', '.join(map(format_recipe, parts))}], dim={dim})"
        case schema.Stack(parts, dim):
            return f"stack([{', '.join(map(format_recipe, parts))}], dim={dim})"
        case schema.Transpose(of, dim0, dim1):
            return f"transpose({format_recipe(of)}, {dim0}, {dim1})"
        case schema.Reshape(of, sizes):
            return f"reshape({format_recipe(of)}, {_sizes(sizes)})"
        case schema.Cast(of, dtype):
            return f"cast({format_recipe(of)}, {dtype})"
        case schema.Each(of, dim, count, start):
            return f"each({format_recipe(of)}, dim={dim}, count={count}, start={start})"
        case schema.Repeat(of, dim, count):
            return f"repeat({format_recipe(of)}, dim={dim}, count={symbols.text(count)})"
        case schema.Dequantise(of, scales, kind, block, zeros, groups, offset, whole, biases):
            size = f"[{block[0]}, {block[1]}]" if block else "none"
            rest = f"zeros={_maybe(zeros)}, groups={_maybe(groups)}, zero_offset={offset}"
            rest += "" if whole is None else f", global_scale={format_recipe(whole)}"
            rest += "" if biases is None else f", biases={format_recipe(biases)}"
            return f"dequantise({kind}, {format_recipe(of)}, {format_recipe(scales)}, block={size}, {rest})"
        case schema.Quantise(of, part, block):
            return f"quantise({part}, {format_recipe(of)}, block=[{block[0]}, {block[1]}])"
        case schema.Repack(of, part):
            return f"repack({part}, {format_recipe(of)})"
        case schema.Tie(param):
            return f"tie({_ref(param)})"
        case schema.Scale(tensors, default):
            return f"scale([{', '.join(map(json.dumps, tensors))}], default={default!r})"


def _maybe(recipe: schema.Recipe | None) -> str:
    return "none" if recipe is None else format_recipe(recipe)


def _graph(graph: schema.Graph) -> Iterator[str]:
    yield from _section("symbols", map(_symbol, graph.symbols))
    yield from _section("inputs", map(format_value, graph.inputs))
    yield from _section("params", map(_param, graph.params))
    yield from _section("constants", map(format_value, graph.constants))
    if graph.caches.slab_bytes:
        yield f"slabs(bytes={graph.caches.slab_bytes})"
    for pool in graph.caches.pools:
        per_slab = "" if pool.pages_per_slab == 1 else f", pages_per_slab={pool.pages_per_slab}"
        yield f"pool {_name(pool.name)}(pages={_name(pool.pages)}{per_slab})"
    for group in graph.caches.groups:
        yield from _section(_group(group), map(_slot, group.slots), always=True)
    for states in graph.caches.states:
        yield from _section(_states(states), map(_slot, states.slots), always=True)
    if graph.capture.sizes:
        yield f"capture(sizes={list(graph.capture.sizes)})"
    yield from _section("shards", _shards(graph.shards))
    for block in graph.blocks:
        yield from _section(f"block {_name(block.name)}", _block(block), always=True)
    yield from _section("main", _main(graph), always=True)


def _section(head: str, lines: Iterable[str], *, always: bool = False) -> Iterator[str]:
    """The lines in braces, indented; without lines nothing, unless `always`."""
    indented = ["  " + line for line in lines]
    if indented or always:
        yield f"{head} {{"
        yield from indented
        yield "}"


def _symbol(symbol: schema.Symbol) -> str:
    return f"{_name(symbol.name)}: {symbol.min}..{'' if symbol.max is None else symbol.max}"


def _param(param: schema.Param) -> str:
    return f"{format_value(schema.Value(param.name, param.type))} = {format_recipe(param.recipe)}"


def _group(group: schema.Group) -> str:
    fields = ", ".join(f"{field}={_ref(getattr(group.inputs, field))}" for field in group.inputs.__struct_fields__)
    return f"group {_name(group.name)}(pool={_name(group.pool)}, spec={_spec(group.spec)}, {fields})"


def _states(group: schema.StateGroup) -> str:
    spec = f"{group.spec.kind}(shape={_sizes(group.spec.shape)}, dtype={group.spec.dtype})"
    return f"group {_name(group.name)}(pool={_name(group.pool)}, spec={spec}, slot_ids={_ref(group.slot_ids)})"


def _slot(slot: schema.Slot) -> str:
    return f"slot {_name(slot.name)}({', '.join(map(format_value, slot.tensors))})"


def _spec(spec: schema.PagedSpec | schema.LatentSpec | schema.IndexSpec | schema.EntrySpec) -> str:
    if isinstance(spec, schema.IndexSpec):
        return f"index(key_size={spec.key_size}, dtype={spec.dtype}, page_size={spec.page_size})"
    pages = f"dtype={spec.dtype}, page_size={spec.page_size}, window={'none' if spec.window is None else spec.window}"
    if isinstance(spec, schema.LatentSpec):
        return f"latent(latent_size={spec.latent_size}, rope_size={spec.rope_size}, {pages})"
    if isinstance(spec, schema.EntrySpec):
        return f"entries(entry_size={spec.entry_size}, rate={spec.rate}, {pages})"
    sizes = f"num_kv_heads={symbols.text(spec.num_kv_heads)}, head_size={spec.head_size}, value_size={spec.value_size}"
    chunk = "" if spec.chunk is None else f", chunk={spec.chunk}"
    return f"paged({sizes}, {pages}{chunk})"


def _shards(plan: schema.ShardPlan) -> Iterator[str]:
    yield from map(_world, plan.worlds)
    yield from (f"pipeline(layers={list(each.layers)})" for each in plan.pipelines)
    for each in plan.overrides:
        yield f"override(pattern={json.dumps(each.pattern)}, choice={json.dumps(each.choice)})"
    yield from map(_row, plan.rows)


def _world(world: schema.World) -> str:
    return f"world(tp={world.tp}, ep={list(world.ep)})"


def _row(row: schema.ShardRow) -> str:
    params, nodes = (f"[{', '.join(map(_ref, names))}]" for names in (row.params, row.nodes))
    what = f"kind={json.dumps(row.kind)}, block={json.dumps(row.block)}, mode={json.dumps(row.mode)}"
    how = f"units={row.units}, collective={json.dumps(row.collective)}, group={json.dumps(row.group)}"
    return f"row({what}, params={params}, nodes={nodes}, {how}, reason={json.dumps(row.reason)})"


def _block(block: schema.Block) -> Iterator[str]:
    yield from _section("inputs", map(format_value, block.inputs))
    yield from _section("params", map(format_value, block.params))
    yield from _section("caches", map(format_value, block.caches))
    yield from map(format_step, block.nodes)
    yield f"return {', '.join(map(_ref, block.outputs))}".rstrip()


def _main(graph: schema.Graph) -> Iterator[str]:
    orders = {
        block.name: [value.name for value in (*block.inputs, *block.params, *block.caches)] for block in graph.blocks
    }
    for step in graph.main:
        yield format_step(step, orders.get(step.block, ()) if isinstance(step, schema.Call) else ())
    yield f"return {', '.join(f'{_name(key)}={_ref(name)}' for key, name in sorted(graph.outputs.items()))}".rstrip()


def _ordered(args: Iterable[str], order: Sequence[str]) -> list[str]:
    """The names in `order` that are given, then the others, sorted: equal steps read the same."""
    given = set(args)
    return [*(name for name in order if name in given), *sorted(given.difference(order))]


def _name(name: str) -> str:
    return name if symbols.is_plain(name) else json.dumps(name)


def _ref(name: str) -> str:
    return "%" + _name(name)


def _sizes(shape: Sequence[schema.Expr]) -> str:
    return f"[{', '.join(map(symbols.text, shape))}]"


def _arg(arg: schema.Arg) -> str:
    match arg:
        case schema.Ref(name):
            return _ref(name)
        case schema.Const(value):
            return _literal(value)
        case schema.Dim(expr):
            bare = isinstance(expr, schema.Apply) or (
                isinstance(expr, str) and expr not in RESERVED and symbols.is_plain(expr)
            )
            return symbols.text(expr) if bare else f"dim({symbols.text(expr)})"
        case schema.DtypeArg(dtype):
            return dtype
        case schema.Items(items):
            return f"[{', '.join(map(_arg, items))}]"
        case schema.Steps(steps, results):
            lines = (f"%s{i} = {_call(step.op, 1, step.args)}" for i, step in enumerate(steps))
            return f"{{{', '.join((*lines, 'return ' + ', '.join(map(_ref, results))))}}}"


def _literal(value: bool | int | float | str | None) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value) if isinstance(value, str) else repr(value)
