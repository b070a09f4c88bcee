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
from precast.ir.graph.schema import Node, Ref, TensorType, Value
from precast.ir.memory.liveness import Operand
from precast.kernels import registry
from precast.kernels.choices import workspace
from precast.kernels.dtypes import NAMES
from precast.kernels.sampling import limits
from precast.kernels.sampling.sample import greedy, sample_2
from precast.kernels.use import GPU, Use

compiler = pytest.importorskip("triton", reason="Triton is published for Linux only")

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
SHARED_BYTES = 160 * 1024
VOCABULARIES = [7, 50_257, 128_256, 262_208]
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


POINTERS = {
    **dict.fromkeys(("out", "seeds", "steps", "weights", "rests", "sums"), "*i64"),
    **dict.fromkeys(("top_k", "counts", "tokens", "index", "broken", "drawn", "plan"), "*i32"),
    **dict.fromkeys(("temperature", "top_p", "min_p", "maxima", "largest", "least", "scores", "limits"), "*fp32"),
}
"""Types of pointers by what they point to, but for the logits."""


def module() -> Any:
    """The implementation, imported when a test runs."""
    from precast.kernels.sampling import triton

    return triton


def kernels() -> dict[str, Any]:
    """The kernels by name, in the order of their launches."""
    from precast.kernels.sampling import triton, triton_search

    return {
        "scan": triton.scan_kernel, "prepare": triton.prepare_kernel, "weigh": triton_search.weigh_kernel,
        "select": triton_search.select_kernel, "draw": triton.draw_kernel, "finish": triton_search.finish_kernel,
    }  # fmt: skip


def compiled(kernel: Any, dtype: str, size: int, capability: int, *, is_greedy: bool = False) -> Any:
    """A kernel as a launch for one row of `size` logits compiles it."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants: dict[str, Any] = {
        "IS_GREEDY": is_greedy, "SPLITS": limits.MAX_SPLITS, "BINS": limits.BINS, "GROUPS": limits.GROUPS,
        "LISTED_MOST": max(limits.GROUPS, limits.CAPACITY), "CAPACITY": limits.CAPACITY, "BLOCK": module().BLOCK,
        "OWN_GROUPS": limits.GROUPS // module().num_splits(1, size), "stride_v": 1,
    }  # fmt: skip
    if size == 1:
        constants |= {"size": 1, "stride_r": 1}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    pointers = {f"{name}_ptr": pointer for name, pointer in POINTERS.items()} | {"logits_ptr": f"*{dtype}"}
    signature = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in kernel.arg_names}
    divisible = {*pointers, "chunk", *(("size", "stride_r") if size % 16 == 0 else ())} - constants.keys()
    attributes = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if name in divisible}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    return compiler.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8})


@pytest.fixture
def fresh_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No compiled kernel of an earlier run is taken for one of this run."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    # Triton 3.9 warns where the default of the next version isn't chosen.
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("dtype", "size", "capability"), [("bf16", 151_936, 90), ("fp32", 50_257, 80), ("fp16", 1, 90)], ids=str
)
@pytest.mark.parametrize("name", ["scan", "prepare", "weigh", "select", "draw", "finish"])
def test_kernels_compile(name: str, dtype: str, size: int, capability: int) -> None:
    found = compiled(kernels()[name], dtype, size, capability)

    assert len(found.asm["cubin"]) > 0
    assert found.metadata.shared <= SHARED_BYTES
    # Sixteen bytes at a time, where rows begin at multiples of them.
    if name in ("scan", "weigh", "draw"):
        assert ("ld.global.v4.b32" in found.asm["ptx"]) == (size % 16 == 0)
    # The division of the definition, not the fast one.
    if name in ("weigh", "draw", "finish"):
        assert "div.rn.f32" in found.asm["ptx"]


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("name", ["scan", "prepare"])
def test_greedy_kernels_compile_and_read_no_parameters(name: str) -> None:
    kernel = kernels()[name]
    ptx = compiled(kernel, "bf16", 151_936, 90, is_greedy=True).asm["ptx"]

    unread = [kernel.arg_names.index(f"{name}_ptr") for name in ("temperature", "top_k", "maxima")]
    assert not any(f"kernel_param_{place}]" in ptx for place in unread)


def test_parts_of_rows_are_powers_of_two_of_one_tile_at_least() -> None:
    for rows in (1, 2, 7, 64, 256, 5000):
        for size in (1, 7, 2048, 2049, 50_257, 262_208):
            found = module().num_splits(rows, size)

            assert found & (found - 1) == 0
            assert 1 <= found <= limits.MAX_SPLITS
            assert found == 1 or found * module().BLOCK < 2 * size


def test_without_triton_the_definition_draws_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert registry.resolve("precast.sample", 2, CUDA) is module().sample_2
    monkeypatch.setattr(registry, "find_spec", lambda name: None)

    assert registry.resolve("precast.sample", 2, CUDA) is sample_2


def test_float64_is_left_to_the_definition() -> None:
    logits = torch.tensor([[1.0, 1.0 + 1e-12], [3.0, 2.0]], dtype=torch.float64)
    given = arguments(logits, [{"temperature": 0.0}])

    assert module().sample_2(**given).tolist() == [1, 0]


# --- on a GPU ----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", VOCABULARIES)
def test_tokens_are_the_definitions(size: int, dtype: torch.dtype) -> None:
    """Each kind of logits with each filter, and with three seeds; of so many draws the last bit decides none."""
    for seed, (name, logits) in enumerate(logits_of(3 * len(FILTERS), size, dtype)):
        given = arguments(logits.to(CUDA), FILTERS, seed=seed)

        assert module().sample_2(**given).tolist() == sample_2(**given).tolist(), name


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 300])
def test_draws_from_flat_and_peaked_rows_are_the_definitions(rows: int) -> None:
    for scale in (0.1, 1.0, 2.5, 6.0):
        logits = (scale * torch.randn(rows, 151_936, generator=torch.Generator().manual_seed(rows))).to(CUDA)
        for filters in ({}, {"top_k": 50, "top_p": 0.9}, {"top_p": 0.95}, {"top_k": 5000, "top_p": 0.5}):
            for kept in (logits, logits.bfloat16()):
                given = arguments(kept, [filters], seed=rows)

                assert module().sample_2(**given).tolist() == sample_2(**given).tolist(), (scale, filters)


@pytest.mark.gpu
def test_greedy_is_the_definitions() -> None:
    for name, logits in logits_of(9, 50_257, torch.bfloat16):
        assert module().greedy(logits.to(CUDA)).tolist() == greedy(logits).tolist(), name


@pytest.mark.gpu
def test_a_captured_graph_draws_for_any_parameters(no_waiting: Callable[[], AbstractContextManager[None]]) -> None:
    """Captured with greedy rows, replayed with others, and again with greedy ones."""
    rows, size = 2 * len(FILTERS), 50_257
    logits = (3 * torch.randn(rows, size, generator=torch.Generator().manual_seed(1))).to(CUDA)
    held = arguments(logits, [{"temperature": 0.0}])
    function = module().sample_2
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
    function = module().sample_2
    function(**given)  # compiles
    kind = TensorType(NAMES[dtype], (rows, size))
    node = Node("precast.sample", {"logits": Ref("logits")}, (Value("t", TensorType("int64", (rows,))),), version=2)
    said = symbols.evaluate(workspace(Use(node, {"logits": Operand(kind, True)}, GPU)), {})
    found = peak_bytes(lambda: function(**given), CUDA)

    assert 0 <= found - (said + 8 * rows) <= ROUNDED
