"""What computes linear recurrences: spans that double."""

from __future__ import annotations

from precast.kernels.stateful.form_records import doubled, form_records

RECORDS = form_records("linear_recurrence", "doubled", doubled(6))
