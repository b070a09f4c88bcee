"""What a reader may do with an input: accept it or refuse it cleanly, in bounded time and memory. Else: a finding.

The bounds are those of a whole process, so they hold for what libraries do in C too.
"""

from __future__ import annotations

import hashlib
import resource
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from graph_lexer import TextError

from precast.ir.errors import PrecastError

SECONDS, MEGABYTES = 1.0, 200
CLEAN = (PrecastError, TextError)
"""What readers may raise: errors for the user, and those of the graph's text form, which only tests read."""
ROOT = Path(__file__).parents[2]


class OvertimeError(BaseException):
    """One input took more processor time than it may."""


class Finding(NamedTuple):
    """What was raised and must not be. `key` is the same for findings of one cause, as far as the traceback tells."""

    key: str
    report: str

    @property
    def name(self) -> str:
        """A file name for it."""
        return hashlib.sha256(self.key.encode()).hexdigest()[:12]


@contextmanager
def bounded(seconds: float) -> Iterator[None]:
    """Raise OvertimeError or MemoryError where the body takes more processor time, or more than `MEGABYTES`."""
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    signal.signal(signal.SIGPROF, _stop)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEGABYTES * 2**20, hard))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def finding(action: Callable[[], object], seconds: float = SECONDS) -> Finding | None:
    """What is wrong with what `action` does: None for a clean error, whose text can be made, or none."""
    try:
        with bounded(seconds):
            try:
                action()
            except CLEAN as error:
                str(error)
    except (KeyboardInterrupt, SystemExit):
        raise
    # Whatever it is, it is what is looked for. A panic of a Rust library is no Exception.
    except BaseException as error:  # noqa: BLE001
        return _described(error)
    return None


def _stop(*_: object) -> None:
    raise OvertimeError


def _described(error: BaseException) -> Finding:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_ours(frame.filename)]
    frames = [frame for frame in frames if Path(frame.filename).parent.name != "fuzz"] or frames
    # Where time or memory runs out is chance; from where it was called isn't.
    place = frames[:3] if isinstance(error, (OvertimeError, MemoryError, RecursionError)) else frames[-1:]
    at = " < ".join(f"{Path(frame.filename).resolve().relative_to(ROOT)}:{frame.name}" for frame in reversed(place))
    text = "".join(traceback.format_exception(error, limit=-25))
    return Finding(f"{type(error).__name__} in {at}", text[-20_000:])


def _is_ours(file: str) -> bool:
    path = Path(file).resolve()
    return not file.startswith("<") and path.is_relative_to(ROOT) and ".venv" not in path.parts
