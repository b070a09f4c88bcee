"""What options of a build may name. No torch: a command line asks here before it imports that."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from precast.ir.errors import BuildError
from precast.ir.graph.schema import Dtype

DTYPES = ("float32", "bfloat16", "float16")
"""Of a model."""
KV_DTYPES: Mapping[str, Dtype | None] = MappingProxyType({"auto": None, "model": None, "fp8_e4m3": "float8_e4m3fn"})
"""Of cached keys and values; None: the model's, or with `auto` what the config says."""
ACTIVATIONS = ("published", "none")
"""Inputs of layers with weights in few bits are rounded as the config says, or not at all."""
CHANNELS = "fp8-channel"
QUANTISED = ("fp8", CHANNELS)
"""What weights are made while they are read: with a scale for each block, or for each output."""
NAMED = ("dtype", "kv_dtype", "page_size", "activations", "quantise")
"""The options that `check_named` looks at."""
_MOST_PAGE_SIZE = 1024


def check_named(
    *, dtype: str, kv_dtype: str, page_size: int | None, activations: str, quantise: str | None
) -> None:  # fmt: skip
    """Raise BuildError (`option-invalid`) for the first that names nothing that `precast.build` knows."""
    if dtype != "auto":
        check_dtype(dtype)
    if page_size is not None and (type(page_size) is not int or not 1 <= page_size <= _MOST_PAGE_SIZE):
        fix = "leave page_size out, to have it chosen for each group of layers"
        raise BuildError(
            "option-invalid", f"page_size is {page_size!r}, expected 1 to {_MOST_PAGE_SIZE} tokens", fix=fix
        )
    if not isinstance(kv_dtype, str) or kv_dtype not in KV_DTYPES:
        found = f"kv_dtype is {kv_dtype!s}, expected one of {', '.join(KV_DTYPES)}"
        raise BuildError("option-invalid", found, fix="use kv_dtype='model', for caches of the model's dtype")
    if quantise is not None and quantise not in QUANTISED:
        message = f"quantise={quantise!r}: this is not known, expected {' or '.join(QUANTISED)}"
        raise BuildError("option-invalid", message, fix="leave quantise out, for weights of the model's dtype")
    if activations not in ACTIVATIONS:
        message = f"activations={activations!r}: this is not known, expected {' or '.join(ACTIVATIONS)}"
        raise BuildError("option-invalid", message, fix="leave activations out, for what the config says")


def check_dtype(dtype: str, *, of_config: bool = False) -> None:
    """Raise BuildError (`option-invalid`) for a dtype that no model is built in."""
    if isinstance(dtype, str) and dtype in DTYPES:
        return
    whose, known = ("the config's dtype", "") if of_config else ("dtype", "auto or ")
    fix = "name one of them as dtype" if of_config else "leave dtype out, for the config's"
    raise BuildError("option-invalid", f"{whose} is {dtype!s}, expected {known}one of {', '.join(DTYPES)}", fix=fix)
