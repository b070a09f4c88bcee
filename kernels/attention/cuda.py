"""Which implementation runs on CUDA: the Triton kernels, or PyTorch's where Triton isn't installed (it is published for
Linux alone). Triton is imported when the first of them is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from precast.kernels.attention import batched


def attention() -> Callable[..., Any]:
    """The implementation of `precast.attention`."""
    if find_spec("triton") is None:
        return batched.attention
    from precast.kernels.attention import triton

    return triton.attention


def paged_attention() -> Callable[..., Any]:
    """The implementation of `precast.paged_attention`."""
    if find_spec("triton") is None:
        return batched.paged_attention
    from precast.kernels.attention import triton

    return triton.paged_attention


def write_kv() -> Callable[..., Any]:
    """The implementation of `precast.write_kv`."""
    if find_spec("triton") is None:
        from precast.kernels.attention.write_kv import write_kv as reference

        return reference
    from precast.kernels.attention import triton_write_kv

    return triton_write_kv.write_kv
