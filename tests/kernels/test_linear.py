"""The weight stream: compiled without a GPU; on one against float32, alone, in chains and in CUDA graphs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_on_cpu import compiled
from plain_source import plain_source
from torch.nn import functional

from precast.kernels import cuda_source
from precast.kernels.gated_activation.gated_activation import gated_activation
from precast.kernels.gated_linear.records import RECORDS as GATED_RECORDS
from precast.kernels.launch import Launched, as_function
from precast.kernels.linear.records import RECORDS, stream
from precast.kernels.linear.stream_plan import (
    LONG,
    MAX_ROWS,
    SHORT,
    SIXTEEN_BITS,
    TILE,
    Stored,
    Way,
    plan_of,
    plan_that_fits,
)
from precast.kernels.quantised_linear import streamed
from precast.kernels.records import Record

FILE, HOPPER = "linear/stream.cu", (9, 0)
BLOCK_BYTES = 227 << 10
"""Shared memory that a block may have on Hopper."""
VARIANTS = [
    {}, {"BIAS": True}, {"FLOAT16": True}, {"RESIDUAL": True}, {"GATE": "silu"}, {"GATE": "gelu_tanh", "BIAS": True},
    {"GATE": "gelu", "BIAS": True, "RESIDUAL": True, "FLOAT16": True},
]  # fmt: skip

OF_FEW_BITS = [way for of_rows in streamed._WAYS.values() for ways in of_rows.values() for way in ways]
WAYS = dict.fromkeys((LONG, SHORT, *OF_FEW_BITS))

needs_nvrtc = pytest.mark.skipif(not cuda_source.is_installed(), reason="cuda-bindings are not installed")


# --- without a GPU -----------------------------------------------------------------------------------------------


@needs_nvrtc
@pytest.mark.parametrize("constants", VARIANTS, ids=lambda each: " ".join(each) or "plain")
def test_it_compiles_to_the_same_bytes_each_time(constants: dict[str, Any]) -> None:
    given = tuple(constants.items())
    first = cuda_source.compiled(FILE, given, HOPPER)
    cuda_source.compiled.cache_clear()

    assert cuda_source.compiled(FILE, given, HOPPER) == first
    assert cuda_source.compiled(FILE, given, HOPPER) is cuda_source.compiled(FILE, given, HOPPER)
    assert first.startswith(b"\x7fELF")


@needs_nvrtc
def test_its_ring_fits_beside_what_it_keeps_itself(tmp_path: Path) -> None:
    triton = pytest.importorskip("triton", reason="cuobjdump comes with Triton, which is published for Linux only")
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    cubin = tmp_path / "stream.cubin"
    cubin.write_bytes(cuda_source.compiled(FILE, (("GATE", "gelu"), ("BIAS", True), ("RESIDUAL", True)), HOPPER))
    said = subprocess.run([tool, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True).stdout
    used = dict(word.split(":") for word in said.split() if word.count(":") == 1 and word[-1].isdigit())

    largest = max(
        stream("T", outputs, inputs, "bfloat16", most=rows).shared_bytes
        for rows in range(1, MAX_ROWS + 1) for outputs in (16, 4096, 200_000) for inputs in range(32, 16_384, 32)
    )  # fmt: skip
    assert int(used["SHARED"]) - 1024 + largest <= BLOCK_BYTES
    assert int(used["REG"]) * stream("T", 64, 64, "bfloat16").block <= 65536
    assert (used["STACK"], used["LOCAL"]) == ("0", "0")


def test_where_the_compiler_is_missing_the_error_says_what_to_install() -> None:
    code = (
        "import sys\nsys.modules['cuda.bindings'] = None\n"
        "from precast.ir.errors import TargetError\nfrom precast.kernels.cuda_source import compiled\n"
        f"try: compiled({FILE!r}, (), (9, 0))\n"
        "except TargetError as error: print(error.code, error)"
    )
    run = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)

    assert run.stdout.startswith("dependency-missing")
    assert "pip install cuda-bindings nvidia-cuda-nvrtc" in run.stdout


def test_a_tile_for_each_block_and_none_without() -> None:
    assert [stream("T", outputs, 64, "bfloat16").grid for outputs in (1, 16, 17, 128256)] == [(1,), (1,), (2,), (132,)]
    assert [stream("T", outputs, 64, "bfloat16", gate="silu").grid for outputs in (2, 16, 18)] == [(1,), (1,), (2,)]


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize(
    "stored", [SIXTEEN_BITS, Stored(8, 1, 128), Stored(8, 2, 128, 128, 4, True), Stored(4, 2, 128, 128, 2, summed=128)],
    ids=str,
)  # fmt: skip
def test_as_much_is_on_its_way_as_there_is_room_for(stored: Stored, way: Way) -> None:
    """Not more than the way says, but one stage of each team at least."""
    for rows in (1, 2, 8):
        for outputs in (16, 300, 4096, 128_256):
            for inputs in (128, 640, 4096, 14_336):
                plan = plan_that_fits(way, rows, outputs, inputs, stored=stored)
                if plan is None:
                    continue
                stage = stored.teams * TILE * plan.piece * stored.bits // 8
                assert 1 <= plan.in_flight <= plan.stages
                assert plan.in_flight == 1 or plan.in_flight * stage <= way.in_flight
                assert plan.in_flight == plan.stages or (plan.in_flight + 1) * stage > way.in_flight * 0.98
                assert plan.shared_bytes <= BLOCK_BYTES


# --- its source on a CPU -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[float, int]]:
    """Runs the kernel's source: the largest error of a variant and the checksum of the first row's results."""
    folder = tmp_path_factory.mktemp("stream")
    (folder / "stream.inc").write_text(plain_source(FILE), encoding="utf-8")

    @cache
    def built(defines: str) -> Path:
        return compiled("stream_on_cpu.cpp", folder / f"stream{defines.replace(' ', '_')}", *defines.split())

    def execute(
        rows: int, outputs: int, inputs: int, blocks: int, way: Way, lies: int = 0, defines: str = "",
        stored: Stored = SIXTEEN_BITS,
    ) -> tuple[float, int]:  # fmt: skip
        plan = plan_of(way, rows, outputs, inputs, is_gated="GATE" in defines, blocks=blocks, stored=stored)
        numbers = (rows, outputs, inputs, lies, *plan.args, plan.scale_slots, plan.grid, plan.shared_bytes)
        keeps_x = " -DKEEPS_X" if plan.keeps_x else ""
        program = built(f"{defines} -DPASS={plan.tiles_a_pass} -DTEAMS={stored.teams}{keeps_x}".strip())
        done = subprocess.run([program, *map(str, numbers)], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{numbers}: {done.stdout} {done.stderr}"
        error, checksum = done.stdout.split()
        return float(error), int(checksum)

    return execute


EVERYTHING = "-DBIAS -DRESIDUAL -DGATE=gelu_tanh"
READ_AGAIN = Way(piece=1024, kept_bytes=0, room=100_000)
"""x is read for every few tiles, and the ring is short."""


@pytest.mark.parametrize("way", [LONG, SHORT, READ_AGAIN], ids=["long pieces", "short pieces", "x read again"])
@pytest.mark.parametrize(
    ("outputs", "inputs", "blocks"), [(1, 32, 1), (50, 544, 3), (17, 2880, 1), (130, 2080, 1), (84, 4096, 4)],
    ids=["least", "short", "two lengths of pieces", "many tiles", "some blocks have more"],
)  # fmt: skip
def test_source_on_a_cpu(
    on_cpu: Callable[..., tuple[float, int]], outputs: int, inputs: int, blocks: int, way: Way
) -> None:
    """The same for few rows and for many."""
    found = [on_cpu(rows, outputs, inputs, blocks, way) for rows in (1, 7)]

    assert all(error < 2**-8 for error, _ in found)


@pytest.mark.parametrize("lies", [0, 1, 2], ids=["row-major", "gaps", "every second"])
def test_source_on_a_cpu_with_all_that_it_can(on_cpu: Callable[..., tuple[float, int]], lies: int) -> None:
    for rows, way in ((1, LONG), (5, SHORT)):
        error, _ = on_cpu(rows, 54, 288, 2, way, lies, defines=EVERYTHING)

        assert error < 3 * 2**-8


def test_source_on_a_cpu_gives_a_row_the_same_bits_among_others(on_cpu: Callable[..., tuple[float, int]]) -> None:
    """Nor do they depend on the grid, or on the way."""
    ways = ((1, LONG), (3, SHORT), (8, READ_AGAIN))
    found = {on_cpu(rows, 20, 2080, 1, way)[1] for rows, way in ways}
    found |= {on_cpu(1, 20, 2080, blocks, way)[1] for blocks, way in ((2, LONG), (1, LONG._replace(room=80_000)))}

    assert len(found) == 1


FLOAT8 = "-DFLOAT8 -DSTEP=128 -DSCALE_BYTES=4"
ROUNDED = f"{FLOAT8} -DX_FLOAT8 -DX_SCALES=1"
PACKED4, PACKED8 = ("-D" + each + " -DSCALED_ROWS=1" for each in ("PACKED4", "PACKED8"))
FP4 = "-DSTEP=128 -DSCALED_ROWS=1 -DSCALE_BYTES=1"
NVFP4 = f"{FP4} -DNVFP4 -DGROUP=16 -DWHOLE_BYTES=4"
FEW_BITS = {
    "float8": (f"{FLOAT8} -DSCALED_ROWS=1", Stored(8, 2, 128)),
    "float8, one scale": (f"{FLOAT8} -DSCALED_ROWS=64", Stored(8, 2, 128)),
    "float8 in blocks": (f"{FLOAT8} -DGROUP=128 -DSCALED_ROWS=32", Stored(8, 2, 128, 128, 4, True)),
    "float8, rounded": (f"{ROUNDED} -DSCALED_ROWS=1", Stored(8, 1, 128)),
    "float8, rounded, in blocks": (f"{ROUNDED} -DGROUP=128 -DSCALED_ROWS=32", Stored(8, 1, 128, 128, 4, True)),
    "packed4": (f"{PACKED4} -DOFFSET=8 -DSTEP=128 -DGROUP=128 -DSCALE_BYTES=2", Stored(4, 2, 128, 128, 2, summed=128)),
    "packed4, short": (f"{PACKED4} -DOFFSET=7 -DSTEP=64 -DGROUP=64 -DSCALE_BYTES=4", Stored(4, 2, 64, 64, summed=64)),
    "packed4 of rows": (f"{PACKED4} -DOFFSET=8 -DSTEP=64 -DSCALE_BYTES=2", Stored(4, 2, 64, summed=64)),
    "packed4, shorter than a step": (
        f"{PACKED4} -DOFFSET=8 -DSTEP=128 -DGROUP=32 -DSCALE_BYTES=2", Stored(4, 2, 128, 32, 2, summed=32)),
    "packed4, scales of float16": (
        f"{PACKED4} -DOFFSET=8 -DSTEP=128 -DGROUP=128 -DSCALE_BYTES=2 -DSCALES_FLOAT16",
        Stored(4, 2, 128, 128, 2, summed=128)),
    "packed4, points": (
        f"{PACKED4} -DOFFSET=1 -DSTEP=128 -DGROUP=128 -DSCALE_BYTES=2 -DPOINTS",
        Stored(4, 2, 128, 128, 2, points=True, summed=128)),
    "packed4, points, short, float16": (
        f"{PACKED4} -DOFFSET=0 -DSTEP=128 -DGROUP=64 -DSCALE_BYTES=4 -DPOINTS -DFLOAT16",
        Stored(4, 2, 128, 64, points=True, summed=64)),
    "packed8, float16": (
        f"{PACKED8} -DOFFSET=128 -DSTEP=128 -DGROUP=128 -DSCALE_BYTES=2 -DFLOAT16", Stored(8, 2, 128, 128, 2)),
    "packed8, points": (
        f"{PACKED8} -DOFFSET=3 -DSTEP=128 -DGROUP=128 -DSCALE_BYTES=2 -DPOINTS",
        Stored(8, 2, 128, 128, 2, points=True, summed=128)),
    "packed8 of rows": (f"{PACKED8} -DOFFSET=128 -DSTEP=64 -DSCALE_BYTES=2", Stored(8, 2, 64)),
    "int8, float16": ("-DINT8 -DSTEP=128 -DSCALED_ROWS=1 -DSCALE_BYTES=2 -DFLOAT16", Stored(8, 2, 128)),
    "int8 in blocks": (
        "-DINT8 -DSTEP=128 -DGROUP=128 -DSCALED_ROWS=32 -DSCALE_BYTES=4", Stored(8, 2, 128, 128, 4, True)),
    "mxfp4": (f"{FP4} -DMXFP4 -DGROUP=32", Stored(4, 2, 128, 32, 1)),
    "mxfp4, float16": (f"{FP4} -DMXFP4 -DGROUP=32 -DFLOAT16", Stored(4, 2, 128, 32, 1)),
    "nvfp4": (f"{NVFP4} -DWHOLE_ROWS=0", Stored(4, 2, 128, 16, 1)),
    "nvfp4, divided, of rows, float16": (f"{NVFP4} -DWHOLE_ROWS=1 -DDIVIDES -DFLOAT16", Stored(4, 2, 128, 16, 1)),
}  # fmt: skip


@pytest.mark.parametrize(
    ("format", "lies"), [*((each, 0) for each in FEW_BITS), *product(("packed4", "mxfp4"), (1, 2))]
)  # fmt: skip
def test_source_on_a_cpu_of_weights_in_few_bits(
    on_cpu: Callable[..., tuple[float, int]], format: str, lies: int
) -> None:
    """A row has the same bits whatever the way, the grid, and the rows beside it."""
    defines, stored = FEW_BITS[format]
    ways = ((1, 1, LONG), (7, 2, Way(piece=1024, kept_bytes=0, room=60_000)), (3, 1, LONG))

    found = [on_cpu(rows, 52, 3072, blocks, way, lies, f"{defines} -DBIAS", stored) for rows, blocks, way in ways]

    assert all(error < 2**-8 for error, _ in found)
    assert len({checksum for _, checksum in found}) == 1


@pytest.mark.parametrize("stored", ["float8, rounded, in blocks", "packed4, points", "mxfp4", "nvfp4"])
def test_source_on_a_cpu_of_many_tiles(on_cpu: Callable[..., tuple[float, int]], stored: str) -> None:
    """A team has several that share a reading of x, and its scales come round."""
    defines, lies = FEW_BITS[stored]
    outputs, way = (164 if lies.bits == 4 else 308), Way(piece=1024, kept_bytes=0, room=60_000)

    found = {on_cpu(rows, outputs, 3072, 1, each, 0, defines, lies) for rows, each in ((3, way), (1, LONG))}

    assert all(error < 2**-8 for error, _ in found)
    assert len({checksum for _, checksum in found}) == 1


# --- on a GPU ----------------------------------------------------------------------------------------------------


@pytest.fixture
def hopper() -> torch.device:
    """The GPU, if it is one that the weight stream runs on."""
    if torch.cuda.get_device_capability() != HOPPER:
        pytest.skip(f"needs compute capability 9.0, and this GPU has {torch.cuda.get_device_capability()}")
    return torch.device("cuda")


def drawn(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.randn(shape, device="cuda") * scale).to(dtype)


def layer(outputs: int, inputs: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A weight that keeps the deviation of its input."""
    return drawn(outputs, inputs, scale=inputs**-0.5, dtype=dtype)


def run(
    x: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor | None = None, pdl: bool = True,
    most: int | None = None, way: Way | None = None, **more: Any,
) -> torch.Tensor:  # fmt: skip
    """The weight stream's results over `x` [rows, inputs], in `out` or in new memory full of NaN."""
    gate = more.pop("gate", None)
    columns = weight.shape[0] // (1 if gate is None else 2)
    if out is None:
        out = torch.full((len(x), columns), torch.nan, dtype=x.dtype, device=x.device)
    dtype = "float16" if x.dtype == torch.float16 else "bfloat16"
    kinds = {"bias": "bias" in more, "residual": "residual" in more, "gate": gate}
    launch = stream(len(x), *weight.shape, dtype, **kinds, most=len(x) if most is None else most, way=way)
    Launched((launch._replace(pdl=pdl),))(input=x, weight=weight, out=out, **more)
    return out


def for_rows(records: Sequence[Record], rows: int) -> Record:
    """The one that takes so many."""
    return next(each for each in records if each.sizes["T"][0] <= rows <= (each.sizes["T"][1] or rows))


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The product in float32, rounded once."""
    y = functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    return y.to(x.dtype)


close = partial(torch.testing.assert_close, rtol=1e-2, atol=1e-2)
SHAPES = [
    (1, 32), (16, 32), (17, 64), (1000, 4096), (384, 2880), (5, 1024), (250, 544), (2048, 2048), (2112, 7168),
    (4096, 14336), (6144, 4096), (40000, 5120), (128256, 1056),
]  # fmt: skip
GATED_SHAPES = [(2, 32), (18, 544), (34, 2080), (2000, 4096), (1408, 2880), (9216, 3072), (28672, 4096)]
ROWS = (1, 2, 3, 5, 8)


@pytest.mark.gpu
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_products(hopper: torch.device, outputs: int, inputs: int, dtype: torch.dtype, has_bias: bool) -> None:
    """By the record, as the loader calls it."""
    weight, bias = layer(outputs, inputs, dtype), drawn(outputs, dtype=dtype) if has_bias else None
    for rows in ROWS:
        x = drawn(1, rows, inputs, dtype=dtype)
        out = torch.full((1, rows, outputs), torch.nan, dtype=dtype, device=hopper)
        as_function(for_rows(RECORDS, rows))(input=x, weight=weight, bias=bias, out=out)

        close(out, exact(x, weight, bias))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "cut",
    [
        lambda x: x[:, 16 : 16 + 1056],
        lambda x: x[:, 3 : 3 + 1056],
        lambda x: x[:, : 2 * 1056 : 2],
        lambda x: x.reshape(-1)[1:].as_strided((x.shape[0], 1056), (1057, 1)),
        lambda x: x[:, : 1056].t().contiguous().t(),
        lambda x: x[:1, :1056].expand(x.shape[0], 1056),
    ],
    ids=["aligned", "odd", "every second", "odd rows", "transposed", "expanded"],
)  # fmt: skip
def test_rows_that_lie_anyhow(hopper: torch.device, cut: Callable[[torch.Tensor], torch.Tensor]) -> None:
    weight = layer(500, 1056)
    for rows in ROWS:
        x = cut(drawn(rows, 2200))

        close(run(x, weight), exact(x, weight))


@pytest.mark.gpu
@pytest.mark.parametrize(("outputs", "inputs"), [(1000, 4096), (4096, 14336), (384, 2880), (30000, 2048)])
def test_a_row_does_not_depend_on_the_others(hopper: torch.device, outputs: int, inputs: int) -> None:
    x, weight = drawn(8, inputs), layer(outputs, inputs)
    together = run(x, weight)

    for rows in range(1, 9):
        assert torch.equal(run(x[:rows], weight), together[:rows])
    for row in range(8):
        assert torch.equal(run(x[row : row + 1], weight), together[row : row + 1])


TRIED = {
    "long": LONG, "short": SHORT, "x read again": READ_AGAIN, "x kept": LONG._replace(kept_bytes=72 << 10, kept_from=0),
    "tiny pieces": SHORT._replace(piece=512), "room": SHORT._replace(room=60_000),
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("way", TRIED)
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(1, 32), (16, 32), (17, 64), (384, 2880), (4096, 14336), (40000, 4096), (2100, 7168)]
)  # fmt: skip
def test_every_way_gives_the_same_bits(hopper: torch.device, outputs: int, inputs: int, way: str) -> None:
    weight = layer(outputs, inputs)
    for rows in (1, 2, 3, 8):
        x = drawn(rows, 2 * inputs)
        for each in (x[:, :inputs], x[:, ::2], x[:, inputs:].contiguous()):
            expected = run(each, weight)
            close(expected, exact(each, weight))

            assert torch.equal(run(each, weight, way=TRIED[way]), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("way", TRIED)
def test_every_way_of_gated_layers(hopper: torch.device, way: str) -> None:
    weight, bias, residual = layer(28672, 4096), drawn(28672), drawn(8, 14336)
    for rows in (1, 8):
        x, more = drawn(rows, 4096), {"gate": "silu", "bias": bias, "residual": residual[:rows]}

        assert torch.equal(run(x, weight, way=TRIED[way], **more), run(x, weight, **more))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize(("outputs", "inputs"), [(2, 64), (36, 544), (2000, 4096), (28672, 1024)])
def test_gated(hopper: torch.device, outputs: int, inputs: int, kind: str) -> None:
    """As the product, rounded, and the gate after it; with a bias and a residual too."""
    weight, bias = layer(outputs, inputs), drawn(outputs)
    for rows in ROWS:
        x, residual = drawn(rows, inputs), drawn(rows, outputs // 2)

        close(run(x, weight, gate=kind), gated_activation(exact(x, weight), kind=kind), rtol=2e-2, atol=2e-2)
        expected = gated_activation(exact(x, weight, bias), kind=kind) + residual
        close(run(x, weight, gate=kind, bias=bias, residual=residual), expected, rtol=2e-2, atol=4e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize(("outputs", "inputs"), GATED_SHAPES)
def test_gated_layers(
    hopper: torch.device, outputs: int, inputs: int, kind: str, dtype: torch.dtype, has_bias: bool
) -> None:
    """By the record, as the loader calls it."""
    weight, bias = layer(outputs, inputs, dtype), drawn(outputs, dtype=dtype) if has_bias else None
    for rows in range(1, MAX_ROWS + 1):
        x = drawn(1, rows, inputs, dtype=dtype)
        out = torch.full((1, rows, outputs // 2), torch.nan, dtype=dtype, device=hopper)
        as_function(for_rows(GATED_RECORDS, rows))(input=x, weight=weight, bias=bias, kind=kind, out=out)

        close(out, gated_activation(exact(x, weight, bias), kind=kind), rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
def test_a_gated_row_does_not_depend_on_the_others(hopper: torch.device) -> None:
    x, weight = drawn(8, 4096), layer(28672, 4096)
    together = run(x, weight, gate="silu")

    for rows in range(1, 9):
        assert torch.equal(run(x[:rows], weight, gate="silu"), together[:rows])
        assert torch.equal(run(x[rows - 1 : rows], weight, gate="silu"), together[rows - 1 : rows])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 5, 8])
def test_gated_layers_in_a_captured_chain_follow_their_inputs(hopper: torch.device, rows: int) -> None:
    """A gated layer and the one behind it, between the same two buffers, thirty times in one graph."""
    # What a layer adds is small, or thirty that square their input would overflow.
    weights = [(layer(2 * 3584, 1024), drawn(1024, 3584, scale=0.1 * 3584**-0.5)) for _ in range(30)]
    x, inner = drawn(rows, 1024), drawn(rows, 3584)

    def chain(pdl: bool) -> None:
        for up, down in weights:
            run(x, up, gate="gelu_tanh", out=inner, pdl=pdl)
            run(inner, down, residual=x, out=x, pdl=pdl)

    given = [drawn(rows, 1024) for _ in range(20)]
    expected = []
    for each in given:
        x.copy_(each)
        chain(False)
        expected.append(x.clone())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(True)
    for each, wanted in zip(given, expected, strict=True):
        x.copy_(each)
        inner.fill_(torch.nan)
        graph.replay()

        assert torch.equal(x, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize(("outputs", "inputs"), [(4096, 14336), (1000, 544)])
def test_residual_in_place(hopper: torch.device, outputs: int, inputs: int) -> None:
    """Rounded as the product and the sum are apart."""
    weight = layer(outputs, inputs)
    for rows in ROWS:
        x, residual = drawn(rows, inputs), drawn(rows, outputs)
        expected = run(x, weight) + residual
        run(x, weight, residual=residual, out=residual)

        assert torch.equal(residual, expected)


@pytest.mark.gpu
def test_a_residual_that_lies_apart(hopper: torch.device) -> None:
    x, weight, wide = drawn(5, 544), layer(200, 544), drawn(5, 777)

    assert torch.equal(run(x, weight, residual=wide[:, 7:207]), run(x, weight) + wide[:, 7:207])


class Chain:
    """Layers of different sizes in turn, between two pairs of buffers that are written again and again."""

    def __init__(self, rows: int, num_layers: int, way: Way | None = None) -> None:
        self.rows, self.way = rows, way
        self.weights = [layer(*((2048, 4096) if i % 2 == 0 else (4096, 2048))) for i in range(num_layers)]
        self.x, self.narrow, self.wide = (drawn(rows, size) for size in (4096, 2048, 4096))
        self.logits = torch.full((rows, 32000), torch.nan, dtype=torch.bfloat16, device="cuda")
        self.head = layer(32000, 4096)

    def __call__(self, pdl: bool, between: Callable[[], Any] = lambda: None) -> None:
        given = self.x
        for index, weight in enumerate(self.weights):
            out = self.narrow if index % 2 == 0 else self.wide
            run(given, weight, out=out, pdl=pdl, way=self.way)
            between()
            given = out
        run(given, self.head, out=self.logits, pdl=pdl, way=self.way)

    def expected(self, xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The logits for each input, one kernel after the other."""
        found = []
        for x in xs:
            self.x.copy_(x)
            self(False)
            found.append(self.logits.clone())
        return found


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("way", TRIED)
def test_a_chain_that_overlaps_has_the_same_bits(hopper: torch.device, rows: int, way: str) -> None:
    chain = Chain(rows, 40, TRIED[way])
    (expected,) = chain.expected([chain.x.clone()])
    for _ in range(20):
        chain.logits.fill_(torch.nan)
        chain(True)

        assert torch.equal(chain.logits, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 5, 8])
@pytest.mark.parametrize("has_others", [False, True], ids=["alone", "among torch's"])
def test_a_captured_chain_follows_its_inputs(hopper: torch.device, rows: int, has_others: bool) -> None:
    """Kernels of torch's and copies between them neither start early nor are passed by."""
    chain, other = Chain(rows, 20), drawn(rows, 4096)

    def between() -> None:
        if has_others:
            chain.wide.mul_(1.0)
            other.copy_(chain.wide)
            chain.wide.copy_(other)

    xs = [drawn(rows, 4096) for _ in range(100)]
    expected = chain.expected(xs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(True, between)
    for x, logits in zip(xs, expected, strict=True):
        chain.x.copy_(x)
        chain.logits.fill_(torch.nan)
        graph.replay()

        assert torch.equal(chain.logits, logits)


@pytest.mark.gpu
def test_first_launched_while_a_stream_is_captured(hopper: torch.device) -> None:
    """A process of its own: nothing is compiled or loaded before the capture."""
    code = """
import torch
from precast.kernels.launch import as_function
from precast.kernels.linear.records import RECORDS
x, w = torch.randn(2, 512, device="cuda").bfloat16(), torch.randn(300, 512, device="cuda").bfloat16()
y, graph = torch.zeros(2, 300, dtype=torch.bfloat16, device="cuda"), torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    as_function(RECORDS[0])(input=x, weight=w, out=y)
graph.replay()
torch.testing.assert_close(y, x @ w.t(), rtol=1e-2, atol=0.3)
print("the same")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert done.stdout == "the same\n", done.stderr
