"""What is done to each token by itself: linear layers, norms, rotary embedding, gates, the choice of the next token."""

from __future__ import annotations

from precast.ir.errors import RecipeError
from precast.ir.graph import symbols
from precast.ir.graph.schema import Dtype, TensorType
from precast.ir.ops.checks import (
    COMPUTED,
    broadcast,
    expect,
    expect_dtype,
    expect_given,
    expect_known,
    expect_one_of,
    expect_rank,
    expect_shape,
    expect_vector,
)
from precast.ir.ops.op import EACH, SEQUENCES, VALUE, Args, Integers, ShapeError, Tokens, last_of, row
from precast.ir.ops.work import nothing, product
from precast.ir.weights import quantised

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
SCALES: tuple[Dtype, ...] = ("float32", "bfloat16", "float16")
MAX_ITERATIONS = 1000
"""Of `precast.sinkhorn`. Published models have 20."""
QUANTISED_FORMATS = ("fp8", "mxfp4", "gptq", "nvfp4", "nvfp4_divided", "packed4", "packed8", "int8")
"""How ops may hold weights in few bits. Words of `awq` become those of `packed4` while they are read."""
TABLE_FORMATS = ("fp8",)
"""Those of tables of embeddings."""
QUANTISED_INPUTS = ("none", "fp8_token", "fp8_group", "fp8_group_e8m0", "fp8_tensor", "int8_token")


def linear(args: Args) -> tuple[TensorType, ...]:
    x, weight = args["input"], args["weight"]
    expect_rank("weight", weight, 2)
    expect(len(x.shape) >= 1, "input: expected at least one dimension")
    expect_dtype("input", x, *COMPUTED)
    expect_shape("input's last dimension", x.shape[-1:], weight.shape[1:])
    expect_dtype("weight", weight, x.dtype)
    expect_given(args, "bias", weight.shape[:1], x.dtype)
    return (TensorType(x.dtype, (*x.shape[:-1], weight.shape[0])),)


def quantised_linear(args: Args) -> tuple[TensorType, ...]:
    x, activation, scale = args["input"], args.get("activation", "none"), args.get("input_scale")
    expect(len(x.shape) >= 1, "input: expected at least one dimension")
    expect_dtype("input", x, *COMPUTED)
    expect_one_of("activation", activation, QUANTISED_INPUTS)
    weight = quantised_values("weight", args)
    expect_rank("weight, dequantised", weight, 2)
    outputs, inputs = reversed(weight.shape) if args["format"] == "gptq" else weight.shape
    expect_shape("input's last dimension", x.shape[-1:], (inputs,))
    expect_given(args, "bias", (outputs,), x.dtype)
    is_static = activation == "fp8_tensor"
    expect((scale is not None) == is_static, f"input_scale: {'missing' if is_static else f'not taken by {activation}'}")
    expect_given(args, "input_scale", (1,), *SCALES)
    return (TensorType(x.dtype, (*x.shape[:-1], outputs)),)


def quantised_values(name: str, args: Args) -> TensorType:
    """The values that the argument `name` holds in few bits, with the parts that stand beside it."""
    format, weight, scales = args["format"], args[name], args["scales"]
    expect_one_of("format", format, QUANTISED_FORMATS)
    others = {part: args[part] for part in ("zeros", "groups", "global_scale") if args.get(part) is not None}
    sizes = {"of": weight.shape, "scales": scales.shape, **{part: each.shape for part, each in others.items()}}
    try:
        shape = quantised.shape_in_op(format, sizes, args.get("block"), args.get("zero_offset", 0))
    except RecipeError as error:
        raise ShapeError(str(error)) from error
    expect_dtype(name, weight, quantised.stored_dtype(format))
    expect_dtype("scales", scales, *quantised.scales_dtypes(format))
    for part, each in others.items():
        allowed = SCALES if part == "global_scale" else ("int8",) if format == "int8" else ("int32",)
        expect_dtype(part, each, *allowed)
    return TensorType("float32", shape)


def addmm(args: Args) -> tuple[TensorType, ...]:
    bias, a, b = args["self"], args["mat1"], args["mat2"]
    expect_rank("mat1", a, 2)
    expect_rank("mat2", b, 2)
    expect_dtype("mat1", a, *COMPUTED)
    expect_dtype("mat2", b, a.dtype)
    expect_dtype("self", bias, a.dtype)
    expect_shape("mat2's first dimension", b.shape[:1], a.shape[1:])
    out = (a.shape[0], b.shape[1])
    expect_shape("self, broadcast", broadcast(bias.shape, out), out)
    return (TensorType(a.dtype, out),)


def matmul(args: Args) -> tuple[TensorType, ...]:
    a, b = args["self"], args["other"]
    expect(len(a.shape) >= 2 and len(b.shape) >= 2, "expected two matrices or batches of matrices")
    expect_shape("other's second to last dimension", b.shape[-2:-1], a.shape[-1:])
    expect_dtype("self", a, *COMPUTED)
    expect_dtype("other", b, a.dtype)
    return (TensorType(a.dtype, (*broadcast(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])),)


def embedding(args: Args) -> tuple[TensorType, ...]:
    ids, weight = args["ids"], args["weight"]
    expect_dtype("ids", ids, "int64", "int32")
    expect_rank("weight", weight, 2)
    expect_dtype("weight", weight, *COMPUTED, "int64")
    scale = args.get("scale", 1.0)
    expect(weight.dtype != "int64" or scale == 1.0, f"scale: expected 1.0 for rows of integers, found {scale}")
    return (TensorType(weight.dtype, (*ids.shape, weight.shape[1])),)


def sharded_embedding(args: Args) -> tuple[TensorType, ...]:
    expect_known("start", args["start"])
    expect_dtype("weight", args["weight"], *COMPUTED)
    return embedding(args)


def quantised_embedding(args: Args) -> tuple[TensorType, ...]:
    dtype = args["dtype"]
    expect_one_of("format", args["format"], TABLE_FORMATS)
    expect_one_of("dtype", dtype, COMPUTED)
    table = quantised_values("weight", args)
    return embedding({**args, "weight": TensorType(dtype, table.shape)})


def quantised_sharded_embedding(args: Args) -> tuple[TensorType, ...]:
    expect_known("start", args["start"])
    return quantised_embedding(args)


def sinkhorn(args: Args) -> tuple[TensorType, ...]:
    x, size, iterations = args["x"], args["size"], args["iterations"]
    expect_dtype("x", x, *COMPUTED)
    expect(isinstance(size, int) and size > 0, f"size: expected at least 1, found {symbols.text(size)}")
    expect_shape("x's last dimension", x.shape[-1:], (symbols.mul(size, size),))
    ok = isinstance(iterations, int) and 0 < iterations <= MAX_ITERATIONS
    expect(ok, f"iterations: expected 1 to {MAX_ITERATIONS}, found {symbols.text(iterations)}")
    return (x,)


def rms_norm(args: Args) -> tuple[TensorType, ...]:
    return (_norm(args, "weight"),)


def residual_rms_norm(args: Args) -> tuple[TensorType, ...]:
    x, residual = args["x"], args["residual"]
    expect_shape("residual", residual.shape, x.shape)
    expect_dtype("residual", residual, x.dtype)
    return (_norm(args, "weight"), x)


def norm_residual_norm(args: Args) -> tuple[TensorType, ...]:
    expect_given(args, "inner_weight", args["x"].shape[-1:], *COMPUTED)
    return residual_rms_norm(args)


def layer_norm(args: Args) -> tuple[TensorType, ...]:
    return (_norm(args, "weight", "bias"),)


def rope_frequencies(args: Args) -> tuple[TensorType, ...]:
    lengths, short, long = args["lengths"], args["short"], args.get("long")
    expect_rank("lengths", lengths, 2)
    expect_dtype("lengths", lengths, "int64")
    expect_vector("short", short, "float32")
    kind = args["kind"]
    expect(kind in ("longrope", "dynamic"), f"kind: expected longrope or dynamic, found {kind!r}")
    if kind == "dynamic":
        expect(long is None, "long: dynamic takes one set of frequencies, found two")
    else:
        expect(long is not None, "long: longrope takes two sets of frequencies, found one")
        expect_given(args, "long", short.shape, "float32")
    return (TensorType("float32", (*lengths.shape, *short.shape)),)


def rotary_tables(args: Args) -> tuple[TensorType, ...]:
    positions, inv_freq = args["positions"], args["inv_freq"]
    expect_rank("positions", positions, 2)
    expect_dtype("positions", positions, "int64")
    expect_dtype("inv_freq", inv_freq, "float32")
    if len(inv_freq.shape) != 1:
        expect_shape("inv_freq, but for its last dimension", inv_freq.shape[:-1], positions.shape)
    table = TensorType(args["dtype"], (*positions.shape, inv_freq.shape[-1]))
    expect_dtype("dtype", table, *COMPUTED)
    return (table, table)


def rotary(args: Args) -> tuple[TensorType, ...]:
    x, cos, sin = args["x"], args["cos"], args["sin"]
    expect_rank("x", x, 4)
    expect_rank("cos", cos, 3)
    expect_dtype("x", x, *COMPUTED)
    expect_dtype("cos", cos, *COMPUTED)
    expect_dtype("sin", sin, cos.dtype)
    expect_shape("cos, but for its last dimension", cos.shape[:2], x.shape[:2])
    expect_shape("sin", sin.shape, cos.shape)
    half, size = cos.shape[-1], x.shape[-1]
    expect_known("x's and cos's last dimensions", half, size)
    if isinstance(half, int) and isinstance(size, int):
        expect(2 * half <= size, f"cos: {half} pairs don't fit a head of size {size}")
    return (x,)


def gated_activation(args: Args) -> tuple[TensorType, ...]:
    x = args["x"]
    expect_dtype("x", x, *COMPUTED)
    expect(len(x.shape) > 0, "x: expected at least one dimension")
    return (_gated("x's last dimension", x, args["kind"]),)


def gated_linear(args: Args) -> tuple[TensorType, ...]:
    (product,) = linear(args)
    return (_gated("weight's first dimension", product, args["kind"]),)


def gather_rows(args: Args) -> tuple[TensorType, ...]:
    x, rows = args["x"], args["rows"]
    expect_rank("x", x, 3)
    expect_vector("rows", rows, "int64")
    return (TensorType(x.dtype, (x.shape[0], rows.shape[0], x.shape[2])),)


def sample(args: Args) -> tuple[TensorType, ...]:
    logits = args["logits"]
    expect_rank("logits", logits, 2)
    expect_dtype("logits", logits, *COMPUTED)
    wanted = {"temperature": "float32", "top_k": "int32", "top_p": "float32", "min_p": "float32",
              "seeds": "int64", "steps": "int64"}  # fmt: skip
    for name, dtype in wanted.items():
        expect_shape(name, args[name].shape, logits.shape[:1])
        expect_dtype(name, args[name], dtype)
    return (TensorType("int64", logits.shape[:1]),)


def _gated(of: str, x: TensorType, kind: str) -> TensorType:
    expect_one_of("kind", kind, ACTIVATIONS)
    half = symbols.floordiv(x.shape[-1], 2)
    expect_shape(f"{of}, halved twice", (symbols.mul(half, 2),), x.shape[-1:])
    return TensorType(x.dtype, (*x.shape[:-1], half))


def _norm(args: Args, *weights: str) -> TensorType:
    x: TensorType = args["x"]
    expect(len(x.shape) > 0, "x: expected at least one dimension")
    expect_dtype("x", x, *COMPUTED)
    for name in weights:
        expect_given(args, name, x.shape[-1:], *COMPUTED)
    return x


ROWS = (
    row(
        "aten.linear.default(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor",
        linear,
        last_of("input"),
        product("input"),
    ),
    row(
        "precast.quantised_linear(Tensor input, Tensor weight, Tensor scales, Tensor? zeros=None, Tensor? groups=None,"
        " Tensor? global_scale=None, Tensor? input_scale=None, Tensor? bias=None, *, str format, int[]? block=None,"
        " int zero_offset=0, str activation='none') -> Tensor",
        quantised_linear,
        last_of("input"),
        product("input"),
        integers={"weight": VALUE, "zeros": VALUE, "groups": Integers("any", "scales")},
    ),
    row("aten.addmm.default(Tensor self, Tensor mat1, Tensor mat2) -> Tensor", addmm, last_of("mat1"), product("mat1")),
    row("aten.matmul.default(Tensor self, Tensor other) -> Tensor", matmul, last_of("self"), product("self")),
    row(
        "precast.sinkhorn(Tensor x, *, int size, int iterations, float eps) -> Tensor",
        sinkhorn,
        last_of("x"),
    ),
    row(
        "precast.embedding(Tensor ids, Tensor weight, *, float scale=1.0) -> Tensor",
        embedding,
        Tokens("table", "weight"),
        nothing,
        integers={"ids": Integers("index", "weight")},
    ),
    row(
        "precast.sharded_embedding(Tensor ids, Tensor weight, *, int start, float scale=1.0) -> Tensor",
        sharded_embedding,
        Tokens("table", "weight"),
        nothing,
        integers={"ids": Integers("any", "weight")},
    ),
    row(
        "precast.quantised_embedding(Tensor ids, Tensor weight, Tensor scales, *, str format, int[] block, Dtype dtype,"
        " float scale=1.0) -> Tensor",
        quantised_embedding,
        Tokens("table", "weight"),
        nothing,
        integers={"ids": Integers("index", "weight")},
    ),
    row(
        "precast.quantised_sharded_embedding(Tensor ids, Tensor weight, Tensor scales, *, int start, str format,"
        " int[] block, Dtype dtype, float scale=1.0) -> Tensor",
        quantised_sharded_embedding,
        Tokens("table", "weight"),
        nothing,
        integers={"ids": Integers("any", "weight")},
    ),
    row(
        "precast.rms_norm(Tensor x, Tensor? weight, *, float eps, float offset=0.0, bool cast_before_scale) -> Tensor",
        rms_norm,
        last_of("x"),
    ),
    row(
        "precast.residual_rms_norm(Tensor x, Tensor residual, Tensor weight, *, float eps, float offset=0.0,"
        " bool cast_before_scale) -> (Tensor, Tensor)",
        residual_rms_norm,
        last_of("x"),
    ),
    row(
        "precast.norm_residual_norm(Tensor x, Tensor residual, Tensor inner_weight, Tensor weight, *, float eps,"
        " float offset=0.0, bool cast_before_scale) -> (Tensor, Tensor)",
        norm_residual_norm,
        last_of("x"),
    ),
    row("precast.layer_norm(Tensor x, Tensor? weight, Tensor? bias, *, float eps) -> Tensor", layer_norm, last_of("x")),
    row(
        "precast.rope_frequencies(Tensor lengths, Tensor short, Tensor? long, *, str kind, int original_length,"
        " float factor, float base) -> Tensor",
        rope_frequencies,
        EACH,
        integers={"lengths": VALUE},
    ),
    row(
        "precast.rotary_tables(Tensor positions, Tensor inv_freq, *, float scale, Dtype dtype) -> (Tensor, Tensor)",
        rotary_tables,
        EACH,
        integers={"positions": VALUE},
    ),
    row("precast.rotary(Tensor x, Tensor cos, Tensor sin, *, bool interleaved) -> Tensor", rotary, last_of("x")),
    row("precast.gated_activation(Tensor x, *, str kind) -> Tensor", gated_activation, last_of("x")),
    row(
        "precast.gated_linear(Tensor input, Tensor weight, Tensor? bias=None, *, str kind) -> Tensor",
        gated_linear,
        last_of("input"),
        product("input", halves=2),
    ),
    row(
        "precast.gather_rows(Tensor x, Tensor rows) -> Tensor",
        gather_rows,
        SEQUENCES,
        nothing,
        integers={"rows": Integers("input", "logit_rows")},
    ),
    *(
        row(
            "precast.sample(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seeds,"
            " Tensor steps) -> Tensor",
            sample,
            last_of("logits"),
            version=version,
            integers=dict.fromkeys(("top_k", "seeds", "steps"), VALUE),
        )
        for version in (1, 2)
    ),
)
