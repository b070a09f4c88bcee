"""What the numbers of a decoder's config may be: those that no model computes with are refused by name."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from transformers import PreTrainedConfig

from precast.builder.limits import MAX_DEPTH, MAX_EXPERTS, MAX_VOCABULARY
from precast.ir.errors import BuildError


class _Range(NamedTuple):
    least: float
    most: float = math.inf
    above: bool = False
    """Whether `least` itself is too little."""

    def __str__(self) -> str:
        least = f"above {self.least:g}" if self.above else f"of at least {self.least:g}"
        return least if self.most == math.inf else f"{least} and at most {self.most:.0f}"

    def holds(self, value: float) -> bool:
        return (value > self.least if self.above else value >= self.least) and value <= self.most


_POSITIVE = _Range(0, above=True)
_RANGES = [
    (re.compile(names), range)
    for names, range in (
        ("num_hidden_layers|n_layers?|num_layers", _Range(1, MAX_DEPTH)),
        ("vocab_size", _Range(1, MAX_VOCABULARY)),
        ("hidden_size|intermediate_size|num_attention_heads|num_key_value_heads", _Range(1)),
        ("num_experts|n_routed_experts|num_local_experts|moe_num_experts", _Range(0, MAX_EXPERTS)),
        # A convolution of one token has no state to keep.
        ("linear_conv_kernel_dim|conv_kernel|conv_L_cache|conv1d_width|mamba_d_conv", _Range(2)),
        ("(.*_)?(eps|epsilon)", _Range(0)),
        (r"(.*_)?theta|rotary_emb_base|rope_local_base_freq", _POSITIVE),
        (r"rope_(parameters|scaling)\.(.*\.)?factor", _POSITIVE),
        (r"rope_(parameters|scaling)\..*factor", _Range(0)),
    )
]  # fmt: skip
"""Entries, as transformers names them, and what they may be in every model that has them. The dimensions of heads are
not among them: models without rotary embeddings have some of 0."""

_BOUNDS = re.compile(r".*(limit|min|max|clip|clamp).*")
"""Entries whose value may be infinite: no bound."""


def check_numbers(config: PreTrainedConfig, name: str) -> None:
    """Raise BuildError (`config-invalid`) for a number of the decoder's config that is out of range, naming it."""
    text = config.get_text_config()
    known_as = {own: known for known, own in text.attribute_map.items()}
    for entry, value in _numbers("", text.to_dict()):
        first, dot, rest = entry.partition(".")
        names = (known_as.get(first, first) + dot + rest, entry.rpartition(".")[2])
        wanted = next((range for pattern, range in _RANGES if any(map(pattern.fullmatch, names))), None)
        if not math.isfinite(value) and (math.isnan(value) or not _BOUNDS.fullmatch(entry)):
            expected = f"a finite number{f' {wanted}' if wanted else ''}"
        elif wanted is not None and not wanted.holds(value):
            expected = f"a number {wanted}"
        else:
            continue
        message = f"{name}: the config's {entry} is {value}, expected {expected}"
        raise BuildError("config-invalid", message, fix=f"correct {entry} in the config")


def _numbers(prefix: str, item: Any) -> Iterator[tuple[str, float]]:
    """All numbers of a config, with the path of each."""
    if type(item) in (int, float):
        yield prefix, item
    elif isinstance(item, dict) and set(item) == {"__float__"}:  # as transformers writes what JSON has no number for
        yield prefix, float(item["__float__"])
    elif isinstance(item, (dict, list, tuple)):
        pairs = item.items() if isinstance(item, dict) else enumerate(item)
        for name, inner in pairs:
            if name not in ("id2label", "label2id"):
                yield from _numbers(f"{prefix}.{name}" if prefix else str(name), inner)
