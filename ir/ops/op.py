"""One row of the op table: all that is known of an op at a version.

A signature is written in the schema language of `torch.library`, of which this is the part in use: the tensors first,
then `*`, then keyword arguments. `aten` ops keep torch's own argument names, so that the loader can call them by name.
A `Tensor|Scalar` takes either. A tensor that the op writes is `Tensor(a!)`. `Steps`, the body of a fused op, and
`Group`, the name of a group of ranks, are ours.

A *shape rule* gives the result types of an op from the types of its arguments, over symbolic sizes. It takes the
arguments by name (tensors as `TensorType`, lists of tensors as tuples of it, integers as expressions, element types as
strings), and raises `ShapeError` with what was expected and what was found. It is the only place where a signature's
shapes are written down: the verifier and the fakes that torch traces with both ask it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal

import msgspec

from precast.ir.graph.schema import Expr, TensorType
from precast.ir.ops.work import Work, elements

Args = Mapping[str, Any]
ShapeRule = Callable[[Args], tuple[TensorType, ...]]

Kind = Literal[
    "Tensor", "Tensor?", "Tensor[]", "Tensor|Scalar", "int", "int?", "int[]", "int[]?", "float", "float?", "bool",
    "str", "Dtype", "Scalar", "Steps", "Group",
]  # fmt: skip


class ShapeError(Exception):
    """The arguments don't fit the op."""


class Tokens(msgspec.Struct, frozen=True):
    """Along which dimensions an op combines elements; none of them may count tokens unless it is told whose they are.

    - `each`: none; elements are computed by themselves, or dimensions are moved as a whole;
    - `sequences`: across tokens, and it is told which tokens are whose, or which are meant;
    - `over`: along the dimensions that `dim` names, of its first argument; without a number, along all;
    - `last`: along the last dimension of the argument `arg`;
    - `cuts`: as `over`, unless it takes the whole dimension;
    - `reshapes`: if another number of elements stands between one token and the next afterwards;
    - `table`: if the argument `arg`, which is a table, has rows made of tokens.
    """

    kind: Literal["each", "sequences", "over", "last", "cuts", "reshapes", "table"]
    arg: str = ""


EACH = Tokens("each")
SEQUENCES = Tokens("sequences")
OVER_DIM = Tokens("over", "dim")


def last_of(arg: str) -> Tokens:
    """Along the last dimension of this argument."""
    return Tokens("last", arg)


class Integers(msgspec.Struct, frozen=True):
    """What an op takes a tensor of integers for: whether it addresses memory by them, and what bounds them then.

    - `input`: the graph's input `of`, whose values the loader makes; the op's first argument has all tokens of a step;
    - `group`: an input of the cache group whose slot the op takes;
    - `index`: elements of the dimension `dim` of the argument `of`, or numbers below it;
    - `any`: as `index`, of an op that passes over what names nothing;
    - `value`: nothing is addressed by them.
    """

    kind: Literal["input", "group", "index", "any", "value"]
    of: str = ""
    dim: int | str = 0


GROUP = Integers("group")
VALUE = Integers("value")
SEQUENCE_BOUNDS = {"cu_seqlens": Integers("input", "cu_seqlens")}
SEQUENCE_LENGTHS = SEQUENCE_BOUNDS | {"kv_lens": Integers("input", "kv_lens")}


class State(msgspec.Struct, frozen=True):
    """What the stateful form of an op keeps of each sequence, by the op's arguments.

    `conv`: earlier tokens, in the dtype of the op's result. `state`: what they come to, in float32.
    """

    kind: Literal["conv", "state"]
    shape: Callable[[Args], tuple[Expr, ...]]


class ArgDef(msgspec.Struct, frozen=True):
    """One argument: its name, its kind, whether the op writes it, and its default, if it has one."""

    name: str
    kind: Kind
    mutated: bool = False
    keyword_only: bool = False
    has_default: bool = False
    default: bool | int | float | str | tuple[int, ...] | None = None


class OpDef(msgspec.Struct, frozen=True):
    """One version of an op.

    `signature` is without name and version; `work` counts floating-point operations; `integers` says of each argument
    that is always a tensor of integers what it is for. An op with a `state` has a second form, named `stateful_<op>`,
    which takes `state`, `slots`, `cu_seqlens` and `kv_lens` after its other tensors.
    """

    name: str
    version: int
    signature: str
    args: tuple[ArgDef, ...]
    num_outputs: int
    shape_rule: ShapeRule
    tokens: Tokens
    work: Work
    state: State | None = None
    integers: Mapping[str, Integers] = MappingProxyType({})

    @property
    def mutated(self) -> tuple[str, ...]:
        """The names of the arguments that the op writes."""
        return tuple(arg.name for arg in self.args if arg.mutated)


def row(
    text: str,
    shape_rule: ShapeRule,
    tokens: Tokens,
    work: Work = elements,
    *,
    version: int = 1,
    state: State | None = None,
    integers: Mapping[str, Integers] = MappingProxyType({}),
) -> OpDef:
    """A row from `name(arguments) -> results`. `tokens` has no default: an op that doesn't say is not in the table."""
    name, _, rest = text.partition("(")
    params, _, returns = rest.partition(") -> ")
    positional, star, keywords = params.partition(", *, ")
    args = [_argument(name, part) for part in positional.split(", ")]
    args += [_argument(name, part, keyword_only=True) for part in keywords.split(", ") if star]
    num_outputs = returns.count("Tensor")
    return OpDef(name, version, "(" + rest, tuple(args), num_outputs, shape_rule, tokens, work, state, integers)


_PARAM = re.compile(
    r"(?P<kind>Tensor\(\w!\)|Tensor\[\]|Tensor\|Scalar|Tensor\??|int\[\]\??|int\??|float\??|bool|str|Dtype|Scalar|Steps|Group)"
    r" (?P<name>\w+)(?:=(?P<default>.+))?"
)


def _argument(op: str, text: str, keyword_only: bool = False) -> ArgDef:
    match = _PARAM.fullmatch(text)
    assert match, f"{op}: cannot parse {text!r}"
    kind, default = match["kind"], match["default"]
    return ArgDef(
        name=match["name"],
        kind="Tensor" if kind.endswith("!)") else kind,  # type: ignore[arg-type]
        mutated=kind.endswith("!)"),
        keyword_only=keyword_only,
        has_default=default is not None,
        default=None if default is None else _literal(default),
    )


def _literal(text: str) -> bool | int | float | str | None:
    named = {"None": None, "True": True, "False": False}
    if text in named:
        return named[text]
    if text.startswith("'"):
        return text.strip("'")
    return float(text) if "." in text else int(text)
