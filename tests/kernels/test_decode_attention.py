"""Attention of few tokens in CUDA C++: its source on a CPU, what NVRTC makes of it, and on GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from clusters_on_cpu import Source
from cubins import used_by
from op_samples.attention import new_slots, paged_sample, scales
from op_samples.draw import Draw, Sample

from precast.ir.graph.schema import Const, Node, Ref, TensorType, Value
from precast.ir.memory.liveness import Operand
from precast.kernels.attention.decode import Decode, decode_launch, decode_of, shared_bytes
from precast.kernels.attention.paged import PAGED_ATTENTION, paged_attention
from precast.kernels.attention.records import RECORDS
from precast.kernels.choices import resolve
from precast.kernels.dtypes import NAMES
from precast.kernels.launch import as_function
from precast.kernels.records import Record, nothing
from precast.kernels.storage import bits
from precast.kernels.use import Target, Use

FILE = "attention/decode.cu"
HOPPER = (9, 0)
CPU = torch.device("cpu")
Run = Callable[..., torch.Tensor]
CUDA = [record for record in RECORDS if record.kind == "cuda"]


def drawn(draw: Draw, heads: int, sinks: torch.dtype, more: dict[str, Any]) -> dict[str, Any]:
    """The arguments, with tensors for those that are to be there."""
    made: dict[str, Any] = {
        "sinks": draw.normal(heads, dtype=sinks), "slopes": draw.uniform(heads, dtype=torch.float32)
    }  # fmt: skip
    wanted = {name: made.get(name, value) for name, value in more.items() if name != "scales"}
    return wanted | (scales(draw) if "scales" in more else {})


def use_of(sample: Sample) -> Use:
    """The use that a call is; all sizes are known."""
    types = {name: TensorType(NAMES[x.dtype], tuple(x.shape)) for name, x in sample.items() if torch.is_tensor(x)}
    args = {name: Ref(name) if torch.is_tensor(x) else Const(x) for name, x in sample.items() if x is not None}
    node = Node("precast.paged_attention", args, (Value("y", types["q"]),))
    return Use(node, {name: Operand(kind, True) for name, kind in types.items()}, Target("cuda", HOPPER))


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs the kernel's source. What the kernel in front writes is not there before the wait: NaN is."""
    source = Source(tmp_path_factory.mktemp("decode"), FILE, "decode_on_cpu.cpp")

    def execute(sample: Sample, how: Decode, *, late: bool = False, one_query: bool = False) -> torch.Tensor:
        use = use_of(sample)
        launch = decode_launch(use, how, one_query=one_query)
        out = torch.full(sample["q"].shape, float("nan"), dtype=sample["q"].dtype)
        tensors = {name: x for name, x in sample.items() if torch.is_tensor(x)} | {"out.0": out}
        before = {"q": torch.full_like(sample["q"], torch.nan)}
        for name in ("k_cache", "v_cache"):
            before[name] = sample[name].clone()
            nan = torch.tensor(torch.nan, dtype=sample[name].dtype)
            bits(before[name]).flatten(0, 1)[new_slots(sample, page_size=sample["k_cache"].shape[1])] = bits(nan)
        source.run(launch, tensors, late, before)
        return out

    return execute


HALF, BRAIN, FLOAT8 = torch.float16, torch.bfloat16, torch.float8_e4m3fn
EIGHT: dict[str, Any] = {"cache_dtype": FLOAT8}
SCALED: dict[str, Any] = EIGHT | {"scales": True}
MIXED = [(3, 5), (1, 33), (0, 4), (2, 71), (1, 1)]
DECODE = [(1, length) for length in (1, 17, 64, 175)]


@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "size", "page_size", "how", "more"),
    [
        (BRAIN, 4, 1, 64, 16, Decode(2, 2, 2), {}),
        (HALF, 8, 2, 128, 8, Decode(4, 1, 1), {"padding": 2}),
        (BRAIN, 7, 1, 80, 5, Decode(1, 4, 2), {"window": 65, "cut": True}),
        (HALF, 6, 2, 96, 1, Decode(2, 1, 3), {"window": 20, "soft_cap": 4.0, "padding": 1}),
        (BRAIN, 2, 2, 128, 7, Decode(8, 1, 2), {"sinks": True, "soft_cap": 50.0}),
        (HALF, 1, 1, 256, 32, Decode(4, 2, 2), {"window": 33}),
        (BRAIN, 19, 1, 16, 4, Decode(2, 2, 1), {"window": 1, "sinks": True}),
        (HALF, 7, 1, 80, 5, Decode(2, 2, 2), {"chunk": 37, "cut": True}),
        (BRAIN, 4, 1, 64, 7, Decode(8, 4, 1), {"slopes": True, "window": 20, "sinks": True, "cut": True}),
        (HALF, 6, 2, 16, 16, Decode(1, 1, 4), {"slopes": True, "chunk": 64}),
        (BRAIN, 8, 2, 128, 8, Decode(4, 1, 3), EIGHT | {"padding": 2}),
        (HALF, 4, 1, 64, 16, Decode(2, 2, 2), EIGHT | {"sinks": True, "soft_cap": 4.0}),
        (BRAIN, 7, 1, 80, 5, Decode(2, 2, 2), SCALED | {"window": 65, "slopes": True, "cut": True}),
        (HALF, 19, 1, 16, 4, Decode(2, 2, 1), SCALED | {"window": 20, "sinks": True}),
        (BRAIN, 1, 1, 256, 32, Decode(4, 2, 2), SCALED | {"window": 33}),
        (HALF, 2, 2, 112, 1, Decode(1, 4, 1), SCALED | {"chunk": 37, "cut": True, "padding": 1}),
        (BRAIN, 8, 2, 128, 16, Decode(1, 1, 3), {"sinks": True, "padding": 2}),
        (HALF, 4, 1, 256, 16, Decode(1, 1, 2), {"slopes": True, "window": 33, "cut": True}),
        (BRAIN, 7, 1, 80, 5, Decode(1, 1, 4), SCALED | {"chunk": 37, "soft_cap": 4.0}),
    ],
    ids=str,
)
def test_source_on_a_cpu(
    on_cpu: Run, dtype: torch.dtype, heads: int, kv_heads: int, size: int, page_size: int, how: Decode,
    more: dict[str, Any], same: Callable[..., None],
) -> None:  # fmt: skip
    draw = Draw(dtype, CPU)
    more = drawn(draw, heads, torch.float32 if size == 128 else dtype, more)
    for sequences in (DECODE, MIXED):
        sample = paged_sample(draw, sequences, heads=heads, kv_heads=kv_heads, size=size, page_size=page_size, **more)
        expected = paged_attention(**sample)
        for late in (False, True):
            same(PAGED_ATTENTION, on_cpu(sample, how, late=late), expected)


@pytest.mark.parametrize("padding", [0, 1, 2])
@pytest.mark.parametrize("how", [Decode(1, 1, 2), Decode(1, 2, 2)], ids=str)
def test_single_tokens_beside_prompts(on_cpu: Run, how: Decode, padding: int, same: Callable[..., None]) -> None:
    """Rows of sequences with several tokens are another launch's, as are several of padding. One of padding is 0."""
    sample = paged_sample(Draw(BRAIN, CPU), MIXED, heads=4, kv_heads=2, size=64, page_size=16, padding=padding)
    single = [token for token, (queries, _) in zip((0, 3, 4, 4, 6), MIXED, strict=True) if queries == 1]
    single += [7] if padding == 1 else []

    found = on_cpu(sample, how, one_query=True)[:, single]
    others = [token for token in range(7 + padding) if token not in single]

    same(PAGED_ATTENTION, found, paged_attention(**sample)[:, single])
    assert on_cpu(sample, how, one_query=True)[:, others].isnan().all()
    assert torch.equal(found, on_cpu(sample, how)[:, single])


@pytest.mark.parametrize("cached", [BRAIN, FLOAT8], ids=str)
def test_a_token_gets_the_same_bits_alone(on_cpu: Run, cached: torch.dtype) -> None:
    """Also from a ring of another length."""
    sample = paged_sample(
        Draw(BRAIN, CPU), DECODE, heads=4, kv_heads=1, size=64, page_size=16, cache_dtype=cached
    )  # fmt: skip
    together = on_cpu(sample, Decode(2, 2, 2))

    for b in range(len(DECODE)):
        lists = {name: sample[name][b : b + 1] for name in ("kv_lens", "page_start")}
        lists |= {"cu_seqlens": sample["cu_seqlens"][:2], "page_indptr": sample["page_indptr"][b : b + 2]}
        alone = on_cpu({**sample, **lists, "q": sample["q"][:, b : b + 1].clone()}, Decode(2, 2, 1))

        assert torch.equal(alone[0, 0], together[0, b])


def one_key(dtype: torch.dtype, device: torch.device) -> tuple[Sample, torch.Tensor]:
    """A call over one key, whose value has all finite numbers of float8; and its result [H, D], which is the value."""
    numbers = torch.arange(256, dtype=torch.uint8, device=device)
    numbers[numbers % 128 == 127] = 0
    sample = paged_sample(Draw(dtype, device), [(1, 1)], heads=2, kv_heads=1, size=256, page_size=8, **EIGHT)
    bits(sample["v_cache"])[:] = numbers
    return sample, numbers.view(FLOAT8).to(dtype).expand(2, 256)


@pytest.mark.parametrize("dtype", [BRAIN, HALF], ids=str)
def test_elements_of_8_bits_stay_in_order(on_cpu: Run, dtype: torch.dtype) -> None:
    sample, expected = one_key(dtype, CPU)

    assert torch.equal(on_cpu(sample, Decode(2, 1, 1))[0, 0], expected)


@pytest.mark.parametrize("power", [-100, 100])
def test_queries_beyond_float16_over_8_bits(on_cpu: Run, power: int) -> None:
    """A power of two changes no digit: what is in `scale` instead gives the same bits."""
    sample = paged_sample(Draw(BRAIN, CPU), MIXED, heads=4, kv_heads=1, size=32, page_size=8, **EIGHT)
    scale = sample["scale"]

    found = on_cpu(sample | {"q": sample["q"] * 2.0**power, "scale": scale * 2.0**-power}, Decode(2, 1, 2))

    assert torch.equal(found, on_cpu(sample, Decode(2, 1, 2)))


def test_small_weights_count_over_8_bits(on_cpu: Run, same: Callable[..., None]) -> None:
    """Of 1,025 keys 1,024 weigh 2^-24.6 as much as the first, which float16 would round to 2^-24."""
    sample = paged_sample(
        Draw(HALF, CPU), [(1, 1025)], heads=1, kv_heads=1, size=16, page_size=64, scale=17.05 / 16, **EIGHT
    )
    first = sample["page_indices"][0]
    keys, values = torch.zeros(sample["k_cache"].shape), torch.full(sample["v_cache"].shape, 448.0)
    keys[first, 0, 0, 0], values[first, 0] = 16, 0
    sample |= {"k_cache": keys.to(FLOAT8), "v_cache": values.to(FLOAT8), "q": torch.ones_like(sample["q"])}
    expected = paged_attention(**sample)

    assert expected.min() > 0.018
    same(PAGED_ATTENTION, on_cpu(sample, Decode(2, 2, 2)), expected)


@pytest.mark.parametrize("odd", [0.0, float("nan"), float("inf")])
def test_a_head_does_not_depend_on_the_others_over_8_bits(
    on_cpu: Run, odd: float, same: Callable[..., None]
) -> None:  # fmt: skip
    """One whose query is zeros weighs all keys alike; one with an infinity, or a NaN, gives NaN."""
    sample = paged_sample(Draw(BRAIN, CPU), MIXED, heads=4, kv_heads=1, size=32, page_size=8, **EIGHT)
    q = sample["q"].clone()
    q[:, :, 1] = 0 if odd == 0 else q[:, :, 1].abs()
    q[:, :, 1, 5] = odd

    found, whole = on_cpu(sample | {"q": q}, Decode(2, 1, 2)), on_cpu(sample, Decode(2, 1, 2))

    others = [0, 2, 3]
    assert torch.equal(found[:, :, others], whole[:, :, others])
    if odd == 0:
        same(PAGED_ATTENTION, found[:, :, 1], paged_attention(**(sample | {"q": q}))[:, :, 1])
    else:
        assert found[:, :, 1].isnan().all()


@pytest.mark.parametrize("sink", [-60.0, 60.0])
def test_sinks_far_from_scores_over_8_bits(on_cpu: Run, sink: float, same: Callable[..., None]) -> None:
    sample = paged_sample(
        Draw(BRAIN, CPU), MIXED, heads=4, kv_heads=1, size=32, page_size=8, sinks=torch.full((4,), sink), **EIGHT
    )

    same(PAGED_ATTENTION, on_cpu(sample, Decode(2, 1, 2)), paged_attention(**sample))


# --- without a GPU -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "more"),
    [
        (32, 8, 128, {}),
        (64, 8, 64, {"window": 128, "sinks": torch.empty(64, dtype=torch.float32)}),
        (16, 8, 256, {"window": 1024, "soft_cap": 50.0}),
        (71, 1, 80, {"chunk": 100, "slopes": torch.empty(71), "sinks": torch.empty(71, dtype=BRAIN)}),
        (32, 8, 128, EIGHT),
        (16, 8, 256, EIGHT | {"window": 1024, "k_scale": torch.empty(1), "v_scale": torch.empty(1)}),
        (71, 1, 80, EIGHT | {"slopes": torch.empty(71), "sinks": torch.empty(71, dtype=BRAIN), "soft_cap": 2.0}),
    ],
    ids=["llama", "gpt-oss", "gemma", "all", "llama in 8 bits", "gemma in 8 bits", "all in 8 bits"],
)
def test_what_records_launch_fits_a_multiprocessor(
    heads: int, kv_heads: int, size: int, more: dict[str, Any]
) -> None:  # fmt: skip
    sample = paged_sample(Draw(BRAIN, CPU), DECODE, heads=heads, kv_heads=kv_heads, size=size, page_size=16, **more)
    use = use_of(sample)
    for record in CUDA:
        assert callable(record.runs)
        launch = record.runs(use)[-1]
        used = used_by(launch)

        assert launch.grid[0] <= 8
        assert used["SHARED"] <= 227 << 10
        assert used["REG"] * launch.block <= 65536
        assert (used["STACK"], used["LOCAL"]) == (0, 0)


@pytest.mark.parametrize(
    ("queries", "keys", "values", "size", "is_taken"),
    [
        (BRAIN, BRAIN, BRAIN, 80, True), (BRAIN, FLOAT8, FLOAT8, 80, True), (HALF, FLOAT8, FLOAT8, 256, True),
        (HALF, BRAIN, BRAIN, 64, False), (BRAIN, FLOAT8, BRAIN, 64, False), (BRAIN, FLOAT8, FLOAT8, 24, False),
    ],
    ids=str,
)  # fmt: skip
def test_caches_that_are_taken(
    queries: torch.dtype, keys: torch.dtype, values: torch.dtype, size: int, is_taken: bool
) -> None:
    sample = paged_sample(Draw(queries, CPU), DECODE, heads=2, kv_heads=1, size=size)
    use = use_of(sample | {"k_cache": sample["k_cache"].to(keys), "v_cache": sample["v_cache"].to(values)})

    assert all(condition.holds(use) for condition in RECORDS[0].takes) == is_taken


def test_rings_of_8_bits_hold_as_many_keys_at_least() -> None:
    """In the same memory, up to eight blocks a warp."""
    for size, expected in {16: (8, 8), 64: (3, 6), 80: (3, 6), 96: (2, 4), 128: (2, 3), 256: (2, 4)}.items():
        samples = [
            paged_sample(Draw(BRAIN, CPU), DECODE, heads=8, kv_heads=1, size=size, cache_dtype=dtype)
            for dtype in (BRAIN, FLOAT8)
        ]

        assert tuple(decode_of(use_of(sample), 8).stages for sample in samples) == expected


@pytest.mark.parametrize(
    ("size", "cached", "expected"),
    [
        (64, BRAIN, [(8, 3), (4, 5), (4, 3), (2, 5), (2, 3), (1, 5)]),
        (128, BRAIN, [(8, 2), (4, 3), (4, 2), (2, 3), (2, 2), (1, 3)]),
        (128, FLOAT8, [(8, 3), (4, 5), (4, 3), (2, 5), (2, 3), (1, 5)]),
        (256, BRAIN, [(4, 2), (2, 3), (2, 2), (1, 3), (1, 2), (1, 2)]),
    ],
    ids=str,
)
def test_the_more_sequences_the_smaller_are_blocks(
    size: int, cached: torch.dtype, expected: list[tuple[int, int]]
) -> None:
    """Warps of a block, and stages of their rings; of 9 to 96 sequences and 8 key heads all fit the GPU at once, but
    for 256 elements."""
    sample = paged_sample(Draw(BRAIN, CPU), DECODE, heads=32, kv_heads=8, size=size, page_size=16, cache_dtype=cached)
    use = use_of(sample)
    found = {slots: decode_of(use, slots) for slots in (16, 32, 48, 64, 96, None)}

    assert [(how.warps, how.stages) for how in found.values()] == expected
    assert {how.cluster for how in found.values()} == {1}
    for slots, how in found.items():
        room = (227 << 10) // (shared_bytes(size, how, cached.itemsize) + 1024)
        assert slots is None or size == 256 or slots * 8 <= 132 * room


def test_blocks_of_a_step_have_a_multiprocessor_each() -> None:
    """Of a GPU's 132."""
    sizes = [(32, 8, 128), (32, 4, 128), (16, 8, 256), (71, 1, 64)]
    uses = [
        use_of(paged_sample(Draw(BRAIN, CPU), DECODE, heads=heads, kv_heads=kv_heads, size=size, page_size=16))
        for heads, kv_heads, size in sizes
    ]
    clusters = [[decode_of(use, slots).cluster for use in uses] for slots in (2, 8)]

    assert clusters == [[8, 8, 8, 4], [2, 4, 2, 1]]


# --- on a GPU ----------------------------------------------------------------------------------------------------


@pytest.fixture
def hopper() -> torch.device:
    """The GPU, if it is one that the kernel runs on."""
    if torch.cuda.get_device_capability() != HOPPER:
        pytest.skip(f"needs compute capability 9.0, and this GPU has {torch.cuda.get_device_capability()}")
    return torch.device("cuda")


def run(sample: Sample, how: Decode) -> torch.Tensor:
    """The kernel's results, in memory full of NaN."""
    out = torch.full_like(sample["q"], torch.nan)
    record = Record(
        name="tried", op="precast.paged_attention", runs=lambda use: (decode_launch(use, how),), workspace=nothing,
        allocates=False,
    )  # fmt: skip
    as_function(record)(**sample, out=out)
    return out


LONG = [(1, 700), (2, 1500), (0, 9), (1, 5100), (1, 1), (3, 3)]


def long_sample(
    draw: Draw, heads: int, kv_heads: int, size: int, page_size: int, more: dict[str, Any]
) -> Sample:  # fmt: skip
    """A call over `LONG` sequences."""
    more = drawn(draw, heads, draw.dtype, more)
    return paged_sample(draw, LONG, heads=heads, kv_heads=kv_heads, size=size, page_size=page_size, **more)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "how", [Decode(1, 1, 3), Decode(1, 4, 2), Decode(2, 8, 1), Decode(4, 2, 3), Decode(8, 2, 2)], ids=str
)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "page_size", "more"),
    [
        (32, 8, 128, 16, {"padding": 2}),
        (64, 8, 64, 32, {"window": 128, "sinks": True, "cut": True}),
        (16, 8, 256, 16, {"window": 1024, "soft_cap": 50.0}),
        (14, 1, 96, 8, {"chunk": 600, "slopes": True, "cut": True}),
    ],
    ids=str,
)
def test_sequences(
    hopper: torch.device, heads: int, kv_heads: int, size: int, page_size: int, more: dict[str, Any], how: Decode,
    same: Callable[..., None],
) -> None:  # fmt: skip
    sample = long_sample(Draw(BRAIN, hopper), heads, kv_heads, size, page_size, more)

    same(PAGED_ATTENTION, run(sample, how), paged_attention(**sample))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BRAIN, HALF], ids=str)
@pytest.mark.parametrize("how", [Decode(1, 4, 3), Decode(2, 8, 1), Decode(4, 2, 3), Decode(8, 2, 2)], ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "page_size", "more"),
    [
        (32, 8, 128, 16, EIGHT | {"padding": 2}),
        (32, 8, 128, 5, SCALED | {"soft_cap": 3.0}),
        (64, 8, 64, 32, SCALED | {"window": 128, "sinks": True, "cut": True}),
        (14, 1, 80, 7, SCALED | {"slopes": True, "sinks": True}),
        (16, 8, 256, 16, SCALED | {"window": 1024, "soft_cap": 50.0}),
        (19, 1, 16, 8, EIGHT | {"chunk": 600, "slopes": True, "cut": True}),
    ],
    ids=str,
)
def test_sequences_of_8_bits(
    hopper: torch.device, heads: int, kv_heads: int, size: int, page_size: int, more: dict[str, Any], how: Decode,
    dtype: torch.dtype, same: Callable[..., None],
) -> None:  # fmt: skip
    sample = long_sample(Draw(dtype, hopper), heads, kv_heads, size, page_size, more)

    same(PAGED_ATTENTION, run(sample, how), paged_attention(**sample))


@pytest.mark.gpu
@pytest.mark.parametrize("number", [9, 16, 29, 48, 64, 90, 200])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "more"),
    [
        (32, 8, 128, {}),
        (64, 8, 64, {"window": 128, "sinks": True, "cut": True}),
        (16, 8, 256, SCALED | {"soft_cap": 50.0}),
        (14, 1, 80, EIGHT | {"chunk": 600, "slopes": True, "cut": True}),
    ],
    ids=str,
)
def test_many_sequences(
    hopper: torch.device, heads: int, kv_heads: int, size: int, number: int, more: dict[str, Any],
    same: Callable[..., None],
) -> None:  # fmt: skip
    """As the records have it, with contexts of 1 to 1,500 tokens; beside prompts, and alone."""
    draw = Draw(BRAIN, hopper)
    more = drawn(draw, heads, draw.dtype, more)
    lengths = [(1, 1 + 97 * i % 1500) for i in range(number)]
    prompts = [(5, 300), (200, 450)] if number > 32 else [(3, 40), (17, 900)]
    for sequences in (lengths, [*lengths, *prompts]):
        sample = paged_sample(draw, sequences, heads=heads, kv_heads=kv_heads, size=size, page_size=16, **more)
        tokens, slots = sample["q"].shape[1], len(sequences)
        record = resolve(use_of(sample), {"T": tokens, "B": slots}).record
        out = torch.full_like(sample["q"], torch.nan)
        as_function(record)(**sample, out=out)

        assert record.kind == "cuda"
        same(PAGED_ATTENTION, out, paged_attention(**sample))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BRAIN, HALF], ids=str)
def test_all_values_of_8_bits(hopper: torch.device, dtype: torch.dtype) -> None:
    sample, expected = one_key(dtype, hopper)

    assert torch.equal(run(sample, Decode(2, 4, 2))[0, 0], expected)
