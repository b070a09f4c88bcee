"""Gluon over Triton's interpreter: what kernels of `precast.kernels.attention.hopper` use of it, one program at a time.

What runs beside the program on a GPU comes late here: copies into shared memory and products are done when the program
waits for them, and what was asked for and is not there yet is NaN. So a kernel that waits for too little, or overwrites
what a product still reads, gives NaN. Import this before the kernels, with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia import hopper as _hopper  # noqa: F401 - replaced below

FUNCTIONS = (
    "cdiv", "load", "store", "where", "maximum", "minimum", "max", "min", "sum", "exp", "exp2", "abs", "program_id",
    "num_programs", "reshape",
)  # fmt: skip
"""What is the same in both."""
LAYOUTS = ("BlockedLayout", "SliceLayout", "NVMMADistributedLayout", "NVMMASharedLayout", "DotOperandLayout")

_copies: list[list[Callable[[], None]]] = [[]]
"""Groups of copies that were asked for; the last one is open."""
_products: list[Product] = []


class Memory:
    """Shared memory, or a part of it: tiles by their index."""

    def __init__(self, tiles: dict[int, Any], shape: Sequence[int], dtype: Any, place: int = 0) -> None:
        self.tiles, self.shape, self.dtype, self.place = tiles, shape, dtype, place
        self.is_turned = False

    def index(self, i: Any) -> Memory:
        return Memory(self.tiles, self.shape[1:], self.dtype, int(i))

    def permute(self, order: tuple[int, ...]) -> Memory:
        assert order == (1, 0)
        turned = Memory(self.tiles, self.shape, self.dtype, self.place)
        turned.is_turned = True
        return turned

    def store(self, x: Any) -> None:
        self.tiles[self.place] = x

    def read(self) -> Any:
        tile = self.tiles[self.place]
        return tl.trans(tile) if self.is_turned else tile


class Product:
    """A product that is on its way."""

    def __init__(self, a: Any, b: Memory, acc: Any, use_acc: bool) -> None:
        self.operands, self.use_acc, self.result = (a, b, acc), use_acc, None

    def finish(self) -> None:
        a, b, acc = self.operands
        a = a.read() if isinstance(a, Memory) else a
        product = tl.dot(a, b.read(), input_precision="ieee")
        self.result = product + acc if self.use_acc else product


def warpgroup_mma(a: Any, b: Memory, acc: Any, *, use_acc: bool = True, is_async: bool) -> Product:
    assert is_async
    _products.append(Product(a, b, acc, use_acc))
    return _products[-1]


def warpgroup_mma_wait(num_outstanding: int, deps: Sequence[Any]) -> Any:
    while len(_products) > num_outstanding:
        _products.pop(0).finish()
    found = tuple(each.result if isinstance(each, Product) else each for each in deps)
    return found if len(found) > 1 else found[0]


def async_copy_global_to_shared(shared: Memory, pointer: Any, mask: Any) -> None:
    shared.store(tl.full(shared.shape, float("nan"), shared.dtype))
    _copies[-1].append(lambda: shared.store(tl.load(pointer, mask=mask, other=0.0)))


def commit_group() -> None:
    _copies.append([])


def wait_group(num_outstanding: int) -> None:
    while len(_copies) - 1 > num_outstanding:
        for copy in _copies.pop(0):
            copy()


def allocate_shared_memory(dtype: Any, shape: Sequence[int], layout: Any) -> Memory:
    return Memory({}, shape, dtype)


def associative_scan(x: Any, axis: int, add: Any) -> Any:
    return tl.cumsum(x, axis)


class Layout:
    """Any layout: here all of a tensor is in one place."""

    def __init__(self, *given: Any) -> None:
        pass

    @staticmethod
    def get_default_for(shape: Sequence[int], dtype: Any) -> None:
        return None


def _as_function(name: str) -> Callable[..., Any]:
    """Triton's function, as the interpreter has it when it is called."""
    return lambda *args, **more: getattr(tl, name)(*args, **more)


def module(name: str) -> ModuleType:
    """The module of kernels `name`, imported over this in place of Gluon. It must not have been imported before."""
    assert name not in sys.modules, name
    real = gluon, {each: sys.modules[each] for each in list(sys.modules) if each.startswith(gluon.__name__)}
    with_layouts = {
        "arange": lambda low, high, layout: tl.arange(low, high),
        "full": lambda shape, value, dtype, layout: tl.full(shape, value, dtype),
        "convert_layout": lambda x, layout: x,
    }
    language = SimpleNamespace(
        **{each: getattr(tl, each) for each in ("constexpr", "int32", "int64", "float32")},
        **{each: _as_function(each) for each in FUNCTIONS}, **dict.fromkeys(LAYOUTS, Layout), **with_layouts,
        static_range=range, multiple_of=lambda x, n: x, to_tensor=lambda x: x, num_warps=lambda: 1,
        associative_scan=associative_scan, allocate_shared_memory=allocate_shared_memory,
    )  # fmt: skip
    copies = SimpleNamespace(
        wait_group=wait_group, commit_group=commit_group, async_copy_global_to_shared=async_copy_global_to_shared
    )
    hopper = SimpleNamespace(
        async_copy=copies, fence_async_shared=lambda: None,
        warpgroup_mma=warpgroup_mma, warpgroup_mma_wait=warpgroup_mma_wait,
    )  # fmt: skip
    here: Any = SimpleNamespace(jit=triton.jit, language=language)
    try:
        triton.experimental.gluon = here
        sys.modules |= {gluon.__name__: here, f"{gluon.__name__}.language.nvidia.hopper": hopper}
        found = import_module(name)
    finally:
        triton.experimental.gluon = real[0]
        sys.modules |= real[1]
    # The interpreter looks for it in the modules of kernels, and knows constants by the text of their annotation.
    vars(found)["tl"] = tl
    normalize = triton.runtime.jit._normalize_ty
    triton.runtime.jit._normalize_ty = lambda kind: "constexpr" if kind == "gl.constexpr" else normalize(kind)
    return found
