"""What computes weighted key-value averages: Triton token by token on GPUs; else spans that double."""

from __future__ import annotations

from precast.kernels.records import nothing
from precast.kernels.stateful.form_records import doubled, form_records

RECORDS = form_records("wkv", "doubled", doubled(17), walked=nothing)
