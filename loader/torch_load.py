"""A load with torch as the backend: on a CPU, and on GPUs for what the driver alone doesn't run."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import torch

from precast.ir.artifact import Bundle
from precast.ir.graph.schema import Graph
from precast.ir.memory import caches
from precast.ir.weights import config_facts
from precast.ir.weights.checkpoint import CheckpointFiles
from precast.ir.weights.tensorfile import Tensor
from precast.kernels.dtypes import BY_NAME
from precast.kernels.measured import Table
from precast.kernels.native import Native
from precast.kernels.registry import target_of
from precast.kernels.sealed import sealed_tables
from precast.kernels.use import Target
from precast.loader import sizing
from precast.loader.cache.memory import CacheMemory
from precast.loader.collector import collector_held
from precast.loader.device import Device
from precast.loader.engine.engine import Engine
from precast.loader.engine.tokenizer import check_tokenizer
from precast.loader.native import choose
from precast.loader.options import LoadOptions
from precast.loader.placement import bind_world, place
from precast.loader.program.restore import restore
from precast.loader.run.batch import BatchInputs
from precast.loader.run.runner import Runner
from precast.loader.sizing import captured_sizes
from precast.loader.timeline import Timeline
from precast.loader.torch_device import cut_blocks_to_size, tensor_of
from precast.loader.weights.stream import load_weights
from precast.loader.weights.workers import PinnedBuffers


def load_with_torch(options: LoadOptions, timeline: Timeline) -> Engine:
    """See `precast.loader.load.load`."""
    with timeline.phase("context"):
        placement = place(options.device)
    target = placement.device
    capture = options.capture or ("background" if target.kind == "cuda" else "off")
    with target.use(), PinnedBuffers(target) as buffers:  # they are pinned while the bundle is read
        with timeline.phase("bundle") as phase, collector_held():
            bundle = options.bundle
            opened = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)
            graph = bind_world(opened.graph, placement)
            graph = msgspec.structs.replace(graph, caches=caches.with_slabs(graph.caches))
            limits = options.limits(opened.manifest.model.max_seq_len)
            sizing.check_limits(graph, limits)
            BatchInputs(graph)  # refuses a graph without logits, and one that no step's inputs can be made for
            check_tokenizer(opened.files("tokenizer"))
            if not options.allow_config_mismatch:
                config_facts.check(opened.manifest.config, options.weights)
            table = _sealed(opened, target) if options.table is None else options.table
            what, phase.note = _with_native(target_of(torch.device(target.name), table), opened, options)
            program = restore(graph, device=torch.device(target.name), target=what)
            files = CheckpointFiles.open(options.weights)
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
            runner = Runner(program, graph, memory, target, limits, captured_sizes=sizes, target=what)
            phase.bytes, phase.counters = size.num_bytes, size.counters()
        if capture == "before":
            with timeline.phase("captured") as phase:
                runner.capture_all()
                phase.counters = {"graphs": runner.captures.num_captured, "compilations": runner.native.compilations}
    model, tokenizer = opened.manifest.model, opened.files("tokenizer")
    return Engine(
        runner, model, tokenizer_files=tokenizer, timeline=timeline, reuses_prefixes=options.reuse_prefixes,
        max_prefill_tokens=options.max_prefill_tokens,
    )  # fmt: skip


def _sealed(bundle: Bundle, device: Device) -> Table | None:
    """The choices that were measured on this very machine, and attached to the bundle; None if there are none."""
    tables = sealed_tables(bundle.attached) if device.kind == "cuda" else {}
    if not tables:
        return None
    from precast.kernels.machine import this_machine

    machine = this_machine()
    return next((table for table in tables.values() if table.machine == machine), None)


def _with_native(target: Target, bundle: Bundle, options: LoadOptions) -> tuple[Target, str]:
    """The target with the kernels that are compiled already, and a word on where they come from; none for CPUs."""
    if target.device == "cpu":
        return target, ""
    chosen = choose(bundle, target.text, allowed=options.native, trust=options.trust)
    return target._replace(native=Native(chosen.layer)), chosen.note


def constant_tensors(graph: Graph, constants: Mapping[str, Tensor], device: Device) -> dict[str, torch.Tensor]:
    """A bundle's constants by name, on the device. They have the types that the graph declares (`Bundle.open`)."""
    tensors = {}
    for value in graph.constants:
        _, shape, data = constants[value.name]
        dtype = BY_NAME[value.type.dtype]
        flat = torch.frombuffer(bytearray(data), dtype=dtype) if len(data) else torch.empty(0, dtype=dtype)
        tensors[value.name] = flat.reshape(shape).to(device.name)
    return tensors
