"""The target that `precast inspect` shows a bundle for, with what was measured there. No torch."""

from __future__ import annotations

from pathlib import Path

from precast.kernels.measured import gpu_at_hand, read_table, table_of
from precast.kernels.use import Target


def with_table(target: Target, choices: Path | None) -> Target:
    """The target with the table of a file; None: the one that comes with Precast for the GPU at hand.

    That has none for most GPUs, and is taken for a target of the GPU's compute capability alone. Raises RequestError
    `choices-invalid` for a file that is no table.
    """
    if choices is not None:
        return target._replace(table=read_table(choices))
    name = gpu_at_hand()
    table = None if name is None else table_of(name)
    return target._replace(table=table) if table and table.machine.capability == target.capability else target
