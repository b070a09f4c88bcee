"""What computes linear recurrences: Triton token by token on GPUs; else spans that double."""

from __future__ import annotations

from precast.kernels.linear_recurrence.launches import HAS_KNOWN_CHANNELS, linear_recurrence
from precast.kernels.stateful.form_records import doubled, form_records
from precast.kernels.stateful.launch_records import launch_records

RECORDS = (
    *launch_records("linear_recurrence", linear_recurrence, takes=(HAS_KNOWN_CHANNELS,)),
    *form_records("linear_recurrence", "doubled", doubled(6)),
)
