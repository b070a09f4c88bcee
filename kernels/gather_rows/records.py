"""What gathers rows: Triton on GPUs, the reference elsewhere."""

from __future__ import annotations

from precast.kernels.gather_rows import launches
from precast.kernels.records import Condition, nothing, reference
from precast.kernels.rows import in_triton

RECORDS = (
    in_triton(
        "precast.gather_rows", launches.gather_rows, ("x",),
        Condition("x with a last axis of known size", lambda use: bool(use.number("x", -1))),
    ),
    reference("precast.gather_rows", "gather_rows.gather_rows", nothing),
)  # fmt: skip
