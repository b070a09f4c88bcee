"""Which models the driver alone runs, and what is said of the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from families_experts import EXPERTS
from msgspec.structs import replace

from precast.builder.build import build
from precast.builder.native.variants import known_targets, variants
from precast.builder.source.shrink import shrink
from precast.ir.artifact import Bundle
from precast.ir.graph.schema import Call, Graph, Ref
from precast.ir.native import NativeKernel, NativeLayer, NativeParam
from precast.kernels.native import Native
from precast.kernels.records import Ranges
from precast.kernels.use import GPU, types_in
from precast.loader.driver.coverage import (
    Anywhere,
    beside_the_graph,
    covered,
    held_sizes,
    lacking,
    most_sizes,
    steps_within,
    uncovered,
)
from precast.loader.driver.kernels import missing
from precast.loader.placement import Placement, bind_world
from precast.loader.sizing import EngineLimits, capacities
from precast.loader.torch_device import CpuDevice

_SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
COVERED: dict[str, dict[str, Any]] = {
    "cohere2": {}, "deepseek_v4": EXPERTS["deepseek_v4"][1], "glm4_moe": {"first_k_dense_replace": 2},
    "granite": {}, "lfm2": {}, "mamba": {}, "mixtral": {"num_local_experts": 4}, "phi3": {}, "qwen2": {},
    "starcoder2": {},
}  # fmt: skip
"""Beside those of `test_program.py`; docs/models.md has all."""
UNCOVERED = {
    "phimoe": [
        "aten.max.dim of bfloat16 is computed by torch.max.dim",
        "aten.scatter.value of bfloat16 is computed by torch.scatter.value",
    ],
}


def built(family: str, changes: dict[str, Any], folder: Path, dtype: str = "bfloat16") -> Bundle:
    from transformers import AutoConfig

    return build(AutoConfig.for_model(family, **{**_SIZES, **changes}), folder / "tiny.bundle", dtype=dtype)


def of_one_rank(bundle: Bundle) -> Graph:
    return bind_world(bundle.graph, Placement(0, 1, 1, CpuDevice()))


def limits(bundle: Bundle, num_tokens: int = 8192) -> EngineLimits:
    return EngineLimits(256, num_tokens, bundle.manifest.model.max_seq_len)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", COVERED)
def test_families_that_it_runs(family: str, dtype: str, tmp_path: Path) -> None:
    bundle = built(family, COVERED[family], tmp_path, dtype)

    assert uncovered(of_one_rank(bundle), GPU, limits(bundle)) == []


@pytest.mark.parametrize("family", UNCOVERED)
def test_families_that_torch_runs(family: str, tmp_path: Path) -> None:
    bundle = built(family, {"num_local_experts": 4}, tmp_path)

    assert sorted(uncovered(of_one_rank(bundle), GPU, limits(bundle))) == UNCOVERED[family]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_all_sizes_of_steps_and_older_gpus_are_covered(dtype: str, tmp_path: Path) -> None:
    bundle = built("llama", {}, tmp_path, dtype)
    ampere = GPU._replace(capability=(8, 0))

    assert uncovered(of_one_rank(bundle), GPU, limits(bundle, 50000)) == []
    assert uncovered(of_one_rank(bundle), ampere, limits(bundle)) == []


def test_types_of_steps_count(tmp_path: Path) -> None:
    bundle = built("llama", {}, tmp_path)

    without_library = GPU._replace(kinds=GPU.kinds - {"library"})
    oldest = GPU._replace(capability=(7, 5))

    assert "aten.linear.default of bfloat16 is computed by torch.linear.default (R 9 to any)" in uncovered(
        of_one_rank(bundle), without_library, limits(bundle)
    )
    assert len(uncovered(of_one_rank(bundle), oldest, limits(bundle))) > 5


def layer_of(bundle: Bundle) -> NativeLayer:
    """A layer with the kernels of all steps, none of which is compiled."""
    graph = of_one_rank(bundle)
    kernels = tuple(
        NativeKernel(each.launch.kernel, each.key, "", "", 32, 0, (), each.aligned, each.ones, pdl=False)
        for each in variants(graph, known_targets(graph, GPU, ()))
    )
    return NativeLayer("sm_90", 0, {}, {}, kernels, {})


def gone(bundle: Bundle, layer: NativeLayer) -> list[str]:
    graph = of_one_rank(bundle)
    program, addresses = covered(graph, GPU, limits(bundle))
    return sorted(set().union(*lacking(program, graph, addresses, layer, most_sizes(graph, limits(bundle)))))


def test_kernels_that_a_step_of_some_size_wants_are_missed_before_any_is_served(tmp_path: Path) -> None:
    bundle = built("qwen3_moe", {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}, tmp_path)
    layer = layer_of(bundle)
    of_many = "precast.kernels.experts.triton:count_kernel"
    drawing = "precast.kernels.sampling.triton:finish_kernel"
    kernels = {each.kernel for each in layer.kernels}
    assert {of_many, drawing} <= kernels, kernels

    def without(name: str) -> NativeLayer:
        return replace(layer, kernels=tuple(each for each in layer.kernels if each.kernel != name))

    assert gone(bundle, layer) == []
    assert gone(bundle, without(of_many)) == [of_many]
    assert gone(bundle, without(drawing)) == [drawing]


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_each_kernel_that_some_step_launches_is_missed(family: str, tmp_path: Path) -> None:
    bundle = built(family, COVERED.get(family, {}), tmp_path)
    layer = layer_of(bundle)
    program, _ = covered(of_one_rank(bundle), GPU, limits(bundle))
    keys = {key: launch.kernel for launch, key in program.launches() if key}

    assert len(keys) > 10
    assert missing(program.launches(), layer) == []
    for key, kernel in keys.items():
        others = replace(layer, kernels=tuple(each for each in layer.kernels if each.key != key))
        assert gone(bundle, others) == [kernel]


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_what_is_missed_is_what_steps_want(family: str, tmp_path: Path) -> None:
    """Each kernel of the layer is left out in turn: of those with one key, too, and of those that few steps want."""
    bundle = built(family, COVERED.get(family, {}), tmp_path)
    graph, layer = of_one_rank(bundle), layer_of(bundle)
    program, addresses = covered(graph, GPU, limits(bundle))
    most, anywhere = most_sizes(graph, limits(bundle)), Anywhere(graph, ())
    pages = {pool.pages: 1 for pool in graph.caches.pools}
    wanted = set()
    for tokens, count in ((1, 1), (2, 1), (2, 2), (5, 3), (9, 9), (49, 49), (64, 1), (97, 33), (300, 7), (8192, 256)):
        sizes = {**most, **pages, "T": tokens, "B": count, "R": count}
        for each in program.ready(sizes, anywhere.of(sizes), addresses)[0]:
            wanted.add((each.launch.kernel, each.key, tuple(v if isinstance(v, int) else 0 for v in each.values)))
        for drawn in beside_the_graph(graph, program.target, tokens, count):
            wanted.add((drawn.launch.kernel, drawn.key, tuple(drawn.values())))

    for i, kernel in enumerate(layer.kernels):
        others = replace(layer, kernels=layer.kernels[:i] + layer.kernels[i + 1 :])
        native = Native(others)
        really = {name for name, key, values in wanted if key and native.find(key, values) is None}
        assert really <= set().union(*lacking(program, graph, addresses, others, most)), kernel


@pytest.mark.parametrize("condition", [{"aligned": (0,)}, {"ones": (0,)}, {"params": (NativeParam("int32", 0),)}, {}])
def test_what_has_a_condition_does_not_take_all_arguments(condition: dict[str, Any]) -> None:
    """Launches with its key are laid out, to see whether it takes theirs."""
    kernel = replace(NativeKernel("of:some", "key", "", "", 32, 0, (NativeParam("int64", 0),)), **condition)

    assert Native(NativeLayer("sm_90", 0, {}, {}, (kernel,), {})).takes_all("key") == (not condition)
    assert not Native(NativeLayer("sm_90", 0, {}, {}, (kernel,), {})).takes_all("another")


def test_a_deep_model_is_looked_up(tmp_path: Path) -> None:
    bundle = built("llama", {}, tmp_path)
    graph, layer = of_one_rank(bundle), layer_of(bundle)
    last = max(i for i, item in enumerate(graph.main) if isinstance(item, Call))
    call = graph.main[last]
    assert isinstance(call, Call)
    (own,) = (name for name, value in call.args.items() if value == graph.main[last - 1].outputs[0].name)
    calls, before = [], call.outputs[0].name
    for number in range(400):
        made = tuple(replace(value, name=f"{value.name}_{number}") for value in call.outputs)
        calls.append(replace(call, args={**call.args, own: before}, outputs=made))
        before = made[0].name
    behind = [replace(item, args=_renamed(item.args, call.outputs[0].name, before)) for item in graph.main[last + 1 :]]
    deep = replace(graph, main=(*graph.main[: last + 1], *calls, *behind))
    program, addresses = covered(deep, GPU, limits(bundle))

    assert not any(lacking(program, deep, addresses, layer, most_sizes(deep, limits(bundle))))


def _renamed(args: dict[str, Any], name: str, other: str) -> dict[str, Any]:
    return {key: Ref(other) if arg == Ref(name) else arg for key, arg in args.items()}


def test_steps_lie_at_both_ends_of_a_class_and_between() -> None:
    def sizes(ranges: Ranges) -> list[tuple[int, int, int]]:
        return steps_within(ranges, {"T": 8192, "B": 256, "R": 256})

    assert sizes({}) == [(1, 1, 1), (3, 3, 3), (8192, 256, 256)]
    assert sizes({"T": (9, 64)}) == [(9, 1, 1), (11, 3, 3), (64, 64, 64)]
    assert sizes({"T": (0, 8), "B": (3, 8)}) == [(3, 3, 1), (5, 5, 3), (8, 8, 8)]
    assert sizes({"R": (9, None)}) == [(9, 9, 9), (11, 11, 11), (8192, 256, 256)]
    assert sizes({"B": (1, 1), "T": (65, None)}) == [(65, 1, 1), (67, 1, 1), (8192, 1, 1)]
    assert sizes({"T": (2, 2)}) == [(2, 1, 1), (2, 2, 2)]
    assert sizes({"T": (1, 1)}) == [(1, 1, 1)]
    assert sizes({"T": (2, 8)}) == [(2, 1, 1), (3, 3, 3), (8, 8, 8)]


@pytest.mark.parametrize("ranges", [{"T": (0, 8), "B": (9, 32)}, {"B": (1, 2), "R": (3, None)}, {"T": (9000, None)}])
def test_classes_without_a_step_have_none(ranges: Ranges) -> None:
    assert steps_within(ranges, {"T": 8192, "B": 256, "R": 256}) == []


def test_pages_of_small_states_are_as_far_apart_as_they_will_be(tmp_path: Path) -> None:
    """Of some of xLSTM's states a page has four numbers, and the next one begins at a multiple of 256 bytes."""
    from transformers import AutoConfig

    bundle = build(shrink(AutoConfig.for_model("xlstm")), tmp_path / "tiny.bundle", dtype="float32")

    assert gone(bundle, layer_of(bundle)) == []


def test_kernels_for_other_arguments_are_missed(tmp_path: Path) -> None:
    bundle = built("llama", {}, tmp_path)
    layer = layer_of(bundle)

    picky = replace(layer, kernels=tuple(replace(each, ones=(*each.aligned[:1],)) for each in layer.kernels))

    assert gone(bundle, picky)


def test_memory_is_held_for_page_lists_as_long_as_they_become(tmp_path: Path) -> None:
    """Sparse attention keeps a score for each slot of the lists, and those of captured steps are as long as they may
    become in any."""
    bundle = built("deepseek_v32", EXPERTS["deepseek_v32"][1], tmp_path)
    graph, limited = of_one_rank(bundle), limits(bundle)
    program, _ = covered(graph, GPU, limited)
    sizes, types = held_sizes(graph, limited), types_in(graph)
    lengths = capacities(graph, limited, 1 << 20)
    names = [group.inputs.page_indices for group in graph.caches.groups]

    assert {types[name].shape[0]: lengths[name][1] for name in names}.items() <= sizes.items()
    assert program.workspace_bytes(sizes) > program.workspace_bytes(most_sizes(graph, limited))
