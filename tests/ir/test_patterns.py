"""Patterns of names: `*` is any text, all else is itself."""

from __future__ import annotations

import pytest

from precast.ir.patterns import matches


@pytest.mark.parametrize(
    ("pattern", "name", "fits"),
    [
        ("a.b", "a.b", True),
        ("a.b", "axb", False),
        ("*.b", "x.y.b", True),
        ("*.b", "b", False),
        ("a*", "a", True),
        ("a*a", "a", False),
        ("a*a", "aa", True),
        ("*", "", True),
        ("**", "x", True),
        ("h.*.attn.bias", "h.10.attn.bias", True),
        ("h.*.attn.bias", "h.10.attn.masked_bias", False),
        ("*a*b*", "xxbxxaxx", False),
        ("*a*b*", "xxaxxbxx", True),
        ("[ab]?.", "[ab]?.", True),
        ("[ab]?.", "ax.", False),
        ("x*\n", "x\n\n", True),
        ("*a" * 200 + "*c", "a" * 1000, False),
    ],
)
def test_patterns(pattern: str, name: str, fits: bool) -> None:
    assert matches(pattern, name) is fits
