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
            if not gc.get_freeze_count():  # what somebody has frozen stays so
                gc.freeze()
                gc.unfreeze()
            gc.enable()
