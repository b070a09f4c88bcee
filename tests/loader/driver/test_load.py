"""A load by the driver backend on a GPU by hand: what it makes ready when, what it asks for, and how it ends."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import itertools
import random
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from cublaslt_by_hand import CublasLt
from driver_by_hand import CudaDriver
from graph_text import parse_graph
from recipe_cases import params_graph, read
from safetensors.torch import save_file

from precast.builder.build import build
from precast.ir.artifact import Bundle
from precast.ir.errors import TargetError, WeightsError
from precast.ir.graph.schema import Cast
from precast.ir.graph.world import unsharded
from precast.ir.manifest import Checkpoint
from precast.ir.memory import caches
from precast.ir.native import NativeKernel, NativeLayer, NativeParam
from precast.ir.weights.checkpoint import CheckpointFiles
from precast.ir.weights.sources import LocalFolder
from precast.kernels.linear import cublaslt
from precast.kernels.step_launches import drawing_launches, known_ids_launches
from precast.kernels.use import GPU
from precast.loader.driver import library, param_plan, ready, weights
from precast.loader.driver.context import Begun, begin
from precast.loader.driver.coverage import covered
from precast.loader.driver.load import load_with_driver
from precast.loader.driver.model import logits_type
from precast.loader.driver.runner import DriverRunner
from precast.loader.driver.unfit import UnfitError
from precast.loader.engine.engine import Engine
from precast.loader.engine.params import SamplingParams
from precast.loader.options import Capture, LoadOptions
from precast.loader.timeline import Timeline

MAX_TOKENS, MAX_SEQS = 64, 4
LONG = 300.0
"""Seconds after which a test gives up on what it waits for."""
GIVES_BACK = ("Free", "Destroy", "Unload", "Ctx", "ErrorName")
"""In the names of calls that give something back, and of those that these take."""
NO_KERNELS = NativeLayer("sm_90", 12000, {}, {}, (), {})
SMALL = 4 << 20
"""Bytes of all that a start of so small a model holds beside the ring and the weights."""


SM_90 = GPU._replace(capability=(9, 0))


class Model(NamedTuple):
    """A bundle with its checkpoint, and a layer that has a kernel for each of its launches."""

    bundle: Bundle
    checkpoint: Path
    layer: NativeLayer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=128, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    bundle = build(config, folder / "llama.bundle", dtype="float16")
    tensors = LlamaForCausalLM(config).half().state_dict()
    (folder / "checkpoint").mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "checkpoint/model.safetensors")
    return Model(bundle, folder / "checkpoint", layer_of(bundle))


def layer_of(bundle: Bundle) -> NativeLayer:
    """A layer whose kernels take whatever launches of the bundle give them."""
    graph = unsharded(bundle.graph)
    graph = msgspec.structs.replace(graph, caches=caches.with_slabs(graph.caches))
    limits = options_of(bundle, Path()).limits(bundle.manifest.model.max_seq_len)
    target = SM_90
    program, _ = covered(graph, target, limits)
    launches = list(program.launches())
    for count in range(1, MAX_TOKENS + 1):
        launches += [(each.launch, each.key) for each in known_ids_launches(target, count)]
    for count in range(1, MAX_SEQS + 1):
        drawing = drawing_launches(logits_type(graph), target, count, captured=True)
        launches += [(each.launch, each.key) for each in drawing]
    image = b"\x7fELF"
    digest = hashlib.sha256(image).hexdigest()
    kernels = {}
    for launch, key in launches:
        if not launch.library:
            params = tuple(NativeParam("pointer", i) for i in range(len(launch.args)))
            kernels[key] = NativeKernel(launch.kernel, key, digest, "kernel", 128, 0, params)
    return NativeLayer("sm_90", 12000, {}, {}, tuple(kernels.values()), {digest: image})


def options_of(bundle: Bundle, checkpoint: Path) -> LoadOptions:
    return LoadOptions(bundle, checkpoint, "cuda", MAX_SEQS, MAX_TOKENS, None, 1 << 20, True, True, None, None)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaDriver]:
    made = CudaDriver()
    lt = CublasLt(7)
    monkeypatch.setattr(library, "function", made.function)
    monkeypatch.setattr(cublaslt, "_library", lambda: lt)
    monkeypatch.setattr(cublaslt, "_handle_here", lambda: ctypes.c_void_p(1))
    monkeypatch.setattr(cublaslt, "is_installed", lambda: True)
    yield made
    threads_end()
    gc.collect()
    assert made.held == {"device": 0, "pinned": 0}, "memory that a load took is given back"


def threads_end() -> None:
    """Wait for the threads of a load that has failed, which nobody else waits for: one may be about to give back."""
    for thread in threading.enumerate():
        if thread.name.startswith(("precast-context", "precast-pinning", "precast-unpinning", "precast-libraries")):
            thread.join(LONG)


def loaded(model: Model, timeline: Timeline | None = None, capture: Capture | None = None) -> Engine:
    options = options_of(model.bundle, model.checkpoint)._replace(capture=capture)
    return load_with_driver(options, timeline or Timeline(), begin("cuda"), layer=model.layer)


def test_a_first_step_has_run_before_the_weights_are_there(model: Model, driver: CudaDriver) -> None:
    """No byte of the checkpoint reaches the GPU until the largest launches of a step were made."""
    warm, waited = threading.Event(), []

    def before(name: str, *args: Any) -> None:
        if name == "cuLaunchKernelEx":
            warm.set()
        elif name == "cuMemcpyAsync" and driver.address_of(args[1])[0] == "pinned" and args[2] > SMALL // 64:
            waited.append(warm.wait(LONG if all(waited) else 0))

    driver.before = before
    timeline = Timeline()
    engine = loaded(model, timeline)
    compiled = driver.calls["cuModuleLoadData"]
    engine.generate([[3, 5, 7]], SamplingParams(max_tokens=1, ignore_eos=True))

    assert waited
    assert all(waited)
    assert driver.calls["cuModuleLoadData"] == compiled, "the first step loads no kernel"
    names = [phase.name for phase in timeline.phases]
    assert names == ["bundle", "imports", "context", "weights", "launches", "pools", "warm-up", "first token"]
    assert sys.getswitchinterval() == pytest.approx(0.005)
    engine.close()


def test_that_step_is_over_once_the_weights_are_there(
    model: Model, driver: CudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, over = threading.Event(), []

    def warm_up(runner: DriverRunner, num_tokens: int, is_over: Callable[[], bool]) -> None:
        over.extend((is_over(), is_over))
        asked.set()

    def before(name: str, *args: Any) -> None:
        if name == "cuMemcpyAsync" and driver.address_of(args[1])[0] == "pinned" and args[2] > SMALL // 64:
            asked.wait(LONG)

    driver.before = before
    monkeypatch.setattr(DriverRunner, "warm_up", warm_up)
    engine = loaded(model)
    assert over[0] is False
    assert over[1]() is True
    engine.close()


@pytest.mark.parametrize("answers", [[True], [False, True], [False, False, False, True]], ids=len)
def test_it_ends_between_two_launches(
    answers: list[bool], model: Model, driver: CudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks before it begins and after each launch, of which the first ones are kernels."""
    warm_up, left, launched = DriverRunner.warm_up, iter(answers), []

    def counted(runner: DriverRunner, num_tokens: int, is_over: Callable[[], bool]) -> None:
        before = driver.calls["cuLaunchKernelEx"]
        warm_up(runner, num_tokens, lambda: next(left))
        launched.append(driver.calls["cuLaunchKernelEx"] - before)

    monkeypatch.setattr(DriverRunner, "warm_up", counted)
    engine = loaded(model)
    assert launched == [len(answers) - 1]
    engine.close()


def engine_over(model: Model, layer: NativeLayer, *, are_there: bool) -> Engine:
    """An engine over params whose bytes have come, or not, when all else is ready."""
    options = options_of(model.bundle, model.checkpoint)
    device = begin("cuda").result().device
    graph = ready.checked(unsharded(model.bundle.graph), options, model.bundle)
    what = param_plan.planned(graph, model.bundle.manifest.checkpoint, CheckpointFiles.open(model.checkpoint))
    params = weights.placed(what, graph, device).buffers
    runner = ready.runner_ready(options, Timeline(), model.bundle, graph, layer, params, device, lambda: are_there)
    return ready.engine_of(runner, options, Timeline(), model.bundle)


def test_kernels_are_looked_up_while_there_is_time_and_else_after_the_first_token(
    model: Model, driver: CudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DriverRunner, "warm_up", lambda *_: None)
    (ids,) = known_ids_launches(SM_90, 1)
    of_one = {ids.key: (ids.launch.args.index("T"),)}  # this kernel takes steps of one token alone
    kernels = tuple(
        msgspec.structs.replace(kernel, ones=of_one.get(kernel.key, kernel.ones)) for kernel in model.layer.kernels
    )
    less, one = msgspec.structs.replace(model.layer, kernels=kernels), SamplingParams(max_tokens=1, ignore_eos=True)

    with pytest.raises(TargetError, match=r"no kernel for some steps, of precast\.kernels\."):
        engine_over(model, less, are_there=False)
    engine = engine_over(model, less, are_there=True)
    assert len(engine.generate([[3]], one)[0].token_ids) == 1
    for _ in range(2):
        with pytest.raises(TargetError, match=r"no kernel for some steps, of precast\.kernels\."):
            engine.generate([[3]], one)
    engine.close()


def test_a_token_of_a_prompt_in_chunks_waits_no_longer(
    model: Model, driver: CudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DriverRunner, "warm_up", lambda *_: None)
    engine, looked_up = engine_over(model, model.layer, are_there=True), []
    engine._runner.unchecked = (looked_up.append(True) for _ in range(1))  # type: ignore[attr-defined]
    tokens = engine.stream([3] * (MAX_TOKENS + 1), SamplingParams(max_tokens=4, ignore_eos=True))
    next(tokens)
    assert not looked_up
    assert len(list(tokens)) == 3
    assert looked_up
    engine.close()


def test_the_first_token_waits_for_no_capture(model: Model, driver: CudaDriver) -> None:
    engine = loaded(model)
    tokens = engine.stream([3, 5, 7], SamplingParams(max_tokens=8, ignore_eos=True))
    next(tokens)
    assert driver.calls["cuStreamBeginCapture_v2"] == 0
    assert len(list(tokens)) == 7
    assert driver.calls["cuStreamBeginCapture_v2"] > 0
    engine.close()


def test_what_a_load_asks_the_host_for(model: Model, driver: CudaDriver) -> None:
    tracemalloc.start()
    try:
        engine = loaded(model)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    ring = weights.THREADS * weights.BUFFER_BYTES
    assert ring <= driver.most["pinned"] <= ring + SMALL
    assert driver.held["pinned"] >= ring, "the first token doesn't wait until the ring is given back"
    assert peak < 32 << 20, "and Python's own objects are few"
    assert ring + SMALL + peak < 1 << 28, "far below a GiB, with what the driver itself takes"
    engine.generate([[3, 5, 7]], SamplingParams(max_tokens=4, ignore_eos=True))
    threads_end()
    assert driver.held["pinned"] < SMALL, "the ring is given back"
    engine.close()


def test_a_ring_is_given_back_before_steps_are_captured(model: Model, driver: CudaDriver) -> None:
    engine = loaded(model, capture="before")
    threads_end()
    assert driver.held["pinned"] < SMALL
    engine.close()


@pytest.mark.parametrize("is_pinned", [True, False])
def test_pinned_memory_is_that_of_the_process_or_else_the_driver_s(
    is_pinned: bool, model: Model, driver: CudaDriver
) -> None:
    """Its pages are taken of the system before there is a context."""
    driver.before = lambda name, *_: 801 if name == "cuMemHostRegister_v2" and not is_pinned else None
    begun: Future[Begun] = Future()
    ring = weights.Ring(begun)
    begun.set_result(begin("cuda").result())

    parts = ring.parts()

    assert len(parts) == weights.THREADS
    assert {each.shape for each in parts} == {(weights.BUFFER_BYTES,)}
    assert driver.calls["cuMemHostAlloc"] == (not is_pinned)
    assert driver.held["pinned"] == weights.THREADS * weights.BUFFER_BYTES
    for i, each in enumerate(parts):
        ctypes.memset(each.pointer, i, weights.BUFFER_BYTES)
    assert [ctypes.string_at(each.pointer + weights.BUFFER_BYTES - 1, 1)[0] for each in parts] == list(range(12))


@pytest.mark.parametrize(("buffers", "num_threads"), [(5, 3), (1, 1)])
def test_a_host_that_pins_little(buffers: int, num_threads: int, model: Model, driver: CudaDriver) -> None:
    driver.limits["pinned"] = buffers * weights.BUFFER_BYTES + SMALL
    timeline = Timeline()
    engine = loaded(model, timeline)
    (phase,) = (phase for phase in timeline.phases if phase.name == "weights")
    assert phase.note == f"the host pins no more than {num_threads} of {weights.THREADS} buffers"
    engine.close()


def test_a_host_that_pins_nothing(model: Model, driver: CudaDriver) -> None:
    driver.limits["pinned"] = weights.BUFFER_BYTES - 1
    with pytest.raises(TargetError, match="pins not even 16 MiB") as error:
        loaded(model)
    assert error.value.code == "host-memory"
    assert "ulimit -l" in str(error.value)


def truncated(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size - 1000)


def touched(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.seek(-10, 2)
        opened.write(b"1234567890")


@pytest.mark.parametrize("change", [truncated, touched], ids=["truncated", "changed"])
def test_a_checkpoint_that_changes_while_it_is_read(
    change: Callable[[Path], None], model: Model, driver: CudaDriver, tmp_path: Path
) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes((model.checkpoint / file.name).read_bytes())
    once = iter([change])

    def before(name: str, *args: Any) -> None:
        if name == "cuMemsetD8Async" and driver.address_of(args[0])[0] == "device":  # headers were read
            for each in once:
                each(file)

    driver.before = before
    with pytest.raises(WeightsError, match="changed while it was read") as error:
        loaded(model._replace(checkpoint=tmp_path))
    assert error.value.code == "checkpoint-changed"
    assert str(file) in str(error.value)


def test_a_model_that_turns_out_unfit_ends_the_reads(
    model: Model, driver: CudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread reads a part of a quarter of a megabyte, and is not done with it until the reads are ended."""
    monkeypatch.setattr(weights, "THREADS", 1)
    for module in (param_plan, weights):
        monkeypatch.setattr(module, "BUFFER_BYTES", 1 << 18)
    stop, stopped, stops = LocalFolder.stop, threading.Event(), []

    def stopping(folder: LocalFolder) -> None:
        stops.append(folder)
        stop(folder)
        stopped.set()

    def before(name: str, *args: Any) -> None:
        if name == "cuMemcpyAsync" and driver.address_of(args[1])[0] == "pinned":
            stopped.wait(LONG)
            stopped.set()

    monkeypatch.setattr(LocalFolder, "stop", stopping)
    driver.before = before
    lacking = msgspec.structs.replace(model.layer, kernels=model.layer.kernels[1:])
    with pytest.raises(UnfitError, match="the native layer lacks precast") as error:
        loaded(model._replace(layer=lacking))
    assert error.value.opened is model.bundle
    assert stops
    assert driver.calls["cuEventSynchronize"] <= 2, "each part begins with one"


def test_without_the_library_of_products_it_is_named(
    model: Model, driver: CudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cublaslt, "is_installed", lambda: False)
    with pytest.raises(UnfitError, match=r"libcublasLt.*is not installed: pip install nvidia-cublas"):
        loaded(model)


def failing(count: int, *, interrupts: bool) -> Callable[..., int | None]:
    """After so many calls one fails; or, where it is the main thread's, is interrupted."""
    left = itertools.count(count, -1)

    def before(name: str, *args: Any) -> int | None:
        if any(each in name for each in GIVES_BACK) or next(left):
            return None
        if interrupts and threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        return 999

    return before


def test_whatever_call_fails_or_is_interrupted(model: Model, driver: CudaDriver) -> None:
    """Any of the driver's calls, by whatever thread it is made: the load ends with that, and holds nothing."""
    loaded(model).close()
    gc.collect()
    gc.freeze()  # what other tests left: to look through it after each load takes a second
    moments, total, ended = random.Random(0), driver.calls.total(), 0
    for _ in range(40):
        driver.before = failing(moments.randrange(total), interrupts=moments.random() < 0.5)
        try:
            loaded(model).close()
        except (KeyboardInterrupt, library.DriverError, TargetError):
            ended += 1
        driver.before = lambda name, *args: None
        threads_end()
        gc.collect()
        assert driver.held == {"device": 0, "pinned": 0}
        assert sys.getswitchinterval() == pytest.approx(0.005)
    assert ended > 10


def test_params_that_are_converted(model: Model, driver: CudaDriver, tmp_path: Path) -> None:
    """A checkpoint in float32 for a bundle in float16: all of it is made on the host."""
    from safetensors.torch import load_file

    tensors = load_file(model.checkpoint / "model.safetensors")
    save_file({name: tensor.float() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    files = CheckpointFiles.open(tmp_path)
    graph = unsharded(model.bundle.graph)
    context = begin("cuda")
    device = context.result().device
    what = param_plan.planned(graph, model.bundle.manifest.checkpoint, files)
    params = weights.placed(what, graph, device)
    weights.stream(what, params, weights.Ring(context), device, NO_KERNELS)

    found = {
        name: ctypes.string_at(buffer.pointer, 2 * tensors[name].numel())
        for name, buffer in params.buffers.items()
        if name in tensors
    }
    assert found
    assert found == {name: tensors[name].contiguous().view(torch.uint8).numpy().tobytes() for name in found}


def test_of_params_that_are_made_on_the_host_few_are_there_at_once(
    driver: CudaDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "THREADS", 1)
    for module in (param_plan, weights):
        monkeypatch.setattr(module, "BUFFER_BYTES", 1 << 18)
    tensors = {f"w{i}": torch.randn(512, 512) for i in range(16)}  # 1 MiB each, and half of it on the device
    save_file(tensors, tmp_path / "model.safetensors")
    graph = params_graph({name: Cast(read(name, tensors), "float16") for name in tensors}, tensors)
    context = begin("cuda")
    device = context.result().device
    what = param_plan.planned(graph, Checkpoint(), CheckpointFiles.open(tmp_path))
    params = weights.placed(what, graph, device)
    ring = weights.Ring(context)
    tracemalloc.start()
    try:
        weights.stream(what, params, ring, device, NO_KERNELS)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 3 << 20
    for name, tensor in tensors.items():
        found = ctypes.string_at(params.buffers[name].pointer, 2 * tensor.numel())
        assert found == tensor.half().view(torch.uint8).numpy().tobytes()


QUANTISED = """
inputs { %x: float32[1, T, 8] } symbols { T: 1.. }
params {
  %w: float8_e4m3fn[6, 8] = read("w", [6, 8], float8_e4m3fn)
  %s: float32[6, 1] = SCALES
}
main { %y = precast.quantised_linear(input=%x, weight=%w, scales=%s, format="fp8", block=[1, 8]) return y=%y }
"""


@pytest.mark.parametrize("scales", ['read("s", [6, 1], float32)', 'repeat(read("s", [1, 1], float32), dim=0, count=6)'])
@pytest.mark.parametrize("value", [1.5, torch.nan, -torch.inf])
def test_what_is_quantised_goes_to_the_device_as_it_is(
    scales: str, value: float, driver: CudaDriver, tmp_path: Path
) -> None:
    """Scales are looked at on their way, straight to the device or by a tensor on the host."""
    tensors = {"w": torch.randn(6, 8).to(torch.float8_e4m3fn), "s": torch.full((1, 1), value)}
    if "repeat" not in scales:
        tensors["s"] = tensors["s"].repeat(6, 1)
    save_file(tensors, tmp_path / "model.safetensors")
    graph = parse_graph(QUANTISED.replace("SCALES", scales))
    context = begin("cuda")
    device = context.result().device
    what = param_plan.planned(graph, Checkpoint(), CheckpointFiles.open(tmp_path))
    params = weights.placed(what, graph, device)

    assert param_plan.uncovered(what) == ""
    message = ""
    try:
        weights.stream(what, params, weights.Ring(context), device, NO_KERNELS)
    except WeightsError as error:
        message = str(error)
    if value == 1.5:
        assert ctypes.string_at(params.buffers["w"].pointer, 48) == tensors["w"].view(torch.uint8).numpy().tobytes()
        assert ctypes.string_at(params.buffers["s"].pointer, 24) == torch.full((6, 1), value).numpy().tobytes()
    assert (f"s: the scale at [0, 0] is {value}, expected a finite number" in message) == (value != 1.5)
