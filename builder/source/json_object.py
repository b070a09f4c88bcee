"""JSON files of a model's directory, read with bounds: anybody may have written them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from precast.builder.source.small_files import FIX, read_small
from precast.ir import limits
from precast.ir.errors import BuildError
from precast.ir.nesting import is_too_deep


def read_object(path: Path, what: str) -> dict[str, Any] | None:
    """The JSON object in a file; None where there is no such file.

    Raises BuildError (`config-invalid`), also for a file that can't be read.
    """
    data = read_small(path, what, most=limits.MAX_CONFIG_BYTES, code="config-invalid")
    return None if data is None else parse_object(data, what)


def parse_object(data: bytes, what: str, *, code: str = "config-invalid") -> dict[str, Any]:
    """The JSON object in these bytes. Raises BuildError of this code: no JSON, no object, or nested too deep."""
    try:
        found = json.loads(data)
    except RecursionError:
        raise _nested(what, code) from None
    except ValueError as error:
        raise BuildError(code, f"{what} is no JSON: {error}", fix=FIX) from error
    if not isinstance(found, dict):
        raise BuildError(code, f"{what} is no JSON object but a {type(found).__name__}", fix=FIX)
    if is_too_deep(found):
        raise _nested(what, code)
    return found


def _nested(what: str, code: str) -> BuildError:
    return BuildError(code, f"{what} is nested more than {limits.MAX_JSON_NESTING} levels deep", fix=FIX)
