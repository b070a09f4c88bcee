"""How tokens are drawn, as the arrays that the device gets."""

from __future__ import annotations

from precast.loader.run.draws import DTYPES, Draw, draw_arrays

GREEDY = Draw(0.0, 0, 1.0, 0.0, seed=5, num_generated=0)


def test_arrays_have_a_row_for_each_answer() -> None:
    arrays = draw_arrays([GREEDY, Draw(0.5, 7, 0.25, 0.125, 2**63 - 1, 3)])

    assert {name: (values.dtype.char, values.tolist()) for name, values in arrays.items()} == {
        "temperature": ("f", [0.0, 0.5]),
        "top_k": ("i", [0, 7]),
        "top_p": ("f", [1.0, 0.25]),
        "min_p": ("f", [0.0, 0.125]),
        "seeds": ("l", [5, 2**63 - 1]),
        "steps": ("l", [0, 3]),
    }
    assert {name: values.dtype for name, values in arrays.items()} == DTYPES


def test_rows_without_an_answer_are_greedy() -> None:
    arrays = draw_arrays([Draw(0.5, 7, 0.25, 0.125, 3, 2)], 3)

    assert {name: values.tolist() for name, values in arrays.items()} == {
        "temperature": [0.5, 0.0, 0.0],
        "top_k": [7, 0, 0],
        "top_p": [0.25, 1.0, 1.0],
        "min_p": [0.125, 0.0, 0.0],
        "seeds": [3, 0, 0],
        "steps": [2, 0, 0],
    }
    assert {name: values.dtype for name, values in arrays.items()} == DTYPES
