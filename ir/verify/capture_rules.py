"""The verifier's rule about the capture plan: its sizes are few, and steps that can run and be captured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from precast.ir import limits
from precast.ir.verify.facts import Facts, Fault, Rule


def _captured_sizes(facts: Facts) -> Iterator[Fault]:
    sizes, where = facts.graph.capture.sizes, "capture"
    if len(sizes) > limits.MAX_CAPTURED_SIZES:
        yield where, f"{len(sizes)} sizes; at most {limits.MAX_CAPTURED_SIZES} are allowed"
    yield from ((where, f"the size {size} stands there twice") for size, count in Counter(sizes).items() if count > 1)
    least, most = 1, limits.MAX_CAPTURED_TOKENS
    for symbol in facts.graph.symbols:
        if symbol.name == "T":
            least, most = max(least, symbol.min), most if symbol.max is None else min(most, symbol.max)
    for size in sizes:
        if not least <= size <= most:
            yield where, f"expected steps of {least} to {most} tokens, found {size}"


CAPTURE_RULES = (Rule("IR058", "captured sizes are different, few, and steps that the graph takes", _captured_sizes),)
