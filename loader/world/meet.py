"""How ranks of torch meet: what they compare, and how they connect."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from importlib.metadata import version

import msgspec
import torch

from precast.ir.errors import TargetError
from precast.kernels.collectives.group import Connected
from precast.kernels.collectives.processes import connect
from precast.kernels.native import Native
from precast.kernels.use import Target
from precast.loader.device import Device
from precast.loader.placement import Placement
from precast.loader.world.agree import Facts, check_facts, machine
from precast.loader.world.start import Meeting, World, part_of

NCCL_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",
}
"""torch would end the process where a rank is lost; here rank 0 sees it first, says which, and ends the others. And it
would warn that what stages send goes one after the other, as it is meant to."""


def _facts(digest: str, options: str, device: Device, target: Target, weights_bytes: int) -> Facts:
    is_gpu = device.kind == "cuda"
    gpu = torch.cuda.get_device_properties(torch.device(device.name)) if is_gpu else None
    table = hashlib.sha256(msgspec.json.encode(target.table) + ",".join(sorted(target.kinds)).encode())
    return Facts(
        bundle=digest,
        precast=version("precast"),
        torch=str(torch.__version__),
        device=device.kind,
        gpu="" if gpu is None else gpu.name,
        capability=target.text if is_gpu else "",
        choices=table.hexdigest()[:16],
        options=options,
        machine=machine(),
        host=socket.gethostname(),
        gpu_id="" if gpu is None else str(getattr(gpu, "uuid", device.name)),
        weights_bytes=weights_bytes,
        free_bytes=device.free_bytes(),
    )


def meet(
    world: World, placement: Placement, digest: str, options: str, target: Target, weights_bytes: int
) -> dict[str, Connected]:
    """Compare what all ranks are, and connect them: those that share a layer as `tp`, and of several stages those that
    have the same part of each layer as `pp`.

    This one loads the bundle of this digest with these options, and `target` chooses its kernels.

    Raises what `check_facts` raises, and TargetError (rank-late) for ranks that don't come to connect.
    """
    side, device = world.side, placement.device
    check_facts(side.gather("facts", _facts(digest, options, device, target, weights_bytes)))
    timeout = timedelta(seconds=side.timeouts.kernel)
    if device.kind == "cuda":
        for name, value in NCCL_SETTINGS.items():
            os.environ.setdefault(name, value)
    try:
        groups = dict(_connected(placement, world.meeting, timeout, target.native))
    except RuntimeError as error:
        first_line = next(iter(str(error).splitlines()), "")
        message = f"rank {side.rank} can't connect with the others: {first_line}"
        raise TargetError("rank-late", message, fix="docs/sharding.md says what ranks need of a network") from error
    for group in groups.values():
        side.at_failure(group.abort)
        side.at_leave(group.leave)
        side.at_left(group.close)
    return groups


def _connected(
    placement: Placement, meeting: Meeting, timeout: timedelta, native: Native | None
) -> Iterator[tuple[str, Connected]]:
    """The groups that this rank is in, by name."""
    store = meeting.store(placement.tp * placement.pp)
    rank, tp, device = placement.rank, placement.tp, torch.device(placement.device.name)
    if placement.pp == 1:
        group = connect(store, rank, tp, device, timeout, native=native)
        if placement.dp > 1:
            _move_tokens(group, device)
        yield "tp", group
        return
    if tp > 1:
        yield "tp", connect(part_of(store, f"stage/{placement.stage}"), rank, tp, device, timeout, native=native)
    stages = connect(part_of(store, f"line/{rank}"), placement.stage, placement.pp, device, timeout, sums=False)
    _exchange(stages, device)
    yield "pp", stages


def _move_tokens(group: Connected, device: torch.device) -> None:
    """What ranks with sequences of their own call in each layer, of one number each: see `_exchange`."""
    x = torch.zeros(group.size, 1, device=device)
    group.all_gather(x, x[0].clone())
    group.reduce_scatter(x[0].clone(), x)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _exchange(stages: Connected, device: torch.device) -> None:
    """Send what a step sends, of one number: what connections take of the device's memory is taken before the cache is
    sized."""
    x, last = torch.zeros(1, device=device), stages.size - 1
    if stages.rank > 0:
        stages.receive(x, stages.rank - 1)
    if stages.rank < last:
        stages.send(x, stages.rank + 1)
        stages.receive(x, last)
    else:
        for stage in range(last):
            stages.send(x, stage)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
