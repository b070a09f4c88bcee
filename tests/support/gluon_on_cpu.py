"""Gluon over Triton's interpreter: what kernels of `precast.kernels.attention.hopper` use of it, one program at a time.

What runs beside the program on a GPU comes late here: copies into shared memory and products are done when the program
waits for them, and what was asked for and is not there yet is NaN. So a kernel that waits for too little, or overwrites
what a product still reads, gives NaN. Groups of warps with roles of their own take turns: one runs until it has to wait
for a barrier. Import this before the kernels, with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia import hopper as _hopper  # noqa: F401 - replaced below

from precast.ir.waits import LOOK_SECONDS

FUNCTIONS = (
    "cdiv", "load", "store", "where", "maximum", "minimum", "max", "min", "sum", "exp", "exp2", "abs", "program_id",
    "num_programs", "reshape",
)  # fmt: skip
"""What is the same in both."""
LAYOUTS = ("BlockedLayout", "SliceLayout", "NVMMADistributedLayout", "NVMMASharedLayout", "DotOperandLayout")

_copies: list[list[Callable[[], None]]] = [[]]
"""Groups of copies that were asked for; the last one is open."""
_products: dict[int, list[list[Product]]] = {}
"""By the thread that stands for a group of warps."""


class Memory:
    """Shared memory, or a part of it: tiles by their index."""

    def __init__(self, tiles: dict[int, Any], shape: Sequence[int], dtype: Any, place: int = 0) -> None:
        self.tiles, self.shape, self.dtype, self.place = tiles, shape, dtype, place
        self.is_turned, self.columns = False, slice(None)

    def index(self, i: Any) -> Memory:
        return Memory(self.tiles, self.shape[1:], self.dtype, int(i))

    def permute(self, order: tuple[int, ...]) -> Memory:
        assert order == (1, 0)
        turned = Memory(self.tiles, self.shape, self.dtype, self.place)
        turned.is_turned, turned.columns = True, self.columns
        return turned

    def slice(self, start: Any, length: Any, dim: int) -> Memory:
        assert dim == 1
        cut = Memory(self.tiles, [self.shape[0], length], self.dtype, self.place)
        cut.columns = slice(int(start), int(start) + int(length))
        return cut

    def store(self, x: Any) -> None:
        self.tiles[self.place] = x

    def load(self, layout: Any) -> Any:
        return self.read()

    def read(self) -> Any:
        tile = self.tiles[self.place]
        if self.columns != slice(None):
            data = np.ascontiguousarray(tile.handle.data[:, self.columns])
            handle = type(tile.handle)(data, tile.handle.dtype)
            tile = tl.tensor(handle, tl.block_type(tile.dtype, list(data.shape)))
        return tl.trans(tile) if self.is_turned else tile


class Product:
    """A product that is on its way."""

    def __init__(self, a: Any, b: Memory, acc: Any, use_acc: bool) -> None:
        self.operands, self.use_acc, self.result = (a, b, acc), use_acc, None

    def finish(self) -> None:
        a, b, acc = self.operands
        acc = acc.result if isinstance(acc, Product) else acc
        a = a.read() if isinstance(a, Memory) else a
        product = tl.dot(a, b.read(), input_precision="ieee")
        self.result = product + acc if self.use_acc else product


def warpgroup_mma(a: Any, b: Memory, acc: Any, *, use_acc: bool = True, is_async: bool) -> Product:
    assert is_async
    product = Product(a, b, acc, use_acc)
    asked = _products.setdefault(threading.get_ident(), [])
    # A product that goes on with another's sum is asked for together with it.
    group = asked.pop() if asked and acc is asked[-1][-1] else []
    asked.append([*group, product])
    return product


def warpgroup_mma_wait(num_outstanding: int, deps: Sequence[Any]) -> Any:
    asked = _products.setdefault(threading.get_ident(), [])
    while len(asked) > num_outstanding:
        for product in asked.pop(0):
            product.finish()
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


class Barrier:
    """A barrier in shared memory: how many arrivals a phase has, how many are missing, and copies that count as all."""

    def __init__(self, count: int) -> None:
        self.count, self.missing, self.phase = count, count, 0
        self.copies: list[Callable[[], None]] = []

    def arrive(self, count: int) -> None:
        self.missing -= count
        assert self.missing >= 0
        if self.missing == 0:
            self.missing, self.phase = self.count, self.phase ^ 1


class Turns:
    """Threads of which one runs at a time, until it waits for something or ends."""

    def __init__(self, count: int) -> None:
        self.condition = threading.Condition()
        self.alive = list(range(count))
        self.now = 0
        self.stuck = 0
        self.errors: list[BaseException] = []

    def run(self, i: int, work: Callable[[], Any]) -> None:
        try:
            self._until(i)
            work()
        except BaseException as error:  # noqa: BLE001 - raised where all have ended
            self.errors.append(error)
        finally:
            with self.condition:
                following = self._following(i)
                self.alive.remove(i)
                self.now, self.stuck = following, 0
                self.condition.notify_all()

    def wait_for(self, i: int, is_true: Callable[[], bool]) -> None:
        while not is_true():
            with self.condition:
                self.stuck += 1
                assert self.stuck <= len(self.alive), "all groups of warps wait"
                self.now = self._following(i)
                self.condition.notify_all()
            self._until(i)
        self.stuck = 0

    def _until(self, i: int) -> None:
        with self.condition:
            self.condition.wait_for(lambda: self.now == i)
        assert not self.errors, "another group of warps failed"

    def _following(self, i: int) -> int:
        return self.alive[(self.alive.index(i) + 1) % len(self.alive)]


_turns: list[Turns] = []
_group = threading.local()


def warp_specialize(functions: Sequence[tuple[Any, tuple[Any, ...]]], warps: Any, registers: Any) -> None:
    turns = Turns(len(functions))
    _turns.append(turns)

    def role(i: int) -> None:
        _group.index = i
        function, args = functions[i]
        turns.run(i, lambda: function(*args))

    # Daemons: those that began wait for ever where not all could be started.
    threads = [threading.Thread(target=role, args=(i,), daemon=True) for i in range(len(functions))]
    try:
        for each in threads:
            each.start()
        for each in threads:
            while each.is_alive():
                each.join(LOOK_SECONDS)
        if turns.errors:
            raise turns.errors[0]
        assert not any(_products.values()), "products that nobody waited for"
    finally:
        _turns.pop()
        _products.clear()


def init(barrier: Memory, count: int) -> None:
    barrier.store(Barrier(int(count)))


def arrive(barrier: Memory, *, count: int) -> None:
    barrier.tiles[barrier.place].arrive(int(count))


def wait(barrier: Memory, phase: Any) -> None:
    found, parity = barrier.tiles[barrier.place], int(phase)

    def is_over() -> bool:
        if found.copies and found.phase == parity:
            for copy in found.copies:
                copy()
            found.copies = []
            found.arrive(found.count)
        return found.phase != parity

    _turns[-1].wait_for(_group.index, is_over)


def arrive_with_copies(barrier: Memory, *, increment_count: bool) -> None:
    found = barrier.tiles[barrier.place]
    assert not increment_count
    assert not found.copies, "a stage is filled twice"
    found.copies = _copies.pop()
    _copies.append([])


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
        warp_specialize=warp_specialize,
        inline_asm_elementwise=lambda asm, constraints, args, dtype, is_pure, pack: args[0],
    )  # fmt: skip
    copies = SimpleNamespace(
        wait_group=wait_group,
        commit_group=commit_group,
        async_copy_global_to_shared=async_copy_global_to_shared,
        mbarrier_arrive=arrive_with_copies,
    )
    hopper = SimpleNamespace(
        async_copy=copies, fence_async_shared=lambda: None,
        warpgroup_mma=warpgroup_mma, warpgroup_mma_wait=warpgroup_mma_wait,
        mbarrier=SimpleNamespace(init=init, arrive=arrive, wait=wait, MBarrierLayout=Layout),
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
    # Numbers alone calculate with numbers there.
    vars(found).update({name: x.value for name, x in vars(found).items() if isinstance(x, tl.constexpr)})
    normalize = triton.runtime.jit._normalize_ty
    triton.runtime.jit._normalize_ty = lambda kind: "constexpr" if kind == "gl.constexpr" else normalize(kind)
    return found
