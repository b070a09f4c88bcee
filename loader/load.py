"""`precast.load`: from a bundle and a checkpoint to an engine, phase by phase.

The sizes of the caches are arithmetic over what is known before the first step; no profiling run.
"""

from __future__ import annotations

import contextlib
import os
from bisect import bisect_right
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import torch

from precast.ir.artifact import Bundle
from precast.ir.errors import RequestError, TargetError
from precast.ir.graph import symbols as exprs
from precast.ir.graph.schema import CachePlan, Graph
from precast.ir.memory import activations, caches
from precast.ir.weights.checkpoint import CheckpointFiles
from precast.ir.weights.tensorfile import Tensor
from precast.kernels.dtypes import BY_NAME
from precast.loader.cache.memory import CacheMemory
from precast.loader.engine.engine import Engine
from precast.loader.program.restore import restore
from precast.loader.run.allocator import cut_blocks_to_size
from precast.loader.run.runner import Runner
from precast.loader.timeline import Phase, Timeline
from precast.loader.torch_device import open_device as opened_device
from precast.loader.weights.stream import load_weights
from precast.loader.weights.workers import PinnedBuffers

CUDA_FRACTION = 0.9
"""Of the GPU memory that is free after weights and activations; the rest is for the allocator's fragments."""
CPU_FRACTION = 0.5
"""Of the memory that is available: the machine has other things to do."""
CPU_SEQUENCES, CPU_TOKENS = 16, 2048
"""A CPU runs the reference: by default, its cache holds this many sequences of this length, and one of any length."""
CUDA_RESERVE = 128 << 20
"""Bytes of GPU memory for what is neither cache nor activation: workspaces of libraries (cuBLAS: 32 MiB on Hopper),
code of kernels, staging; and where `precast.loader.run.allocator` changes nothing, what blocks are larger than
tensors."""


def load(
    bundle: str | Path | Bundle,
    *,
    weights: str | Path,
    device: str | torch.device | None = None,
    max_num_seqs: int = 256,
    max_num_tokens: int = 8192,
    cache_bytes: int | None = None,
    reuse_prefixes: bool = True,
    timeline: Timeline | None = None,
) -> Engine:
    """The engine of a bundle on `device`, with the weights of a checkpoint directory.

    `device`: "cpu", "cuda", "cuda:1"; None: the GPU if there is one. At most `max_num_seqs` sequences run at once,
    and a step computes at most `max_num_tokens` tokens. `cache_bytes` for keys, values and states; None: on a GPU nine
    tenths of what weights and activations leave, or what the sequences can fill; on a CPU enough for 16 sequences of
    2048 tokens and one of the model's limit, but no more than half of the available memory. `reuse_prefixes` False:
    every prompt is computed from its first token, and what requests leave is forgotten. `timeline` is carried on, if
    the caller has begun one.

    On a GPU torch's allocator is set to `expandable_segments`, for the whole process, unless the user has configured it
    (`PYTORCH_ALLOC_CONF`, `PYTORCH_CUDA_ALLOC_CONF`) or this torch has no such setting
    (`precast.loader.run.allocator`).

    Raises BundleError for a bundle that is refused, WeightsError for a checkpoint that doesn't fit it, TargetError
    for a device that is missing or too small, RequestError for options outside their range.
    """
    _check_option("max_num_seqs", max_num_seqs)
    _check_option("max_num_tokens", max_num_tokens)
    if cache_bytes is not None:
        _check_option("cache_bytes", cache_bytes)
    if not isinstance(bundle, (str, os.PathLike, Bundle)):
        raise RequestError("engine-option-invalid", f"bundle is {bundle!r}, expected a path or a Bundle")
    if not isinstance(weights, (str, os.PathLike)):
        raise RequestError("engine-option-invalid", f"weights is {weights!r}, expected the path of a checkpoint")
    timeline = Timeline() if timeline is None else timeline
    with timeline.phase("context"):
        target = open_device(device)
        used = opened_device(target)
    # The buffers are pinned while the bundle is read.
    buffers = PinnedBuffers(target) if target.type == "cuda" else None
    with contextlib.ExitStack() as on_error, timeline.phase("bundle"), used.use():
        if buffers is not None:
            on_error.callback(buffers.close)
        opened = bundle if isinstance(bundle, Bundle) else Bundle.open(Path(bundle))
        model = opened.manifest.model
        graph = msgspec.structs.replace(opened.graph, caches=caches.with_slabs(opened.graph.caches))
        _check_limits(graph, max_num_seqs, max_num_tokens)
        program = restore(graph, device=target)
        files = CheckpointFiles.open(Path(weights))
        on_error.pop_all()  # from here on the buffers are load_weights' own
    with timeline.phase("weights") as phase, used.use():
        loaded = load_weights(graph, opened.manifest.checkpoint, files, device=target, buffers=buffers)
        program.bind(loaded.tensors)
        program.bind(constant_tensors(graph, opened.constants, target))
        phase.bytes = loaded.bytes_read
        phase.count("bytes_read", loaded.bytes_read)
        phase.count("bytes_needed", loaded.bytes_needed)
    with timeline.phase("pools") as phase, used.use():
        num_slabs = size_arena(
            graph,
            phase,
            device=target,
            free=free_memory(target),
            max_num_seqs=max_num_seqs,
            max_num_tokens=max_num_tokens,
            max_seq_len=model.max_seq_len,
            cache_bytes=cache_bytes,
        )
        memory = CacheMemory(graph.caches, num_slabs, target)
        program.bind(memory.tensors)
        cut_blocks_to_size(target)
        runner = Runner(
            program,
            graph,
            memory,
            used,
            max_num_seqs=max_num_seqs,
            max_num_tokens=max_num_tokens,
            max_seq_len=model.max_seq_len,
        )
    files_by_name = opened.files("tokenizer")
    return Engine(runner, model, tokenizer_files=files_by_name, timeline=timeline, reuses_prefixes=reuse_prefixes)


def open_device(device: str | torch.device | None) -> torch.device:
    """The device, with its index and, for a GPU, its context made. None: a GPU if there is one.

    Raises TargetError for a device that isn't there and for one that Precast doesn't run on.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        expected = "'cpu', 'cuda' or a certain GPU like 'cuda:1'"
        raise RequestError("engine-option-invalid", f"device is {device!r}, expected {expected}") from None
    if found.type == "cpu":
        return torch.device("cpu")
    if found.type != "cuda":
        raise TargetError("device-invalid", f"device is {found}, and Precast runs on 'cpu' and 'cuda'")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (found.index or 0) >= count:
        raise TargetError(
            "device-missing",
            f"device is {found}, and torch {torch.__version__} sees {count} CUDA devices",
            fix="use device='cpu', or install a torch with CUDA and check the driver with nvidia-smi",
        )
    index = torch.cuda.current_device() if found.index is None else found.index
    torch.cuda.synchronize(index)
    return torch.device("cuda", index)


def constant_tensors(graph: Graph, constants: Mapping[str, Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """A bundle's constants by name, on the device. They have the types that the graph declares (`Bundle.open`)."""
    tensors = {}
    for value in graph.constants:
        _, shape, data = constants[value.name]
        dtype = BY_NAME[value.type.dtype]
        flat = torch.frombuffer(bytearray(data), dtype=dtype) if len(data) else torch.empty(0, dtype=dtype)
        tensors[value.name] = flat.reshape(shape).to(device)
    return tensors


def size_arena(
    graph: Graph,
    phase: Phase,
    *,
    device: torch.device,
    free: int,
    max_num_seqs: int,
    max_num_tokens: int,
    max_seq_len: int,
    cache_bytes: int | None,
) -> int:
    """Slabs of the cache's arena, with the arithmetic noted in the phase's counters.

    `cache_bytes // slab_bytes`. Without that option: on a GPU `(free - activations - reserve) * 0.9 // slab_bytes`, but
    no more than the longest sequences fill; on a CPU what the default sequences fill, up to half of the memory. `free`
    are the bytes that the weights have left: they are on the device already.

    Raises TargetError for more `cache_bytes` than fit, RequestError for a cache without a slab for each pool.
    """
    plan = caches.with_slabs(graph.caches)
    slab_bytes = max(plan.slab_bytes, 1)
    is_cuda = device.type == "cuda"
    reserve = CUDA_RESERVE if is_cuda else 0
    needed = step_bytes(graph, plan, device, max_num_seqs, max_num_tokens, max_seq_len)

    def filled_by(num_seqs: int, seq_len: int) -> int:
        return caches.slabs_for(plan, num_seqs, seq_len, max_num_tokens)

    if cache_bytes is not None:
        num_slabs = cache_bytes // slab_bytes
        if cache_bytes + (needed(num_slabs) + reserve if is_cuda else 0) > free:
            raise _too_large(device, cache_bytes, free, needed(num_slabs), reserve)
    elif is_cuda:
        # With more pages, page lists can be longer, and some ops then hold more: fewer and fewer slabs fit.
        room = range(filled_by(max_num_seqs, max_seq_len) + 1)
        num_slabs = bisect_right(
            room, 0, key=lambda slabs: slabs * slab_bytes - int((free - reserve - needed(slabs)) * CUDA_FRACTION)
        )
        num_slabs = max(num_slabs - 1, 0)
    else:
        several = filled_by(min(max_num_seqs, CPU_SEQUENCES), min(max_seq_len, CPU_TOKENS))
        num_slabs = min(max(several, filled_by(1, max_seq_len)), int(free * CPU_FRACTION) // slab_bytes)
    if num_slabs < len(plan.pools):
        raise _no_room(plan, num_slabs, free, needed(num_slabs), reserve)
    phase.bytes = num_slabs * slab_bytes
    phase.counters |= {"bytes_free": free, "bytes_for_activations": needed(num_slabs), "bytes_reserved": reserve}
    phase.counters |= {"bytes_for_cache": phase.bytes, "slabs": num_slabs, "slab_bytes": slab_bytes}
    return num_slabs


def free_memory(device: torch.device) -> int:
    """Bytes that can be had: on a GPU what the driver and torch's allocator have free, else the available memory."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():  # not Linux: what the machine has, since what is available is unknown
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    sizes = dict(line.split(":", 1) for line in meminfo.read_text(encoding="ascii").splitlines())
    return int(sizes["MemAvailable"].split()[0]) * 1024


def step_bytes(
    graph: Graph, plan: CachePlan, device: torch.device, max_num_seqs: int, max_num_tokens: int, max_seq_len: int
) -> Callable[[int], int]:
    """Bytes of activations that a step holds at most with a cache of so many slabs
    (`precast.ir.memory.activations`)."""
    peak = activations.step_peak(graph, device.type)
    per_slab = {pool.name: pool.pages_per_slab for pool in plan.pools}
    most = {group.name: caches.peak_pages(group, max_seq_len, max_num_tokens) for group in plan.groups}
    num_seqs = min(max_num_seqs, max_num_tokens)
    whole = [group for group in plan.groups if caches.first_visible(group.spec, max_seq_len) == 0]

    def needed(num_slabs: int) -> int:
        # No sequence has a page twice, but a shared one stands in the list of each that shares it.
        pages = {
            group.name: num_seqs * min(num_slabs * per_slab[group.pool], most[group.name]) for group in plan.groups
        }
        held = (num_slabs * per_slab[group.pool] * group.spec.page_size for group in whole)
        seq_len = min([max_seq_len, *held])
        # All tokens may be of one prompt as well, and a prompt takes more than as many sequences that decode. And page
        # lists may be shorter: what is gathered at a time is then of more sequences.
        steps = (
            activations.step_sizes(
                graph,
                max_num_tokens=max_num_tokens,
                max_num_seqs=count,
                max_seq_len=seq_len,
                num_pages={name: -(-pages[name] // 2**halvings) for name in pages},
            )
            for count in {1, num_seqs}
            for halvings in range(max([0, *pages.values()]).bit_length() + 1)
        )
        return max(exprs.evaluate(peak, sizes) for sizes in steps)

    return needed


def _check_option(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise RequestError("engine-option-invalid", f"{name} is {value!r}, expected an integer of at least 1")


def _check_limits(graph: Graph, max_num_seqs: int, max_num_tokens: int) -> None:
    """What the graph's own symbols allow: a step beyond it would be refused when it runs."""
    limits = {symbol.name: symbol.max for symbol in graph.symbols}
    for name, value, symbol in (("max_num_seqs", max_num_seqs, "B"), ("max_num_tokens", max_num_tokens, "T")):
        limit = limits.get(symbol)
        if limit is not None and value > limit:
            found = f"{name} is {value}, and a step of this bundle takes at most {limit}"
            raise RequestError("engine-option-invalid", found)


def _too_large(device: torch.device, cache_bytes: int, free: int, activation_bytes: int, reserve: int) -> TargetError:
    return TargetError(
        "device-memory",
        f"cache_bytes is {cache_bytes}, and {free} bytes are free on {device} after the weights, of which a step's "
        f"activations take up to {activation_bytes}, and {reserve} are set aside",
        fix="give fewer cache_bytes, lower max_num_tokens or max_num_seqs, or free memory on the device",
    )


def _no_room(plan: CachePlan, num_slabs: int, free: int, activation_bytes: int, reserve: int) -> RequestError:
    sizes = ", ".join(f"{size} bytes in pool {name}" for name, size in caches.pool_page_bytes(plan).items())
    least = len(plan.pools) * plan.slab_bytes
    return RequestError(
        "cache-too-small",
        f"the cache has {num_slabs} slabs of {plan.slab_bytes} bytes, and the shortest sequence needs "
        f"{len(plan.pools)}, one for each pool (a page takes {sizes}); {free} bytes are free after the weights, of "
        f"which a step's activations take up to {activation_bytes}, and {reserve} are set aside",
        fix=f"give at least {least} cache_bytes, lower max_num_tokens or max_num_seqs, or free memory",
    )
