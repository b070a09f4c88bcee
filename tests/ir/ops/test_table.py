"""The op table: rows are complete, and each says of its own arguments what it says."""

from __future__ import annotations

import inspect

import pytest

from precast.ir.ops import table as ops
from precast.ir.ops.op import EACH, OVER_DIM, ArgDef, OpDef, Tokens, row
from precast.ir.ops.rows_pointwise import pointwise

ROWS = [op for name, version in ops.names() if (op := ops.lookup(name, version)) is not None]
each_row = pytest.mark.parametrize("op", ROWS, ids=lambda op: f"{op.name}@{op.version}")


@each_row
def test_row_says_all_of_its_own_arguments(op: OpDef) -> None:
    names = [arg.name for arg in op.args]

    assert len(set(names)) == len(names) > 0
    assert callable(op.shape_rule)
    assert callable(op.work)
    assert op.tokens.arg in ("", *names)
    assert (op.tokens.arg == "") == (op.tokens.kind in ("each", "sequences", "reshapes"))
    assert op.num_outputs > 0 or op.mutated or op.name == "precast.send"  # whose result another stage has


@each_row
def test_op_with_metadata_of_sequences_knows_sequences(op: OpDef) -> None:
    told = {"cu_seqlens", "slot_mapping", "rows"} & {arg.name for arg in op.args}

    assert (op.tokens.kind == "sequences") == bool(told)


@each_row
def test_op_on_pages_names_its_caches_so(op: OpDef) -> None:
    """The verifier finds them by it: they are the tensors of one slot, whose group the page inputs belong to."""
    names = {arg.name for arg in op.args}

    if names & {"slot_mapping", "page_indices"}:
        assert any(name.endswith("cache") for name in names)


@each_row
def test_dimension_among_the_arguments_is_looked_along(op: OpDef) -> None:
    moves_it_as_a_whole = op.name in ("aten.unsqueeze.default", "aten.squeeze.dim")
    if any(arg.name == "dim" for arg in op.args) and not moves_it_as_a_whole:
        assert op.tokens in (OVER_DIM, Tokens("cuts", "dim"))


def test_row_without_a_word_on_tokens_cannot_be_written() -> None:
    assert inspect.signature(row).parameters["tokens"].default is inspect.Parameter.empty


def test_row_is_read_from_its_text() -> None:
    op = row(
        "aten.x.y(Tensor(a!) s, Tensor? t, *, int k=-1, str m='a', float? f=None) -> (Tensor, Tensor)", pointwise, EACH
    )

    assert (op.name, op.version, op.num_outputs, op.mutated) == ("aten.x.y", 1, 2, ("s",))
    assert op.args == (
        ArgDef("s", "Tensor", mutated=True),
        ArgDef("t", "Tensor?"),
        ArgDef("k", "int", keyword_only=True, has_default=True, default=-1),
        ArgDef("m", "str", keyword_only=True, has_default=True, default="a"),
        ArgDef("f", "float?", keyword_only=True, has_default=True),
    )


def test_unreadable_argument_is_no_row() -> None:
    with pytest.raises(AssertionError, match="cannot parse 'Complex x'"):
        row("aten.x.y(Complex x) -> Tensor", pointwise, EACH)
