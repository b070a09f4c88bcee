"""Registration with torch, and the choice of implementations."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
import torch

from precast.ir.errors import BundleError
from precast.ir.graph.schema import Node, Ref, TensorType, Value
from precast.ir.memory.liveness import Operand
from precast.ir.ops import table as ops
from precast.kernels import registry
from precast.kernels.attention import batched
from precast.kernels.choices import all_records, fastest
from precast.kernels.records import Record
from precast.kernels.rms_norm.rms_norm import RMS_NORM
from precast.kernels.sampling import on_host
from precast.kernels.use import Target, Use

CPU = torch.device("cpu")


def test_register_twice_is_register_once() -> None:
    assert registry.register() is registry.register()


def test_registered_op_computes_the_reference() -> None:
    registry.register()
    x, weight = torch.randn(1, 3, 8), torch.randn(8)
    found = torch.ops.precast.rms_norm(x, weight, eps=1e-6, cast_before_scale=True)

    torch.testing.assert_close(found, RMS_NORM.reference(x, weight, eps=1e-6, cast_before_scale=True), rtol=0, atol=0)


def test_registered_schema_says_what_is_written() -> None:
    registry.register()
    schema = torch.ops.precast.write_kv.default._schema

    assert [arg.name for arg in schema.arguments if arg.alias_info and arg.alias_info.is_write] == [
        "k_cache",
        "v_cache",
    ]


def test_fake_tensor_of_the_values_head_size() -> None:
    from torch._subclasses import FakeTensorMode

    registry.register()
    with FakeTensorMode():
        q = torch.empty(1, 5, 4, 24, dtype=torch.bfloat16)
        k_cache, v_cache = torch.empty(9, 16, 2, 24), torch.empty(9, 16, 2, 8)
        lengths, bounds = torch.empty(2, dtype=torch.int32), torch.empty(3, dtype=torch.int32)
        found = torch.ops.precast.paged_attention(
            q, k_cache, v_cache, None, bounds, lengths, lengths, bounds, lengths, scale=1.0
        )

    assert (tuple(found.shape), found.dtype) == ((1, 5, 4, 8), torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "version"),
    [("precast.nothing", 1), ("precast.rms_norm", 2), ("aten.bernoulli.default", 1), ("os.system", 1), ("rms_norm", 1)],
)
def test_unknown_op_is_refused(name: str, version: int) -> None:
    with pytest.raises(BundleError, match=f"{name}@{version} is not in the op table") as error:
        registry.resolve(name, version, CPU)

    assert error.value.code == "op-unknown"


def test_fast_implementations_are_chosen() -> None:
    assert registry.resolve("precast.paged_attention", 1, CPU) is batched.paged_attention
    assert registry.resolve("precast.attention", 1, CPU) is batched.attention
    assert registry.resolve("precast.sample", 1, CPU) is on_host.sample
    assert registry.resolve("precast.rms_norm", 1, CPU) is RMS_NORM.reference


def test_triton_is_chosen_for_cuda() -> None:
    pytest.importorskip("triton", reason="Triton is published for Linux only")
    target = registry.target_of(torch.device("cuda"))

    assert fastest("precast.paged_attention", 1, target).kind == "triton"
    assert fastest("precast.attention", 1, target).kind == "triton"


def test_importing_the_room_registers_nothing_and_loads_no_compiler() -> None:
    code = (
        "import sys, torch; before = set(sys.modules)\n"
        "import precast.kernels.registry\n"
        "assert not hasattr(torch.ops.precast, 'rms_norm')\n"
        "heavy = ('triton', 'transformers', 'torch.export', 'torch._dynamo', 'torch._inductor')\n"
        "print([m for m in set(sys.modules) - before if m.startswith(heavy)])"
    )
    run = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)

    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize("record", all_records(), ids=lambda record: record.name)
def test_every_record_names_a_function_of_its_op(record: Record) -> None:
    if record.kind == "triton":
        pytest.importorskip("triton", reason="Triton is published for Linux only")
    function = registry.function_of(record)
    if record.op.startswith("aten."):
        return  # `test_aten.py`
    expected = {arg.name for arg in ops.lookup(record.op).args}  # type: ignore[union-attr]
    has_results = ops.lookup(record.op).num_outputs > 0  # type: ignore[union-attr]

    assert set(inspect.signature(function).parameters) == expected | (
        {"out"} if has_results and not record.allocates else set()
    )


def test_implementations_of_a_node_are_functions() -> None:
    value = Value("y", TensorType("bfloat16", ("T", 4)))
    node = Node("aten.neg.default", {"self": Ref("x")}, (value,))
    use = Use(node, {"self": Operand(value.type, True)}, Target("cpu"))

    assert registry.implementations(use) == (({}, torch.ops.aten.neg.out, False, False, ()),)


def test_the_target_is_what_the_device_is() -> None:
    assert registry.target_of(CPU).device == "cpu"
    assert registry.target_of(CPU).tp == 1
