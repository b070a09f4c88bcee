"""A bundle made smaller for a proof: one layer of each kind, with all its sizes, in float32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from precast.ir.artifact import Bundle
from precast.ir.graph.alone import renamed
from precast.ir.graph.infer import references
from precast.ir.graph.schema import Block, Call, Graph, Read, Tie
from precast.ir.memory import caches
from precast.ir.weights.tensorfile import Tensor
from precast.kernels.dtypes import BY_NAME
from precast.kernels.use import types_in

_HALF = ("float16", "bfloat16")


def in_float32(bundle: Bundle) -> Bundle:
    """The bundle with float32 in the place of half precision, but for what checkpoints hold."""
    graph = msgspec.structs.replace(_widened(bundle.graph), caches=caches.without_slabs(_widened(bundle.graph.caches)))
    constants = {name: _wide_constant(tensor) for name, tensor in bundle.constants.items()}
    return msgspec.structs.replace(bundle, graph=graph, constants=constants)


def one_of_each_layer(bundle: Bundle) -> Bundle:
    """The bundle with the first call of each block only.

    What read the results of a call that is left out reads what went into it: values of the same types. Params, caches
    and inputs that nothing uses any more are left out, too.
    """
    return msgspec.structs.replace(bundle, graph=_pruned(_first_calls(bundle.graph)))


def _widened(value: Any) -> Any:
    if isinstance(value, Read):
        return value
    if isinstance(value, msgspec.Struct):
        fields = {name: getattr(value, name) for name in value.__struct_fields__}
        changes = {name: "float32" if name == "dtype" and each in _HALF else _widened(each)
                   for name, each in fields.items()}  # fmt: skip
        return msgspec.structs.replace(value, **changes)
    if isinstance(value, tuple):
        return tuple(map(_widened, value))
    return {key: _widened(each) for key, each in value.items()} if isinstance(value, dict) else value


def _wide_constant(tensor: Tensor) -> Tensor:
    dtype, shape, content = tensor
    if dtype not in _HALF:
        return tensor
    found = torch.frombuffer(bytearray(content), dtype=BY_NAME[dtype]).float()  # type: ignore[index]
    return "float32", shape, found.numpy().tobytes()


def _first_calls(graph: Graph) -> Graph:
    types, blocks = types_in(graph), {block.name: block for block in graph.blocks}
    names: dict[str, str] = {}
    called: set[str] = set()
    main: list[Any] = []
    for step in graph.main:
        if isinstance(step, Call):
            step = msgspec.structs.replace(step, args={key: names.get(name, name) for key, name in step.args.items()})
            passed = _passed_on(step, blocks[step.block], types) if step.block in called else None
            if passed is not None:
                names |= passed
                continue
            called.add(step.block)
        else:
            args = {key: renamed(arg, names) for key, arg in step.args.items()}
            step = msgspec.structs.replace(step, args=args)
        main.append(step)
    outputs = {key: names.get(name, name) for key, name in graph.outputs.items()}
    return msgspec.structs.replace(graph, main=tuple(main), outputs=outputs)


def _passed_on(call: Call, block: Block, types: Mapping[str, Any]) -> dict[str, str] | None:
    """For each result of a call, an input of the same type; None where there aren't as many."""
    left = [call.args[value.name] for value in block.inputs]
    found: dict[str, str] = {}
    for output in call.outputs:
        fitting = next((name for name in left if types[name] == output.type), None)
        if fitting is None:
            return None
        left.remove(fitting)
        found[output.name] = fitting
    return found


def _pruned(graph: Graph) -> Graph:
    used = set(graph.outputs.values())
    for step in graph.main:
        used |= set(step.args.values()) if isinstance(step, Call) else set(references(step.args))
    recipes = {param.name: param.recipe for param in graph.params}
    for name in list(used):
        while isinstance(recipe := recipes.get(name), Tie):
            name = recipe.param
            used.add(name)
    groups = [each for each in (_used_slots(group, used) for group in graph.caches.groups) if each.slots]
    states = [each for each in (_used_slots(group, used) for group in graph.caches.states) if each.slots]
    pools = {each.pool for each in (*groups, *states)}
    used |= {name for group in groups for name in msgspec.structs.astuple(group.inputs)}
    used |= {group.slot_ids for group in states}
    plan = msgspec.structs.replace(
        graph.caches, groups=tuple(groups), states=tuple(states),
        pools=tuple(pool for pool in graph.caches.pools if pool.name in pools),
    )  # fmt: skip
    return msgspec.structs.replace(
        graph, caches=plan,
        inputs=tuple(value for value in graph.inputs if value.name in used),
        params=tuple(param for param in graph.params if param.name in used),
        constants=tuple(value for value in graph.constants if value.name in used),
        shards=msgspec.structs.replace(graph.shards, rows=()),
    )  # fmt: skip


def _used_slots(group: Any, used: set[str]) -> Any:
    slots = [slot for slot in group.slots if any(value.name in used for value in slot.tensors)]
    return msgspec.structs.replace(group, slots=tuple(slots))
