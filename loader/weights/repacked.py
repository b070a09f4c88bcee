"""Words of eight values of four bits in another order: AWQ's as packed4's. The same lines for torch and for numpy.

Of AWQ's word half byte `p` is output `2 (p % 4) + p // 4` of eight; packed4 has eight inputs, or eight outputs of
zeros, in order. AutoAWQ's `gemv` packs zeros in order, too, but of eight groups.
"""

from __future__ import annotations

from typing import Any, Literal

Words = Literal["values", "zeros", "groups"]
"""What the words are of, as in a `Repack`."""

EXCHANGED: frozenset[Words | None] = frozenset({"values", "groups"})
"""Those of which eight words are read, and written, together: each of the new ones has half a byte of each."""

PER_WORD = 8

_STAGES = ((1, 16, 0x0000FFFF), (2, 8, 0x00FF00FF), (3, 4, 0x0F0F0F0F))
"""Of an exchange of 8 x 8 half bytes: the axis along which words are paired, what one lends the other, and where."""


def repacked(words: Any, part: Words) -> Any:
    """int32 of any shape, of `zeros`; of `values` [a, 8, b], where the eight words of eight inputs each become those of
    eight outputs, and of `groups`, where those of eight outputs become those of eight groups; there `words`, without
    gaps, are overwritten."""
    return _exchanged(words, in_order=part == "groups") if part in EXCHANGED else _in_order(words)


def _in_order(words: Any) -> Any:
    """Pairs of half bytes, then single ones, between the outer two and the inner two of each four."""
    for bits, mask in ((8, 0x0000FF00), (4, 0x00F000F0)):
        moved = ((words >> bits) ^ words) & mask
        words = words ^ moved ^ (moved << bits)
    return words


def _exchanged(words: Any, *, in_order: bool) -> Any:
    """Half byte `p` of word `j` for half byte `j` of word `p`, by halves, quarters and eighths; then words in order,
    unless they are."""
    before, _, after = words.shape
    cube = words.reshape(before, 2, 2, 2, after)
    for axis, bits, mask in _STAGES:
        low, high = (cube[(slice(None),) * axis + (half,)] for half in (0, 1))
        moved = ((low >> bits) ^ high) & mask
        high ^= moved
        low ^= moved << bits
    ordered = cube if in_order else cube.swapaxes(1, 2).swapaxes(2, 3)
    return ordered.reshape(before, PER_WORD, after)
