"""Functions that transformers marks as replaceable: which they are, and that ours compute the same."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.llama import modeling_llama
from transformers.models.mamba import modeling_mamba
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.qwen3_next import modeling_qwen3_next

from precast.builder.capture.marks import mark_of, routed_functions
from precast.builder.capture.routing import Trace, tracing
from precast.ir.errors import BuildError
from precast.kernels.registry import register

T = 11


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + len(shape)))


def model_of(scope: Any) -> torch.nn.Module:
    """A module of a model's file."""
    name = next(name for name in vars(scope) if name.endswith("RMSNorm"))
    module: torch.nn.Module = getattr(scope, name)(8)
    return module


def routed(scope: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """The marked function of this name, called for one sequence while a model of its file is traced."""
    register()
    trace = Trace(torch.tensor([0, T], dtype=torch.int32), torch.full((1, T), T), 64)
    before = getattr(scope, name)
    with routed_functions(model_of(scope)), tracing(trace):
        assert getattr(scope, name) is not before
        return getattr(scope, name)(*args, **kwargs)


# --- which they are ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "mark"),
    [
        (modeling_mamba2.mamba2_chunk_scan, "mamba_chunk_scan_combined"),
        (modeling_mamba2.causal_conv1d_update, "causal_conv1d_update"),
        (modeling_qwen3_next.torch_chunk_gated_delta_rule, "chunk_gated_delta_rule"),
        (functools.wraps(modeling_mamba.causal_conv1d_fn)(lambda *args: None), "causal_conv1d_fn"),
        (modeling_mamba2.segment_sum, None),
        (modeling_llama.apply_rotary_pos_emb, None),
        (torch.add, None),
        (print, None),
        (3, None),
        (None, None),
    ],
)
def test_the_mark_of_a_function(function: Any, mark: str | None) -> None:
    assert mark_of(function) == mark


def test_only_known_marks_are_routed() -> None:
    before = dict(vars(modeling_mamba2))

    with routed_functions(model_of(modeling_mamba2)):
        changed = {name for name, value in vars(modeling_mamba2).items() if value is not before.get(name)}

    assert changed == {"causal_conv1d_fn", "mamba2_chunk_scan", "mamba2_split_conv1d_scan_combined"}


def test_files_of_other_models_are_left_alone() -> None:
    before = modeling_mamba.mamba_selective_scan

    with routed_functions(model_of(modeling_mamba2)):
        assert modeling_mamba.mamba_selective_scan is before


def test_transformers_is_left_as_it_was() -> None:
    before = dict(vars(modeling_mamba2))

    def fail() -> None:
        with routed_functions(model_of(modeling_mamba2)):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()

    assert all(vars(modeling_mamba2)[name] is value for name, value in before.items())


# --- what they compute -------------------------------------------------------------------------------------------

CONV = {"hidden_states": normal(1, 6, T), "weight": normal(6, 4), "bias": normal(6)}
SELECTIVE = {
    "hidden_states": normal(1, 6, T), "dt": normal(1, 6, T, seed=1), "A": -normal(6, 5).exp(), "B": normal(1, 5, T),
    "C": normal(1, 5, T, seed=2),
}  # fmt: skip
SCAN = {
    "hidden_states": normal(1, T, 6, 4), "dt": normal(1, T, 6), "A": -normal(6).exp(), "B": normal(1, T, 2, 5),
    "C": normal(1, T, 2, 5, seed=3), "chunk_size": 4,
}  # fmt: skip
DELTA = {
    "query": normal(1, T, 6, 5), "key": normal(1, T, 6, 5, seed=1), "value": normal(1, T, 6, 4),
    "g": -normal(1, T, 6).exp(), "beta": normal(1, T, 6, seed=2).sigmoid(),
}  # fmt: skip
CASES = [
    pytest.param(modeling_mamba2, "causal_conv1d_fn", CONV, id="conv"),
    pytest.param(modeling_mamba2, "causal_conv1d_fn", CONV | {"activation": "silu"}, id="conv, then silu"),
    pytest.param(modeling_mamba2, "causal_conv1d_fn", CONV | {"bias": None, "activation": "swish"}, id="swish is silu"),
    pytest.param(modeling_mamba, "mamba_selective_scan", SELECTIVE, id="selective scan"),
    pytest.param(
        modeling_mamba, "mamba_selective_scan",
        SELECTIVE | {"D": normal(6), "z": normal(1, 6, T, seed=4), "delta_bias": normal(6), "delta_softplus": True},
        id="selective scan with all",
    ),
    pytest.param(modeling_mamba2, "mamba2_chunk_scan", SCAN | {"dt_softplus": True}, id="state space scan"),
    pytest.param(
        modeling_mamba2, "mamba2_chunk_scan",
        SCAN | {"D": normal(6), "dt_bias": normal(6), "dt_softplus": True, "dt_limit": (0.1, 0.7)},
        id="state space scan with all",
    ),
    pytest.param(modeling_qwen3_next, "torch_chunk_gated_delta_rule", DELTA, id="delta rule"),
    pytest.param(
        modeling_qwen3_next, "torch_chunk_gated_delta_rule", DELTA | {"use_qk_l2norm_in_kernel": True}, id="normalised"
    ),
    pytest.param(
        modeling_kimi_linear, "chunk_kimi_delta_attention",
        DELTA | {"g": -normal(1, T, 6, 5).exp(), "use_qk_l2norm_in_kernel": True}, id="a decay for each channel",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("scope", "name", "args"), CASES)
def test_ours_computes_what_theirs_does(scope: Any, name: str, args: dict[str, Any]) -> None:
    expected, found = getattr(scope, name)(**args), routed(scope, name, **args)

    theirs, ours = (value[0] if isinstance(value, tuple) else value for value in (expected, found))
    assert isinstance(expected, tuple) == isinstance(found, tuple)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_the_sequences_are_those_of_the_trace() -> None:
    register()
    bounds = torch.tensor([0, 4, T], dtype=torch.int32)
    with routed_functions(model_of(modeling_mamba2)), tracing(Trace(bounds, torch.full((1, T), T), 64)):
        found = modeling_mamba2.causal_conv1d_fn(**CONV)

    x = CONV["hidden_states"]
    parts = [modeling_mamba2.causal_conv1d_fn(**CONV | {"hidden_states": part}) for part in (x[..., :4], x[..., 4:])]
    torch.testing.assert_close(found, torch.cat(parts, 2), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("scope", "name", "args", "changes", "said"),
    [
        (modeling_mamba, "mamba_selective_scan", SELECTIVE, {"return_last_state": True}, "return_last_state"),
        (modeling_mamba2, "mamba2_chunk_scan", SCAN, {"z": normal(1, T, 6, 4)}, "z"),
        (modeling_mamba2, "mamba2_chunk_scan", SCAN, {"initial_states": normal(1, 6, 4, 5)}, "initial_states"),
        (modeling_mamba2, "mamba2_chunk_scan", SCAN, {"return_final_states": True}, "return_final_states"),
        (modeling_qwen3_next, "torch_chunk_gated_delta_rule", DELTA,
         {"initial_state": normal(1, 6, 5, 4), "output_final_state": True}, "initial_state, output_final_state"),
    ],
)  # fmt: skip
def test_arguments_that_would_change_the_result_are_refused(
    scope: Any, name: str, args: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(BuildError, match=f"the model passes {said} to its") as error:
        routed(scope, name, **args | changes)

    assert error.value.code == "feature-unsupported"


@pytest.mark.parametrize(
    ("scope", "name", "args", "changes"),
    [
        (modeling_mamba2, "causal_conv1d_fn", CONV, {"seq_idx": None}),
        (modeling_mamba2, "mamba2_chunk_scan", SCAN, {"seq_idx": None, "return_final_states": False}),
        (modeling_qwen3_next, "torch_chunk_gated_delta_rule", DELTA, {"chunk_size": 8, "cu_seqlens": None}),
    ],
)
def test_arguments_for_packing_and_chunking_say_nothing(
    scope: Any, name: str, args: dict[str, Any], changes: dict[str, Any]
) -> None:
    found, expected = routed(scope, name, **args | changes), routed(scope, name, **args)

    assert torch.equal(*(value[0] if isinstance(value, tuple) else value for value in (found, expected)))


def test_a_size_is_not_taken_for_a_scale() -> None:
    """transformers' sixth argument is the size of a chunk, by place."""
    with pytest.raises(TypeError, match="positional"):
        routed(modeling_qwen3_next, "torch_chunk_gated_delta_rule", *DELTA.values(), 64)


def test_there_is_no_fused_path() -> None:
    assert routed(modeling_mamba2, "mamba2_split_conv1d_scan_combined", normal(1, T, 8), chunk_size=4) is None
