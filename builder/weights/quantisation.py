"""Quantised checkpoints: which tensors `quantization_config` says are stored in few bits, and their recipes.

The module is built as if nothing were quantised; each weight that the checkpoint holds in few bits is read by a
`Dequantise`. A method or an option that isn't known is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from transformers import PreTrainedModel

from precast.builder.source.quantised_options import Quantised, check_options
from precast.builder.weights.schemes.auto_round import auto_round
from precast.builder.weights.schemes.awq_gptq import awq, gptq
from precast.builder.weights.schemes.compressed_tensors import compressed_tensors
from precast.builder.weights.schemes.fp8 import fbgemm_fp8, fp8, mxfp8
from precast.builder.weights.schemes.mlx import mlx
from precast.builder.weights.schemes.modelopt import modelopt
from precast.builder.weights.schemes.mxfp4 import mxfp4
from precast.builder.weights.schemes.quark import quark
from precast.builder.weights.schemes.scheme import Scheme


def scheme_of(
    model: PreTrainedModel, entries: Mapping[str, Any] | None, is_left_out: Callable[[str], bool] = lambda _: False
) -> Scheme | None:
    """How the checkpoint of `model` is quantised, by its config's `quantization_config`; None: not at all.

    `is_left_out` says of a layer's name that isn't the model's whether it is of a part that is left out.

    Raises BuildError: `feature-unsupported` for a method or an option that isn't known, naming it.
    """
    if not entries:
        return None
    options = check_options(entries)
    if options.method == "modelopt":
        return modelopt(model, options, is_left_out)
    return _SCHEMES[options.method](model, options)


_SCHEMES: dict[str, Callable[[PreTrainedModel, Quantised], Scheme]] = {
    "fp8": fp8,
    "fbgemm_fp8": fbgemm_fp8,
    "mxfp8": mxfp8,
    "compressed-tensors": compressed_tensors,
    "quark": quark,
    "mxfp4": mxfp4,
    "awq": awq,
    "gptq": gptq,
    "auto-round": auto_round,
    "mlx": mlx,
}
