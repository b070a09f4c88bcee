"""A config made tiny: the same structure, with few layers of all kinds, small sizes and a small vocabulary.

`precast build --check` and `make models` compare such models with transformers on random weights: that takes
seconds on a CPU, and a mistake in how a model is taken apart shows as well in the small as in the large.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from precast.builder.source.model_class import from_config, own_code
from precast.builder.source.quantised_options import unquantised
from precast.builder.source.shrink_layers import COUNTS, cut_layers
from precast.builder.source.shrink_sizes import Known, shrink_sizes
from precast.builder.source.source import CONFIG_ERRORS
from precast.ir.errors import BuildError

VOCABULARY = 131
"""Tokens of a shrunk model: more than the prompts have, and a prime, so that no size of the model equals it."""

_SCALES = (1, 2, 4)
_PROMPT = (5, 9, 70, 33, 12, 88, 3, 41, 100, 7, 64, 20)

_REFUSALS = (*CONFIG_ERRORS, LookupError, AssertionError)
"""What transformers and models raise for sizes that don't fit together."""


def shrink(config: PreTrainedConfig) -> PreTrainedConfig:
    """A config of the same structure as `config`, small enough to instantiate and run within a second.

    Kept are flags, biases, tying, activations, scales, caps, and which layers there are; made small are layers,
    sizes, heads, experts, windows, lengths and the vocabulary. Equal configs give equal results. Sizes are raised
    until transformers makes a model of them that gives finite logits.

    Raises BuildError("config-invalid") with the last reason when none of the sizes do.
    """
    reason: Exception | None = None
    for scale in _SCALES:
        try:
            small = _shrunk(config, scale)
            _run(random_model(small))
        except _REFUSALS as error:
            reason = error
        else:
            return small
    raise BuildError(
        "config-invalid",
        f"no small {config.model_type} model could be made of this config: {type(reason).__name__}: {reason}",
        fix="check that the config's sizes fit each other; a build without --check makes no small model",
    ) from reason


def random_model(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A float32 model on the CPU with random weights, none of them zero or one where that would hide a mistake."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = from_config(config, dtype=torch.float32, attn_implementation="eager")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                spread = 0.3 if parameter.dim() == 1 else 0.15
                parameter.copy_(_centre(name, parameter) + spread * torch.randn_like(parameter))
            for buffer in _checkpoint_buffers(model):
                buffer += 0.3 * torch.randn_like(buffer)
    return model.eval()


def _centre(name: str, parameter: torch.Tensor) -> float:
    if name.endswith("A_log"):
        return -1.0  # a state then keeps three quarters a token: it reaches back over a prompt, and stays small
    return 1.0 if parameter.dim() == 1 and name.endswith("weight") else 0.0


def _checkpoint_buffers(model: PreTrainedModel) -> list[torch.Tensor]:
    """Buffers that training sets and a checkpoint has: routers' corrections, scales of layers.

    They begin as zeros or ones; tables and limits, which are computed, don't.
    """
    state = model.state_dict(keep_vars=True)
    buffers = [buffer for name, buffer in model.named_buffers() if name in state and buffer.is_floating_point()]
    return [buffer for buffer in buffers if bool((buffer == 0).all()) or bool((buffer == 1).all())]


def _run(model: PreTrainedModel) -> None:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([_PROMPT]), use_cache=False).logits
    if not bool(torch.isfinite(logits).all()):
        raise ValueError("its logits are not finite")


def _shrunk(config: PreTrainedConfig, scale: int) -> PreTrainedConfig:
    entries = unquantised(config).to_dict()
    known = Known()
    text = _text_key(config, entries)
    if text is not None:  # its sizes first: other parts end in its hidden size
        _shrink_entries(entries[text], scale, known)
    for name, part in entries.items():
        if isinstance(part, dict) and name in config.sub_configs and name != text:
            _shrink_entries(part, scale, known)
    _shrink_entries(entries, scale, known)
    if own_code(config) is None:
        entries.pop("auto_map", None)
    return type(config).from_dict(entries, name_or_path=config.name_or_path)


def _text_key(config: PreTrainedConfig, entries: dict[str, Any]) -> str | None:
    return next((name for name in ("text_config", "decoder") if isinstance(entries.get(name), dict)), None)


def _shrink_entries(entries: dict[str, Any], scale: int, known: Known) -> None:
    old = dict(entries)
    exceptions = {int(layer): value for layer, value in (entries.pop("per_layer_config", None) or {}).items()}
    if exceptions:
        total = next(old[name] for name in COUNTS if name in old)
        entries["per_layer_config"] = [exceptions.get(layer, {}) for layer in range(total)]
    cut_layers(entries)
    shrink_sizes(entries, VOCABULARY, scale, known)
    if exceptions:
        entries["per_layer_config"] = {
            place: {name: _in_ratio(value, old[name], entries[name]) for name, value in layer.items()}
            for place, layer in enumerate(entries["per_layer_config"])
            if layer
        }


def _in_ratio(value: Any, old: Any, new: Any) -> Any:
    """One layer's exception from a size, in the ratio to the config's own that it had."""
    if type(value) is not int or type(old) is not int or type(new) is not int or not old:
        return value
    return max(1, round(value * new / old))
