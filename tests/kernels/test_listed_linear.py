"""Linear layers whose inputs are of groups in any order: which the kernel takes; its source on a CPU, and on a GPU,
against the definition."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from clusters_on_cpu import Source
from compiled_launches import resource_usage
from op_samples import quantised
from op_samples.draw import Draw, Sample

from precast.ir.graph.schema import TensorType
from precast.kernels import cuda_source
from precast.kernels.choices import fitting, resolve
from precast.kernels.launch import as_function, use_of_tensors
from precast.kernels.quantised_linear.listed import LISTED, MOST_ROWS
from precast.kernels.quantised_linear.quantised_linear import quantised_linear
from precast.kernels.records import Launch
from precast.kernels.use import Use

BLOCK_BYTES = 227 << 10
"""Shared memory that a block may have on Hopper."""
HOPPER = (9, 0)
CPU, META = (Draw(torch.float32, torch.device(name)) for name in ("cpu", "meta"))
SHAPES = [(40, 96, 32), (8, 8, 8), (1000, 1000, 40), (4096, 4096, 128), (200, 14336, 32)]
"""Outputs, inputs, and inputs of a group: fewer than a block's, no multiples of what a warp takes, one word, and so
many groups that there is one copy of them."""


def called(
    draw: Draw, rows: int, outputs: int, inputs: int, size: int, *, bias: bool = False,
    dtype: torch.dtype = torch.float16, scales: torch.dtype = torch.float16,
) -> Sample:  # fmt: skip
    weight = quantised.gptq(draw, outputs, inputs, size, order=True)
    weight["scales"] = weight["scales"].to(scales)
    x = draw.normal(1, rows, inputs).to(dtype)
    return quantised.call(x, weight, bias=draw.normal(outputs).to(dtype) if bias else None)


def use_of(sample: Sample) -> Use:
    """Of params, but for the input."""
    use = use_of_tensors("precast.quantised_linear", 1, sample)
    operands = {name: each._replace(is_activation=name == "input") for name, each in use.operands.items()}
    return use._replace(operands=operands, target=use.target._replace(device="cuda", capability=HOPPER))


def is_taken(sample: Sample) -> bool:
    return LISTED in fitting(use_of(sample), {"T": 1})


def launch_of(sample: Sample) -> Launch:
    assert not isinstance(LISTED.runs, str)
    (launch,) = LISTED.runs(use_of(sample))
    return launch


@pytest.mark.parametrize("shape", SHAPES)
def test_what_a_block_has_fits(shape: tuple[int, int, int]) -> None:
    launch = launch_of(called(META, 8, *shape))

    assert launch.shared_bytes <= BLOCK_BYTES
    assert launch.constants["COPIES"] == (1 if shape[1] // shape[2] > 225 else 4)


def test_what_it_leaves_to_others() -> None:
    plain = called(CPU, 1, 40, 96, 32)
    refused = {
        "no list": {**plain, "groups": None},
        "another format": quantised.call(CPU.normal(1, 1, 96).half(), quantised.packed(CPU, 40, 96, 4, size=32)),
        "scales of float32": called(CPU, 1, 40, 96, 32, scales=torch.float32),
        "scales of another type": called(CPU, 1, 40, 96, 32, scales=torch.bfloat16),
        "float32": {**plain, "input": CPU.normal(1, 1, 96)},
        "too many groups": called(META, 1, 64, 1 << 15, 16),
        "an input that is rounded": {**plain, "activation": "fp8_token"},
    }

    assert is_taken(plain)
    assert {name for name, sample in refused.items() if is_taken(sample)} == set()


def test_a_step_of_up_to_64_tokens_is_its_own() -> None:
    given = use_of(called(META, 1, 4096, 4096, 128))
    x = given.operands["input"]
    of_tokens = x._replace(type=TensorType("float16", (1, "T", 4096)))
    given = given._replace(operands={**given.operands, "input": of_tokens})

    names = [resolve(given, {"T": tokens}).record.name for tokens in (1, 16, MOST_ROWS, MOST_ROWS + 1)]
    assert names == [LISTED.name] * 3 + ["cublaslt.quantised_linear_from_33"]


def in_float32(sample: Sample) -> torch.Tensor:
    """The definition's values, rounded to the input's type, in a product of float32."""
    x = sample["input"]
    unit = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)[None]
    values = quantised_linear(**{**sample, "input": unit, "bias": None})[0].float()
    bias = 0 if sample["bias"] is None else sample["bias"].float()
    return x.float() @ values + bias


def is_near(found: torch.Tensor, sample: Sample) -> None:
    wide = 1e-2 if found.dtype == torch.bfloat16 else 2e-3
    torch.testing.assert_close(found.float(), in_float32(sample), rtol=wide, atol=wide)


# --- its source on a CPU -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Sample], torch.Tensor]:
    """Runs the kernel's source. The input is not there before the wait for the kernel in front: NaN is."""
    source = Source(tmp_path_factory.mktemp("listed"), "quantised_linear/listed.cu", "listed_on_cpu.cpp")

    def execute(sample: Sample) -> torch.Tensor:
        x, outputs = sample["input"], sample["weight"].shape[1]
        out = torch.full((*x.shape[:-1], outputs), torch.nan, dtype=x.dtype)
        given = {name: value for name, value in sample.items() if isinstance(value, torch.Tensor)}
        source.run(launch_of(sample), {**given, "out.0": out}, False, {"input": torch.full_like(x, torch.nan)})
        return out

    return execute


@pytest.mark.parametrize(
    ("shape", "rows", "dtype", "scales"),
    [
        ((40, 96, 32), 5, torch.float16, torch.float16), ((8, 8, 8), 1, torch.bfloat16, torch.float16),
        ((72, 1000, 40), 17, torch.bfloat16, torch.bfloat16), ((4256, 64, 16), 3, torch.float16, torch.float16),
        ((32, 3616, 16), 9, torch.bfloat16, torch.float16),
    ],
    ids=str,
)  # fmt: skip
def test_source_on_a_cpu(
    on_cpu: Callable[[Sample], torch.Tensor], shape: tuple[int, int, int], rows: int, dtype: torch.dtype,
    scales: torch.dtype,
) -> None:  # fmt: skip
    """Of fewer outputs than a block's, of more than as many blocks as there are multiprocessors, of one word, with one
    copy of groups; and a row alone has the same bits."""
    sample = called(CPU, rows, *shape, bias=rows % 2 == 1, dtype=dtype, scales=scales)
    found = on_cpu(sample)

    is_near(found, sample)
    assert torch.equal(on_cpu({**sample, "input": sample["input"][:, -1:].clone()}), found[:, -1:])


def test_an_input_of_no_group_has_no_weight(on_cpu: Callable[[Sample], torch.Tensor]) -> None:
    sample = called(CPU, 3, 40, 96, 32)
    groups, x = sample["groups"].clone(), sample["input"].clone()
    groups[5], groups[90] = 3, -1
    x[..., 5] = x[..., 90] = 0

    assert torch.equal(on_cpu({**sample, "groups": groups}), on_cpu({**sample, "input": x}))


@pytest.mark.skipif(not cuda_source.is_installed(), reason="cuda-bindings are not installed")
@pytest.mark.parametrize(
    ("dtype", "scales"),
    [(torch.float16, torch.float16), (torch.bfloat16, torch.float16), (torch.bfloat16, torch.bfloat16)], ids=str,
)  # fmt: skip
@pytest.mark.parametrize("outputs", [4096, 28672])
def test_it_compiles_for_hopper(outputs: int, dtype: torch.dtype, scales: torch.dtype, tmp_path: Path) -> None:
    """With as few registers as its threads may have, and without more memory for them."""
    launch = launch_of(called(META, 8, outputs, 4096, 128, bias=True, dtype=dtype, scales=scales))
    cubin = cuda_source.compiled("quantised_linear/listed.cu", tuple(launch.constants.items()), HOPPER)
    used = resource_usage(cubin, tmp_path)

    at_once = 1 if launch.constants["WARPS"] == 16 else 2
    assert used["REG"] * launch.block * at_once <= 65536
    assert launch.shared_bytes * at_once <= BLOCK_BYTES
    assert (used["STACK"], used["LOCAL"]) == (0, 0)


# --- on a GPU ----------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu() -> Draw:
    """Numbers on the GPU, if it is one that the kernel runs on."""
    if torch.cuda.get_device_capability() != HOPPER:
        pytest.skip(f"needs compute capability 9.0, and this GPU has {torch.cuda.get_device_capability()}")
    return Draw(torch.float32, torch.device("cuda"))


def run(sample: Sample) -> torch.Tensor:
    """Into memory full of NaN."""
    rows, outputs = sample["input"].shape[1], sample["weight"].shape[1]
    out = torch.full((1, rows, outputs), torch.nan, dtype=sample["input"].dtype, device="cuda")
    as_function(LISTED)(**sample, out=out)
    return out


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_products(gpu: Draw, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Of 1 to 64 rows, of which each has the same bits as alone."""
    sample = called(gpu, 64, *shape, bias=True, dtype=dtype)
    together = run(sample)

    is_near(together, sample)
    for rows in (1, 7, 8, 9, 16, 17, 33):
        assert torch.equal(run({**sample, "input": sample["input"][:, :rows]}), together[:, :rows])


@pytest.mark.gpu
def test_scales_of_the_input_s_type(gpu: Draw) -> None:
    sample = called(gpu, 5, 4104, 1024, 128, dtype=torch.bfloat16, scales=torch.bfloat16)

    is_near(run(sample), sample)


@pytest.mark.gpu
def test_a_chain_of_layers_gives_the_same_each_time(gpu: Draw) -> None:
    """Each layer's kernel begins while those in front still run. Results grow beyond float16."""
    layers = [called(gpu, 3, 1024, 1024, 64, dtype=torch.bfloat16) for _ in range(12)]

    def chained() -> torch.Tensor:
        x = layers[0]["input"]
        for each in layers:
            x = run({**each, "input": x})
        return x

    first = chained()
    expected = layers[0]["input"]
    for each in layers:
        expected = quantised_linear(**{**each, "input": expected})
    assert torch.isfinite(first).all()
    largest = float(expected.float().abs().max())
    torch.testing.assert_close(first.float(), expected.float(), rtol=0.1, atol=0.1 * largest)
    assert all(torch.equal(chained(), first) for _ in range(5))
