"""Makes both forms of an op with a state, the cache-free one and the stateful one, from one function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from precast.ir.ops import table as ops
from precast.kernels.calls import called_as
from precast.kernels.dtypes import FLOAT
from precast.kernels.spec import PRODUCT, OpSpec
from precast.kernels.stateful.walks import Slots, fresh

Compute = Callable[..., torch.Tensor]
Forms = tuple[Compute, Compute]
"""The functions of both forms: the cache-free one, the stateful one."""


def forms(name: str, compute: Compute, *how: Any) -> Forms:
    """`precast.<name>` and `precast.stateful_<name>`, by a function of `how` and of their arguments by name.

    In the place of state and metadata it takes `held`, the `Slots`; and `out` besides, if it has such a parameter.
    """
    op = ops.lookup(f"precast.{name}")
    assert op is not None
    assert op.state is not None
    first, shape_of = op.args[0].name, op.state.shape

    def begins(given: dict[str, Any]) -> torch.Tensor:
        cu_seqlens = given.pop("cu_seqlens")
        return compute(*how, **given, held=fresh(cu_seqlens, shape_of(given), given[first]))  # type: ignore[arg-type]

    def continues(given: dict[str, Any]) -> torch.Tensor:
        return compute(*how, held=Slots(*(given.pop(field) for field in Slots._fields)), **given)

    return called_as(name, begins, like=compute), called_as(f"stateful_{name}", continues, like=compute)


def form_specs(
    name: str, *, axes: Mapping[str, str], state: str, result: str, reference: Forms
) -> tuple[OpSpec, OpSpec]:
    """The specs of both forms. `axes` are those of the tensors but state and metadata."""
    op = ops.lookup(f"precast.{name}")
    assert op is not None
    assert op.state is not None
    of_state = FLOAT if op.state.kind == "conv" else (torch.float32,)
    metadata = {"slots": "B", "cu_seqlens": "B+1", "kv_lens": "B"}

    def spec(prefix: str, form: int, own: Mapping[str, str]) -> OpSpec:
        floating = dict.fromkeys(axes, FLOAT) | {"state": of_state}
        return OpSpec(
            name=f"precast.{prefix}{name}",
            axes={**axes, **own},
            results={"y": result},
            dtypes={each: floating.get(each, (torch.int32,)) for each in (*axes, *own)},
            reference=reference[form],
            tolerances=PRODUCT,
        )

    return (spec("", 0, {"cu_seqlens": "B+1"}), spec("stateful_", 1, {"state": f"P {state}", **metadata}))
