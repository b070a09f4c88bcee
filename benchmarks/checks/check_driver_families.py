"""On a GPU: tiny models of every type that the driver alone runs give the tokens that torch gives.

    python benchmarks/checks/check_driver_families.py --build FOLDER [TYPE ...]  # without a GPU: bundles, kernels
    python benchmarks/checks/check_driver_families.py --bundles FOLDER [TYPE ...]

The build takes the green types of docs/models.md that need no torch, shrunk, in float32 and a few in bfloat16, and what
torch answers on the CPU in float32. Kernels are kept beside, so that it can be run again in little time. The
check serves each bundle by the driver, in processes in which torch and Triton can't be imported, with no step captured
and with all; and by torch, on the same GPU. Processes serve several types each; one that fails is named and the others
go on. One line sums up, and one is printed for each that fails or differs; `--out` writes that as JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from support import harness

from precast.ir.artifact import Bundle

TARGET = "sm_90"
IN_BFLOAT16 = (
    "cohere2", "ernie4_5_moe", "falcon_h1", "gemma3_text", "glm4_moe", "gpt2", "granite", "llama", "mamba2", "mixtral",
    "olmo2", "qwen3_5_text", "qwen3_moe", "qwen3_next", "starcoder2",
)  # fmt: skip
PROMPTS = ([5, 9, 70, 33, 12, 88, 3], [17], [(7 * i) % 120 + 3 for i in range(40)], [99, 4, 4, 120, 56, 31, 8, 77])
MAX_TOKENS = 20
STEP = {"max_num_seqs": 8, "max_num_tokens": 32}
"""Sizes of a step: fewer tokens than the longest prompt has, so that it is computed in parts."""
AT_ONCE = {"driver": 5, "torch": 12}
"""Types that one process serves."""
SECONDS = 60.0
"""That a process may take, and as much again for each ten of its types."""


# --- on any machine: bundles ----------------------------------------------------------------------------------------


def build_all(folder: Path, wanted: Sequence[str], *, only_missing: bool) -> None:
    """Bundles, checkpoints' answers, and what stands in the way of types that have none."""
    import multiprocessing

    sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))
    from models_page import PAGE, green_types

    import precast.builder.build
    import precast.loader.torch_load  # noqa: F401

    folder.mkdir(parents=True, exist_ok=True)
    green = green_types(PAGE.read_text(encoding="utf-8"))
    context = multiprocessing.get_context("fork")
    for dtype, types in (("float32", green), ("bfloat16", IN_BFLOAT16)):
        for name in types:
            is_there = (folder / f"{name}-{dtype}.json").exists()
            if (not wanted or name in wanted) and not (only_missing and is_there):
                process = context.Process(target=build, args=(folder, name, dtype))
                process.start()
                process.join()
                if process.exitcode:
                    (folder / f"{name}-{dtype}.json").write_text(json.dumps({"uncovered": ["it can't be built"]}))
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and "snapshots" not in file.parts)
    print(f"{len(list(folder.glob('*.bundle')))} bundles, {size / 2**20:.1f} MiB beside snapshots", flush=True)


def build(folder: Path, name: str, dtype: str) -> None:
    """The bundle with its native layer, in a process of its own."""
    import torch
    from model_sweep import config_of

    import precast
    from precast.builder.source.shrink import random_model, shrink
    from precast.kernels.use import GPU
    from precast.loader.driver.coverage import uncovered
    from precast.loader.placement import Placement, bind_world
    from precast.loader.sizing import EngineLimits
    from precast.loader.torch_device import CpuDevice

    began, place = time.perf_counter(), folder / f"{name}-{dtype}"
    torch.set_num_threads(1)
    source = folder / "snapshots" / "configs" / name
    if not (source / "config.json").exists():
        model = random_model(shrink(config_of(name)))
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(source)
    kept: dict[str, Any] = {"dtype": dtype, "snapshots": folder / "snapshots"}
    plain = precast.build(source, folder / "snapshots" / "plain.bundle", **kept)
    graph = bind_world(plain.graph, Placement(0, 1, 1, CpuDevice()))
    found = uncovered(graph, GPU, EngineLimits(256, 8192, plain.manifest.model.max_seq_len))
    answers: dict[str, Any] = {"uncovered": found}
    if not found:
        bundle = precast.build(source, place.with_suffix(".bundle"), targets=[TARGET], **kept)
        if dtype == "float32":
            checkpoint = folder / "snapshots" / "weights" / name
            write_weights(bundle, checkpoint)
            answers["cpu"] = _answers(bundle, checkpoint, device="cpu")["greedy"]
    place.with_suffix(".json").write_text(json.dumps(answers))
    print(f"{name} {dtype}: {'; '.join(found) or 'built'}, {time.perf_counter() - began:.0f} s", flush=True)


def write_weights(bundle: Bundle, folder: Path) -> None:
    """What the bundle reads of a checkpoint, random, and the same on every machine: as `random_model` draws it."""
    import numpy as np

    from precast.ir.weights import recipes

    reads = {read.tensor: read for param in bundle.graph.params for read in recipes.each_leaf(param.recipe)}
    header: dict[str, Any] = {}
    at, parts = 0, []
    for name, read in reads.items():
        shape = tuple(int(size) for size in read.shape)
        count, is_vector = math.prod(shape), len(shape) == 1
        if read.dtype == "int64":  # a table of experts by token: as many others for each token
            parts.append((np.add.outer(np.arange(shape[0]), np.arange(shape[1])) % shape[1]).astype("<i8").ravel())
            header[name] = {"dtype": "I64", "shape": list(shape), "data_offsets": [at, at := at + 8 * count]}
            continue
        centre = -1.0 if name.endswith("A_log") else 1.0 if is_vector and name.endswith("weight") else 0.0
        drawn = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(count, dtype=np.float32)
        # on a grid, so that a bit of rounding on some machine changes nothing
        parts.append((np.round((centre + (0.3 if is_vector else 0.15) * drawn) * 512) / 512).astype("<f4"))
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, at := at + 4 * count]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for part in parts:
            file.write(part.tobytes())


# --- a process that serves --------------------------------------------------------------------------------------------


class _Blocked:
    """Refuses imports of torch and Triton."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] in ("torch", "triton"):
            raise ImportError(f"{name} is blocked")


def serve(backend: str) -> None:
    """Serves the bundles that standard input names, a line for each; the first that fails is the last."""
    if backend == "driver":
        sys.meta_path.insert(0, _Blocked())  # type: ignore[arg-type]
    for job in json.load(sys.stdin):
        bundle = Bundle.open(job["bundle"])
        options = {"device": "cuda", "backend": backend, "native": bundle.digest, "cache_bytes": 32 << 20}
        try:
            began = time.perf_counter()
            found = {"off": _answers(bundle, job["weights"], capture="off", **options)}
            if backend == "driver":
                found["before"] = _answers(bundle, job["weights"], capture="before", **options)
                found["imported"] = sorted({"torch", "triton"} & set(sys.modules))
            found["seconds"] = round(time.perf_counter() - began, 2)
        except BaseException as error:  # noqa: BLE001 - whatever goes wrong is this type's result
            print(json.dumps({"failed": f"{type(error).__name__}: {error}"[:1500]}), flush=True)
            break
        print(json.dumps(found), flush=True)


def _answers(bundle: Bundle, weights: str | Path, **options: Any) -> dict[str, Any]:
    """Greedy and drawn tokens of all prompts."""
    import precast

    engine = precast.load(bundle, weights=weights, reuse_prefixes=False, allow_config_mismatch=True, **STEP, **options)
    greedy = precast.SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    drawn = precast.SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, temperature=0.8, top_k=20, top_p=0.9, seed=3)
    with engine:
        found: dict[str, Any] = {
            kind: [list(out.token_ids) for out in engine.generate(PROMPTS, params)]
            for kind, params in (("greedy", greedy), ("drawn", drawn))
        }
        found["captured_steps"], found["compilations"] = engine.stats.captured_steps, engine.stats.compilations
    return found


# --- the check --------------------------------------------------------------------------------------------------------


def check_all(folder: Path, wanted: Sequence[str], checkpoints: Path, processes: int) -> dict[str, Any]:
    """What each type's processes said, by its name and dtype."""
    names = sorted(file.stem for file in folder.glob("*.bundle"))
    names = [name for name in names if not wanted or name.rpartition("-")[0] in wanted]
    with ThreadPoolExecutor(processes) as pool:
        bundles = [Bundle.open(folder / f"{name}.bundle") for name in names]
        list(pool.map(lambda bundle, name: write_weights(bundle, checkpoints / name), bundles, names))
        shares = [
            (backend, names[first : first + count])
            for backend, count in AT_ONCE.items()
            for first in range(0, len(names), count)
        ]
        parts = list(pool.map(lambda share: _served(*share, folder, checkpoints), shares))
    found: dict[str, Any] = {name: {"built": json.loads((folder / f"{name}.json").read_text())} for name in names}
    for (backend, _), part in zip(shares, parts, strict=True):
        for name, said in part.items():
            found[name][backend] = said
    for each in found.values():
        each["found"] = verdict(each)
    return found


def _served(backend: str, names: Sequence[str], folder: Path, checkpoints: Path) -> dict[str, Any]:
    """What processes say of these; one begins anew behind each that fails."""
    found: dict[str, Any] = {}
    while left := [name for name in names if name not in found]:
        jobs = [{"bundle": str(folder / f"{name}.bundle"), "weights": str(checkpoints / name)} for name in left]
        command = [sys.executable, __file__, "--serve", backend]
        try:
            run = subprocess.run(
                command, input=json.dumps(jobs), text=True, capture_output=True, check=False,
                timeout=SECONDS * (1 + len(jobs) / 10),
            )  # fmt: skip
            said, why = run.stdout, f"the process ended with {run.returncode}: {run.stderr.strip()[-1500:]}"
        except subprocess.TimeoutExpired as error:
            said = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
            why = "it took too long"
        lines = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
        found |= dict(zip(left, lines, strict=False))
        if len(lines) < len(left) and not any("failed" in line for line in lines):
            found[left[len(lines)]] = {"failed": why}
    return found


def verdict(said: Mapping[str, Any]) -> list[str]:
    """What is wrong with a type: nothing, if all answers are the same."""
    wrong = [f"{each} failed: {said[each]['failed']}" for each in AT_ONCE if "failed" in said[each]]
    if "failed" in said["driver"]:
        return wrong
    driver = said["driver"]
    if driver["imported"]:
        wrong.append(f"the driver imported {driver['imported']}")
    rivals = {"captured steps": (driver["before"], ("greedy", "drawn"))}
    if "failed" not in said["torch"]:
        rivals["torch"] = said["torch"]["off"], ("greedy", "drawn")
    if "cpu" in said["built"]:
        rivals["torch on a CPU"] = {"greedy": said["built"]["cpu"]}, ("greedy",)
    for rival, (answers, kinds) in rivals.items():
        for kind in kinds:
            same = [_same(one, other) for one, other in zip(driver["off"][kind], answers[kind], strict=True)]
            if any(count < MAX_TOKENS for count in same):
                wrong.append(f"not {rival}'s {kind} tokens: the first {same} of {MAX_TOKENS} are")
    return wrong


def _same(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens are equal, up to the first that isn't."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def figures(found: Mapping[str, Any]) -> dict[str, Any]:
    """Of each dtype how many types give equal tokens, and what is wrong with the others."""
    made = {}
    for dtype in ("float32", "bfloat16"):
        of = {name.rpartition("-")[0]: each["found"] for name, each in found.items() if name.endswith(dtype)}
        others = {name: wrong for name, wrong in of.items() if wrong}
        made[dtype] = {"types": len(of), "equal_tokens": len(of) - len(others), "others": others}
    return made


def summary(found: Mapping[str, Any], seconds: float) -> Iterator[str]:
    """A line for each that isn't whole, and one for all."""
    for name, each in found.items():
        yield from (f"{name}: {why}" for why in each["found"])
    sums = []
    for dtype, of in figures(found).items():
        failed = sum(any("failed" in why for why in wrong) for wrong in of["others"].values())
        sums.append(f"{dtype}: {of['equal_tokens']} of {of['types']} give equal tokens, {failed} failed")
    yield f"{'; '.join(sums)}; {seconds:.0f} s"


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", type=Path)
    parser.add_argument("--missing", action="store_true", help="build those alone that have not been built")
    parser.add_argument("--bundles", type=Path)
    parser.add_argument("--serve", choices=AT_ONCE)
    parser.add_argument("--checkpoints", type=Path, default=Path("/dev/shm/precast-families"))
    parser.add_argument("--processes", type=int, default=10)
    parser.add_argument("--out", type=Path)
    parser.add_argument("types", nargs="*")
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve)
    elif arguments.build:
        build_all(arguments.build, arguments.types, only_missing=arguments.missing)
    else:
        began = time.perf_counter()
        found = check_all(arguments.bundles, arguments.types, arguments.checkpoints, arguments.processes)
        if arguments.out:
            made = {"claim": "gpu_driver_families", "machine": harness.machine_by_itself(), "figures": figures(found)}
            arguments.out.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
        print("\n".join(summary(found, time.perf_counter() - began)), flush=True)


if __name__ == "__main__":
    main()
