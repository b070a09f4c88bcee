"""The verifier's rules about names, expressions, types, symbols, and values from their definition to their use."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from precast.ir import limits
from precast.ir.graph import symbols
from precast.ir.graph.infer import flat, references
from precast.ir.graph.schema import Const, Node
from precast.ir.graph.text import format_type
from precast.ir.memory import caches
from precast.ir.verify.facts import Facts, Fault, Rule, Scope, duplicates

MAX_NAME_LENGTH = 256
"""Characters of a name. Names of modules make those of params; the longest in use have 120."""

_NAME = re.compile(rf"[A-Za-z_][A-Za-z0-9_.]{{0,{MAX_NAME_LENGTH - 1}}}")
_INT64 = range(-(2**63), 2**63)


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
    for _, where, node in facts.nodes:
        yield from ((where, message) for message in _bad_literals(node))


def _bad_literals(node: Node) -> Iterator[str]:
    for name, arg in flat(node.args):
        value = arg.value if isinstance(arg, Const) else None
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
            elif scope.kinds.get(name) == "cache":
                yield scope.where, f"returns %{name}, which is a cache"
    if not facts.graph.outputs:
        yield "main", "expected at least one output"


FORM_RULES = (
    Rule("IR001", "names are plain names", _names),
    Rule("IR002", "expressions have a normal form", _expressions),
    Rule("IR003", "types have few dimensions, of sizes that are not negative", _sizes),
    Rule("IR004", "literals are numbers, integers of 64 bits", _literals),
)
"""All other rules take for granted that these hold."""

VALUE_RULES = (
    Rule("IR010", "symbols are declared once, with a range from 0 on", _symbol_ranges),
    Rule("IR011", "every symbol in use is declared", _symbol_uses),
    Rule("IR012", "names are defined once, in main and in each block", _single_assignment),
    Rule("IR013", "names are defined before they are used", _defined_before_use),
    Rule("IR014", "what is returned is defined, and no cache", _returns),
)
