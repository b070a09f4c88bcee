"""How far back queries see: what attention is asked for. No torch."""

from __future__ import annotations


def check_window(window: int | None, chunk: int | None = None) -> None:
    """Raise ValueError for a window or a chunk that isn't None or at least 1, and for both at once."""
    if window is not None and window < 1:
        raise ValueError(f"window: expected None (full attention) or at least 1, found {window}")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk: expected None (full attention) or at least 1, found {chunk}")
    if window is not None and chunk is not None:
        raise ValueError(f"expected a window or chunks, found window {window} and chunk {chunk}")
