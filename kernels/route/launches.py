"""The launch of a router in Triton. No torch and no triton here."""

from __future__ import annotations

from typing import Any

from precast.kernels.blocks import power_of_two
from precast.kernels.records import Launch, Pointer, Stride
from precast.kernels.use import Use

_ONE_WARP = 512
"""So many experts are ranked by one warp, whose threads need no shared memory to compare."""


def launches(use: Use) -> tuple[Launch, ...]:
    """One program a token."""
    num_experts, top_k = use.number("logits", 1), use.constant("top_k")
    assert num_experts is not None
    assert isinstance(top_k, int)
    groups = int(use.constant("num_groups") or 1)
    size = num_experts // groups
    bias = (Pointer("bias"), Stride("bias", 0)) if use.has("bias") else (None, 0)
    given = {name: float(use.constant(name) or 0.0) for name in ("epsilon", "floor")}
    scale, has_pdl = use.constant("scale"), use.target.capability >= (9, 0)
    constants: dict[str, Any] = {
        "SCORING": str(use.constant("scoring")), "TOP_K": top_k,
        "BY_SCORES": use.constant("choice") in (None, "scores"), "NUM_GROUPS": groups,
        "TOP_GROUPS": int(use.constant("top_groups") or 1),
        "SUMS_TWO": use.constant("group_score") in (None, "top2"), "HAS_BIAS": use.has("bias"),
        "NORMALISES": bool(use.constant("normalise")), "EPSILON": given["epsilon"], "FLOOR": given["floor"],
        "SCALE": 1.0 if scale is None else float(scale), "SIZE": size, "BLOCK_G": power_of_two(groups),
        "BLOCK_E": power_of_two(size), "BLOCK_K": power_of_two(top_k), "PDL": has_pdl,
    }  # fmt: skip
    args = (
        Pointer("out.0"), Pointer("out.1"), Pointer("logits"), bias[0], Stride("logits", 0), Stride("logits", 1),
        bias[1],
    )  # fmt: skip
    return (
        Launch(
            "precast.kernels.route.triton:route_kernel", (use.shape("logits")[0],), args, constants,
            1 if num_experts <= _ONE_WARP else 4, pdl=has_pdl,
        ),
    )  # fmt: skip
