"""`Record`: one implementation of an op as data. It says where it runs, what it takes and holds, and how it is called.

The records of a family of ops stand in `kernels/<family>/records.py`, the fastest of an op first; none of these
modules imports torch. Nothing else says what is fast, what can be replayed as a CUDA graph, and how much it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import msgspec

from precast.ir.graph.schema import Dtype, Expr
from precast.kernels.use import Kind, Use

Ranges = Mapping[str, tuple[int, int | None]]
"""Sizes of a step by symbol (`T` tokens, `B` sequences, `R` rows of logits): the least and the largest; None: any."""


class Condition(NamedTuple):
    """What a use must fulfil; the text completes the sentence "it wants ..."."""

    text: str
    holds: Callable[[Use], bool]


class Pointer(NamedTuple):
    """The address of a tensor that a launch takes.

    `tensor` names an argument of the op, a tensor of one that is a list ("tensors.0"), a result ("out.0"), or
    "workspace": uninitialised bytes, as many as the record says, of which `dtype` are seen. What is seen begins at byte
    `offset`, which is 0 in tensors that lie with gaps.
    """

    tensor: str
    dtype: Dtype | None = None
    offset: Expr = 0


class Stride(NamedTuple):
    """Elements from one index of an axis to the next, as that tensor lies when it is launched."""

    tensor: str
    axis: int


class Launch(NamedTuple):
    """One launch of a kernel as data, over the symbols of the step.

    `kernel`: `module:function` of Triton's, or `file:name` of CUDA C++, the file below `precast.kernels`. `args` in the
    order of the kernel's, without its `constants`, which are compiled in; None for a tensor that isn't given. `block`
    are the threads of a block of CUDA C++, and `shared_bytes` what it is given of shared memory. `pdl`: it may begin
    before the kernel in front of it has ended, and waits for that by itself.

    `library`: `kernel` is a class of ours, made of the constants for a device, which is then called with the arguments
    and a `stream`: addresses, integers, None. It launches what a library has, unless a size of the grid is 0.
    """

    kernel: str
    grid: tuple[Expr, ...]
    args: tuple[Pointer | Stride | Expr | float | None, ...]
    constants: Mapping[str, int | float | bool | str] = {}
    num_warps: int = 4
    num_stages: int = 3
    block: int = 0
    shared_bytes: int = 0
    pdl: bool = False
    library: bool = False


Launches = Callable[[Use], tuple[Launch, ...]]
"""The launches that compute a use; they may be of a record's own sizes only."""


class Within(NamedTuple):
    """The launches that a function makes between others' kernels, over symbols of its own; and what makes the function,
    as `module:path`, which is called with them, a `precast.kernels.launch.Launched`."""

    launches: Launches
    makes: str


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One implementation of an op.

    `runs` names a function as `module:path`, imported when it is first wanted, or gives the launches of a use. What it
    names takes the op's arguments by name. If it `allocates`, it returns new tensors; else, as all launches do, it
    writes its results into `out`, a tensor or a tuple of several, which it is given besides. `workspace` are the bytes
    that it holds beside its results at most on a GPU (`precast.kernels.choices.workspace` has a bound for CPUs).

    `control`: "static" if it launches the same work whatever its metadata hold, so that a CUDA graph can replay it;
    "host" if it reads them on the host, which is a wait for the device. `dtypes` are element types by argument, where
    it takes fewer than the op; `sizes` are those of a step that it takes. `layout` names by argument the layout of a
    weight that it wants. `within`: what a function launches by itself; it then has a form that is given its kernels.
    """

    name: str
    op: str
    runs: str | Launches
    workspace: Callable[[Use], Expr]
    op_versions: tuple[int, ...] = (1,)
    version: int = 1
    kind: Kind = "torch"
    devices: tuple[str, ...] = ("cpu", "cuda")
    min_capability: tuple[int, int] = (0, 0)
    max_capability: tuple[int, int] | None = None
    dtypes: Mapping[str, tuple[Dtype, ...]] = {}
    takes: tuple[Condition, ...] = ()
    sizes: Ranges = {}
    control: Literal["static", "host"] = "static"
    allocates: bool = True
    layout: Mapping[str, str] = {}
    within: Within | None = None


def nothing(use: Use) -> Expr:
    """The workspace of views, and of what writes its results and holds no more."""
    return 0


def reference(op: str, module: str, workspace: Callable[[Use], Expr]) -> Record:
    """The op's definition in `precast.kernels.<module>`, on all devices."""
    name = op.removeprefix("precast.")
    return Record(name=f"reference.{name}", op=op, runs=f"precast.kernels.{module}:{name}", workspace=workspace)


def reference_on_cpu(op: str, module: str) -> Record:
    """The definition of an op that other implementations compute on GPUs."""
    return msgspec.structs.replace(reference(op, module, nothing), devices=("cpu",), control="host")
