"""The delta rule's launches without a GPU: they compile for compute capability 9.0, and take little memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from compiled_launches import compiled, stack_bytes

from precast.ir.graph.schema import Const, Dtype, Node, Ref, TensorType, Value
from precast.ir.graph.symbols import add, evaluate
from precast.kernels.choices import cases
from precast.kernels.delta_rule.launches import chunked
from precast.kernels.use import Target, Use, use_of

pytest.importorskip("triton", reason="Triton is published for Linux only")
pytestmark = pytest.mark.usefixtures("fresh_compiler")


def delta_rule(dtype: Dtype, keys: int, heads: int, size: int, *, form: str = "stateful_") -> Use:
    """In steps of T tokens and B sequences."""
    q, v, ints = (1, "T", keys, size), (1, "T", heads, size), TensorType("int32", ("B",))
    types = {
        **dict.fromkeys("qk", TensorType(dtype, q)), "v": TensorType(dtype, v),
        "decay": TensorType("float32", v[:3]), "beta": TensorType(dtype, v[:3]),
        "cu_seqlens": TensorType("int32", (add("B", 1),)),
    }  # fmt: skip
    if form:
        types |= {"state": TensorType("float32", ("P", heads, size, size)), "slots": ints, "kv_lens": ints}
    args = {**{name: Ref(name) for name in types}, "scale": Const(0.1), "normalise": Const(True)}
    node = Node(f"precast.{form}delta_rule", args, (Value("y", TensorType(dtype, v)),))
    return use_of(node, types, Target("cuda", (9, 0)))


@pytest.mark.parametrize(
    "use",
    [
        delta_rule("bfloat16", 16, 32, 128),
        delta_rule("bfloat16", 2, 4, 256),
        delta_rule("float16", 3, 3, 80),
        delta_rule("float32", 16, 32, 128, form=""),
    ],
    ids=lambda use: f"{use.dtype} {use.shape('q')[2:]}",
)
def test_every_step_compiles_for_hopper(use: Use) -> None:
    types = {name: operand.type for name, operand in use.operands.items()} | {"out.0": use.result}
    few, *many = cases(use)
    for case, kernels in ((few, ["walk"]), (many[-1], ["walk", "prepare", "pass"])):
        runs = case.choice.record.runs
        assert not isinstance(runs, str)
        found = runs(use)
        assert [launch.kernel.rpartition(":")[2] for launch in found] == [f"{name}_kernel" for name in kernels]
        for launch in found:
            made = compiled(launch, types)
            assert made.metadata.shared <= 227 * 1024
            assert not made.metadata.global_scratch_size
            # Chunks of halves are products on the tensor cores, those of float32 are exact.
            has_tensor_cores = any(name in made.asm["ptx"] for name in ("wgmma", "mma.sync"))
            assert has_tensor_cores == (use.width("q") == 2 and not launch.kernel.endswith("walk_kernel"))


@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_chunks_of_halves_lie_in_registers(dtype: Dtype, size: int, tmp_path: Path) -> None:
    """ptxas 12.8 takes addresses of what warp groups multiply from the pointer to the stack, where there is one."""
    use = delta_rule(dtype, 2, 4, size)
    types = {name: operand.type for name, operand in use.operands.items()} | {"out.0": use.result}

    _, *chunks = chunked(use)

    assert [stack_bytes(compiled(launch, types), tmp_path) for launch in chunks] == [0, 0]


@pytest.mark.parametrize(("tokens", "slots"), [(4096, 1), (4096, 300), (64, 64)])
def test_a_layer_of_qwen3_next_holds_17_kilobytes_a_token(tokens: int, slots: int) -> None:
    """However many sequences they are of: no state is copied."""
    use = delta_rule("bfloat16", 16, 32, 128)
    record = cases(use)[-1].choice.record

    assert evaluate(record.workspace(use), {"T": tokens, "B": slots}) <= 17 * 1024 * tokens


def test_few_tokens_hold_nothing() -> None:
    use = delta_rule("bfloat16", 16, 32, 128)

    assert cases(use)[0].choice.record.workspace(use) == 0
