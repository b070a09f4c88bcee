"""Attention to selected latents in CUDA C++: its source on a CPU, what NVRTC makes of it, and on GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from clusters_on_cpu import Source
from cubins import used_by
from op_samples.draw import Draw, Sample
from op_samples.sparse_attention import paged_sparse_sample

from precast.ir.graph import symbols
from precast.kernels.latent_attention.expand import sizes_of, split
from precast.kernels.launch import as_function, use_of_tensors
from precast.kernels.records import Pointer
from precast.kernels.sparse_attention import attention
from precast.kernels.sparse_attention.attention import Attend, attend_launch, attend_of, shared_bytes
from precast.kernels.sparse_attention.launches import attended_bytes
from precast.kernels.sparse_attention.paged_sparse_latent_attention import (
    PAGED_SPARSE_LATENT_ATTENTION,
    paged_sparse_latent_attention,
)
from precast.kernels.sparse_attention.records import RECORDS
from precast.kernels.use import Use

CPU = torch.device("cpu")
HOPPER = (9, 0)
HALF, BRAIN = torch.float16, torch.bfloat16
SEQUENCES = [(1, 7), (2, 33), (0, 4), (1, 200)]
"""Queries, and keys with theirs."""

Run = Callable[..., torch.Tensor]


def use_of(sample: Sample) -> Use:
    return use_of_tensors("precast.paged_sparse_latent_attention", 1, sample)


def joined(partial: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The parts [T, H, parts, C] with their highest scores and total weights [T, H, parts, 2] as one."""
    highest, total = weights.unbind(-1)
    shares = torch.exp2(highest - highest.amax(-1, keepdim=True))
    y = (partial * shares[..., None]).sum(2)
    return y / (total * shares).sum(-1)[..., None].clamp(min=1e-30)


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs the source, between products in PyTorch. What the kernel in front writes is not there before the wait."""
    sources = {
        in_groups: Source(tmp_path_factory.mktemp("attend"), f"sparse_attention/{file}.cu", "attend_on_cpu.cpp")
        for in_groups, file in ((False, "attend"), (True, "attend_groups"))
    }

    def execute(sample: Sample, how: Attend, *, late: bool = False) -> torch.Tensor:
        use, (q, weight) = use_of(sample), (sample["q"], sample["weight"])
        sizes = sizes_of(q, weight, sample["cache"].shape[-1] - weight.shape[1], sample["value_size"])
        keys, values = split(weight.float(), sizes)
        launch = attend_launch(use, how)._replace(shared_bytes=shared_bytes(sample["cache"].shape[-1], how))
        tensors = {name: x for name, x in sample.items() if torch.is_tensor(x)}
        memory = torch.zeros(symbols.evaluate(attended_bytes(use, how.parts), {}), dtype=torch.uint8)
        tensors["workspace"] = memory
        places = [arg.offset for arg in launch.args if isinstance(arg, Pointer) and arg.tensor == "workspace"]
        results, partial, weights, queries = (symbols.evaluate(each, {}) for each in places)
        shape = (*q.shape[1:3], sizes.latent)

        def seen(offset: int, dtype: torch.dtype, *size: int) -> torch.Tensor:
            count = torch.Size(size).numel()
            return memory[offset : offset + count * dtype.itemsize].view(dtype).view(*size)

        seen(queries, q.dtype, *shape)[:] = torch.einsum("thd,hdc->thc", q[0, ..., : sizes.nope].float(), keys)
        nan = {name: torch.full_like(tensors[name], torch.nan) for name in ("q", "cache")}
        sources[how.in_groups].run(
            launch, tensors, late, nan | {"selected": torch.full_like(sample["selected"], 1 << 30)}
        )
        if how.parts > 1:
            y = joined(
                seen(partial, torch.float32, *shape[:2], how.parts, shape[2]),
                seen(weights, torch.float32, *shape[:2], how.parts, 2),
            )
        else:
            y = seen(results, q.dtype, *shape)
        return torch.einsum("thc,hdc->thd", y.float(), values).to(q.dtype)[None]

    return execute


def sample_of(draw: Draw, heads: int, count: int, **more: Any) -> Sample:
    return paged_sparse_sample(draw, SEQUENCES, count=count, heads=heads, nope=12, value=14, **more)


@pytest.mark.parametrize(
    ("dtype", "heads", "latent", "rope", "count", "page_size", "how", "more"),
    [
        (BRAIN, 5, 128, 64, 70, 16, Attend(32, 1, 1, 1), {"padding": 1}),
        (HALF, 33, 128, 64, 130, 5, Attend(32, 2, 1, 2), {"sinks": True}),
        (BRAIN, 40, 256, 64, 200, 1, Attend(32, 1, 1, 2), {"sinks": True}),
        (HALF, 16, 128, 64, 300, 8, Attend(32, 2, 2, 1), {"sinks": True, "padding": 1}),
        (BRAIN, 3, 128, 64, 33, 16, Attend(32, 4, 2, 1), {}),
        (BRAIN, 5, 128, 64, 200, 16, Attend(64, 1, 1, 2), {"padding": 1}),
        (HALF, 70, 128, 64, 300, 5, Attend(64, 1, 1, 2), {"sinks": True}),
        (BRAIN, 40, 256, 64, 200, 1, Attend(64, 2, 1, 2), {"sinks": True}),
        (HALF, 16, 128, 64, 300, 8, Attend(64, 2, 2, 2), {"sinks": True, "padding": 1}),
    ],
    ids=str,
)
def test_source_on_a_cpu(
    on_cpu: Run, dtype: torch.dtype, heads: int, latent: int, rope: int, count: int, page_size: int, how: Attend,
    more: dict[str, Any], same: Callable[..., None],
) -> None:  # fmt: skip
    sample = sample_of(Draw(dtype, CPU), heads, count, latent=latent, rope=rope, page_size=page_size, **more)
    expected = paged_sparse_latent_attention(**sample)
    for late in (False, True):
        same(PAGED_SPARSE_LATENT_ATTENTION, on_cpu(sample, how, late=late), expected)


@pytest.mark.parametrize("cluster", [1, 2])
def test_sums_fade_when_scores_grow(on_cpu: Run, cluster: int, same: Callable[..., None]) -> None:
    """References follow scores that are far above, in tiles of both warp groups: scores are so large that in some heads
    a later tile has one."""
    sample = sample_of(Draw(BRAIN, CPU), 9, 400, latent=128, rope=64, page_size=16) | {"scale": 1.5}

    same(
        PAGED_SPARSE_LATENT_ATTENTION,
        on_cpu(sample, Attend(64, cluster, 1, 2)),
        paged_sparse_latent_attention(**sample),
    )


@pytest.mark.parametrize("rows", [32, 64])
def test_entries_that_are_no_keys_are_passed_over(on_cpu: Run, rows: int, same: Callable[..., None]) -> None:
    """Wherever they stand, and a whole tile of them."""
    sample = sample_of(Draw(BRAIN, CPU), 3, 256, latent=128, rope=64, page_size=16)
    selected = sample["selected"].clone()
    selected[..., 64:128] = -1
    selected[..., ::3] = 1 << 20
    sample |= {"selected": selected}

    same(PAGED_SPARSE_LATENT_ATTENTION, on_cpu(sample, Attend(rows, 2, 1, 2)), paged_sparse_latent_attention(**sample))


# --- without a GPU -----------------------------------------------------------------------------------------------


def deepseek(draw: Draw, sequences: list[tuple[int, int]], **more: Any) -> Sample:
    """Of DeepSeek-V3.2's sizes, but for fewer heads if `more` says so."""
    sizes = {"heads": 128, "nope": 128, "rope": 64, "latent": 512, "value": 128, "page_size": 16}
    return paged_sparse_sample(draw, sequences, count=2048, **(sizes | more))


@pytest.mark.parametrize("sinks", [False, True])
def test_what_records_launch_fits_a_multiprocessor(sinks: bool) -> None:
    use = use_of(deepseek(Draw(BRAIN, CPU), [(1, 3)], sinks=sinks))
    for _, tokens in attention.ranges():
        launch = attend_launch(use, attend_of(use, tokens))
        used = used_by(launch)

        assert used["SHARED"] <= 227 << 10
        assert used["REG"] * launch.block <= 65536
        assert used["STACK"] <= 32


def test_blocks_of_a_step_have_a_multiprocessor_each() -> None:
    """Of a GPU's 132; a rank's 16 heads are one block of rows. Warp groups take 64 of them, but not in steps of one
    token, or two of few heads, nor latents of a size that they don't multiply."""
    whole, part = (use_of(deepseek(Draw(BRAIN, CPU), [(1, 3)], heads=heads)) for heads in (128, 16))
    other = use_of(deepseek(Draw(BRAIN, CPU), [(1, 3)], latent=384))
    found = [[attend_of(use, tokens)[:3] for _, tokens in attention.ranges()] for use in (whole, part)]

    assert found[0] == [(32, 2, 16), (64, 2, 16), (64, 2, 8), (64, 2, 4), (64, 2, 2), (64, 2, 1), (64, 1, 1)]
    assert attend_of(other, 8) == (32, 2, 2, 2)
    assert found[1] == [(32, 2, 16), (32, 2, 16), (64, 2, 16), (64, 2, 8), (64, 2, 4), (64, 2, 2), (64, 1, 1)]


def test_parts_of_few_tokens_are_no_more_in_larger_steps() -> None:
    """What a step holds is asked for the most tokens of all steps: sixteen parts are one token's."""
    draw = Draw(BRAIN, CPU)
    held = [
        symbols.evaluate(attention.workspace(use_of(deepseek(draw, [(1, 3)] * count, heads=16)), tokens=1), {})
        for count in (1, 50)
    ]

    assert held[0] == held[1]


@pytest.mark.parametrize(
    ("changes", "is_taken"),
    [
        ({}, True), ({"latent": 256}, True), ({"latent": 192}, False), ({"rope": 32}, False),
        ({"cache_dtype": torch.float8_e4m3fn}, False), ({"rope": 128}, False),
    ],
    ids=str,
)  # fmt: skip
def test_uses_that_are_taken(changes: dict[str, Any], is_taken: bool) -> None:
    use = use_of(deepseek(Draw(BRAIN, CPU), [(1, 3)], **({"heads": 2} | changes)))

    assert all(condition.holds(use) for condition in attention.TAKES) == is_taken


# --- on a GPU ----------------------------------------------------------------------------------------------------


@pytest.fixture
def hopper() -> torch.device:
    """The GPU, if it is one that the kernel runs on."""
    if torch.cuda.get_device_capability() != HOPPER:
        pytest.skip(f"needs compute capability 9.0, and this GPU has {torch.cuda.get_device_capability()}")
    return torch.device("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [HALF, BRAIN], ids=str)
@pytest.mark.parametrize(
    ("heads", "count", "more"),
    [
        (128, 2048, {"padding": 1}), (16, 2048, {"sinks": True}), (40, 500, {"latent": 256, "page_size": 5}),
        (64, 130, {"page_size": 1, "sinks": True}),
    ],
    ids=str,
)  # fmt: skip
def test_every_record(
    hopper: torch.device, heads: int, count: int, more: dict[str, Any], dtype: torch.dtype, same: Callable[..., None]
) -> None:
    """Each with as many tokens as it may have, or 40."""
    draw = Draw(dtype, hopper)
    fits = [each for each in RECORDS if each.op == "precast.paged_sparse_latent_attention" and each.kind == "cuda"]
    assert len(fits) == len(list(attention.ranges()))
    for record in fits:
        tokens = record.sizes["T"][1] or 40
        padding = min(more.get("padding", 0), tokens - 1)
        several = [(2, 900)] if tokens - padding > 4 else []
        lengths = several + [(1, 1 + 737 * i % 3000) for i in range(1, tokens - padding - 2 * len(several) + 1)]
        sizes = {"nope": 128, "rope": 64, "latent": 512, "value": 128, "page_size": 16} | more
        sample = paged_sparse_sample(draw, lengths, count=count, heads=heads, **(sizes | {"padding": padding}))
        assert sample["q"].shape[1] == tokens

        same(PAGED_SPARSE_LATENT_ATTENTION, as_function(record)(**sample), paged_sparse_latent_attention(**sample))
