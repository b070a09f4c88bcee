"""`precast.load`: from a bundle and a checkpoint to an engine, phase by phase.

The sizes of the caches are arithmetic over what is known before the first step; no profiling run.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from precast.ir import symbols as exprs
from precast.ir.bundle import Bundle
from precast.ir.checkpoint import CheckpointFiles
from precast.ir.errors import RequestError, TargetError
from precast.ir.schema import CachePlan, Graph, TensorType
from precast.ir.tensorfile import Tensor
from precast.kernels.dtypes import BY_NAME
from precast.loader.engine import Engine, on_device
from precast.loader.pools import cache_bytes_for, cache_tensors, page_bytes, plan_pages
from precast.loader.restore import restore
from precast.loader.timeline import Phase, Timeline
from precast.loader.weights import load_weights
from precast.loader.workers import PinnedBuffers

CUDA_FRACTION = 0.9
"""Of the GPU memory that is free after weights and activations; the rest is for the allocator's fragments."""
CPU_FRACTION = 0.5
"""Of the memory that is available: the machine has other things to do."""
CPU_SEQUENCES, CPU_TOKENS = 16, 2048
"""A CPU runs the reference: by default, its cache holds this many sequences of this length, and one of any length."""
LIVE_VALUES = 4
"""How many values as large as the graph's largest are alive at once, with room to spare."""
BYTES_A_LOGIT = 48
"""What sampling holds for each logit of a step: float32 copies, a sorted one, its int64 order, weights, their sums."""


def load(
    bundle: str | Path | Bundle,
    *,
    weights: str | Path,
    device: str | torch.device | None = None,
    max_num_seqs: int = 256,
    max_num_tokens: int = 8192,
    cache_bytes: int | None = None,
    timeline: Timeline | None = None,
) -> Engine:
    """The engine of a bundle on `device`, with the weights of a checkpoint directory.

    `device`: "cpu", "cuda", "cuda:1"; None: the GPU if there is one. At most `max_num_seqs` sequences run at once,
    and a step computes at most `max_num_tokens` tokens. `cache_bytes` for keys and values; None: on a GPU nine tenths
    of what weights and activations leave, on a CPU enough for 16 sequences of 2048 tokens and one of the model's
    limit, but no more than half of the available memory. `timeline` is carried on, if the caller has begun one.

    Raises BundleError for a bundle that is refused, WeightsError for a checkpoint that doesn't fit it, TargetError
    for a device that is missing or too small, RequestError for options outside their range.
    """
    _check_option("max_num_seqs", max_num_seqs)
    _check_option("max_num_tokens", max_num_tokens)
    if cache_bytes is not None:
        _check_option("cache_bytes", cache_bytes)
    timeline = Timeline() if timeline is None else timeline
    with timeline.phase("context"):
        target = open_device(device)
    # The buffers are pinned while the bundle is read.
    buffers = PinnedBuffers(target) if target.type == "cuda" else None
    with contextlib.ExitStack() as on_error, timeline.phase("bundle"), on_device(target):
        if buffers is not None:
            on_error.callback(buffers.close)
        opened = bundle if isinstance(bundle, Bundle) else Bundle.open(Path(bundle))
        graph, model = opened.graph, opened.manifest.model
        program = restore(graph, device=target)
        files = CheckpointFiles.open(Path(weights))
        on_error.pop_all()  # from here on the buffers are load_weights' own
    with timeline.phase("weights") as phase, on_device(target):
        loaded = load_weights(graph, opened.manifest.checkpoint, files, device=target, buffers=buffers)
        program.bind(loaded.tensors)
        program.bind(constant_tensors(graph, opened.constants, target))
        phase.bytes = loaded.bytes_read
        phase.count("bytes_read", loaded.bytes_read)
        phase.count("bytes_needed", loaded.bytes_needed)
    with timeline.phase("pools") as phase, on_device(target):
        num_pages = size_pools(
            graph,
            phase,
            device=target,
            max_num_seqs=max_num_seqs,
            max_num_tokens=max_num_tokens,
            max_seq_len=model.max_seq_len,
            cache_bytes=cache_bytes,
        )
        program.bind(cache_tensors(graph.caches, num_pages, device=target))
    return Engine(
        program,
        graph,
        model,
        device=target,
        num_pages=num_pages,
        max_num_seqs=max_num_seqs,
        max_num_tokens=max_num_tokens,
        tokenizer_files=opened.files("tokenizer"),
        timeline=timeline,
    )


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


def size_pools(
    graph: Graph,
    phase: Phase,
    *,
    device: torch.device,
    max_num_seqs: int,
    max_num_tokens: int,
    max_seq_len: int,
    cache_bytes: int | None,
) -> dict[str, int]:
    """Pages by pool, with the arithmetic noted in the phase's counters.

    GPU: `(free - activation_allowance) * 0.9`. CPU: `min(bytes of the default tokens, available * 0.5)`.
    """
    plan = graph.caches
    free = free_memory(device)
    allowance = activation_allowance(graph, max_num_seqs=max_num_seqs, max_num_tokens=max_num_tokens)
    if cache_bytes is None and device.type == "cuda":
        cache_bytes = int((free - allowance) * CUDA_FRACTION)
    elif cache_bytes is None:
        several = cache_bytes_for(plan, min(max_num_seqs, CPU_SEQUENCES), min(max_seq_len, CPU_TOKENS))
        cache_bytes = min(max(several, cache_bytes_for(plan, 1, max_seq_len)), int(free * CPU_FRACTION))
    elif cache_bytes > free:
        raise TargetError("device-memory", f"cache_bytes is {cache_bytes}, and {free} bytes are free on {device}")
    num_pages = plan_pages(plan, cache_bytes=cache_bytes, max_num_seqs=max_num_seqs, max_seq_len=max_seq_len)
    if not all(num_pages.values()):
        raise _no_room(plan, cache_bytes, free, allowance)
    sizes = page_bytes(plan)
    phase.bytes = sum(sizes[name] * count for name, count in num_pages.items())
    phase.counters |= {"bytes_free": free, "bytes_for_activations": allowance, "bytes_for_cache": cache_bytes}
    phase.counters |= {f"pages_{name}": count for name, count in num_pages.items()}
    return num_pages


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


def activation_allowance(graph: Graph, *, max_num_seqs: int, max_num_tokens: int) -> int:
    """Bytes set aside for a step: 4 times the largest value of the graph, and 48 for each logit that is sampled."""
    rows = min(max_num_seqs, max_num_tokens)
    sizes = {symbol.name: symbol.max or 0 for symbol in graph.symbols}
    sizes |= {"T": max_num_tokens, "B": rows, "R": rows}
    functions = [graph.main, *(block.nodes for block in graph.blocks)]
    values = [value for nodes in functions for node in nodes for value in node.outputs]
    largest = max((_bytes_of(value.type, sizes) for value in values), default=0)
    vocabulary = [value.type.shape[-1] for value in values if value.name == graph.outputs.get("logits")]
    num_logits = rows * exprs.evaluate(vocabulary[-1], sizes) if vocabulary else 0
    return LIVE_VALUES * largest + BYTES_A_LOGIT * num_logits


def _bytes_of(kind: TensorType, sizes: Mapping[str, int]) -> int:
    return math.prod(exprs.evaluate(size, sizes) for size in kind.shape) * BY_NAME[kind.dtype].itemsize


def _check_option(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise RequestError("engine-option-invalid", f"{name} is {value!r}, expected an integer of at least 1")


def _no_room(plan: CachePlan, cache_bytes: int, free: int, allowance: int) -> RequestError:
    sizes = ", ".join(f"{size} of pool {name}" for name, size in page_bytes(plan).items())
    return RequestError(
        "cache-too-small",
        f"{cache_bytes} bytes of cache hold no page of each pool: a page takes {sizes} bytes; "
        f"{free} bytes are free after the weights, {allowance} of them are set aside for activations",
        fix="give more cache_bytes, lower max_num_tokens, or free memory on the device",
    )
