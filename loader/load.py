"""`precast.load`: from a bundle and a checkpoint to an engine, phase by phase."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_args

import msgspec
import torch

from precast.ir.artifact import Bundle
from precast.ir.errors import RequestError, shown_value
from precast.ir.graph.schema import Graph
from precast.ir.memory import caches, liveness
from precast.ir.memory.capture import capture_plan, cut
from precast.ir.weights import config_facts
from precast.ir.weights.checkpoint import CheckpointFiles
from precast.ir.weights.tensorfile import Tensor
from precast.kernels.dtypes import BY_NAME
from precast.kernels.measured import read_table
from precast.kernels.registry import target_of
from precast.loader import sizing
from precast.loader.cache.memory import CacheMemory
from precast.loader.collector import collector_held
from precast.loader.device import Device
from precast.loader.engine.engine import Engine
from precast.loader.engine.tokenizer import check_tokenizer
from precast.loader.placement import bind_world, place
from precast.loader.program.restore import restore
from precast.loader.run.batch import BatchInputs
from precast.loader.run.runner import Runner
from precast.loader.sizing import EngineLimits
from precast.loader.sources.open import folder_of
from precast.loader.sources.remote import Waits
from precast.loader.timeline import Timeline
from precast.loader.torch_device import cut_blocks_to_size, tensor_of
from precast.loader.weights.stream import load_weights
from precast.loader.weights.workers import PinnedBuffers

Capture = Literal["background", "before", "off"]
"""When steps are captured as CUDA graphs."""


def load(
    bundle: str | Path | Bundle,
    *,
    weights: str | Path,
    device: str | torch.device | None = None,
    max_num_seqs: int = 256,
    max_num_tokens: int = 8192,
    max_prefill_tokens: int | None = None,
    cache_bytes: int | None = None,
    reuse_prefixes: bool = True,
    allow_config_mismatch: bool = False,
    choices: str | Path | None = None,
    capture: Capture | None = None,
    weights_timeout: float = 30.0,
    timeline: Timeline | None = None,
) -> Engine:
    """The engine of a bundle on `device`, with the weights of a checkpoint: a directory, one safetensors file, or the
    address of either on a server (`https://`, `http://`, `s3://`, `gs://`).

    `device`: "cpu", "cuda", "cuda:1"; None: the GPU if there is one. At most `max_num_seqs` sequences run at once, and
    a step computes at most `max_num_tokens` tokens. Where sequences decode in it, at most `max_prefill_tokens` of them
    are of prompts; None: so many that those wait little longer, by the time that steps take
    (`precast.loader.schedule.prefill_budget`). `cache_bytes` for keys, values and states; None: as many as
    `precast.loader.sizing` says. `reuse_prefixes` False: every prompt is computed from its first token.
    `capture`: steps are captured as CUDA graphs between steps once the first token is drawn (`background`), `before`
    this function returns, or not at all (`off`); None: `background` on a GPU, and `off` on a CPU, where a captured step
    is no faster.

    `choices`: a table of measured choices, as `precast bench kernels` writes it; None: the one that comes with Precast
    for the GPU, if there is one.

    `allow_config_mismatch`: the bundle's numbers count where the checkpoint's `config.json` says others. `timeline` is
    carried on, if the caller has begun one. `weights_timeout`: the seconds that are waited for a server, for an answer
    and for each next part of it.

    On a GPU torch's allocator is configured for the whole process (`torch_device.cut_blocks_to_size`).

    Raises BundleError for a bundle that is refused, WeightsError for a checkpoint that doesn't fit it, TargetError
    for a device that is missing or too small, RequestError for options outside their range; all but what the device
    has no room for before a tensor is read.
    """
    if capture is not None and capture not in get_args(Capture):
        found = f"capture is {capture!r}, expected one of {', '.join(get_args(Capture))}"
        raise RequestError("engine-option-invalid", found)
    _check_options(
        bundle, weights, max_num_seqs=max_num_seqs, max_num_tokens=max_num_tokens,
        max_prefill_tokens=max_prefill_tokens, cache_bytes=cache_bytes,
    )  # fmt: skip
    if choices is not None and not isinstance(choices, (str, os.PathLike)):
        raise RequestError("engine-option-invalid", f"choices is {choices!r}, expected the path of a table")
    table = None if choices is None else read_table(Path(choices))
    folder = folder_of(weights, Waits(weights_timeout))
    timeline = Timeline() if timeline is None else timeline
    with timeline.phase("context"):
        placement = place(device)
    target = placement.device
    capture = capture or ("background" if target.kind == "cuda" else "off")
    with target.use(), PinnedBuffers(target) as buffers:  # they are pinned while the bundle is read
        with timeline.phase("bundle"), collector_held():
            opened = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)
            graph = bind_world(opened.graph, placement)
            graph = msgspec.structs.replace(graph, caches=caches.with_slabs(graph.caches))
            limits = EngineLimits(max_num_seqs, max_num_tokens, opened.manifest.model.max_seq_len, cache_bytes)
            sizing.check_limits(graph, limits)
            BatchInputs(graph)  # refuses a graph without logits, and one that no step's inputs can be made for
            check_tokenizer(opened.files("tokenizer"))
            if not allow_config_mismatch:
                config_facts.check(opened.manifest.config, folder)
            what = target_of(torch.device(target.name), table)
            program = restore(graph, device=torch.device(target.name), target=what)
            files = CheckpointFiles.open(folder)
        with timeline.phase("weights") as phase:
            loaded = load_weights(graph, opened.manifest.checkpoint, files, device=target, buffers=buffers)
            program.bind(loaded.tensors | constant_tensors(graph, opened.constants, target))
            phase.bytes = loaded.bytes_read
            phase.counters = {"bytes_read": loaded.bytes_read, "bytes_needed": loaded.bytes_needed}
        with timeline.phase("pools") as phase:
            sizes = () if capture == "off" else captured_sizes(graph, limits)
            free = target.free_bytes()
            size = sizing.size_arena(graph, limits, target, free=free, captured_sizes=sizes, target=what)
            memory = CacheMemory(graph.caches, size.num_slabs, target)
            program.bind(memory.tensors)
            cut_blocks_to_size(torch.device(target.name))
            program.place(size.addresses, tensor_of(target.alloc(size.addresses.num_bytes)))
            runner = Runner(program, graph, memory, target, limits, captured_sizes=sizes)
            phase.bytes, phase.counters = size.num_bytes, size.counters()
        if capture == "before":
            with timeline.phase("captured") as phase:
                runner.capture_all()
                phase.counters = {"graphs": runner.captures.num_captured}
    model, tokenizer = opened.manifest.model, opened.files("tokenizer")
    return Engine(
        runner, model, tokenizer_files=tokenizer, timeline=timeline, reuses_prefixes=reuse_prefixes,
        max_prefill_tokens=max_prefill_tokens,
    )  # fmt: skip


@liveness.computed()
def captured_sizes(graph: Graph, limits: EngineLimits) -> tuple[int, ...]:
    """The sizes of the bundle's capture plan that the limits can fill."""
    plan = graph.capture if graph.capture.sizes else capture_plan(graph)
    return cut(plan, limits.max_num_tokens)


def constant_tensors(graph: Graph, constants: Mapping[str, Tensor], device: Device) -> dict[str, torch.Tensor]:
    """A bundle's constants by name, on the device. They have the types that the graph declares (`Bundle.open`)."""
    tensors = {}
    for value in graph.constants:
        _, shape, data = constants[value.name]
        dtype = BY_NAME[value.type.dtype]
        flat = torch.frombuffer(bytearray(data), dtype=dtype) if len(data) else torch.empty(0, dtype=dtype)
        tensors[value.name] = flat.reshape(shape).to(device.name)
    return tensors


def _check_options(bundle: object, weights: object, **numbers: object) -> None:
    if not isinstance(bundle, (str, os.PathLike, Bundle)):
        raise RequestError("engine-option-invalid", f"bundle is {bundle!r}, expected a path or a Bundle")
    if not isinstance(weights, (str, os.PathLike)):
        raise RequestError("engine-option-invalid", f"weights is {weights!r}, expected the path of a checkpoint")
    for name, value in numbers.items():
        if name in ("cache_bytes", "max_prefill_tokens") and value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**63:
            expected = "an integer of at least 1, of 64 bits at most"
            raise RequestError("engine-option-invalid", f"{name} is {shown_value(value)}, expected {expected}")
