"""What tests compare with: transformers' own logits and tokens, and a naive evaluation of recipes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import quantised
import torch

from precast.check.agreement import hf_logits as hf_logits
from precast.check.agreement import is_greedy as is_greedy
from precast.check.agreement import relative_error as relative_error
from precast.ir.graph.schema import (
    Cast,
    Concat,
    Dequantise,
    Each,
    Read,
    Recipe,
    Repack,
    Repeat,
    Reshape,
    Slice,
    Stack,
    Tie,
    Transpose,
)
from precast.ir.weights import recipes


def hf_greedy(model: Any, prompt: Sequence[int], count: int, *, use_cache: bool = True) -> list[int]:
    """The `count` tokens that transformers' own `generate` gives greedily; end-of-sequence tokens end nothing."""
    ids = torch.tensor([list(prompt)])
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0,
            use_cache=use_cache,
        )  # fmt: skip
    return out[0, len(prompt) :].tolist()


def evaluate(recipe: Recipe, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The param that a recipe makes of these checkpoint tensors, at tp = 1."""
    match recipe:
        case Read(tensor=name, dtype="uint8"):
            return tensors[name].view(torch.uint8)
        case Read(tensor=name, dtype="float8_e8m0fnu"):
            return tensors[name].view(torch.float8_e8m0fnu).float()
        case Read(tensor=name):
            return tensors[name]
        case Cast(of=of, dtype=dtype):
            return evaluate(of, tensors).to(getattr(torch, dtype))
        case Transpose(of=of, dim0=a, dim1=b):
            return evaluate(of, tensors).transpose(a, b)
        case Concat(parts=parts, dim=dim):
            return torch.cat([evaluate(part, tensors) for part in parts], dim)
        case Stack(parts=parts, dim=dim):
            return torch.stack([evaluate(part, tensors) for part in parts], dim)
        case Each(dim=dim, count=count):
            return torch.stack([evaluate(recipes.nth(recipe, i), tensors) for i in range(count)], dim)
        case Dequantise():
            return quantised.dequantised(recipe, [evaluate(part, tensors) for part in recipes.parts(recipe)])
        case Slice(of=of, dim=dim, start=int(start), length=int(length)):
            return evaluate(of, tensors).narrow(dim, start, length)
        case Repeat(of=of, dim=dim, count=int(count)):
            return evaluate(of, tensors).repeat_interleave(count, dim)
        case Repack(of=of, part=part):
            return quantised.repacked(evaluate(of, tensors), part)
        case Reshape(of=of, shape=shape):
            return evaluate(of, tensors).reshape([int(size) for size in shape])  # type: ignore[arg-type]
        case Tie():
            raise AssertionError("the tracer makes one param of tied ones")
    raise AssertionError(f"no evaluation for {recipe}")
