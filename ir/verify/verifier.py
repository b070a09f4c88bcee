"""The verifier: a table of rules, each with an id that stays, and what of a graph breaks them.

It runs after every pass and on every load, so it is fast: a block is checked once, a call only for what it binds.
Rules of `FORM` come first; the others take for granted that those hold. No rule raises, whatever a graph holds that
the codec decodes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import islice

import msgspec

from precast.ir import limits
from precast.ir.errors import BundleError, RecipeError
from precast.ir.graph import symbols
from precast.ir.graph.infer import apply_shape_rule, misfits, references
from precast.ir.graph.schema import Block, Call, Const, Graph, Items, Node, Param, Ref, TensorType, Tie
from precast.ir.graph.text import format_type
from precast.ir.memory import caches
from precast.ir.ops import table as ops
from precast.ir.ops.op import OpDef, ShapeError
from precast.ir.verify.cache_rules import CACHE_RULES
from precast.ir.verify.facts import Facts, Fault, Rule, Scope, duplicates, recipe_expressions, same_type
from precast.ir.weights import recipes

MAX_NAME_LENGTH = 256
"""Characters of a name. Names of modules make those of params; the longest in use have 120."""

_NAME = re.compile(rf"[A-Za-z_][A-Za-z0-9_.]{{0,{MAX_NAME_LENGTH - 1}}}")
_INT64 = range(-(2**63), 2**63)


class Violation(msgspec.Struct, frozen=True):
    """One way in which a graph breaks a rule: the rule's id, where, and what was expected and found there."""

    rule: str
    where: str
    message: str


def verify(graph: Graph) -> tuple[Violation, ...]:
    """All violations, in the order of the rules; of each rule the first 100."""
    facts = Facts(graph)
    for rules in (FORM, MEANING):
        found = tuple(
            Violation(rule.id, where, message) for rule in rules for where, message in islice(rule.check(facts), 100)
        )
        if found:
            return found
    return ()


def check(graph: Graph) -> None:
    """Raise BundleError("graph-invalid"), with all violations in one message, unless there are none."""
    found = verify(graph)
    if not found:
        return
    lines = [f"the graph breaks {len({violation.rule for violation in found})} of the language's rules"]
    lines += [f"  {item.rule} {item.where}: {item.message}" for item in found[: limits.MAX_LISTED]]
    if len(found) > limits.MAX_LISTED:
        lines.append(f"  and {len(found) - limits.MAX_LISTED} more")
    raise BundleError("graph-invalid", "\n".join(lines), fix="build the bundle again, with a builder of this version")


# --- form ------------------------------------------------------------------------------------------------------


def _names(facts: Facts) -> Iterator[Fault]:
    for kind, name in _all_names(facts):
        if not _NAME.fullmatch(name):
            shown = name if len(name) <= 80 else name[:80] + "..."
            yield kind, f"{shown!r}: expected letters, digits, _ and ., at most {MAX_NAME_LENGTH}, no digit first"


def _all_names(facts: Facts) -> Iterator[tuple[str, str]]:
    graph = facts.graph
    yield from (("symbol", symbol.name) for symbol in graph.symbols)
    yield from (("block", block.name) for block in graph.blocks)
    yield from (("pool", pool.name) for pool in graph.caches.pools)
    yield from (("output", name) for name in graph.outputs)
    for group in caches.groups(graph.caches):
        yield "group", group.name
        yield from (("slot", slot.name) for slot in group.slots)
    for scope in facts.scopes:
        yield from ((scope.where, name) for name in scope.types)


def _expressions(facts: Facts) -> Iterator[Fault]:
    for expr, where in facts.expressions.items():
        try:
            symbols.normal(expr)
        except symbols.ExprError as error:
            yield where, str(error)


def _sizes(facts: Facts) -> Iterator[Fault]:
    for tensor, where in facts.types.items():
        if len(tensor.shape) > limits.MAX_RANK:
            yield where, f"{len(tensor.shape)} dimensions; at most {limits.MAX_RANK} are allowed"
        for size in tensor.shape:
            if isinstance(size, int) and size not in range(2**63):
                yield where, f"{format_type(tensor)}: {size} is no size"


def _literals(facts: Facts) -> Iterator[Fault]:
    for scope in facts.scopes:
        for index, step in enumerate(scope.steps):
            if isinstance(step, Node):
                yield from ((scope.at(index), message) for message in _bad_literals(step))


def _bad_literals(node: Node) -> Iterator[str]:
    for name, arg in node.args.items():
        for item in arg.items if isinstance(arg, Items) else (arg,):
            value = item.value if isinstance(item, Const) else None
            if isinstance(value, float) and math.isnan(value):
                yield f"{name}: not a number"
            elif isinstance(value, int) and value not in _INT64:
                yield f"{name}: an integer beyond 64 bits"


# --- symbols ---------------------------------------------------------------------------------------------------


def _symbol_ranges(facts: Facts) -> Iterator[Fault]:
    for symbol in facts.graph.symbols:
        if symbol.min < 0 or (symbol.max is not None and symbol.max < symbol.min):
            high = "" if symbol.max is None else symbol.max
            yield f"symbol {symbol.name}", f"expected 0 <= min <= max, found {symbol.min}..{high}"
    yield from duplicates("symbol", (symbol.name for symbol in facts.graph.symbols))


def _symbol_uses(facts: Facts) -> Iterator[Fault]:
    declared = {symbol.name for symbol in facts.graph.symbols}
    for expr, where in facts.expressions.items():
        for name in sorted(symbols.free_symbols(expr) - declared):
            yield where, f"the symbol {name} is not declared"


# --- values ----------------------------------------------------------------------------------------------------


def _single_assignment(facts: Facts) -> Iterator[Fault]:
    for scope in facts.scopes:
        seen: set[str] = set()
        for where, name in _definitions(scope):
            if name in seen:
                yield where, f"%{name} is defined twice"
            seen.add(name)
    yield from duplicates("block", (block.name for block in facts.graph.blocks))


def _definitions(scope: Scope) -> Iterator[tuple[str, str]]:
    yield from ((scope.where, value.name) for value in scope.given)
    for index, step in enumerate(scope.steps):
        yield from ((scope.at(index), value.name) for value in step.outputs)


def _defined_before_use(facts: Facts) -> Iterator[Fault]:
    for scope in facts.scopes:
        defined = {value.name for value in scope.given}
        for index, step in enumerate(scope.steps):
            for name in references(step.args) if isinstance(step, Node) else step.args.values():
                if name not in defined:
                    yield scope.at(index), f"%{name} is {'used before it is' if name in scope.types else 'not'} defined"
            defined.update(value.name for value in step.outputs)


def _returns(facts: Facts) -> Iterator[Fault]:
    for scope in facts.scopes:
        for name in scope.returned:
            if name not in scope.types:
                yield scope.where, f"returns %{name}, which is not defined"
            elif name in scope.caches:
                yield scope.where, f"returns %{name}, which is a cache"
    if not facts.graph.outputs:
        yield "main", "expected at least one output"


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


# --- params ----------------------------------------------------------------------------------------------------


def _recipes(facts: Facts) -> Iterator[Fault]:
    for param in facts.graph.params:
        if not isinstance(param.recipe, Tie):
            yield from ((f"param %{param.name}", message) for message in _recipe(param))


def _recipe(param: Param) -> Iterator[str]:
    try:
        shape, dtype = recipes.shape(param.recipe), recipes.dtype(param.recipe)
        same = same_type(param.type, TensorType(param.type.dtype, shape))
    except (RecipeError, symbols.ExprError) as error:
        yield str(error)
        return
    if any(isinstance(size, int) and size < 0 for size in recipe_expressions(param.recipe)):
        yield "a size of the recipe is negative"
    if not same:
        found = ", ".join(map(symbols.text, shape))
        yield f"expected {format_type(param.type)}, the recipe makes [{found}]"
    if dtype != param.type.dtype:
        yield f"expected {param.type.dtype}, the recipe makes {dtype or 'the dtype of the checkpoint: it needs a cast'}"


def _ties(facts: Facts) -> Iterator[Fault]:
    params = {param.name: param for param in facts.graph.params}
    for param in facts.graph.params:
        if not isinstance(param.recipe, Tie):
            continue
        source = params.get(param.recipe.param)
        where = f"param %{param.name}"
        if source is None:
            yield where, f"tied to %{param.recipe.param}, which is no param"
        elif isinstance(source.recipe, Tie):
            yield where, f"tied to %{source.name}, which is tied itself"
        elif not same_type(source.type, param.type):
            yield where, f"tied to %{source.name}: expected {format_type(source.type)}, found {format_type(param.type)}"


FORM = (
    Rule("IR001", "names are plain names", _names),
    Rule("IR002", "expressions have a normal form", _expressions),
    Rule("IR003", "types have few dimensions, of sizes that are not negative", _sizes),
    Rule("IR004", "literals are numbers, integers of 64 bits", _literals),
)
MEANING = (
    Rule("IR010", "symbols are declared once, with a range from 0 on", _symbol_ranges),
    Rule("IR011", "every symbol in use is declared", _symbol_uses),
    Rule("IR012", "names are defined once, in main and in each block", _single_assignment),
    Rule("IR013", "names are defined before they are used", _defined_before_use),
    Rule("IR014", "what is returned is defined, and no cache", _returns),
    Rule("IR020", "ops and their versions are in the table", _known_ops),
    Rule("IR021", "arguments fit the op's signature", _arguments),
    Rule("IR022", "results have the types of the op's rule", _results),
    Rule("IR023", "ops write caches only, each once", _mutations),
    Rule("IR030", "calls name a block, and each block is called", _called_blocks),
    Rule("IR031", "calls bind each input, param and cache of the block, and nothing else", _bindings),
    Rule("IR032", "calls bind values of equal types", _bound_types),
    Rule("IR033", "calls bind caches to caches, params to params or constants", _bound_kinds),
    Rule("IR034", "results of calls have the types that the block returns", _call_results),
    Rule("IR035", "each param has a recipe of its shape and dtype", _recipes),
    Rule("IR036", "a tied param shares an untied one of equal type", _ties),
    *CACHE_RULES,
)
RULES = (*FORM, *MEANING)
"""All rules, in the order in which they are checked. An id keeps its meaning for good."""
