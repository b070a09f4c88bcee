"""fused@1: what its steps give one by one.

A step is an op of PyTorch's own, called as the graph would call it: the results are the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from operator import attrgetter
from typing import Any

import torch

from precast.ir.graph.infer import references
from precast.ir.graph.schema import Arg, Const, DtypeArg, Items, Ref, Step, Steps
from precast.kernels.calls import called_as
from precast.kernels.dtypes import BY_NAME


def _run(given: dict[str, Any]) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """The results of `steps` over the operands `x0`, `x1`, ...: a tensor, or a tuple of several; contiguous, new.

    `steps` are those of a verified graph, as `precast.ir.ops.rows_fused` checks them.
    """
    steps: Steps = given.pop("steps")
    values: dict[str, torch.Tensor] = {name: value for name, value in given.items() if value is not None}
    taken = {id(value) for value in values.values()}
    last_use = {name: i for i, step in enumerate(steps.steps) for name in references(step.args)}
    for i, step in enumerate(steps.steps):
        values[f"s{i}"] = _call(step, values)
        for name in references(step.args):
            if last_use[name] == i and name not in steps.results:
                values.pop(name, None)
    results = []
    for name in steps.results:
        result = values[name].contiguous()
        results.append(result.clone() if id(result) in taken else result)
        taken.add(id(result))
    return results[0] if len(results) == 1 else tuple(results)


fused = called_as("fused", _run, like=_run)


def _call(step: Step, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
    result: torch.Tensor = _op(step.op)(**{name: _value(arg, values) for name, arg in step.args.items()})
    return result


@cache
def _op(name: str) -> Callable[..., Any]:
    op: Callable[..., Any] = attrgetter(name)(torch.ops)
    return op


def _value(arg: Arg, values: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(arg, Ref):
        return values[arg.name]
    if isinstance(arg, DtypeArg):
        return BY_NAME[arg.dtype]
    if isinstance(arg, Items):
        return [_value(item, values) for item in arg.items]
    assert isinstance(arg, Const), "verified: no sizes"
    return arg.value
