"""Which of transformers' causal language models build, and compute what transformers computes.

Each model type is made tiny (`precast.builder.source.shrink`), given random weights, saved, built, loaded and compared.
Types are covered in processes of their own: one that crashes or hangs is a row, not the end.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from precast.builder.build import build
from precast.builder.source.shrink import random_model, shrink
from precast.check.agreement import PROMPTS, TOLERANCE, agreement, hf_logits, relative_error
from precast.check.shards import Proof, proofs
from precast.ir.errors import PrecastError
from precast.ir.graph.world import unsharded
from precast.ir.ops.flops import precast_share
from precast.kernels.use import GPU
from precast.loader.driver.coverage import uncovered
from precast.loader.sizing import EngineLimits

Status = Literal["green", "red", "out of scope"]
Look = Literal["cover", "split", "resolve"]
"""What is asked of a type: `cover`, `split` or `resolve`."""

SECONDS = 300.0
"""A type that takes longer than this is stopped, and red."""

MAX_RANKS = 8
"""Over which a small model is split."""

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_QWEN4_EXP = {
    # prompts have more blocks than are selected
    "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 256, "indexer_budget": 8,
    "indexer_compress_ratio": 2, "ple_layer_ids": [1, 3], "eos_token_id": 4,
}  # fmt: skip
COMPLETIONS: dict[str, dict[str, Any]] = {
    # transformers' own default config makes no model, or one without what the type is about; checkpoints say these
    "blt": {"patching_threshold": 4.1},  # of a small model, half of whose bytes are no end of a patch then
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE},
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 10,
    },
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 8, "clip_qkv": 8.0},
        "ffn_config": {"moe_num_experts": 16, "moe_top_k": 4},
    },
    "deepseek_v2": {
        "num_experts_per_tok": 6, "n_group": 8, "topk_group": 3, "topk_method": "group_limited_greedy",
        "first_k_dense_replace": 1,
    },
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1},
    "gemma4_assistant": {
        "text_config": {
            "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 30,
        }
    },
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 64, "moe_topk": 8},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "minimax_m3_vl_text": {"layer_types": ["full_attention"] * 3 + ["minimax_m3_sparse"] * 57},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "qwen4_exp": {"text_config": _QWEN4_EXP},
    "qwen4_exp_text": _QWEN4_EXP,
}  # fmt: skip


class Row(msgspec.Struct, frozen=True):
    """What was found of one model type. `reason` says why it isn't green; `share` is of floating-point work, 0 to 1.

    `ranks` are the worlds in which ranks give the unsharded logits, in words, or what went wrong; `whole` are the kinds
    of layers that each rank has whole. Both are empty where nobody has looked. `without_torch`: "yes" if a GPU serves
    it without torch, else the first op that stands in the way.
    """

    model_type: str
    architecture: str
    status: Status
    builds: bool = False
    logits: bool = False
    tokens: bool = False
    share: float | None = None
    ranks: str = ""
    whole: str = ""
    without_torch: str = ""
    reason: str = ""


def model_types() -> tuple[str, ...]:
    """Every causal language model type of the installed transformers, sorted."""
    return tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))


def cover(model_type: str) -> Row:
    """Cover one model type in this process. Raises whatever the model's own code raises."""
    row = Row(model_type, _architecture(model_type), "red")
    try:
        config = config_of(model_type)
    except (StrictDataclassError, ValueError, TypeError) as error:
        return _red(row, f"transformers refuses its own default config: {_sentence(str(error))}")
    outside = _outside(config)
    if outside:
        return msgspec.structs.replace(row, status="out of scope", reason=outside)
    try:
        small = shrink(config)
    except PrecastError as error:
        if getattr(config, "is_decoder", None) is False:
            return msgspec.structs.replace(row, status="out of scope", reason="an encoder")
        return _red(row, _of(error))
    except ImportError as error:
        return _red(row, f"transformers needs a package for it: {_sentence(str(error))}")
    model = random_model(small)
    if not is_causal(model):
        return msgspec.structs.replace(row, status="out of scope", reason="an encoder: sees later tokens")
    with tempfile.TemporaryDirectory() as folder:
        return _compared(row, model, Path(folder))


def split(model_type: str) -> Row:
    """A row of how the type is split over ranks, and nothing else; as `cover`, for a type that is green."""
    row = Row(model_type, _architecture(model_type), "green")
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "checkpoint"
        random_model(shrink(config_of(model_type))).save_pretrained(weights)
        bundle = build(weights, Path(folder) / "bundle", dtype="float32")
        found = list(proofs(bundle, weights, most=MAX_RANKS))
    rows = bundle.graph.shards.rows
    whole = sorted({each.kind for each in rows if each.mode == "replicated"})
    return msgspec.structs.replace(row, ranks=worlds_text(found), whole=", ".join(whole))


def resolve(model_type: str) -> Row:
    """A row of whether the driver alone serves the type in bfloat16, and nothing else; for a type that is green.

    Of a type that is built in float32 alone, it says that.
    """
    row = Row(model_type, _architecture(model_type), "green")
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config"
        model = random_model(shrink(config_of(model_type)))
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(config)
        try:
            bundle, dtype = build(config, Path(folder) / "bundle", dtype="bfloat16"), "yes"
        except PrecastError:
            bundle, dtype = build(config, Path(folder) / "bundle", dtype="float32"), "in float32"
        found = uncovered(unsharded(bundle.graph), GPU, EngineLimits(256, 8192, bundle.manifest.model.max_seq_len))
    return msgspec.structs.replace(row, without_torch=found[0].partition(" is computed")[0] if found else dtype)


def worlds_text(found: Sequence[Proof]) -> str:
    """`2, 4; experts 2, 4`, or the first world that doesn't hold."""
    wrong = next((proof for proof in found if not proof.holds), None)
    if wrong is not None:
        return f"no: {wrong.text}, logits differ by {wrong.error:.0e}"
    over = ", ".join(map(str, dict.fromkeys(proof.tp for proof in found if proof.pp == 1)))
    parts = ", ".join(map(str, sorted({proof.ep for proof in found} - {1})))
    return (over or "1") + (f"; experts {parts}" if parts else "")


def config_of(model_type: str) -> Any:
    """The type's default config, completed where that alone makes no model."""
    return CONFIG_MAPPING[model_type](**COMPLETIONS.get(model_type, {}))


def _outside(config: Any) -> str | None:
    """Why a config is no decoder's, as far as it says so."""
    if config.is_encoder_decoder:
        return "an encoder-decoder"
    text = config.get_text_config()
    if getattr(text, "num_kv_shared_layers", 0) >= getattr(text, "num_hidden_layers", 1):
        return "drafts for another model: all of its layers read that model's caches"
    return None


def is_causal(model: Any) -> bool:
    """Whether another token at the end of a prompt leaves the logits before it as they were."""
    prompt = PROMPTS[0]
    first, second = hf_logits(model, [prompt, (*prompt[:-1], prompt[-1] + 1)])
    return relative_error(second[:-1], first[:-1]) < TOLERANCE


def _compared(row: Row, model: Any, folder: Path) -> Row:
    model.save_pretrained(folder / "checkpoint")
    try:
        bundle = build(folder / "checkpoint", folder / "bundle", dtype="float32")
    except PrecastError as error:
        return _red(row, _of(error, folder))
    row = msgspec.structs.replace(row, builds=True, share=round(precast_share(bundle.graph), 3))
    try:
        found = agreement(bundle, folder / "checkpoint", model)
    except PrecastError as error:
        return _red(row, _of(error, folder))
    row = msgspec.structs.replace(row, logits=found.logits_equal, tokens=found.tokens_equal)
    if not found.logits_equal:
        return _red(row, f"logits differ by {found.logits_error:.0e}, expected less than {TOLERANCE:.0e}")
    if not found.tokens_equal:
        return _red(row, "logits are equal, greedy tokens in chunks are not")
    return msgspec.structs.replace(row, status="green")


def sweep(
    wanted: Sequence[str], *, workers: int = 1, done: Callable[[Row], None] | None = None, look: Look = "cover"
) -> list[Row]:
    """Cover these model types, `workers` at a time, each in a process of its own; rows in the order given.

    `done` is called with each row as it is there.
    """
    _import_all()
    context = multiprocessing.get_context("fork")
    waiting, rows = list(wanted), dict[str, Row]()
    running: dict[Connection, tuple[str, BaseProcess, float]] = {}
    while waiting or running:
        while waiting and len(running) < workers:
            name = waiting.pop(0)
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(theirs, name, look), daemon=True)
            process.start()
            theirs.close()
            running[ours] = (name, process, time.monotonic() + SECONDS)
        for row in _finished(running):
            rows[row.model_type] = row
            if done is not None:
                done(row)
    return [rows[name] for name in wanted]


def _import_all() -> None:
    """Imports here what each child would import by itself: what the exporter's first call imports."""
    linear = torch.nn.Linear(2, 2, device="meta")
    torch.export.export(linear, (torch.empty(1, 2, device="meta"),))


def _finished(running: dict[Connection, tuple[str, BaseProcess, float]]) -> Iterable[Row]:
    """Waits until a child has answered, died or run out of time, and gives the rows of those."""
    soonest = min(limit for _, _, limit in running.values())
    ready = wait(list(running), timeout=max(0.0, soonest - time.monotonic()))
    for pipe, (name, process, limit) in list(running.items()):
        if pipe in ready:
            try:
                row = msgspec.msgpack.decode(pipe.recv_bytes(), type=Row)
            except EOFError:
                process.join()
                row = _red(Row(name, _architecture(name), "red"), f"the process ended with code {process.exitcode}")
        elif time.monotonic() >= limit:
            process.kill()
            row = Row(name, _architecture(name), "red", reason=f"took more than {SECONDS:.0f} s")
        else:
            continue
        process.join()
        pipe.close()
        del running[pipe]
        yield row


def _child(pipe: Connection, model_type: str, look: Look) -> None:
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the exporter prints the whole graph of what it can't trace
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        row = {"cover": cover, "split": split, "resolve": resolve}[look](model_type)
    except Exception as error:  # noqa: BLE001 - whatever a model's code raises is this type's row
        reason = f"{type(error).__name__}: {_sentence(str(error))}"
        row = Row(model_type, _architecture(model_type), "red", reason=reason)
    pipe.send_bytes(msgspec.msgpack.encode(row))


def _architecture(model_type: str) -> str:
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    return names if isinstance(names, str) else names[0]


def _red(row: Row, reason: str) -> Row:
    return msgspec.structs.replace(row, status="red", reason=reason)


def _of(error: PrecastError, folder: Path | None = None) -> str:
    """The error's code and sentence, without the name of a folder that differs from run to run."""
    text = error.message if folder is None else error.message.replace(f"{folder}/checkpoint: ", "")
    return f"{error.code}: {_sentence(text)}"


def _sentence(text: str, longest: int = 240) -> str:
    """The text in one line, cut where it is too long."""
    line = " ".join(text.split())
    return line if len(line) <= longest else line[: longest - 3] + "..."
