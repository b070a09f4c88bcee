"""Files of an object store, `s3://bucket/path` or `gs://bucket/path`, by the library obstore.

Credentials, region and endpoint are those of the environment, in the names that the stores' own tools have
(`AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT_URL`, `GOOGLE_APPLICATION_CREDENTIALS`, ...); messages have none of them.
"""

from __future__ import annotations

import os
import re
from threading import Event
from typing import Any

from precast.ir.errors import TargetError, WeightsError, shown
from precast.ir.weights.sources import Stamp, changed
from precast.loader.sources.remote import Missing, Sink, Transient, check_stamp

ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
}
"""Variables that name another server than the store's own; http:// alone is then read without encryption."""
CHUNK_BYTES = 1 << 20
"""What is copied at once from what has arrived."""


class ObjectServer:
    """A folder of a bucket."""

    def __init__(self, address: str, timeout: float) -> None:
        """Raises TargetError (`dependency-missing`) without obstore, WeightsError (`checkpoint-address`)."""
        try:
            import obstore
            from obstore import exceptions, store
        except ImportError:
            message = f"{address.partition(':')[0]}:// needs obstore, which is not installed"
            raise TargetError("dependency-missing", message, fix="pip install 'precast[remote]'") from None
        self.name = address.rstrip("/")
        self._get: Any = obstore.get
        self._errors: Any = exceptions
        self._stopped = Event()
        seconds = f"{max(1, round(timeout * 1000))}ms"
        endpoints = (os.environ.get(name, "") for name in ENDPOINTS[address.partition(":")[0].lower()])
        plain = any(endpoint.startswith("http://") for endpoint in endpoints)
        options: Any = {"timeout": seconds, "connect_timeout": seconds, "allow_http": plain}
        try:
            self._store: Any = store.from_url(self.name, client_options=options, retry_config={"max_retries": 0})
        except (exceptions.BaseError, ValueError) as error:
            message = f"the address is none: {_said(error)}"
            fix = "pass an address such as s3://bucket/path/of/folder"
            raise WeightsError("checkpoint-address", message, where=self.name, fix=fix) from None

    def fetch(self, file: str, start: int, sink: Sink, stamp: Stamp | None) -> Stamp:
        """As `precast.loader.sources.remote.Server` says."""
        where = f"{self.name}/{file}"
        options: dict[str, Any] = {"range": (start, start + sink.left)}
        if stamp is not None and stamp[1] is not None:
            options["if_match"] = stamp[1]
        errors = self._errors
        try:
            result = self._get(self._store, file, options=options)
            found: Stamp = (result.meta["size"], result.meta["e_tag"], result.meta["version"])
            check_stamp(where, stamp, found)
            expected = min(start + sink.left, result.meta["size"]) - start
            if result.range != (start, start + expected):
                message = f"answers with bytes {result.range[0]} to {result.range[1] - 1} when asked for {start} and on"
                raise WeightsError("checkpoint-unreachable", message, where=where)
            self._take(result, sink, expected)
            return found
        except (errors.NotFoundError, FileNotFoundError):
            if stamp is None:
                raise Missing from None
            raise changed(where, stamp) from None
        except errors.PreconditionError:
            raise changed(where, stamp or (None,)) from None
        except (errors.PermissionDeniedError, errors.UnauthenticatedError, PermissionError) as error:
            fix = "check the credentials in the environment; of a public bucket set AWS_SKIP_SIGNATURE=true"
            raise WeightsError("checkpoint-denied", _said(error), where=where, fix=fix) from None
        except (errors.BaseError, OSError) as error:
            raise Transient(_said(error)) from None

    def stop(self) -> None:
        """What is under way ends after its next chunk, or after the timeout."""
        self._stopped.set()

    def _take(self, result: Any, sink: Sink, expected: int) -> None:
        left = expected
        for chunk in result.stream(min_chunk_size=CHUNK_BYTES):
            view = memoryview(chunk)
            if len(view) > left or self._stopped.is_set():
                raise Transient(f"the answer has more than {expected} bytes, or was stopped")
            sink.put(view)
            left -= len(view)
        if left:
            raise Transient(f"the answer ends after {expected - left} of {expected} bytes")


def _said(error: Exception) -> str:
    """What the library says in one line, without queries, which may be signed."""
    first = str(error).partition("\n\nDebug source")[0]
    return shown(re.sub(r"\?[^\s\"')]*", "", first), 300)
