"""What computes weighted key-value averages: Triton token by token on GPUs; else spans that double."""

from __future__ import annotations

from precast.kernels.stateful.form_records import doubled, form_records
from precast.kernels.stateful.launch_records import launch_records
from precast.kernels.wkv.launches import HAS_KNOWN_CHANNELS, wkv

RECORDS = (
    *launch_records("wkv", wkv, takes=(HAS_KNOWN_CHANNELS,)),
    *form_records("wkv", "doubled", doubled(17)),
)
