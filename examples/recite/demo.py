"""`make demo`: build the bundle of the small model beside this file, load it, and let it recite.

The model has learned one text by heart. If what it says is that text to the letter, then config, graph, weights,
caches, attention, sampling and tokenizer all did their work; otherwise the demo says so and fails.

The build is a process of its own, as it would be on a build machine, so that the timeline is what a target machine
would see: this process has imported nothing when the load begins.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from precast.loader.timeline import Timeline

HERE = Path(__file__).resolve().parent
OPENING_WORDS = 6


def main() -> int:
    text = (HERE / "text.txt").read_text(encoding="utf-8").strip()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recite.bundle"
        print("$ precast build examples/recite/model -o recite.bundle", flush=True)
        command = [sys.executable, "-m", "precast", "build", str(HERE / "model"), "-o", str(path)]
        if subprocess.run(command).returncode != 0:
            return 1
        recited = recite(path, " ".join(text.split()[:OPENING_WORDS]))
    if recited != text:
        print("this is not the text that the model has learned", file=sys.stderr)
        return 1
    print("\nRecited to the letter.")
    return 0


def recite(path: Path, opening: str) -> str:
    """Load the bundle with the model's weights, print how the text goes on from its opening, and return all of it."""
    timeline = Timeline()
    with timeline.phase("import"):
        from precast.loader.engine.params import SamplingParams
        from precast.loader.load import load

    with load(path, weights=HERE / "model", device="cpu", timeline=timeline) as engine:
        print(f"\n{opening}", end="", flush=True)
        recited = opening
        for event in engine.stream(opening, SamplingParams(max_tokens=600)):
            print(event.text, end="", flush=True)
            recited += event.text
    print(f"\n\n{timeline.text()}")
    return recited


if __name__ == "__main__":
    sys.exit(main())
