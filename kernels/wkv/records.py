"""What computes weighted key-value averages: spans that double."""

from __future__ import annotations

from precast.kernels.stateful.form_records import doubled, form_records

RECORDS = form_records("wkv", "doubled", doubled(17))
