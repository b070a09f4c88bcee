"""The op table: every operation that a graph may contain, with its signature, what it mutates, and its shape rule.

Anything outside this table is refused by name, at build and at load. A signature is written in the schema language
of `torch.library`, of which this is the part in use: the tensors first, then `*`, then keyword arguments. `aten`
ops keep torch's own argument names, so that the loader can call them by name. A `Tensor|Scalar` takes either.

`dynamic` marks ops whose work depends on the values of their metadata: they are never captured inside a piece.
"""

from __future__ import annotations

import re
from functools import cache, lru_cache
from typing import Literal

import msgspec

from precast.ir.ops import rules, rules_experts, rules_latent, rules_states
from precast.ir.ops.rules import Rule

Kind = Literal[
    "Tensor", "Tensor?", "Tensor[]", "Tensor|Scalar", "int", "int?", "int[]", "float", "float?", "bool", "str",
    "Dtype", "Scalar",
]  # fmt: skip


class ArgDef(msgspec.Struct, frozen=True):
    """One argument: its name, its kind, whether the op writes it, and its default, if it has one."""

    name: str
    kind: Kind
    mutated: bool = False
    has_default: bool = False
    default: bool | int | float | str | tuple[int, ...] | None = None


class OpDef(msgspec.Struct, frozen=True):
    """One version of an op. `rule` gives the result types from the argument types, or says why there are none."""

    name: str
    version: int
    args: tuple[ArgDef, ...]
    num_outputs: int
    rule: Rule
    dynamic: bool = False

    @property
    def mutated(self) -> tuple[str, ...]:
        """The names of the arguments that the op writes."""
        return tuple(arg.name for arg in self.args if arg.mutated)


_PRECAST: dict[str, tuple[str, Rule, bool]] = {
    # op: (signature, rule, dynamic), version 1 of each
    "embedding": ("(Tensor ids, Tensor weight, *, float scale=1.0) -> Tensor", rules.embedding, False),
    "rms_norm": (
        "(Tensor x, Tensor? weight, *, float eps, float offset=0.0, bool cast_before_scale) -> Tensor",
        rules.rms_norm,
        False,
    ),
    "residual_rms_norm": (
        "(Tensor x, Tensor residual, Tensor weight, *, float eps, float offset=0.0, bool cast_before_scale)"
        " -> (Tensor, Tensor)",
        rules.residual_rms_norm,
        False,
    ),
    "layer_norm": ("(Tensor x, Tensor? weight, Tensor? bias, *, float eps) -> Tensor", rules.layer_norm, False),
    "rope_frequencies": (
        "(Tensor lengths, Tensor short, Tensor? long, *, str kind, int original_length, float factor, float base)"
        " -> Tensor",
        rules.rope_frequencies,
        False,
    ),
    "rotary_tables": (
        "(Tensor positions, Tensor inv_freq, *, float scale, Dtype dtype) -> (Tensor, Tensor)",
        rules.rotary_tables,
        False,
    ),
    "rotary": ("(Tensor x, Tensor cos, Tensor sin, *, bool interleaved) -> Tensor", rules.rotary, False),
    "gated_activation": ("(Tensor x, *, str kind) -> Tensor", rules.gated_activation, False),
    "attention": (
        "(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor cu_seqlens, *,"
        " float scale, int? window=None, float? soft_cap=None, Tensor? slopes=None, int? chunk=None) -> Tensor",
        rules.attention,
        True,
    ),
    "write_kv": (
        "(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping) -> ()",
        rules.write_kv,
        False,
    ),
    "paged_attention": (
        "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor? sinks, Tensor cu_seqlens, Tensor kv_lens,"
        " Tensor page_indices, Tensor page_indptr, Tensor page_start, *,"
        " float scale, int? window=None, float? soft_cap=None, Tensor? slopes=None, int? chunk=None) -> Tensor",
        rules.paged_attention,
        True,
    ),
    "causal_conv": (
        "(Tensor x, Tensor weight, Tensor? bias, Tensor cu_seqlens, *, str activation='none') -> Tensor",
        rules_states.causal_conv,
        True,
    ),
    "stateful_causal_conv": (
        "(Tensor x, Tensor weight, Tensor? bias,"
        " Tensor(a!) state, Tensor slots, Tensor cu_seqlens, Tensor kv_lens, *, str activation='none') -> Tensor",
        rules_states.stateful_causal_conv,
        True,
    ),
    "selective_scan": (
        "(Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor? d, Tensor? dt_bias,"
        " Tensor cu_seqlens, *, bool softplus) -> Tensor",
        rules_states.selective_scan,
        True,
    ),
    "stateful_selective_scan": (
        "(Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor? d, Tensor? dt_bias,"
        " Tensor(a!) state, Tensor slots, Tensor cu_seqlens, Tensor kv_lens, *, bool softplus) -> Tensor",
        rules_states.stateful_selective_scan,
        True,
    ),
    "state_space_scan": (
        "(Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor? d, Tensor? dt_bias,"
        " Tensor cu_seqlens, *, bool softplus, float dt_min, float dt_max) -> Tensor",
        rules_states.state_space_scan,
        True,
    ),
    "stateful_state_space_scan": (
        "(Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor? d, Tensor? dt_bias,"
        " Tensor(a!) state, Tensor slots, Tensor cu_seqlens, Tensor kv_lens, *,"
        " bool softplus, float dt_min, float dt_max) -> Tensor",
        rules_states.stateful_state_space_scan,
        True,
    ),
    "delta_rule": (
        "(Tensor q, Tensor k, Tensor v, Tensor? decay, Tensor beta,"
        " Tensor cu_seqlens, *, float scale, bool normalise) -> Tensor",
        rules_states.delta_rule,
        True,
    ),
    "stateful_delta_rule": (
        "(Tensor q, Tensor k, Tensor v, Tensor? decay, Tensor beta,"
        " Tensor(a!) state, Tensor slots, Tensor cu_seqlens, Tensor kv_lens, *, float scale, bool normalise) -> Tensor",
        rules_states.stateful_delta_rule,
        True,
    ),
    "linear_attention": (
        "(Tensor q, Tensor k, Tensor v, Tensor? decay, Tensor cu_seqlens, *, float scale) -> Tensor",
        rules_states.linear_attention,
        True,
    ),
    "stateful_linear_attention": (
        "(Tensor q, Tensor k, Tensor v, Tensor? decay,"
        " Tensor(a!) state, Tensor slots, Tensor cu_seqlens, Tensor kv_lens, *, float scale) -> Tensor",
        rules_states.stateful_linear_attention,
        True,
    ),
    "linear_recurrence": (
        "(Tensor x, Tensor factor, Tensor cu_seqlens, *, str kind='sum') -> Tensor",
        rules_states.linear_recurrence,
        True,
    ),
    "stateful_linear_recurrence": (
        "(Tensor x, Tensor factor, Tensor(a!) state, Tensor slots, Tensor cu_seqlens, Tensor kv_lens, *,"
        " str kind='sum') -> Tensor",
        rules_states.stateful_linear_recurrence,
        True,
    ),
    "wkv": (
        "(Tensor k, Tensor v, Tensor decay, Tensor first, Tensor cu_seqlens) -> Tensor",
        rules_states.wkv,
        True,
    ),
    "stateful_wkv": (
        "(Tensor k, Tensor v, Tensor decay, Tensor first,"
        " Tensor(a!) state, Tensor slots, Tensor cu_seqlens, Tensor kv_lens) -> Tensor",
        rules_states.stateful_wkv,
        True,
    ),
    "route": (
        "(Tensor logits, Tensor? bias, *, str scoring, int top_k, str choice='scores', int num_groups=1,"
        " int top_groups=1, str group_score='top2', bool normalise, float epsilon=0.0, float floor=0.0,"
        " float scale=1.0, Dtype dtype) -> (Tensor, Tensor)",
        rules_experts.route,
        False,
    ),
    "grouped_linear": (
        "(Tensor x, Tensor weight, Tensor? bias, Tensor expert_ids) -> Tensor",
        rules_experts.grouped_linear,
        False,
    ),
    "experts": (
        "(Tensor x, Tensor expert_ids, Tensor expert_weights, Tensor up, Tensor down, Tensor? up_bias,"
        " Tensor? down_bias, *, str activation, bool gated, float alpha=1.0, float? limit=None, float offset=0.0)"
        " -> Tensor",
        rules_experts.experts,
        False,
    ),
    "latent_attention": (
        "(Tensor q, Tensor latent, Tensor k_rope, Tensor weight, Tensor cu_seqlens, *,"
        " float scale, int value_size, int? window=None) -> Tensor",
        rules_latent.latent_attention,
        True,
    ),
    "write_latent": (
        "(Tensor latent, Tensor k_rope, Tensor(a!) cache, Tensor slot_mapping) -> ()",
        rules_latent.write_latent,
        False,
    ),
    "paged_latent_attention": (
        "(Tensor q, Tensor cache, Tensor weight, Tensor cu_seqlens, Tensor kv_lens, Tensor page_indices,"
        " Tensor page_indptr, Tensor page_start, *, float scale, int value_size, int? window=None) -> Tensor",
        rules_latent.paged_latent_attention,
        True,
    ),
    "gather_rows": ("(Tensor x, Tensor rows) -> Tensor", rules.gather_rows, False),
    "sample": (
        "(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seeds, Tensor steps)"
        " -> Tensor",
        rules.sample,
        False,
    ),
}

_ATEN: dict[str, tuple[str, Rule]] = {
    "linear.default": ("(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor", rules.linear),
    "addmm.default": ("(Tensor self, Tensor mat1, Tensor mat2) -> Tensor", rules.addmm),
    "matmul.default": ("(Tensor self, Tensor other) -> Tensor", rules.matmul),
    "add.Tensor": ("(Tensor self, Tensor|Scalar other) -> Tensor", rules.pointwise),
    "sub.Tensor": ("(Tensor self, Tensor|Scalar other) -> Tensor", rules.arithmetic),
    "mul.Tensor": ("(Tensor self, Tensor|Scalar other) -> Tensor", rules.pointwise),
    "div.Tensor": ("(Tensor self, Tensor|Scalar other) -> Tensor", rules.pointwise_float),
    "rsub.Scalar": ("(Tensor self, Scalar other) -> Tensor", rules.arithmetic),
    "pow.Tensor_Scalar": ("(Tensor self, Scalar exponent) -> Tensor", rules.pointwise),
    "neg.default": ("(Tensor self) -> Tensor", rules.arithmetic),
    "abs.default": ("(Tensor self) -> Tensor", rules.arithmetic),
    "relu.default": ("(Tensor self) -> Tensor", rules.arithmetic),
    "exp.default": ("(Tensor self) -> Tensor", rules.pointwise_float),
    "expm1.default": ("(Tensor self) -> Tensor", rules.pointwise_float),
    "log.default": ("(Tensor self) -> Tensor", rules.pointwise_float),
    "log1p.default": ("(Tensor self) -> Tensor", rules.pointwise_float),
    "softplus.default": ("(Tensor self, Scalar beta=1, Scalar threshold=20) -> Tensor", rules.softplus),
    "floor.default": ("(Tensor self) -> Tensor", rules.arithmetic),
    "minimum.default": ("(Tensor self, Tensor other) -> Tensor", rules.pointwise),
    "maximum.default": ("(Tensor self, Tensor other) -> Tensor", rules.pointwise),
    "rsqrt.default": ("(Tensor self) -> Tensor", rules.pointwise_float),
    "sqrt.default": ("(Tensor self) -> Tensor", rules.pointwise_float),
    "tanh.default": ("(Tensor self) -> Tensor", rules.pointwise_float),
    "sigmoid.default": ("(Tensor self) -> Tensor", rules.pointwise_float),
    "silu.default": ("(Tensor self) -> Tensor", rules.activation),
    "gelu.default": ("(Tensor self, *, str approximate='none') -> Tensor", rules.activation),
    "cos.default": ("(Tensor self) -> Tensor", rules.pointwise_float),
    "sin.default": ("(Tensor self) -> Tensor", rules.pointwise_float),
    "clamp.default": ("(Tensor self, Scalar min=None, Scalar max=None) -> Tensor", rules.clamp),
    "mean.dim": ("(Tensor self, int[] dim, bool keepdim=False) -> Tensor", rules.mean),
    "sum.dim_IntList": ("(Tensor self, int[] dim, bool keepdim=False) -> Tensor", rules.sum_),
    "softmax.int": ("(Tensor self, int dim, Dtype dtype=None) -> Tensor", rules.softmax),
    "to.dtype": ("(Tensor self, Dtype dtype) -> Tensor", rules.cast),
    "reshape.default": ("(Tensor self, int[] shape) -> Tensor", rules.reshape),
    "transpose.int": ("(Tensor self, int dim0, int dim1) -> Tensor", rules.transpose),
    "permute.default": ("(Tensor self, int[] dims) -> Tensor", rules.permute),
    "unsqueeze.default": ("(Tensor self, int dim) -> Tensor", rules.unsqueeze),
    "squeeze.dim": ("(Tensor self, int dim) -> Tensor", rules.squeeze),
    "expand.default": ("(Tensor self, int[] size) -> Tensor", rules.expand),
    "slice.Tensor": ("(Tensor self, int dim, int start, int end, int step=1) -> Tensor", rules.slice_),
    "select.int": ("(Tensor self, int dim, int index) -> Tensor", rules.select),
    "topk.default": (
        "(Tensor self, int k, int dim=-1, bool largest=True, bool sorted=True) -> (Tensor, Tensor)",
        rules_experts.topk,
    ),
    "sort.default": ("(Tensor self, int dim=-1, bool descending=False) -> (Tensor, Tensor)", rules_experts.sort),
    "max.dim": ("(Tensor self, int dim, bool keepdim=False) -> (Tensor, Tensor)", rules_experts.max_dim),
    "argmax.default": ("(Tensor self, int dim, bool keepdim=False) -> Tensor", rules_experts.argmax),
    "cumsum.default": ("(Tensor self, int dim, *, Dtype dtype=None) -> Tensor", rules_experts.cumsum),
    "gather.default": ("(Tensor self, int dim, Tensor index) -> Tensor", rules_experts.gather),
    "scatter.src": ("(Tensor self, int dim, Tensor index, Tensor src) -> Tensor", rules_experts.scatter_src),
    "scatter.value": ("(Tensor self, int dim, Tensor index, Scalar value) -> Tensor", rules_experts.scatter_value),
    "one_hot.default": ("(Tensor self, int num_classes) -> Tensor", rules_experts.one_hot),
    "masked_fill.Scalar": ("(Tensor self, Tensor mask, Scalar value) -> Tensor", rules_experts.masked_fill),
    "where.self": ("(Tensor condition, Tensor self, Tensor other) -> Tensor", rules_experts.where),
    **{
        f"{name}.{overload}": (f"(Tensor self, {kind} other) -> Tensor", rules_experts.compare)
        for name in ("eq", "ne", "ge", "gt", "le", "lt")
        for overload, kind in (("Scalar", "Scalar"), ("Tensor", "Tensor"))
    },
    "full_like.default": ("(Tensor self, Scalar fill_value) -> Tensor", rules_experts.full_like),
    "logical_not.default": ("(Tensor self) -> Tensor", rules_experts.logical_not),
    "bitwise_not.default": ("(Tensor self) -> Tensor", rules_experts.bitwise_not),
    "cat.default": ("(Tensor[] tensors, int dim=0) -> Tensor", rules.cat),
}

_PARAM = re.compile(
    r"(?P<kind>Tensor\(\w!\)|Tensor\[\]|Tensor\|Scalar|Tensor\??|int\[\]|int\??|float\??|bool|str|Dtype|Scalar)"
    r" (?P<name>\w+)(?:=(?P<default>.+))?"
)


def lookup(name: str, version: int = 1) -> OpDef | None:
    """The op's definition, or None when the table has no such op or version."""
    return _table().get((name, version))


def names() -> tuple[tuple[str, int], ...]:
    """All (name, version) pairs of the table, sorted."""
    return tuple(sorted(_table()))


@lru_cache(maxsize=512)
def signature(name: str, version: int = 1) -> str:
    """The op's signature in the schema language of `torch.library`, without the namespace.

    Raises KeyError for a name or version that the table doesn't have.
    """
    if (name, version) not in _table():
        raise KeyError(f"{name}@{version}")
    if name.startswith("precast."):
        return name.removeprefix("precast.") + _PRECAST[name.removeprefix("precast.")][0]
    return name + _ATEN[name.removeprefix("aten.")][0]


@cache
def _table() -> dict[tuple[str, int], OpDef]:
    table = {}
    for name, (text, rule, dynamic) in _PRECAST.items():
        table["precast." + name, 1] = _parse("precast." + name, text, rule, dynamic)
    for name, (text, aten_rule) in _ATEN.items():
        table["aten." + name, 1] = _parse("aten." + name, text, aten_rule, False)
    return table


def _parse(name: str, text: str, rule: Rule, dynamic: bool) -> OpDef:
    params, _, returns = text.partition(") -> ")
    args = []
    for part in params.removeprefix("(").split(", "):
        if part == "*":
            continue
        match = _PARAM.fullmatch(part.removeprefix("*, ").removeprefix("*,").strip())
        assert match, f"{name}: cannot parse {part!r}"
        kind = match["kind"]
        default = match["default"]
        args.append(
            ArgDef(
                name=match["name"],
                kind="Tensor" if kind.endswith("!)") else kind,  # type: ignore[arg-type]
                mutated=kind.endswith("!)"),
                has_default=default is not None,
                default=None if default is None else _literal(default),
            )
        )
    return OpDef(name, 1, tuple(args), returns.count("Tensor"), rule, dynamic)


def _literal(text: str) -> bool | int | float | str | None:
    named = {"None": None, "True": True, "False": False}
    if text in named:
        return named[text]
    if text.startswith("'"):
        return text.strip("'")
    return float(text) if "." in text else int(text)
