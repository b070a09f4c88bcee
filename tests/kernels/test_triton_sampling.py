"""sample@2 in Triton: without a GPU in Triton's interpreter, and compiled for two compute capabilities; on a GPU
against the definition there, as a captured graph, and by what it holds.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from allocations import peak_bytes
from sampling_cases import FILTERS, arguments, logits_of

from precast.ir.graph import symbols
from precast.ir.graph.schema import Dtype, Expr, Node, Ref, TensorType, Value
from precast.ir.memory.liveness import Operand
from precast.kernels import registry
from precast.kernels.choices import fastest, workspace
from precast.kernels.dtypes import NAMES
from precast.kernels.named import named
from precast.kernels.records import Launch, Pointer, Stride
from precast.kernels.sampling import limits
from precast.kernels.sampling.records import RECORDS
from precast.kernels.sampling.sample import SAMPLE_2, Parameters, sample_2
from precast.kernels.use import GPU, Target, Use

compiler = pytest.importorskip("triton", reason="Triton is published for Linux only")

RECORD = RECORDS[0]
PARAMETERS = Parameters._fields
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TRITON = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int32": "i32", "int64": "i64"}
SHARED_BYTES = 160 * 1024
VOCABULARIES = [1, 7, 1000, 50_257, 152_064, 262_208]
CUDA = torch.device("cuda")
ROUNDED = 128 << 10
"""Bytes that the allocator's blocks may be larger than what was asked for."""


def test_tokens_in_the_interpreter() -> None:
    file = Path(__file__).with_name("interpreted_sampling.py")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)],
        cwd=file.parents[2],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
    )

    assert run.returncode == 0, run.stdout + run.stderr


def use_of(dtype: Dtype, rows: Expr, size: int, capability: tuple[int, int] = (9, 0)) -> Use:
    """The op on logits [rows, size] in a graph."""
    types = {"logits": TensorType(dtype, (rows, size))}
    types |= {
        name: TensorType(NAMES[kinds[0]], (rows,)) for name, kinds in SAMPLE_2.dtypes.items() if name in PARAMETERS
    }
    result = Value("tokens", TensorType("int64", (rows,)))
    node = Node("precast.sample", {name: Ref(name) for name in types}, (result,), version=2)
    return Use(node, {name: Operand(kind, True) for name, kind in types.items()}, Target("cuda", capability))


def compiled(use: Use, launch: Launch, *, is_aligned: bool = True) -> Any:
    """A launch of contiguous logits, whose rows begin at multiples of 16 elements if they are aligned."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = named(launch.kernel)
    constants: dict[str, Any] = dict(launch.constants)
    signature, attributes = dict.fromkeys(constants, "constexpr"), {}
    for place, (name, arg) in enumerate(zip(kernel.arg_names, launch.args, strict=False)):
        signature[name] = "i32"
        if isinstance(arg, Pointer):
            kind = use.result if arg.tensor == "out.0" else use.operands.get(arg.tensor)
            dtype = arg.dtype or (kind.type if isinstance(kind, Operand) else use.result).dtype
            signature[name] = f"*{TRITON[dtype]}"
        elif arg == Stride("logits", 1):
            signature[name], constants[name] = "constexpr", 1
        if isinstance(arg, Pointer) or (is_aligned and arg == Stride("logits", 0)):
            attributes[(place,)] = [["tt.divisibility", 16]]
    signature = {name: signature[name] for name in kernel.arg_names}
    major, minor = use.target.capability
    return compiler.compile(
        ASTSource(kernel, signature, constexprs=constants, attrs=attributes),
        target=GPUTarget("cuda", 10 * major + minor, 32),
        options={"num_warps": launch.num_warps, "launch_pdl": launch.pdl},
    )


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("dtype", "size", "capability"),
    [("bfloat16", 151_936, (9, 0)), ("float32", 50_257, (8, 0)), ("float16", 1, (9, 0))],
    ids=str,
)
def test_launches_compile(dtype: Dtype, size: int, capability: tuple[int, int]) -> None:
    use = use_of(dtype, "R", size, capability)
    for launch in RECORD.runs(use):
        found = compiled(use, launch, is_aligned=size % 16 == 0)
        ptx = found.asm["ptx"]

        assert found.metadata.shared <= SHARED_BYTES
        assert found.metadata.global_scratch_size == 0
        # Several logits at a time, where rows begin at multiples of them.
        if "scan" in launch.kernel or "pass" in launch.kernel:
            assert ("ld.global.v2.b32" in ptx) == (size % 16 == 0)
        # The division of the definition, not the fast one.
        assert ("div.rn.f32" in ptx) == ("scan" not in launch.kernel)
        assert ("griddepcontrol.wait" in ptx) == launch.pdl == (capability == (9, 0))


def test_parts_of_rows_keep_a_gpu_busy_and_are_few() -> None:
    scan = RECORD.runs(use_of("bfloat16", "R", 151_936))[0]
    grids = {rows: [symbols.evaluate(size, {"R": rows}) for size in scan.grid] for rows in (0, 1, 7, 16, 64, 256, 5000)}

    assert grids == {0: [0, 64], 1: [1, 64], 7: [7, 64], 16: [16, 64], 64: [64, 16], 256: [256, 16], 5000: [5000, 16]}


def test_parts_of_the_workspace_do_not_overlap() -> None:
    use = use_of("bfloat16", 3, 1000)
    args = [arg for launch in RECORD.runs(use) for arg in launch.args]
    offsets = {arg.offset for arg in args if isinstance(arg, Pointer) and arg.tensor == "workspace"}

    assert len(offsets) == 9
    assert max(offsets) == 3 * (limits.row_bytes() - 4 * limits.LIMITS)
    assert symbols.evaluate(workspace(use), {}) == 3 * limits.row_bytes()


def test_without_triton_the_definition_draws_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    target = registry.target_of(CUDA)

    assert fastest("precast.sample", 2, GPU) is RECORD
    without = fastest("precast.sample", 2, target._replace(kinds=frozenset(("torch",))))
    assert registry.function_of(without) is sample_2


def test_float64_is_left_to_the_definition() -> None:
    assert fastest("precast.sample", 2, GPU, dtypes={"logits": "bfloat16"}) is RECORD
    assert fastest("precast.sample", 2, GPU, dtypes={"logits": "float64"}).name == "reference.sample_2"


# --- on a GPU ----------------------------------------------------------------------------------------------------


def drawn() -> Callable[..., torch.Tensor]:
    """The op by its launches."""
    return registry.function_of(RECORD)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", VOCABULARIES)
def test_tokens_are_the_definitions(size: int, dtype: torch.dtype) -> None:
    """Each kind of logits with each filter, and with three seeds; of so many draws the last bit decides none."""
    for seed, (name, logits) in enumerate(logits_of(3 * len(FILTERS), size, dtype)):
        given = arguments(logits.to(CUDA), FILTERS, seed=seed)

        assert drawn()(**given).tolist() == sample_2(**given).tolist(), name


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 300])
def test_draws_from_flat_and_peaked_rows_are_the_definitions(rows: int) -> None:
    for scale in (0.1, 1.0, 2.5, 6.0):
        logits = (scale * torch.randn(rows, 151_936, generator=torch.Generator().manual_seed(rows))).to(CUDA)
        for filters in ({}, {"top_k": 50, "top_p": 0.9}, {"top_p": 0.95}, {"top_k": 5000, "top_p": 0.5}):
            for kept in (logits, logits.bfloat16()):
                given = arguments(kept, [filters], seed=rows)

                assert drawn()(**given).tolist() == sample_2(**given).tolist(), (scale, filters)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 17, 200])
def test_small_shares_of_flat_rows_take_more_passes_than_are_launched(rows: int) -> None:
    """Of equals by index, and where the last program goes on alone."""
    for size in (1000, 152_064):
        for logits in (
            torch.zeros(rows, size),
            0.01 * torch.randn(rows, size, generator=torch.Generator().manual_seed(2)),
        ):
            for filters in ({"top_p": 0.5}, {"top_p": 0.05}, {"top_p": 1e-4}, {"top_k": size - 1, "top_p": 0.3}):
                given = arguments(logits.to(CUDA), [filters], seed=rows)

                assert drawn()(**given).tolist() == sample_2(**given).tolist(), (size, filters)


@pytest.mark.gpu
@pytest.mark.parametrize("top_k", [1, 40, 700, 2000, 2100, 20_000])
def test_lists_and_more_than_a_list_holds(top_k: int) -> None:
    logits = (3 * torch.randn(17, 152_064, generator=torch.Generator().manual_seed(top_k))).to(CUDA)
    for kept in (logits, logits.bfloat16(), logits.round()):
        for filters in ({}, {"top_p": 0.8}, {"min_p": 0.01}, {"temperature": 20.0, "top_p": 0.5}):
            given = arguments(kept, [{"top_k": top_k, **filters}], seed=top_k)

            assert drawn()(**given).tolist() == sample_2(**given).tolist(), filters


@pytest.mark.gpu
def test_a_captured_graph_draws_for_any_parameters(no_waiting: Callable[[], AbstractContextManager[None]]) -> None:
    """Captured with greedy rows, replayed with others, and again with greedy ones."""
    rows, size = 2 * len(FILTERS), 50_257
    logits = (3 * torch.randn(rows, size, generator=torch.Generator().manual_seed(1))).to(CUDA)
    held = arguments(logits, [{"temperature": 0.0}])
    function = drawn()
    function(**held)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = function(**held)

    for asked in (FILTERS, FILTERS[::-1], [{"temperature": 0.0}], [{"top_p": 0.9}]):
        wanted = arguments(logits, asked, seed=len(asked))
        for name, value in wanted.items():
            held[name].copy_(value)
        with no_waiting():
            graph.replay()

        assert out.tolist() == sample_2(**wanted).tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "size"), [(1, 262_208), (64, 151_936), (300, 1000)])
def test_it_holds_what_the_record_says(rows: int, size: int, dtype: torch.dtype) -> None:
    given = arguments(torch.randn(rows, size, dtype=dtype, device=CUDA), FILTERS)
    function = drawn()
    function(**given)  # compiles
    said = symbols.evaluate(workspace(use_of(NAMES[dtype], rows, size)), {})
    found = peak_bytes(lambda: function(**given), CUDA)

    assert 0 <= found - (said + 8 * rows) <= ROUNDED
