"""Claim: a bundle for every number of ranks takes hardly longer to build than one for one rank, and little more room.

Each build is a fresh process, from its start to its end, in turns: without the pass `shard`, which gives a bundle of
one rank, and with it. One build is compared with one, though the second stands for as many bundles as it has worlds.
Seconds are those of processors, so that what else runs on the machine counts little.
All files of a bundle count; there are none of a tokenizer, which would hide the difference. What differs is the graph.
"""

import statistics
import tempfile
from pathlib import Path
from typing import Any

from support import harness, shapes

RUNS = 3
MOST_SECONDS, MOST_BYTES = 1.2, 1.1
"""Goals: the ratios of seconds and of bytes, at most."""
SHAPES = ("llama-3.1-8b",)

_BUILD = """
import json, sys, time
from pathlib import Path
import precast
bundle = precast.build(sys.argv[1], sys.argv[2], disabled_passes=tuple(sys.argv[3:]))
worlds = sum(len(world.ep) for world in bundle.graph.shards.worlds) or 1
seconds = time.process_time()
size = sum(path.stat().st_size for path in Path(sys.argv[2]).rglob("*") if path.is_file())
graph = next(blob.size for blob in bundle.manifest.blobs if blob.name == "graph")
print(json.dumps({"cpu_seconds": seconds, "bytes": size, "graph_bytes": graph, "worlds": worlds}))
"""


def measure(shape: str, folder: Path) -> dict[str, Any]:
    """Medians over fresh processes of both builds, and their ratios."""
    config = str(shapes.write_config(shape, folder / shape))
    runs: dict[str, list[dict[str, Any]]] = {"one_rank": [], "all_worlds": []}
    for index in range(RUNS):
        for name, left_out in (("one_rank", ("shard",)), ("all_worlds", ())):
            runs[name].append(harness.fresh_process(_BUILD, config, str(folder / f"{name}{index}"), *left_out))
    found = {
        name: {
            "cpu_seconds": round(statistics.median(run["cpu_seconds"] for run in each), 2),
            **{key: each[0][key] for key in ("bytes", "graph_bytes", "worlds")},
        }
        for name, each in runs.items()
    }
    one, all_worlds = found["one_rank"], found["all_worlds"]
    return {
        **found,
        "runs": RUNS,
        "ratio_of_cpu_seconds": round(all_worlds["cpu_seconds"] / one["cpu_seconds"], 2),
        "goal_ratio_of_cpu_seconds": MOST_SECONDS,
        "ratio_of_bytes": round(all_worlds["bytes"] / one["bytes"], 2),
        "goal_ratio_of_bytes": MOST_BYTES,
        "ratio_of_graph_bytes": round(all_worlds["graph_bytes"] / one["graph_bytes"], 2),
    }


def main() -> None:
    """Each shape."""
    with tempfile.TemporaryDirectory() as folder:
        figures = {shape: measure(shape, Path(folder)) for shape in SHAPES}
    harness.write(harness.RESULTS / "sharding.json", "sharding", figures)


if __name__ == "__main__":
    main()
