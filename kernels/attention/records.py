"""What computes attention: Triton on GPUs; PyTorch on CPUs, and where Triton is missing or does not take the types."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from precast.ir.graph.schema import Dtype, Expr
from precast.ir.graph.symbols import add, largest, mul
from precast.kernels.attention import decode, launches, workspace
from precast.kernels.attention.launches import FEW_SLOTS, MANY_SLOTS, SMALL_STEP
from precast.kernels.records import Condition, Launch, Record, nothing, reference, reference_on_cpu
from precast.kernels.use import Use, numbers

_COMPUTED: tuple[Dtype, ...] = ("float16", "bfloat16", "float32")
CONVERTS = Condition(
    "compute capability 8.9 or higher for a cache of 8 bits",
    lambda use: use.width("k_cache") > 1 or use.target.capability >= (8, 9),
)


_SCALES = Condition("a scale above 0", lambda use: _is_positive(use.constant("scale")))


def _is_positive(x: object) -> bool:
    return isinstance(x, (int, float)) and x > 0


def _written(use: Use) -> Expr:
    """The reference gathers rows, rounds them and chooses among them.

    For 8 bits a saturated copy stands beside what was gathered, or with scales two in float32. The keys' rows are there
    until the values' are rounded.
    """
    made, cached = use.width("k"), use.width("k_cache")
    is_copied = use.operands["k"].type.dtype == use.operands["k_cache"].type.dtype
    rounding = made if is_copied else 2 * made if cached == 1 else made + cached
    if use.has("k_scale"):
        rounding = made + 8
    k, v = (numbers(use.operands[new]) for new in ("k", "v"))
    rows = (mul(max(rounding, 2 * cached), k), add(mul(cached, k), mul(rounding, v)), mul(2 * cached, v))
    return add(largest(rows), mul(64, use.shape("slot_mapping")[0]))


_NO_BIAS = Condition("no bias by distance", lambda use: not use.has("bias"))

_TRITON: dict[str, Any] = {"kind": "triton", "devices": ("cuda",), "min_capability": (8, 0)}
"""What Triton's compiler is for."""


_PAGED: dict[str, Any] = {
    **_TRITON, "op": "precast.paged_attention", "dtypes": {"q": _COMPUTED}, "takes": (_SCALES, _NO_BIAS, CONVERTS),
    "allocates": False,
}  # fmt: skip

_PLAIN_CACHE = Condition(
    "heads of 64 or 128 elements of the query's type in pages of a multiple of 8 tokens",
    lambda use: (
        use.number("k_cache", 3) in (64, 128)
        and use.number("k_cache", 3) == use.number("v_cache", 3)
        and use.operands["k_cache"].type.dtype == use.operands["v_cache"].type.dtype == use.operands["q"].type.dtype
        and (use.number("k_cache", 1) or 1) % 8 == 0
    ),
)
_HOPPER: dict[str, Any] = {
    **_PAGED, "dtypes": {"q": ("float16", "bfloat16")}, "takes": (_SCALES, _NO_BIAS, _PLAIN_CACHE),
    "min_capability": (9, 0), "max_capability": (9, 0),
}  # fmt: skip

_WHOLE_TILES = Condition(
    f"heads of a multiple of 16 elements up to {decode.MOST_SIZE}, of the query's type or float8_e4m3fn",
    lambda use: (
        (use.number("k_cache", 3) or 1) % 16 == 0
        and (use.number("k_cache", 3) or 0) <= decode.MOST_SIZE
        and use.number("k_cache", 3) == use.number("v_cache", 3)
        and use.operands["k_cache"].type.dtype == use.operands["v_cache"].type.dtype
        and use.operands["k_cache"].type.dtype in ("float8_e4m3fn", use.operands["q"].type.dtype)
    ),
)
_SINKS = Condition(
    "sinks of the query's type or float32",
    lambda use: not use.has("sinks") or use.operands["sinks"].type.dtype in ("float32", use.operands["q"].type.dtype),
)
_DECODE: dict[str, Any] = {
    **_HOPPER, "kind": "cuda", "takes": (_SCALES, _NO_BIAS, _WHOLE_TILES, _SINKS), "workspace": nothing,
}  # fmt: skip

_SMALL_STEPS: dict[str, tuple[int, int | None]] = {
    "few": (0, FEW_SLOTS), "small": (FEW_SLOTS + 1, MANY_SLOTS - 1), "many": (MANY_SLOTS, None),
}  # fmt: skip
"""By slots for sequences: tiles differ."""

_FEW_TOKENS = {"few": (0, FEW_SLOTS), "small": (FEW_SLOTS + 1, None)}
"""By slots for sequences, of which no step has more than tokens: clusters differ."""

_BESIDE_FEW = {"to_16": (9, 16), "to_32": (17, 32), "to_48": (33, 48), "to_64": (49, None)}
_BESIDE_MANY = {"to_48": (MANY_SLOTS, 48), "to_64": (49, 64), "to_96": (65, 96), "many": (97, None)}
"""By slots, in steps of 9 to `SMALL_STEP` tokens, and of more: blocks differ."""

_IN_TRITON = Condition("Triton, which takes sequences of several tokens", lambda use: "triton" in use.target.kinds)


def _beside(
    name: str, tokens: tuple[int, int | None], slots: tuple[int, int | None],
    others: Callable[[Use], tuple[Launch, ...]], *takes: Condition, workspace: Callable[[Use], Expr] = nothing,
) -> Record:  # fmt: skip
    """What leaves sequences of several tokens to the launches of `others`, and single tokens to `decode.cu`."""
    given: dict[str, Any] = {**_DECODE, "takes": (*_DECODE["takes"], _IN_TRITON, *takes), "workspace": workspace}
    return Record(
        name=f"cuda.paged_attention.{name}", **given, sizes={"T": tokens, "B": slots},
        runs=partial(decode.beside, others=others, slots=slots[1] or (SMALL_STEP if tokens[1] else None)),
    )  # fmt: skip


RECORDS = (
    *(
        Record(
            name=f"cuda.paged_attention.{name}", **_DECODE, sizes={"T": (0, decode.MOST_FEW), "B": slots},
            runs=partial(decode.launches, slots=slots[1] or decode.MOST_FEW),
        )
        for name, slots in _FEW_TOKENS.items()
    ),
    *(
        _beside(
            name, (decode.MOST_FEW + 1, SMALL_STEP), slots,
            partial(launches.few_queries, slots=range(slots[0], (slots[1] or SMALL_STEP) + 1)),
            workspace=partial(launches.partial_bytes, is_small=True),
        )
        for name, slots in _BESIDE_FEW.items()
    ),
    *(
        _beside(f"beside_{name}_{of_slots}", (SMALL_STEP + 1, None), slots, others, *takes)
        for name, others, takes in (
            ("hopper", launches.hopper_context, (_PLAIN_CACHE,)), ("prompts", launches.context, ()),
        )
        for of_slots, slots in _BESIDE_MANY.items()
    ),
    *(
        Record(
            name=f"triton.paged_attention.{name}", **_PAGED, sizes={"T": (0, SMALL_STEP), "B": slots},
            workspace=partial(launches.partial_bytes, is_small=True),
            runs=partial(launches.paged, is_small=True, slots=range(slots[0], (slots[1] or SMALL_STEP) + 1)),
        )
        for name, slots in _SMALL_STEPS.items()
    ),
    Record(
        name="triton.paged_attention.hopper", **_HOPPER,
        workspace=partial(launches.partial_bytes, is_small=False), runs=launches.hopper,
    ),
    Record(
        name="triton.paged_attention", **_PAGED,
        workspace=partial(launches.partial_bytes, is_small=False), runs=partial(launches.paged, is_small=False),
    ),
    Record(
        name="torch.paged_attention", op="precast.paged_attention", control="host", workspace=workspace.paged,
        runs="precast.kernels.attention.batched:paged_attention",
    ),
    reference_on_cpu("precast.paged_attention", "attention.paged"),
    Record(
        name="triton.attention", op="precast.attention", **_TRITON, dtypes={"q": _COMPUTED}, takes=(_SCALES, _NO_BIAS),
        allocates=False, workspace=nothing, runs=launches.packed,
    ),
    Record(
        name="torch.attention", op="precast.attention", control="host", workspace=workspace.packed,
        runs="precast.kernels.attention.batched:attention",
    ),
    reference_on_cpu("precast.attention", "attention.attention"),
    Record(
        name="triton.write_kv", op="precast.write_kv", **_TRITON, takes=(CONVERTS,), allocates=False,
        workspace=nothing, runs=launches.write_kv,
    ),
    reference("precast.write_kv", "attention.write_kv", _written),
)  # fmt: skip
