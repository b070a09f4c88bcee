"""The shared libraries of a start, in an order in which none waits for another.

The system opens one at a time. cuBLASLt, half a gigabyte, takes it a while, longer where nobody has read it yet;
whoever imports a module with a library of its own meanwhile, or looks a function up in one, waits for that with the
interpreter in its hands. So all of that is done before: what a start imports afterwards is Python alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module

from precast.loader.collector import collector_held
from precast.loader.driver import library

MODULES = (
    *("array", "base64", "bisect", "fractions", "hashlib", "random", "unicodedata"),
    *("msgspec", "numpy", "zstandard"),
)
"""What a start imports, by itself or by others, that has libraries or imports what has some."""
_IDLE_THREADS, _LEAST = "OPENBLAS_THREAD_TIMEOUT", "4"


def import_all() -> None:
    """Import what has libraries, and look up what is called of the driver."""
    library.look_up_all()
    with _idle_threads_asleep(), collector_held():
        for name in MODULES:
            import_module(name)


def open_cublaslt() -> None:
    """Let a thread open it, while others run."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="precast-libraries")
    pool.submit(_open_cublaslt)
    pool.shutdown(wait=False)


def _open_cublaslt() -> None:
    from precast.kernels.linear import cublaslt

    cublaslt.is_installed()


@contextmanager
def _idle_threads_asleep() -> Iterator[None]:
    """Where numpy is imported meanwhile, its OpenBLAS makes a thread for each core, and all of them look for work for a
    while, on every core that there is. So they sleep at once, unless whoever runs this process has said how long they
    look."""
    if _IDLE_THREADS in os.environ:
        yield
        return
    os.environ[_IDLE_THREADS] = _LEAST
    try:
        yield
    finally:
        os.environ.pop(_IDLE_THREADS, None)
