"""What must hold for each op: its spec tells the truth, its fake and its shape rule agree with what it returns, its
implementations agree with its reference, and it writes what it says and nothing else.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from op_samples.draw import Draw, Sample
from op_samples.table import SAMPLES, samples_of, taking

from precast.ir.graph.schema import TensorType
from precast.ir.ops import table as ops
from precast.kernels import dtypes, registry
from precast.kernels.fakes import fake_of
from precast.kernels.spec import OpSpec

SPECS = {f"{spec.name}@{spec.version}": spec for spec in registry.specs()}
each_op = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)

# Parts of torch's check of an op.
QUICK_CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")
TRACING_CHECK = "test_aot_dispatch_dynamic"


def sizes_of(axes: str, shape: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    """(letter, size) for each axis of `shape` as `axes` names them; ("...", sizes) for the leading ones."""
    if axes == "*":
        return
    names = axes.split()
    if names[:1] == ["..."]:
        rest = len(names) - 1
        yield "...", shape[: len(shape) - rest]
        names, shape = names[1:], shape[len(shape) - rest :]
    assert len(names) == len(shape), f"axes {axes!r} for a tensor of shape {shape}"
    for name, size in zip(names, shape, strict=True):
        if name.isdigit():
            assert size == int(name)
            continue
        match = re.fullmatch(r"(\d*)([A-Z])(?:\+(\d+))?", name)
        assert match, name
        factor, letter, more = int(match[1] or 1), match[2], int(match[3] or 0)
        assert (size - more) % factor == 0
        yield letter, (size - more) // factor


def types_of(sample: Mapping[str, Any]) -> dict[str, Any]:
    """The sample as shape rules take it: tensors as their types, element types by name."""
    found = {}
    for name, value in sample.items():
        if isinstance(value, torch.Tensor):
            value = TensorType(dtypes.NAMES[value.dtype], tuple(value.shape))
        found[name] = dtypes.NAMES[value] if isinstance(value, torch.dtype) else value
    return found


def implementations_of(spec: OpSpec, sample: Sample, device: torch.device) -> list[Callable[..., Any]]:
    """All that computes the op over these tensors on a device."""
    return [registry.function_of(record) for record in taking(spec, sample, device)]


def keyword_only_of(spec: OpSpec) -> set[str]:
    """The names after the `*` of the op's signature."""
    return {arg.name for arg in spec.definition.args if arg.keyword_only}


def test_every_precast_op_of_the_table_has_a_spec() -> None:
    """But the fused op, whose steps torch's schemas can't write: `test_fused.py` and `fused_steps.py` are about it."""
    expected = {f"{name}@{version}" for name, version in ops.names() if name.startswith("precast.")}

    assert set(SPECS) | {"precast.fused@1"} == expected
    assert list(SPECS) == sorted(SPECS)


def test_every_op_has_samples() -> None:
    missing = [op for op, spec in SPECS.items() if (spec.name, spec.version) not in SAMPLES]
    unknown = [f"{name}@{version}" for name, version in SAMPLES if f"{name}@{version}" not in SPECS]

    assert not missing, f"add samples of {missing} to a file of tests/support/op_samples, and to its SAMPLES"
    assert not unknown, f"tests/support/op_samples has samples of {unknown}, which are no ops"


@each_op
def test_signature_is_that_of_the_op_table(spec: OpSpec) -> None:
    parameters = inspect.signature(spec.reference).parameters
    keyword_only = keyword_only_of(spec)

    assert list(parameters) == [arg.name for arg in spec.definition.args]
    for arg in spec.definition.args:
        parameter = parameters[arg.name]
        is_keyword = arg.name in keyword_only
        assert (parameter.kind is parameter.KEYWORD_ONLY) == is_keyword, arg.name
        assert parameter.default == (arg.default if arg.has_default else parameter.empty), arg.name


@each_op
def test_implementations_take_the_same_arguments(spec: OpSpec) -> None:
    expected = inspect.signature(spec.reference)
    for device in ("cpu", "cuda"):
        found = inspect.signature(registry.resolve(spec.name, spec.version, torch.device(device)))
        # Those that write into what they are given take `out` besides.
        given = [p for p in found.parameters.values() if p.name != "out"]

        assert [(p.name, p.kind, p.default) for p in given] == [
            (p.name, p.kind, p.default) for p in expected.parameters.values()
        ]


@each_op
@each_dtype
def test_samples_have_the_axes_and_dtypes_of_the_spec(
    spec: OpSpec, dtype: torch.dtype, results: Callable[[Any], tuple[torch.Tensor, ...]]
) -> None:
    tensors = {arg.name for arg in spec.definition.args if arg.kind.startswith("Tensor")}
    assert set(spec.axes) == set(spec.dtypes) == tensors
    samples = list(samples_of(spec, Draw(dtype, torch.device("cpu"))))
    assert samples
    for sample in samples:
        named = {name: value for name, value in sample.items() if isinstance(value, torch.Tensor)}
        for name, value in named.items():
            assert value.dtype in spec.dtypes[name], name
        found = results(spec.reference(**sample))
        sizes: dict[str, Any] = {}
        axes = [(spec.axes[name], value) for name, value in named.items()]
        axes += zip(spec.results.values(), found, strict=True)
        for text, value in axes:
            for letter, size in sizes_of(text, tuple(value.shape)):
                assert sizes.setdefault(letter, size) == size, f"{letter} in {text!r}"


@each_op
@each_dtype
def test_real_fake_and_shape_rule_agree(
    spec: OpSpec, dtype: torch.dtype, device: torch.device, results: Callable[[Any], tuple[torch.Tensor, ...]]
) -> None:
    for sample in samples_of(spec, Draw(dtype, device)):
        meta = {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in sample.items()}
        expected = spec.definition.shape_rule(types_of(sample))
        fake = results(fake_of(spec.definition)(**meta))
        real = [results(implementation(**sample)) for implementation in implementations_of(spec, sample, device)]

        for found in (fake, *real):
            assert [(dtypes.NAMES[x.dtype], tuple(x.shape)) for x in found] == [(t.dtype, t.shape) for t in expected]
            assert all(x.is_contiguous() for x in found)


@each_op
@each_dtype
def test_implementation_agrees_with_the_reference(
    spec: OpSpec,
    dtype: torch.dtype,
    device: torch.device,
    same: Callable[..., None],
    copied: Callable[[Sample], Sample],
) -> None:
    for sample in samples_of(spec, Draw(dtype, device)):
        # The reference on the host: what a GPU computes is compared with something that doesn't run on it.
        at_home = {name: x.cpu().clone() if isinstance(x, torch.Tensor) else x for name, x in sample.items()}
        expected = spec.reference(**at_home)
        computed = sample[spec.products_of].dtype if spec.products_of else None
        for implementation in implementations_of(spec, sample, device):
            given = copied(sample)
            found = implementation(**given)

            moved = found if device.type == "cpu" else _to_cpu(found)
            same(spec, moved, expected, computed)
            for name in spec.definition.mutated:
                same(spec, given[name].cpu(), at_home[name])


def _to_cpu(result: Any) -> Any:
    if isinstance(result, tuple):
        return tuple(x.cpu() for x in result)
    return None if result is None else result.cpu()


@each_op
@each_dtype
def test_only_declared_arguments_are_written(
    spec: OpSpec, dtype: torch.dtype, device: torch.device, copied: Callable[[Sample], Sample]
) -> None:
    for sample in samples_of(spec, Draw(dtype, device)):
        for function in (spec.reference, *implementations_of(spec, sample, device)):
            before = copied(sample)
            function(**sample)

            for name, value in before.items():
                if isinstance(value, torch.Tensor) and name not in spec.definition.mutated:
                    torch.testing.assert_close(sample[name], value, rtol=0, atol=0, equal_nan=True, msg=name)


@each_op
@each_dtype
def test_results_are_new_memory(
    spec: OpSpec, dtype: torch.dtype, results: Callable[[Any], tuple[torch.Tensor, ...]]
) -> None:
    for function in (spec.reference, registry.resolve(spec.name, spec.version, torch.device("cpu"))):
        for sample in samples_of(spec, Draw(dtype, torch.device("cpu"))):
            taken = {x.untyped_storage().data_ptr() for x in sample.values() if isinstance(x, torch.Tensor)} - {0}
            for found in results(function(**sample)):
                assert found.untyped_storage().data_ptr() not in taken


@pytest.mark.gpu
@each_op
@each_dtype
def test_cuda_implementation_does_not_wait_for_the_device(
    spec: OpSpec, dtype: torch.dtype, no_waiting: Callable[[], AbstractContextManager[None]]
) -> None:
    device, found = torch.device("cuda"), 0
    for sample in samples_of(spec, Draw(dtype, device)):
        for record in taking(spec, sample, device):
            if record.control == "static":
                implementation, found = registry.function_of(record), found + 1
                implementation(**sample)  # compiles
                with no_waiting():
                    implementation(**sample)
    if not found:
        pytest.skip("reads metadata on the host")


@each_op
def test_opcheck(spec: OpSpec, device: torch.device) -> None:
    registry.register()
    op = getattr(torch.ops.precast, spec.torch_name).default
    keyword_only = keyword_only_of(spec)
    traced = set()
    for sample in samples_of(spec, Draw(torch.float32, device)):
        tensors = {name: value for name, value in sample.items() if isinstance(value, torch.Tensor)}
        if any(x.dtype == torch.float8_e4m3fn for x in tensors.values()):
            continue  # opcheck itself compares tensors with an operation that torch lacks for this type
        named = {name: value for name, value in sample.items() if name in keyword_only}
        positional = tuple(value for name, value in sample.items() if name not in named)
        torch.library.opcheck(op, positional, named, test_utils=QUICK_CHECKS)

        # A trace takes twenty times as long, and sees which tensors there are, not what is in them.
        given = frozenset((name, x.dtype, x.dim()) for name, x in tensors.items())
        if given not in traced:
            traced.add(given)
            torch.library.opcheck(op, positional, named, test_utils=TRACING_CHECK)
