"""The Triton kernels on a machine without a GPU: they compute the references in Triton's interpreter, and they compile
for compute capability 9.0 within its shared memory. With a GPU, `test_specs.py` runs them on it.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_launches import compiled as compiled_on_hopper
from compiled_launches import stack_bytes
from fused_cases import CASES, Case, node_of

import precast.kernels
from precast.ir.graph.schema import Const, Dtype, Node, Ref, TensorType, Value
from precast.ir.graph.symbols import add, evaluate
from precast.kernels.attention.launches import SMALL_STEP, Tile, hopper_launch
from precast.kernels.choices import records_of, resolve
from precast.kernels.fused.launches import launches
from precast.kernels.linear_attention.launches import walk_and_chunks
from precast.kernels.records import Launch, Pointer, Stride
from precast.kernels.use import Target, Use, use_of

triton = pytest.importorskip("triton", reason="Triton is published for Linux only")

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
TYPES = NAMES | {torch.bool: "i1", torch.int32: "i32", torch.int64: "i64"}
BY_NAME = {
    "bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float8_e4m3fn": "fp8e4nv", "int32": "i32",
    "int64": "i64",
}  # fmt: skip
SHARED_BYTES = 160 * 1024


ANYWHERE = (
    "launched.py", "launched_rows.py", "launched_rotary_write_kv.py", "launched_without_torch.py",
    "launched_at_load.py", "fused_steps.py", "routed_experts.py", "launched_states.py", "launched_recurrences.py",
    "launched_latents.py", "launched_sparse.py", "launched_blocks.py", "launched_entries.py", "hopper_attention.py",
    "launched_quantised_linear.py", "launched_quantised_experts.py", "launched_rounded.py",
)  # fmt: skip
"""Files whose tests run in the interpreter and on GPUs."""


@pytest.mark.parametrize("file", ["interpreted_triton.py", *ANYWHERE])
def test_kernels_are_the_references_in_the_interpreter(file: str) -> None:
    run = results_of(file, "1")

    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("file", ANYWHERE)
def test_kernels_are_the_references_on_a_gpu(file: str) -> None:
    run = results_of(file, "0", "-n", "4", "--dist", "worksteal")  # most of the time is the compiler's

    assert run.returncode == 0, run.stdout + run.stderr


def test_no_function_of_triton_returns_none_beside_something_else() -> None:
    """Triton 3.6, which torch 2.11 comes with, makes a tensor of all that is returned."""
    found = []
    for file in Path(precast.kernels.__path__[0]).rglob("*.py"):
        for function in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef) and "triton.jit" in map(ast.unparse, function.decorator_list):
                returned = [each.value for each in ast.walk(function) if isinstance(each, ast.Return) and each.value]
                nothing = [
                    each
                    for value in returned
                    for each in (value.elts if isinstance(value, ast.Tuple) else [value])
                    if isinstance(each, ast.Constant) and each.value is None
                ]
                found += [f"{file.name}, {function.name}"] if nothing else []

    assert found == []


def results_of(file: str, interpret: str, *options: str) -> subprocess.CompletedProcess[str]:
    """The tests of a file beside this one, run in a process of its own."""
    path = Path(__file__).with_name(file)
    # It is nobody's worker.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    return subprocess.run(
        # One that hangs is ended there, and says where, before this one is.
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-o",
            "faulthandler_timeout=600",
            *options,
            str(path),
        ],
        cwd=path.parents[2],
        env=inherited | {"TRITON_INTERPRET": interpret, "PYTHONSAFEPATH": "1"},
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


def compiled_launch(use: Use, launch: Launch) -> Any:
    """A launch for the use's GPU, over aligned tensors whose strides are multiples of 16."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    module, _, name = launch.kernel.partition(":")
    kernel = getattr(import_module(module), name)
    constants: dict[str, Any] = dict(launch.constants)
    params = [name for name in kernel.arg_names if name not in constants]
    signature, attributes = {}, {}
    for param, arg in zip(params, launch.args, strict=True):
        if isinstance(arg, Pointer):
            results = {f"out.{i}": value.type for i, value in enumerate(use.node.outputs)}
            dtype = arg.dtype or (results[arg.tensor] if arg.tensor in results else use.operands[arg.tensor].type).dtype
            signature[param] = f"*{BY_NAME[dtype]}"
        else:
            signature[param] = "i32"
        if arg is None or arg == 1 or arg == Stride("q", 3):
            constants[param] = arg if arg is None else 1
        elif isinstance(arg, (Pointer, Stride)) or (isinstance(arg, int) and arg % 16 == 0):
            attributes[(kernel.arg_names.index(param),)] = [["tt.divisibility", 16]]
    signature = {name: "constexpr" if name in constants else signature[name] for name in kernel.arg_names}
    major, minor = use.target.capability
    source = GluonASTSource if kernel.is_gluon() else ASTSource
    return triton.compile(
        source(kernel, signature, constexprs=constants, attrs=attributes),
        target=GPUTarget("cuda", 10 * major + minor, 32),
        options={"num_warps": launch.num_warps, "num_stages": launch.num_stages},
    )


def paged_use(
    capability: tuple[int, int], dtype: Dtype, heads: int, kv_heads: int, size: int, *, value: int | None = None,
    cache: Dtype | None = None, more: tuple[str, ...] = (), **reach: int,
) -> Use:  # fmt: skip
    """Paged attention in a graph; of `more`, sinks, slopes and scales are tensors, and a soft cap is a number."""
    ints, bounds = TensorType("int32", ("B",)), TensorType("int32", (add("B", 1),))
    types = {
        "q": TensorType(dtype, (1, "T", heads, size)),
        "k_cache": TensorType(cache or dtype, ("P", 16, kv_heads, size)),
        "v_cache": TensorType(cache or dtype, ("P", 16, kv_heads, value or size)),
        "cu_seqlens": bounds, "page_indptr": bounds, "kv_lens": ints, "page_start": ints,
        "page_indices": TensorType("int32", ("N",)),
    }  # fmt: skip
    if "sinks" in more:
        types["sinks"] = TensorType(dtype, (heads,))
    if "slopes" in more:
        types["slopes"] = TensorType("float32", (heads,))
    if "scales" in more:
        types |= dict.fromkeys(("k_scale", "v_scale"), TensorType("float32", (1,)))
    numbers = {"scale": size**-0.5, **reach, **({"soft_cap": 30.0} if "soft_cap" in more else {})}
    args = {**{name: Ref(name) for name in types}, **{name: Const(number) for name, number in numbers.items()}}
    results = (Value("y", TensorType(dtype, (1, "T", heads, value or size))),)
    return use_of(Node("precast.paged_attention", args, results), types, Target("cuda", capability))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    "use",
    [
        paged_use((9, 0), "bfloat16", 32, 8, 128),
        paged_use((9, 0), "bfloat16", 16, 8, 256, window=1024),
        paged_use((8, 9), "bfloat16", 16, 8, 256, window=1024),
        paged_use((9, 0), "bfloat16", 32, 8, 128, cache="float8_e4m3fn"),
        paged_use((8, 0), "float16", 7, 1, 80, value=64, more=("slopes", "soft_cap"), chunk=100),
        paged_use((9, 0), "float32", 4, 4, 128, more=("sinks", "slopes", "soft_cap"), window=100),
        paged_use((8, 9), "float16", 256, 2, 512, cache="float8_e4m3fn"),
        paged_use((9, 0), "bfloat16", 32, 8, 128, cache="float8_e4m3fn", more=("scales",)),
        paged_use((9, 0), "bfloat16", 16, 8, 256, cache="float8_e4m3fn", more=("scales", "soft_cap"), window=64),
    ],
    ids=lambda use: f"{use.node.outputs[0].type.dtype} {use.shape('q')[2:]} {use.target.text}",
)
@pytest.mark.parametrize(("tokens", "slots"), [(9, 1), (9, 3), (33, 33), (SMALL_STEP + 1, 1)])
def test_paged_attention_compiles(use: Use, tokens: int, slots: int) -> None:
    in_triton = [record for record in records_of("precast.paged_attention", 1) if record.kind == "triton"]
    launches = resolve(use, {"T": tokens, "B": slots}, records=in_triton).record.runs
    assert callable(launches)
    for launch in launches(use):
        found = compiled_launch(use, launch)

        assert len(found.asm["cubin"]) > 0
        # GPUs with less shared memory than those of 8.0 and 9.0 have 99 KiB.
        limit = {(9, 0): 227, (8, 0): 163, (8, 9): 99}[use.target.capability]
        assert found.metadata.shared <= limit * 1024
        if launch.kernel.endswith("merge_kernel"):
            continue
        # Half precision runs on the tensor cores, float32 in float32.
        has_tensor_cores = any(name in found.asm["ptx"] for name in ("wgmma", "mma.sync"))
        assert has_tensor_cores == (use.width("q") == 2)
        assert not any("e4m3" in line for line in found.asm["ptx"].splitlines() if "mma" in line)
        assert ("e4m3x2" in found.asm["ptx"]) == (use.width("k_cache") == 1)
        # Keys are on their way before they are wanted.
        assert ("cp.async" in found.asm["ptx"]) == (use.width("q") == 2)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(("size", "stages"), [(64, 4), (128, 5)])
def test_warps_with_roles_keep_all_in_registers(size: int, stages: int, tmp_path: Path) -> None:
    use = paged_use((9, 0), "bfloat16", 32, 8, size)

    found = compiled_launch(use, hopper_launch(use, Tile(128, 64, 4, stages)))

    # With a stack, ptxas 12.8 may take the address of what a warp group multiplies from the pointer to it.
    assert stack_bytes(found, tmp_path) == 0
    assert found.metadata.num_warps == 12
    assert found.metadata.shared <= 227 * 1024


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("new", "cache", "scaled"),
    [
        ("bf16", "bf16", False), ("fp32", "bf16", False), ("bf16", "fp8e4nv", False), ("fp16", "fp8e4nv", False),
        ("fp32", "fp8e4nv", False), ("bf16", "fp8e4nv", True), ("fp32", "fp8e4nv", True),
    ],
)  # fmt: skip
def test_write_kv_compiles_for_hopper(new: str, cache: str, scaled: bool) -> None:
    from precast.kernels.attention import triton_write_kv

    kernel = triton_write_kv.write_kv_kernel
    constants: dict[str, Any] = {"PAGE_SIZE": 16, "SIZE": 80, "VALUE_SIZE": 64, "BLOCK_D": 128, "BLOCK_V": 64}
    constants["LIMIT"] = 448.0 if cache == "fp8e4nv" else 0.0
    pointers = {"slot_mapping_ptr": "*i64"}
    pointers |= dict.fromkeys(("k_ptr", "v_ptr"), f"*{new}")
    pointers |= dict.fromkeys(("k_cache_ptr", "v_cache_ptr"), f"*{cache}")
    scales = ("k_scale_ptr", "v_scale_ptr")
    if scaled:
        pointers |= dict.fromkeys(scales, "*fp32")
    else:
        constants |= dict.fromkeys(scales)

    found = compiled(kernel, constants, pointers, {}).asm

    assert len(found["cubin"]) > 0
    # One conversion to float8, by the hardware, which rounds to nearest even; numbers were limited before.
    assert ("cvt.rn.satfinite.e4m3x2.f32" in found["ptx"]) == (cache == "fp8e4nv")
    assert ("min.NaN" in found["ptx"]) == (cache == "fp8e4nv")
    # Divided as the reference divides, not by a product with the inverse.
    assert ("div.rn.f32" in found["ptx"]) == scaled


def latent_use(capability: tuple[int, int], dtype: Dtype, heads: int, cache: Dtype | None = None) -> Use:
    """Latent attention of DeepSeek's sizes in a graph."""
    nope, rope, latent, value = 128, 64, 512, 128
    ints, bounds = TensorType("int32", ("B",)), TensorType("int32", (add("B", 1),))
    types = {
        "q": TensorType(dtype, (1, "T", heads, nope + rope)),
        "cache": TensorType(cache or dtype, ("P", 16, latent + rope)),
        "weight": TensorType(dtype, (heads * (nope + value), latent)),
        "cu_seqlens": bounds, "page_indptr": bounds, "kv_lens": ints, "page_start": ints,
        "page_indices": TensorType("int32", ("N",)),
    }  # fmt: skip
    args = {**{name: Ref(name) for name in types}, "scale": Const((nope + rope) ** -0.5), "value_size": Const(value)}
    results = (Value("y", TensorType(dtype, (1, "T", heads, value))),)
    node = Node("precast.paged_latent_attention", args, results)
    return use_of(node, types, Target("cuda", capability), statics={"weight"})


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    "use",
    [
        latent_use((9, 0), "bfloat16", 128),
        latent_use((9, 0), "bfloat16", 20, "float8_e4m3fn"),
        latent_use((8, 9), "float16", 16, "float8_e4m3fn"),
        latent_use((8, 0), "bfloat16", 128),
        latent_use((9, 0), "float32", 16),
    ],
    ids=lambda use: f"{use.operands['cache'].type.dtype} {use.shape('q')[2]} {use.target.text}",
)
@pytest.mark.parametrize("tokens", [1, 64, 65])
def test_latent_attention_compiles(use: Use, tokens: int) -> None:
    launches = resolve(use, {"T": tokens}).record.runs
    assert callable(launches)
    for launch in launches(use):
        found = compiled_launch(use, launch)

        assert len(found.asm["cubin"]) > 0
        # GPUs with less shared memory than those of 8.0 and 9.0 have 99 KiB.
        assert found.metadata.shared <= {(9, 0): 227, (8, 0): 163, (8, 9): 99}[use.target.capability] * 1024
        has_tensor_cores = any(name in found.asm["ptx"] for name in ("wgmma", "mma.sync"))
        assert has_tensor_cores == (use.width("q") == 2 and not launch.kernel.endswith("merge_kernel"))


def sparse_uses(capability: tuple[int, int], dtype: Dtype, heads: int, cache: Dtype | None = None) -> list[Use]:
    """The selection of keys and the attention to these in a graph, of DeepSeek's sizes, with sinks."""
    attended = latent_use(capability, dtype, heads, cache)
    metadata = ("cu_seqlens", "kv_lens", "page_indices", "page_indptr", "page_start")
    shared = {name: attended.operands[name].type for name in metadata}
    types = shared | {
        "q": TensorType(dtype, (1, "T", heads, 128)), "cache": TensorType(cache or dtype, ("P", 16, 128)),
        "weights": TensorType("float32", (1, "T", heads)),
    }  # fmt: skip
    args = {**{name: Ref(name) for name in types}, "scale": Const(0.1), "count": Const(2048)}
    select = Node("precast.paged_select_keys", args, (Value("y", TensorType("int32", (1, "T", 2048))),))
    taken = {name: each.type for name, each in attended.operands.items()}
    taken |= {"selected": TensorType("int32", (1, "T", 2048)), "sinks": TensorType(dtype, (heads,))}
    more = {name: Ref(name) for name in ("selected", "sinks")}
    attend = Node("precast.paged_sparse_latent_attention", attended.node.args | more, attended.node.outputs)
    return [use_of(select, types, attended.target), use_of(attend, taken, attended.target, statics={"weight"})]


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    "use",
    [
        *sparse_uses((9, 0), "bfloat16", 128),
        *sparse_uses((9, 0), "bfloat16", 64, "float8_e4m3fn"),
        *sparse_uses((8, 9), "float16", 16, "float8_e4m3fn"),
        *sparse_uses((8, 0), "bfloat16", 32),
        *sparse_uses((9, 0), "float32", 16),
    ],
    ids=lambda use: f"{use.node.op} {use.operands['cache'].type.dtype} {use.shape('q')[2]} {use.target.text}",
)
def test_sparse_attention_compiles(use: Use) -> None:
    (launches,) = (each.runs for each in records_of(use.node.op, use.node.version) if each.kind == "triton")
    assert callable(launches)
    for launch in launches(use):
        found = compiled_launch(use, launch)

        assert len(found.asm["cubin"]) > 0
        assert found.metadata.shared <= {(9, 0): 227, (8, 0): 163, (8, 9): 99}[use.target.capability] * 1024
        has_tensor_cores = any(name in found.asm["ptx"] for name in ("wgmma", "mma.sync"))
        assert has_tensor_cores == (use.width("q") == 2 and not launch.kernel.endswith(("note_kernel", "join_kernel")))


def block_uses(capability: tuple[int, int], dtype: Dtype, cache: Dtype | None = None) -> list[Use]:
    """The selection of blocks and the attention to these in a graph, of MiniMax-M3's sizes."""
    types = {name: TensorType("int32", (size,)) for name, size in (
        ("cu_seqlens", add("B", 1)), ("kv_lens", "B"), ("page_indices", "N"),
        ("page_indptr", add("B", 1)), ("page_start", "B"))}  # fmt: skip
    scored = types | {
        "q": TensorType(dtype, (1, "T", 4, 128)), "cache": TensorType(cache or dtype, ("P", 64, 128)),
    }  # fmt: skip
    args = {name: Ref(name) for name in scored} | {"count": Const(16), "block_size": Const(128), "local": Const(1)}
    chosen = TensorType("int32", (1, "T", 4, 16))
    select = Node("precast.paged_select_blocks", args, (Value("y", chosen),))
    pages = TensorType(cache or dtype, ("P", 16, 4, 128))
    taken = types | {
        "q": TensorType(dtype, (1, "T", 64, 128)), "k_cache": pages, "v_cache": pages, "selected": chosen,
    }  # fmt: skip
    given = {name: Ref(name) for name in taken} | {"scale": Const(0.1), "block_size": Const(128)}
    attend = Node("precast.paged_block_sparse_attention", given, (Value("y", taken["q"]),))
    wide = TensorType(cache or dtype, ("P", 16, 2, 256))
    small = types | {
        "q": TensorType(dtype, (1, "T", 16, 256)), "k_cache": wide, "v_cache": wide,
        "selected": TensorType("int32", (1, "T", 1, 512)),
    }  # fmt: skip
    of_small = Node(attend.op, given | {"block_size": Const(4), "tail": Const(True)}, (Value("y", small["q"]),))
    target = Target("cuda", capability)
    return [use_of(select, scored, target), use_of(attend, taken, target), use_of(of_small, small, target)]


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    "use",
    [
        *block_uses((9, 0), "bfloat16"),
        *block_uses((9, 0), "bfloat16", "float8_e4m3fn"),
        *block_uses((8, 9), "float16", "float8_e4m3fn"),
        *block_uses((8, 0), "bfloat16"),
        *block_uses((9, 0), "float32"),
    ],
    ids=lambda use: f"{use.node.op} {use.shape('q')} {use.target.text}",
)
@pytest.mark.parametrize("tokens", [1, 65])
def test_attention_to_selected_blocks_compiles(use: Use, tokens: int) -> None:
    launches = resolve(use, {"T": tokens}).record.runs
    assert callable(launches)
    for launch in launches(use):
        found = compiled_launch(use, launch)

        assert len(found.asm["cubin"]) > 0
        assert found.metadata.shared <= {(9, 0): 227, (8, 0): 163, (8, 9): 99}[use.target.capability] * 1024
        has_tensor_cores = any(name in found.asm["ptx"] for name in ("wgmma", "mma.sync"))
        has_products = launch.kernel.endswith((":score_kernel", ":attend_kernel"))
        assert has_tensor_cores == (use.width("q") == 2 and has_products)


def entry_uses(capability: tuple[int, int], dtype: Dtype, cache: Dtype | None = None) -> list[Use]:
    """The selection of entries and the attention to these, and to those of a window and to all, of DeepSeek-V4-Flash's
    sizes."""
    pages = {name: TensorType("int32", (size,)) for name, size in (
        ("cu_seqlens", add("B", 1)), ("kv_lens", "B"), ("page_indices", "N"),
        ("page_indptr", add("B", 1)), ("page_start", "B"))}  # fmt: skip
    target, q = Target("cuda", capability), TensorType(dtype, (1, "T", 64, 512))
    scored = pages | {
        "q": TensorType(dtype, (1, "T", 64, 128)), "cache": TensorType(cache or dtype, ("P", 16, 128)),
        "weights": TensorType("float32", (1, "T", 64)),
    }  # fmt: skip
    chosen = TensorType("int32", (1, "T", 512))
    given = {name: Ref(name) for name in scored} | {"scale": Const(0.1), "rate": Const(4), "count": Const(512)}
    found = [use_of(Node("precast.paged_select_entries", given, (Value("y", chosen),)), scored, target)]
    results = Value("y", TensorType("float32", q.shape)), Value("lse", TensorType("float32", (1, "T", 64)))
    for slots, rate, window in ((64, 1, 128), (16, 4, None), (2, 128, None)):
        taken = pages | {"q": q, "cache": TensorType(cache or dtype, ("P", slots, 512))}
        taken |= {"selected": chosen} if rate == 4 else {}
        args = {name: Ref(name) for name in taken} | {"scale": Const(0.1), "rate": Const(rate)}
        args |= {} if window is None else {"window": Const(window)}
        found.append(use_of(Node("precast.paged_entry_attention", args, results), taken, target))
    return found


def made_uses(capability: tuple[int, int]) -> list[Use]:
    """How DeepSeek-V4-Flash's entries are made, of 128 tokens, and of 4 with overlap, and kept; and the matrices that
    its streams are mixed with."""
    target, found = Target("cuda", capability), []
    lengths = {
        "slots": TensorType("int32", ("B",)), "cu_seqlens": TensorType("int32", (add("B", 1),)),
        "kv_lens": TensorType("int32", ("B",)),
    }  # fmt: skip
    for width, channels in ((128, 512), (8, 1024)):
        tokens = TensorType("bfloat16", (1, "T", channels))
        types = {"kv": tokens, "gate": tokens, "bias": TensorType("float32", (width, 512))}
        types |= {"state": TensorType("bfloat16", ("P", 2, width, channels))} | lengths
        result = Value("y", TensorType("bfloat16", (1, "T", 512)))
        args = {name: Ref(name) for name in types}
        found.append(use_of(Node("precast.stateful_compress", args, (result,)), types, target))
    types = {
        "entries": TensorType("bfloat16", (1, "T", 512)), "cache": TensorType("bfloat16", ("P", 16, 512)),
        "slot_mapping": TensorType("int64", ("T",)),
    }  # fmt: skip
    args = {name: Ref(name) for name in types} | {"rate": Const(4)}
    found.append(use_of(Node("precast.write_entries", args, ()), types, target))
    types = {"x": TensorType("float32", (1, "T", 16))}
    args = {"x": Ref("x"), "size": Const(4), "iterations": Const(20), "eps": Const(1e-6)}
    found.append(use_of(Node("precast.sinkhorn", args, (Value("y", types["x"]),)), types, target))
    types = {"self": TensorType("float32", (1, "T", 4, 4))}
    args = {"self": Ref("self"), "dim": Const(-1)}
    found.append(use_of(Node("aten.softmax.int", args, (Value("y", types["self"]),)), types, target.without_torch))
    types = {"self": TensorType("bfloat16", (1, "T", 256)), "index": TensorType("int64", (1, "T", 6))}
    args = {"self": Ref("self"), "dim": Const(-1), "index": Ref("index")}
    result = Value("y", TensorType("bfloat16", (1, "T", 6)))
    found.append(use_of(Node("aten.gather.default", args, (result,)), types, target.without_torch))
    types = {"self": TensorType("float32", ("T", 256))}
    results = Value("y", TensorType("float32", ("T", 6))), Value("ids", TensorType("int64", ("T", 6)))
    args = {"self": Ref("self"), "k": Const(6), "sorted": Const(False)}
    found.append(use_of(Node("aten.topk.default", args, results), types, target.without_torch))
    return found


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    "use",
    [use for capability in ((8, 0), (8, 9), (9, 0)) for use in made_uses(capability)],
    ids=lambda use: f"{use.node.op} {use.target.text}",
)
def test_what_stands_beside_attention_over_entries_compiles(use: Use, tmp_path: Path) -> None:
    launches = resolve(use, {"T": 1}).record.runs
    assert callable(launches)
    for launch in launches(use):
        found = compiled_launch(use, launch)

        assert len(found.asm["cubin"]) > 0
        assert stack_bytes(found, tmp_path) == 0


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    "use",
    [
        *entry_uses((9, 0), "bfloat16"),
        *entry_uses((9, 0), "bfloat16", "float8_e4m3fn"),
        *entry_uses((8, 9), "float16", "float8_e4m3fn"),
        *entry_uses((8, 0), "bfloat16"),
        *entry_uses((9, 0), "float32"),
    ],
    ids=lambda use: f"{use.node.op} {use.constant('rate')} {use.operands['cache'].type.dtype} {use.target.text}",
)
def test_attention_over_entries_compiles(use: Use) -> None:
    (launches,) = (each.runs for each in records_of(use.node.op, use.node.version) if each.kind == "triton")
    assert callable(launches)
    for launch in launches(use):
        found = compiled_launch(use, launch)

        assert len(found.asm["cubin"]) > 0
        assert found.metadata.shared <= {(9, 0): 227, (8, 0): 163, (8, 9): 99}[use.target.capability] * 1024
        has_tensor_cores = any(name in found.asm["ptx"] for name in ("wgmma", "mma.sync"))
        assert has_tensor_cores == (use.width("q") == 2 and not launch.kernel.endswith(("note_kernel", "join_kernel")))


@pytest.mark.parametrize("tokens", [1, 64, 256])
def test_latents_are_whole_in_steps_of_many_slots(tokens: int) -> None:
    launches = resolve(use := latent_use((9, 0), "bfloat16", 128), {"T": tokens}).record.runs
    assert callable(launches)
    names = {launch.kernel.partition(":")[2]: launch for launch in launches(use)}
    programs = {
        slots: [evaluate(size, {"T": tokens, "B": slots}) for size in names["split_kernel"].grid][1:]
        for slots in (1, 8, 32, 33)
    }

    assert programs == {1: [2, 64], 8: [2, 8], 32: [2, 4], 33: [2, 1]}
    assert 0 in [evaluate(size, {"T": tokens, "B": 33}) for size in names["merge_kernel"].grid]


@pytest.mark.parametrize("heads", [1, 3, 16, 20, 71, 128])
def test_tiles_of_latents_hold_whole_queries(heads: int) -> None:
    for capability in ((8, 9), (9, 0)):
        for dtype, cache in (("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float8_e4m3fn")):
            use = latent_use(capability, dtype, heads, cache)  # type: ignore[arg-type]
            for tokens in (1, 64, 65):
                launches = resolve(use, {"T": tokens}).record.runs
                assert callable(launches)
                (found,) = (
                    each for each in launches(use) if each.kernel.endswith("latent_attention.triton:split_kernel")
                )
                rows, queries, each = (found.constants[name] for name in ("BLOCK_M", "BLOCK_Q", "BLOCK_H"))

                assert queries * each <= rows
                assert queries == 1 or each == heads
                assert found.grid[1] * each >= heads


def state_use(op: str, dtype: Dtype, heads: int, groups: int, size: int, keys: int) -> Use:
    """A scan, or linear attention, in a graph, of `heads` with values of `size` and keys of `keys` elements."""
    ints = TensorType("int32", ("B",))
    if op == "state_space_scan":
        types = {
            "x": TensorType(dtype, (1, "T", heads, size)), "dt": TensorType(dtype, (1, "T", heads)),
            "a": TensorType("float32", (heads,)), "b": TensorType(dtype, (1, "T", groups, keys)),
            "c": TensorType(dtype, (1, "T", groups, keys)), "d": TensorType(dtype, (heads,)),
            "dt_bias": TensorType(dtype, (heads,)), "state": TensorType("float32", ("P", heads, size, keys)),
        }  # fmt: skip
    else:
        types = {
            "q": TensorType(dtype, (1, "T", heads, keys)), "k": TensorType(dtype, (1, "T", heads, keys)),
            "v": TensorType(dtype, (1, "T", heads, size)), "decay": TensorType("float32", (heads,)),
            "state": TensorType("float32", ("P", heads, keys, size)),
        }  # fmt: skip
    types |= {"slots": ints, "kv_lens": ints, "cu_seqlens": TensorType("int32", (add("B", 1),))}
    numbers = {"softplus": True, "dt_min": 0.0, "dt_max": 1.0} if op == "state_space_scan" else {"scale": 1.0}
    args = {**{name: Ref(name) for name in types}, **{name: Const(number) for name, number in numbers.items()}}
    result = types["x" if op == "state_space_scan" else "v"]
    return use_of(Node(f"precast.stateful_{op}", args, (Value("y", result),)), types, Target("cuda", (9, 0)))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    "use",
    [
        state_use("state_space_scan", "bfloat16", 128, 8, 64, 128),
        state_use("state_space_scan", "bfloat16", 256, 8, 64, 256),
        state_use("linear_attention", "bfloat16", 64, 64, 128, 128),
        state_use("linear_attention", "float16", 4, 4, 72, 96),
        state_use("linear_attention", "float32", 4, 4, 33, 80),
    ],
    ids=lambda use: f"{use.node.op} {use.result.dtype} {use.shape('state')[1:]}",
)
def test_states_compile_for_hopper(use: Use) -> None:
    types = {**{name: operand.type for name, operand in use.operands.items()}, "out.0": use.result}
    *_, chunks, walk = walk_and_chunks(use)

    in_chunks, walked = compiled_on_hopper(chunks, types), compiled_on_hopper(walk, types)

    # bfloat16 and float16 run on the tensor cores, float32 in float32; all fit what a multiprocessor has.
    assert any(name in in_chunks.asm["ptx"] for name in ("wgmma", "mma.sync")) == (use.result.dtype != "float32")
    assert ("tf32" in in_chunks.asm["ptx"]) == (use.result.dtype == "float16")
    assert in_chunks.metadata.shared <= 227 * 1024
    # A walk's sums are over some threads of a warp, or over few of its warps.
    assert walked.metadata.shared <= 4096


@pytest.mark.parametrize("tokens", [SMALL_STEP, 256])
def test_nothing_is_joined_in_steps_of_many_slots(tokens: int) -> None:
    use = paged_use((8, 0), "bfloat16", 32, 8, 128)
    programs = {}
    for slots in (1, 2, 8, 32, 33, 64):
        launches = resolve(use, {"T": tokens, "B": slots}).record.runs
        assert callable(launches)
        split, merge = (
            [evaluate(size, {"T": tokens, "B": slots}) for size in launch.grid] for launch in launches(use)[-2:]
        )
        programs[slots] = (split[-1], 0 not in merge)

    assert programs == {1: (64, True), 2: (64, True), 8: (4, True), 32: (4, True), 33: (1, False), 64: (1, False)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("group", [1, 3, 7, 8, 12, 16, 71, 128])
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0)])
def test_tiles_hold_whole_queries(group: int, dtype: Dtype, capability: tuple[int, int]) -> None:
    for size in (8, 64, 80, 128, 192, 256, 512):
        use = paged_use(capability, dtype, 2 * group, 2, size)
        for record in records_of("precast.paged_attention", 1):
            if record.kind != "triton":
                continue
            assert callable(record.runs)
            for launch in record.runs(use):
                if launch.kernel.endswith("merge_kernel"):
                    continue
                found = launch.constants
                assert found["BLOCK_Q"] >= 1
                assert found["BLOCK_Q"] * found["BLOCK_H"] <= found["BLOCK_M"]
                assert all(n >= 16 and n & (n - 1) == 0 for n in (found["BLOCK_M"], found["BLOCK_N"]))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_fused_op_compiles_for_hopper(case: Case, half: torch.dtype) -> None:
    from precast.kernels.fused import triton as kernels

    (launch,) = launches(use_of(*node_of(case, half), Target("cuda", (9, 0))))
    given = dict(zip(kernels.fused_kernel.arg_names, launch.args, strict=False))
    missing = {name: None for name, arg in given.items() if arg is None}
    types = [half if dtype == "half" else getattr(torch, dtype) for dtype, _ in case.operands]
    pointers = {f"x{i}": f"*{TYPES[dtype]}" for i, dtype in enumerate(types)}
    pointers |= {name: f"*{NAMES[half]}" for name, arg in given.items() if name.startswith("y") and arg is not None}

    made = compiled(
        kernels.fused_kernel,
        {**missing, **launch.constants},
        pointers,
        {"num_warps": launch.num_warps, "num_stages": 3},
    )

    ptx = made.asm["ptx"]
    assert made.metadata.shared <= SHARED_BYTES
    assert not case.exact or "fma.rn" not in ptx
    # It may begin while the kernel in front runs, and reads nothing before that has ended.
    assert launch.pdl
    assert re.findall(r"griddepcontrol\.wait|ld\.global|st\.global", ptx)[0] == "griddepcontrol.wait"
