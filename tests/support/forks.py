"""Work in a fork of this process, which a test may kill."""

from __future__ import annotations

import os
from collections.abc import Callable


def child(action: Callable[[], object]) -> int:
    """The process id of a fork that runs `action` and ends, with 0 if nothing was raised."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            action()
            code = 0
        finally:
            os._exit(code)
    return pid
