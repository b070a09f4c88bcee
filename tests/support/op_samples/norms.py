"""Samples of the norms."""

from __future__ import annotations

from collections.abc import Iterator

from op_samples.draw import Draw, Sample


def rms_norm(draw: Draw) -> Iterator[Sample]:
    for tokens, size in ((1, 8), (5, 33), (0, 16)):
        for offset, cast_before_scale in ((0.0, True), (1.0, False)):
            yield {
                "x": draw.normal(1, tokens, size),
                "weight": draw.normal(size),
                "eps": 1e-6,
                "offset": offset,
                "cast_before_scale": cast_before_scale,
            }
    # A head's norm, on a slice of the fused query, key and value.
    heads = draw.normal(1, 3, 5, 12)[:, :, 1:4]
    yield {"x": heads, "weight": draw.normal(12), "eps": 1e-5, "cast_before_scale": True}
    yield {"x": heads.transpose(1, 2), "weight": None, "eps": 1e-5, "cast_before_scale": False}


def residual_rms_norm(draw: Draw) -> Iterator[Sample]:
    for tokens, size in ((1, 8), (5, 33), (0, 16)):
        for offset, cast_before_scale in ((0.0, True), (1.0, False)):
            yield {
                "x": draw.normal(1, tokens, size),
                "residual": draw.normal(1, tokens, size),
                "weight": draw.normal(size),
                "eps": 1e-6,
                "offset": offset,
                "cast_before_scale": cast_before_scale,
            }


def norm_residual_norm(draw: Draw) -> Iterator[Sample]:
    for sample in residual_rms_norm(draw):
        # Near 1, as a model's are: what is rounded otherwise stays small.
        size = sample["x"].shape[-1]
        weights = {"inner_weight": draw.uniform(size, low=0.5), "weight": draw.uniform(size, low=0.5)}
        yield sample | weights
    fused = draw.normal(1, 3, 5, 12)
    yield {
        "x": fused[:, :, 1:4],
        "residual": draw.normal(1, 3, 3, 12),
        "inner_weight": draw.uniform(12, low=0.5),
        "weight": draw.uniform(12, low=0.5),
        "eps": 1e-5,
        "cast_before_scale": True,
    }


def layer_norm(draw: Draw) -> Iterator[Sample]:
    yield {"x": draw.normal(1, 5, 33), "weight": draw.normal(33), "bias": draw.normal(33), "eps": 1e-5}
    yield {"x": draw.normal(1, 1, 8), "weight": draw.normal(8), "bias": None, "eps": 1e-6}
    yield {"x": draw.normal(1, 7, 4, 12).transpose(1, 2), "weight": None, "bias": None, "eps": 1e-5}
    yield {"x": draw.normal(1, 0, 16), "weight": draw.normal(16), "bias": draw.normal(16), "eps": 1e-5}


SAMPLES = {
    ("precast.rms_norm", 1): rms_norm,
    ("precast.residual_rms_norm", 1): residual_rms_norm,
    ("precast.norm_residual_norm", 1): norm_residual_norm,
    ("precast.layer_norm", 1): layer_norm,
}
