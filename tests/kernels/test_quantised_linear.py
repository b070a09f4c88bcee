"""Linear layers with weights in few bits: the definition by hand and as transformers computes it, which kernels are
chosen where, and that they compile as they should. What they compute: `launched_quantised_linear.py`.
"""

from __future__ import annotations

from itertools import groupby, pairwise
from pathlib import Path

import pytest
import torch
from compiled_launches import compiled, stack_bytes
from op_samples import quantised
from op_samples.draw import Draw, Sample
from plain_rounding import POWERS_OF_TWO, float8_groups_e8m0
from quantised import dequantised

from precast.ir.errors import TargetError
from precast.ir.graph import symbols
from precast.ir.graph.schema import (
    Apply,
    Const,
    Dequantise,
    Dtype,
    DtypeArg,
    Expr,
    Graph,
    Items,
    Node,
    Param,
    Read,
    Ref,
    Symbol,
    TensorType,
    Value,
)
from precast.ir.graph.world import bound
from precast.ir.memory.liveness import Operand
from precast.ir.ops.rows_rounded import in_groups
from precast.ir.ops.rows_tokens import QUANTISED_INPUTS
from precast.kernels.choices import cases, resolve, workspace
from precast.kernels.linear import records as linear
from precast.kernels.quantised_linear import float8, launches
from precast.kernels.quantised_linear.quantised_linear import few_bits, quantise_input, quantised_linear
from precast.kernels.quantised_linear.tiles import ROWS
from precast.kernels.records import Pointer
from precast.kernels.step_launches import step_launches
from precast.kernels.use import GPU, Target, Use, use_of

DRAW = Draw(torch.float32, torch.device("cpu"))
PARTS = ("weight", "scales", "zeros", "groups", "global_scale")
FIELDS = dict(zip(PARTS, ("of", "scales", "zeros", "groups", "global_scale"), strict=True))
WEIGHTS: dict[str, Sample] = {
    "fp8": quantised.fp8(DRAW, 27, 45),
    "int8": quantised.int8(DRAW, 27, 45, (4, 8), zeros=True),
    "packed4": quantised.packed(DRAW, 27, 48, size=16, zeros=True),
    "packed8": quantised.packed(DRAW, 27, 48, 8, size=16, order=True),
    "mxfp4": quantised.mxfp4(DRAW, 27, 96),
    "nvfp4": quantised.nvfp4(DRAW, 27, 48),
    "nvfp4_divided": quantised.nvfp4(DRAW, 27, 48, divided=True),
    "gptq": quantised.gptq(DRAW, 24, 48, 16, order=True),
}


@pytest.mark.parametrize("format", WEIGHTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_is_a_linear_layer_with_the_values_of_the_recipe(format: str, dtype: torch.dtype) -> None:
    weight = WEIGHTS[format]
    read = {FIELDS[name]: Read(name, ()) for name in PARTS if name in weight}
    recipe = Dequantise(**read, format=format, block=weight.get("block"), zero_offset=weight.get("zero_offset", 0))  # type: ignore[arg-type]
    values = dequantised(recipe, [weight[name] for name in PARTS if name in weight])
    values = values.t() if format == "gptq" else values
    x, bias = DRAW.normal(1, 5, values.shape[1], dtype=dtype), DRAW.normal(values.shape[0], dtype=dtype)

    found = quantised_linear(**quantised.call(x, weight, bias=bias))

    expected = torch.nn.functional.linear(x, values.to(dtype), bias)
    torch.testing.assert_close(found, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


def test_groups_of_gptq_are_in_order_without_a_list() -> None:
    weight, x = quantised.gptq(DRAW, 24, 48, 16), DRAW.normal(5, 48)
    listed = {**weight, "groups": (torch.arange(48) // 16).int()}

    assert torch.equal(quantised_linear(**quantised.call(x, weight)), quantised_linear(**quantised.call(x, listed)))


def test_inputs_of_no_group_count_for_nothing() -> None:
    weight, x = quantised.gptq(DRAW, 24, 48, 16, order=True), DRAW.normal(5, 48)
    weight["groups"][7], weight["groups"][30] = -1, 3
    without = x.clone()
    without[:, 7] = without[:, 30] = 0

    found, expected = (quantised_linear(**quantised.call(each, weight)) for each in (x, without))
    assert torch.equal(found, expected)


def test_rows_of_a_global_scale() -> None:
    """As layers with one each beside each other have it."""
    first, second = (quantised.nvfp4(DRAW, rows, 48) for rows in (8, 16))
    both = {name: torch.cat([first[name].view(torch.uint8), second[name].view(torch.uint8)]).view(first[name].dtype)
            for name in ("weight", "scales")}  # fmt: skip
    whole = torch.cat([first["global_scale"].expand(8, 1), second["global_scale"].expand(16, 1)])
    x = DRAW.normal(3, 48)

    found = quantised_linear(**quantised.call(x, {**both, "global_scale": whole, "format": "nvfp4"}))

    parts = [quantised_linear(**quantised.call(x, each)) for each in (first, second)]
    torch.testing.assert_close(found, torch.cat(parts, -1), rtol=1e-6, atol=1e-6)


def test_values_of_eight_bits_by_hand() -> None:
    x = torch.tensor([[2.0, -448.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0], [127.0, 63.4, -1.5, 2.5]])

    # 448 / 448 is 1: what float8 holds stays; 127 / 127 is 1, and halves go to the even number
    assert quantise_input(x, "fp8_token")[:2].tolist() == x[:2].tolist()
    assert quantise_input(x, "int8_token")[1:].tolist() == [[0.0] * 4, [127.0, 63.0, -2.0, 2.0]]
    # of a scale of 2: 448 at most, and 31.7 lies between 30 and 32
    of_two = quantise_input(x, "fp8_tensor", torch.tensor([2.0]))
    assert of_two[2].tolist() == [128.0, 64.0, -1.5, 2.5]
    assert quantise_input(torch.tensor([[1000.0]]), "fp8_tensor", torch.tensor([2.0])).tolist() == [[896.0]]


def test_groups_of_128_inputs_have_a_scale_each() -> None:
    x = torch.cat([torch.full((1, 128), 3.0), torch.full((1, 72), 500.0)], 1)
    x[0, 5] = 0.01

    found = quantise_input(x, "fp8_group")

    assert found[0, 5] == pytest.approx(0.01, rel=0.07)  # of the largest in all of the row it would be 0
    assert torch.equal(found[0, 128:], x[0, 128:])


@pytest.mark.parametrize(("most", "scale"), POWERS_OF_TWO)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_scales_that_are_powers_of_two(most: float, scale: float, dtype: torch.dtype) -> None:
    x = torch.zeros(1, 200, dtype=dtype)
    x[0, 5], x[0, 150] = -most, 3.0
    x[0, 7] = most / 3

    values, scales = few_bits(x, "fp8_group_e8m0")

    torch.testing.assert_close(scales, torch.tensor([[scale, 2.0**-7]], dtype=dtype), rtol=0, atol=0, equal_nan=True)
    quotients = x[0, :128] / (scale or 1.0)
    assert torch.equal(values[0, :128].view(torch.uint8), quotients.to(torch.float8_e4m3fn).view(torch.uint8))


def test_values_are_those_of_scales_that_are_powers_of_two() -> None:
    x = DRAW.normal(9, 300, scale=3.0)

    assert torch.equal(quantise_input(x, "fp8_group_e8m0"), float8_groups_e8m0(x))
    assert not torch.equal(quantise_input(x, "fp8_group_e8m0"), quantise_input(x, "fp8_group"))


def test_an_unknown_rounding_is_refused() -> None:
    with pytest.raises(ValueError, match=r"activation: expected none, fp8_token.*found 'fp4'"):
        quantise_input(torch.ones(1, 4), "fp4")


def test_values_are_rounded_as_compressed_tensors_are() -> None:
    """Its `quantize` and `dequantize` with scales of `calculate_qparams`: amax over half of the range, and nearest."""
    x = DRAW.normal(9, 300, scale=3.0)
    most = x.abs().amax(-1, keepdim=True)
    fp8, int8 = most / 448, most / 127

    expected = (x / fp8).clamp(-448, 448).to(torch.float8_e4m3fn).float() * fp8
    assert torch.equal(quantise_input(x, "fp8_token"), expected)
    assert torch.equal(quantise_input(x, "int8_token"), (x / int8).round().clamp(-128, 127) * int8)


# --- which kernels -----------------------------------------------------------------------------------------------


def use(
    weight: str, outputs: Expr = 4096, inputs: int = 4096, *, dtype: Dtype = "bfloat16", activation: str = "none",
    target: Target = GPU,
) -> Use:  # fmt: skip
    """A layer of `T` tokens: `weight` names its format, and how scales lie."""
    format, _, kind = weight.partition(" ")
    types: dict[str, TensorType] = {"input": TensorType(dtype, (1, "T", inputs))}
    constants: dict[str, Const | Items] = {"format": Const(format), "activation": Const(activation)}
    several = {"packed4": 8, "packed8": 4}.get(format, 1)
    if format in ("fp8", "int8"):
        block = (128, 128) if kind == "blocks" else (outputs if kind == "all" else 1, inputs)  # type: ignore[assignment]
        stored: Dtype = "float8_e4m3fn" if format == "fp8" else "int8"
        types |= {"weight": TensorType(stored, (outputs, inputs)),
                  "scales": TensorType("float32", tuple(map(symbols.ceildiv, (outputs, inputs), block)))}  # fmt: skip
        constants["block"] = Items(tuple(map(Const, block)))
    elif format in ("packed4", "packed8"):
        types |= {"weight": TensorType("int32", (outputs, inputs // several)),
                  "scales": TensorType("bfloat16", (outputs, inputs // 128))}  # fmt: skip
        if kind == "points":
            types["zeros"] = TensorType("int32", (symbols.ceildiv(outputs, several), inputs // 128))
        else:
            constants["zero_offset"] = Const(1 << 32 // several - 1)
    elif format == "mxfp4":
        types |= {"weight": TensorType("uint8", (outputs, inputs // 32, 16)),
                  "scales": TensorType("uint8", (outputs, inputs // 32))}  # fmt: skip
    elif format == "nvfp4":
        types |= {"weight": TensorType("uint8", (outputs, inputs // 2)), "global_scale": TensorType("float32", (1, 1)),
                  "scales": TensorType("float8_e4m3fn", (outputs, inputs // 16))}  # fmt: skip
    else:
        assert isinstance(outputs, int)
        types |= {"weight": TensorType("int32", (inputs // 8, outputs)),
                  "scales": TensorType("float16", (inputs // 128, outputs)),
                  "zeros": TensorType("int32", (inputs // 128, outputs // 8)),
                  "groups": TensorType("int32", (inputs,))}  # fmt: skip
    if activation == "fp8_tensor":
        types["input_scale"] = TensorType("float32", (1,))
    node = Node("precast.quantised_linear", {**{name: Ref(name) for name in types}, **constants},
                (Value("out.0", TensorType(dtype, (1, "T", outputs))),))  # fmt: skip
    return use_of(node, types, target, set(types) - {"input"})


def _with(given: Use, name: str, dtype: Dtype | None = None, shape: tuple[int, ...] | None = None, **lies: bool) -> Use:
    """The use with an argument of another type, or that lies otherwise."""
    held = given.operands.get(name, Operand(TensorType("bfloat16", ()), is_contiguous=True, is_activation=False))
    kind = TensorType(dtype or held.type.dtype, shape or held.type.shape)
    return given._replace(operands={**given.operands, name: held._replace(type=kind, **lies)})


def rounded_in_front(given: Use) -> Use:
    """The layer over the same input, rounded to float8 by an op in front."""
    types = {name: each.type for name, each in given.operands.items()}
    *rows, inputs = types["input"].shape
    assert isinstance(inputs, int)
    groups = symbols.ceildiv(inputs, 128) if in_groups(given.constant("activation")) else 1
    types["input"] = TensorType("float8_e4m3fn", (*rows, inputs))
    types["input_scales"] = TensorType("float32", (*rows, groups))
    args = {**given.node.args, "input_scales": Ref("input_scales"), "dtype": DtypeArg("bfloat16")}
    node = Node("precast.rounded_linear", args, given.node.outputs)
    return use_of(node, types, given.target, set(types) - {"input", "input_scales"})


ALL = ("fp8 blocks", "fp8 rows", "int8 rows", "packed4", "packed4 points", "packed8", "mxfp4", "nvfp4", "gptq")
STREAMED = tuple(each for each in ALL if each != "gptq")
WHOLE_FROM = {"gptq": 33, "mxfp4": 17, "nvfp4": 17}


@pytest.mark.parametrize("weight", ALL)
def test_hopper_has_launches_for_all_formats_and_sizes(weight: str) -> None:
    found = [case.choice.record for case in cases(use(weight, target=GPU.without_torch))]

    few, whole = "triton.quantised_linear_to_16", f"cublaslt.quantised_linear_from_{WHOLE_FROM.get(weight, 97)}"
    before = ["cuda.quantised_linear_listed"]
    if weight in STREAMED:
        sizes = (1, 2, 8, *ROWS)
        before = [f"cuda.quantised_linear_to_{most}" for most in sizes]
    assert [name for name, _ in groupby(record.name for record in found)] == [few, *before, whole]
    assert all(record.control == "static" and not record.allocates for record in found)


@pytest.mark.parametrize("weight", ["fp8 blocks", "fp8 rows", "packed4", "mxfp4"])
def test_powers_of_two_take_the_records_of_other_groups(weight: str) -> None:
    """In the same steps, with as much memory, rounded here or in front: their scales lie alike, and are float32."""
    one, other = (use(weight, activation=activation, target=GPU.without_torch) for activation in GROUPED)
    pairs = [(one, other)] + [(rounded_in_front(one), rounded_in_front(other))] * weight.startswith("fp8")

    for pair in pairs:
        first, second = ([(case.sizes, case.choice.record.name) for case in cases(given)] for given in pair)
        assert first == second
        assert workspace(pair[0]) == workspace(pair[1])


GROUPED = ("fp8_group", "fp8_group_e8m0")
OLDER_LIBRARY, TRITON_ALONE = (GPU._replace(kinds=GPU.kinds - {kind}) for kind in ("library 12.9", "cuda"))


@pytest.mark.parametrize("activation", QUANTISED_INPUTS[1:])
@pytest.mark.parametrize("weight", ["fp8 blocks", "int8 rows", "packed4"])
def test_a_rounded_input_is_multiplied_by_triton(weight: str, activation: str) -> None:
    (*_, last) = cases(use(weight, activation=activation, target=OLDER_LIBRARY.without_torch))

    assert last.choice.record.name == "triton.quantised_linear"


@pytest.mark.parametrize(
    ("weight", "activation", "scales"),
    [
        ("fp8 all", "fp8_tensor", "one"), ("fp8 rows", "fp8_tensor", "rows"), ("fp8 rows", "fp8_token", "rows"),
        ("fp8 all", "fp8_token", "rows"), ("fp8 blocks", "fp8_group", "blocks"),
        ("fp8 blocks", "fp8_group_e8m0", "blocks"),
    ],
)  # fmt: skip
def test_float8_on_both_sides_is_multiplied_by_cublaslt(weight: str, activation: str, scales: str) -> None:
    """From 65 tokens on, of a layer whose tiles no clusters share, and that are too few for the GPU: it is rounded, and
    then multiplied."""
    given = use(weight, 10240, activation=activation, target=GPU.without_torch)
    found = {case.sizes["T"][0]: case.choice.record for case in cases(given)}
    record = found[65]
    rounding, product = record.runs(given)  # type: ignore[operator]

    assert all((each.kind == "library 12.9") == (first >= 65) for first, each in found.items())
    assert record.name == f"cublaslt.quantised_linear_of_float8_{scales}"
    assert (record.control, record.allocates) == ("static", False)
    assert rounding.kernel.endswith(":round_kernel")
    assert product.kernel.endswith(".cublaslt:ScaledProduct")
    assert product.library
    assert product.constants == {
        "dtype": "bfloat16", "outputs": 10240, "inputs": 4096, "bias": False, "workspace_bytes": 16 << 20,
        "scales": scales,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("outputs", "inputs", "parts"),
    [
        (4096, 8192, [4096]),  # 64 MiB
        (28672, 4096, [4096] * 7),
        (4096, 14336, [2048] * 2),
        (5120, 16384, [2048, 2048, 1024]),
        (1024, 65536, [1024]),
    ],
)
def test_values_of_a_large_weight_are_made_in_parts(outputs: int, inputs: int, parts: list[int]) -> None:
    given = use("packed4", outputs, inputs)
    made = [launch for launch in launches.dequantised(given) if launch.kernel.endswith("words_kernel")]

    bounds = [[arg for arg in launch.args if type(arg) is int][:2] for launch in made]
    assert [end - first for first, end in bounds] == parts
    room = launches.dequantised_workspace(given)
    assert room - max(parts) * inputs * 2 == linear.workspace_bytes(max(parts))


@pytest.mark.parametrize(
    ("weight", "activation", "is_rounded", "held"),
    [
        ("fp8 all", "fp8_token", False, [18 * 512, 18 * 4, 48 * 4]),
        ("fp8 blocks", "fp8_group", False, [16 * 512, 4 * 512, 20 * 4 * 4, 4 * 48 * 2]),
        ("fp8 blocks", "fp8_group_e8m0", False, [16 * 512, 4 * 512, 20 * 4 * 4, 4 * 48 * 2]),
        ("fp8 all", "fp8_token", True, [48 * 4]),
        ("fp8 blocks", "fp8_group", True, [4 * 512, 20 * 4 * 4, 4 * 48 * 2]),
    ],
)
def test_parts_of_the_workspace_of_float8_lie_apart(
    weight: str, activation: str, is_rounded: bool, held: list[int]
) -> None:
    """The input, its last rows, its scales, the weight's one for each output, a result of four rows, what the library
    takes."""
    given = use(weight, 48, 512, activation=activation)
    given = rounded_in_front(given) if is_rounded else given
    _, product = float8.launches(given)
    outs = {arg: symbols.evaluate(arg.offset, {"T": 18}) for arg in product.args
            if isinstance(arg, Pointer) and arg.tensor == "workspace"}  # fmt: skip
    begins = sorted({*outs.values(), symbols.evaluate(float8.workspace(given), {"T": 18})})

    expected = [-(-count // 256) * 256 for count in held] + [48 * 4096]
    assert [end - begin for begin, end in pairwise(begins)] == expected


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (use("fp8 rows", 4104, activation="fp8_token"), "multiples of 16"),
        (use("fp8 rows", 4096, 4104, activation="fp8_token"), "multiples of 16"),
        (use("fp8 blocks", 4096, 1792, activation="fp8_group"), "a multiple of 4 in a row"),
        (use("fp8 rows", activation="fp8_group"), "blocks of 128 x 128"),
        (use("fp8 blocks", activation="fp8_token"), "scales of rows"),
        (use("fp8 rows"), "an input rounded to float8"),
        (use("fp8 rows", activation="int8_token"), "an input rounded to float8"),
        (use("fp8 rows", activation="fp8_token", target=GPU._replace(capability=(8, 9))), "compute capability 9.0"),
        (use("fp8 rows", activation="fp8_token", target=GPU._replace(capability=(10, 0))), "compute capability 9.0"),
        (use("fp8 rows", activation="fp8_token", target=OLDER_LIBRARY), "library 12.9 is not installed"),
        (_with(use("fp8 rows", activation="fp8_token"), "scales", dtype="bfloat16"), "scales is bfloat16"),
        (_with(use("fp8 rows", activation="fp8_token"), "weight", is_activation=True), "params in row-major order"),
        (_with(use("fp8 rows", activation="fp8_token"), "weight", is_contiguous=False), "params in row-major order"),
        (_with(use("fp8 rows", activation="fp8_token"), "bias", "float16", (4096,)), "a bias of the result's type"),
        (_with(use("fp8 rows", activation="fp8_token"), "zeros", "int8", (4096, 1)), "a float8 weight"),
    ],
)  # fmt: skip
def test_what_cublaslt_does_not_take_of_float8(given: Use, why: str) -> None:
    choice = resolve(given, {"T": 300})

    assert "of_float8" not in choice.record.name
    assert why in choice.reason


def test_rows_of_one_scale_are_as_long_as_a_program_holds() -> None:
    """Those of groups are as long as they like, and so are rows that an op in front has rounded."""
    names = ("quantised_linear_of_float8_rows", "quantised_linear_of_float8_blocks", "rounded_linear_of_float8_rows")
    long = use("fp8 rows", 4096, 33280, activation="fp8_token")
    taken = (use("fp8 rows", 4096, 32768, activation="fp8_token"),
             use("fp8 blocks", 4096, 53248, activation="fp8_group"), rounded_in_front(long))  # fmt: skip

    assert [resolve(given, {"T": 300}).record.name for given in taken] == [f"cublaslt.{name}" for name in names]
    refused = resolve(long, {"T": 300})
    assert refused.record.name == "reference.quantised_linear"
    assert "rows of at most 32768 inputs that have one scale" in refused.reason


def test_all_with_one_scale_is_the_library_s_from_8_9_on() -> None:
    for capability in ((8, 9), (9, 0), (10, 0), (12, 0)):
        given = use("fp8 all", activation="fp8_tensor", target=GPU._replace(capability=capability))

        assert resolve(given, {"T": 65}).record.name == "cublaslt.quantised_linear_of_float8_one"


@pytest.mark.parametrize(("capability", "name"), [((8, 0), "reference.quantised_linear"),
                                                  ((8, 9), "triton.quantised_linear_to_16")])  # fmt: skip
@pytest.mark.parametrize("given", [use("fp8 blocks"), use("nvfp4"), use("int8 rows", activation="fp8_token")])
def test_older_gpus_have_no_float8(given: Use, capability: tuple[int, int], name: str) -> None:
    choice = resolve(given._replace(target=Target("cuda", capability)), {"T": 1})

    assert choice.record.name == name
    assert ("it wants compute capability 8.9 or higher for float8" in choice.reason) == (capability < (8, 9))


def test_what_the_kernels_do_not_take_is_the_definition_s() -> None:
    wide = use("packed4", dtype="float32")

    assert resolve(wide, {"T": 1}).record.name == "reference.quantised_linear"
    with pytest.raises(TargetError, match="input is float32, it takes bfloat16, float16"):
        resolve(wide._replace(target=GPU.without_torch), {"T": 1})


def half_of(given: Use) -> Graph:
    """The graph of a layer over `tp`, as the second of two ranks has it."""
    params = {name: each.type for name, each in given.operands.items() if name != "input"}
    graph = Graph(
        symbols=(Symbol("T", 1), Symbol("tp", 1)),
        inputs=(Value("input", given.operands["input"].type),),
        params=tuple(Param(name, kind, Read(name, kind.shape, kind.dtype)) for name, kind in params.items()),  # type: ignore[arg-type]
        constants=(), blocks=(), main=(given.node,), outputs={"out": "out.0"},
    )  # fmt: skip
    return bound(graph, {"rank": 1, "tp": 2, "ep": 1})


HALVED = symbols.mul(128, Apply("floordiv", (32, "tp")))


def test_a_step_of_one_of_two_ranks_is_launches() -> None:
    """Of a graph over `tp`, without torch: each rank has half of the outputs."""
    half = half_of(use("packed4 points", HALVED))
    (stream,), (values, library) = (
        next(iter(step_launches(half, GPU.without_torch, {"T": tokens}))).launches for tokens in (3, 300)
    )

    assert [launch.launch.kernel.rpartition(":")[2] for launch in (stream, values, library)] == [
        "stream_linear", "words_kernel", "Product",
    ]  # fmt: skip
    assert stream.grid == (2048 // 16, 1, 1)


@pytest.mark.parametrize(
    ("weight", "activation"),
    [("fp8 rows", "fp8_token"), ("fp8 blocks", "fp8_group"), ("fp8 blocks", "fp8_group_e8m0")],
)
def test_float8_of_one_of_two_ranks_is_cublaslt_s(weight: str, activation: str) -> None:
    half = half_of(use(weight, HALVED, activation=activation))
    rounding, product = next(iter(step_launches(half, GPU.without_torch, {"T": 298}))).launches

    assert rounding.launch.kernel.endswith(":round_kernel")
    assert product.launch.constants["outputs"] == 2048
    assert product.args[-1] == 298
    assert (product.key, product.grid) == ("", (298, 1, 1))


@pytest.mark.parametrize("weight", ALL)
@pytest.mark.parametrize("activation", ["none", "fp8_group", "fp8_group_e8m0"])
def test_memory_is_known_for_all_sizes(weight: str, activation: str) -> None:
    taken = workspace(use(weight, activation=activation))
    bytes_of = [symbols.evaluate(taken, {"T": tokens}) for tokens in (0, 1, 64, 5000)]

    assert bytes_of == sorted(bytes_of)
    assert bytes_of[0] >= 0


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    "given",
    [
        use("fp8 blocks"), use("fp8 blocks", activation="fp8_group", target=OLDER_LIBRARY),
        use("int8 rows", activation="int8_token"), use("packed4 points"), use("nvfp4", 14336),
        use("gptq", dtype="float16", target=TRITON_ALONE), use("fp8 blocks", activation="fp8_group"),
        use("fp8 all", activation="fp8_token"),
        use("fp8 rows", activation="fp8_tensor"), rounded_in_front(use("fp8 blocks", activation="fp8_group")),
        rounded_in_front(use("fp8 all", activation="fp8_token")), use("fp8 blocks", activation="fp8_group_e8m0"),
    ],
    ids=lambda given: f"{given.node.op[8:]}, {given.constant('format')}, {given.constant('activation')}, "
    f"{len(given.target.kinds)}",
)  # fmt: skip
@pytest.mark.parametrize("tokens", [1, 64, 5000])
def test_kernels_are_compiled_for_hopper(given: Use, tokens: int, tmp_path: Path) -> None:
    types = {name: each.type for name, each in given.operands.items()} | {"out.0": given.result}
    runs = resolve(given, {"T": tokens}).record.runs
    assert not isinstance(runs, str)
    for launch in runs(given):
        if launch.library or launch.block:
            continue
        made = compiled(launch, types)
        ptx = made.asm["ptx"]

        assert made.metadata.shared <= 227 << 10
        assert stack_bytes(made, tmp_path) == 0
        assert "griddepcontrol.wait" in ptx
        if "product" in launch.kernel:
            # on tensor cores, and what comes next is on its way
            assert "mma" in ptx
            assert "cp.async" in ptx
            is_float8 = str(given.constant("activation")).startswith("fp8")
            assert (".e4m3.e4m3" in ptx) == (is_float8 and "wgmma" in ptx)
