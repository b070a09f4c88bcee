"""Which implementation computes each node: of a layer of Llama, written by hand, on the targets that are to come; and
of artificial records, for what none of today's says.
"""

from __future__ import annotations

import itertools
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import pytest
from graph_text import parse_graph
from msgspec.structs import replace

from precast import kernels
from precast.ir.errors import BundleError, TargetError
from precast.ir.graph.schema import Arg, Const, Dtype, Expr, Node, Ref, TensorType, Value
from precast.ir.graph.symbols import add, evaluate, mul
from precast.ir.memory.liveness import Operand
from precast.ir.ops import table as ops
from precast.kernels.choices import Case, all_records, cases, records_of, resolve, workspace
from precast.kernels.delta_rule import launches
from precast.kernels.latent_attention.launches import FEW_TOKENS, SMALL_STEP
from precast.kernels.linear.records import workspace_bytes
from precast.kernels.linear.stream_plan import WAYS
from precast.kernels.measured import Machine, Measured, MeasuredProduct, Table
from precast.kernels.records import Condition, Pointer, Record, Stride, nothing
from precast.kernels.sources import digest, file_digest, kernel_sources, sources
from precast.kernels.stateful.limits import MAX_WALKED
from precast.kernels.use import GPU, Target, Use, statics_in, types_in, use_of

CPU = Target("cpu")
OLD = Target("cuda", (8, 0))
PAIR = GPU._replace(tp=2)

# KV: heads of keys and values on a rank, floordiv(2, tp).
LAYER = """
symbols { T: 1..  B: 1..  N: 0..  P: 0..  tp: 1..2 }
inputs {
  %h: bfloat16[1, T, 256]  %cos: bfloat16[1, T, 32]  %sin: bfloat16[1, T, 32]
  %slots: int64[T]  %cu_seqlens: int32[(B + 1)]  %kv_lens: int32[B]
  %pages: int32[N]  %indptr: int32[(B + 1)]  %start: int32[B]
}
params {
  %norm: bfloat16[256] = read("norm", [256])
  %qkv: bfloat16[(256 * KV), 256] = slice(read("qkv", [512, 256]), dim=0, start=0, length=(256 * KV))
  %o: bfloat16[256, (128 * KV)] = slice(read("o", [256, 256]), dim=1, start=0, length=(128 * KV))
}
pool main(pages=P)
group full(pool=main, spec=paged(num_kv_heads=KV, head_size=64, value_size=64, dtype=CACHED, page_size=16, window=none),
           page_indices=%pages, page_indptr=%indptr, page_start=%start, slot_mapping=%slots) {
  slot layer(%keys: CACHED[P, 16, KV, 64], %values: CACHED[P, 16, KV, 64])
}
main {
  %normed = precast.rms_norm(x=%h, weight=%norm, eps=1e-05, cast_before_scale=true)
  %fused = aten.linear.default(input=%normed, weight=%qkv)
  %heads = aten.reshape.default(self=%fused, shape=[1, T, (4 * KV), 64])
  %q = aten.slice.Tensor(self=%heads, dim=2, start=0, end=(2 * KV))
  %k = aten.slice.Tensor(self=%heads, dim=2, start=(2 * KV), end=(3 * KV))
  %v = aten.slice.Tensor(self=%heads, dim=2, start=(3 * KV), end=(4 * KV))
  %turned_q = precast.rotary(x=%q, cos=%cos, sin=%sin, interleaved=false)
  %turned_k = precast.rotary(x=%k, cos=%cos, sin=%sin, interleaved=false)
  precast.write_kv(k=%turned_k, v=%v, k_cache=%keys, v_cache=%values, slot_mapping=%slots)
  %y = precast.paged_attention(q=%turned_q, k_cache=%keys, v_cache=%values, sinks=none, cu_seqlens=%cu_seqlens,
      kv_lens=%kv_lens, page_indices=%pages, page_indptr=%indptr, page_start=%start, scale=0.125)
  %flat = aten.reshape.default(self=%y, shape=[1, T, (128 * KV)])
  %projected = aten.linear.default(input=%flat, weight=%o)
  return out=%projected
}
"""


def uses(target: Target, *, cached: Dtype = "bfloat16") -> dict[str, Use]:
    """The layer's nodes by what they make, `write` for the one that makes nothing."""
    graph = parse_graph(LAYER.replace("KV", "floordiv(2, tp)").replace("CACHED", cached))
    types, statics = types_in(graph), statics_in(graph)
    nodes = [node for node in graph.main if isinstance(node, Node)]
    return {node.outputs[0].name if node.outputs else "write": use_of(node, types, target, statics) for node in nodes}


def chosen(found: dict[str, Use]) -> dict[str, str]:
    """The names of the records, by what their nodes make."""
    return {name: resolve(use).record.name for name, use in found.items()}


SINGLE_TOKENS = {
    "few": "0 to 8", "small": "0 to 8", **dict.fromkeys(("to_16", "to_32", "to_48", "to_64"), "9 to 64"),
    **{f"beside_{what}_{slots}": "65 to any" for what in ("hopper", "prompts")
       for slots in ("to_48", "to_64", "to_96", "many")},
}  # fmt: skip
"""The kernels of attention in CUDA C++, and how many tokens each takes."""


def refused(why: dict[str, str]) -> str:
    """Records with the reason why they are not chosen; those with the same reason as the one in front follow it."""
    told = []
    for reason, names in itertools.groupby(why, lambda name: why[name]):
        first, *others = names
        told += [f"not {first}: {reason}", *([f"nor {', '.join(others)}"] if others else [])]
    return "; ".join(told)


def not_cuda(why: str) -> dict[str, str]:
    """Why none of them is chosen. `{}` stands for the tokens that it takes."""
    return {f"cuda.paged_attention.{each}": why.format(takes) for each, takes in SINGLE_TOKENS.items()}


def not_triton(why: str) -> dict[str, str]:
    """Why none of those in Triton is chosen."""
    return {f"triton.paged_attention{each}": why for each in (*SMALL, ".hopper", "")}


ANYWHERE = {
    "fused": "torch.linear.default", "heads": "torch.reshape.default", "q": "torch.slice.Tensor",
    "k": "torch.slice.Tensor", "v": "torch.slice.Tensor", "flat": "torch.reshape.default",
    "projected": "torch.linear.default",
}  # fmt: skip
TRITON_ROWS = {"normed": "triton.rms_norm", "turned_q": "triton.rotary", "turned_k": "triton.rotary"}
TORCH_ROWS = {"normed": "reference.rms_norm", "turned_q": "reference.rotary", "turned_k": "reference.rotary"}
ON_GPUS = {"write": "triton.write_kv", "y": "triton.paged_attention.hopper", **TRITON_ROWS}
ON_OLD_GPUS = ON_GPUS | {"y": "triton.paged_attention"}
IN_TORCH = {"write": "reference.write_kv", "y": "torch.paged_attention", **TORCH_ROWS}
SMALL = (".few", ".small", ".many")
HOPPER = "it wants compute capability 9.0 or higher"
OF_FEW_TOKENS = {f"triton.paged_attention{each}": "T is 65, it takes 0 to 64" for each in SMALL}


# --- the layer ---------------------------------------------------------------------------------------------------


def test_an_op_is_found_where_its_records_are() -> None:
    """Each op names the folders that have records of it, so that others need not be imported."""
    for record in all_records():
        for version in record.op_versions:
            own = [each for each in all_records() if each.op == record.op and version in each.op_versions]
            assert list(records_of(record.op, version)) == own


def test_steps_of_many_tokens() -> None:
    new, old = (resolve(uses(target)["y"], {"T": 65, "B": 1}).reason for target in (GPU, OLD))

    of_slots = {"to_48": "33 to 48", "to_64": "49 to 64", "to_96": "65 to 96", "many": "97 to any"}
    of_slots = {f"beside_hopper_{name}": slots for name, slots in of_slots.items()}
    of_slots |= {name.replace("hopper", "prompts"): slots for name, slots in of_slots.items()}
    why = {f"cuda.paged_attention.{name}": f"B is 1, it takes {of_slots[name]}" if name in of_slots
           else f"T is 65, it takes {takes}" for name, takes in SINGLE_TOKENS.items()}  # fmt: skip
    of_hopper = {"triton.paged_attention.hopper": HOPPER}
    assert new == f"the fastest of 20; {refused(why | OF_FEW_TOKENS)}"
    assert old == f"the fastest of 5; {refused(not_cuda(HOPPER) | OF_FEW_TOKENS | of_hopper)}"


@pytest.mark.parametrize("target", [GPU, PAIR, OLD], ids=["one", "two", "old"])
def test_a_layer_on_gpus(target: Target) -> None:
    found = uses(target)

    assert chosen(found) == {**ANYWHERE, **(ON_OLD_GPUS if target == OLD else ON_GPUS)}
    assert {resolve(use).record.control for use in found.values()} == {"static"}
    on_old = {2: "few", 3: "small", 32: "small", 33: "many", 64: "many"}
    on_new = {2: "triton few", 3: "triton small", 8: "triton small"}
    for least, most in ((9, 16), (17, 32), (33, 48), (49, 64)):
        on_new |= dict.fromkeys((least, most), f"cuda to_{most}")
    by_slots = {slots: f"triton {name}" for slots, name in on_old.items()} if target == OLD else on_new
    for slots, named in by_slots.items():
        kind, name = named.split()
        assert resolve(found["y"], {"T": 64, "B": slots}).record.name == f"{kind}.paged_attention.{name}"
    kind = "triton" if target == OLD else "cuda"
    for slots, name in {1: "few", 2: "few", 3: "small", 8: "small"}.items():
        assert resolve(found["y"], {"T": slots, "B": slots}).record.name == f"{kind}.paged_attention.{name}"
    beside = {32: "triton.paged_attention.hopper", 33: "cuda.paged_attention.beside_hopper_to_48"}
    beside |= {slots: f"cuda.paged_attention.beside_hopper_{name}"
               for slots, name in {48: "to_48", 49: "to_64", 65: "to_96", 96: "to_96", 97: "many"}.items()}  # fmt: skip
    for slots, name in beside.items():
        assert (resolve(found["y"], {"T": 900, "B": slots}).record.name == name) == (target != OLD)
    assert resolve(found["heads"]).reason == "the only one"


def test_a_layer_on_a_cpu() -> None:
    found = uses(CPU)

    assert chosen(found) == {**ANYWHERE, **IN_TORCH}
    why = "it runs on cuda"
    assert resolve(found["y"]).reason == f"the fastest of 2; {refused(not_cuda(why) | not_triton(why))}"


def test_without_triton_attention_reads_the_host() -> None:
    found = uses(GPU._replace(kinds=GPU.kinds - {"triton"}))

    assert chosen(found) == {**ANYWHERE, **IN_TORCH}
    choice = resolve(found["y"])
    assert choice.record.control == "host"
    why = not_cuda("it wants Triton, which takes sequences of several tokens")
    why |= {f"cuda.paged_attention.{each}": "T is not known, it takes 0 to 8" for each in ("few", "small")}
    assert choice.reason == f"the fastest of 15; {refused(why | not_triton('triton is not installed'))}"
    assert {resolve(found["y"], {"T": tokens, "B": 40}).record.name for tokens in (64, 900)} == {choice.record.name}


def test_triton_wants_a_gpu_that_it_compiles_for() -> None:
    found = uses(Target.parse("sm_75"))
    wanted = "it wants compute capability 8.0 or higher"

    assert chosen(found) == {**ANYWHERE, **IN_TORCH}
    each = not_triton(wanted) | {"triton.paged_attention.hopper": HOPPER}
    assert resolve(found["y"]).reason == f"the only one; {refused(not_cuda(HOPPER) | each)}"
    assert resolve(found["write"]).reason == f"the only one; not triton.write_kv: {wanted}"
    kept = [record.min_capability for record in all_records() if record.kind == "triton"]
    assert set(kept) == {(8, 0), (9, 0)}


def test_a_cache_of_8_bits_wants_a_gpu_that_converts() -> None:
    wanted = "compute capability 8.9 or higher for a cache of 8 bits"

    assert chosen(uses(GPU, cached="float8_e4m3fn")) == {**ANYWHERE, **ON_OLD_GPUS}
    found = uses(OLD, cached="float8_e4m3fn")
    assert chosen(found) == {**ANYWHERE, **IN_TORCH, **TRITON_ROWS}
    assert resolve(found["write"]).reason == f"the fastest of 2; not triton.write_kv: it wants {wanted}"


def test_float64_is_for_torch() -> None:
    use = uses(GPU)["y"]
    wide = {**use.operands, "q": Operand(TensorType("float64", use.shape("q")), True)}

    choice = resolve(use._replace(operands=wide))

    assert choice.record.name == "torch.paged_attention"
    assert choice.reason.endswith("q is float64, it takes float16, bfloat16, float32")


# --- records that are to come: 8-bit weights for few rows, a fused exchange for two ranks ------------------------


def is_tall(use: Use) -> bool:
    """Of this rank's part of the weight: its rows are known at load."""
    rows = use.number("weight", 0)
    return rows is not None and rows >= 512


FEW = Record(
    name="cuda.few_rows", op="aten.linear.default", runs="x:y", workspace=lambda use: 7, kind="cuda", devices=("cuda",),
    min_capability=(9, 0), dtypes={"weight": ("float8_e4m3fn",)}, sizes={"T": (1, 8)}, layout={"weight": "blocked"},
    allocates=False, takes=(Condition("512 rows of the weight", is_tall),),
)  # fmt: skip
MANY = replace(FEW, name="library.any_rows", kind="library", sizes={}, takes=(), workspace=lambda use: 5)


def in_8_bits(target: Target) -> Use:
    """The layer's first product with a weight of 8 bits."""
    use = uses(target)["fused"]
    weight = use.operands["weight"]
    narrow = weight._replace(type=TensorType("float8_e4m3fn", weight.type.shape))
    return use._replace(operands={**use.operands, "weight": narrow})


def with_those(use: Use) -> tuple[Record, ...]:
    return (FEW, MANY, *records_of(use.node.op, use.node.version))


def test_nothing_computes_8_bit_weights_yet() -> None:
    with pytest.raises(TargetError, match="weight is float8_e4m3fn, it takes float16, bfloat16") as error:
        resolve(in_8_bits(GPU))

    assert error.value.code == "implementation-missing"
    assert "aten.linear.default@1 on sm_90" in error.value.message


def test_rows_choose() -> None:
    use = in_8_bits(GPU)
    few, many = (resolve(use, {"T": rows}, records=with_those(use)) for rows in (1, 64))

    rivals = f"the fastest of {len(with_those(use))}"
    assert few == (FEW, rivals)
    assert many == (MANY, f"{rivals}; not cuda.few_rows: T is 64, it takes 1 to 8")


def test_the_world_s_size_chooses() -> None:
    alone, shared = (resolve(in_8_bits(target), {"T": 1}, records=(FEW, MANY)) for target in (GPU, PAIR))

    assert alone.record == FEW
    assert shared == (MANY, "the fastest of 2; not cuda.few_rows: it wants 512 rows of the weight")


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (CPU, "not cuda.few_rows: it runs on cuda"),
        (OLD, "not cuda.few_rows: it wants compute capability 9.0 or higher"),
        (GPU._replace(kinds=frozenset(("torch",))), "not cuda.few_rows: cuda is not installed"),
    ],
    ids=["cpu", "old", "torch"],
)
def test_bfloat16_weights_stay_with_torch(target: Target, reason: str) -> None:
    use = uses(target)["fused"]
    choice = resolve(use, {"T": 1}, records=with_those(use))

    assert choice.record.name == "torch.linear.default"
    assert choice.reason.split("; ")[1] == reason


def test_a_newest_capability_is_a_bound_too() -> None:
    use = in_8_bits(GPU._replace(capability=(10, 0)))
    past = replace(MANY, max_capability=(9, 9))

    with pytest.raises(TargetError, match=r"library.any_rows: it wants compute capability 9.9 or lower"):
        resolve(use, records=(past,))


# --- the weight stream -------------------------------------------------------------------------------------------


def product(
    *,
    rows: Expr = "T",
    width: int = 256,
    dtype: Dtype = "bfloat16",
    target: Target = GPU,
    static: bool = True,
    kind: str | None = None,
    outputs: int = 384,
) -> Use:
    """A linear layer of a weight that is a param, or that an op makes; gated if it has a kind of gate."""
    types = {"input": TensorType(dtype, (1, rows, width)), "weight": TensorType(dtype, (outputs, width))}
    args: dict[str, Arg] = {name: Ref(name) for name in types}
    node = Node("aten.linear.default", args, (Value("y", TensorType(dtype, (1, rows, outputs))),))
    if kind is not None:
        result = Value("y", TensorType(dtype, (1, rows, 192)))
        node = Node("precast.gated_linear", {**args, "kind": Const(kind)}, (result,))
    return use_of(node, types, target, {"weight"} if static else frozenset())  # fmt: skip


@pytest.mark.parametrize("rows", ["T", "R"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_pass_for_up_to_8_rows(rows: str, dtype: Dtype) -> None:
    none, *ways, many = cases(product(rows=rows, dtype=dtype))
    few = ways[0]

    most = [0, *WAYS]
    assert [none.sizes, many.sizes] == [{rows: (0, 0)}, {rows: (9, None)}]
    assert [case.sizes[rows] for case in ways] == [(low + 1, high) for low, high in itertools.pairwise(most)]
    name = {"T": "cuda.linear", "R": "cuda.linear_of_logits"}[rows]
    assert [case.choice.record.name for case in ways] == [name, *(f"{name}_from_{low + 1}" for low in most[1:-1])]
    assert many.choice.record.name == {"T": "cublaslt.linear", "R": "cublaslt.linear_of_logits"}[rows]
    assert {(each.choice.record.control, each.choice.record.allocates) for each in (few, many)} == {("static", False)}
    assert none.choice.record.name == "torch.linear.default"


@pytest.mark.parametrize("rows", ["T", "R"])
def test_few_outputs_of_many_rows_are_triton_s(rows: str) -> None:
    chosen = {
        outputs: [case.choice.record.name for case in cases(product(rows=rows, outputs=outputs))]
        for outputs in (1, 8, 9)
    }
    stream, library = ("cuda.linear", "cublaslt.linear") if rows == "T" else (
        "cuda.linear_of_logits", "cublaslt.linear_of_logits"
    )  # fmt: skip

    assert chosen[1] == chosen[8] == ["triton.linear", stream, f"{stream}_from_3", "triton.linear"]
    assert chosen[9] == ["torch.linear.default", stream, f"{stream}_from_3", library]


def test_few_outputs_on_any_gpu_and_of_any_width() -> None:
    for use in (product(outputs=1, target=OLD), product(outputs=3, width=7, dtype="float32", static=False)):
        assert [case.choice.record.name for case in cases(use)] == ["triton.linear"]


@pytest.mark.parametrize(
    ("use", "why"),
    [
        (product(width=264), "it wants an input of a multiple of 32 elements, and sizes of the weight known at load"),
        (product(target=OLD), "it wants compute capability 9.0 or higher"),
        (product(target=Target("cuda", (10, 0))), "it wants compute capability 9.0 or lower"),
        (product(target=GPU._replace(kinds=GPU.kinds - {"cuda"})), "cuda is not installed"),
    ],
    ids=["width", "old", "new", "not installed"],
)
def test_what_the_weight_stream_does_not_take(use: Use, why: str) -> None:
    few, many = cases(use)

    assert (few.sizes, many.sizes) == ({"T": (0, 8)}, {"T": (9, None)})
    assert (few.choice.record.name, many.choice.record.name) == ("torch.linear.default", "cublaslt.linear")
    assert f"not cuda.linear: {why}" in few.choice.reason
    assert f"not cuda.linear: {why}" in many.choice.reason


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_of_gated_layers_do_too(dtype: Dtype) -> None:
    use = product(dtype=dtype, kind="gelu")
    none, *ways, some, many, most = cases(use)
    few = ways[0]
    assert not isinstance(few.choice.record.runs, str)
    (launch,) = few.choice.record.runs(use)

    sizes = [case.sizes["T"] for case in (none, some, many, most)]
    assert sizes == [(0, 0), (9, 4096), (4097, 8192), (8193, None)]
    assert [case.sizes["T"][1] for case in ways] == [*WAYS]
    assert (few.choice.record.name, launch.constants["GATE"], launch.grid) == ("cuda.gated_linear", "gelu", (24,))
    names = [case.choice.record.name for case in (some, many)]
    assert names == ["cublaslt.gated_linear", "cublaslt.gated_linear_in_two"]
    assert none.choice.record.name == most.choice.record.name == "triton.gated_linear"


@pytest.mark.parametrize(
    "use", [product(width=264, kind="silu"), product(target=OLD, kind="silu")], ids=["width", "old"]
)
def test_gated_layers_that_the_weight_stream_does_not_take(use: Use) -> None:
    names = ["triton", "cublaslt", "cublaslt_in_two", "triton"]

    assert [case.choice.record.name.replace(".gated_linear", "") for case in cases(use)] == names


def test_a_gate_takes_what_cublaslt_multiplied() -> None:
    use = product(kind="silu")
    product_, gate = resolve(use, {"T": 9}).record.runs(use)  # type: ignore[operator]

    products = Pointer("workspace", "bfloat16", 4096 * 384)
    assert (product_.args[0], product_.args[4], gate.args[:2]) == (
        products, Pointer("workspace"), (Pointer("out.0"), products),
    )  # fmt: skip
    assert not any(isinstance(arg, Stride) for arg in gate.args)


def test_gated_layers_of_many_rows_are_computed_in_two_parts() -> None:
    """They cover all rows, one after the other, in memory for the products of 4,096."""
    use = product(kind="silu")
    record = resolve(use, {"T": 8191}).record

    def value(expr: Any) -> int:
        return evaluate(expr, {"T": 8191})

    launches = record.runs(use)  # type: ignore[operator]
    products, gates = launches[::2], launches[1::2]

    assert record.name == "cublaslt.gated_linear_in_two"
    assert [value(each.grid[0]) for each in products] == [value(each.args[5]) for each in products] == [4096, 4095]
    assert [value(each.args[1].offset) for each in products] == [0, 4096 * 256 * 2]
    assert [value(each.args[0].offset) for each in gates] == [0, 4096 * 192 * 2]
    assert {each.args[0] for each in products} == {each.args[1] for each in gates}
    assert value(record.workspace(use)) == workspace_bytes(384) + 4096 * 384 * 2


def test_measured_algorithms_are_those_of_the_product_before_a_gate() -> None:
    measured = MeasuredProduct("bfloat16", 384, 256, False, 4096, "a" * 128, 1.0, 1.0)
    table = Table(Machine("NVIDIA H200", (9, 0), "", "", "", 130100), products=(measured,))
    use = product(kind="silu", target=GPU._replace(table=table))

    for rows, count in ((4096, 1), (8000, 2)):
        launches = resolve(use, {"T": rows}).record.runs(use)  # type: ignore[operator]
        products = [each for each in launches if each.library]

        assert [each.constants["algorithms"] for each in products] == [f"130100 4096:{'a' * 128}"] * count


@pytest.mark.parametrize(
    ("use", "name"),
    [
        (product(dtype="float32", kind="silu"), "triton.gated_linear"),
        (product(static=False, kind="silu"), "triton.gated_linear"),
        (product(dtype="float64", kind="silu"), "reference.gated_linear"),
        (product(target=GPU._replace(kinds=frozenset(("torch",))), kind="silu"), "reference.gated_linear"),
        (product(target=CPU, kind="silu"), "reference.gated_linear"),
    ],
    ids=["float32", "made", "float64", "not installed", "cpu"],
)
def test_what_computes_other_gated_layers(use: Use, name: str) -> None:
    (case,) = cases(use)

    assert case.choice.record.name == name


def test_a_gated_layer_holds_the_products_of_so_many_rows() -> None:
    """For few tokens more than a layer and a gate of their own would; for many less."""
    held, held_by_library = workspace(product(kind="silu")), 4096 * 384

    assert [evaluate(held, {"T": tokens}) for tokens in (1, 4096, 100_000)] == [
        held_by_library + rows * 768 for rows in (1, 4096, 4096)
    ]


@pytest.mark.parametrize(
    ("use", "why"),
    [
        (product(static=False), "it wants weight and bias in row-major order that no op makes"),
        (product(rows="B"), "it wants rows that are tokens"),
        (product(dtype="float32"), "input is float32, it takes bfloat16, float16"),
        (product(target=GPU._replace(kinds=frozenset(("torch", "triton")))), "library is not installed"),
    ],
    ids=["made", "rows", "dtype", "not installed"],
)
def test_what_stays_with_torch(use: Use, why: str) -> None:
    (case,) = cases(use)

    assert case.choice.record.name == "torch.linear.default"
    assert f"not cublaslt.linear: {why}" in case.choice.reason


def test_names_with_the_reason_of_the_one_in_front_follow_it() -> None:
    (case,) = cases(product(target=Target("cuda", (7, 5))))

    assert "; not triton.linear: it wants compute capability 8.0 or higher; nor cublaslt.linear" in case.choice.reason


def test_params_of_blocks_and_of_main_are_no_ops_results() -> None:
    assert {name for name, use in uses(GPU).items() if len(cases(use)) == 2 + len(WAYS)} == {"fused", "projected"}


# --- classes of sizes --------------------------------------------------------------------------------------------


def test_classes_cover_all_sizes() -> None:
    use = in_8_bits(GPU)

    found = cases(use, records=with_those(use))

    assert [(case.sizes, case.choice.record.name) for case in found] == [
        ({"T": (0, 0)}, "library.any_rows"),
        ({"T": (1, 8)}, "cuda.few_rows"),
        ({"T": (9, None)}, "library.any_rows"),
    ]


def test_sizes_of_two_symbols_make_a_grid() -> None:
    use = in_8_bits(GPU)
    both = replace(FEW, sizes={"T": (0, 8), "B": (0, 4)})

    found = cases(use, records=(both, MANY))

    assert [(case.sizes["T"], case.sizes["B"]) for case in found if case.choice.record is both] == [((0, 8), (0, 4))]
    assert len(found) == 4


def test_one_record_is_one_case() -> None:
    for use in uses(CPU).values():
        assert cases(use) == (Case({}, resolve(use)),)


def test_sizes_of_records_that_take_no_size_make_no_classes() -> None:
    use = in_8_bits(GPU)
    never = replace(FEW, sizes={"B": (1, 4)}, takes=(Condition("the impossible", lambda use: False),))

    found = cases(use, records=(never, MANY))

    assert [case.sizes for case in found] == [{}]


H200 = Machine("NVIDIA H200", (9, 0), "580.95", "2.11.0", "3.6.0", 130100)


def measured_on(use: Use, *rows: Measured) -> Use:
    """The use on its target with a table of these rows."""
    return use._replace(target=use.target._replace(table=Table(H200, rows)))


def test_what_was_measured_comes_first() -> None:
    use = measured_on(
        uses(GPU)["y"],
        Measured("precast.paged_attention", "float16", {}, ("reference.paged_attention",)),
        Measured("precast.paged_attention", "bfloat16", {"T": (0, 64)}, ("torch.paged_attention",)),
    )

    assert resolve(use, {"T": 64}) == (resolve(uses(CPU)["y"]).record, "measured")
    assert resolve(use, {"T": 65}).record.name == "triton.paged_attention.hopper"
    found = [(case.sizes["T"], case.choice.reason) for case in cases(use)]
    assert {tokens for tokens, reason in found if reason == "measured"} == {(0, 8), (9, 64)}
    assert {tokens for tokens, reason in found if reason != "measured"} == {(65, None)}


def test_what_was_measured_is_told() -> None:
    order, times = ("torch.linear.default", "cublaslt.linear"), (17.25, 18.0)
    use = measured_on(product(), Measured("aten.linear.default", "bfloat16", {"T": (33, 64)}, order, times))

    assert resolve(use, {"T": 33}).record.name == "torch.linear.default"
    assert resolve(use, {"T": 33}).reason == "measured: 17.2 us"
    assert resolve(use, {"T": 65}).record.name == "cublaslt.linear"


def test_a_measurement_is_of_a_node_s_arguments() -> None:
    one, other = product(), product(width=264)
    row = Measured("aten.linear.default", "bfloat16", {}, ("torch.linear.default",), (), one.text)

    assert one.text == "input=bfloat16[1, T, 256], weight=bfloat16[384, 256] -> bfloat16[1, T, 384]"
    assert [case.choice.record.name for case in cases(measured_on(one, row))] == ["torch.linear.default"]
    assert cases(measured_on(other, row)) == cases(other)


def test_arguments_are_those_of_one_rank_without_names() -> None:
    found, shared = uses(GPU), uses(PAIR)

    assert "weight=bfloat16[512, 256]" in found["fused"].text
    assert "weight=bfloat16[256, 256]" in shared["fused"].text
    assert found["y"].text.endswith("sinks=none, v_cache=bfloat16[P, 16, 2, 64] -> bfloat16[1, T, 4, 64]")
    assert found["heads"].text == "self=bfloat16[1, T, 512], shape=[1, T, 8, 64] -> bfloat16[1, T, 8, 64]"


def recurrence(dtype: Dtype) -> Use:
    """A recurrence of steps of T tokens and B sequences."""
    tokens, ints = TensorType(dtype, (1, "T", 8)), TensorType("int32", ("B",))
    types = {
        "x": tokens, "factor": tokens, "state": TensorType("float32", ("P", 8)), "slots": ints, "kv_lens": ints,
        "cu_seqlens": TensorType("int32", (add("B", 1),)),
    }  # fmt: skip
    node = Node("precast.stateful_linear_recurrence", {name: Ref(name) for name in types}, (Value("y", tokens),))
    return use_of(node, types, GPU)


def test_recurrences_are_walked_on_the_device_in_steps_of_all_sizes() -> None:
    (case,) = cases(recurrence("bfloat16"))

    assert case.choice == (records_of("precast.stateful_linear_recurrence", 1)[0], "the fastest of 2")
    assert (case.choice.record.kind, case.choice.record.control) == ("triton", "static")
    assert not case.choice.record.allocates


def delta_rule(size: int, *decays: int) -> Use:
    """A delta rule of 4 heads in steps of T tokens and B sequences; `decays` for each element of a key, or none."""
    q, ints = TensorType("bfloat16", (1, "T", 4, size)), TensorType("int32", ("B",))
    types = {
        **dict.fromkeys("qkv", q), "decay": TensorType("float32", (1, "T", 4, *decays)),
        "beta": TensorType("bfloat16", (1, "T", 4)), "state": TensorType("float32", ("P", 4, size, size)),
        "slots": ints, "cu_seqlens": TensorType("int32", (add("B", 1),)), "kv_lens": ints,
    }  # fmt: skip
    args = {**{name: Ref(name) for name in types}, "scale": Const(0.1), "normalise": Const(True)}
    return use_of(Node("precast.stateful_delta_rule", args, (Value("y", q),)), types, GPU)


def test_delta_rules_of_steps_of_all_sizes_read_no_host() -> None:
    few, many, most = cases(delta_rule(128))

    assert (few.sizes, many.sizes) == ({"T": (0, launches.FEW)}, {"T": (launches.FEW + 1, MAX_WALKED)})
    assert few.choice.record.name == "triton.stateful_delta_rule.few"
    assert {many.choice.record.name, most.choice.record.name} == {"triton.stateful_delta_rule"}
    assert {case.choice.record.control for case in (few, many, most)} == {"static"}


@pytest.mark.parametrize("use", [delta_rule(64, 64), delta_rule(512)], ids=["a decay for each element", "long keys"])
def test_steps_of_many_tokens_are_not_walked_one_by_one(use: Use) -> None:
    *walked, many = cases(use)

    assert {case.choice.record.control for case in walked} == {"static"}
    assert many.sizes == {"T": (MAX_WALKED + 1, None)}
    assert (many.choice.record.name, many.choice.record.control) == ("torch.stateful_delta_rule", "host")
    assert "it wants keys of up to 256 elements, and decays of whole heads" in many.choice.reason


def test_walks_compute_in_float32() -> None:
    (case,) = cases(recurrence("float64"))

    assert case.choice.record.name == "torch.stateful_linear_recurrence"
    assert case.choice.reason.endswith("x is float64, it takes float16, bfloat16, float32")


def latents(latent: int, cached: Dtype) -> Use:
    """Latent attention over a cache of this type, with a rope part of 64."""
    q, ints = TensorType("bfloat16", (1, "T", 16, 192)), TensorType("int32", ("B",))
    types = {
        "q": q, "cache": TensorType(cached, ("P", 16, latent + 64)), "kv_lens": ints, "page_start": ints,
        "weight": TensorType("bfloat16", (16 * 256, latent)), "page_indices": TensorType("int32", ("N",)),
        **dict.fromkeys(("cu_seqlens", "page_indptr"), TensorType("int32", (add("B", 1),))),
    }  # fmt: skip
    result = Value("y", TensorType("bfloat16", (1, "T", 16, 128)))
    numbers = {"scale": Const(0.1), "value_size": Const(128)}
    node = Node("precast.paged_latent_attention", {name: Ref(name) for name in types} | numbers, (result,))
    return use_of(node, types, GPU)


def test_latents_are_attended_to_on_the_device_in_steps_of_any_size() -> None:
    found = cases(latents(512, "float8_e4m3fn"))

    assert [case.sizes["T"] for case in found] == [
        (0, FEW_TOKENS), (FEW_TOKENS + 1, SMALL_STEP), (SMALL_STEP + 1, None),
    ]  # fmt: skip
    assert [case.choice.record.name.removeprefix("triton.paged_latent_attention") for case in found] == [
        ".few", ".small", "",
    ]  # fmt: skip
    assert {case.choice.record.control for case in found} == {"static"}


@pytest.mark.parametrize(
    ("use", "reason"),
    [
        (latents(513, "bfloat16"), "it wants a latent of at most 512 elements, and 64 that heads share"),
        (latents(512, "float8_e4m3fn")._replace(target=OLD), "it wants compute capability 8.9 or higher for a cache"),
    ],
    ids=["large", "float8"],
)
def test_latents_that_triton_does_not_take(use: Use, reason: str) -> None:
    (case,) = cases(use)

    assert case.choice.record.name == "torch.paged_latent_attention"
    assert reason in case.choice.reason


def grouped_products(dtype: Dtype, outer: int) -> Use:
    """Products of tokens with the weights of 8 experts."""
    rows, weight = TensorType(dtype, ("T", 64)), TensorType(dtype, (8, outer, 64))
    types = {"x": rows, "weight": weight, "expert_ids": TensorType("int64", ("T",))}
    result = Value("y", TensorType(dtype, ("T", outer)))
    return use_of(Node("precast.grouped_linear", {name: Ref(name) for name in types}, (result,)), types, GPU)


@pytest.mark.parametrize(
    ("dtype", "outer", "capability", "control"),
    [
        ("bfloat16", 32, (9, 0), "static"),
        ("bfloat16", 32, (10, 0), "static"),
        ("bfloat16", 32, (8, 0), "host"),
        ("bfloat16", 32, (12, 0), "host"),
        ("bfloat16", 30, (8, 0), "static"),
        ("float16", 32, (8, 0), "static"),
    ],
)
def test_grouped_products_read_the_host_where_torch_has_no_kernel(
    dtype: Dtype, outer: int, capability: tuple[int, int], control: str
) -> None:
    use = grouped_products(dtype, outer)

    (case,) = cases(use._replace(target=Target("cuda", capability, kinds=GPU.kinds - {"triton"})))

    assert case.choice.record.control == control


# --- the records themselves --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("op", "version"), ops.names())
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_op_has_a_record(op: str, version: int, device: str) -> None:
    assert any(device in record.devices for record in records_of(op, version))


def test_records_have_names_of_their_own_and_ops_of_the_table() -> None:
    names = [record.name for record in all_records()]

    assert len(set(names)) == len(names)
    for record in all_records():
        assert all(ops.lookup(record.op, version) is not None for version in record.op_versions)
        assert all(record in records_of(record.op, version) for version in record.op_versions)


def test_records_of_all_folders_are_known() -> None:
    folders = [file.parent.name for file in Path(kernels.__file__).parent.glob("*/records.py")]
    modules = [import_module(f"precast.kernels.{folder}.records") for folder in folders]

    assert len(folders) > 20
    assert {record.name for module in modules for record in module.RECORDS} <= {each.name for each in all_records()}


def test_an_unknown_op_is_refused() -> None:
    use = Use(Node("precast.nothing", {}, (Value("y", TensorType("float32", ())),)), {}, CPU)
    with pytest.raises(BundleError, match=r"precast\.nothing@1 is not in the op table") as error:
        resolve(use)

    assert error.value.code == "op-unknown"


def test_records_are_frozen() -> None:
    with pytest.raises(AttributeError):
        FEW.name = "other"  # type: ignore[misc]
    assert msgspec.structs.asdict(FEW)["layout"] == {"weight": "blocked"}


def test_a_digest_is_that_of_the_sources_that_run() -> None:
    named = {record.name: record for record in records_of("precast.paged_attention", 1)}
    triton, torch_ = named["triton.paged_attention"], named["torch.paged_attention"]
    linear = replace(FEW, runs="torch:ops.aten.linear.default")

    assert sources(linear) == ()
    assert {"precast.kernels.attention.triton_split", "precast.kernels.attention.launches"} <= set(sources(triton))
    assert "precast.kernels.attention.triton_split" not in sources(torch_)
    assert digest(triton) == digest(triton) != digest(torch_)
    assert all(sources(record) for record in all_records() if not record.op.startswith("aten."))


@pytest.mark.parametrize(
    ("file", "headers"),
    [
        ("precast.kernels.attention/decode.cu", ["/half.cuh"]),
        (
            "precast.kernels.linear/stream.cu",
            [
                "/few_bits.cuh",
                "/half.cuh",
                "/ring.cuh",
                ".linear/stream_inputs.cuh",
                ".linear/stream_products.cuh",
            ],
        ),
    ],
)
def test_headers_are_sources_too(file: str, headers: list[str]) -> None:
    assert sorted(kernel_sources(f"{file}:kernel")) == sorted([file, *(f"precast.kernels{each}" for each in headers)])
    assert file_digest("precast.kernels/half.cuh") not in (None, file_digest(file))


def test_a_digest_names_no_place() -> None:
    """It is the same wherever the sources lie: made of modules' names and contents."""
    record = replace(FEW, runs="precast.kernels.stateful.limits:MAX_TOGETHER", workspace=nothing)

    assert sources(record) == ("precast.kernels.stateful.limits",)
    assert len(digest(record)) == 64


def test_ref_arguments_alone_are_operands() -> None:
    use = uses(GPU)["y"]

    assert {arg for arg, value in use.node.args.items() if isinstance(value, Ref)} == use.operands.keys()
    assert not use.has("sinks")


def product_over(rows: Expr, target: Target) -> Use:
    """A linear layer over so many rows."""
    x, weight = (TensorType("bfloat16", shape) for shape in ((1, rows, 256), (512, 256)))
    made = Value("y", TensorType("bfloat16", (1, rows, 512)))
    node = Node("aten.linear.default", {"input": Ref("x"), "weight": Ref("w")}, (made,))
    return use_of(node, {"x": x, "w": weight}, target, {"w"})


def ranges(use: Use, symbol: str) -> list[tuple[str, int, int | None]]:
    return [(case.choice.record.name, *case.sizes[symbol]) for case in cases(use)]


def test_with_the_tokens_of_all_ranks_a_step_of_each_has_fewer() -> None:
    four = GPU._replace(tp=4)
    assert ranges(product_over("T", four), "T") == [
        ("torch.linear.default", 0, 0), ("cuda.linear", 1, 2), ("cuda.linear_from_3", 3, 8),
        ("cublaslt.linear", 9, None),
    ]  # fmt: skip

    assert ranges(product_over(mul(4, "T"), four), "T") == [
        ("torch.linear.default", 0, 0), ("cuda.linear_from_3", 1, 2), ("cublaslt.linear", 3, None),
    ]  # fmt: skip
    assert ranges(product_over(mul(4, "R"), four), "R")[-1] == ("cublaslt.linear_of_logits", 3, None)
    assert resolve(product_over(mul(4, "T"), four), {"T": 2}).record.name == "cuda.linear_from_3"
    assert resolve(product_over(mul(4, "T"), four), {"T": 3}).record.name == "cublaslt.linear"


def test_other_multiples_of_tokens_are_no_tokens_of_ranks() -> None:
    assert [case.choice.record.name for case in cases(product_over(mul(4, "T"), GPU))] == ["torch.linear.default"]
    assert [case.choice.record.name for case in cases(product_over(mul(3, "T"), PAIR))] == ["torch.linear.default"]


def test_launches_are_over_the_tokens_of_all_ranks() -> None:
    use = product_over(mul(2, "T"), PAIR)
    runs = next(case.choice.record.runs for case in cases(use) if case.choice.record.name == "cuda.linear")

    assert not isinstance(runs, str)
    (launch,) = runs(use)
    assert mul(2, "T") in launch.args
