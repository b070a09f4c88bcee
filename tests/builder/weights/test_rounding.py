"""What configs say of the inputs of layers: what the graph is to say, or why it can't."""

from __future__ import annotations

import re
from typing import Any

import pytest

from precast.builder.graph.rounding import NONE, Rounding, rounding_of
from precast.builder.weights.rounding import of_compressed_tensors, of_fbgemm, of_fp8, of_modelopt, of_quark
from precast.ir.graph.schema import Concat, Each, Read

GROUPS, POWERS, TOKENS = Rounding("fp8_group"), Rounding("fp8_group_e8m0"), Rounding("fp8_token")
IN_GROUPS_OF_32 = "groups of 32 inputs have an exponent each: known are groups of 128"
UP, DOWN = Read("up", (4, 8)), Read("down", (4, 8))


def static(name: str, shape: tuple[int, ...] = ()) -> Rounding:
    return Rounding("fp8_tensor", Read(name, shape))


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ({"weight_block_size": [128, 128]}, GROUPS),
        ({"weight_block_size": [64, 128], "activation_scheme": "dynamic", "scale_fmt": "float"}, GROUPS),
        ({"weight_block_size": [128, 128], "scale_fmt": "ue8m0", "activation_scheme": "dynamic"}, POWERS),
        ({"weight_block_size": [64, 128], "scale_fmt": "ue8m0"}, POWERS),
        ({"weight_block_size": None}, TOKENS),
        ({}, TOKENS),
        ({"activation_scheme": "static"}, static("l.q.input_scale")),
        ({"weight_block_size": None, "activation_scheme": "static"}, static("l.q.activation_scale")),
        ({"weight_block_size": [128, 128], "activation_scheme": "static"}, static("l.q.activation_scale")),
        ({"activation_scheme": "static", "scale_fmt": "ue8m0"}, static("l.q.input_scale")),
        ({"weight_block_size": [128, 128], "act_per_tensor": False}, GROUPS),
        ({"activation_scheme": "static", "act_per_tensor": True}, static("l.q.input_scale")),
    ],
)
def test_fp8(entries: dict[str, Any], expected: Rounding) -> None:
    assert of_fp8(entries, "l.q") == expected


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ({"weight_block_size": [128, 64]}, "groups of 64 inputs have a scale each: known are groups of 128"),
        ({"activation_scheme": "sometimes"}, "activation_scheme is sometimes, which is not known"),
        ({"activation_scheme": None}, "activation_scheme is None, which is not known"),
        ({"act_per_tensor": True}, "act_per_tensor is True and activation_scheme is dynamic: not made"),
        ({"act_per_tensor": False, "activation_scheme": "static"}, "act_per_tensor is False and .* static: not made"),
        ({"weight_block_size": [32, 32], "scale_fmt": "ue8m0"}, "groups of 32 inputs have a scale each: known are"),
        ({"weight_block_size": None, "scale_fmt": "ue8m0"}, "scale_fmt is ue8m0: scales of tokens .* powers of two"),
    ],
)
def test_fp8_that_is_not_followed(entries: dict[str, Any], reason: str) -> None:
    found = of_fp8(entries, "l.q")

    assert found == Rounding(reason=found.reason)
    assert re.search(reason, found.reason)


@pytest.mark.parametrize(
    ("entries", "bound"),
    [({"activation_scale_ub": 1000}, 1000.0), ({"activation_scale_ub": 0.5}, 0.5), ({}, 1200.0)],
)
def test_fbgemm_has_a_bound(entries: dict[str, Any], bound: float) -> None:
    assert of_fbgemm(entries) == Rounding("fp8_token", bound=bound)


@pytest.mark.parametrize("bound", [0, -1.0, float("inf"), float("nan"), None, "1200", True])
def test_fbgemm_with_a_bound_that_is_none(bound: object) -> None:
    found = of_fbgemm({"activation_scale_ub": bound})

    assert found == Rounding(reason=f"activation_scale_ub is {bound}, expected a positive number")


FP8 = {"num_bits": 8, "type": "float", "symmetric": True}


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        (None, NONE),
        ({}, NONE),
        ({**FP8, "strategy": "token", "dynamic": True}, TOKENS),
        ({**FP8, "strategy": "group", "group_size": 128, "dynamic": True}, GROUPS),
        ({**FP8, "strategy": "tensor", "dynamic": False}, static("l.q.input_scale", (1,))),
        ({"num_bits": 8, "type": "float"}, static("l.q.input_scale", (1,))),
        ({"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}, Rounding("int8_token")),
    ],
)
def test_compressed_tensors(inputs: object, expected: Rounding) -> None:
    assert of_compressed_tensors(inputs, "l.q") == expected


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ({**FP8, "strategy": "tensor", "dynamic": True}, "strategy = 'tensor', symmetric = True, dynamic = True"),
        ({**FP8, "strategy": "token", "dynamic": False}, "strategy = 'token', symmetric = True, dynamic = False"),
        ({**FP8, "strategy": "token", "dynamic": True, "symmetric": False}, "symmetric = False"),
        ({**FP8, "strategy": "group", "group_size": 64, "dynamic": True}, "groups of 64 inputs"),
        ({**FP8, "strategy": "group", "dynamic": True}, "groups of None inputs"),
        ({"num_bits": 4, "type": "float", "strategy": "tensor_group", "dynamic": "local"}, "num_bits = 4"),
        ({"num_bits": 8, "type": "int", "strategy": "tensor"}, "num_bits = 8, type = 'int', strategy = 'tensor'"),
        ("all of them", "input_activations are all of them, which is not known"),
    ],
)
def test_compressed_tensors_that_are_not_followed(inputs: object, reason: str) -> None:
    found = of_compressed_tensors(inputs, "l.q")

    assert found == Rounding(reason=found.reason)
    assert reason in found.reason


def test_modelopt_has_scales_of_inputs_in_8_bits() -> None:
    assert of_modelopt("FP8", "l.q") == static("l.q.input_scale")
    assert of_modelopt("MXFP8", "l.q") == Rounding(reason=IN_GROUPS_OF_32)
    assert of_modelopt("NVFP4", "l.q") == Rounding(reason="inputs of 4 bits are not made")
    assert of_modelopt("W4A16_NVFP4", "l.q") == NONE


QUARK = {"dtype": "fp8_e4m3", "symmetric": True}


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        (QUARK | {"qscheme": "per_tensor", "is_dynamic": False}, static("l.q.input_scale")),
        (QUARK | {"qscheme": "per_channel", "is_dynamic": True, "ch_axis": 1}, TOKENS),
    ],
)
def test_quark(inputs: object, expected: Rounding) -> None:
    assert of_quark(inputs, "l.q") == expected


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        (None, ""),
        ({"dtype": "fp8_e4m3", "scale_format": "e8m0"}, IN_GROUPS_OF_32),
        ({"dtype": "fp4", "scale_format": "e8m0"}, "inputs of 4 bits are not made"),
        ({"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": True},
         "input_tensors of dtype = 'fp8_e4m3', qscheme = 'per_tensor', is_dynamic = True: such a rounding is not"),
        (8, "input_tensors of 8: such a rounding is not made"),
    ],
)  # fmt: skip
def test_quarks_inputs_are_not_rounded(inputs: object, reason: str) -> None:
    found = of_quark(inputs, "l.q")

    assert found == Rounding(reason=found.reason)
    assert found.reason.startswith(reason)


def test_what_layers_say_that_are_joined() -> None:
    both = Concat((UP, DOWN), 0)

    assert rounding_of(both, {}) == NONE
    assert rounding_of(both, {"up": TOKENS, "down": TOKENS}) == TOKENS
    assert rounding_of(DOWN, {"up": TOKENS, "down": GROUPS}) == GROUPS
    assert "in different ways" in rounding_of(both, {"up": TOKENS, "down": GROUPS}).reason
    assert rounding_of(Each(Read("e.*.up", (4, 8)), 0, 3), {"e.2.up": TOKENS}) == TOKENS
