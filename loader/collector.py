"""Holds the garbage collector back while many objects are made that stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_held() -> Iterator[None]:
    """Let no garbage collection run in the body. The collector is afterwards as it was before, and takes all objects
    that there are for old ones: the next collections of young ones don't look through them.

    A collection looks through all that `import torch` has made: 0.07 s, four times what opening and restoring a bundle
    take; and those that run during that import take a sixth of it. While a CUDA graph is captured it might also free
    what belongs to the GPU, which a capture doesn't survive.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if not _somebody_has_frozen():  # what is frozen stays so
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def _somebody_has_frozen() -> bool:
    """Whether this process has frozen objects, or had some when this was asked before.

    Python counts them one by one, 0.05 s for what a server has imported; what was frozen once is not counted again.
    """
    global _frozen_once
    _frozen_once = _frozen_once or gc.get_freeze_count() > 0
    return _frozen_once


_frozen_once = False
