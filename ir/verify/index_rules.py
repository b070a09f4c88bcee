"""The verifier's rules about integers by which ops address memory: what a step gives, or indices that stay within."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from precast.ir import limits
from precast.ir.graph import symbols
from precast.ir.graph.schema import Arg, Const, Dim, Expr, Node, Ref, TensorType
from precast.ir.graph.text import format_type
from precast.ir.memory.step_inputs import LOGIT_ROWS, STEP_INPUTS, TOKENS, given_names
from precast.ir.ops import table as ops
from precast.ir.ops.checks import COMPUTED, WORLD
from precast.ir.ops.op import Integers, OpDef
from precast.ir.verify.facts import Facts, Fault, Rule, Scope, same_type
from precast.ir.verify.ranges import Range, Ranges, follow, joined
from precast.ir.weights.tensorfile import element_bytes


def _input_types(facts: Facts) -> Iterator[Fault]:
    for value in facts.graph.inputs:
        wanted = STEP_INPUTS.get(value.name)
        if wanted is not None and not same_type(value.type, wanted):
            yield f"input %{value.name}", f"expected {format_type(wanted)}, found {format_type(value.type)}"


def _step_inputs(facts: Facts) -> Iterator[Fault]:
    for scope, where, node, op in _addressing(facts):
        wanted = {name: word.of for name, word in op.integers.items() if word.kind == "input"}
        for name, expected in wanted.items():
            found = _origins(facts, scope, node.args.get(name)) - {expected}
            if found or facts.main.kinds.get(expected) != "input":
                seen = ", ".join(sorted(f"%{each}" if each else "a value made in the graph" for each in found))
                yield where, f"{name}: expected the graph's input %{expected}, found {seen or 'no such input'}"
        if wanted:
            packed = _type_of(scope, node.args.get(op.args[0].name))
            if packed is not None and not any(symbols.equal(size, TOKENS) for size in packed.shape[1:2]):
                found_type = format_type(packed)
                yield where, f"{op.args[0].name}: expected the {TOKENS} tokens of a step, found {found_type}"


def _origins(facts: Facts, scope: Scope, arg: Arg | None) -> set[str]:
    """The names of `main` that the argument is, over all calls; "" for a value that the block makes."""
    if not isinstance(arg, Ref):
        return {""}
    if scope is facts.main:
        return {arg.name}
    return facts.bound[scope.name].get(arg.name, {""})


def _indices(facts: Facts) -> Iterator[Fault]:
    ranges = _ranges(facts)
    for scope, where, node, op in _addressing(facts):
        for name, word in op.integers.items():
            arg, size = node.args.get(name), _limit(word, node, scope)
            if word.kind != "index" or not isinstance(arg, Ref):
                continue
            found = ranges[scope.name].get(arg.name)
            if found is None or size is None or found.low < 0 or found.high >= size:
                shown = "unknown" if found is None else f"{found.low} to {found.high}"
                most = "a size that is written out" if size is None else str(size - 1)
                yield where, f"{name}: expected indices that are known to be 0 to {most}, found {shown} in %{arg.name}"


def _limit(word: Integers, node: Node, scope: Scope) -> int | None:
    """How many things there are to index: the size of a dimension, or a number among the arguments."""
    of = node.args.get(word.of)
    if isinstance(of, Const):
        return of.value if type(of.value) is int else None
    indexed, dim = _type_of(scope, of), word.dim
    if isinstance(dim, str):
        given = node.args.get(dim)
        dim = given.value if isinstance(given, Const) and type(given.value) is int else 0
    size = indexed.shape[dim] if indexed is not None else None
    return size if isinstance(size, int) else None


def _ranges(facts: Facts) -> dict[str, Ranges]:
    """The ranges of integer values by scope; of what a block is given those of all its calls together."""
    main = follow(facts.main.steps, facts.main.types, _step_ranges(facts))
    found = {"": main}
    for name, scope in facts.blocks.items():
        given: Ranges = {}
        for formal, bound in facts.bound[name].items():
            known = [main[actual] for actual in bound if actual in main]
            if known and len(known) == len(bound):
                given[formal] = joined(known)
        found[name] = follow(scope.steps, scope.types, given)
    return found


def _step_ranges(facts: Facts) -> Ranges:
    """Of what a step gives, for the model's numbers, or, as long as there are none, for the least that it may have."""
    model = facts.model
    vocabulary, length = (model.vocab_size, model.max_seq_len) if model is not None else (1, 1)
    logits = facts.main.types.get(facts.graph.outputs.get("logits", ""))
    if model is not None and logits is not None and logits.shape and isinstance(logits.shape[-1], int):
        vocabulary = max(vocabulary, logits.shape[-1])  # each may be drawn, and comes back
    given = {"input_ids": Range(0, vocabulary - 1), "positions": Range(0, length - 1)}
    return {name: each for name, each in given.items() if facts.main.kinds.get(name) == "input"}


def _addressing(facts: Facts) -> Iterator[tuple[Scope, str, Node, OpDef]]:
    """The nodes that take integers."""
    for scope, where, node in facts.nodes:
        op = ops.lookup(node.op, node.version)
        if op is not None and op.integers:
            yield scope, where, node, op


def _type_of(scope: Scope, arg: Arg | None) -> TensorType | None:
    return scope.types.get(arg.name) if isinstance(arg, Ref) else None


def _sizes(facts: Facts) -> Iterator[Fault]:
    """A size below 0 is none in torch: what is made then has another shape than its type says."""
    least = {symbol.name: symbols.add(symbol.name, symbol.min) for symbol in facts.graph.symbols if symbol.min}

    def bad(size: Expr) -> bool:
        if isinstance(size, int) or symbols.free_symbols(size) <= WORLD:
            return False  # one of the world is checked once that is known
        return not symbols.never_negative(symbols.substitute(size, least))

    for kind, where in facts.types.items():
        for size in filter(bad, kind.shape):
            yield where, f"{format_type(kind)}: {symbols.text(size)} isn't known to be at least 0"
    for scope, where, node in facts.nodes:
        start = node.args.get("start")
        if isinstance(start, Dim) and bad(start.expr):
            yield where, f"start: {symbols.text(start.expr)} isn't known to be at least 0"
        name = _TAKES.get(node.op)
        source, dim = _type_of(scope, node.args.get("self")), node.args.get("dim", Const(-1))
        if name is None or source is None or not isinstance(dim, Const) or type(dim.value) is not int:
            continue
        arg, size = node.args[name], source.shape[dim.value]
        taken = arg.value if isinstance(arg, Const) else arg.expr if isinstance(arg, Dim) else None
        if isinstance(taken, int) and not isinstance(size, int):
            needed = taken + 1 if name == "index" and taken >= 0 else abs(taken)
            if bad(symbols.add(size, -needed)):
                yield where, f"{name}: {taken} isn't known to lie in dimension {dim.value}, of {symbols.text(size)}"
        elif not isinstance(taken, int):
            yield where, f"{name}: expected a number, found a size that depends on symbols"


_TAKES = {"aten.select.int": "index", "aten.topk.default": "k"}
"""Ops that take so much of a dimension, or an element of it; a number beyond a known size the shape rule refuses."""


def _value_bytes(facts: Facts) -> Iterator[Fault]:
    """Of what steps make: every symbol at its least, tokens and sequences one."""
    smallest = {symbol.name: max(symbol.min, 1) for symbol in facts.graph.symbols} | {"rank": 0}
    given = [value.type for value in facts.main.given if facts.main.kinds[value.name] == "param"]
    most = max([limits.MAX_VALUE_BYTES, *(4 * _bytes(kind, smallest) for kind in given)])
    made = {value.type: where for _, where, node in reversed(facts.nodes) for value in node.outputs}
    for kind, where in made.items():
        if (size := _bytes(kind, smallest)) > most:
            yield where, f"{format_type(kind)} takes {size} bytes in the smallest step, expected at most {most}"


def _bytes(kind: TensorType, sizes: Mapping[str, int]) -> int:
    try:
        return math.prod(symbols.evaluate(size, sizes) for size in kind.shape) * element_bytes(kind.dtype)
    except (KeyError, ZeroDivisionError):  # another rule says so, or the world that divides by it can't be loaded
        return 0


def _decoder(facts: Facts) -> Iterator[Fault]:
    """An engine draws from logits that the graph makes."""
    graph, model = facts.graph, facts.model
    if model is None:
        return
    name = graph.outputs.get("logits")
    made = {value.name: value.type for step in graph.main for value in step.outputs}
    found = made.get(name or "")
    if found is None:
        given = "no output logits" if name is None else f"%{name}, which the graph is given"
        yield "main", f"expected an output logits that the graph computes, found {given}"
    elif found.shape[:2] != (1, LOGIT_ROWS) or len(found.shape) != 3 or found.dtype not in COMPUTED:
        yield "main", f"logits: expected [1, {LOGIT_ROWS}, V] of a type that ops compute in, found {format_type(found)}"
    elif not isinstance(found.shape[2], int) or found.shape[2] < 1:
        yield "main", f"logits: expected a number of tokens to draw from, found {symbols.text(found.shape[2])}"


def _given(facts: Facts) -> Iterator[Fault]:
    """No step could run: the rest are of types that IR046 and IR050 check."""
    if facts.model is None:
        return
    known = given_names(facts.graph.caches)
    for value in facts.graph.inputs:
        if value.name not in known:
            names = ", ".join(sorted(known))
            yield f"input %{value.name}", f"{format_type(value.type)}: no step gives it; expected some of {names}"


def _remembers(facts: Facts) -> Iterator[Fault]:
    """A step has but a part of a sequence. What looks at no other tokens needs no caches: such a model has none."""
    for _, where, _, op in _addressing(facts) if facts.model is not None else ():
        if "cu_seqlens" in op.integers and all(word.kind != "group" for word in op.integers.values()):
            yield where, "sees the tokens of this step alone; expected the form of the op that has a cache or a state"


INPUT_RULES = (Rule("IR050", "inputs that a step has are of the types that it has them of", _input_types),)
INDEX_RULES = (
    Rule("IR051", "an op's metadata are the inputs that say it of the step, whose tokens it takes", _step_inputs),
    Rule("IR052", "indices are known to lie within what they index", _indices),
    Rule("IR053", "sizes and the starts of slices are known not to be negative", _sizes),
    Rule("IR054", "no value is huge in the smallest step", _value_bytes),
    Rule("IR055", "a model's graph makes logits, one row for each that a step wants", _decoder),
    Rule("IR056", "a model's graph takes what a step gives, and nothing else", _given),
    Rule("IR057", "what looks at other tokens of a sequence keeps those of earlier steps in a cache", _remembers),
)
"""They take for granted that all others hold."""
