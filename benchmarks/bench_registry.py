"""Claim: a bundle goes to a registry and back in about the time that plain sockets take for the same bytes.

The bundle of the Llama-3.1-8B shape with two native layers of 3 MB, of random bytes in the place of kernels, goes to a
registry on this machine and comes back into an empty store: docker-registry where it is on the PATH or in
`$PRECAST_TEST_TOOLS`, else the one of the tests. Beside it, in the same run: plain sockets over as many connections,
which ask and check nothing, and `oras cp` in a process of its own. And: how much memory a layer of 1 GB takes, how
much of 200 bundles that differ in the names of tensors alone a store holds twice, what that would be were the names in
a layer of their own, and what a pull of what the store has costs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import zstandard
from support import harness, plain_registry, shapes

from precast.ir.native import NativeKernel, NativeLayer

RUNS = 25
LAYER_BYTES = 3_000_000
LARGE_BYTES = 1_000_000_000
BUNDLES = 200
SHAPES = ("llama-3.1-8b", "qwen3-30b-a3b-half")
"""Of the bundles whose names are counted."""
PATH = os.pathsep.join(filter(None, (os.environ.get("PRECAST_TEST_TOOLS"), os.environ.get("PATH"))))

MOVE_LARGE = """
import json, sys
from pathlib import Path
from precast.ir.bundle.oci import Descriptor
from precast.registry.client import Repository
from precast.registry.pull import fetch_blob
from precast.registry.push import Blob, upload_all
from precast.registry.reference import Reference
from precast.registry.store import Store
import urllib3
way, host, digest, size, place = sys.argv[1:]
repository = Repository(Reference.parse(f"{host}/bench/large"), writes=True)
def peak():  # of this process alone: what getrusage says may be its parent's
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
before = peak()
if way == "push":
    file = Path(place) / "large"
    states = upload_all(repository, [Blob(digest, int(size), lambda: file.open("rb", buffering=0))], [])
else:
    store = Store(Path(place) / "store")
    with store.writing():
        states = [fetch_blob(repository, store, Descriptor("x", digest, int(size)), lambda size: None)]
after = peak()
found = {"peak_mib": round(after / 1024, 1), "grown_mib": round((after - before) / 1024, 1)}
print(json.dumps({"states": states, **found}))
"""


@contextlib.contextmanager
def registry(folder: Path) -> Iterator[tuple[int, str]]:
    """The port of a registry, and which it is."""
    program = shutil.which("docker-registry", path=PATH)
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
    if program is None:
        from fake_registry import FakeRegistry

        with FakeRegistry() as fake:
            yield fake.port, "the registry of the tests, in Python, in this process"
        return
    from real_registries import docker_registry

    with docker_registry(program, folder) as host:
        version = subprocess.run([program, "--version"], capture_output=True, text=True).stdout.split()[-1]
        yield int(host.rpartition(":")[2]), f"docker-registry {version}"


def build(folder: Path) -> Path:
    """The 8B bundle with two native layers."""
    import precast
    from precast.ir.artifact import Bundle, write_bundle

    for shape in SHAPES:
        precast.build(shapes.write_config(shape, folder / f"{shape}-config"), folder / f"{shape}.bundle")
    opened = Bundle.open(folder / f"{SHAPES[0]}.bundle")
    manifest = msgspec.structs.replace(opened.manifest, blobs=())
    return write_bundle(
        folder / "b.bundle", manifest_without_blobs=manifest, graph=opened.graph, constants=opened.constants,
        files=opened.files("tokenizer"), provenance={}, native=[native_layer("sm_80"), native_layer("sm_90")],
    ).path  # fmt: skip


def native_layer(target: str) -> NativeLayer:
    """A layer of one kernel, whose image can't be packed."""
    module = "precast.kernels.rms_norm.triton"
    image = b"\x7fELF" + os.urandom(LAYER_BYTES - 4)
    digest = hashlib.sha256(image).hexdigest()
    kernel = NativeKernel(f"{module}:rms_norm_kernel", digest, digest, "rms_norm_kernel", 128, 0, ())
    return NativeLayer(target, 12000, {"triton": "3.7.1"}, {module: digest}, (kernel,), {digest: image})


def timed(runs: dict[str, Callable[[int], object]]) -> dict[str, float]:
    """Seconds of the best run of each: on a busy machine the others say what else it did. Taken in turn."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(RUNS):
        for name, run in runs.items():
            started = time.perf_counter()
            run(turn)
            times[name].append(time.perf_counter() - started)
    return {name: round(min(values), 4) for name, values in times.items()}


def copied(oras: str, *arguments: str) -> None:
    """Copy by oras, with what is attached."""
    subprocess.run([oras, "cp", "-r", *arguments], check=True, capture_output=True)


def transfers(port: int, bundle: Path, folder: Path) -> dict[str, object]:
    """Seconds of pushes into new repositories, and of pulls into empty stores and directories."""
    from precast.ir.artifact import Bundle
    from precast.ir.bundle import oci
    from precast.ir.bundle.layout import survey
    from precast.registry.pull import pull
    from precast.registry.push import push
    from precast.registry.store import Store

    host, found = f"127.0.0.1:{port}", survey(bundle)
    contents = {part.digest: bundle / oci.blob_path(part.digest) for part in found.parts}
    for extra in found.attached:
        contents |= {digest: bundle / oci.blob_path(digest) for digest in extra.blobs() if digest != extra.digest}
    blobs = [plain_registry.Blob(digest, file) for digest, file in contents.items()]
    manifests = [(found.descriptor.digest, found.image), *((x.digest, x.manifest) for x in found.attached)]
    opened = Bundle.open(bundle)  # once: how long that takes is a figure of its own
    push(opened, f"{host}/bench/pulled:v1")
    digest = found.descriptor.digest
    got = [plain_registry.Blob(blob.digest, folder / "got" / blob.digest) for blob in blobs]
    (folder / "got").mkdir()
    kept = Store(folder / "kept")
    pull(f"{host}/bench/pulled:v1", store=kept)
    runs: dict[str, Callable[[int], object]] = {
        "push": lambda turn: push(opened, f"{host}/bench/ours{turn}"),
        "push_again": lambda turn: push(opened, f"{host}/bench/ours{turn}"),
        "push_plain": lambda turn: plain_registry.push(port, f"bench/plain{turn}", blobs, manifests),
        "pull": lambda turn: pull(f"{host}/bench/pulled@{digest}", store=Store(folder / f"store{turn}")),
        "pull_plain": lambda turn: plain_registry.pull(port, "bench/pulled", digest, got),
        "pull_of_what_the_store_has_by_tag": lambda turn: pull(f"{host}/bench/pulled:v1", store=kept),
        "open_bundle": lambda turn: Bundle.open(bundle),
        "open_from_store": lambda turn: kept.open(digest),
    }
    if (oras := shutil.which("oras", path=PATH)) is not None:
        to, back = ("--from-oci-layout", "--to-plain-http"), ("--from-plain-http", "--to-oci-layout")
        runs["oras_push"] = lambda turn: copied(oras, *to, f"{bundle}:latest", f"{host}/bench/oras{turn}:v1")
        runs["oras_pull"] = lambda turn: copied(oras, *back, f"{host}/bench/pulled:v1", f"{folder}/oras{turn}:v1")
    seconds = timed(runs)
    return {
        "bytes": sum(file.stat().st_size for file in contents.values()),
        "seconds": seconds,
        "push_over_plain": round(seconds["push"] / seconds["push_plain"], 2),
        "pull_over_plain": round(seconds["pull"] / seconds["pull_plain"], 2),
    }


def large_layer(port: int, folder: Path) -> dict[str, object]:
    """The memory of processes that push and pull one blob of 1 GB."""
    file, digest, block = folder / "large", hashlib.sha256(), os.urandom(1_000_000)
    with file.open("wb") as target:
        for index in range(LARGE_BYTES // len(block)):
            piece = index.to_bytes(8, "big") + block[8:]
            digest.update(piece)
            target.write(piece)
    arguments = (f"127.0.0.1:{port}", f"sha256:{digest.hexdigest()}", str(LARGE_BYTES), str(folder))
    found = {}
    for way in ("push", "pull"):
        started = time.perf_counter()
        found[way] = harness.fresh_process(MOVE_LARGE, way, *arguments)
        found[way]["seconds"] = round(time.perf_counter() - started, 2)
    file.unlink()
    shutil.rmtree(folder / "store")
    return {"bytes": LARGE_BYTES, **found}


def shared(port: int, bundle: Path, folder: Path) -> dict[str, object]:
    """What a store takes for bundles that differ in the names of their checkpoint's tensors alone."""
    from precast.ir import encoding
    from precast.ir.artifact import Bundle, write_bundle
    from precast.ir.graph.schema import Graph
    from precast.registry.pull import pull
    from precast.registry.push import push
    from precast.registry.store import Store

    found = {}
    packed: dict[str, bytes] = {}
    encode, encoding.encode_native = encoding.encode_native, lambda layer: packed[layer.target]  # packed once
    for name, path in (("with_native_layers", bundle), ("without", folder / f"{SHAPES[0]}.bundle")):
        opened, store = Bundle.open(path), Store(folder / f"shared-{name}")
        encoded = msgspec.msgpack.encode(opened.graph)
        manifest = msgspec.structs.replace(opened.manifest, blobs=())
        layers = tuple(opened.native.values())
        packed |= {layer.target: encode(layer) for layer in layers}
        total = 0
        for index in range(BUNDLES):
            names = encoded.replace(b"model.layers.", b"model.w%05d." % index)  # as long as they were
            graph = msgspec.msgpack.decode(names, type=Graph)
            written = write_bundle(
                folder / "one.bundle", manifest_without_blobs=manifest, graph=graph, constants=opened.constants,
                files=opened.files("tokenizer"), provenance={}, native=layers,
            )  # fmt: skip
            total += sum(file.stat().st_size for file in (written.path / "blobs" / "sha256").iterdir())
            push(written.path, f"127.0.0.1:{port}/bench/{name}:v{index}")
            pull(f"127.0.0.1:{port}/bench/{name}:v{index}", store=store)
        taken = sum(file.stat().st_size for file in (store.path / "blobs" / "sha256").iterdir())
        found[name] = {
            "bundles": len(store.listing()), "bytes_of_all": total, "bytes_in_store": taken,
            "shared": round(1 - taken / total, 4),
        }  # fmt: skip
    encoding.encode_native = encode
    return found


def names_apart(path: Path) -> dict[str, float]:
    """What bundles that differ in names alone would share, if the recipes, which have the names, were a layer apart."""
    from precast.ir import encoding
    from precast.ir.artifact import Bundle
    from precast.ir.bundle import codec
    from precast.ir.graph.schema import Read

    opened = Bundle.open(path)
    nameless = tuple(msgspec.structs.replace(param, recipe=Read("", ())) for param in opened.graph.params)
    graph = len(encoding.encode_graph(opened.graph))
    structure = len(encoding.encode_graph(msgspec.structs.replace(opened.graph, params=nameless)))
    recipes = msgspec.msgpack.encode([param.recipe for param in opened.graph.params], order="sorted")
    names = len(zstandard.ZstdCompressor(level=codec.ZSTD_LEVEL).compress(recipes))
    descriptor = 170 + 115  # of one more layer: in the image manifest, and in the manifest
    whole = sum(file.stat().st_size for file in (path / "blobs" / "sha256").iterdir())
    total = whole - graph + structure + names + descriptor
    constants = next(layer.size for layer in opened.layers if layer.name == "constants")
    return {
        "bytes": whole, "graph": graph, "graph_without_recipes": structure, "recipes": names,
        "shared": round((structure + constants) / total, 4),
    }  # fmt: skip


def main() -> None:
    """All figures."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bundle = build(folder)
        with registry(folder) as (port, kind):
            figures = {
                "registry": kind,
                "transfers": transfers(port, bundle, folder),
                "large_layer": large_layer(port, folder),
                "shared": shared(port, bundle, folder),
                "names_apart": {shape: names_apart(folder / f"{shape}.bundle") for shape in SHAPES},
                "goals": {"over_plain": 1.5, "peak_mib": 64, "shared": 0.8},
                "runs": RUNS,
            }
    harness.write(harness.RESULTS / "registry.json", "registry", json.loads(json.dumps(figures)))


if __name__ == "__main__":
    main()
