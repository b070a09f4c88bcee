"""`build`: from a Hugging Face config to a bundle. Reads as the list of its steps."""

# ruff: noqa: E402 - transformers' version is looked at before anything here misses what other versions don't have
from __future__ import annotations

import dataclasses
import importlib.metadata
import logging
import platform
import re
import resource
import sys
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from precast.builder.versions import check_transformers

check_transformers()

import msgspec
import torch
import transformers

from precast.builder import pipeline, snapshot
from precast.builder.capture.capture import Captured, capture
from precast.builder.graph.context import Options
from precast.builder.lower.lower import lower, refuse_unknown_ops
from precast.builder.lower.pack import pack
from precast.builder.lower.tokens import refuse_mixed_tokens
from precast.builder.named import KV_DTYPES, check_dtype, check_named
from precast.builder.native.layer import check_worlds, native_layer, target_named, worlds_named
from precast.builder.passes.graph_pass import Pass
from precast.builder.passes.lower.keep_quantised import KEEP_QUANTISED, Dequantised, Unrounded
from precast.builder.shard.compared import compared
from precast.builder.shard.overrides import read_overrides
from precast.builder.source.config_facts import config_facts
from precast.builder.source.facts import limit
from precast.builder.source.quantised_options import check_options
from precast.builder.source.source import Source, open_source
from precast.builder.source.tp_plan import tp_plan
from precast.ir.artifact import Bundle, check_output
from precast.ir.bundle.trust import MadeHere, folder_of_layers
from precast.ir.errors import BuildError, some
from precast.ir.memory.capture import capture_plan
from precast.kernels.registry import register

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from precast.ir.graph.schema import Dtype, Graph
    from precast.ir.manifest import PassRecord
    from precast.kernels.measured import Table

Progress = Callable[[str], None]
Passes = tuple[Pass, ...]


def build(
    source: str | Path | PreTrainedConfig, out: str | Path, *, dtype: str = "auto", max_seq_len: int | None = None,
    page_size: int | None = None, kv_dtype: str = "auto", shard_plan: str | Path | None = None,
    dequantise: bool = False, activations: str = "published", quantise: str | None = None,
    disabled_passes: Collection[str] = (), snapshots: str | Path | None = None, snapshot_after: str | None = None,
    dump: str | Path | None = None, targets: Sequence[str] = (), worlds: Sequence[str] = (),
    choices: Sequence[Table] = (), allow_remote_code: bool = False, model_type: str | None = None,
    check: Callable[[PreTrainedConfig], None] | None = None, progress: Progress | None = None,
) -> Bundle:  # fmt: skip
    """Build the bundle of a Hugging Face decoder, without weights and without a GPU, and publish it at `out`.

    Args:
        source: a directory with a `config.json` (and tokenizer files), a `config.json`, a hub id, or a config object.
        out: the bundle's directory. A bundle that stands there is replaced in one step; anything else is refused.
        dtype: `float32`, `bfloat16`, `float16`: of weights, activations and caches. `auto`: the config's; where it
            names none, bfloat16 if the checkpoint is quantised, else float32, with a warning (logger `precast`) and a
            note in the bundle's provenance.
        kv_dtype: `fp8_e4m3`: cached keys, values and latents take 8 bits, saturated to 448; keys and values are divided
            by the scales of the checkpoint, if it is quantised and has some. States and convs stay as they are.
            `model`: the model's dtype. `auto`: for keys and values 8 bits where the config says that the checkpoint is
            quantised for it (`kv_cache_scheme`, `kv_cache_quant_algo`), else the model's dtype.
        max_seq_len: the longest sequence served, prompt and answer, in tokens. None: the config's limit.
        page_size: tokens per page of the key/value caches; None: chosen for each group of layers, 8 to 64.
        shard_plan: a JSON file that says how params are split over ranks, by patterns of their names
            (`docs/sharding.md`, A plan of your own). None: as the builder finds.
        dequantise: read weights that the checkpoint stores in few bits as numbers of `dtype`, as if they had been
            stored so, in place of keeping their bytes and computing with those (docs/quantisation.md).
        activations: `published`: what is multiplied with weights in few bits is rounded as the checkpoint's config
            says, or as `quantise` does (docs/quantisation.md); `none`: it stays in `dtype`.
        quantise: weights of linear layers and experts take 8 bits on the device, made of the numbers of a checkpoint
            that isn't quantised while they are read; embeddings, head, norms, routers and all else stay as they are.
            `fp8`: in blocks of 128 x 128 with a scale each, and inputs of layers stay in `dtype`. `fp8-channel`: with a
            scale for each output, and inputs are rounded token by token (docs/quantisation.md).
        disabled_passes: names of passes to leave out, to find the one that makes a mistake.
        snapshots: a directory for snapshots of the pipeline, and for compiled kernels; a rebuild starts from the one
            that fits, and compiles what is missing. None: none are read or written.
        snapshot_after: the stage whose result is kept; None: `shard`, the last one whose result page size and kv dtype
            don't change.
        targets: GPUs, such as sm_90, whose kernels are compiled now and stored as native layers of the bundle. They
            are code, so a load takes them from whom it trusts only (docs/native.md); this user and this machine are
            recorded as one who does.
        worlds: numbers of ranks, such as `tp=2` or `tp=4,ep=2`, whose every rank finds its kernels there; none: one
            rank alone (`tp=1`), which is not among others unless it is named.
        choices: measured tables with which the bundle may be loaded, beside those that come with Precast: the kernels
            of their choices are compiled too.
        dump: a directory that gets the graph after each pass as text.
        allow_remote_code: run the code that comes with a model which transformers does not have itself, with the
            rights of this process. None of it enters the bundle, which records that it ran. No snapshots are taken
            then: what that code reads is not known.
        model_type: build the config as that of a model of this type, which transformers has, in place of its own
            model_type: of a model that goes under another name there, and comes with code that then doesn't run.
        check: called with the config before anything is traced; what it raises ends the build. The bundle records that
            there was one. `precast.check.check.compare` compares with transformers.
        progress: called with each stage's name as it begins.

    Raises BuildError: the source, an option or the output path can't be used; `code` and the message say why.
    """
    say = progress or (lambda stage: None)
    started = time.monotonic()
    register()
    say("config")
    check_named(
        dtype=dtype, kv_dtype=kv_dtype, page_size=page_size, activations=activations, quantise=quantise
    )  # fmt: skip
    check_output(out)
    opened = open_source(source, allow_code=allow_remote_code, model_type=model_type)
    facts = config_facts(opened)
    if dequantise and opened.facts.quantisation is not None:
        disabled_passes = {*disabled_passes, KEEP_QUANTISED.name}
    options = _options(opened, dtype, max_seq_len, page_size, kv_dtype, shard_plan)
    _check_quantise(quantise, opened, disabled_passes, dequantise=dequantise)
    in_full = KEEP_QUANTISED.name in disabled_passes
    options = dataclasses.replace(options, dequantise=in_full, activations=activations, quantise=quantise)
    gpus, among = [target_named(name) for name in dict.fromkeys(targets)], worlds_named(worlds)
    notes = _notes(opened, dtype, dequantise=dequantise)
    if snapshot_after is not None and snapshots is None:
        message = f"snapshot_after is {snapshot_after}, but there is no directory for snapshots"
        raise BuildError("option-invalid", message, fix="name one as snapshots, or leave snapshot_after out")
    parts = pipeline.split(pipeline.passes(disabled_passes), snapshot_after or "shard")
    left: list[Dequantised | Unrounded] = []
    late = pipeline.lowered_passes(disabled_passes, options.overrides, left, _scales(opened))
    store = snapshot.Store(Path(snapshots)) if snapshots is not None and not opened.has_code else None
    dump_dir = _dump_dir(dump)
    if check is not None:
        say("check")
        check(opened.config)
    captured, history, is_restored = _capture_and_run(opened, options, parts, store, dump_dir, say)
    say("lower")
    refuse_unknown_ops(captured.graph)
    refuse_mixed_tokens(captured.graph, captured.ctx)
    lowered = lower(captured.graph, captured.ctx)
    late = pipeline.with_weights(late, captured.ctx)
    graph, history = pipeline.run_lowered(lowered, late, history=history, dump=dump_dir)
    _check_quantised(graph, left, options)
    graph = _planned(graph)
    if gpus:
        say("kernels")
        check_worlds(graph, among)
    kept = None if snapshots is None else Path(snapshots) / "kernels"
    native = [native_layer(graph, gpu, choices, among, keep=kept) for gpu in gpus]
    say("pack")
    packed = pack(
        Path(out), captured, graph, history, files=opened.files, built_with=_versions(), checked=check is not None,
        config=facts, native=native,
        provenance=_provenance(opened, options, disabled_passes, started, is_restored)
        | notes | _beside_theirs(opened, graph) | _left_out(left, options),
    )  # fmt: skip
    _record_layers(packed)
    return packed


def _record_layers(bundle: Bundle) -> None:
    """Note that the bundle's native layers were compiled here."""
    here = MadeHere(folder_of_layers())
    for target in bundle.native:
        try:
            here.record(bundle.native_digest(target))
        except OSError as error:
            found = f"no record can be kept of the native layer for {target}: {error}"
            logging.getLogger("precast").warning("warning: %s; loads have to allow it by its digest", found)


def _capture_and_run(
    source: Source, options: Options, parts: tuple[Passes, Passes], store: snapshot.Store | None, dump: Path | None,
    say: Progress,
) -> tuple[Captured, tuple[PassRecord, ...], bool]:  # fmt: skip
    """The graph after all passes, with their records. `parts`: the passes before and after the snapshot.

    The third result says whether a snapshot stood for the trace and the first part.
    """
    before, after = parts
    key = snapshot.key(source, options, before) if store else ""
    restored = store.read(key, options) if store else None
    if restored is not None:
        captured, history = restored
    else:
        say("export")
        captured = capture(source, options)
        say("passes")
        history = pipeline.run(captured.graph, captured.ctx, before, dump=dump)
        if store:
            store.write(key, captured, history)
    say("caches")
    history = pipeline.run(captured.graph, captured.ctx, after, history=history, dump=dump)
    return captured, history, restored is not None


def _planned(graph: Graph) -> Graph:
    """The graph with the sizes in which its steps are to be captured."""
    return msgspec.structs.replace(graph, capture=capture_plan(graph))


def _options(
    source: Source, dtype: str, max_seq_len: int | None, page_size: int | None, kv_dtype: str,
    shard_plan: str | Path | None,
) -> Options:  # fmt: skip
    if dtype == "auto":
        dtype = source.facts.dtype
        check_dtype(dtype, of_config=True)
    overrides = () if shard_plan is None else read_overrides(Path(shard_plan))
    from_config = kv_dtype == "auto" and source.facts.kv_dtype is not None
    cached = source.facts.kv_dtype if from_config else KV_DTYPES[kv_dtype]
    return Options(dtype, limit(source.config, max_seq_len), page_size, cached, overrides, from_config)


def _dump_dir(dump: str | Path | None) -> Path | None:
    if dump is None:
        return None
    try:
        Path(dump).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message, fix = f"dump is no directory: {error.strerror}", "name a directory that can be made and written to"
        raise BuildError("option-invalid", message, where=str(dump), fix=fix) from error
    return Path(dump)


def _versions() -> dict[str, str]:
    """What the bundle's content depends on, and so belongs to its identity."""
    return {
        "precast": importlib.metadata.version("precast"),
        "torch": torch.__version__.partition("+")[0],
        "transformers": transformers.__version__,
    }


def _notes(source: Source, dtype: str, *, dequantise: bool) -> dict[str, object]:
    """What was chosen because neither the config nor the user said it, what of the config was left out, and options
    that change nothing, for the provenance; it is logged as well, before the build takes its time."""
    facts = source.facts
    notes = [*([facts.dtype_note] if facts.dtype_note and dtype == "auto" else []), *facts.notes]
    if dequantise and facts.quantisation is None:
        notes.append("the config says nothing of quantised weights: with or without dequantise it is the same bundle")
    for note in notes:
        logging.getLogger("precast").warning("warning: %s: %s", source.name, note)
    return {"notes": notes} if notes else {}


def _beside_theirs(source: Source, graph: Graph) -> dict[str, object]:
    """How the shard plan differs from that of transformers, for the provenance; nothing where either has none."""
    theirs = tp_plan(source.config)
    return {"tp_plan": msgspec.to_builtins(compared(graph, theirs))} if theirs and graph.shards.rows else {}


_HALVES = ("gptq", "auto-round")
"""Methods whose scales are float16 where the model is bfloat16."""


def _scales(source: Source) -> Dtype:
    """The type of scales that a checkpoint of this config has: AutoAWQ, GPTQModel and AutoRound write float16, others
    the model's own type. AutoGPTQ does so, too: scales in bfloat16 that aren't tiny are float16's as well."""
    method = (source.facts.quantisation or {}).get("quant_method")
    dtypes: dict[str, Dtype] = {"float16": "float16", "bfloat16": "float16" if method in _HALVES else "bfloat16"}
    return "float16" if method == "awq" else dtypes.get(source.facts.dtype, "float32")


def _check_quantise(
    quantise: str | None, source: Source, disabled_passes: Collection[str], *, dequantise: bool
) -> None:
    if quantise is None:
        return
    if source.facts.quantisation is not None:
        method = check_options(source.facts.quantisation).method
        message = f"quantise={quantise!r}, but the checkpoint is quantised already, by {method}"
        raise BuildError("option-invalid", message, fix="leave quantise out: they stay as they are stored")
    if dequantise:
        message = f"quantise={quantise!r} and dequantise=True: weights can't be in few bits, and in the model's dtype"
        raise BuildError("option-invalid", message, fix="leave out one of quantise and dequantise")
    if KEEP_QUANTISED.name in disabled_passes:
        message = f"quantise={quantise!r}, and the pass {KEEP_QUANTISED.name} is left out, which it is for"
        raise BuildError("option-invalid", message, fix="leave out one of quantise and the disabled pass")


def _check_quantised(graph: Graph, left: Sequence[Dequantised | Unrounded], options: Options) -> None:
    """Raises BuildError where weights were to be quantised, and none is."""
    if options.quantise is None or any(param.type.dtype == "float8_e4m3fn" for param in graph.params):
        return
    named = _left_out(left, options).get("not quantised")
    reasons = named if isinstance(named, dict) else {}
    lines = [f"{', '.join(some(names))}: {reason}" for reason, names in reasons.items()]
    message = "\n  ".join([f"quantise={options.quantise!r}, but no weight of this model can be quantised", *lines])
    raise BuildError("feature-unsupported", message, fix="leave quantise out")


def _left_out(left: Sequence[Dequantised | Unrounded], options: Options) -> dict[str, object]:
    """The weights that are, or were to be, in few bits and are not kept so, and those whose inputs were to be rounded
    and are not: by the reason, for the provenance; `*` stands for the number of a layer."""
    found: dict[str, dict[str, dict[str, None]]] = {}
    for each in left:
        kind = "inputs not rounded"
        if isinstance(each, Dequantised):
            kind = "not quantised" if options.quantise else "dequantised"
        names = found.setdefault(kind, {}).setdefault(each.reason, {})
        names[re.sub(r"\.\d+(?=\.)", ".*", each.param)] = None
    return {kind: {reason: list(names) for reason, names in by.items()} for kind, by in found.items()}


def _provenance(
    source: Source, options: Options, disabled_passes: Collection[str], started: float, from_snapshot: bool
) -> dict[str, object]:
    """Facts about this build that are no part of the bundle's identity."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "source": source.name,
        "options": dataclasses.asdict(options) | {"disabled_passes": sorted(disabled_passes)},
        "built_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seconds": round(time.monotonic() - started, 3),
        "peak_memory_bytes": peak * (1 if sys.platform == "darwin" else 1024),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "from_snapshot": from_snapshot,
        "remote_code": source.has_code,
    }
