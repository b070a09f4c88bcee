"""Rotary embeddings whose frequencies depend on the sequence's length, made traceable.

transformers recomputes the frequencies of `longrope` and `dynamic` rope in the forward pass, from the longest
position of the whole batch. In a packed batch every sequence has a length of its own: the frequencies become a
tensor `[1, T, R]`, one set a token, computed by `precast.rope_frequencies`, and the module's own forward function
runs on it unchanged. PhiMoE's scale of the tables depends on the length in the same way.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import PreTrainedModel

from precast.builder.capture.routing import current_trace
from precast.ir.errors import BuildError


class _WithFrequencies:
    """A rotary module as its forward function sees it, but for the frequencies."""

    def __init__(self, module: torch.nn.Module, frequencies: dict[str, Any]) -> None:
        self.__dict__.update(frequencies)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _Column:
    """Frequencies `[1, T, R]` for a forward function of transformers until 5.18, which knows one set of them: it makes
    angles by `(inv_freq[None, :, None].float().expand(..).to(..) @ positions).transpose(1, 2)`. Here that is each
    token's own set times its position, `[1, T, R]`.
    """

    def __init__(self, frequencies: torch.Tensor, position_ids: torch.Tensor) -> None:
        self._angles = position_ids[..., None].float() * frequencies

    def _itself(self, *_: Any, **__: Any) -> _Column:
        return self

    __getitem__ = float = expand = to = __matmul__ = _itself

    def transpose(self, *_: int) -> torch.Tensor:
        return self._angles


def route_dynamic_rope(model: PreTrainedModel) -> None:
    """Replaces the forward function of each rotary module of a length-dependent rope type."""
    for path, module in list(model.named_modules()):
        kinds = getattr(module, "rope_type", None)
        if type(module).__name__ == "PhimoeRotaryEmbedding" and kinds != "default":
            _route_scales(module)
        elif isinstance(kinds, str) and depends_on_length(kinds):
            _route(module, path)
        elif isinstance(kinds, dict) and any(depends_on_length(kind) for kind in kinds.values()):
            raise BuildError("feature-unsupported", f"{path}: length-dependent rope per layer type")


def depends_on_length(kind: str) -> bool:
    """Whether frequencies of this type of rope do."""
    return kind == "longrope" or "dynamic" in kind


def _route(module: Any, path: str) -> None:
    undecorated = _undecorated(type(module).forward, path)
    takes_column = "inv_freq[None, :, None]" in inspect.getsource(undecorated)
    kind = "longrope" if module.rope_type == "longrope" else "dynamic"
    parameters = module.config.rope_parameters
    if kind == "longrope":
        original = int(parameters["original_max_position_embeddings"])
        long = torch.nn.Buffer(torch.empty_like(module.inv_freq), persistent=False)
        module.long_frequencies = long
    else:
        original = int(module.config.max_position_embeddings)

    def forward(x: torch.Tensor, position_ids: torch.Tensor, **kwargs: Any) -> Any:
        inv_freq = torch.ops.precast.rope_frequencies(
            current_trace().rope_lengths, module.inv_freq, module.long_frequencies if kind == "longrope" else None,
            kind=kind, original_length=original, factor=float(parameters.get("factor") or 1.0),
            base=float(parameters["rope_theta"]),
        )  # fmt: skip
        given = _Column(inv_freq, position_ids) if takes_column else inv_freq
        return undecorated(_WithFrequencies(module, {"inv_freq": given}), x, position_ids, **kwargs)

    module.forward = forward


def _route_scales(module: Any) -> None:
    """PhiMoE: one scale of the tables for short sequences, one for long ones; both have the frequencies of the short.

    Its forward function computes the frequencies anew, without a length.
    """
    parameters = module.config.rope_parameters

    def forward(x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scales = (torch.full((1,), float(parameters[name])) for name in ("short_mscale", "long_mscale"))
        original = int(parameters["original_max_position_embeddings"])
        scales = (torch.full((1,), float(parameters[name])) for name in ("short_mscale", "long_mscale"))
        original = int(parameters["original_max_position_embeddings"])
        scale = torch.ops.precast.rope_frequencies(
            current_trace().rope_lengths, *scales, kind="longrope", original_length=original, factor=1.0, base=1.0
        )
        tables = torch.ops.precast.rotary_tables(position_ids, module.inv_freq, scale=1.0, dtype=torch.float32)
        scaled = [(table * scale).to(x.dtype) for table in tables]
        return tuple(torch.cat([half, half], dim=-1) for half in scaled)

    module.forward = forward


def long_frequencies(module: Any) -> torch.Tensor:
    """The frequencies of a `longrope` module for sequences longer than the original limit, `[R]` float32."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    original = module.config.rope_parameters["original_max_position_embeddings"]
    value, _ = ROPE_INIT_FUNCTIONS["longrope"](module.config, torch.device("cpu"), seq_len=original + 1)
    return value


def _undecorated(forward: Any, path: str) -> Any:
    """The forward function below `dynamic_rope_update`, whose decoration asks for the batch's longest position."""
    layers = [forward]
    while hasattr(layers[-1], "__wrapped__"):
        layers.append(layers[-1].__wrapped__)
    # decorators take over the decorated function's name; their code keeps its own
    if not any("dynamic_rope_update" in layer.__code__.co_qualname for layer in layers):
        raise BuildError(
            "feature-unsupported",
            f"{path} has length-dependent frequencies, but not by transformers' dynamic_rope_update",
        )
    return layers[-1]
