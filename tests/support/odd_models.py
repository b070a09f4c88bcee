"""A small decoder whose layers do what a test asks for: models that transformers does not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

_PARTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    # what a layer adds to the residual stream `[1, T, 8]`
    "tanh": torch.tanh,
    "digamma": torch.digamma,
    "fft": lambda x: torch.fft.fft(x).real,
    "mean": lambda x: x.mean(-1, keepdim=True, dtype=torch.float32),
    "nonzero": lambda x: torch.nonzero(x).sum(0).sum() * x,
    "branch": lambda x: x if bool(x.sum() > 0) else -x,
    "raise": lambda x: x.no_such_method(),
}


class OddConfig(PreTrainedConfig):
    """`parts`: for each layer the names of what it does."""

    model_type = "precast_odd"

    def __init__(self, parts: Any = (("tanh",),), **kwargs: Any) -> None:
        self.parts = [list(names) for names in parts]
        self.vocab_size, self.hidden_size, self.num_hidden_layers = 11, 8, len(self.parts)
        super().__init__(**kwargs)


class Part(torch.nn.Module):
    """One operation, in a module of its own."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.run = _PARTS[name]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x)


class OddModel(PreTrainedModel):
    """Embedding, layers, head; no attention."""

    config_class = OddConfig
    _supports_attention_backend = True

    def __init__(self, config: OddConfig) -> None:
        super().__init__(config)
        self.embed = torch.nn.Embedding(config.vocab_size, config.hidden_size)
        layers = (torch.nn.ModuleDict({name: Part(name) for name in names}) for names in config.parts)
        self.layers = torch.nn.ModuleList(layers)
        self.head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> CausalLMOutput:
        x = self.embed(input_ids)
        for layer in self.layers:
            for part in layer.values():
                x = x + part(x)
        return CausalLMOutput(logits=self.head(x))


def odd_config(*layers: tuple[str, ...]) -> OddConfig:
    """The config of a decoder with these layers, known to transformers' auto classes."""
    AutoConfig.register(OddConfig.model_type, OddConfig, exist_ok=True)
    AutoModelForCausalLM.register(OddConfig, OddModel, exist_ok=True)
    return OddConfig(layers)
