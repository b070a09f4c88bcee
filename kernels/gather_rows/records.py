"""What gathers rows: the reference, everywhere."""

from __future__ import annotations

from precast.kernels.records import nothing, reference

RECORDS = (reference("precast.gather_rows", "gather_rows.gather_rows", nothing),)
