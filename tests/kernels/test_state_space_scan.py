"""The scan of Mamba 2 by hand, and against transformers' own functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from op_samples.draw import Draw
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan, mamba2_selective_state_update

from precast.kernels.state_space_scan import chunked
from precast.kernels.state_space_scan.state_space_scan import state_space_scan, stateful_state_space_scan

each_form = pytest.mark.parametrize(
    "scan", [stateful_state_space_scan, chunked.stateful_state_space_scan], ids=["reference", "implementation"]
)


@pytest.fixture
def draw() -> Draw:
    """Draws on the CPU: that other devices agree, `test_specs.py` tests."""
    return Draw(torch.float32, torch.device("cpu"))


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def arguments(draw: Draw, tokens: int, heads: int = 4, groups: int = 2) -> dict[str, Any]:
    return {
        "x": draw.normal(1, tokens, heads, 5),
        "dt": draw.normal(1, tokens, heads),
        "a": -draw.uniform(heads, low=0.1, high=3.0),
        "b": draw.normal(1, tokens, groups, 6),
        "c": draw.normal(1, tokens, groups, 6),
        "d": draw.normal(heads),
        "dt_bias": draw.normal(heads),
    }


@each_form
def test_by_hand(scan: Callable[..., torch.Tensor]) -> None:
    # One head of size 1, one row; steps of 1 and, clamped, 2; a state of 8 before.
    x, dt = torch.tensor([1.0, 2.0]).view(1, 2, 1, 1), torch.tensor([0.5, 7.0]).view(1, 2, 1)
    ones, state = torch.ones(1, 2, 1, 1), torch.tensor([6.0, 8.0]).view(2, 1, 1, 1)
    a = torch.tensor([0.5]).log()
    limits = {"softplus": False, "dt_min": 1.0, "dt_max": 2.0}

    y = scan(x, dt, a, ones, 10 * ones, torch.ones(1), None, state, i32(1), i32(0, 2), i32(5), **limits)

    # States 8 / 2 + 1 * 1, 5 / 4 + 2 * 2.
    torch.testing.assert_close(y.flatten(), torch.tensor([51.0, 54.5]))
    torch.testing.assert_close(state.flatten(), torch.tensor([6.0, 5.25]))


@each_form
@pytest.mark.parametrize("continued", [True, False])
@pytest.mark.parametrize("limit", [(0.0, float("inf")), (0.3, 0.9)], ids=str)
def test_equals_transformers(
    scan: Callable[..., torch.Tensor], draw: Draw, continued: bool, limit: tuple[float, float]
) -> None:
    given = arguments(draw, 93)
    state = draw.normal(2, 4, 5, 6)
    before = state.clone() if continued else torch.zeros_like(state)
    lengths = i32(3 + continued, 90 + continued)
    limits = {"softplus": True, "dt_min": limit[0], "dt_max": limit[1]}

    found = scan(**given, state=state, slots=i32(1, 0), cu_seqlens=i32(0, 3, 93), kv_lens=lengths, **limits)

    for rows, slot in ((slice(0, 3), 1), (slice(3, 93), 0)):
        x, dt, b, c = (given[name][:, rows] for name in ("x", "dt", "b", "c"))
        expected, last = mamba2_chunk_scan(
            x, dt, given["a"], b, c, chunk_size=16, D=given["d"], dt_bias=given["dt_bias"], dt_softplus=True,
            dt_limit=limit, initial_states=before[slot, None], return_final_states=True,
        )  # fmt: skip
        torch.testing.assert_close(found[:, rows], expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(state[slot], last[0], rtol=1e-5, atol=1e-5)


@each_form
def test_a_step_equals_transformers(scan: Callable[..., torch.Tensor], draw: Draw) -> None:
    given = arguments(draw, 3)
    state = draw.normal(4, 4, 5, 6)
    theirs = state[[3, 0, 2]].clone()
    metadata = {"slots": i32(3, 0, 2), "cu_seqlens": i32(0, 1, 2, 3), "kv_lens": i32(5, 9, 30)}

    found = scan(**given, state=state, **metadata, softplus=True, dt_min=0.0, dt_max=float("inf"))
    wide = given["x"].shape[2:]
    expected = mamba2_selective_state_update(
        theirs,
        given["x"][0],
        given["dt"][0, :, :, None].expand(3, *wide),
        given["a"][:, None, None].expand(*wide, 6),
        given["b"][0],
        given["c"][0],
        given["d"][:, None].expand(wide),
        given["dt_bias"][:, None].expand(wide),
        dt_softplus=True,
    )

    torch.testing.assert_close(found[0], expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state[[3, 0, 2]], theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scan", [state_space_scan, chunked.state_space_scan], ids=["reference", "implementation"])
def test_what_decays_at_once_leaves_nothing(scan: Callable[..., torch.Tensor], draw: Draw) -> None:
    given = arguments(draw, 150, groups=4) | {"d": None, "dt_bias": None}
    given["a"] = torch.full((4,), -50.0)
    given["dt"] = torch.full((1, 150, 4), 1000.0)

    found = scan(**given, cu_seqlens=i32(0, 150), softplus=False, dt_min=0.0, dt_max=100.0)

    expected = 100 * given["x"] * (given["b"] * given["c"]).sum(-1, keepdim=True)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
