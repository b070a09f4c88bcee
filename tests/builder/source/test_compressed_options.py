"""compressed-tensors' configs that leave something out, or spell it otherwise: as the library itself takes them."""

from __future__ import annotations

from typing import Any

import pytest
from compressed_tensors.quantization import QuantizationArgs
from published_configs import compressed, groups

from precast.builder.source.compressed_options import spelled_out
from precast.builder.source.quantised_options import check_options, stored_as


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ({"type": "float"}, "fp8"),
        ({"num_bits": 8, "type": "FLOAT", "strategy": "Channel"}, "fp8"),
        ({"type": "float", "strategy": "block", "block_structure": "128x64"}, "fp8"),
        ({"type": "float", "strategy": None, "group_size": -1}, "fp8"),
    ],
)
def test_float8_as_the_library_reads_it(said: dict[str, Any], kind: str) -> None:
    assert stored_as(taken(said, "float-quantized"), "float-quantized") == kind


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ({"num_bits": 4, "group_size": 32}, "packed4"),
        ({"num_bits": 4, "strategy": "GROUP", "group_size": 32, "type": "INT"}, "packed4"),
        ({"strategy": "channel"}, "packed8"),
        ({"num_bits": 4, "group_size": 32, "symmetric": False, "actorder": "weight"}, "packed4"),
    ],
)
def test_integers_as_the_library_reads_them(said: dict[str, Any], kind: str) -> None:
    assert stored_as(taken(said, "pack-quantized"), "pack-quantized") == kind


def taken(said: dict[str, Any], format: str) -> dict[str, Any]:
    """The group, whose weights are what the library makes of this."""
    given = {key: value for key, value in said.items() if value is not None}
    read = QuantizationArgs(**given)
    options = check_options(groups(format, said))
    (group,) = options.entries["config_groups"].values()
    weights = group["weights"]
    assert weights["strategy"] == read.strategy
    assert (weights["num_bits"], weights["type"]) == (read.num_bits, read.type)
    for name in ("group_size", "block_structure"):
        assert weights.get(name) == getattr(read, name)
    return dict(group)


@pytest.mark.parametrize("order", ["GROUP", "group", True])
def test_an_order_of_activations_in_any_case(order: object) -> None:
    """Which the library knew until August 2026."""
    entries = groups("pack-quantized", {"num_bits": 4, "group_size": 32, "actorder": order})

    assert spelled_out(entries)["config_groups"]["group_0"]["weights"]["actorder"] == "group"


def test_what_is_left_out_of_inputs_too() -> None:
    entries = compressed("channel")
    entries["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "type": "FLOAT", "strategy": "TOKEN"}

    found = spelled_out(entries)["config_groups"]["group_0"]["input_activations"]

    assert found == {"num_bits": 8, "type": "float", "strategy": "token"}


def test_a_group_without_weights_beside_others_says_nothing() -> None:
    entries = compressed("channel")
    whole = entries["config_groups"]["group_0"]
    plain = spelled_out(entries)

    entries["config_groups"]["none"] = {"targets": ["re:.*"], "weights": None, "input_activations": None}

    assert spelled_out(entries) == plain
    assert whole in entries["config_groups"].values()


def test_no_format_of_all_groups() -> None:
    entries = compressed("channel")

    assert "format" not in spelled_out(entries | {"format": None})


@pytest.mark.parametrize("block", ["128", "axb", "128x", 7])
def test_blocks_that_are_none_stay_as_they_are(block: object) -> None:
    entries = compressed("block", block_structure=block)

    found = spelled_out(entries)["config_groups"]["group_0"]["weights"]["block_structure"]

    assert stored_as({"targets": ["Linear"], "weights": {**WEIGHTS, "block_structure": found}}, None) is None


WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "block"}
