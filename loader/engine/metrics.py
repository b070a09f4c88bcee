"""The engine's counters as text for Prometheus (exposition format 0.0.4)."""

from __future__ import annotations

from typing import Any

from precast.loader.engine.results import EngineStats

_METRICS = {
    # counter of `EngineStats`: what it counts
    "steps": "Steps computed.",
    "captured_steps": "Steps replayed as one graph.",
    "piecewise_steps": "Steps replayed as several graphs, with calls that read the host between them.",
    "tokens_padded": "Tokens computed since a captured step has a fixed size.",
    "graphs": "Sizes of steps that are captured.",
    "graphs_pending": "Sizes of steps that are still to be captured.",
    "capture_seconds": "Seconds spent on capturing.",
    "compilations": "Kernels compiled as they were first launched.",
    "prefill_budget": "Tokens of prompts that the next step computes at most beside sequences that decode.",
    "tokens_prefilled": "Tokens of prompts, and of preempted requests, computed.",
    "tokens_decoded": "Tokens of answers fed back.",
    "tokens_sampled": "Tokens drawn.",
    "tokens_reused": "Tokens not computed, since known pages and states hold them.",
    "requests_finished": "Requests that ended by themselves.",
    "requests_cancelled": "Requests that were cancelled.",
    "requests_failed": "Requests that ended with an error.",
    "preemptions": "Running requests that gave up their pages, to be computed again.",
    "requests_waiting": "Requests that wait for room.",
    "requests_running": "Requests that run.",
    "prefix_spans": "Spans of tokens known for reuse.",
    "slabs": "Slabs of cache memory.",
    "slabs_free": "Slabs that no pool holds.",
}
_POOL_METRICS = {
    "pages": "Pages that the pool can have: in use, free, and in free slabs.",
    "pages_in_use": "Pages that sequences or known spans hold.",
    "pages_reclaimable": "Pages in use only for reuse, given up when needed; at most.",
    "pages_free": "Pages in the pool's slabs that nobody holds.",
    "pages_evicted": "Pages given back as windows left them.",
    "waste_bytes": "Bytes of the pool's slabs that belong to no page in use.",
}
_GAUGES = {
    "requests_waiting", "requests_running", "prefix_spans", "slabs", "slabs_free", "graphs", "graphs_pending",
    "prefill_budget",
}  # fmt: skip
_COUNTERS = {*_METRICS, "eager_steps"} - _GAUGES


def prometheus_text(stats: EngineStats) -> str:
    """One metric after the other, with its help and its type; those of pools have a line a pool."""
    lines = []
    for field, what in _METRICS.items():
        name = f"cache_{field}" if field.startswith("slabs") else field
        lines += _metric(field, name, what, {"": getattr(stats, field)})
    reasons = {f'{{reason="{_escaped(why)}"}}': count for why, count in stats.eager_reasons.items()}
    lines += _metric("eager_steps", "eager_steps", "Steps computed op by op, and why.", reasons or {"": 0})
    for field, what in _POOL_METRICS.items():
        values = {f'{{pool="{_escaped(name)}"}}': getattr(usage, field) for name, usage in stats.pools.items()}
        lines += _metric(field, f"pool_{field}", what, values)
    return "\n".join(lines) + "\n"


def _metric(field: str, name: str, what: str, values: dict[str, Any]) -> list[str]:
    is_counter = field in _COUNTERS or field == "pages_evicted"
    kind, metric = ("counter", f"precast_{name}_total") if is_counter else ("gauge", f"precast_{name}")
    return [f"# HELP {metric} {what}", f"# TYPE {metric} {kind}", *(f"{metric}{of} {n}" for of, n in values.items())]


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
