"""The ops in torch: their specs, their registration with `torch.library`, and the functions that records name.

The builder registers the ops with `torch.library`, to trace models that call them. The loader calls what
`implementations` gives, without torch's dispatcher between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

import torch

from precast.ir.graph.schema import Dtype, Expr
from precast.ir.ops import table as ops
from precast.kernels import cuda_source
from precast.kernels.choices import all_records, cases, fastest
from precast.kernels.launch import Launched, as_function, launched_of
from precast.kernels.linear import cublaslt
from precast.kernels.measured import Table, table_of
from precast.kernels.named import named
from precast.kernels.native import Native
from precast.kernels.records import Ranges, Record
from precast.kernels.spec import OpSpec
from precast.kernels.use import GPU, Target, Use

_NAMESPACE = "precast"


@cache
def specs() -> tuple[OpSpec, ...]:
    """The spec of every `precast.*` op, from beside the references that records name; sorted by name and version."""
    runs = [record.runs for record in all_records() if record.name.startswith("reference.")]
    modules = sorted({module.partition(":")[0] for module in runs if isinstance(module, str)})
    found = [value for name in modules for value in vars(import_module(name)).values() if isinstance(value, OpSpec)]
    return tuple(sorted(found, key=lambda spec: (spec.name, spec.version)))


@cache
def register() -> torch.library.Library:
    """Define `torch.ops.precast.*` from the op table: each op's reference, and its fake; once, however often called.

    The ops live as long as the library that is returned, which this function keeps.
    """
    from precast.kernels.fakes import fake_of

    library = torch.library.Library(_NAMESPACE, "DEF")
    for spec in specs():
        name, signature = spec.torch_name, ops.signature(spec.name, spec.version)
        schema = signature[signature.index("(") :].replace("Dtype ", "ScalarType ").replace("Group ", "str ")
        library.define(name + schema)
        library.impl(name, spec.reference, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{_NAMESPACE}::{name}", fake_of(spec.definition), lib=library)
    return library


class Implementation(NamedTuple):
    """What computes a node in steps of these sizes, of all sizes if none are named.

    It `allocates` its results, or writes them into `out`; and it `reads_host`, or can be captured (see `Record`). The
    values of `expressions` are given to it besides, as its argument `sizes`, if there are any.
    """

    sizes: Ranges
    function: Callable[..., Any]
    allocates: bool
    reads_host: bool = False
    expressions: tuple[Expr, ...] = ()


def implementations(use: Use) -> tuple[Implementation, ...]:
    """What computes a use: one implementation, or one for each class of sizes that its records tell apart.

    They take the arguments by the names of the op's signature, element types as `torch.dtype`, and return a tensor, a
    tuple of tensors, or None for an op without results; those that don't allocate write into `out` instead.

    Raises BundleError `op-unknown` for a name or version that isn't in the op table, and TargetError
    `implementation-missing` for a use that no record takes.
    """
    found = cases(use)
    functions = {record.name: function_for(record, use) for _, (record, _) in found}
    return tuple(_implementation(sizes, record, functions[record.name]) for sizes, (record, _) in found)


def _implementation(sizes: Ranges, record: Record, function: Callable[..., Any]) -> Implementation:
    expressions = function.expressions if isinstance(function, Launched) else ()
    return Implementation(sizes, function, record.allocates, record.control == "host", expressions)


def function_for(record: Record, use: Use) -> Callable[..., Any]:
    """The function that a record names, or its launches for a use."""
    if record.within is not None:
        launched = Launched(record.within.launches(use), native=use.target.native)
        made: Callable[..., Any] = named(record.within.makes)(launched)
        return made
    return function_of(record) if isinstance(record.runs, str) else launched_of(record, use)


def resolve(
    name: str,
    version: int,
    device: torch.device,
    *,
    control: Literal["static"] | None = None,
    dtypes: Mapping[str, Dtype] | None = None,
) -> Callable[..., Any]:
    """The fastest implementation of an op on `device`, for whoever has no node: it may not take all types and sizes.

    `control` "static": of those that can be captured. `dtypes`: of those that take these arguments in these types.

    Raises BundleError `op-unknown` for a name or version that isn't in the op table.
    """
    return function_of(fastest(name, version, target_of(device), control=control, dtypes=dtypes))


def resolve_into(
    name: str, version: int, device: torch.device, *, control: Literal["static"] | None = None,
    dtypes: Mapping[str, Dtype] | None = None, target: Target | None = None,
) -> Callable[..., None]:  # fmt: skip
    """The same for an op of one result, which is written into `out`, a tensor that it is given besides.

    `target` is what the device is, with the kernels that are at hand; None: `target_of` it.
    """
    target = target or target_of(device)
    record = fastest(name, version, target, control=control, dtypes=dtypes)
    function = function_of(record, target.native)
    if not record.allocates:
        return function

    def copied(*, out: torch.Tensor, **arguments: Any) -> None:
        out.copy_(function(**arguments))

    return copied


def target_of(device: torch.device, table: Table | None = None) -> Target:
    """The target that a device is, with what is installed here: Triton, the bindings that launch kernels, cuBLASLt.

    Choices are those of `table`; None: of the one that comes with Precast for the device.
    """
    target = Target("cpu") if device.type == "cpu" else GPU
    if device.type == "cuda" and torch.cuda.is_available():
        target = target._replace(
            capability=torch.cuda.get_device_capability(device), table=table_of(torch.cuda.get_device_name(device))
        )
    if table is not None:
        target = target._replace(table=table)
    can_launch = cuda_source.is_installed()
    has = {
        "triton": can_launch and find_spec("triton") is not None,
        "cuda": can_launch,
        "library": can_launch and device.type == "cuda" and cublaslt.is_installed(),
        "library 12.9": can_launch and device.type == "cuda" and cublaslt.has_scales(),
    }
    return target._replace(kinds=target.kinds - {kind for kind, is_there in has.items() if not is_there})


def function_of(record: Record, native: Native | None = None) -> Callable[..., Any]:
    """The function that a record names, imported when it is first wanted; or its launches as one, with the kernels
    that are at hand."""
    return named(record.runs) if isinstance(record.runs, str) else as_function(record, native)
