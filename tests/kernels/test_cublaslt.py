"""cuBLASLt's products: how it is called, against the library by hand; on a GPU against float32, and in CUDA graphs."""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from cublaslt_by_hand import CublasLt
from op_samples import quantised
from op_samples.draw import Draw, Sample
from torch.nn import functional

from precast.ir.graph.schema import Node, Ref, TensorType, Value
from precast.kernels.gated_linear.records import RECORDS as GATED
from precast.kernels.launch import Launched, as_function
from precast.kernels.linear import cublaslt, scaled_tiles
from precast.kernels.linear.cublaslt import Product, ScaledProduct, class_of, text_of
from precast.kernels.linear.records import RECORDS, product, product_into, workspace_bytes
from precast.kernels.linear.scaled_tiles import TILES, Tile, best_tile
from precast.kernels.measured import Machine, MeasuredProduct, Table
from precast.kernels.quantised_linear import launches
from precast.kernels.quantised_linear.quantised_linear import few_bits, quantised_linear
from precast.kernels.quantised_linear.records import RECORDS as QUANTISED
from precast.kernels.quantised_linear.rounded_linear import rounded_linear
from precast.kernels.records import Pointer
from precast.kernels.use import GPU, Use, use_of

RECORD = next(record for record in RECORDS if record.name == "cublaslt.linear")


# --- classes of rows, launches -----------------------------------------------------------------------------------


def test_classes_cover_all_rows() -> None:
    classes = list(dict.fromkeys(class_of(rows) for rows in range(1, 2000)))

    assert classes[:6] == [(1, 16), (17, 32), (33, 64), (65, 128), (129, 256), (257, 512)]
    assert all(low <= rows <= most for rows in range(1, 2000) for low, most in (class_of(rows),))
    assert all(low == most + 1 for (_, most), (low, _) in pairwise(classes))


def layer(*, bias: bool = False, table: Table | None = None) -> Use:
    """A linear layer of a param [384, 256] in a step of T tokens."""
    types = {"input": TensorType("float16", (1, "T", 256)), "weight": TensorType("float16", (384, 256))}
    types |= {"bias": TensorType("float16", (384,))} if bias else {}
    result = Value("y", TensorType("float16", (1, "T", 384)))
    node = Node("aten.linear.default", {name: Ref(name) for name in types}, (result,))
    target = GPU if table is None else GPU._replace(table=table)
    return use_of(node, types, target, {"weight", "bias"})


def test_a_launch_has_what_was_measured_of_its_layer() -> None:
    def measured(rows: int, digit: str, **others: Any) -> MeasuredProduct:
        sizes = {"dtype": "float16", "outputs": 384, "inputs": 256, "bias": False} | others
        return MeasuredProduct(rows=rows, algorithm=digit * 128, microseconds=1.0, first_microseconds=2.0, **sizes)

    rows = (
        measured(64, "b"), measured(32, "a"), measured(16, "c", dtype="bfloat16"), measured(16, "d", bias=True),
        measured(16, "e", outputs=385), measured(16, "f", inputs=255),
    )  # fmt: skip
    table = Table(Machine("NVIDIA H200", (9, 0), "", "", "", 130100), products=rows)

    (launch,) = product(layer(table=table))
    (with_bias,) = product(layer(bias=True, table=table))

    assert launch.constants["algorithms"] == f"130100 32:{'a' * 128} 64:{'b' * 128}"
    assert with_bias.constants["algorithms"] == f"130100 16:{'d' * 128}"
    assert (launch.library, launch.grid, launch.constants["workspace_bytes"]) == (True, ("T",), 384 * 4096)


def test_workspaces_have_a_bound() -> None:
    assert RECORD.workspace(layer()) == workspace_bytes(384) == 384 * 4096
    assert workspace_bytes(128256) == 16 << 20


# --- against the library by hand ---------------------------------------------------------------------------------

PROPOSED, OTHER, MEASURED = 7, 8, 9


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Puts a library by hand in the place of NVIDIA's."""

    def put(*algorithms: int, **more: Any) -> Any:
        found = CublasLt(*(algorithms or (PROPOSED, OTHER)), **more)
        monkeypatch.setattr(cublaslt, "_library", lambda: found)
        monkeypatch.setattr(cublaslt, "_handle_here", ctypes.c_void_p)
        return found

    return put


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape).half()


def multiplied(made: Product, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The product on this CPU, in memory full of NaN."""
    y = torch.full((len(x), len(weight)), torch.nan, dtype=torch.float16)
    addresses = (y.data_ptr(), x.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(), 0)
    made(*addresses, len(x), x.stride(0), x.stride(1), stream=0)
    return y


def small(*, bias: bool = False, algorithms: str = "0") -> Product:
    return Product(dtype="float16", outputs=6, inputs=5, bias=bias, workspace_bytes=4096, algorithms=algorithms)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows": lambda x: x[:, :5].contiguous(),
    "cut from wide rows": lambda x: x[:, 2:7],
    "columns": lambda x: x[:, :5].t().contiguous().t(),
    "cut from wide columns": lambda x: x.t().contiguous().t()[:, 1:6],
}


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("lies", LAYOUTS)
def test_products_by_hand(library: Callable[..., Any], lies: str, bias: bool) -> None:
    library()
    made, weight, added = small(bias=bias), drawn(6, 5), drawn(6) if bias else None
    for rows in (9, 17, 9):
        x = LAYOUTS[lies](drawn(rows, 9))
        expected = functional.linear(x.float(), weight.float(), None if added is None else added.float())

        torch.testing.assert_close(multiplied(made, x, weight, added), expected.half())


def test_products_are_columns_of_a_wider_result(library: Callable[..., Any]) -> None:
    library()
    made = Product(dtype="float16", outputs=6, inputs=5, bias=False, workspace_bytes=4096, out_stride=11)
    x, weight, y = drawn(9, 5), drawn(6, 5), torch.full((9, 11), torch.nan, dtype=torch.float16)
    made(y[:, 3:].data_ptr(), x.data_ptr(), weight.data_ptr(), None, 0, 9, 5, 1, stream=0)

    torch.testing.assert_close(y[:, 3:9], functional.linear(x.float(), weight.float()).half())
    assert y[:, :3].isnan().all()
    assert y[:, 9:].isnan().all()


def test_a_bias_is_the_one_that_is_given(library: Callable[..., Any]) -> None:
    library()
    made, x, weight = small(bias=True), torch.zeros(9, 5).half(), drawn(6, 5)
    for bias in (drawn(6), drawn(6)):
        assert torch.equal(multiplied(made, x, weight, bias), bias.expand(9, 6))


def test_inputs_that_lie_otherwise_are_refused(library: Callable[..., Any]) -> None:
    library()

    with pytest.raises(RuntimeError, match="strides are 20 and 2"):
        multiplied(small(), drawn(9, 20)[:, :10:2], drawn(6, 5))


def test_the_measured_algorithm_runs_in_its_class(library: Callable[..., Any]) -> None:
    found = library()
    made = small(algorithms=text_of(130100, {32: bytes([MEASURED]).ljust(64, b"\0").hex()}))
    for rows in (16, 17, 32, 33):
        multiplied(made, drawn(rows, 5), drawn(6, 5))

    assert found.ran == [PROPOSED, MEASURED, MEASURED, PROPOSED]


def test_algorithms_of_another_version_are_left(library: Callable[..., Any]) -> None:
    found = library()
    multiplied(small(algorithms=text_of(130200, {16: "09" + "0" * 126})), drawn(9, 5), drawn(6, 5))

    assert found.ran == [PROPOSED]


def test_what_was_measured_is_left_where_rows_of_a_wider_result_are_odd() -> None:
    row = MeasuredProduct(
        dtype="float16", outputs=384, inputs=256, bias=False, rows=16, algorithm="a" * 128, microseconds=1.0,
        first_microseconds=2.0,
    )  # fmt: skip
    use = layer(table=Table(Machine("a GPU", (9, 0), "1", "2", "3", 130100), products=(row,)))
    given = {
        wide: product_into(use, Pointer("out.0"), Pointer("workspace"), columns=(0, wide)).constants["algorithms"]
        for wide in (384, 768, 769)
    }  # fmt: skip

    assert given == {384: f"130100 16:{'a' * 128}", 768: f"130100 16:{'a' * 128}", 769: "130100"}


def test_what_does_not_take_the_rows_is_left(library: Callable[..., Any]) -> None:
    """The measured one takes no rows at all, the class's first choice none below 13."""
    found = library(takes=lambda algorithm, rows: algorithm == OTHER or (algorithm == PROPOSED and rows > 12))
    made = small(algorithms=text_of(130100, {16: "09" + "0" * 126}))
    for rows in (13, 12):
        multiplied(made, drawn(rows, 5), drawn(6, 5))

    assert found.ran == [PROPOSED, OTHER]


def test_where_nothing_fits_the_error_says_so(library: Callable[..., Any]) -> None:
    library(takes=lambda algorithm, rows: False)

    with pytest.raises(RuntimeError, match="has no algorithm for this product"):
        multiplied(small(), drawn(9, 5), drawn(6, 5))


def test_what_is_asked_of_the_heuristic(library: Callable[..., Any]) -> None:
    """The workspace, sums in float32, and what divides the addresses."""
    found = library()
    memory, weight = torch.zeros(9 * 8 + 8).half(), drawn(6, 8)
    made = Product(dtype="float16", outputs=6, inputs=8, bias=False, workspace_bytes=4096)
    for first in (0, 1):
        multiplied(made, memory[first : first + 72].view(9, 8), weight)

    aligned, odd = found.asked
    assert aligned == {1: 4096, 3: 2, **dict.fromkeys((5, 6, 7, 8), 16)}
    assert odd == {1: 4096, 3: 2, **dict.fromkeys((5, 6, 7, 8), 2)}


def test_candidates_are_what_is_proposed_for_these_rows_and_near(library: Callable[..., Any]) -> None:
    """The first choice comes first; what is proposed nearby, but doesn't take these rows, is left."""
    first, without_workspace, of_half, of_twice, far = range(1, 6)
    sizes = {first: (64, 4096), without_workspace: (64, 0), of_half: (32, 4096), of_twice: (128, 0), far: (96, 0)}
    found = library(
        far, of_twice, of_half, without_workspace, first,
        proposed=lambda algorithm, rows, workspace: sizes[algorithm] == (rows, workspace),
        takes=lambda algorithm, rows: algorithm != of_twice or rows > 64,
    )  # fmt: skip
    made = small(bias=True)

    assert [int(each[:2], 16) for each in made.candidates(64)] == [first, without_workspace, of_half]
    assert found.num_matrices == 1


def test_candidates_have_a_bound(library: Callable[..., Any]) -> None:
    library(*range(1, 100))

    assert [int(each[:2], 16) for each in small().candidates(1)] == [*range(1, 1 + cublaslt.CANDIDATES)]


def test_few_sizes_are_kept(library: Callable[..., Any]) -> None:
    found = library()
    made, weight = small(), drawn(6, 5)
    for rows in range(9, 309):
        multiplied(made, drawn(rows, 5), weight)

    assert found.num_matrices <= 1 + 2 * cublaslt.KEPT_SIZES
    assert len(found.ran) == 300


# --- float8 and its scales, by hand ------------------------------------------------------------------------------

SCALES = ("one", "rows", "blocks")
CPU = Draw(torch.float32, torch.device("cpu"))


def scaled(scales: str, *, outputs: int = 144, inputs: int = 512, bias: bool = False) -> ScaledProduct:
    return ScaledProduct(
        dtype="float16", outputs=outputs, inputs=inputs, bias=bias, workspace_bytes=4096, scales=scales
    )


def in_groups(scales: torch.Tensor, whole: int) -> torch.Tensor:
    """Scales [rows, groups] as `blocks` has them: of the first rows, then of the others with memory for 4."""
    first, rest = scales[:whole], torch.nn.functional.pad(scales[whole:], (0, 0, 0, -len(scales) % 4), value=torch.nan)
    return torch.cat([first.t().reshape(-1), rest.t().reshape(-1)])


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("rows", [1, 4, 17, 20, 23])
@pytest.mark.parametrize("scales", SCALES)
def test_products_of_float8_by_hand(
    library: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, scales: str, rows: int, bias: bool
) -> None:
    """Also of what is no multiple of 4, which blocks are: of these rows the last lie elsewhere, and are read there
    alone. Nothing is written after the result."""
    library()
    monkeypatch.setattr(cublaslt, "_copy", lambda to, source, count, stream: ctypes.memmove(to, source, count))
    x, weight = quantised.float8(CPU, 24, 512, scale=1.0), quantised.float8(CPU, 144, 512, scale=1.0)
    shapes = {"one": ((1, 1), (1, 1)), "rows": ((rows, 1), (144, 1)), "blocks": ((rows, 4), (2, 4))}[scales]
    of_input, of_weight = (CPU.uniform(*shape, low=0.01, high=0.05) for shape in shapes)
    added = CPU.normal(144).half() if bias else None
    given = in_groups(of_input, rows // 4 * 4) if scales == "blocks" else of_input.clone()
    y, spare = (torch.full((count, 144), torch.nan, dtype=torch.float16) for count in (rows + 1, 4))
    stored, last = x.clone(), torch.full((4, 512), torch.nan).to(x.dtype)
    if scales == "blocks":
        last[: rows % 4] = x[rows // 4 * 4 : rows]
        stored[rows // 4 * 4 :] = torch.nan
    addresses = [each.data_ptr() for each in (y, stored, weight)]
    beside = (last.data_ptr(), spare.data_ptr()) if scales == "blocks" else (None, None)
    after = [of_weight.data_ptr(), given.data_ptr(), 0, *beside]

    scaled(scales, bias=bias)(*addresses, None if added is None else added.data_ptr(), *after, rows, stream=0)

    spread = [each.repeat_interleave(128, 1) if scales == "blocks" else each for each in (of_input, of_weight)]
    of_blocks = spread[1].repeat_interleave(128, 0)[:144] if scales == "blocks" else spread[1]
    expected = (x[:rows].float() * spread[0]) @ (weight.float() * of_blocks).t() + (0 if added is None else added)
    torch.testing.assert_close(y[:rows], expected.half(), rtol=2e-3, atol=2e-3)
    assert y[rows].isnan().all()


def test_addresses_of_float8_are_multiples_of_16(library: Callable[..., Any]) -> None:
    library()

    with pytest.raises(RuntimeError, match=r"multiples of 16 bytes, and not at input 0x18, input's scales 0x34$"):
        scaled("rows")(16, 24, 32, None, 48, 52, 0, None, None, 17, stream=0)


def test_what_is_tried_where_few_rows_have_no_proposal(library: Callable[..., Any]) -> None:
    """What splits no sums, and what is proposed for more rows."""
    found = library(proposed=lambda algorithm, rows, workspace: rows > 256 and algorithm == OTHER)
    plan = scaled("rows").plan(cublaslt._Size(17, 512))

    assert plan.algorithm.data[0] == OTHER
    assert [(each[1], each[3]) for each in found.asked] == [(4096, 2), (4096, 2), (0, 0), (4096, 2)]
    assert found.num_matrices == 3


@pytest.mark.parametrize(
    ("rows", "outputs", "tile"),
    [
        (256, 4096, 17), (192, 4096, 26), (128, 4096, 15), (320, 4096, 326), (512, 4096, 20), (256, 28672, 20),
        (192, 28672, 33), (64, 28672, 18), (250, 4096, 20), (1024, 28672, 20), (1025, 4096, None), (4096, 4096, None),
    ],
)  # fmt: skip
def test_tiles_leave_few_multiprocessors_idle(rows: int, outputs: int, tile: int | None) -> None:
    """Of an H200; none ends beyond the rows but the whole one; and prompts have what is proposed."""
    found = best_tile(rows, outputs)

    assert (found and found.number) == tile


@pytest.mark.parametrize(("scales_of", "words"), [("rows", (7, 15, 5)), ("one", (7, 0, 0)), ("blocks", (7, 0, 0))])
def test_what_is_proposed_with_scales_of_rows_runs_in_other_tiles(
    scales_of: str, words: tuple[int, ...], library: Callable[..., Any]
) -> None:
    library(takes_options=(5,))
    plan = scaled(scales_of).plan(cublaslt._Size(64, 512))

    assert tuple(plan.algorithm.data[each] for each in (0, 1, 5)) == words


@pytest.mark.parametrize(("takes_options", "version"), [((), 130100), ((4,), 130200), ((4,), 120900)])
def test_tiles_that_the_library_does_not_take_are_left(
    takes_options: tuple[int, ...], version: int, library: Callable[..., Any]
) -> None:
    """As those of versions whose results were not compared."""
    library(takes_options=takes_options, version=version)
    plan = scaled("rows").plan(cublaslt._Size(64, 512))

    assert tuple(plan.algorithm.data[each] for each in (0, 1, 5)) == (7, 0, 0)


def test_where_nothing_fits_float8_the_question_is_said(library: Callable[..., Any]) -> None:
    library(takes=lambda algorithm, rows: False)
    said = (
        "17 rows of 512 inputs, 144 outputs, float8_e4m3fn into float16, with a bias, 4096 bytes beside, scales of rows"
    )

    with pytest.raises(RuntimeError, match=rf"no algorithm for this product: {said}; the last answer was status 0"):
        scaled("rows", bias=True).plan(cublaslt._Size(17, 512))


# --- against NVIDIA's, without a GPU -----------------------------------------------------------------------------


@pytest.mark.skipif(not cublaslt.is_installed(), reason="cuBLASLt is not installed")
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_the_library_takes_all_attributes(monkeypatch: pytest.MonkeyPatch, bias: bool) -> None:
    """It needs a GPU to propose anything."""
    monkeypatch.setattr(cublaslt, "_handle_here", ctypes.c_void_p)
    made = Product(dtype="bfloat16", outputs=64, inputs=32, bias=bias, workspace_bytes=4096)

    assert made.candidates(9) == []
    assert cublaslt.version() >= 120000
    assert (ctypes.sizeof(cublaslt._Algorithm), ctypes.sizeof(cublaslt._Found)) == (64, 96)


@pytest.mark.skipif(not cublaslt.has_scales(), reason="cuBLASLt 12.9 is not installed")
@pytest.mark.parametrize("scales", SCALES)
def test_the_library_takes_the_scales(monkeypatch: pytest.MonkeyPatch, scales: str) -> None:
    monkeypatch.setattr(cublaslt, "_handle_here", ctypes.c_void_p)

    assert scaled(scales, bias=True).candidates(17) == []


# --- on a GPU ----------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu() -> torch.device:
    if not cublaslt.is_installed():
        pytest.skip("cuBLASLt is not installed")
    return torch.device("cuda")


def on_gpu(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.randn(shape, device="cuda") * scale).to(dtype)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """By the record, in memory full of NaN."""
    out = torch.full((1, x.shape[-2], len(weight)), torch.nan, dtype=x.dtype, device=x.device)
    as_function(RECORD)(input=x[None], weight=weight, bias=bias, out=out)
    return out[0]


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return functional.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)


ROWS = (9, 16, 17, 33, 64, 100, 129, 300, 1025)


@pytest.mark.gpu
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(1, 32), (17, 64), (384, 2880), (1000, 4096), (6144, 4096), (250, 543)]
)
def test_products(gpu: torch.device, outputs: int, inputs: int, dtype: torch.dtype, has_bias: bool) -> None:
    weight = on_gpu(outputs, inputs, scale=inputs**-0.5, dtype=dtype)
    bias = on_gpu(outputs, dtype=dtype) if has_bias else None
    for rows in ROWS:
        x = on_gpu(rows, inputs, dtype=dtype)

        torch.testing.assert_close(linear(x, weight, bias), exact(x, weight, bias), rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "cut",
    [
        lambda x: x[:, 16 : 16 + 1056],
        lambda x: x[:, 3 : 3 + 1056],
        lambda x: x[:, :1056].t().contiguous().t(),
        lambda x: x.reshape(-1)[1:].as_strided((x.shape[0], 1056), (1057, 1)),
    ],
    ids=["aligned", "odd", "columns", "odd rows"],
)
def test_rows_that_lie_anyhow(gpu: torch.device, cut: Callable[[torch.Tensor], torch.Tensor]) -> None:
    weight = on_gpu(500, 1056, scale=1056**-0.5)
    for rows in ROWS:
        x = cut(on_gpu(rows, 2200))

        torch.testing.assert_close(linear(x, weight), exact(x, weight), rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
def test_gated_products_of_all_rows_and_in_two_parts(gpu: torch.device, has_bias: bool) -> None:
    """Also of an odd number; nothing is written after the result."""
    weight, bias = on_gpu(1536, 512, scale=512**-0.5), on_gpu(1536) if has_bias else None
    for name, rows in (("", 9), ("", 1001), ("_in_two", 4097), ("_in_two", 8191)):
        record = next(each for each in GATED if each.name == f"cublaslt.gated_linear{name}")
        x, memory = on_gpu(1, rows, 512), torch.full((rows + 1, 768), torch.nan, dtype=torch.bfloat16, device=gpu)
        as_function(record)(input=x, weight=weight, bias=bias, kind="silu", out=memory[:rows][None])
        gate, values = exact(x[0], weight, bias).float().chunk(2, -1)

        torch.testing.assert_close(memory[:rows].float(), functional.silu(gate) * values, rtol=2e-2, atol=2e-2)
        assert memory[rows].isnan().all()


@pytest.mark.gpu
def test_captured_products_follow_their_inputs(gpu: torch.device) -> None:
    """Also those that are made, and whose kernels are loaded, while a stream is captured."""
    weight, x = on_gpu(1536, 1024, scale=1 / 32), on_gpu(48, 1024)
    (launch,) = product(_bfloat16_layer(1536, 1024))
    launched = Launched((launch,), workspace_bytes(1536))
    sizes = {"T": 48}
    given = [sizes[expr] for expr in launched.expressions]  # type: ignore[index]
    out = torch.zeros(1, 48, 1536, dtype=torch.bfloat16, device=gpu)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launched(sizes=given, out=out, input=x[None], weight=weight)
    first = []
    for _ in range(3):
        x.copy_(on_gpu(48, 1024))
        out.fill_(torch.nan)
        graph.replay()
        first.append(out.clone())

        torch.testing.assert_close(out[0], exact(x, weight), rtol=1e-2, atol=1e-2)
    graph.replay()
    assert torch.equal(out, first[-1])


def _bfloat16_layer(outputs: int, inputs: int) -> Use:
    types = {"input": TensorType("bfloat16", (1, "T", inputs)), "weight": TensorType("bfloat16", (outputs, inputs))}
    result = Value("y", TensorType("bfloat16", (1, "T", outputs)))
    node = Node("aten.linear.default", {name: Ref(name) for name in types}, (result,))
    return use_of(node, types, GPU, {"weight"})


@pytest.mark.gpu
def test_what_is_tuned_is_what_runs(gpu: torch.device) -> None:
    from precast.kernels.linear.tuning import tune

    found = tune("bfloat16", 1536, 1024, rows=64, bias=True)
    algorithms = text_of(cublaslt.version(), {64: found.product.algorithm})
    made = Product(
        dtype="bfloat16", outputs=1536, inputs=1024, bias=True, workspace_bytes=workspace_bytes(1536),
        algorithms=algorithms,
    )  # fmt: skip

    assert found.faults == ()
    assert found.product.microseconds <= found.product.first_microseconds
    assert found.num_candidates > 1
    for rows in (33, 64):
        x, weight, bias = on_gpu(rows, 1024), on_gpu(1536, 1024, scale=1 / 32), on_gpu(1536)
        y, workspace = torch.empty(rows, 1536, dtype=x.dtype, device=gpu), torch.empty(8 << 20, device=gpu)
        addresses = [each.data_ptr() for each in (y, x, weight, bias, workspace)]
        made(*addresses, rows, 1024, 1, stream=torch.cuda.current_stream().cuda_stream)

        assert bytes(made.plan(cublaslt._Size(rows, 1024)).algorithm).hex() == found.product.algorithm
        torch.testing.assert_close(y, exact(x, weight, bias), rtol=1e-2, atol=1e-2)


FLOAT8: dict[str, tuple[str, str, tuple[int, int] | None]] = {
    # name: the record's, how the input is rounded, and the weight's block; None: all of it
    "tensor and tensor": ("one", "fp8_tensor", None),
    "token and row": ("rows", "fp8_token", (1, 0)),
    "token and tensor": ("rows", "fp8_token", None),
    "tensor and row": ("rows", "fp8_tensor", (1, 0)),
    "groups and blocks": ("blocks", "fp8_group", (128, 128)),
    "groups of powers of two and blocks": ("blocks", "fp8_group_e8m0", (128, 128)),
}


def float8_layer(name: str, outputs: int, inputs: int, rows: int, *, dtype: torch.dtype, bias: bool) -> Sample:
    """A layer with weights of float8 and random inputs, one row of which is zeros."""
    _, activation, block = FLOAT8[name]
    draw = Draw(dtype, torch.device("cuda"))
    of = (outputs, inputs) if block is None else (block[0], block[1] or inputs)
    x = draw.normal(1, rows, inputs)
    x[0, rows // 2] = 0
    scale = draw.uniform(1, low=0.004, high=0.008, dtype=torch.float32) if activation == "fp8_tensor" else None
    added = draw.normal(outputs) if bias else None
    return quantised.call(
        x, quantised.fp8(draw, outputs, inputs, of), input_scale=scale, bias=added, activation=activation
    )


def float8_record(name: str, op: str = "quantised_linear") -> Any:
    wanted = f"cublaslt.{op}_of_float8_{FLOAT8[name][0]}"
    return next(record for record in QUANTISED if record.name == wanted)


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("outputs", [512, 600])
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
def test_products_of_weights_that_are_made_in_parts(
    has_bias: bool, outputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """256 outputs at a time, of 4 bits. Nothing is written after the result."""
    monkeypatch.setattr(launches, "_WHOLE_BYTES", 0)
    monkeypatch.setattr(launches, "_WHOLE_OUTPUTS", 256)
    draw = Draw(torch.bfloat16, torch.device("cuda"))
    bias = {"bias": draw.normal(outputs)} if has_bias else {}
    weight = quantised.packed(draw, outputs, 512, size=128, zeros=True)
    sample = quantised.call(draw.normal(1, 300, 512), weight, **bias)
    record = next(each for each in QUANTISED if each.name == "cublaslt.quantised_linear_from_97")
    memory = torch.full((301, outputs), torch.nan, dtype=torch.bfloat16, device="cuda")
    as_function(record)(**sample, out=memory[:300][None])
    expected = quantised_linear(**sample)[0].float()

    torch.testing.assert_close(memory[:300].float(), expected, rtol=0.02, atol=0.01 * float(expected.std()))
    assert memory[300].isnan().all()


@pytest.fixture
def scales(gpu: torch.device) -> None:
    if not cublaslt.has_scales():
        pytest.skip("cuBLASLt 12.9 is not installed")


@pytest.mark.gpu
@pytest.mark.usefixtures("scales")
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize(("outputs", "inputs"), [(208, 512), (6144, 4096), (4096, 14336)])
@pytest.mark.parametrize("name", FLOAT8)
def test_products_of_float8(name: str, outputs: int, inputs: int, dtype: torch.dtype, has_bias: bool) -> None:
    """Llama's down projection among them: few rows of many inputs. Nothing is written after the result."""
    multiply = as_function(float8_record(name))
    for rows in (17, 33, 64, 192, 255, 256, 300) if dtype == torch.bfloat16 else (33,):
        sample = float8_layer(name, outputs, inputs, rows, dtype=dtype, bias=has_bias)
        memory = torch.full((rows + 1, outputs), torch.nan, dtype=dtype, device="cuda")
        multiply(**sample, out=memory[:rows][None])
        expected = quantised_linear(**sample)[0]

        spread = float(expected.float().std())
        torch.testing.assert_close(memory[:rows], expected, rtol=1e-2, atol=1e-2 * spread)
        assert memory[rows].isnan().all()


@pytest.mark.gpu
@pytest.mark.usefixtures("scales")
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile.outputs}x{tile.rows}")
@pytest.mark.parametrize(("dtype", "inputs"), [(torch.bfloat16, 1024), (torch.float16, 1024), (torch.bfloat16, 14336)])
def test_tiles_change_no_bits(dtype: torch.dtype, inputs: int, tile: Tile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what the library proposes. It takes each, and that is what runs."""
    if cublaslt.version() // 100 not in scaled_tiles.COMPARED:
        pytest.skip(f"no tiles are chosen for cuBLASLt {cublaslt.version()}; COMPARED says for which")
    sample = float8_layer("token and row", 4096, inputs, 2 * tile.rows, dtype=dtype, bias=True)
    found, algorithms = [], []
    for each in (tile, None):
        monkeypatch.setattr(scaled_tiles, "best_tile", lambda rows, outputs, each=each: each)
        out = torch.full((1, 2 * tile.rows, 4096), torch.nan, dtype=dtype, device="cuda")
        as_function(float8_record("token and row"))(**sample, out=out)
        found.append(out)
        made = ScaledProduct(dtype=str(dtype).removeprefix("torch."), outputs=4096, inputs=inputs, bias=True,
                             workspace_bytes=16 << 20, scales="rows")  # fmt: skip
        algorithms.append(bytes(made.plan(cublaslt._Size(2 * tile.rows, inputs)).algorithm))

    assert torch.equal(*found)
    assert algorithms[0] != algorithms[1]


@pytest.mark.gpu
@pytest.mark.usefixtures("scales")
@pytest.mark.parametrize(("outputs", "inputs"), [(208, 512), (6144, 4096)])
@pytest.mark.parametrize("name", FLOAT8)
def test_products_of_float8_that_is_given(name: str, outputs: int, inputs: int) -> None:
    """An op in front has rounded the input."""
    multiply = as_function(float8_record(name, "rounded_linear"))
    for rows in (17, 64, 255):
        own = float8_layer(name, outputs, inputs, rows, dtype=torch.bfloat16, bias=True)
        values, scales = few_bits(own["input"].float(), own["activation"], own["input_scale"])
        given = {key: value for key, value in own.items() if key in inspect.signature(rounded_linear).parameters}
        given |= {"input": values.contiguous(), "input_scales": scales.clone(), "dtype": torch.bfloat16}

        found, expected = multiply(**given), rounded_linear(**given)

        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2 * float(expected.float().std()))


@pytest.mark.gpu
@pytest.mark.usefixtures("scales")
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("scales_of", SCALES)
def test_layers_of_a_model_have_algorithms(scales_of: str, bias: bool) -> None:
    """Those of Llama 3.1 8B, and of one of eight ranks, in steps of all classes: what is refused is listed together."""
    torch.zeros(1, device="cuda")  # the process has a context
    refused = []
    for outputs, inputs in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (768, 4096), (4096, 512)):
        made = ScaledProduct(
            dtype="bfloat16",
            outputs=outputs,
            inputs=inputs,
            bias=bias,
            workspace_bytes=workspace_bytes(outputs),
            scales=scales_of,
        )
        for rows in (4, 20, 32, 64, 128, 256, 300, 4096):
            try:
                made.plan(cublaslt._Size(rows, inputs))
            except RuntimeError as error:
                refused.append(str(error))

    assert not refused, "\n".join(refused)


@pytest.mark.gpu
@pytest.mark.usefixtures("scales")
@pytest.mark.parametrize("name", ["token and row", "groups and blocks"])
def test_captured_products_of_float8_follow_their_inputs(name: str) -> None:
    """Of a number of rows whose rest is copied, in blocks."""
    sample = float8_layer(name, 512, 1024, 18, dtype=torch.bfloat16, bias=True)
    multiply, out = as_function(float8_record(name)), torch.empty(1, 18, 512, dtype=torch.bfloat16, device="cuda")
    multiply(**sample, out=out)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        multiply(**sample, out=out)
    for _ in range(2):
        sample["input"].normal_()
        out.fill_(torch.nan)
        graph.replay()
        expected = quantised_linear(**sample)

        torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2 * float(expected.float().std()))
