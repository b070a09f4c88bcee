"""How a model's answers are drawn where a request doesn't say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from precast.ir.errors import RequestError
from precast.loader.engine.params import SamplingParams

NAMES = ("temperature", "top_p", "top_k", "min_p")
"""What is taken of a `generation_config.json`; its `do_sample` isn't read, since a temperature says it."""


def defaults_of(files: Mapping[str, bytes]) -> dict[str, Any]:
    """What the model's `generation_config.json` says, as far as it can be meant; else OpenAI's temperature of 1."""
    try:
        config = msgspec.json.decode(files.get("generation_config.json", b"{}"), type=dict[str, Any])
        found = {name: config[name] for name in NAMES if config.get(name) is not None}
        SamplingParams(**found)
    except (ValueError, RecursionError, RequestError):
        found = {}
    return {"temperature": 1.0} | found
