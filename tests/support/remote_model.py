"""A model directory as hubs have them for families that transformers doesn't know: a config, and code beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONFIGURATION = """
from transformers import LlamaConfig


class TallyConfig(LlamaConfig):
    model_type = "tally"

    def __init__(self, depth_scale=0.5, **kwargs):
        self.depth_scale = depth_scale
        super().__init__(**kwargs)
        if self.depth_scale < 0:
            raise ValueError(f"depth_scale is {self.depth_scale}, expected at least 0")
"""

MODELING = '''
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaForCausalLM, LlamaModel

from .configuration_tally import TallyConfig


class TallyLayer(LlamaDecoderLayer):
    """Each layer adds less than the one before it."""

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.scale = config.depth_scale ** layer_idx

    def forward(self, hidden_states, **kwargs):
        return hidden_states + self.scale * (super().forward(hidden_states, **kwargs) - hidden_states)


class TallyModel(LlamaModel):
    config_class = TallyConfig

    def __init__(self, config):
        super().__init__(config)
        self.layers = type(self.layers)(TallyLayer(config, index) for index in range(config.num_hidden_layers))
        self.post_init()


class TallyForCausalLM(LlamaForCausalLM):
    config_class = TallyConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = TallyModel(config)
        self.post_init()
'''

ENTRIES: dict[str, Any] = {
    "model_type": "tally",
    "architectures": ["TallyForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_tally.TallyConfig",
        "AutoModelForCausalLM": "modeling_tally.TallyForCausalLM",
    },
    "vocab_size": 131, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 256,
}  # fmt: skip


def write_model(folder: Path, **changes: Any) -> Path:
    """Writes the directory, without weights; `changes` go into its config. Returns it."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**ENTRIES, **changes}))
    (folder / "configuration_tally.py").write_text(CONFIGURATION)
    (folder / "modeling_tally.py").write_text(MODELING)
    return folder
