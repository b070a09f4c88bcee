"""What a load on a CPU takes of memory beside its weights.

Claim: never more than 1 GiB above the params and the process without weights, whatever has to be done to the weights:
no file, no tensor and no shard is held a second time. The peak (VmHWM) of a fresh process that loads the params of a
Llama of `--layers` layers, less that of one that reads the headers alone, less the params; and the same of as many of
its largest matrices, in float8 with a scale for each block. On a CPU, where params lie in the same memory: on a GPU the
ring of pinned buffers, 128 MiB, takes the place of what is not in it.

    python benchmarks/bench_load_memory.py [--layers 4] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from bench_weights import HIDDEN, MLP, graph, write_checkpoint
from support import harness

from precast.ir.graph.schema import Cast, Dequantise, Graph, Param, Read, Recipe, TensorType, Transpose
from precast.ir.weights.tensorfile import encode

LIMIT = 1 << 30
QUANTISED = "float8"
BLOCK = 128


def as_stored(recipe: Recipe) -> Recipe:
    """Bytes go to their places as they are."""
    return recipe


def cast(recipe: Recipe) -> Recipe:
    """Each element passes through a buffer."""
    return Cast(recipe, "float32")


def turned(recipe: Recipe) -> Recipe:
    """Each matrix is transposed."""
    return Transpose(recipe, 0, 1)


CASES: dict[str, Callable[[Recipe], Recipe]] = {"as stored": as_stored, "cast to float32": cast, "transposed": turned}


def changed(stored: Graph, change: Callable[[Recipe], Recipe]) -> Graph:
    """The graph, with what is done to each matrix."""
    params = []
    for param in stored.params:
        shape, dtype = param.type.shape, param.type.dtype
        if len(shape) == 2:
            recipe = change(param.recipe)
            dtype = "float32" if isinstance(recipe, Cast) else dtype
            shape = (shape[1], shape[0]) if isinstance(recipe, Transpose) else shape
            params.append(Param(param.name, TensorType(dtype, shape), recipe))
        else:
            params.append(param)
    return msgspec.structs.replace(stored, params=tuple(params))


def write_quantised(folder: Path, num_matrices: int) -> None:
    """Matrices of zeros in float8; what they hold matters to nobody."""
    rows, columns = MLP, HIDDEN
    values = ("float8_e4m3fn", (rows, columns), bytes(rows * columns))
    scales = ("float32", (rows // BLOCK, columns // BLOCK), bytes(4 * (rows // BLOCK) * (columns // BLOCK)))
    for i in range(num_matrices):
        (folder / f"{i}.safetensors").write_bytes(encode({f"{i}.values": values, f"{i}.scales": scales}))


def quantised(num_matrices: int) -> Graph:
    """Each of them as bfloat16."""
    params = []
    for i in range(num_matrices):
        values = Read(f"{i}.values", (MLP, HIDDEN), "float8_e4m3fn")
        scales = Read(f"{i}.scales", (MLP // BLOCK, HIDDEN // BLOCK), "float32")
        recipe = Cast(Dequantise(values, scales, "fp8", (BLOCK, BLOCK)), "bfloat16")
        params.append(Param(f"{i}", TensorType("bfloat16", (MLP, HIDDEN)), recipe))
    return Graph((), (), tuple(params), (), (), (), {})


def child(checkpoint: Path, layers: int, case: str) -> dict[str, int]:
    """In a process of its own: load, and say its peak. The case `headers` loads nothing."""
    from precast.ir.manifest import Checkpoint
    from precast.ir.weights.checkpoint import CheckpointFiles
    from precast.loader.torch_device import open_device
    from precast.loader.weights.stream import load_weights

    made = quantised(layers) if case == QUANTISED else changed(graph(layers), CASES.get(case, as_stored))
    files = CheckpointFiles.open(checkpoint)
    params = 0
    if case != "headers":
        found = load_weights(made, Checkpoint(), files, device=open_device("cpu"))
        params = sum(tensor.nbytes for tensor in found.tensors.values())
    peak = Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]
    return {"peak": int(peak) * 1024, "params": params}


def measured(checkpoint: Path, layers: int, case: str) -> dict[str, int]:
    """`child` in a new process."""
    command = [sys.executable, __file__, "--child", case, "--checkpoint", str(checkpoint), "--layers", str(layers)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--child")
    parser.add_argument("--out", type=Path, default=harness.RESULTS / "load_memory.json")
    options = parser.parse_args()
    if options.child is not None:
        print(json.dumps(child(options.checkpoint, options.layers, options.child)))
        return
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), options.layers)
        empty = measured(Path(folder), options.layers, "headers")["peak"]
        figures: dict[str, Any] = {"process_without_weights_bytes": empty, "limit_bytes": LIMIT}
        for case in (*CASES, QUANTISED):
            if case == QUANTISED:
                (Path(folder) / case).mkdir()
                write_quantised(Path(folder) / case, options.layers)
            found = measured(Path(folder) / (case if case == QUANTISED else ""), options.layers, case)
            above = found["peak"] - empty - found["params"]
            figures[case] = {"params_bytes": found["params"], "above_bytes": above, "within_limit": above <= LIMIT}
    harness.write(options.out, "memory of a load beside its weights", figures)


if __name__ == "__main__":
    main()
