"""What computes linear recurrences: spans that double."""

from __future__ import annotations

from precast.kernels.state_records import doubled, forms

RECORDS = forms("linear_recurrence", "doubled", doubled(6))
