"""The workspace of ops that keep states, as PyTorch computes them (`precast.kernels.states`).

Sequences whose lengths differ by less than a factor of two are computed together, padded to the longest: less than
twice the tokens, and of several sequences no more than a constant. All is computed in float32 (float64 for float64
results): the arguments' copies in it, where they have another type, are part of the sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from precast.ir.graph.schema import Expr
from precast.ir.graph.symbols import add, ceildiv, floordiv, largest, maximum, minimum, mul
from precast.ir.memory.operands import Row, Use, copied, numbers, wide

_TOGETHER = 4096
"""Tokens, with those that pad, that several sequences have at once (`precast.kernels.states`)."""
_CHUNK = 64
_ROWWISE_CHUNK = 16
"""Tokens of a chunk (`precast.kernels.linear_attention.chunks`)."""


def _sequences(use: Use) -> Expr:
    return add(use.shape("cu_seqlens")[0], -1)


def _tokens(use: Use, tokens: Expr) -> Expr:
    """Tokens with those that sequences are padded with: fewer for each than it has itself."""
    sequences = _sequences(use)
    longest = maximum(1, add(tokens, mul(-1, sequences), 1))
    twice = maximum(tokens, add(mul(2, tokens), mul(-1, sequences)))
    return minimum(mul(sequences, tokens), maximum(longest, minimum(twice, _TOGETHER)))


def _chunked(use: Use, tokens: Expr, chunk: int) -> Expr:
    """Padded tokens in whole chunks, at most twice the tokens; sequences up to a chunk's size are not cut into any."""
    padded = _tokens(use, tokens)
    longer = maximum(1, minimum(_sequences(use), floordiv(padded, chunk + 1)))
    added = add(mul(chunk, ceildiv(padded, chunk)), mul(-1, padded), mul(chunk, add(longer, -1)))
    return minimum(mul(2, tokens), add(padded, mul(minimum(1, maximum(0, add(tokens, -chunk))), added)))


class _Stage(NamedTuple):
    """A part of a scan: bytes for each padded token and head; for a sequence copies of its state, and bytes a head."""

    a_token: Expr
    states: Expr
    a_sequence: Expr = 0


def _staged(use: Use, tokens: Expr, heads: Expr, chunk: int, state: Expr, stages: Iterable[_Stage]) -> Expr:
    """The largest of the stages; `state` in bytes. A sequence with one token has three copies of its state."""
    sequences = _sequences(use)
    longer = minimum(sequences, maximum(0, add(tokens, mul(-1, sequences))))
    padded = mul(_chunked(use, tokens, chunk), heads)
    # If there are more tokens than sequences, one of these has several.
    decoding = mul(3, state, add(sequences, mul(-1, minimum(1, longer))))

    def states(stage: _Stage) -> Expr:
        several = mul(longer, add(mul(stage.states, state), mul(heads, stage.a_sequence)))
        return largest((decoding, several))

    return largest(add(mul(padded, stage.a_token), states(stage)) for stage in stages)


def _copy(use: Use, name: str) -> int:
    """Bytes of an element of an argument's copy: in another type, or with sequences side by side."""
    operand = use.operands[name]
    return wide(operand) if copied(operand) or _sequences(use) != 1 else 0


def _causal_conv(use: Use) -> Expr:
    """A table of states and tokens; the sum, and of one tap the gathered rows and their product."""
    x, full = use.operands["x"], wide(use.operands["x"])
    converted = copied(x) if use.device == "cpu" else 0
    narrow, taps = use.width("x"), use.shape("weight")[1]
    before = mul(4 * max(narrow, full), _sequences(use), x.type.shape[2], taps)
    return add(mul(narrow + 2 * full + converted, numbers(x)), before, mul(80, x.type.shape[1]))


def _state_space_scan(use: Use) -> Expr:
    """Linear attention of c and b over steps times x, and the skip connection."""
    full = wide(use.operands["x"])
    (_, tokens, heads, size), inner = use.shape("x"), use.shape("b")[3]
    padded = _tokens(use, tokens)
    held = add(mul(_copy(use, "x") + full, size), mul(2 * full, inner), 2 * full)
    given = mul(2 * _copy(use, "b"), padded, *use.shape("b")[2:])
    skip = _Stage(add(mul(3 * full, size), full), 2)
    stages = (*_scan(tokens, inner, size, full), skip)
    scan = _staged(use, tokens, heads, _CHUNK, mul(full, heads, size, inner), stages)
    return add(mul(padded, heads, held), scan, given, mul(tokens, add(mul(4 * full, heads), 64)))


def _scan(tokens: Expr, inner: Expr, size: Expr, full: int) -> tuple[_Stage, ...]:
    """`precast.kernels.linear_attention.chunks.scan`, with one decay a head."""
    chunk = minimum(tokens, _CHUNK)
    keys, values, products, decays = mul(full, inner), mul(full, size), mul(full, chunk), 4 * full
    return (
        _Stage(add(mul(2, keys), values, mul(3, products), decays), 1),
        _Stage(add(mul(4, keys), mul(2, values), products, decays), 1),
        _Stage(add(mul(2, keys), mul(2, values), products, decays), _looped(tokens, _CHUNK), mul(chunk, values)),
        _Stage(add(mul(2, keys), mul(3, values), products, decays), 2),
    )


def _looped(tokens: Expr, chunk: int) -> Expr:
    """Copies of a state while one chunk follows the other: the first and the last, a decayed one, what is added, both.

    With one chunk, the first is the last.
    """
    return add(4, minimum(1, maximum(0, add(tokens, -chunk))))


def _rowwise(tokens: Expr, inner: Expr, size: Expr, full: int) -> tuple[_Stage, ...]:
    """As `_scan`, with a decay for each row of the state: decays from each key on, and the keys that they weigh."""
    chunk = minimum(tokens, _ROWWISE_CHUNK)
    keys, values, products = mul(full, inner), mul(full, size), mul(full, chunk)
    return (
        _Stage(add(mul(7, keys), values, mul(2, products)), 1),
        _Stage(add(mul(8, keys), mul(2, values), mul(2, products)), 1),
        _Stage(add(mul(6, keys), mul(3, values), products), _looped(tokens, _ROWWISE_CHUNK), mul(chunk, values)),
    )


def _has_rowwise_decay(use: Use) -> bool:
    return use.has("decay") and len(use.shape("decay")) == 4


def _linear_attention(use: Use) -> Expr:
    """Copies of all, and their chunks."""
    full = wide(use.operands["v"])
    (_, tokens, heads, value), inner = use.shape("v"), use.shape("q")[3]
    rowwise = _has_rowwise_decay(use)
    chunk = _ROWWISE_CHUNK if rowwise else _CHUNK
    stages = (_rowwise if rowwise else _scan)(tokens, inner, value, full)
    held = add(mul(_copy(use, "v"), value), mul(2 * _copy(use, "q"), inner), 2 * full)
    scan = _staged(use, tokens, heads, chunk, mul(full, heads, inner, value), stages)
    return add(mul(_tokens(use, tokens), heads, held), scan, mul(64, tokens))


def _delta_rule(use: Use) -> Expr:
    """Normalised and repeated queries and keys, their chunks, and the triangular system with both its sides."""
    full = wide(use.operands["v"])
    (_, tokens, heads, value), inner = use.shape("v"), use.shape("q")[3]
    rowwise = _has_rowwise_decay(use)
    chunk = _ROWWISE_CHUNK if rowwise else _CHUNK
    rows = minimum(tokens, chunk)
    keys, values, products = mul(full, inner), mul(full, value), mul(full, rows)
    decays: Expr = mul(4, keys) if rowwise else 6 * full
    stages = (
        _Stage(add(mul(2, keys), values, mul(4, products), decays), 1),
        _Stage(add(mul(4, keys), mul(3, values), mul(3, products), decays), 1),
        _Stage(add(mul(5, keys), mul(2, values), mul(2, products), decays), 1),
        _Stage(add(mul(3, keys), mul(3, values), mul(2, products), decays), _looped(tokens, chunk), mul(rows, values)),
        _Stage(add(mul(3, keys), mul(4, values), mul(2, products), decays), 2),
    )
    held = mul(heads, add(mul(_copy(use, "v"), value), mul(2, keys)))
    given = mul(2 * _copy(use, "q"), *use.shape("q")[2:])
    scan = _staged(use, tokens, heads, chunk, mul(full, heads, inner, value), stages)
    return add(scan, mul(_tokens(use, tokens), add(held, given)), mul(64, tokens))


def _selective_scan(use: Use) -> Expr:
    """Steps, values and outputs a token; and states at the blocks' beginnings, about the root of the tokens of them."""
    full = wide(use.operands["x"])
    _, tokens, channels = use.shape("x")
    inner, sequences = use.shape("b")[2], _sequences(use)
    padded = _chunked(use, tokens, 16)
    a_token = add(mul(_copy(use, "x") + 6 * full, channels), mul(4 * full, inner))
    # On a CPU, large states are not divided into blocks.
    blocks = sequences if use.device == "cpu" else add(_root(padded), sequences)
    return add(mul(padded, a_token), mul(5 * full, blocks, channels, inner), mul(64, tokens))


def _root(tokens: Expr) -> Expr:
    """At least the root of the tokens: it lies below each of its tangents."""
    return minimum(*(add(floordiv(tokens, 2 * at), at // 2 + 3) for at in (16, 32, 64, 128, 256)))


def _doubled(arrays: int) -> Row:
    """Ops by doubling: so many arrays of the result's shape at a time, and states of one token."""

    def row(use: Use) -> Expr:
        shape = use.result.shape
        full = 8 if use.result.dtype == "float64" else 4
        elements = mul(full, *shape[2:])
        padded = add(_tokens(use, shape[1]), mul(4, _sequences(use)))
        return add(mul(arrays, padded, elements), mul(64, shape[1]))

    return row


_FORMS: dict[str, Row] = {
    "causal_conv": _causal_conv,
    "state_space_scan": _state_space_scan,
    "linear_attention": _linear_attention,
    "delta_rule": _delta_rule,
    "selective_scan": _selective_scan,
    "linear_recurrence": _doubled(6),
    "wkv": _doubled(17),
}

_STATES: dict[str, Callable[[Use], tuple[Expr, ...]]] = {
    "causal_conv": lambda use: (use.shape("x")[2], add(use.shape("weight")[1], -1)),
    "state_space_scan": lambda use: (*use.shape("x")[2:], use.shape("b")[3]),
    "linear_attention": lambda use: (*use.shape("v")[2:], use.shape("q")[3]),
    "delta_rule": lambda use: (*use.shape("v")[2:], use.shape("q")[3]),
    "selective_scan": lambda use: use.shape("a"),
    "linear_recurrence": lambda use: use.shape("x")[2:],
    "wkv": lambda use: (3, use.shape("v")[2]),
}


def _beginning(name: str) -> Row:
    """The form without a cache: as the other, over new states that begin with zeros."""

    def row(use: Use) -> Expr:
        full = 8 if use.result.dtype == "float64" else 4
        return add(_FORMS[name](use), mul(full, _sequences(use), *_STATES[name](use)))

    return row


ROWS: dict[str, Row] = {
    **{f"precast.stateful_{name}": row for name, row in _FORMS.items()},
    **{f"precast.{name}": _beginning(name) for name in _FORMS},
}
