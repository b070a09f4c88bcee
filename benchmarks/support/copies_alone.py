"""The weight streams without their products, in this process: their launches are those of kernels that only copy."""

from __future__ import annotations

from functools import partial
from typing import Any

from precast.kernels.linear import records
from precast.kernels.quantised_experts import streamed as experts
from precast.kernels.quantised_linear import streamed as layers
from precast.kernels.records import Launch

STREAMS = (":stream_linear", ":stream_experts")


def leave_products_out() -> None:
    """From here on, in bundles that are built and in those that are loaded, which must have been built so."""
    for module in (records, experts, layers):
        module.Launch = partial(_launch, module.Launch)  # type: ignore[attr-defined,misc]


def _launch(made: Any, kernel: str, *args: Any, constants: dict[str, Any], **others: Any) -> Launch:
    alone = {"COPIES_ALONE": True} if kernel.endswith(STREAMS) else {}
    return made(kernel, *args, constants={**constants, **alone}, **others)
