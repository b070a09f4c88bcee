"""`precast.load`: from a bundle and a checkpoint to an engine. Here a backend is chosen, before it is imported.

No torch: `precast.loader.torch_load` loads with it, `precast.loader.driver.load` without. And nothing that takes a
while: a GPU's context, which takes longest, is begun first.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from precast.ir.errors import RequestError, TargetError, shown_value
from precast.loader.options import Backend, Capture, LoadOptions

if TYPE_CHECKING:
    from concurrent.futures import Future

    import torch

    from precast.ir.artifact import Bundle
    from precast.ir.bundle.trust import Trust
    from precast.kernels.measured import Table
    from precast.loader.driver.context import Begun
    from precast.loader.engine.engine import Engine
    from precast.loader.timeline import Timeline
    from precast.loader.world.processes import Processes


def load(
    bundle: str | Path | Bundle,
    *,
    weights: str | Path,
    device: str | torch.device | None = None,
    tp: int | None = None,
    ep: int = 1,
    pp: int = 1,
    dp: int = 1,
    max_num_seqs: int = 256,
    max_num_tokens: int = 8192,
    max_prefill_tokens: int | None = None,
    cache_bytes: int | None = None,
    reuse_prefixes: bool = True,
    allow_config_mismatch: bool = False,
    choices: str | Path | None = None,
    capture: Capture | None = None,
    backend: Backend | None = None,
    native: str | Sequence[str] = (),
    trust: Trust | str | os.PathLike[str] | None = None,
    weights_timeout: float = 30.0,
    world_port: int | None = None,
    timeouts: Mapping[str, float] | None = None,
    processes: Processes | None = None,
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

    `backend`: "torch", or "driver": the CUDA driver alone, for which neither torch nor Triton is imported. It runs
    models whose ops are all computed by kernels of the bundle's native layer, by cuBLASLt, or are views. None: the
    driver where it runs the model, else torch; `timeline` then says why.

    `choices`: a table of measured choices, as `precast bench kernels` writes it; None: the one that the bundle was
    sealed with on this machine, else the one that comes with Precast for the GPU, if there is one.

    `native`: digests, one or several, of native layers or of bundles whose native layers may be used: they are code.
    So may those that this user compiled on this machine, and those that a trust policy lets in: `trust` is the file of
    one, or rules of your own in place of all that; None: the user's and the system's policy (docs/trust.md). Where none
    is used, kernels are compiled as they are first launched; the timeline says which it is, and why (docs/native.md).
    A layer is for the numbers of ranks that it was built for; others find some of their kernels in it. Of several ranks
    all use it, each by the same rules, or none does.

    `tp`: so many ranks share each layer, each a process with a GPU of its own, and `ep`, which divides `tp`, says over
    how many groups of them experts are split. `pp`: the layers are divided over so many stages of `tp` ranks each, for
    a model that one host has no room for. `dp` as many as `tp`: each rank has sequences of its own, computes attention
    for these alone, and has caches for no other; `max_num_seqs`, `max_num_tokens` and `cache_bytes` are then those of
    each rank. This process is rank 0, and starts the others on this host; they end with the
    engine. Where a launcher such as `torchrun` has started all processes, each is its rank: on rank 0 this function
    returns the engine, on the others it raises SystemExit once that is closed. `tp` None: as many as the launcher has
    started for each stage, or 1. `world_port`: rank 0 listens there for the others; None: on a free port. `timeouts`:
    seconds, by the names of `precast.loader.world.timeouts.Timeouts`. `processes` for the other ranks, if the caller
    has started them beforehand. Ranks have torch, or the driver where `backend` asks for it.

    `allow_config_mismatch`: the bundle's numbers count where the checkpoint's `config.json` says others. `timeline` is
    carried on, if the caller has begun one. `weights_timeout`: the seconds that are waited for a server, for an answer
    and for each next part of it.

    With torch on a GPU, its allocator is configured for the whole process (`torch_device.cut_blocks_to_size`).

    Raises BundleError for a bundle that is refused, WeightsError for a checkpoint that doesn't fit it, TargetError for
    a device that is missing or too small, for ranks that are lost or differ, (`backend-unfit`) for a backend that
    doesn't run the model and (`dependency-missing`) for one that is not installed, RequestError for options outside
    their range. What is wrong with a file is said before the engine is there; with torch, before a tensor is read.
    """
    if backend is not None and backend not in get_args(Backend):
        found = f"backend is {backend!r}, expected one of {', '.join(get_args(Backend))}"
        raise RequestError("engine-option-invalid", found)
    if capture is not None and capture not in get_args(Capture):
        found = f"capture is {capture!r}, expected one of {', '.join(get_args(Capture))}"
        raise RequestError("engine-option-invalid", found)
    _check_options(
        bundle, weights, max_num_seqs=max_num_seqs, max_num_tokens=max_num_tokens,
        max_prefill_tokens=max_prefill_tokens, cache_bytes=cache_bytes, world_port=world_port,
    )  # fmt: skip
    if choices is not None and not isinstance(choices, (str, os.PathLike)):
        raise RequestError("engine-option-invalid", f"choices is {choices!r}, expected the path of a table")
    options = LoadOptions(
        bundle, weights, device, max_num_seqs, max_num_tokens, max_prefill_tokens, cache_bytes, reuse_prefixes,
        allow_config_mismatch, _table(choices), capture, [native] if isinstance(native, str) else native, trust,
        _repository(bundle), weights_timeout,
    )  # fmt: skip
    options.folder()  # refuses what is no address of a checkpoint, before anything is started
    began = time.perf_counter()
    is_alone = (tp, ep, pp, dp) == (None, 1, 1, 1) and not timeouts and "WORLD_SIZE" not in os.environ
    context = _begun(device, backend) if is_alone else None
    from precast.loader.timeline import Timeline

    timeline = Timeline(origin=began) if timeline is None else timeline
    if not is_alone:
        from precast.loader.ranks import RankOptions, load_with_ranks

        ranks = RankOptions(tp, ep, pp, dp, world_port, timeouts, processes)
        if (engine := load_with_ranks(options, ranks, timeline, choices, backend)) is not None:
            return engine
        context = _begun(device, backend)
    if context is not None and backend != "torch":
        loaded = _load_with_driver(options, timeline, context, must=backend == "driver")
        if not isinstance(loaded, LoadOptions):
            return loaded
        options = loaded
    return _load_with_torch(options, timeline)


def _begun(device: str | torch.device | None, backend: Backend | None) -> Future[Begun] | None:
    """The context of the GPU that there may be, under way while the rest is imported: torch finds it made. None without
    one.

    Raises TargetError and RequestError where the driver is asked for, or is to be, and can't be.
    """
    if backend != "driver" and device is not None and not str(device).startswith("cuda"):
        return None
    from precast.loader.driver.context import begin

    try:
        return begin(device)
    except TargetError:
        if backend == "driver":
            raise
    except RequestError:
        if backend != "torch":
            raise
    return None  # torch says what it sees


def _load_with_torch(options: LoadOptions, timeline: Timeline) -> Engine:
    from precast.loader.collector import collector_held

    is_timed = any(phase.name == "import" for phase in timeline.phases)  # by the caller
    with nullcontext() if is_timed else timeline.phase("import"), collector_held():
        try:
            from precast.loader.torch_load import load_with_torch
        except ModuleNotFoundError as error:
            if error.name not in ("torch", "triton"):
                raise
            why = next((f": {phase.note}" for phase in timeline.phases if phase.name == "backend"), "")
            found = f"torch is to serve the model, and {error.name} is not installed{why}"
            raise TargetError("dependency-missing", found, fix="pip install 'precast[torch]'") from error
    return load_with_torch(options, timeline)


def _load_with_driver(
    options: LoadOptions, timeline: Timeline, context: Future[Begun], *, must: bool
) -> Engine | LoadOptions:
    """The engine; or, where the driver alone doesn't run the model, the options with the bundle opened.

    Raises TargetError `backend-unfit` instead if it `must`.
    """
    began, num_phases = time.perf_counter(), len(timeline.phases)
    from precast.loader.driver.shared_libraries import import_all

    import_all()  # before anything else that has libraries is imported
    from precast.loader.driver.load import load_with_driver
    from precast.loader.driver.unfit import UnfitError

    try:
        return load_with_driver(options, timeline, context)
    except TargetError as error:
        if must or error.code != "device-missing":
            raise
        del timeline.phases[num_phases:]
        return options  # torch says what it sees
    except UnfitError as error:
        if must:
            fix = "load it with backend='torch', or leave the choice to Precast"
            raise TargetError("backend-unfit", f"the driver backend doesn't run the model: {error}", fix=fix) from None
        del timeline.phases[num_phases:]
        phase = timeline.add("backend", start=began, seconds=time.perf_counter() - began)
        phase.note = f"torch, as the driver alone doesn't run the model: {error}"
        return options if error.opened is None else options._replace(bundle=error.opened)


def _table(choices: str | Path | None) -> Table | None:
    if choices is None:
        return None
    from precast.kernels.measured import read_table

    return read_table(Path(choices))


def _repository(bundle: object) -> str | None:
    if not isinstance(bundle, str) or "://" not in bundle:
        return None
    from precast.ir.trust.loading import repository_of

    return repository_of(bundle)


def _is_bundle(found: object) -> bool:
    """Whether it is a path, or a bundle that was opened."""
    if isinstance(found, (str, os.PathLike)):
        return True
    from precast.ir.artifact import Bundle

    return isinstance(found, Bundle)


def _check_options(bundle: object, weights: object, **numbers: object) -> None:
    if not _is_bundle(bundle):
        raise RequestError("engine-option-invalid", f"bundle is {bundle!r}, expected a path or a Bundle")
    if not isinstance(weights, (str, os.PathLike)):
        raise RequestError("engine-option-invalid", f"weights is {weights!r}, expected the path of a checkpoint")
    for name, value in numbers.items():
        if name in ("cache_bytes", "max_prefill_tokens", "world_port") and value is None:
            continue
        most, expected = 2**63 - 1, "an integer of at least 1, of 64 bits at most"
        if name == "world_port":
            most, expected = 65535, "a port from 1 to 65535"
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise RequestError("engine-option-invalid", f"{name} is {shown_value(value)}, expected {expected}")
