"""What tests compare with: transformers' own logits and tokens, and a naive evaluation of recipes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from precast.ir.schema import Cast, Concat, Read, Recipe, Reshape, Slice, Stack, Tie, Transpose


def hf_logits(model: Any, prompts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """transformers' logits of each sequence by itself, `[T, V]`."""
    with torch.no_grad():
        return [model(input_ids=torch.tensor([list(prompt)]), use_cache=False).logits[0].clone() for prompt in prompts]


def hf_greedy(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """The `count` tokens that transformers' own `generate` gives greedily; end-of-sequence tokens end nothing."""
    ids = torch.tensor([list(prompt)])
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
        )  # fmt: skip
    return out[0, len(prompt) :].tolist()


def evaluate(recipe: Recipe, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The param that a recipe makes of these checkpoint tensors, at tp = 1."""
    match recipe:
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
        case Slice(of=of, dim=dim, start=int(start), length=int(length)):
            return evaluate(of, tensors).narrow(dim, start, length)
        case Reshape(of=of, shape=shape):
            return evaluate(of, tensors).reshape([int(size) for size in shape])  # type: ignore[arg-type]
        case Tie():
            raise AssertionError("the tracer makes one param of tied ones")
    raise AssertionError(f"no evaluation for {recipe}")


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference over the norm of what was expected; infinite for what isn't finite."""
    error = float((found.double() - expected.double()).norm() / expected.double().norm())
    return error if bool(torch.isfinite(found).all()) else float("inf")
