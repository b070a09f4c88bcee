"""A checkpoint from the page cache to the device: `load_weights`, against the bus and against safetensors' own loader.

Claim: on a GPU, weights arrive at no less than 80 % of the rate of a copy from pinned memory, and no byte is read
that no param needs. The shape is Llama-3.1-8B with q, k, v and gate, up fused; on a CPU four of its layers. Each
measurement is the first of a fresh process that has a device context.

    python benchmarks/bench_weights.py [--checkpoint DIR]
"""

from __future__ import annotations

import argparse
import json
import statistics
import struct
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from support import harness

from precast.ir.graph.schema import Concat, Graph, Param, Read, Recipe, TensorType
from precast.ir.manifest import Checkpoint
from precast.ir.weights.checkpoint import CheckpointFiles
from precast.loader.torch_device import open_device
from precast.loader.weights.stream import load_weights
from precast.loader.weights.workers import PinnedBuffers

HIDDEN, MLP, KEYS, VOCABULARY = 4096, 14336, 1024, 128256
GPU_LAYERS, CPU_LAYERS = 32, 4
SHARD_BYTES = 4 << 30
RUNS = 5


def shapes(num_layers: int) -> dict[str, tuple[int, ...]]:
    """The checkpoint's tensors, by their names on the hub."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for i in range(num_layers):
        layer = {
            "input_layernorm": (HIDDEN,), "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (KEYS, HIDDEN),
            "self_attn.v_proj": (KEYS, HIDDEN), "self_attn.o_proj": (HIDDEN, HIDDEN),
            "post_attention_layernorm": (HIDDEN,), "mlp.gate_proj": (MLP, HIDDEN), "mlp.up_proj": (MLP, HIDDEN),
            "mlp.down_proj": (HIDDEN, MLP),
        }  # fmt: skip
        found |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return found | {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}


def graph(num_layers: int) -> Graph:
    """Params alone: q, k, v and gate, up fused, the rest as it is stored."""
    stored = shapes(num_layers)

    def fused(*names: str) -> Param:
        parts = tuple(Read(name, stored[name]) for name in names)
        recipe: Recipe = Concat(parts, 0) if len(parts) > 1 else parts[0]
        rows = sum(part.shape[0] for part in parts)
        return Param("+".join(names), TensorType("bfloat16", (rows, *parts[0].shape[1:])), recipe)

    params = [fused("model.embed_tokens.weight"), fused("model.norm.weight"), fused("lm_head.weight")]
    for i in range(num_layers):
        prefix = f"model.layers.{i}."
        params.append(fused(*(f"{prefix}self_attn.{name}_proj.weight" for name in "qkv")))
        params.append(fused(*(f"{prefix}mlp.{name}_proj.weight" for name in ("gate", "up"))))
        rest = ("input_layernorm", "post_attention_layernorm", "self_attn.o_proj", "mlp.down_proj")
        params += [fused(f"{prefix}{name}.weight") for name in rest]
    return Graph((), (), tuple(params), (), (), (), {})


def write_checkpoint(folder: Path, num_layers: int) -> None:
    """Shards with arbitrary bytes: what matters is that they are in the page cache when this returns."""
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    for name, shape in shapes(num_layers).items():
        num_bytes = 2 * torch.Size(shape).numel()
        if size and size + num_bytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = shape
        size += num_bytes
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda item: write_shard(folder / f"model-{item[0]:05}.safetensors", item[1]), enumerate(shards)))


def write_shard(path: Path, tensors: dict[str, tuple[int, ...]]) -> None:
    """One safetensors file."""
    entries, end = {}, 0
    for name, shape in tensors.items():
        begin, end = end, end + 2 * torch.Size(shape).numel()
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    block = torch.randint(0, 120, (64 << 20,), dtype=torch.uint8).numpy().tobytes()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for start in range(0, end, len(block)):
            file.write(block[: end - start])


def measure_ours(checkpoint: Path, num_layers: int, device: torch.device) -> dict[str, Any]:
    """The first `load_weights` of this process, buffers pinned before: an engine does it while it opens the bundle."""
    torch.zeros(1, device=device)
    files = CheckpointFiles.open(checkpoint)
    buffers = PinnedBuffers(open_device(device))
    time.sleep(0.2)
    started = time.perf_counter()
    made = load_weights(graph(num_layers), Checkpoint(), files, device=buffers.device, buffers=buffers)
    return {"seconds": time.perf_counter() - started, "bytes_read": made.bytes_read, "bytes_needed": made.bytes_needed}


def measure_alone(checkpoint: Path, num_layers: int, device: torch.device) -> dict[str, Any]:
    """The same, pinning included."""
    torch.zeros(1, device=device)
    files, target = CheckpointFiles.open(checkpoint), open_device(device)
    started = time.perf_counter()
    made = load_weights(graph(num_layers), Checkpoint(), files, device=target)
    return {"seconds": time.perf_counter() - started, "bytes_read": made.bytes_read, "bytes_needed": made.bytes_needed}


def measure_safetensors(checkpoint: Path, num_layers: int, device: torch.device) -> dict[str, Any]:
    """The same tensors by the safetensors library, one file after the other, nothing fused."""
    from safetensors.torch import load_file

    torch.zeros(1, device=device)
    started = time.perf_counter()
    kept = [load_file(file, device=str(device)) for file in sorted(checkpoint.glob("*.safetensors"))]
    if device.type == "cuda":
        torch.cuda.synchronize()
    else:  # mapped files: loaded when they are touched
        kept = [{name: tensor.clone() for name, tensor in file.items()} for file in kept]
    return {"seconds": time.perf_counter() - started}


def pinned_rate(num_bytes: int = 1 << 30) -> float:
    """Bytes a second from pinned memory to the GPU, best of five copies of a GiB."""
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        started = time.perf_counter()
        device.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return num_bytes / min(times)


IN_A_FRESH_PROCESS = """
import json, runpy, sys
from pathlib import Path
import torch
sys.path.insert(0, str(Path(sys.argv[1]).parent))
bench = runpy.run_path(sys.argv[1])
print(json.dumps(bench[sys.argv[2]](Path(sys.argv[3]), int(sys.argv[4]), torch.device(sys.argv[5]))))
"""


def measure(name: str, checkpoint: Path, num_layers: int, device: str) -> dict[str, Any]:
    """The median run of one of the functions above; bytes are equal in all runs."""
    arguments = (str(Path(__file__).resolve()), name, str(checkpoint), str(num_layers), device)
    found = [harness.fresh_process(IN_A_FRESH_PROCESS, *arguments) for _ in range(RUNS)]
    return found[0] | {"seconds": round(statistics.median(one["seconds"] for one in found), 4)}


def main() -> None:
    """Measure and write `results/weights_<device>.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--checkpoint", type=Path, help="where the checkpoint is, or is to be made; else it is temporary"
    )
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    num_layers = GPU_LAYERS if device == "cuda" else CPU_LAYERS
    with tempfile.TemporaryDirectory() as temporary:
        checkpoint = arguments.checkpoint or Path(temporary)
        if not any(checkpoint.glob("*.safetensors")):
            write_checkpoint(checkpoint, num_layers)
        ours = measure("measure_ours", checkpoint, num_layers, device)
        alone = measure("measure_alone", checkpoint, num_layers, device)
        theirs = measure("measure_safetensors", checkpoint, num_layers, device)
    rate = ours["bytes_read"] / ours["seconds"]
    figures = ours | {"seconds_with_pinning": alone["seconds"], "gb_per_second": round(rate / 1e9, 2)}
    figures |= {"safetensors_seconds": theirs["seconds"]}
    if device == "cuda":
        bus = pinned_rate()
        figures |= {"pinned_gb_per_second": round(bus / 1e9, 2), "share_of_pinned_rate": round(rate / bus, 3)}
    harness.write(harness.RESULTS / f"weights_{device}.json", "weights", figures)


if __name__ == "__main__":
    main()
