"""How large the cache may be: arithmetic over what is known before the first step, without a trial run.

    arena = (free - activations(arena) - inputs(arena) - graphs(arena) - reserve) * fraction

`free` is what the weights have left. A larger arena makes longer page lists, and with them larger inputs of a step and
more activations. Values lie at the same addresses in all steps; of what has none, captured steps have their own, that
of the largest, beside what graphs are made of.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

from precast.ir.errors import RequestError, TargetError
from precast.ir.graph import symbols
from precast.ir.graph.schema import CachePlan, Call, Expr, Graph
from precast.ir.memory import caches, liveness
from precast.ir.memory.addresses import Addresses
from precast.ir.memory.capture import capture_plan, cut
from precast.kernels import step_memory
from precast.kernels.use import Target
from precast.loader.device import Device
from precast.loader.run.batch import BatchInputs
from precast.loader.run.draws import DTYPES
from precast.loader.run.places import Capacities, places_bytes

CUDA_FRACTION = 0.9
"""Of the GPU memory that is free after weights and activations; the rest is for the allocator's fragments."""
CPU_FRACTION = 0.5
"""Of the memory that is available: the machine has other things to do."""
CPU_SEQUENCES, CPU_TOKENS = 16, 2048
"""A CPU runs the reference: by default, its cache holds this many sequences of this length, and one of any length."""
CUDA_RESERVE = 128 << 20
"""Bytes of GPU memory for what is neither cache nor activation: workspaces of libraries (cuBLAS: 32 MiB on Hopper),
code of kernels; and where `torch_device.cut_blocks_to_size` changes nothing, what blocks are larger than tensors."""

GRAPH_NODE_BYTES = 16384
"""Bytes of GPU memory of a captured graph for each node of the bundle's graph that runs. An H200 took 5 KB a kernel,
and a node of experts launches a dozen."""


class EngineLimits(NamedTuple):
    """What an engine takes: sequences at once, tokens of a step, tokens of a sequence; bytes of its cache, or None.

    `dp` ranks have sequences of their own, each of them within these limits.
    """

    max_num_seqs: int
    max_num_tokens: int
    max_seq_len: int
    cache_bytes: int | None = None
    dp: int = 1

    @property
    def num_rows(self) -> int:
        """The most sequences of one rank that a step draws tokens for."""
        return min(self.max_num_seqs, self.max_num_tokens)


class Values(NamedTuple):
    """What the values of a step take: the addresses of those that have one, and the bytes of what else is alive at
    most, in a step and in a captured one, as expressions."""

    addresses: Addresses
    peak: Expr = 0
    captured: Expr = 0


class ArenaSize(NamedTuple):
    """The slabs of the cache's arena, and the bytes that the arithmetic set apart.

    `inputs` are the places of a step's inputs on the device; on a GPU twice as many bytes of the host are pinned. Of
    `activations`, the values that have one of the `addresses` take `addresses.num_bytes`.
    """

    num_slabs: int
    slab_bytes: int
    free: int
    activations: int
    inputs: int
    graphs: int
    reserve: int
    addresses: Addresses

    @property
    def num_bytes(self) -> int:
        """The size of the arena."""
        return self.num_slabs * self.slab_bytes

    def counters(self) -> dict[str, int]:
        """The arithmetic as a phase of the load reports it."""
        apart = {"bytes_free": self.free, "bytes_for_activations": self.activations, "bytes_for_inputs": self.inputs}
        apart |= {"bytes_for_graphs": self.graphs}
        cache = {"bytes_for_cache": self.num_bytes, "slabs": self.num_slabs, "slab_bytes": self.slab_bytes}
        return apart | {"bytes_reserved": self.reserve} | cache


def size_arena(
    graph: Graph,
    limits: EngineLimits,
    device: Device,
    *,
    free: int,
    captured_sizes: Sequence[int] = (),
    target: Target | None = None,
    planned: Values | None = None,
) -> ArenaSize:
    """The arena of a graph with slabs, on a device with `free` bytes left by the weights.

    Steps of `captured_sizes` tokens are to be captured. `target` is what the device is, as `restore` was told.
    `planned`: what `values_of` says, or that all that a step writes lies at addresses, or in memory that is taken
    already; None: it is worked out.

    With `limits.cache_bytes`, what slabs fit into them. Without: on a GPU what is free, but no more than the longest
    sequences fill; on a CPU what the default sequences fill, up to half of the memory.

    Raises TargetError for more `cache_bytes` than fit, RequestError for a cache without a slab for each pool.
    """
    plan, is_cuda = graph.caches, device.kind == "cuda"
    slab_bytes = max(plan.slab_bytes, 1)
    reserve = CUDA_RESERVE if is_cuda else 0
    addresses, peak, captured = planned or values_of(graph, limits, device, target)
    others = step_bytes(graph, limits, peak)
    graphs = graph_bytes(graph, limits, captured, captured_sizes) if is_cuda else lambda num_slabs: 0

    def inputs(num_slabs: int) -> int:
        return places_bytes(capacities(graph, limits, num_slabs))

    def needed(num_slabs: int) -> int:
        return addresses.num_bytes + others(num_slabs)

    def left_for(num_slabs: int) -> int:
        apart = reserve + needed(num_slabs) + inputs(num_slabs) + graphs(num_slabs)
        return int((free - apart) * CUDA_FRACTION)

    def filled_by(num_seqs: int, seq_len: int) -> int:
        return caches.slabs_for(plan, num_seqs, seq_len, limits.max_num_tokens)

    if limits.cache_bytes is not None:
        num_slabs = limits.cache_bytes // slab_bytes
    elif is_cuda:
        room = range(filled_by(limits.max_num_seqs, limits.max_seq_len) + 1)
        num_slabs = max(bisect_right(room, 0, key=lambda slabs: slabs * slab_bytes - left_for(slabs)) - 1, 0)
    else:
        several = filled_by(min(limits.max_num_seqs, CPU_SEQUENCES), min(limits.max_seq_len, CPU_TOKENS))
        num_slabs = min(max(several, filled_by(1, limits.max_seq_len)), int(free * CPU_FRACTION) // slab_bytes)
    apart = needed(num_slabs), inputs(num_slabs), graphs(num_slabs), reserve
    size = ArenaSize(num_slabs, slab_bytes, free, *apart, addresses)
    _check_fits(size, limits, device)
    if num_slabs < len(plan.pools):
        raise _too_small(plan, num_slabs, f"; {free} bytes are free after the weights, of which {_apart(size)}")
    return size


def values_of(graph: Graph, limits: EngineLimits, device: Device, target: Target | None = None) -> Values:
    """What the values of steps of these limits take, whatever the cache has. `target` is what the device is."""
    target = target or _target_of(device)
    addresses = addresses_of(graph, limits, device, target)
    peaks = (step_memory.step_peak(graph, target, addresses, captured=captured) for captured in (False, True))
    return Values(addresses, *peaks)


def capacities(graph: Graph, limits: EngineLimits, num_slabs: int) -> Capacities:
    """The arrays of a step, the graph's inputs and how tokens are drawn, and how long each can become."""
    num_seqs, num_pages = limits.num_rows, _list_lengths(graph, limits, num_slabs)
    arrays = BatchInputs(graph).capacities(num_seqs=num_seqs, num_tokens=limits.max_num_tokens, num_pages=num_pages)
    draws: Capacities = {name: (dtype, limits.dp * num_seqs) for name, dtype in DTYPES.items()}
    return {**arrays, **draws}


def _list_lengths(graph: Graph, limits: EngineLimits, num_slabs: int) -> dict[str, int]:
    """By group, the pages that the list of one sequence has at most."""
    pages = {pool.name: num_slabs * pool.pages_per_slab for pool in caches.with_slabs(graph.caches).pools}
    return {
        group.name: min(pages[group.pool], caches.peak_pages(group, limits.max_seq_len, limits.max_num_tokens))
        for group in graph.caches.groups
    }


def addresses_of(graph: Graph, limits: EngineLimits, device: Device, target: Target | None = None) -> Addresses:
    """Where values lie, in steps of these limits."""
    num_tokens, num_seqs = limits.max_num_tokens, limits.max_num_seqs
    sizes = step_memory.step_sizes(
        graph, max_num_tokens=num_tokens, max_num_seqs=num_seqs, max_seq_len=limits.max_seq_len, num_pages={}
    )
    return step_memory.addresses_of(graph, target or _target_of(device), sizes)


def _target_of(device: Device) -> Target:
    """What a device of torch's is, where nobody has said it."""
    import torch

    from precast.kernels.registry import target_of

    return target_of(torch.device(device.name))


@liveness.computed()
def captured_sizes(graph: Graph, limits: EngineLimits) -> tuple[int, ...]:
    """The sizes of the bundle's capture plan that the limits can fill."""
    plan = graph.capture if graph.capture.sizes else capture_plan(graph)
    return cut(plan, limits.max_num_tokens)


def graph_bytes(graph: Graph, limits: EngineLimits, peak: Expr, captured_sizes: Sequence[int]) -> Callable[[int], int]:
    """Bytes that captured steps take at most, for a cache of so many slabs: what the largest holds, and graphs.

    `peak` is that of `kernels.step_memory.step_peak` for captured steps. What has an address isn't counted: it lies
    there in all steps.
    """
    if not captured_sizes:
        return lambda num_slabs: 0
    blocks = {block.name: len(block.nodes) for block in graph.blocks}
    nodes = sum(blocks[step.block] if isinstance(step, Call) else 1 for step in graph.main)
    activations = step_bytes(graph, limits._replace(max_num_tokens=max(captured_sizes)), peak)
    return lambda num_slabs: activations(num_slabs) + len(captured_sizes) * nodes * GRAPH_NODE_BYTES


def step_bytes(graph: Graph, limits: EngineLimits, peak: Expr) -> Callable[[int], int]:
    """Bytes of activations without an address that a step holds at most, for a cache of so many slabs.

    `peak` is that of `kernels.step_memory.step_peak`.
    """
    if peak == 0:
        return lambda num_slabs: 0
    plan, (max_num_seqs, max_num_tokens, max_seq_len, *_) = graph.caches, limits
    per_slab = {pool.name: pool.pages_per_slab for pool in plan.pools}
    num_seqs = min(max_num_seqs, max_num_tokens)
    whole = [group for group in plan.groups if caches.first_visible(group.spec, max_seq_len) == 0]

    def needed(num_slabs: int) -> int:
        # No sequence has a page twice, but a shared one stands in the list of each that shares it.
        pages = {name: num_seqs * length for name, length in _list_lengths(graph, limits, num_slabs).items()}
        held = (num_slabs * per_slab[group.pool] * group.spec.page_size for group in whole)
        seq_len = min([max_seq_len, *held])
        # All tokens may be of one prompt as well, and a prompt takes more than as many sequences that decode. And page
        # lists may be shorter: what is gathered at a time is then of more sequences.
        steps = (
            step_memory.step_sizes(
                graph,
                max_num_tokens=max_num_tokens,
                max_num_seqs=count,
                max_seq_len=seq_len,
                num_pages={name: -(-pages[name] // 2**halvings) for name in pages},
            )
            for count in {1, num_seqs}
            for halvings in range(max([0, *pages.values()]).bit_length() + 1)
        )
        return max(symbols.evaluate(peak, sizes) for sizes in steps)

    return needed


def check_limits(graph: Graph, limits: EngineLimits) -> None:
    """Raise RequestError for limits that no memory makes good: beyond what the graph takes, or too few bytes."""
    most = {symbol.name: symbol.max for symbol in graph.symbols}
    for name, symbol in (("max_num_seqs", "B"), ("max_num_tokens", "T")):
        value, limit = getattr(limits, name), most.get(symbol)
        ranks = limits.dp if symbol == "T" else 1  # what is split computes with the tokens of all ranks
        if limit is not None and ranks * value > limit:
            each = f" of each of {ranks} ranks" if ranks > 1 else ""
            found = f"{name} is {value}{each}, and a step of this bundle takes at most {limit}"
            raise RequestError("engine-option-invalid", found)
    plan = graph.caches
    if limits.cache_bytes is not None and limits.cache_bytes < len(plan.pools) * plan.slab_bytes:
        raise _too_small(plan, limits.cache_bytes // plan.slab_bytes, "")


def _check_fits(size: ArenaSize, limits: EngineLimits, device: Device) -> None:
    """On a GPU a step's activations and the reserve count too; a CPU's are lent by the system as they come."""
    besides = size.activations + size.inputs + size.graphs + size.reserve if device.kind == "cuda" else 0
    if limits.cache_bytes is not None and limits.cache_bytes + besides > size.free:
        raise TargetError(
            "device-memory",
            f"cache_bytes is {limits.cache_bytes}, and {size.free} bytes are free on {device.name} after the weights, "
            f"of which {_apart(size)}",
            fix="lower cache_bytes, max_num_tokens or max_num_seqs, or free memory on the device",
        )


def _apart(size: ArenaSize) -> str:
    activations = f"a step's activations take up to {size.activations}"
    graphs = f", captured graphs {size.graphs}" if size.graphs else ""
    return f"{activations}, its inputs {size.inputs}{graphs}, and {size.reserve} are set aside"


def _too_small(plan: CachePlan, num_slabs: int, held: str) -> RequestError:
    sizes = ", ".join(f"{size} bytes in pool {name}" for name, size in caches.pool_page_bytes(plan).items())
    return RequestError(
        "cache-too-small",
        f"the cache has {num_slabs} slabs of {plan.slab_bytes} bytes, and the shortest sequence needs "
        f"{len(plan.pools)}, one for each pool (a page takes {sizes}){held}",
        fix=f"give cache_bytes of at least {len(plan.pools) * plan.slab_bytes}, lower max_num_tokens or max_num_seqs, "
        "or free memory",
    )
