"""The verifier's rules about nodes, against the op table, and about calls, against the blocks that they name."""

from __future__ import annotations

from collections.abc import Iterator

from precast.ir.graph.infer import apply_shape_rule, misfits, references
from precast.ir.graph.schema import Block, Call, Node, Ref
from precast.ir.graph.text import format_type
from precast.ir.ops import table as ops
from precast.ir.ops.op import OpDef, ShapeError
from precast.ir.verify.facts import Facts, Fault, Rule, Scope, same_type

# --- nodes -----------------------------------------------------------------------------------------------------


def _nodes(facts: Facts) -> Iterator[tuple[Scope, int, Node, OpDef]]:
    """All nodes whose op is known."""
    for scope in facts.scopes:
        for index, step in enumerate(scope.steps):
            if isinstance(step, Node):
                op = ops.lookup(step.op, step.version)
                if op is not None:
                    yield scope, index, step, op


def _known_ops(facts: Facts) -> Iterator[Fault]:
    for scope in facts.scopes:
        for index, step in enumerate(scope.steps):
            if isinstance(step, Node) and ops.lookup(step.op, step.version) is None:
                versions = [str(version) for name, version in ops.names() if name == step.op]
                known = f"known versions are {', '.join(versions)}" if versions else "no op of the table has this name"
                yield scope.at(index), f"{step.op}@{step.version} is unknown: {known}"


def _arguments(facts: Facts) -> Iterator[Fault]:
    for scope, index, node, op in _nodes(facts):
        yield from ((scope.at(index), message) for message in misfits(op, node.args))


def _results(facts: Facts) -> Iterator[Fault]:
    for scope, index, node, op in _nodes(facts):
        if any(misfits(op, node.args)) or not all(name in scope.types for name in references(node.args)):
            continue
        try:
            expected = apply_shape_rule(op, node.args, scope.types)
        except ShapeError as error:
            yield scope.at(index), str(error)
            continue
        found = [value.type for value in node.outputs]
        if len(found) != len(expected):
            yield scope.at(index), f"expected {len(expected)} results, found {len(found)}"
        for value, wanted in zip(node.outputs, expected, strict=False):
            if not same_type(value.type, wanted):
                yield scope.at(index), f"%{value.name}: expected {format_type(wanted)}, found {format_type(value.type)}"


def _mutations(facts: Facts) -> Iterator[Fault]:
    for scope, index, node, op in _nodes(facts):
        written = [arg.name for name in op.mutated if isinstance(arg := node.args.get(name), Ref)]
        for name in dict.fromkeys(written):
            if name not in scope.caches:
                yield scope.at(index), f"writes %{name}, which is no cache"
            if written.count(name) > 1:
                yield scope.at(index), f"writes %{name} twice"


# --- calls -----------------------------------------------------------------------------------------------------


def _calls(facts: Facts) -> Iterator[tuple[str, Call, Block]]:
    """All calls of known blocks."""
    for index, call in facts.calls:
        block = facts.blocks.get(call.block)
        if block is not None:
            yield facts.main.at(index), call, block


def _called_blocks(facts: Facts) -> Iterator[Fault]:
    for index, call in facts.calls:
        if call.block not in facts.blocks:
            yield facts.main.at(index), "there is no block of this name"
    called = {call.block for _, call in facts.calls}
    for block in facts.graph.blocks:
        if block.name not in called:
            yield f"block {block.name}", "nothing calls it"


def _bindings(facts: Facts) -> Iterator[Fault]:
    for where, call, block in _calls(facts):
        expected = facts.formals[block.name]
        yield from ((where, f"{name} is not bound") for name in expected if name not in call.args)
        yield from ((where, f"{name} is nothing that the block takes") for name in call.args if name not in expected)


def _bound_types(facts: Facts) -> Iterator[Fault]:
    for where, call, block in _calls(facts):
        formals = facts.formals[block.name]
        for formal, name in call.args.items():
            found = facts.main.types.get(name)
            if formal in formals and found is not None and not same_type(found, formals[formal].type):
                yield where, f"{formal}: expected {format_type(formals[formal].type)}, found {format_type(found)}"


def _bound_kinds(facts: Facts) -> Iterator[Fault]:
    stored = {param.name for param in facts.graph.params} | {value.name for value in facts.graph.constants}
    for where, call, block in _calls(facts):
        formals = facts.formals[block.name]
        written: set[str] = set()
        for formal, name in call.args.items():
            kind = formals[formal].kind if formal in formals else None
            if kind == "cache" and (name not in facts.slots or name in written):
                yield where, f"{formal}: expected a tensor of a cache slot, each once, found %{name}"
            elif kind == "param" and name not in stored:
                yield where, f"{formal}: expected a param or a constant, found %{name}"
            elif kind == "input" and name in facts.slots:
                yield where, f"{formal}: expected no cache, found %{name}"
            if kind == "cache":
                written.add(name)


def _call_results(facts: Facts) -> Iterator[Fault]:
    for where, call, block in _calls(facts):
        types = facts.block_scopes[block.name].types
        if len(call.outputs) != len(block.outputs):
            yield where, f"expected {len(block.outputs)} results, found {len(call.outputs)}"
        for value, name in zip(call.outputs, block.outputs, strict=False):
            if name in types and not same_type(value.type, types[name]):
                yield where, f"%{value.name}: expected {format_type(types[name])}, found {format_type(value.type)}"


STEP_RULES = (
    Rule("IR020", "ops and their versions are in the table", _known_ops),
    Rule("IR021", "arguments fit the op's signature", _arguments),
    Rule("IR022", "results have the types that the op's shape rule gives", _results),
    Rule("IR023", "ops write caches only, each once", _mutations),
    Rule("IR030", "calls name a block, and each block is called", _called_blocks),
    Rule("IR031", "calls bind each input, param and cache of the block, and nothing else", _bindings),
    Rule("IR032", "calls bind values of equal types", _bound_types),
    Rule("IR033", "calls bind caches to caches, params to params or constants", _bound_kinds),
    Rule("IR034", "results of calls have the types that the block returns", _call_results),
)
