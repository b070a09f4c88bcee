"""Makes the records of both forms of an op with a state, and has words for what its implementations in PyTorch hold.

`precast.kernels.stateful.walks.together` computes sequences whose lengths differ by less than a factor of two together,
padded to the longest: less than twice the tokens, and of several sequences no more than a constant. All is computed in
float32 (float64 for float64 results): the arguments' copies in it, where they have another type, are part of the sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

from msgspec.structs import replace

from precast.ir.graph.schema import Expr
from precast.ir.graph.symbols import add, ceildiv, floordiv, largest, maximum, minimum, mul
from precast.ir.ops import table as ops
from precast.kernels.records import Record, nothing, reference_on_cpu
from precast.kernels.stateful.limits import MAX_TOGETHER
from precast.kernels.use import Use, copied, wide


def form_records(
    name: str,
    module: str,
    workspace: Callable[[Use], Expr],
    *,
    control: Literal["static", "host"] = "host",
) -> tuple[Record, ...]:
    """The records of `precast.stateful_<name>` and of `precast.<name>`, the form without a cache.

    `precast.kernels.<name>.<module>` has the implementation of both. The form without a cache makes new states, in the
    type that it computes in.
    """
    stateful, definition = f"precast.stateful_{name}", reference_on_cpu(f"precast.stateful_{name}", f"{name}.{name}")
    kept = Record(
        name=f"torch.stateful_{name}", op=stateful, workspace=workspace, control=control,
        runs=f"precast.kernels.{name}.{module}:stateful_{name}",
    )  # fmt: skip
    return (kept, definition, _fresh(kept, name), _fresh(definition, name))


def _fresh(record: Record, name: str) -> Record:
    """The record of the form without a cache, from that of the stateful one, which it calls with states of its own."""
    op = ops.lookup(f"precast.{name}")
    assert op is not None
    assert op.state is not None
    assert isinstance(record.runs, str)
    shape_of = op.state.shape

    def beginning(use: Use) -> Expr:
        full = 8 if use.result.dtype == "float64" else 4
        state = shape_of({name: operand.type for name, operand in use.operands.items()})
        return add(record.workspace(use), mul(full, sequences_of(use), *state))

    return replace(
        record, name=record.name.replace("stateful_", ""), op=op.name, runs=record.runs.replace(":stateful_", ":"),
        workspace=nothing if record.name.startswith("reference.") else beginning,
    )  # fmt: skip


def sequences_of(use: Use) -> Expr:
    """The sequences of a step."""
    return add(use.shape("cu_seqlens")[0], -1)


def padded_tokens(use: Use, tokens: Expr) -> Expr:
    """Tokens with those that sequences are padded with: fewer for each than it has itself."""
    sequences = sequences_of(use)
    longest = maximum(1, add(tokens, mul(-1, sequences), 1))
    twice = maximum(tokens, add(mul(2, tokens), mul(-1, sequences)))
    return minimum(mul(sequences, tokens), maximum(longest, minimum(twice, MAX_TOGETHER)))


def chunked_tokens(use: Use, tokens: Expr, chunk: int) -> Expr:
    """Padded tokens in whole chunks, at most twice the tokens; sequences up to a chunk's size are not cut into any."""
    padded = padded_tokens(use, tokens)
    longer = maximum(1, minimum(sequences_of(use), floordiv(padded, chunk + 1)))
    added = add(mul(chunk, ceildiv(padded, chunk)), mul(-1, padded), mul(chunk, add(longer, -1)))
    return minimum(mul(2, tokens), add(padded, mul(minimum(1, maximum(0, add(tokens, -chunk))), added)))


class Stage(NamedTuple):
    """A part of a scan: bytes for each padded token and head; for a sequence copies of its state, and bytes a head."""

    a_token: Expr
    states: Expr
    a_sequence: Expr = 0


def staged(use: Use, tokens: Expr, heads: Expr, chunk: int, state: Expr, stages: Iterable[Stage]) -> Expr:
    """The largest of the stages; `state` in bytes. A sequence with one token has three copies of its state."""
    sequences = sequences_of(use)
    longer = minimum(sequences, maximum(0, add(tokens, mul(-1, sequences))))
    padded = mul(chunked_tokens(use, tokens, chunk), heads)
    # If there are more tokens than sequences, one of these has several.
    decoding = mul(3, state, add(sequences, mul(-1, minimum(1, longer))))

    def states(stage: Stage) -> Expr:
        several = mul(longer, add(mul(stage.states, state), mul(heads, stage.a_sequence)))
        return largest((decoding, several))

    return largest(add(mul(padded, stage.a_token), states(stage)) for stage in stages)


def copy_bytes(use: Use, name: str) -> int:
    """Bytes of an element of an argument's copy: in another type, or with sequences side by side."""
    operand = use.operands[name]
    return wide(operand) if copied(operand) or sequences_of(use) != 1 else 0


def doubled(arrays: int) -> Callable[[Use], Expr]:
    """Ops by doubling: so many arrays of the result's shape at a time, and states of one token."""

    def held(use: Use) -> Expr:
        shape = use.result.shape
        full = 8 if use.result.dtype == "float64" else 4
        elements = mul(full, *shape[2:])
        padded = add(padded_tokens(use, shape[1]), mul(4, sequences_of(use)))
        return add(mul(arrays, padded, elements), mul(64, shape[1]))

    return held
