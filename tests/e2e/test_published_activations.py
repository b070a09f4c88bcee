"""Quantised checkpoints whose publishers round the inputs of layers, too: bundles compute what a model in float32 does
whose linear layers round their inputs by the plain definition (`plain_rounding.py`)."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import families
import msgspec
import pytest
import torch
from plain_rounding import (
    Rounding,
    float8_groups,
    float8_groups_e8m0,
    float8_tokens,
    in_parts,
    int8_tokens,
    round_inputs,
    static,
)
from quantised import Stored
from quantised_checkpoints import Case, Checkpoints, Made, compressed, float8, integers, maker, rows, stored_integers
from reference import hf_logits, relative_error
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import precast
from precast.check.shards import prove
from precast.cli import show
from precast.ir.artifact import Bundle
from precast.ir.errors import BuildError, WeightsError
from precast.ir.graph.schema import Call, Const, Node
from precast.ir.graph.world import bound, unsharded
from precast.ir.ops.rows_rounded import in_groups
from precast.ir.verify import verifier
from precast.kernels.choices import cases
from precast.kernels.rounded.fusing import with_rounded_inputs
from precast.kernels.use import GPU, Target, statics_in, types_in, use_of

PROMPT = [5, 9, 70, 33, 12, 88]
SIZES = {"hidden_size": 256, "intermediate_size": 320, "head_dim": 32}
"""Rows of more than one group of 128 inputs, of a group and a half, and of one."""
NEAR = 2e-3
"""Sums in another order differ in a last bit, and an input that is nearly between two numbers of few bits then goes to
the other: one of a token's inputs, by a sixteenth of it. Here that happens to none, and the logits are equal; without
rounding they are apart by more than `FAR`."""
FAR = 1e-2


class Published(NamedTuple):
    """A checkpoint with rounded inputs: what the graph says of them, and the plain definition, by the layer's name."""

    case: Case
    activation: str
    rounding: Callable[[dict[str, torch.Tensor]], Callable[[str], Rounding]]


def small(quantise: Callable[[str, torch.Tensor], Stored]) -> Callable[[str, torch.Tensor], Stored]:
    """Weights that keep the inputs of all layers at about 1, so that no difference grows from layer to layer."""

    def quantised(name: str, weight: torch.Tensor) -> Stored:
        tensors, dense = quantise(name, weight)
        return {key: x * 2.0**-8 if x.dtype == torch.float32 else x for key, x in tensors.items()}, dense * 2.0**-8

    return quantised


def with_scale(quantise: Callable[[str, torch.Tensor], Stored], suffix: str, shape: tuple[int, ...]) -> Any:
    """With a scale of the layer's inputs beside its weight: of numbers up to 2.2 or 4.5, of which few are larger."""

    def quantised(name: str, weight: torch.Tensor) -> Stored:
        tensors, dense = quantise(name, weight)
        return tensors | {name.removesuffix(".weight") + suffix: torch.rand(shape) * 0.005 + 0.005}, dense

    return quantised


def always(rounding: Rounding) -> Callable[[dict[str, torch.Tensor]], Callable[[str], Rounding]]:
    return lambda tensors: lambda name: rounding


def by_scale(suffix: str) -> Callable[[dict[str, torch.Tensor]], Callable[[str], Rounding]]:
    return lambda tensors: static(tensors, suffix)


def blocks(rows: int, columns: int) -> tuple[int, ...]:
    return -(-rows // 128), -(-columns // 128)


def scalar(rows: int, columns: int) -> tuple[int, ...]:
    return ()


def inputs(format: str, weights: dict[str, Any], **activations: Any) -> dict[str, Any]:
    """A config of compressed-tensors with `input_activations`."""
    config = compressed(format, **weights)
    config["config_groups"]["group_0"]["input_activations"] = activations
    return config


FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
QUARK = {"dtype": "fp8_e4m3", "symmetric": True}


def quark(qscheme: str, inputs: dict[str, Any]) -> dict[str, Any]:
    """A config of Quark of one scale for each matrix (per_tensor) or row (per_channel)."""
    layer = {"weight": QUARK | {"qscheme": qscheme, "ch_axis": 0, "is_dynamic": False}, "input_tensors": inputs}
    return {"quant_method": "quark", "global_quant_config": layer, "exclude": ["lm_head"]}


BLOCKS = small(float8("_scale_inv", (128, 128), blocks))
CHANNELS = small(float8("_scale", (1, 1 << 20), rows))


def llama(entries: dict[str, Any], quantise: Any) -> Case:
    return Case("llama", entries, quantise, changes=SIZES)


CASES = {
    "FP8 in groups": Published(
        llama({"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}, BLOCKS),
        "fp8_group", always(float8_groups),
    ),
    "FP8 in groups by powers of two": Published(
        llama({"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic",
               "scale_fmt": "ue8m0"}, BLOCKS),
        "fp8_group_e8m0", always(float8_groups_e8m0),
    ),
    "FP8 in groups that ranks have whole": Published(
        Case("llama", {"quant_method": "fp8", "weight_block_size": [128, 128]}, BLOCKS,
             changes={"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}),
        "fp8_group", always(float8_groups),
    ),
    "FP8 of tokens": Published(
        llama({"quant_method": "fp8", "weight_block_size": None}, small(float8("_scale_inv", None, scalar))),
        "fp8_token", always(float8_tokens),
    ),
    "FP8, static": Published(
        llama({"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"},
              with_scale(small(float8("_scale_inv", None, scalar)), ".activation_scale", ())),
        "fp8_tensor", by_scale(".activation_scale"),
    ),
    "AutoFP8, static": Published(
        llama({"quant_method": "fp8", "activation_scheme": "static"},
              with_scale(small(float8("_scale", None, scalar)), ".input_scale", ())),
        "fp8_tensor", by_scale(".input_scale"),
    ),
    "FBGEMM, with a bound that cuts": Published(
        llama({"quant_method": "fbgemm_fp8", "activation_scale_ub": 2.0}, CHANNELS),
        "fp8_token", always(functools.partial(float8_tokens, bound=2.0)),
    ),
    "ModelOpt": Published(
        llama({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
              with_scale(small(float8("_scale", None, scalar)), ".input_scale", ())),
        "fp8_tensor", by_scale(".input_scale"),
    ),
    "compressed FP8 of tokens": Published(
        llama(inputs("float-quantized", FP8 | {"strategy": "channel"}, **FP8, strategy="token", dynamic=True),
              CHANNELS),
        "fp8_token", always(float8_tokens),
    ),
    "compressed FP8 in groups": Published(
        llama(inputs("float-quantized", FP8 | {"strategy": "block", "block_structure": [128, 128]}, **FP8,
                     strategy="group", group_size=128, dynamic=True),
              small(float8("_scale", (128, 128), blocks))),
        "fp8_group", always(float8_groups),
    ),
    "compressed FP8, static": Published(
        llama(inputs("float-quantized", FP8 | {"strategy": "tensor"}, **FP8, strategy="tensor", dynamic=False),
              with_scale(small(float8("_scale", None, lambda *_: (1,))), ".input_scale", (1,))),
        "fp8_tensor", by_scale(".input_scale"),
    ),
    "Quark, static": Published(
        llama(quark("per_tensor", QUARK | {"qscheme": "per_tensor", "is_dynamic": False}),
              with_scale(small(float8("_scale", None, scalar)), ".input_scale", ())),
        "fp8_tensor", by_scale(".input_scale"),
    ),
    "Quark of tokens": Published(
        llama(quark("per_channel", QUARK | {"qscheme": "per_channel", "is_dynamic": True, "ch_axis": 1}),
              small(float8("_scale", (1, 1 << 20), lambda rows, _: (rows,)))),
        "fp8_token", always(float8_tokens),
    ),
    "compressed INT8 of tokens": Published(
        llama(inputs("int-quantized", integers(8, "channel", symmetric=True), num_bits=8, type="int",
                     strategy="token", symmetric=True, dynamic=True),
              stored_integers(8, None, zeros=False, packed=False)),
        "int8_token", always(int8_tokens),
    ),
}  # fmt: skip
STATIC = [name for name, each in CASES.items() if each.activation == "fp8_tensor"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    return maker({name: published.case for name, published in CASES.items()}, tmp_path_factory)


@pytest.fixture(scope="module")
def half(made: Callable[[str], Made], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Bundle]:
    """Makes a case's bundle in bfloat16, once."""

    @functools.cache
    def make(name: str) -> Bundle:
        return precast.build(made(name).checkpoints.stored, tmp_path_factory.mktemp("half") / "b", dtype="bfloat16")

    return make


def logits(bundle: Bundle, weights: Path, device: str = "cpu", **options: Any) -> torch.Tensor:
    with precast.load(bundle.path, weights=weights, device=device, cache_bytes=1 << 20, **options) as engine:
        return engine.logits(PROMPT)


def exact_logits(checkpoints: Checkpoints) -> torch.Tensor:
    """Of the model whose layers take inputs as they are."""
    return hf_logits(AutoModelForCausalLM.from_pretrained(checkpoints.plain, dtype=torch.float32), [PROMPT])[0]


def plain_logits(published: Published, checkpoints: Checkpoints, parts: int = 1) -> torch.Tensor:
    """Of the model whose layers round their inputs; of `parts` ranks, those that have a part of the input a part."""
    model = AutoModelForCausalLM.from_pretrained(checkpoints.plain, dtype=torch.float32)
    of = published.rounding(load_file(checkpoints.stored / "model.safetensors"))

    def rounding(name: str) -> Rounding:
        return in_parts(of(name), parts) if re.search("(o|down)_proj$", name) else of(name)

    round_inputs(model, published.case.which, rounding)
    return hf_logits(model, [PROMPT])[0]


def layers(bundle: Bundle) -> list[Node]:
    """The linear layers with weights in few bits, of one of the model's."""
    return [node for node in bundle.graph.blocks[0].nodes if node.op == "precast.quantised_linear"]


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_a_model_that_rounds_inputs(case: str, made: Callable[[str], Made]) -> None:
    checkpoints, bundle = made(case)

    found = logits(bundle, checkpoints.stored)

    assert relative_error(found, plain_logits(CASES[case], checkpoints)) < NEAR
    assert relative_error(found, exact_logits(checkpoints)) > FAR


@pytest.mark.parametrize("case", CASES)
def test_the_graph_says_how_inputs_are_rounded(case: str, made: Callable[[str], Made]) -> None:
    bundle = made(case).bundle

    assert {node.args["activation"] for node in layers(bundle)} == {Const(CASES[case].activation)}
    assert "inputs not rounded" not in bundle.provenance
    # what has one scale for all inputs has its own, so layers of one input stay apart
    assert len(layers(bundle)) == (7 if case in STATIC else 4)
    assert all(("input_scale" in node.args) == (case in STATIC) for node in layers(bundle))


@pytest.mark.parametrize("case", ["FP8 in groups", "ModelOpt", "FBGEMM, with a bound that cuts"])
def test_inputs_stay_as_they_are_where_that_is_asked_for(
    case: str, made: Callable[[str], Made], tmp_path: Path
) -> None:
    checkpoints, _ = made(case)

    bundle = precast.build(checkpoints.stored, tmp_path / "b", dtype="float32", activations="none")

    assert len(layers(bundle)) == 4
    assert all(not {"activation", "input_scale"} & set(node.args) for node in layers(bundle))
    assert not any(node.op == "aten.clamp.default" for node in bundle.graph.blocks[0].nodes)
    assert relative_error(logits(bundle, checkpoints.stored), exact_logits(checkpoints)) < 1e-5


@pytest.mark.parametrize("activations", ["all", "", "fp8", None, 8])
def test_choices_that_are_not_known(activations: Any, made: Callable[[str], Made], tmp_path: Path) -> None:
    said = re.escape(f"activations={activations!r}: this is not known, expected published or none")
    with pytest.raises(BuildError, match=said) as error:
        precast.build(made("ModelOpt").checkpoints.stored, tmp_path / "b", activations=activations)

    assert error.value.code == "option-invalid"


@pytest.mark.parametrize("case", CASES)
def test_ranks_hold_the_same_model(case: str, made: Callable[[str], Made]) -> None:
    """The proof compares products of inputs as they are."""
    checkpoints, bundle = made(case)

    assert prove(bundle, checkpoints.stored, tp=2).holds


WHOLE = "FP8 in groups that ranks have whole"


@pytest.mark.parametrize("case", ["FP8 in groups", WHOLE, "ModelOpt", "compressed INT8 of tokens"])
def test_ranks_round_the_part_of_a_row_that_they_have(case: str, made: Callable[[str], Made]) -> None:
    """Each by its own scales, as vLLM's ranks do; groups of 128 end where a rank's part does, and one scale is the same
    for all."""
    checkpoints, bundle = made(case)

    found = logits(bundle, checkpoints.stored, tp=2)

    assert relative_error(found, plain_logits(CASES[case], checkpoints, parts=2)) < NEAR
    is_whole = relative_error(found, plain_logits(CASES[case], checkpoints)) < NEAR
    assert is_whole == (case in (WHOLE, "ModelOpt"))


def test_a_snapshot_holds_what_is_said_of_inputs(made: Callable[[str], Made], tmp_path: Path) -> None:
    (_, stored), bundle = made("ModelOpt")

    built = [
        precast.build(stored, tmp_path / f"b{i}", dtype="float32", snapshots=tmp_path / "snapshots") for i in range(2)
    ]

    assert [each.provenance["from_snapshot"] for each in built] == [False, True]
    assert [each.digest for each in built] == [bundle.digest] * 2
    other = precast.build(
        stored, tmp_path / "other", dtype="float32", snapshots=tmp_path / "snapshots", activations="none"
    )
    assert not other.provenance["from_snapshot"]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tp", [1, 2])
def test_hopper_has_kernels_that_round(case: str, tp: int, half: Callable[[str], Bundle]) -> None:
    """Also where no torch would compute the definition; with a library that has scales, and with an older one.

    Few rows are the stream's where its kernels run, else Triton's.
    """
    target = GPU.without_torch
    older = target._replace(kinds=target.kinds - {"library 12.9"})
    bundle = half(case)
    graph = bound(bundle.graph, {"rank": tp - 1, "tp": tp, "ep": 1})
    types, statics = types_in(graph.blocks[0]), statics_in(graph.blocks[0])

    bounds = [node for node in graph.blocks[0].nodes if node.op == "aten.clamp.default"]
    for node in [*layers(msgspec.structs.replace(bundle, graph=graph)), *bounds]:
        use = use_of(node, types, target, statics)
        kinds, olders = ({case.choice.record.kind for case in cases(use._replace(target=at))} for at in (target, older))
        assert kinds - {"library 12.9"} == olders
        assert olders - {"cuda"} == {"triton"}


ROUNDING = ("precast.rounded_rms_norm", "precast.rounded_residual_rms_norm", "precast.rounded_gated_activation")


def fused_layers(case: str) -> int:
    """Of two blocks, the layers behind norms and gates: all but those behind attention.

    With scales of their own q, k and v stay apart, and so do gate and up; a bound stands in front of layers; and values
    of parts of blocks are multiplied by their scales one by one.
    """
    if CASES[case].activation == "fp8_tensor" or "bound" in case:
        return 0
    return 4 if CASES[case].case.changes == SIZES and in_groups(CASES[case].activation) else 6


@pytest.mark.parametrize("case", CASES)
def test_norms_and_gates_round_for_hoppers_kernels(
    case: str, made: Callable[[str], Made], half: Callable[[str], Bundle]
) -> None:
    """The same logits, bit for bit: here both are computed by the definitions."""
    weights, bundle = made(case).checkpoints.stored, half(case)
    graph = unsharded(bundle.graph)
    expected = logits(bundle, weights)

    fused = with_rounded_inputs(graph, GPU)

    verifier.check(fused)
    ops = Counter(node.op for block in fused.blocks for node in block.nodes)
    assert ops["precast.rounded_linear"] == sum(ops[op] for op in ROUNDING) == fused_layers(case)
    with precast.load(
        msgspec.structs.replace(bundle, graph=fused), weights=weights, device="cpu", cache_bytes=1 << 20
    ) as engine:
        assert torch.equal(engine.logits(PROMPT), expected)
    assert with_rounded_inputs(graph, Target("cpu")) is graph


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 0.0, -0.25])
def test_a_scale_of_inputs_that_is_no_number_above_0(value: float, made: Callable[[str], Made], tmp_path: Path) -> None:
    (_, stored), bundle = made("ModelOpt")
    tensors = load_file(stored / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.input_scale"
    tensors[name] = torch.tensor(value)
    save_file(tensors, tmp_path / "model.safetensors")

    with pytest.raises(WeightsError, match=f"{name}: the scale is {value}, expected a finite number above 0") as error:
        logits(bundle, tmp_path)

    assert error.value.code == "weights-mismatch"


def test_a_scale_of_inputs_that_is_missing(made: Callable[[str], Made], tmp_path: Path) -> None:
    (_, stored), bundle = made("compressed FP8, static")
    tensors = load_file(stored / "model.safetensors")
    del tensors["model.layers.0.self_attn.k_proj.input_scale"]
    save_file(tensors, tmp_path / "model.safetensors")

    with pytest.raises(WeightsError, match=r"layers\.0\.self_attn\.k_proj\.input_scale"):
        logits(bundle, tmp_path)


@pytest.mark.parametrize(
    ("family", "entries", "reason", "names"),
    [
        ("llama", {"quant_method": "fp8", "weight_block_size": [32, 32]},
         "groups of 32 inputs have a scale each: known are groups of 128", "model.layers.*.mlp.down_proj.weight"),
        ("llama", inputs("int-quantized", integers(8, "channel", symmetric=True), num_bits=8, type="int",
                         strategy="token", symmetric=False, dynamic=True),
         "input_activations of num_bits = 8, type = 'int', strategy = 'token', symmetric = False, dynamic = True: such"
         " a rounding is not made", "model.layers.*.mlp.down_proj.weight"),
        ("qwen3_moe", {"quant_method": "fp8", "weight_block_size": [32, 32]},
         "groups of 32 inputs have a scale each: known are groups of 128", "model.layers.*.mlp.experts.down_proj"),
        ("deepseek_v3", {"quant_method": "fp8", "weight_block_size": [128, 128]},
         "the weight is dequantised", "model.layers.*.self_attn.kv_b_proj.weight"),
    ],
)  # fmt: skip
def test_what_is_not_rounded_is_said(
    family: str, entries: dict[str, Any], reason: str, names: str, tmp_path: Path
) -> None:
    config = families.make_config(family)
    config.quantization_config = entries

    bundle = precast.build(config, tmp_path / "b")

    said = bundle.provenance["inputs not rounded"]
    assert isinstance(said, dict)
    assert names in said[reason]
    (row,) = [line for line in show.summary(bundle).text.splitlines() if line.endswith(f": {reason}")]
    assert row.startswith("inputs not rounded ")


def test_inspect_counts_the_layers_whose_inputs_are_rounded(made: Callable[[str], Made]) -> None:
    report = show.summary(made("FP8 in groups").bundle)
    num_layers = made("FP8 in groups").bundle.manifest.model.num_layers

    assert report.fields["activations"] == {"fp8_group": 4 * num_layers}
    assert re.search(rf"\ninputs +rounded by fp8_group in {4 * num_layers} linear layers\n", report.text)


@pytest.mark.parametrize(
    ("rounded", "text"),
    [
        ({"none": 3}, "as they are in 3 linear layers"),
        ({"fp8_token": 12, "none": 1}, "rounded by fp8_token in 12 linear layers; as they are in 1 linear layer"),
    ],
)
def test_inspect_says_what_stays_as_it_is(rounded: dict[str, int], text: str) -> None:
    assert show.rounded_text(rounded) == text


def test_layers_whose_inputs_are_rounded_in_other_ways_have_blocks_of_their_own(tmp_path: Path) -> None:
    """Beside those of one group of the config, whose inputs stay as they are."""
    config = families.make_config("llama")
    entries = inputs("float-quantized", FP8 | {"strategy": "channel"}, **FP8, strategy="token", dynamic=True)
    whole = entries["config_groups"]["group_0"]
    entries["config_groups"] = {
        "one": {"targets": ["re:.*layers\\.1\\."], "weights": whole["weights"]}, "rest": whole,
    }  # fmt: skip
    config.quantization_config = entries

    bundle = precast.build(config, tmp_path / "b", dtype="float32")

    blocks = {block.name: block for block in bundle.graph.blocks}
    calls = [blocks[step.block] for step in bundle.graph.main if isinstance(step, Call)]
    found = [{format_arg(node) for node in call.nodes if node.op == "precast.quantised_linear"} for call in calls]
    assert found == [{"fp8_token"}, {"none"}, {"fp8_token"}]
    assert "dequantised" not in bundle.provenance


def format_arg(node: Node) -> str:
    given = node.args.get("activation")
    return str(given.value) if isinstance(given, Const) else "none"


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_a_gpu_rounds_as_the_definition_does(case: str, made: Callable[[str], Made], tmp_path: Path) -> None:
    """Float16 rounds between the layers, too, and what it moves over a border is then another number of 8 bits: as far
    from the definition in float32 as that takes the definition itself, no kernel may take it further."""
    checkpoints, bundle = made(case)
    rounded = logits(bundle, checkpoints.stored)
    half = precast.build(checkpoints.stored, tmp_path / "b", dtype="float16")

    by_definition, found = (logits(half, checkpoints.stored, device=device) for device in ("cpu", "cuda"))

    assert relative_error(found.float().cpu(), rounded) < 1.2 * relative_error(by_definition.float(), rounded)
