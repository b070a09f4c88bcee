"""The gate of a feed-forward layer that rounds its rows by token, in CUDA C++: its source on a CPU, and on GPUs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from clusters_on_cpu import Source
from cubins import used_by
from op_samples.draw import Draw

from precast.kernels.choices import records_of
from precast.kernels.launch import as_function, use_of_tensors
from precast.kernels.quantised_linear.quantised_linear import few_bits, from_few_bits
from precast.kernels.records import Launch
from precast.kernels.rounded.rounded import ROUNDED_GATED_ACTIVATION, rounded_gated_activation
from precast.kernels.storage import bits
from precast.kernels.use import Target

HOPPER = Target("cuda", (9, 0))
HALF, BRAIN = torch.float16, torch.bfloat16
CPU = torch.device("cpu")
Run = Callable[..., tuple[torch.Tensor, torch.Tensor]]


RECORDS = {each.name: each for each in records_of("precast.rounded_gated_activation", 1) if each.kind == "cuda"}
WIDE = "cuda.rounded_gated_activation_of_wide_rows"
"""Takes rows of any length, in steps of any size."""
LAUNCHED_OTHERWISE = [name for name in RECORDS if name != "cuda.rounded_gated_activation_to_64"]
"""Those of few tokens are launched as wide ones are."""


def launch_of(x: torch.Tensor, kind: str, by: str) -> Launch:
    """That of one of `RECORDS`."""
    runs = RECORDS[by].runs
    assert callable(runs)
    arguments = {"x": x, "kind": kind, "activation": "fp8_token", "input_scale": None}
    (launch,) = runs(use_of_tensors("precast.rounded_gated_activation", 1, arguments))
    return launch


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs the kernel's source. What the kernel in front writes is not there before the wait: NaN is."""
    source = Source(tmp_path_factory.mktemp("gate"), "rounded/gate.cu", "gate_on_cpu.cpp")

    def execute(x: torch.Tensor, kind: str = "silu", by: str = WIDE) -> tuple[torch.Tensor, torch.Tensor]:
        values = torch.full((*x.shape[:-1], x.shape[-1] // 2), torch.nan).to(torch.float8_e4m3fn)
        scales = torch.full((*x.shape[:-1], 1), torch.nan)
        before = {"x": torch.full_like(x, torch.nan)} if x.is_contiguous() else {}
        source.run(launch_of(x, kind, by), {"out.0": values, "out.1": scales, "x": x}, False, before)
        return values, scales

    return execute


def is_near(found: tuple[torch.Tensor, torch.Tensor], x: torch.Tensor, kind: str, same: Callable[..., None]) -> None:
    """Values and scales apart, and what they mean together: next to each other in few bits, at most."""
    expected = rounded_gated_activation(x, kind=kind, activation="fp8_token")
    same(ROUNDED_GATED_ACTIVATION, found, expected)
    meant, wanted = (from_few_bits(values, scales, "fp8_token") for values, scales in (found, expected))
    assert ((meant - wanted).abs() <= 1.02 * wanted.abs() / 8 + wanted.abs().amax(-1, keepdim=True) / 100).all()
    assert (meant == wanted).float().mean() > 0.9


@pytest.mark.parametrize(
    ("dtype", "kind", "shape"),
    [
        (BRAIN, "silu", (1, 3, 2 * 2056)), (HALF, "gelu", (2, 16)), (BRAIN, "gelu_tanh", (3, 2 * 1200)),
        (HALF, "silu", (2, 2, 2 * 14336)), (BRAIN, "silu", (1, 2 * 20000)),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("by", LAUNCHED_OTHERWISE)
def test_source_on_a_cpu(
    on_cpu: Run, by: str, dtype: torch.dtype, kind: str, shape: tuple[int, ...], same: Callable[..., None]
) -> None:
    x = Draw(dtype, CPU).normal(*shape)

    is_near(on_cpu(x, kind, by), x, kind, same)


def test_rows_that_lie_apart(on_cpu: Run, same: Callable[..., None]) -> None:
    """With gaps between elements, and from an odd place on."""
    draw = Draw(BRAIN, CPU)
    for x in (draw.normal(3, 2 * 2 * 64)[:, ::2], draw.normal(3, 2 * 64 + 5)[:, 3:-2], draw.normal(2 * 64, 3).t()):
        found = on_cpu(x)

        is_near(found, x, "silu", same)
        assert torch.equal(bits(found[0]), bits(on_cpu(x.contiguous())[0]))


def passed_on(values: torch.Tensor) -> torch.Tensor:
    """Rows [R, 2 F] of which the gated half is these values times 32: the sigmoid of 32 is 1."""
    return torch.cat([torch.full_like(values, 32), values], -1)


@pytest.mark.parametrize("largest", [2.0**-130, 2.0**-60, 0.37, 1.0, 448.0, 2.0**100])
def test_quotients_are_rounded_once(on_cpu: Run, largest: float) -> None:
    """Of numbers of any size below the largest, ties of float8 among them: bit for bit, with the sign of 0."""
    draw = torch.Generator().manual_seed(0)
    sizes = torch.randint(-20, 1, (2, 4096), generator=draw).float().exp2()
    values = (torch.randint(-31, 32, (2, 4096), generator=draw) / 31 * sizes * largest).to(BRAIN)
    values[:, :3] = torch.tensor([largest, -0.0, 0.0])

    found = on_cpu(passed_on(values))
    expected = few_bits((values * 32).float(), "fp8_token")

    assert torch.equal(bits(found[0]), bits(expected[0]))
    assert torch.equal(found[1], expected[1])


def test_rows_of_zeros_and_of_what_is_no_number(on_cpu: Run) -> None:
    """Each row has a scale of its own: 0 of zeros, whose values stay 0; NaN and infinity are seen by all of a row."""
    values = torch.ones(4, 2064, dtype=BRAIN)
    values[0], values[1, 2063], values[2, 5] = 0, torch.nan, torch.inf

    found = on_cpu(passed_on(values))

    assert found[1][0] == 0
    assert (found[0][0].float() == 0).all()
    assert found[1][1].isnan()
    assert found[0][1].float().isnan().all()
    assert found[1][2] == torch.inf
    assert found[0][2].float().isnan().sum() == 1
    assert (found[0][3].float() == 448).all()


@pytest.mark.parametrize("by", RECORDS)
@pytest.mark.parametrize("width", [8, 14336, 53248])
def test_what_is_compiled(by: str, width: int) -> None:
    """Without a stack, for any length of rows."""
    launch = launch_of(torch.empty(3, 2 * width, dtype=BRAIN), "silu", by)

    used = used_by(launch)

    assert used["REG"] * launch.block <= 65536
    assert (used["STACK"], used["LOCAL"]) == (0, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BRAIN, HALF], ids=str)
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("shape", [(1, 1, 2 * 14336), (1, 300, 2 * 1200), (67, 2 * 20000), (2, 3, 16)], ids=str)
@pytest.mark.parametrize("by", RECORDS)
def test_on_a_gpu(by: str, dtype: torch.dtype, kind: str, shape: tuple[int, ...], same: Callable[..., None]) -> None:
    if torch.cuda.get_device_capability() != HOPPER.capability:
        pytest.skip(f"needs compute capability 9.0, and this GPU has {torch.cuda.get_device_capability()}")
    x = Draw(dtype, torch.device("cuda")).normal(*shape)

    found = as_function(RECORDS[by])(x=x, kind=kind, activation="fp8_token", input_scale=None)

    is_near(tuple(each.cpu() for each in found), x.cpu(), kind, same)
