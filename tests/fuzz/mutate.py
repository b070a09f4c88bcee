"""Random changes to inputs: to any bytes, and to those of a form so that the change gets past the form's parser.

All randomness is the caller's: one seed gives one result.
"""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from precast.ir.graph.infer import apply_shape_rule, misfits
from precast.ir.graph.schema import (
    Apply,
    Arg,
    Const,
    Dim,
    DtypeArg,
    Expr,
    Graph,
    Items,
    Node,
    Ref,
    Step,
    Steps,
    TensorType,
    Value,
)
from precast.ir.memory import caches
from precast.ir.ops import table as ops
from precast.ir.ops.op import ArgDef, OpDef

Mutate = Callable[[bytes, random.Random], bytes]

INTERESTING = (0x00, 0x01, 0x7F, 0x80, 0x9F, 0xC0, 0xC1, 0xCF, 0xDD, 0xDF, 0xFF)
NUMBERS = (0, 1, -1, 2, 3, 1000, 2**16, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, -(2**63))
ODD: tuple[Any, ...] = (
    None, True, 0.5, 1e308, float("inf"), *NUMBERS, "", "T", "*", "x" * 2000, "\x1b[2J\n", [], {}, ["T"], {"k": "e"},
)  # fmt: skip
# What a parser of JSON accepts and no writer of it gives: the mark in a document -> what is written in its place.
RAW = {
    "@nested@": b"[" * 3000 + b"]" * 3000,
    "@digits@": b"9" * 5000,
    "@large@": b"1" + b"0" * 30,
    "@surrogate@": rb'"\ud800"',
    "@overflow@": b"1e999",
    "@nan@": b"NaN",
}
WORDS = ("-1", "0", "1", "4611686018427387904", "none", "T", '"', "[", "]", "(", ")", "%", "*", "1e999", "inf", "nan")
_DTYPES = ("bool", "int8", "int32", "int64", "float8_e4m3fn", "bfloat16", "float32")


# --- bytes -----------------------------------------------------------------------------------------------------


def corrupt(data: bytes, rng: random.Random) -> bytes:
    """The bytes with one to four random changes."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        start = rng.randrange(len(out) + 1)
        length = min(rng.choice((1, 1, 2, 8, 64)), len(out) - start)
        kind = rng.randrange(7)
        if kind == 0 and length:
            out[start] ^= 1 << rng.randrange(8)
        elif kind == 1 and length:
            out[start] = rng.choice(INTERESTING)
        elif kind == 2:
            del out[start:]
        elif kind == 3:
            del out[start : start + length]
        elif kind == 4:
            out[start:start] = out[start : start + length]
        elif kind == 5:
            out[start:start] = rng.randbytes(rng.choice((1, 4, 100)))
        else:
            out[start : start + length] = bytes(length)
    return bytes(out)


# --- documents -------------------------------------------------------------------------------------------------


def spots(document: Any) -> list[tuple[Any, Any]]:
    """All (container, key) pairs of a document."""
    found = []
    pending = [document] if isinstance(document, (dict, list)) else []
    while pending:
        item = pending.pop()
        pairs = item.items() if isinstance(item, dict) else enumerate(item)
        for key, child in pairs:
            found.append((item, key))
            if isinstance(child, (dict, list)):
                pending.append(child)
    return found


def change_value(document: Any, rng: random.Random, odd: Sequence[Any] = ODD) -> None:
    """One to three values of a document removed, replaced by odd ones, or by other values of it."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        places = spots(document)
        if not places:
            return
        container, key = rng.choice(places)
        old = container[key]
        kind = rng.randrange(8)
        if kind == 0:
            del container[key]
        elif kind == 1:
            container[key] = copy.deepcopy(rng.choice(odd))
        elif kind == 4 and type(old) in (int, str):  # in all places: sizes and names must agree
            new = rng.choice([value for value in odd if type(value) is type(old)])
            for holder, place in places:
                if type(holder[place]) is type(old) and holder[place] == old:
                    holder[place] = new
        elif kind == 2:
            container[key] = _other(places, rng)
        elif kind == 3 and isinstance(container, list):
            container.insert(key, copy.deepcopy(old))
        elif kind == 3:
            container[rng.choice(("k", "name", "x", str(key)))] = copy.deepcopy(old)
        else:  # one of the same kind, which is what most parsers ask for
            same = [place for place in places if type(place[0][place[1]]) is type(old)]
            own = [value for value in odd if type(value) is type(old)]
            container[key] = copy.deepcopy(rng.choice(own)) if own and rng.random() < 0.5 else _other(same, rng)


def _other(places: Sequence[tuple[Any, Any]], rng: random.Random) -> Any:
    container, key = rng.choice(places)
    return copy.deepcopy(container[key])


def change_json(data: bytes, rng: random.Random) -> bytes:
    """JSON with changed values, written canonically; bytes that are no JSON are corrupted."""
    try:
        document = [json.loads(data)]
        change_value(document, rng, (*ODD, *RAW))
        made = json.dumps(document[0] if document else None, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        changed = made.encode()
    except (ValueError, RecursionError, TypeError):
        return corrupt(data, rng)
    for mark, raw in RAW.items():
        changed = changed.replace(f'"{mark}"'.encode(), raw)
    return changed


def change_msgpack(data: bytes, rng: random.Random) -> bytes:
    """msgpack with changed values, written canonically; bytes that are none are corrupted."""
    try:
        document = [msgspec.msgpack.decode(data)]
        change_value(document, rng)
        return msgspec.msgpack.encode(document[0] if document else None, order="sorted")
    except (ValueError, RecursionError, TypeError, OverflowError):
        return corrupt(data, rng)


def change_safetensors(data: bytes, rng: random.Random) -> bytes:
    """A safetensors file with a changed header, whose length is made to fit."""
    size = int.from_bytes(data[:8], "little")
    header = change_json(data[8 : 8 + size], rng)
    return len(header).to_bytes(8, "little") + header + data[8 + size :]


def change_text(data: bytes, rng: random.Random) -> bytes:
    """Text with one to three words left out, doubled, or replaced by others."""
    words = re.findall(rb"[\w.@%]+|\s+|.", data, re.DOTALL)
    for _ in range(rng.choice((1, 1, 2, 3))):
        if not words:
            break
        at = rng.randrange(len(words))
        kind = rng.randrange(4)
        if kind == 0:
            del words[at]
        elif kind == 1:
            words[at] = rng.choice(words)
        elif kind == 2:
            words[at] = rng.choice(WORDS).encode()
        else:
            start = rng.randrange(len(words))
            words[at:at] = words[start : start + rng.choice((1, 4, 30))]
    return b"".join(words)


# --- graphs ----------------------------------------------------------------------------------------------------


def change_graph(data: bytes, rng: random.Random) -> bytes:
    """A graph's encoding with a node more, of any op of the table, or with changed values."""
    if rng.random() < 0.5:
        return change_msgpack(data, rng)
    try:
        graph = msgspec.msgpack.decode(data, type=Graph)
    except (ValueError, RecursionError):
        return corrupt(data, rng)
    at = rng.randint(0, len(graph.main))
    types = {value.name: value.type for value in (*graph.inputs, *graph.params, *graph.constants)}
    types |= {value.name: value.type for value in caches.tensors(graph.caches)}
    types |= {value.name: value.type for step in graph.main[:at] for value in step.outputs}
    node = _node(types, rng)
    changed = msgspec.structs.replace(graph, main=(*graph.main[:at], node, *graph.main[at:]))
    if node.outputs and rng.random() < 0.3:
        changed = msgspec.structs.replace(changed, outputs={**graph.outputs, "more": node.outputs[0].name})
    return msgspec.msgpack.encode(changed, order="sorted")


def _node(types: Mapping[str, TensorType], rng: random.Random) -> Node:
    """A node over these values; of sixteen tries the first that its op's shape rule takes, or the last."""
    name, version = rng.choice(ops.names())
    op = ops.lookup(name, version)
    assert op is not None
    for _ in range(16):
        args = {arg.name: _argument(arg, types, rng) for arg in op.args if not arg.has_default or rng.random() < 0.5}
        results = _results(op, args, types)
        if results is not None:
            break
    prefix = f"n{rng.getrandbits(24)}"
    made = tuple(Value(f"{prefix}.{index}", type) for index, type in enumerate(results or ()))
    return Node(name, args, made, version)


def _results(op: OpDef, args: Mapping[str, Arg], types: Mapping[str, TensorType]) -> tuple[TensorType, ...] | None:
    try:
        return None if any(misfits(op, args)) else apply_shape_rule(op, args, types)
    except Exception:  # noqa: BLE001 - a rule that raises anything but ShapeError is found when the graph is read
        return None


def _argument(arg: ArgDef, types: Mapping[str, TensorType], rng: random.Random) -> Arg:
    if arg.kind == "Tensor[]":
        return Items(tuple(_tensor(arg.name, types, rng) for _ in range(rng.randint(0, 3))))
    if arg.kind.startswith("int[]"):
        return Items(tuple(_size(rng) for _ in range(rng.randint(0, 4))))
    if arg.kind.startswith("Tensor"):
        return _tensor(arg.name, types, rng)
    if arg.kind == "Dtype":
        return DtypeArg(rng.choice(_DTYPES))  # type: ignore[arg-type]
    if arg.kind == "bool":
        return Const(rng.random() < 0.5)
    if arg.kind == "str":
        return Const(rng.choice(("silu", "gelu", "none", "")))
    if arg.kind == "Steps":
        return _steps(rng)
    if arg.kind.startswith("float"):
        return Const(rng.choice((0.0, 0.5, -1.0, 1e308, float("inf"))))
    return _size(rng)


def _steps(rng: random.Random) -> Steps:
    """Steps of a fused op of one operand; some of them are none."""
    ops = ("aten.neg.default", "aten.silu.default", "aten.add.Tensor", "aten.cumsum.default")
    steps = []
    for count in range(rng.randint(0, 4)):
        given = [Ref("x0"), *(Ref(f"s{i}") for i in range(count))]
        op = rng.choice(ops)
        args: dict[str, Ref | Const | DtypeArg | Items] = {"self": rng.choice(given[-2:])}
        steps.append(Step(op, args | ({"other": rng.choice([*given, Const(0.5)])} if "add" in op else {})))
    return Steps(tuple(steps), (f"s{max(len(steps) - 1, 0)}",))


def _tensor(name: str, types: Mapping[str, TensorType], rng: random.Random) -> Ref:
    like = [each for each in types if each.rpartition(".")[2].startswith(name)]
    return Ref(rng.choice(like if like and rng.random() < 0.7 else list(types) or ["x"]))


def _size(rng: random.Random) -> Const | Dim:
    if rng.random() < 0.7:
        return Const(rng.choice((0, 0, 1, 1, 2, 2, 3, 4, 16, 32, *NUMBERS)))
    sizes: tuple[Expr, ...] = ("T", "B", rng.choice(NUMBERS))
    kinds = ("add", "mul", "floordiv", "mod", "min", "max", "ceildiv")
    return Dim(Apply(rng.choice(kinds), (rng.choice(sizes), rng.choice(sizes))) if rng.random() < 0.7 else "T")


FORMS: dict[str, Mutate] = {
    "bytes": corrupt,
    "json": change_json,
    "msgpack": change_msgpack,
    "safetensors": change_safetensors,
    "text": change_text,
    "graph": change_graph,
}
