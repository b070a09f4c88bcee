"""The Triton kernels on a machine without a GPU: they compute the references in Triton's interpreter, and they compile
for compute capability 9.0 within its shared memory. With a GPU, `test_specs.py` runs them on it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is published for Linux only")

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
SHARED_BYTES = 160 * 1024


ANYWHERE = ("launched.py", "walked_states.py", "absorbed_latents.py")
"""Files whose tests run in the interpreter and on GPUs."""


@pytest.mark.parametrize("file", ["interpreted_triton.py", *ANYWHERE])
def test_kernels_are_the_references_in_the_interpreter(file: str) -> None:
    run = results_of(file, "1")

    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("file", ANYWHERE)
def test_kernels_are_the_references_on_a_gpu(file: str) -> None:
    run = results_of(file, "0")

    assert run.returncode == 0, run.stdout + run.stderr


def results_of(file: str, interpret: str) -> subprocess.CompletedProcess[str]:
    """The tests of a file beside this one, run in a process of its own."""
    path = Path(__file__).with_name(file)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)],
        cwd=path.parents[2],
        env=os.environ | {"TRITON_INTERPRET": interpret, "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
    )


def compiled(kernel: Any, constants: dict[str, Any], pointers: dict[str, str], options: dict[str, int]) -> Any:
    """`kernel` for compute capability 9.0, as a launch with aligned tensors would compile it."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, attributes = {}, {}
    for i, name in enumerate(kernel.arg_names):
        default = "fp32" if name in ("scale", "soft_cap", "epsilon") else "i32"
        signature[name] = "constexpr" if name in constants else pointers.get(name, default)
        if name in pointers or ("stride" in name and name not in constants):
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


@pytest.fixture
def fresh_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No compiled kernel of an earlier run is taken for one of this run."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    # Triton 3.9 warns where the default of the next version isn't chosen.
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("is_decode", [False, True], ids=["prefill", "decode"])
@pytest.mark.parametrize(
    ("dtype", "size", "value", "group", "has_chunk"),
    [
        (torch.bfloat16, 128, 128, 4, False),
        (torch.bfloat16, 256, 256, 2, True),
        (torch.float16, 80, 64, 7, False),
        (torch.float32, 256, 256, 1, True),
    ],
)
@pytest.mark.parametrize("cache", [None, "fp8e4nv"], ids=["cache of its type", "float8"])
def test_paged_attention_compiles_for_hopper(
    dtype: torch.dtype, size: int, value: int, group: int, has_chunk: bool, is_decode: bool, cache: str | None
) -> None:
    from precast.kernels.attention import triton as kernels

    blocks = kernels.blocks(8 if is_decode else 512, 8, group, max(size, value), dtype)
    constants = {
        "HAS_SINKS": True,
        "HAS_WINDOW": not has_chunk,
        "HAS_SOFT_CAP": True,
        "HAS_SLOPES": True,
        "HAS_CHUNK": has_chunk,
        "PAGE_SIZE": 16,
        "GROUP": group,
        "SIZE": size,
        "VALUE_SIZE": value,
        "BLOCK_Q": blocks.q,
        "BLOCK_M": blocks.m,
        "BLOCK_N": blocks.n,
        "BLOCK_D": triton.next_power_of_2(size),
        "BLOCK_V": triton.next_power_of_2(value),
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "q_stride_d": 1,
        "k_stride_d": 1,
        "v_stride_d": 1,
    }
    kernel = kernels.paged_attention_kernel
    floats = ("out_ptr", "q_ptr", "k_ptr", "v_ptr", "sinks_ptr")
    pointers = {name: f"*{NAMES[dtype] if name in floats else 'i32'}" for name in kernel.arg_names if "_ptr" in name}
    pointers["slopes_ptr"] = "*fp32"
    if cache is not None:
        pointers |= dict.fromkeys(("k_ptr", "v_ptr"), f"*{cache}")
    found = compiled(kernel, constants, pointers, {"num_warps": blocks.num_warps, "num_stages": blocks.num_stages})

    assert len(found.asm["cubin"]) > 0
    assert found.metadata.shared <= SHARED_BYTES
    # Half precision runs on the tensor cores, float32 in float32.
    has_tensor_cores = any(name in found.asm["ptx"] for name in ("wgmma", "mma.sync"))
    assert has_tensor_cores == (dtype != torch.float32)
    assert not any("e4m3" in line for line in found.asm["ptx"].splitlines() if "mma" in line)
    assert ("e4m3x2" in found.asm["ptx"]) == (cache is not None)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("new", "cache"),
    [("bf16", "bf16"), ("fp32", "bf16"), ("bf16", "fp8e4nv"), ("fp16", "fp8e4nv"), ("fp32", "fp8e4nv")],
)
def test_write_kv_compiles_for_hopper(new: str, cache: str) -> None:
    from precast.kernels.attention import triton_write_kv

    kernel = triton_write_kv.write_kv_kernel
    constants = {"PAGE_SIZE": 16, "SIZE": 80, "VALUE_SIZE": 64, "BLOCK_D": 128, "BLOCK_V": 64}
    constants["LIMIT"] = 448.0 if cache == "fp8e4nv" else 0.0
    pointers = {"slot_mapping_ptr": "*i64"}
    pointers |= dict.fromkeys(("k_ptr", "v_ptr"), f"*{new}")
    pointers |= dict.fromkeys(("k_cache_ptr", "v_cache_ptr"), f"*{cache}")

    found = compiled(kernel, constants, pointers, {}).asm

    assert len(found["cubin"]) > 0
    # One conversion to float8, by the hardware, which rounds to nearest even; numbers were limited before.
    assert ("cvt.rn.satfinite.e4m3x2.f32" in found["ptx"]) == (cache == "fp8e4nv")
    assert ("min.NaN" in found["ptx"]) == (cache == "fp8e4nv")


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("num_tokens", "cache", "capability", "rows"),
    [(64, "bf16", (9, 0), 64), (64, "fp8e4nv", (9, 0), 32), (64, "bf16", (8, 9), 16), (1, "bf16", (9, 0), 16)],
)
def test_latent_attention_compiles_for_hopper(
    num_tokens: int, cache: str, capability: tuple[int, int], rows: int
) -> None:
    """Of DeepSeek-V3's sizes, with the blocks of a compute capability."""
    from precast.kernels.latent_attention import triton as kernels

    cached = torch.float8_e4m3fn if cache == "fp8e4nv" else torch.bfloat16
    blocks = kernels.blocks(num_tokens, 128, torch.bfloat16, cached, capability)
    constants = {
        "HAS_WINDOW": True,
        "PAGE_SIZE": 16,
        "HEADS": 128,
        "GROUP": blocks.heads,
        "LATENT": 512,
        "ROPE": 64,
        "BLOCK_Q": blocks.q,
        "BLOCK_M": blocks.m,
        "BLOCK_N": blocks.n,
        "BLOCK_C": 512,
        "BLOCK_R": 64,
        "PRECISION": "tf32",
        "q_rope_stride_r": 1,
    }
    kernel = kernels.latent_attention_kernel
    pointers = {name: "*i32" for name in kernel.arg_names if name.endswith("_ptr")}
    pointers |= dict.fromkeys(("out_ptr", "q_ptr", "q_rope_ptr"), "*bf16") | {"cache_ptr": f"*{cache}"}
    found = compiled(kernel, constants, pointers, {"num_warps": blocks.num_warps, "num_stages": blocks.num_stages})

    assert blocks.m == rows
    # GPUs with less shared memory than those of 8.0 and 9.0 have 99 KiB.
    assert found.metadata.shared <= (SHARED_BYTES if rows > 16 else 99 * 1024)
    assert any(name in found.asm["ptx"] for name in ("wgmma", "mma.sync"))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("size", "value", "more"),
    [
        (128, 64, {"HAS_STEPS": True, "HAS_SKIP": True}),
        (128, 128, {"HAS_BETA": True, "NORMALISES": True}),
        (16, 5120, {"HAS_STEPS": True, "BY_ROW": True, "BY_COLUMN": True}),
    ],
    ids=["state space scan", "delta rule", "selective scan"],
)
def test_scans_compile_for_hopper(size: int, value: int, more: dict[str, bool]) -> None:
    from precast.kernels.linear_attention import triton as kernels

    blocks = kernels.blocks(size, value)
    rule = ("HAS_STEPS", "HAS_BETA", "HAS_SKIP", "NORMALISES", "BY_ROW", "BY_COLUMN")
    constants = {
        **dict.fromkeys(rule, False),
        **more,
        "HAS_DECAY": True,
        "GROUP": 2,
        "SIZE": size,
        "VALUE_SIZE": value,
        "BLOCK_D": blocks.d,
        "BLOCK_E": blocks.e,
        "state_stride_d": 1,
    }
    kernel = kernels.scan_kernel
    pointers = {name: "*bf16" for name in kernel.arg_names if name.endswith("_ptr")}
    pointers |= dict.fromkeys(("state_ptr", "decay_ptr", "steps_ptr"), "*fp32")
    pointers |= dict.fromkeys(("slots_ptr", "cu_seqlens_ptr", "kv_lens_ptr"), "*i32")
    found = compiled(kernel, constants, pointers, {"num_warps": blocks.num_warps})

    assert len(found.asm["cubin"]) > 0
    assert found.metadata.shared <= 4096


@pytest.mark.parametrize("dtype", NAMES, ids=str)
@pytest.mark.parametrize("group", [1, 3, 7, 8, 12, 16, 71])
def test_blocks_hold_whole_queries(group: int, dtype: torch.dtype) -> None:
    from precast.kernels.attention import triton as kernels

    for size in (8, 64, 80, 128, 192, 256, 512):
        for num_tokens in (1, 8, 9, 4096):
            found = kernels.blocks(num_tokens, 8, group, size, dtype)

            assert found.q >= 1
            assert found.q * group <= found.m
            assert all(n >= 16 and n & (n - 1) == 0 for n in (found.m, found.n))
