"""Graphs on one of several ranks: a sum over ranks and the norm that takes it, as one node."""

from __future__ import annotations

import pytest
from graph_text import parse_graph

from precast.ir.graph.normed_sums import with_normed_sums
from precast.ir.graph.text import format_graph
from precast.ir.verify import verifier

HEAD = """
symbols {{ T: 1.. }}
inputs {{ %x: float32[1, T, 4] }}
params {{
  %w: float32[4, 4] = cast(read("w", [4, 4]), float32)
  %n: float32[4] = cast(read("n", [4]), float32)
}}
block layer {{
  inputs {{
    %a: float32[1, T, 4]
    %b: float32[1, T, 4]
  }}
  params {{
    %w: float32[4, 4]
    %n: float32[4]
  }}
  {block}
}}
main {{
  {main}
}}
"""
NORM = "%{0}, %{0}_s = precast.residual_rms_norm(x=%{1}, residual=%{2}, weight=%n, eps=1e-05, cast_before_scale=true)"
BOTH = NORM.replace("residual_rms_norm", "all_reduce_residual_rms_norm").replace("=true", '=true, group="tp"')
PRODUCT = "%{0} = aten.linear.default(input=%{1}, weight=%w)\n"
SUM = '%{0} = precast.all_reduce(x=%{1}, group="tp")\n'
CALL = "%{0}, %{1} = call layer(a=%{2}, b=%{3}, w=%w, n=%n)\n"


def lines(*given: tuple[str, ...]) -> str:
    return "\n".join(text.format(*names) for text, *names in given)


def check(block: str, main: str, new_block: str, new_main: str) -> None:
    found = with_normed_sums(parse_graph(HEAD.format(block=block, main=main)))

    verifier.check(found)
    assert format_graph(found) == format_graph(parse_graph(HEAD.format(block=new_block, main=new_main)))


def test_a_sum_moves_to_the_norm_behind_it_over_the_ends_of_layers() -> None:
    check(
        lines((NORM, "y", "a", "b"), (PRODUCT, "p", "y"), (SUM, "s", "p"), ("return %y_s, %s",)),
        lines(
            (PRODUCT, "p", "x"), (SUM, "s", "p"), (CALL, "c", "d", "x", "s"), (CALL, "e", "f", "c", "d"),
            (NORM, "z", "f", "e"), ("return z=%z",),
        ),
        lines((BOTH, "y", "b", "a"), (PRODUCT, "p", "y"), ("return %y_s, %p",)),
        lines(
            (PRODUCT, "p", "x"), (CALL, "c", "d", "x", "p"), (CALL, "e", "f", "c", "d"),
            (BOTH, "z", "f", "e"), ("return z=%z",),
        ),
    )  # fmt: skip


def test_within_a_layer_one_of_two_sums_moves() -> None:
    both = lines((PRODUCT, "p", "a"), (PRODUCT, "q", "b"), (SUM, "s", "p"), (SUM, "t", "q"))
    main = lines((CALL, "c", "d", "x", "x"), ("return z=%c, y=%d",))
    check(
        both + lines((NORM, "y", "t", "s"), ("return %y, %y_s",)),
        main,
        lines((PRODUCT, "p", "a"), (PRODUCT, "q", "b"), (SUM, "t", "q"), (BOTH, "y", "p", "t"), ("return %y, %y_s",)),
        main,
    )


TAKEN_TWICE = lines((NORM, "y", "a", "b"), (PRODUCT, "p", "y"), (SUM, "s", "p"), ("return %y_s, %s",))
FIRST = ((PRODUCT, "p", "x"), (SUM, "s", "p"), (CALL, "c", "d", "x", "s"))


@pytest.mark.parametrize(
    ("block", "main"),
    [
        # What the second call takes is a whole hidden state.
        (TAKEN_TWICE, lines(*FIRST, (CALL, "e", "f", "c", "x"), (PRODUCT, "g", "f"), ("return z=%g, y=%e, u=%d",))),
        # The graph returns the layer's sum.
        (TAKEN_TWICE, lines((CALL, "c", "d", "x", "x"), ("return z=%c, y=%d",))),
        # The norm's sum is taken by something else, too.
        (lines((PRODUCT, "p", "a"), (SUM, "s", "p"), (NORM, "y", "b", "s"), ("return %y, %s",)),
         lines((CALL, "c", "d", "x", "x"), ("return z=%c, y=%d",))),
        # A layer's input is taken by something else, too.
        (lines((NORM, "y", "a", "b"), (PRODUCT, "p", "b"), (SUM, "s", "p"), ("return %y_s, %s",)),
         lines(*FIRST, ("return z=%c, y=%d",))),
        # No norm.
        (lines((PRODUCT, "p", "a"), (SUM, "s", "p"), ("return %b, %s",)),
         lines((CALL, "c", "d", "x", "x"), (CALL, "e", "f", "c", "d"), ("return z=%f, y=%e",))),
    ],
)  # fmt: skip
def test_a_sum_stays_where_more_than_a_norm_takes_it(block: str, main: str) -> None:
    check(block, main, block, main)
