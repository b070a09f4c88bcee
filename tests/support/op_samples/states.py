"""Samples of the ops that keep states. They are of the stateful form; the other takes them without states."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from op_samples.draw import Draw, Sample
from op_samples.sequences import bounds_of, sequence_samples, spoiled, state_sample, without_states


def causal_conv(draw: Draw) -> Iterator[Sample]:
    for i, (sequences, padding, nameless) in enumerate(sequence_samples()):
        channels, width = (6, 4) if i % 2 else (5, 3)
        end = bounds_of(sequences)[-1]
        yield {
            "x": spoiled(draw.normal(1, end + padding, channels), end),
            "weight": draw.normal(channels, width),
            "bias": draw.normal(channels) if i % 3 else None,
            **state_sample(draw, sequences, nameless, (channels, width - 1), draw.dtype),
            "activation": "silu" if i % 2 else "none",
        }
    # One tap needs no state; a slice of a fused product; weights in float32.
    sequences = ((3, 3), (2, 8))
    yield {
        "x": draw.normal(1, 5, 4),
        "weight": draw.normal(4, 1),
        "bias": None,
        **state_sample(draw, sequences, (), (4, 0), draw.dtype),
        "activation": "silu",
    }
    yield {
        "x": draw.normal(1, 5, 12)[..., 4:8],
        "weight": draw.normal(4, 4, dtype=torch.float32),
        "bias": draw.normal(4, dtype=torch.float32),
        **state_sample(draw, sequences, (), (4, 3), draw.dtype),
    }


def compress(draw: Draw) -> Iterator[Sample]:
    size = 5
    for i, (sequences, padding, nameless) in enumerate(sequence_samples()):
        rate, series = ((2, 1), (3, 2), (7, 1), (4, 2))[i % 4]
        end, width = bounds_of(sequences)[-1], rate * series
        tokens, channels = end + padding, size * series
        yield {
            "kv": spoiled(draw.normal(1, tokens, channels), end),
            "gate": spoiled(draw.normal(1, tokens, channels, scale=(1.0, 9.0)[i % 2]), end),
            "bias": draw.normal(width, size, dtype=torch.float32 if i % 3 else None),
            **state_sample(draw, sequences, nameless, (2, width, channels), draw.dtype),
        }
    fused = draw.normal(1, 6, 16)
    yield {
        "kv": fused[..., :8],
        "gate": fused[..., 8:],
        "bias": draw.normal(4, 4),
        **state_sample(draw, ((5, 9), (1, 1)), (), (2, 4, 8), draw.dtype),
    }


def delta_rule(draw: Draw) -> Iterator[Sample]:
    size, value = 8, 5
    for i, (sequences, padding, nameless) in enumerate(sequence_samples()):
        keys, heads = ((2, 4), (3, 3), (1, 3))[i % 3]
        end = bounds_of(sequences)[-1]
        tokens = end + padding
        shape = (1, tokens, heads, size)[: 4 - i % 2]
        # Steep decays too: what is gone is gone, without overflow on the way.
        decay = -draw.uniform(*shape, high=0.5 if i % 4 < 2 else 30.0, dtype=torch.float32)
        yield {
            "q": spoiled(draw.normal(1, tokens, keys, size), end),
            "k": spoiled(draw.normal(1, tokens, keys, size), end),
            "v": spoiled(draw.normal(1, tokens, heads, value), end),
            "decay": spoiled(decay, end),
            "beta": spoiled(draw.uniform(1, tokens, heads), end),
            **state_sample(draw, sequences, nameless, (heads, size, value), torch.float32),
            "scale": size**-0.5,
            "normalise": True,
        }
    sequences = ((5, 9), (1, 1))
    fused = draw.normal(1, 6, 2, 24, scale=0.3)
    yield {
        "q": fused[..., :8],
        "k": fused[..., 8:16],
        "v": fused[..., 16:],
        "decay": None,
        "beta": draw.uniform(1, 6, 2, high=2.0),
        **state_sample(draw, sequences, (), (2, 8, 8), torch.float32),
        "scale": 1.0,
        "normalise": False,
    }


def linear_attention(draw: Draw) -> Iterator[Sample]:
    heads, size, value = 3, 8, 5
    for i, (sequences, padding, nameless) in enumerate(sequence_samples()):
        end = bounds_of(sequences)[-1]
        tokens = end + padding
        shapes = ((heads,), (1, tokens, heads), (1, tokens, heads, size))
        # Steep decays too: what is gone is gone, without overflow on the way.
        decay = -draw.uniform(*shapes[i % 3], high=(0.5, 30.0)[i % 2], dtype=torch.float32)
        yield {
            "q": spoiled(draw.normal(1, tokens, heads, size), end),
            "k": spoiled(draw.normal(1, tokens, heads, size), end),
            "v": spoiled(draw.normal(1, tokens, heads, value), end),
            "decay": decay if decay.dim() == 1 else spoiled(decay, end),
            **state_sample(draw, sequences, nameless, (heads, size, value), torch.float32),
            "scale": size**-0.5,
        }
    sequences = ((5, 9), (1, 1))
    fused = draw.normal(1, 6, 2, 24, scale=0.5)
    yield {
        "q": fused[..., :8],
        "k": fused[..., 8:16],
        "v": fused[..., 16:],
        "decay": None,
        **state_sample(draw, sequences, (), (2, 8, 8), torch.float32),
        "scale": 1.0,
    }


def linear_recurrence(draw: Draw) -> Iterator[Sample]:
    channels = 7
    for i, (sequences, padding, nameless) in enumerate(sequence_samples()):
        end = bounds_of(sequences)[-1]
        tokens = end + padding
        kind = ("sum", "max")[i % 2]
        x = draw.normal(1, tokens, channels) if kind == "sum" else draw.uniform(1, tokens, channels)
        states = state_sample(draw, sequences, nameless, (channels,), torch.float32)
        # What decays at once and what hardly does: products of many factors reach 0 on the way.
        low, high = ((0.9, 1.0), (0.0, 0.2), (0.0, 1.0))[i % 3]
        yield {
            "x": spoiled(x, end),
            "factor": spoiled(draw.uniform(1, tokens, channels, low=low, high=high), end),
            **states | {"state": states["state"] if kind == "sum" else states["state"].abs()},
            "kind": kind,
        }
    sequences = ((5, 9), (1, 1))
    fused = draw.uniform(1, 6, 8)
    yield {"x": fused[..., :4], "factor": fused[..., 4:], **state_sample(draw, sequences, (), (4,), torch.float32)}
    # The largest, also below zero, of the tokens since the last whose factor is 0.
    sequences = ((7, 7), (4, 9), (1, 5))
    yield {
        "x": draw.normal(1, 12, 3) - 2,
        "factor": (draw.uniform(1, 12, 3) > 0.4).to(draw.dtype),
        **state_sample(draw, sequences, (), (3,), torch.float32),
        "kind": "max",
    }


def selective_scan(draw: Draw) -> Iterator[Sample]:
    channels, width = 7, 5
    for i, (sequences, padding, nameless) in enumerate(sequence_samples()):
        end = bounds_of(sequences)[-1]
        tokens = end + padding
        yield {
            "x": spoiled(draw.normal(1, tokens, channels), end),
            "dt": spoiled(draw.normal(1, tokens, channels), end),
            "a": -draw.uniform(channels, width, low=0.1, high=(2.0, 40.0)[i % 2], dtype=torch.float32),
            "b": spoiled(draw.normal(1, tokens, width), end),
            "c": spoiled(draw.normal(1, tokens, width), end),
            "d": draw.normal(channels) if i % 3 else None,
            "dt_bias": draw.normal(channels) if i % 4 else None,
            **state_sample(draw, sequences, nameless, (channels, width), torch.float32),
            "softplus": True,
        }
    sequences = ((5, 9), (1, 1))
    fused = draw.uniform(1, 6, 16, high=0.5)
    yield {
        "x": fused[..., :4],
        "dt": fused[..., 4:8],
        "a": -draw.uniform(4, 4),
        "b": fused[..., 8:12],
        "c": fused[..., 12:],
        "d": draw.normal(4, dtype=torch.float32),
        "dt_bias": None,
        **state_sample(draw, sequences, (), (4, 4), torch.float32),
        "softplus": False,
    }


def state_space_scan(draw: Draw) -> Iterator[Sample]:
    size, width = 5, 6
    for i, (sequences, padding, nameless) in enumerate(sequence_samples()):
        heads, groups = ((4, 2), (3, 3), (3, 1))[i % 3]
        end = bounds_of(sequences)[-1]
        tokens = end + padding
        yield {
            "x": spoiled(draw.normal(1, tokens, heads, size), end),
            "dt": spoiled(draw.normal(1, tokens, heads), end),
            "a": -draw.uniform(heads, low=0.1, high=(2.0, 40.0)[i % 2], dtype=torch.float32),
            "b": spoiled(draw.normal(1, tokens, groups, width), end),
            "c": spoiled(draw.normal(1, tokens, groups, width), end),
            "d": draw.normal(heads) if i % 3 else None,
            "dt_bias": draw.normal(heads) if i % 4 else None,
            **state_sample(draw, sequences, nameless, (heads, size, width), torch.float32),
            "softplus": True,
            "dt_min": 0.0,
            "dt_max": float("inf") if i % 2 else 0.7,
        }
    sequences = ((5, 9), (1, 1))
    fused = draw.uniform(1, 6, 2, 13, high=0.5)
    yield {
        "x": fused[..., :4],
        "dt": fused[..., 12],
        "a": -draw.uniform(2),
        "b": fused[..., 4:8],
        "c": fused[..., 8:12],
        "d": draw.normal(2, dtype=torch.float32),
        "dt_bias": None,
        **state_sample(draw, sequences, (), (2, 4, 4), torch.float32),
        "softplus": False,
        "dt_min": 0.1,
        "dt_max": 100.0,
    }


def wkv(draw: Draw) -> Iterator[Sample]:
    channels = 7
    for i, (sequences, padding, nameless) in enumerate(sequence_samples()):
        end = bounds_of(sequences)[-1]
        tokens = end + padding
        states = state_sample(draw, sequences, nameless, (3, channels), torch.float32)
        states["state"][:, 1] = states["state"][:, 1].abs() + 0.5  # a sum of positive numbers
        yield {
            # Exponents beyond what exp can take, too.
            "k": spoiled(draw.normal(1, tokens, channels, scale=(1.0, 60.0)[i % 2]), end),
            "v": spoiled(draw.normal(1, tokens, channels), end),
            "decay": -draw.uniform(channels, high=(0.5, 30.0)[i % 2], dtype=torch.float32),
            "first": draw.normal(channels),
            **states,
        }
    sequences = ((5, 5), (1, 1))
    fused = draw.normal(1, 6, 8)
    yield {
        "k": fused[..., :4],
        "v": fused[..., 4:],
        "decay": -draw.uniform(4),
        "first": draw.normal(4),
        **state_sample(draw, sequences, (), (3, 4), torch.float32),
    }


_STATEFUL = {
    "causal_conv": causal_conv,
    "compress": compress,
    "delta_rule": delta_rule,
    "linear_attention": linear_attention,
    "linear_recurrence": linear_recurrence,
    "selective_scan": selective_scan,
    "state_space_scan": state_space_scan,
    "wkv": wkv,
}


def _alone(samples: Callable[[Draw], Iterator[Sample]]) -> Callable[[Draw], Iterator[Sample]]:
    return lambda draw: map(without_states, samples(draw))


SAMPLES = {(f"precast.stateful_{name}", 1): samples for name, samples in _STATEFUL.items()} | {
    (f"precast.{name}", 1): _alone(samples) for name, samples in _STATEFUL.items()
}
