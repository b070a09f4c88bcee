"""`make demo`: build the bundle of the small model beside this file, load it, and let it recite.

The model has learned one text by heart. If what it says is that text to the letter, then config, graph, weights,
caches, attention, sampling and tokenizer all did their work; otherwise the demo says so and fails.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import precast

HERE = Path(__file__).parent
OPENING_WORDS = 6


def main() -> int:
    text = (HERE / "text.txt").read_text().strip()
    opening = " ".join(text.split()[:OPENING_WORDS])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recite.bundle"
        started = time.monotonic()
        bundle = precast.build(HERE / "model", path)
        print(f"built {bundle.digest[:19]}... from the config alone in {time.monotonic() - started:.1f} s")

        engine = precast.load(path, weights=HERE / "model", device="cpu")
        print(f"\n{opening}", end="")
        recited = opening
        for event in engine.stream(opening, precast.SamplingParams(max_tokens=600)):
            print(event.text, end="", flush=True)
            recited += event.text
        print(f"\n\n{engine.timeline.text()}")
        engine.close()
    if recited != text:
        print("this is not the text that the model has learned", file=sys.stderr)
        return 1
    print("\nRecited to the letter.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
