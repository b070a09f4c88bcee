"""The engine's counters as text for Prometheus (exposition format 0.0.4)."""

from __future__ import annotations

from typing import Any

from precast.loader.engine.results import EngineStats

_COUNTERS = {
    # counter of `EngineStats`: (its metric, what it counts)
    "steps": ("precast_steps_total", "Steps computed."),
    "eager_steps": ("precast_eager_steps_total", "Steps computed op by op."),
    "tokens_prefilled": ("precast_tokens_prefilled_total", "Tokens of prompts, and of preempted requests, computed."),
    "tokens_decoded": ("precast_tokens_decoded_total", "Tokens of answers fed back."),
    "tokens_sampled": ("precast_tokens_sampled_total", "Tokens drawn."),
    "tokens_reused": ("precast_tokens_reused_total", "Tokens not computed, since known pages and states hold them."),
    "requests_finished": ("precast_requests_finished_total", "Requests that ended by themselves."),
    "requests_cancelled": ("precast_requests_cancelled_total", "Requests that were cancelled."),
    "requests_failed": ("precast_requests_failed_total", "Requests that ended with an error."),
    "preemptions": ("precast_preemptions_total", "Running requests that gave up their pages, to be computed again."),
}
_GAUGES = {
    "requests_waiting": ("precast_requests_waiting", "Requests that wait for room."),
    "requests_running": ("precast_requests_running", "Requests that run."),
    "prefix_spans": ("precast_prefix_spans", "Spans of tokens known for reuse."),
    "slabs": ("precast_cache_slabs", "Slabs of cache memory."),
    "slabs_free": ("precast_cache_slabs_free", "Slabs that no pool holds."),
}
_POOL_METRICS = {
    "pages": ("precast_pool_pages", "gauge", "Pages that the pool can have: in use, free, and in free slabs."),
    "pages_in_use": ("precast_pool_pages_in_use", "gauge", "Pages that sequences or known spans hold."),
    "pages_reclaimable": (
        "precast_pool_pages_reclaimable",
        "gauge",
        "Pages in use only for reuse, given up when needed; at most.",
    ),
    "pages_free": ("precast_pool_pages_free", "gauge", "Pages in the pool's slabs that nobody holds."),
    "pages_evicted": ("precast_pool_pages_evicted_total", "counter", "Pages given back as windows left them."),
    "waste_bytes": ("precast_pool_waste_bytes", "gauge", "Bytes of the pool's slabs that belong to no page in use."),
}


def prometheus_text(stats: EngineStats) -> str:
    """One metric after the other, with its help and its type; those of pools have a line a pool."""
    lines = []
    for kind, table in (("counter", _COUNTERS), ("gauge", _GAUGES)):
        for field, (metric, what) in table.items():
            lines += _metric(metric, kind, what, {"": getattr(stats, field)})
    for field, (metric, kind, what) in _POOL_METRICS.items():
        values = {f'{{pool="{_escaped(name)}"}}': getattr(usage, field) for name, usage in stats.pools.items()}
        lines += _metric(metric, kind, what, values)
    return "\n".join(lines) + "\n"


def _metric(metric: str, kind: str, what: str, values: dict[str, Any]) -> list[str]:
    return [f"# HELP {metric} {what}", f"# TYPE {metric} {kind}", *(f"{metric}{of} {n}" for of, n in values.items())]


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
