"""Routes the functions that transformers marks as replaceable (`use_kernel_func_from_hub_with_fallback`) to our ops.

transformers writes convs and recurrences as plain functions, and marks each with the name under which kernels for it
are published. The name says what the function computes, whichever model's file it stands in: a marked function whose
name is in the table is replaced while the model is traced; what the table doesn't have is traced as it is.
Arguments that steer caching, padding or chunking are taken and not looked at: sequences are told apart by
`cu_seqlens`, and begin without a state. An argument that would change the result is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F

from precast.builder.capture.routing import current_trace
from precast.builder.replaced import replaced
from precast.ir.errors import BuildError

ops = torch.ops.precast


def routed_functions(model: torch.nn.Module) -> AbstractContextManager[None]:
    """Puts our functions in the place of the marked ones, in the files that the model's modules come from."""
    files = {type(module).__module__ for module in model.modules()}
    scopes = [sys.modules[file] for file in sorted(files & sys.modules.keys())]
    named = ((scope, name, mark_of(function)) for scope in scopes for name, function in vars(scope).items())
    return replaced(*((scope, name, _ROUTES[mark]) for scope, name, mark in named if mark in _ROUTES))


def mark_of(function: Any) -> str | None:
    """The name that transformers' decorator was given for this function; None for one without."""
    while function is not None:
        code = getattr(function, "__code__", None)
        if code is not None and "func_name" in code.co_freevars and "torch_function" in code.co_freevars:
            return str(function.__closure__[code.co_freevars.index("func_name")].cell_contents)
        function = getattr(function, "__wrapped__", None)
    return None


def _causal_conv(
    hidden_states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, activation: str | None = None,
    **_: Any,
) -> torch.Tensor:  # fmt: skip
    """`hidden_states` [1, C, T], `weight` [C, K] -> [1, C, T]."""
    x = hidden_states.transpose(1, 2)
    y = ops.causal_conv(
        x, weight, bias, current_trace().cu_seqlens, activation=_ACTIVATIONS.get(activation, activation)
    )
    return y.transpose(1, 2)


_ACTIVATIONS = {None: "none", "swish": "silu"}


def _selective_scan(
    hidden_states: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor,
    D: torch.Tensor | None = None, z: torch.Tensor | None = None, delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False, return_last_state: bool = False, **_: Any,
) -> torch.Tensor:  # fmt: skip
    """`hidden_states`, `dt`, `z` [1, C, T], `A` [C, N], `B`, `C` [1, N, T] -> [1, C, T]."""
    _refuse("selective_scan_fn", return_last_state=return_last_state)
    x, dt, b, c = (each.transpose(1, 2) for each in (hidden_states, dt, B, C))
    y = ops.selective_scan(
        x, dt, A, b, c, D, delta_bias, current_trace().cu_seqlens, softplus=delta_softplus
    ).transpose(1, 2)  # fmt: skip
    return y if z is None else y * F.silu(z)


def _state_space_scan(
    hidden_states: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor,
    chunk_size: int, *, D: torch.Tensor | None = None, z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None, initial_states: torch.Tensor | None = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")), return_final_states: bool = False, **_: Any,
) -> torch.Tensor:  # fmt: skip
    """`hidden_states` [1, T, H, D], `dt` [1, T, H], `A` [H], `B`, `C` [1, T, G, N] -> [1, T, H, D]."""
    _refuse("mamba_chunk_scan_combined", z=z, initial_states=initial_states, return_final_states=return_final_states)
    return ops.state_space_scan(
        hidden_states, dt, A, B, C, D, dt_bias, current_trace().cu_seqlens,
        softplus=dt_softplus, dt_min=float(dt_limit[0]), dt_max=float(dt_limit[1]),
    )  # fmt: skip


def _delta_rule(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, *,
    scale: float | None = None, initial_state: torch.Tensor | None = None, output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False, **_: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """`query`, `key` [1, T, K, D], `value` [1, T, H, E], `g` [1, T, H] or [1, T, H, D], `beta` [1, T, H]."""
    _refuse("delta rule", initial_state=initial_state, output_final_state=output_final_state)
    y = ops.delta_rule(
        query, key, value, g, beta, current_trace().cu_seqlens,
        scale=float(query.shape[-1] ** -0.5 if scale is None else scale), normalise=use_qk_l2norm_in_kernel,
    )  # fmt: skip
    return y, None


def _no_shortcut(*_: Any, **__: Any) -> None:
    """Fused training paths: transformers takes the plain path when there is none."""
    return None


def _refuse(function: str, **arguments: Any) -> None:
    given = [name for name, value in arguments.items() if value is not None and value is not False]
    if given:
        raise BuildError("feature-unsupported", f"the model passes {', '.join(given)} to its {function}")


_ROUTES: dict[str, Callable[..., Any]] = {
    # the name that transformers marks a function with -> what is traced in its place
    "causal_conv1d_fn": _causal_conv,
    "selective_scan_fn": _selective_scan,
    "mamba_chunk_scan_combined": _state_space_scan,
    "chunk_gated_delta_rule": _delta_rule,
    "chunk_kda": _delta_rule,
    "mamba_inner_fn": _no_shortcut,
    "mamba_split_conv1d_scan_combined": _no_shortcut,
}
