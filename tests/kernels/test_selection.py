"""The selection of keys in CUDA C++: its sources on a CPU, what NVRTC makes of them, and on GPUs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from clusters_on_cpu import Source
from cubins import used_by
from op_samples.attention import new_slots
from op_samples.draw import Draw, Sample
from op_samples.sparse_attention import paged_select_sample

from precast.ir.graph import symbols
from precast.ir.graph.symbols import mul
from precast.kernels.launch import as_function, use_of_tensors
from precast.kernels.records import Launch, Pointer
from precast.kernels.rows import known
from precast.kernels.sparse_attention import selection
from precast.kernels.sparse_attention.launches import slots_of
from precast.kernels.sparse_attention.paged_select_keys import paged_select_keys
from precast.kernels.sparse_attention.records import RECORDS
from precast.kernels.use import Use

CPU = torch.device("cpu")
HOPPER = (9, 0)
HALF, BRAIN = torch.float16, torch.bfloat16
NOT_WRITTEN = -7


class Sizes(NamedTuple):
    """How kernels are divided in a test: blocks that score, their stages; a cluster, its warps, and what is near."""

    blocks: int = 3
    stages: int = 2
    cluster: int = 2
    pickers: int = 2
    near: int = 64


Run = Callable[..., torch.Tensor]


def use_of(sample: Sample) -> Use:
    return use_of_tensors("precast.paged_select_keys", 1, sample)


def launches_of(use: Use, sizes: Sizes, *, by_token: bool) -> tuple[Launch, Launch]:
    """Those of a record, divided in another way."""
    score, pick, *_ = selection.of_tokens(use) if by_token else selection.of_sequences(use, how=selection.MANY_ROWS)
    score = score._replace(
        grid=(sizes.blocks, 1, 1), constants={**score.constants, "STAGES": sizes.stages},
        shared_bytes=selection.score_bytes(known(use, "q", 2), known(use, "q", 3), sizes.stages),
    )  # fmt: skip
    pick = pick._replace(
        grid=(sizes.cluster, *pick.grid[1:]), block=32 * sizes.pickers,
        shared_bytes=selection.shared_bytes(sizes.pickers, sizes.near),
        constants={**pick.constants, "CLUSTER": sizes.cluster, "WARPS": sizes.pickers, "NEAR": sizes.near},
    )  # fmt: skip
    return score, pick


def source_of(name: str, folders: pytest.TempPathFactory) -> Source:
    return Source(folders.mktemp(name), f"sparse_attention/{name}.cu", "selection_on_cpu.cpp")


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs both sources, one after the other. What the kernel in front writes is not there before the wait."""
    sources = {name: source_of(name, tmp_path_factory) for name in ("score", "pick")}

    def execute(
        sample: Sample, sizes: Sizes, *, by_token: bool, late: bool = False, scores: torch.Tensor | None = None
    ) -> torch.Tensor:
        use = use_of(sample)
        score, pick = launches_of(use, sizes, by_token=by_token)
        tensors = {name: x for name, x in sample.items() if torch.is_tensor(x)}
        tensors["out.0"] = torch.full((1, sample["q"].shape[1], sample["count"]), NOT_WRITTEN, dtype=torch.int32)
        # Of more tokens than the record takes, too.
        places = mul(sample["q"].shape[1] if by_token else 1, slots_of(use))
        tensors["workspace"] = torch.zeros(symbols.evaluate(places, {}), dtype=torch.int32)
        before = {name: torch.full_like(tensors[name], torch.nan) for name in ("q", "weights")}
        before["cache"] = sample["cache"].clone()
        before["cache"].flatten(0, 1)[new_slots(sample, page_size=sample["cache"].shape[1])] = torch.nan
        sources["score"].run(score, tensors, late, before)
        if scores is not None:
            tensors["workspace"][: len(scores)] = scores
        nothing = torch.full_like(tensors["workspace"], 0x7FFFFFFF)
        sources["pick"].run(pick, tensors, late, {"workspace": nothing}, ["-DPICKS"])
        return tensors["out.0"]

    return execute


SEQUENCES = [(1, 33), (0, 4), (3, 71), (1, 6), (1, 7), (1, 110)]
"""Queries, and keys with theirs."""


def selected(sample: Sample, *, by_token: bool) -> torch.Tensor:
    """By the definition; with rows that are sequences, others' queries and padding are left out."""
    expected = paged_select_keys(**sample)
    bounds = sample["cu_seqlens"].tolist()
    if not by_token:
        single = {start for start, end in pairwise(bounds) if end - start == 1}
        others = [token for token in range(expected.shape[1]) if token not in single]
        expected[0, others] = NOT_WRITTEN
    return expected


@pytest.mark.parametrize("by_token", [True, False], ids=["tokens", "sequences"])
@pytest.mark.parametrize(
    ("dtype", "heads", "size", "count", "page_size", "sizes", "more"),
    [
        (BRAIN, 8, 64, 6, 16, Sizes(), {}),
        (HALF, 16, 64, 20, 8, Sizes(blocks=1, near=8), {"padding": 2}),
        (BRAIN, 8, 128, 1, 5, Sizes(blocks=7, stages=4, cluster=1, pickers=4), {"padding": 1}),
        (HALF, 128, 64, 33, 1, Sizes(blocks=2, cluster=4, pickers=1), {}),
        (BRAIN, 64, 128, 64, 32, Sizes(blocks=20), {}),
    ],
    ids=str,
)
def test_sources_on_a_cpu(
    on_cpu: Run, dtype: torch.dtype, heads: int, size: int, count: int, page_size: int, sizes: Sizes,
    more: dict[str, Any], by_token: bool,
) -> None:  # fmt: skip
    sample = paged_select_sample(
        Draw(dtype, CPU), SEQUENCES, heads=heads, size=size, count=count, page_size=page_size, whole=True, **more
    )
    for late in (False, True):
        found = on_cpu(sample, sizes, by_token=by_token, late=late)

        assert torch.equal(found, selected(sample, by_token=by_token))


@pytest.fixture(scope="module")
def prompts_on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs the source that selects for prompts, with so many blocks, and room for scores of `active` of them."""
    source = source_of("prompts", tmp_path_factory)

    def execute(sample: Sample, blocks: int, active: int, near: int, *, late: bool = False) -> torch.Tensor:
        use = use_of(sample)
        launch = selection.of_sequences(use, how=selection.MANY_ROWS)[-1]
        columns = int(launch.constants["TOKENS"]) * sample["q"].shape[2]
        longest = int((sample["kv_lens"] - sample["page_start"]).max())
        places = active * int(launch.constants["TOKENS"]) * -(-longest // 4) * 4
        launch = launch._replace(
            grid=(blocks, 1, 1), constants={**launch.constants, "STAGES": 2, "NEAR": near},
            shared_bytes=selection.prompt_bytes(columns, sample["q"].shape[3], 2, near),
            args=tuple(Pointer("workspace", "int32") if isinstance(arg, Pointer) and arg.tensor == "workspace" else
                       places if i == 12 else arg for i, arg in enumerate(launch.args)),
        )  # fmt: skip
        tensors = {name: x for name, x in sample.items() if torch.is_tensor(x)}
        tensors["out.0"] = torch.full((1, sample["q"].shape[1], sample["count"]), NOT_WRITTEN, dtype=torch.int32)
        tensors["workspace"] = torch.zeros(places, dtype=torch.int32)
        nan = {name: torch.full_like(tensors[name], torch.nan) for name in ("q", "weights", "cache")}
        source.run(launch, tensors, late, nan, ["-DPICKS", "-DPROMPTS"])
        return tensors["out.0"]

    return execute


@pytest.mark.parametrize(
    ("dtype", "heads", "size", "count", "page_size", "blocks", "active", "near", "more"),
    [
        (BRAIN, 8, 64, 6, 16, 3, 3, 64, {}),
        (HALF, 32, 64, 20, 8, 2, 1, 512, {"padding": 2}),
        (BRAIN, 16, 128, 1, 5, 7, 3, 8, {"padding": 9}),
        (HALF, 64, 128, 33, 1, 1, 1, 64, {}),
        (BRAIN, 128, 64, 64, 32, 2, 2, 64, {}),
    ],
    ids=str,
)
def test_prompts_on_a_cpu(
    prompts_on_cpu: Run, dtype: torch.dtype, heads: int, size: int, count: int, page_size: int, blocks: int,
    active: int, near: int, more: dict[str, Any],
) -> None:  # fmt: skip
    sequences = [(9, 70), (1, 33), (0, 4), (5, 140), (2, 2), (1, 7)]
    sample = paged_select_sample(
        Draw(dtype, CPU), sequences, heads=heads, size=size, count=count, page_size=page_size, whole=True, **more
    )
    expected = paged_select_keys(**sample)
    bounds = sample["cu_seqlens"].tolist()
    expected[0, [start for start, end in pairwise(bounds) if end - start == 1]] = NOT_WRITTEN
    for late in (False, True):
        assert torch.equal(prompts_on_cpu(sample, blocks, active, near, late=late), expected)


# --- the search for the largest ------------------------------------------------------------------------------------


def in_order(scores: torch.Tensor) -> torch.Tensor:
    """float32 as the integers that scores are kept as."""
    scores = torch.where(scores == 0, 0.0, scores)
    whole = scores.view(torch.int32)
    return torch.where(scores.isnan(), 0x7FFFFFFF, whole ^ ((whole >> 31) & 0x7FFFFFFF))


def drawn_scores(kind: str, count: int) -> torch.Tensor:
    """Scores of which the search has to make something."""
    make = torch.Generator().manual_seed(0)
    normal = partial(torch.randn, count, generator=make)
    kinds: dict[str, Callable[[], torch.Tensor]] = {
        "normal": normal,
        "equal": lambda: torch.full((count,), 1.5),
        "two values": lambda: (normal() > 0).float(),
        "far apart": lambda: normal().sign() * 10 ** (30 * normal()).clamp(-40, 38),
        "one far off": lambda: torch.cat((normal()[1:], torch.tensor([1e30]))),
        "near each other": lambda: (
            (torch.randint(0, 40, (count,), generator=make) + 0x3F800000).int().view(torch.float32)
        ),
        "infinite": lambda: torch.where(normal() > 1, torch.inf, normal()),
        "below all": lambda: torch.where(normal() > 1, -torch.inf, normal()),
        "with NaN": lambda: torch.where(normal() > 1.5, torch.nan, normal()),
        "zeros of both signs": lambda: torch.where(normal() > 0, 0.0, -0.0),
        "subnormal": lambda: normal() * 1e-42,
        "largest": lambda: normal().sign() * 3e38,
    }
    return kinds[kind]()


KINDS = ["normal", "equal", "two values", "far apart", "one far off", "near each other", "infinite", "below all",
         "with NaN", "zeros of both signs", "subnormal", "largest"]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_scores_of_all_kinds(on_cpu: Run, kind: str) -> None:
    scores = in_order(drawn_scores(kind, 300))
    order = scores.long().argsort(descending=True, stable=True)
    for count, sizes in ((1, Sizes()), (33, Sizes(cluster=4, near=512)), (299, Sizes(cluster=1, pickers=1))):
        sample = paged_select_sample(Draw(BRAIN, CPU), [(1, 300)], heads=8, size=64, count=count, page_size=4)

        found = on_cpu(sample, sizes, by_token=True, scores=scores)

        assert found[0, 0].tolist() == order[:count].sort().values.tolist()


@pytest.mark.parametrize("kind", ["normal", "two values", "near each other"])
def test_marks_of_scores_that_are_far(on_cpu: Run, kind: str) -> None:
    """They are kept where scores would be, of several pieces for each warp, the last of which ends early."""
    scores = in_order(drawn_scores(kind, 5001))
    sample = paged_select_sample(Draw(BRAIN, CPU), [(1, 5001)], heads=8, size=64, count=700, page_size=4)

    found = on_cpu(sample, Sizes(cluster=1, near=600), by_token=True, scores=scores)

    order = scores.long().argsort(descending=True, stable=True)
    assert found[0, 0].tolist() == order[:700].sort().values.tolist()


@pytest.mark.parametrize(("cluster", "near"), [(1, 600), (1, 5004), (4, 600), (4, 1300)])
@pytest.mark.parametrize("count", [1, 40, 700])
@pytest.mark.parametrize("above", [0, 100], ids=["like all", "above all"])
def test_what_the_sample_says_of_the_largest(on_cpu: Run, above: int, count: int, cluster: int, near: int) -> None:
    """Most scores are below what is counted; or, where those of the sample are above all others, the bound is too."""
    normal = drawn_scores("normal", 5001)
    scores = in_order(torch.where(torch.arange(5001) % (5001 // 256) == 0, normal + above, normal))
    sample = paged_select_sample(Draw(BRAIN, CPU), [(1, 5001)], heads=8, size=64, count=count, page_size=4)

    found = on_cpu(sample, Sizes(cluster=cluster, near=near), by_token=True, scores=scores)

    order = scores.long().argsort(descending=True, stable=True)
    assert found[0, 0].tolist() == order[:count].sort().values.tolist()


@pytest.mark.parametrize("tokens", [1, 4, 100])
def test_scores_of_few_tokens_are_no_more_in_larger_steps(tokens: int) -> None:
    """What a step holds is asked for the most tokens of all steps."""
    use = use_of(paged_select_sample(Draw(BRAIN, CPU), [(1, 9)] * tokens, heads=8, size=64, count=4, page_size=16))
    held, slots = (symbols.evaluate(each, {}) for each in (selection.token_bytes(use), slots_of(use)))

    assert held == 4 * min(tokens, selection.FEW_TOKENS) * slots


# --- without a GPU -----------------------------------------------------------------------------------------------


def test_what_records_launch_fits_a_multiprocessor() -> None:
    """One block of few rows, as is meant, two of some, and three of many."""
    sample = paged_select_sample(Draw(BRAIN, CPU), [(1, 5)], heads=64, size=128, count=2048, page_size=16)
    use = use_of(sample)
    picked = []
    ways = (selection.of_sequences(use, how=how) for how in (selection.SOME_ROWS, selection.MANY_ROWS))
    for score, pick, *_ in (selection.of_tokens(use), *ways):
        used = [used_by(launch) for launch in (score, pick)]
        blocks = [
            min((228 << 10) // (each["SHARED"] + 1024), 65536 // (each["REG"] * launch.block), 3)
            for launch, each in zip((score, pick), used, strict=True)
        ]

        assert all(each["STACK"] <= 32 and each["LOCAL"] == 0 for each in used)
        assert blocks[0] == 1
        picked.append(blocks[1])
    assert picked == [1, 2, 3]


@pytest.mark.parametrize("heads", [8, 64, 128])
def test_what_selects_for_prompts_fits_a_multiprocessor(heads: int) -> None:
    sample = paged_select_sample(Draw(BRAIN, CPU), [(3, 5)], heads=heads, size=128, count=2048, page_size=16)
    *_, launch = selection.of_sequences(use_of(sample), how=selection.SOME_ROWS)

    used = used_by(launch)

    assert used["SHARED"] <= 227 << 10
    assert used["REG"] * launch.block <= 65536
    assert used["STACK"] <= 32


# --- on a GPU ----------------------------------------------------------------------------------------------------


@pytest.fixture
def hopper() -> torch.device:
    """The GPU, if it is one that the kernels run on."""
    if torch.cuda.get_device_capability() != HOPPER:
        pytest.skip(f"needs compute capability 9.0, and this GPU has {torch.cuda.get_device_capability()}")
    return torch.device("cuda")


def run(sample: Sample) -> dict[str, torch.Tensor]:
    """What each record selects that launches CUDA C++ for so many tokens."""
    tokens = sample["q"].shape[1]
    sequences = len(sample["kv_lens"])
    fits = [each for each in RECORDS if each.op == "precast.paged_select_keys" and each.kind == "cuda"
            and all(low <= {"T": tokens, "B": sequences}[name] <= (high or tokens)
                    for name, (low, high) in each.sizes.items())]  # fmt: skip
    assert fits
    return {each.name: as_function(each)(**sample) for each in fits}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [HALF, BRAIN], ids=str)
@pytest.mark.parametrize(
    ("sequences", "heads", "size", "count", "page_size"),
    [
        ([(1, 700), (2, 1500), (0, 9), (1, 5100), (1, 1), (3, 3)], 64, 128, 64, 16),
        ([(1, 131071), (1, 70000)], 64, 128, 2048, 16),
        ([(1, 3000 + 17 * i) for i in range(70)], 32, 128, 512, 8),
        ([(33, 4000), (1, 300), (1, 299)], 16, 64, 299, 5),
        ([(1, 420000)], 8, 64, 2048, 64),
        ([(9, 30000), (6, 70)], 64, 128, 2048, 16),
        ([(5, 3000), (7, 2500)], 128, 128, 100, 16),
        ([(5, 3000), (7, 2500)], 8, 64, 100, 16),
    ],
    ids=str,
)
def test_sequences(
    hopper: torch.device, sequences: list[tuple[int, int]], heads: int, size: int, count: int, page_size: int,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    """In whole numbers, whose sums are exact: many scores are equal."""
    sample = paged_select_sample(
        Draw(dtype, hopper), sequences, heads=heads, size=size, count=count, page_size=page_size, whole=True, padding=2
    )
    expected = paged_select_keys(**sample)
    for name, found in run(sample).items():
        assert torch.equal(found, expected), name


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_scores_of_all_kinds_on_a_gpu(hopper: torch.device, kind: str) -> None:
    """A key's first element is its score, to the digits that bfloat16 has."""
    scores = drawn_scores(kind, 150000).to(BRAIN).to(hopper)
    sample = paged_select_sample(Draw(BRAIN, hopper), [(1, 150000)], heads=8, size=64, count=2048, page_size=16)
    scored = scores[:, None].repeat(1, 2)
    scored[:, 1] *= -1
    pages = sample["page_indices"].long()
    flat = torch.zeros(len(sample["cache"]) * 16, 64, dtype=BRAIN, device=hopper)
    slots = (pages[:, None] * 16 + torch.arange(16, device=hopper)).flatten()[: len(scores)]
    flat[slots, :2] = scored
    q, weights = torch.zeros_like(sample["q"]), torch.zeros_like(sample["weights"])
    q[0, 0, 0, 0] = q[0, 0, 1, 1] = 1
    weights[0, 0, 0], weights[0, 0, 1] = 1, -1
    sample |= {"cache": flat.view(-1, 16, 64), "q": q, "weights": weights, "scale": 1.0}
    expected = paged_select_keys(**sample)
    for name, found in run(sample).items():
        assert torch.equal(found, expected), name
