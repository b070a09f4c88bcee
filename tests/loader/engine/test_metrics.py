"""The engine's counters as Prometheus reads them: each metric told once, before its samples; labels escaped."""

from __future__ import annotations

import re

import msgspec

from precast.loader.cache.tables import PoolUsage
from precast.loader.engine.metrics import prometheus_text
from precast.loader.engine.results import EngineStats

SAMPLE = re.compile(r'([a-z_]+)(?:\{(?:pool|reason)="((?:[^"\\\n]|\\["\\n])*)"\})? ([\d.]+)')
USAGE = PoolUsage(40, 30, 6, 5, 123, 17)
POOLS = {"near": USAGE, "far": PoolUsage(8, 1), 'a"\\\nb': USAGE}
WHY = {"capture is off": 3, "logits are wanted": 2}
STATS = EngineStats(steps=7, eager_steps=5, eager_reasons=WHY, capture_seconds=1.5, preemptions=2, slabs=9, pools=POOLS)


def parsed(text: str) -> dict[str, tuple[str, dict[str | None, float]]]:
    """By metric: its type, and its samples by pool or reason. Each metric is a help line, a type line, and samples."""
    assert text.endswith("\n")
    found: dict[str, tuple[str, dict[str | None, float]]] = {}
    lines = text.splitlines()
    while lines:
        told = re.fullmatch(r"# HELP ([a-z_]+) \S.*", lines.pop(0))
        assert told is not None
        kind = re.fullmatch(rf"# TYPE {told[1]} (counter|gauge)", lines.pop(0))
        assert kind is not None
        assert told[1] not in found
        samples: dict[str | None, float] = {}
        while lines and not lines[0].startswith("#"):
            sample = SAMPLE.fullmatch(lines.pop(0))
            assert sample is not None
            assert sample[1] == told[1]
            assert sample[2] not in samples
            samples[sample[2]] = float(sample[3])
        found[told[1]] = kind[1], samples
    return found


def test_every_counter_is_a_metric_with_its_value() -> None:
    found = parsed(prometheus_text(STATS))

    assert found["precast_steps_total"] == ("counter", {None: 7})
    assert found["precast_preemptions_total"] == ("counter", {None: 2})
    assert found["precast_cache_slabs"] == ("gauge", {None: 9})
    assert found["precast_capture_seconds_total"] == ("counter", {None: 1.5})
    assert found["precast_eager_steps_total"] == ("counter", WHY)
    # The pools are no metric, but what they have; reasons are labels.
    assert len(found) == len(msgspec.structs.fields(EngineStats)) - 2 + len(msgspec.structs.fields(PoolUsage))
    assert all(name.endswith("_total") == (kind == "counter") for name, (kind, _) in found.items())


def test_all_pools_have_samples_not_the_last_alone() -> None:
    found = parsed(prometheus_text(STATS))

    assert found["precast_pool_pages"] == ("gauge", {"near": 40, "far": 8, r"a\"\\\nb": 40})
    assert found["precast_pool_pages_evicted_total"] == ("counter", {"near": 5, "far": 0, r"a\"\\\nb": 5})
    assert found["precast_pool_waste_bytes"][1]["near"] == 123
    assert found["precast_pool_pages_reclaimable"] == ("gauge", {"near": 17, "far": 0, r"a\"\\\nb": 17})


def test_without_pools_there_are_no_samples_of_pools() -> None:
    found = parsed(prometheus_text(EngineStats()))

    assert found["precast_pool_pages"] == ("gauge", {})
    assert found["precast_steps_total"] == ("counter", {None: 0})
