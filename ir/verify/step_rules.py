"""The verifier's rules about nodes, against the op table, and about calls, against the blocks that they name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from precast.ir.graph.infer import apply_shape_rule, misfits, references
from precast.ir.graph.schema import Call, Node, Ref, TensorType, Value
from precast.ir.graph.text import format_type
from precast.ir.ops import table as ops
from precast.ir.ops.op import OpDef, ShapeError
from precast.ir.verify.facts import Facts, Fault, Rule, Scope, same_type

# --- nodes -----------------------------------------------------------------------------------------------------


def _known(facts: Facts) -> Iterator[tuple[Scope, str, Node, OpDef]]:
    """The nodes whose op is in the table."""
    for scope, where, node in facts.nodes:
        op = ops.lookup(node.op, node.version)
        if op is not None:
            yield scope, where, node, op


def _known_ops(facts: Facts) -> Iterator[Fault]:
    for _, where, node in facts.nodes:
        if ops.lookup(node.op, node.version) is None:
            versions = [str(version) for name, version in ops.names() if name == node.op]
            known = f"known versions are {', '.join(versions)}" if versions else "no op of the table has this name"
            yield where, f"{node.op}@{node.version} is unknown: {known}"


def _arguments(facts: Facts) -> Iterator[Fault]:
    for _, where, node, op in _known(facts):
        yield from ((where, message) for message in misfits(op, node.args))


def _results(facts: Facts) -> Iterator[Fault]:
    for scope, where, node, op in _known(facts):
        if any(misfits(op, node.args)) or not all(name in scope.types for name in references(node.args)):
            continue
        try:
            expected = apply_shape_rule(op, node.args, scope.types)
        except ShapeError as error:
            yield where, str(error)
        else:
            yield from _differing(where, node.outputs, expected)


def _differing(where: str, found: Sequence[Value], expected: Sequence[TensorType | None]) -> Iterator[Fault]:
    """Results of other number or types than expected; None: the type is not known."""
    if len(found) != len(expected):
        yield where, f"expected {len(expected)} results, found {len(found)}"
    for value, wanted in zip(found, expected, strict=False):
        if wanted is not None and not same_type(value.type, wanted):
            yield where, f"%{value.name}: expected {format_type(wanted)}, found {format_type(value.type)}"


def _mutations(facts: Facts) -> Iterator[Fault]:
    for scope, where, node, op in _known(facts):
        written = [arg.name for name in op.mutated if isinstance(arg := node.args.get(name), Ref)]
        for name in dict.fromkeys(written):
            if scope.kinds.get(name) != "cache":
                yield where, f"writes %{name}, which is no cache"
            if written.count(name) > 1:
                yield where, f"writes %{name} twice"


# --- calls -----------------------------------------------------------------------------------------------------


def _calls(facts: Facts) -> Iterator[tuple[str, Call, Scope]]:
    """The calls of known blocks, with what the block takes."""
    for where, call in facts.calls:
        if call.block in facts.blocks:
            yield where, call, facts.blocks[call.block]


def _called_blocks(facts: Facts) -> Iterator[Fault]:
    for where, call in facts.calls:
        if call.block not in facts.blocks:
            yield where, "there is no block of this name"
    called = {call.block for _, call in facts.calls}
    for block in facts.graph.blocks:
        if block.name not in called:
            yield f"block {block.name}", "nothing calls it"


def _bindings(facts: Facts) -> Iterator[Fault]:
    for where, call, block in _calls(facts):
        yield from ((where, f"{name} is not bound") for name in block.kinds if name not in call.args)
        yield from ((where, f"{name} is nothing that the block takes") for name in call.args if name not in block.kinds)


def _bound_types(facts: Facts) -> Iterator[Fault]:
    for where, call, block in _calls(facts):
        for formal, name in call.args.items():
            found = facts.main.types.get(name)
            if formal in block.kinds and found is not None and not same_type(found, block.types[formal]):
                yield where, f"{formal}: expected {format_type(block.types[formal])}, found {format_type(found)}"


def _bound_kinds(facts: Facts) -> Iterator[Fault]:
    for where, call, block in _calls(facts):
        written: set[str] = set()
        for formal, name in call.args.items():
            kind, found = block.kinds.get(formal), facts.main.kinds.get(name)
            if kind == "cache" and (found != "cache" or name in written):
                yield where, f"{formal}: expected a tensor of a cache slot, each once, found %{name}"
            elif kind == "param" and found != "param":
                yield where, f"{formal}: expected a param or a constant, found %{name}"
            elif kind == "input" and found == "cache":
                yield where, f"{formal}: expected no cache, found %{name}"
            if kind == "cache":
                written.add(name)


def _call_results(facts: Facts) -> Iterator[Fault]:
    for where, call, block in _calls(facts):
        yield from _differing(where, call.outputs, [block.types.get(name) for name in block.returned])


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
