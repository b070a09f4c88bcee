"""The records of linear attention and state space scans in Triton, which share their launches."""

from __future__ import annotations

from precast.kernels.linear_attention.launches import (
    HAS_CHUNKS,
    HAS_KNOWN_SIZES,
    WALKED,
    segments_workspace,
    walk,
    walk_and_chunks,
)
from precast.kernels.records import Record
from precast.kernels.stateful.launch_records import launch_records
from precast.kernels.stateful.limits import MAX_WALKED


def state_records(name: str) -> tuple[Record, ...]:
    """Those of both forms of an op: steps of few tokens are walked alone, and without chunks some longer ones."""
    few = launch_records(name, walk, variant=".few", sizes={"T": (0, WALKED)}, takes=(HAS_KNOWN_SIZES,))
    takes = (HAS_KNOWN_SIZES, HAS_CHUNKS)
    most = launch_records(name, walk_and_chunks, workspace=segments_workspace, takes=takes)
    walked = launch_records(name, walk, variant=".walk", sizes={"T": (0, MAX_WALKED)}, takes=(HAS_KNOWN_SIZES,))
    return (*few, *most, *walked)
