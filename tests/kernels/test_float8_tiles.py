"""Float8 weights and inputs with 9 to 256 rows: which layers `float8_tiles.cu` takes; its source on a CPU, what NVRTC
makes of it, and on a GPU against the definition."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from clusters_on_cpu import Source
from cubins import used_by
from op_samples.draw import Draw, Sample
from op_samples.quantised import fp8

from precast.kernels.choices import fitting
from precast.kernels.launch import as_function, use_of_tensors
from precast.kernels.quantised_linear.float8_tiles import ROWS, plan_of, records
from precast.kernels.quantised_linear.quantised_linear import few_bits
from precast.kernels.quantised_linear.records import RECORDS
from precast.kernels.quantised_linear.rounded_linear import ROUNDED_LINEAR, rounded_linear
from precast.kernels.records import Launch, Record
from precast.kernels.use import Use

HOPPER = (9, 0)
CPU = torch.device("cpu")
HALF, BRAIN = torch.float16, torch.bfloat16
NAMES = {record.name.replace("quantised_linear", "rounded_linear") for record in records()}
BLOCK_BYTES = 227 << 10
"""Shared memory that a block may have on Hopper."""
LAYERS = {"o": (4096, 4096), "gate_up": (28672, 4096)}
"""Outputs and inputs, those of Llama 3.1 8B."""
PLANS = {
    (6144, 4096): (2, 96), (4096, 4096): (3, 96), (28672, 4096): (1, 112), (128256, 4096): (1, 126),
    (8192, 8192): (2, 128), (5120, 5120): (2, 80), (16384, 4096): (1, 128), (3584, 4096): (3, 84),
    (1024, 4096): (8, 64), (200, 128): (1, 2),
}  # fmt: skip
"""Blocks of a cluster, and of all, by outputs and inputs: the fastest that were measured."""

Run = Callable[..., torch.Tensor]


def layer(
    draw: Draw, rows: int, outputs: int, inputs: int, activation: str = "fp8_token", *, of_all: bool = False,
    bias: bool = False,
) -> Sample:  # fmt: skip
    """A call of `rounded_linear`; `of_all`: the weight has one scale."""
    block = (128, 128) if activation == "fp8_group" else (outputs if of_all else 1, inputs)
    scale = draw.uniform(1, low=0.004, high=0.008, dtype=torch.float32) if activation == "fp8_tensor" else None
    values, scales = few_bits(draw.normal(1, rows, inputs, dtype=torch.float32), activation, scale)
    return {
        "input": values.contiguous(), "input_scales": scales.contiguous(), **fp8(draw, outputs, inputs, block),
        "input_scale": scale, "bias": draw.normal(outputs) if bias else None, "dtype": draw.dtype,
        "activation": activation,
    }  # fmt: skip


def use_of(sample: Sample) -> Use:
    """Of a layer whose input alone is made in the step."""
    use = use_of_tensors("precast.rounded_linear", 1, sample)
    operands = {
        name: each._replace(is_activation=name in ("input", "input_scales")) for name, each in use.operands.items()
    }
    return use._replace(operands=operands, target=use.target._replace(device="cuda", capability=HOPPER))


def record_of(sample: Sample) -> Record | None:
    """The record of this room that takes it, if it is the first of all."""
    first = next(iter(fitting(use_of(sample), {"T": sample["input"].shape[1]})))
    return first if first.name in NAMES else None


def tiles_of(sample: Sample) -> Record:
    """The record for so many rows, also where another one is faster."""
    columns = next(each for each in ROWS if sample["input"].shape[1] <= each)
    return next(each for each in RECORDS if each.name == f"cuda.rounded_linear_of_float8_to_{columns}")


def launch_of(sample: Sample) -> Launch:
    record = tiles_of(sample)
    assert not isinstance(record.runs, str), "it is launched"
    (launch,) = record.runs(use_of(sample))
    return launch


# --- without a GPU -----------------------------------------------------------------------------------------------


def test_it_takes_nine_to_256_rows() -> None:
    def named(rows: int) -> str | None:
        record = record_of(layer(Draw(BRAIN, CPU), rows, 256, 512, "fp8_group"))
        return record and record.name.rpartition("_")[2]

    assert [named(rows) for rows in (8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257)] == [
        None, "16", "16", "32", "32", "64", "64", "128", "128", "256", "256", None,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("outputs", "inputs", "activation", "most"),
    [
        (4096, 512, "fp8_token", 64), (13440, 512, "fp8_token", 64), (13520, 512, "fp8_token", 128),
        (28672, 512, "fp8_token", 128), (28672, 512, "fp8_tensor", 128), (28672, 512, "fp8_group", 64),
        (4224, 512, "fp8_group", 256), (4240, 512, "fp8_group", 128), (8448, 512, "fp8_group", 128),
        (8464, 512, "fp8_group", 64), (4096, 4096, "fp8_group", 256), (4096, 4608, "fp8_group", 128),
        (4096, 6144, "fp8_group", 128), (4096, 6656, "fp8_group", 64),
    ],
)  # fmt: skip
def test_more_than_64_rows_are_taken_where_tiles_fill_the_gpu_or_clusters_share_those_of_blocks(
    outputs: int, inputs: int, activation: str, most: int
) -> None:
    """Where a block of a cluster has no more than 16 stages."""

    def is_taken(rows: int, *, of_all: bool = False) -> bool:
        sample = layer(Draw(BRAIN, torch.device("meta")), rows, outputs, inputs, activation, of_all=of_all)
        return record_of(sample) is not None

    assert [rows for rows in ROWS if is_taken(rows)] == [rows for rows in ROWS if rows <= most]
    if activation == "fp8_tensor":
        assert is_taken(64, of_all=True)
        assert not is_taken(65, of_all=True)


@pytest.mark.parametrize(
    ("changes", "is_taken"),
    [
        ({}, True), ({"activation": "fp8_group"}, True), ({"activation": "fp8_tensor", "of_all": True}, True),
        ({"outputs": 201}, True), ({"inputs": 320}, False), ({"activation": "fp8_group", "inputs": 640}, False),
    ],
    ids=str,
)  # fmt: skip
def test_layers_that_are_taken(changes: dict[str, Any], is_taken: bool) -> None:
    sample = layer(Draw(BRAIN, CPU), **({"rows": 20, "outputs": 208, "inputs": 512} | changes))

    assert (record_of(sample) is not None) == is_taken


def test_a_scale_that_is_not_a_param_is_not_taken() -> None:
    """Each thread of a block reads them, when the kernel in front may still run."""
    sample = layer(Draw(BRAIN, CPU), 20, 208, 512)
    use = use_of(sample)
    made = use.operands["scales"]._replace(is_activation=True)

    names = [each.name for each in fitting(use._replace(operands={**use.operands, "scales": made}), {"T": 20})]

    assert not NAMES.intersection(names)


@pytest.mark.parametrize("columns", ROWS[:4])
@pytest.mark.parametrize("in_blocks", [False, True])
def test_plans_have_room_and_fill_the_gpu(columns: int, in_blocks: bool) -> None:
    """A cluster of several blocks has one tile."""
    for (outputs, inputs), expected in PLANS.items():
        plan = plan_of(columns, outputs, inputs, in_blocks=in_blocks)

        assert plan.shared_bytes <= BLOCK_BYTES
        assert plan.stages >= min(5, inputs // 128 // plan.cluster + 1)
        assert (plan.cluster, plan.grid) == expected
        assert plan.cluster == 1 or plan.grid // plan.cluster == -(-outputs // 128)


def test_a_tile_has_half_of_256_rows() -> None:
    assert plan_of(256, 4096, 14336, in_blocks=False)[1:3] == (2, 128)
    assert plan_of(256, 1024, 4096, in_blocks=False)[1:3] == (6, 96)


@pytest.mark.parametrize(
    ("rows", "name", "activation"),
    [
        *product(ROWS[:3], ("o", "gate_up"), ("fp8_token", "fp8_group")),
        *product(ROWS[3:], ("o",), ("fp8_token", "fp8_group")),
    ],
)
def test_it_compiles_for_hopper(rows: int, name: str, activation: str) -> None:
    launch = launch_of(layer(Draw(BRAIN, torch.device("meta")), rows, *LAYERS[name], activation))

    used = used_by(launch)

    assert used["STACK"] == used["LOCAL"] == 0
    assert used["SHARED"] <= BLOCK_BYTES
    assert used["REG"] * launch.block <= 65536


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs the source. The input is not there before the wait."""
    source = Source(tmp_path_factory.mktemp("float8"), "quantised_linear/float8_tiles.cu", "float8_on_cpu.cpp")

    def execute(sample: Sample, *, late: bool = False, stages: int | None = None) -> torch.Tensor:
        tensors = {name: x for name, x in sample.items() if torch.is_tensor(x)}
        out = torch.full((1, sample["input"].shape[1], len(sample["weight"])), torch.nan, dtype=sample["dtype"])
        nan = {"input": torch.full_like(sample["input"].float(), torch.nan).to(sample["input"].dtype),
               "input_scales": torch.full_like(sample["input_scales"], torch.nan)}  # fmt: skip
        launch = launch_of(sample)
        if stages is not None:
            launch = launch._replace(constants={**launch.constants, "STAGES": stages})
        source.run(launch, {**tensors, "out.0": out}, late, nan)
        return out

    return execute


@pytest.mark.parametrize(
    ("dtype", "rows", "outputs", "inputs", "more"),
    [
        (BRAIN, 9, 208, 512, {}),
        (HALF, 17, 144, 384, {"bias": True}),
        (BRAIN, 40, 128, 128, {"activation": "fp8_tensor", "of_all": True}),
        (HALF, 64, 320, 512, {"activation": "fp8_group"}),
        (BRAIN, 33, 256, 1024, {"activation": "fp8_group", "bias": True}),
        (BRAIN, 12, 17040, 256, {"of_all": True}),
        (BRAIN, 20, 201, 256, {"bias": True}),
        (BRAIN, 100, 208, 384, {}),
        (HALF, 65, 144, 512, {"of_all": True, "bias": True}),
        (BRAIN, 150, 320, 384, {"bias": True}),
        (HALF, 131, 136, 512, {"activation": "fp8_group"}),
    ],
    ids=str,
)
def test_source_on_a_cpu(
    on_cpu: Run, dtype: torch.dtype, rows: int, outputs: int, inputs: int, more: dict[str, Any],
    same: Callable[..., None],
) -> None:  # fmt: skip
    """Clusters of one block to four; one has more tiles than blocks."""
    sample = layer(Draw(dtype, CPU), rows, outputs, inputs, **more)
    for late in (False, True):
        same(ROUNDED_LINEAR, on_cpu(sample, late=late), rounded_linear(**sample))


@pytest.mark.parametrize(("rows", "activation"), [(16, "fp8_token"), (30, "fp8_group"), (70, "fp8_group")])
@pytest.mark.parametrize("inputs", [2048, 3584])
def test_places_of_the_ring_are_used_again(
    on_cpu: Run, rows: int, inputs: int, activation: str, same: Callable[..., None]
) -> None:
    """When all is added up that was there: by clusters of eight blocks, an even and an odd number of stages each."""
    sample = layer(Draw(BRAIN, CPU), rows, 120, inputs, activation)
    for late in (False, True):
        same(ROUNDED_LINEAR, on_cpu(sample, late=late, stages=2), rounded_linear(**sample))


def test_a_row_has_the_same_bits_among_others(on_cpu: Run) -> None:
    sample = layer(Draw(BRAIN, CPU), 50, 144, 640)
    few = sample | {name: sample[name][:, :10].contiguous() for name in ("input", "input_scales")}

    assert torch.equal(on_cpu(sample)[:, :10], on_cpu(few))


# --- on a GPU ----------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu() -> torch.device:
    """The GPU, if it is one that the kernel runs on."""
    if torch.cuda.get_device_capability() != HOPPER:
        pytest.skip(f"needs compute capability 9.0, and this GPU has {torch.cuda.get_device_capability()}")
    return torch.device("cuda")


def run(sample: Sample) -> torch.Tensor:
    """Into memory full of NaN."""
    record = tiles_of(sample)
    out = torch.full(
        (1, sample["input"].shape[1], len(sample["weight"])), torch.nan, dtype=sample["dtype"], device="cuda"
    )
    as_function(record)(**sample, out=out)
    return out


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [HALF, BRAIN], ids=str)
@pytest.mark.parametrize(
    "more", [{}, {"activation": "fp8_group"}, {"activation": "fp8_tensor", "of_all": True}], ids=str
)
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 512), (2000, 1536), (4096, 4096), (20480, 1024)])
def test_products(
    gpu: torch.device, outputs: int, inputs: int, more: dict[str, Any], dtype: torch.dtype, same: Callable[..., None]
) -> None:
    """Each row has the same bits as among fewer. The tensor cores keep 14 digits of what they sum over 128 inputs."""
    for rows in (9, 31, 64, 90, 128, 130, 256):
        sample = layer(Draw(dtype, gpu), rows, outputs, inputs, bias=True, **more)
        found = run(sample)

        same(ROUNDED_LINEAR, found, rounded_linear(**sample), BRAIN)
        few = sample | {name: sample[name][:, : rows - 1].contiguous() for name in ("input", "input_scales")}
        if rows > 9:
            assert torch.equal(run(few), found[:, : rows - 1])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("activation", "rows"), [("fp8_token", 40), ("fp8_group", 40), ("fp8_token", 100), ("fp8_group", 250)]
)
def test_a_chain_of_layers_gives_the_same_each_time(gpu: torch.device, activation: str, rows: int) -> None:
    """Each layer begins while the one in front still runs."""
    layers = [layer(Draw(BRAIN, gpu), rows, 1024, 1024, activation) for _ in range(6)]

    def chained() -> list[torch.Tensor]:
        return [run(each) for each in layers]

    first = chained()
    assert all(torch.isfinite(each).all() for each in first)
    assert all(torch.equal(a, b) for _ in range(4) for a, b in zip(chained(), first, strict=True))
