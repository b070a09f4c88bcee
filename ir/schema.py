"""The language of a bundle: frozen structs, nothing else.

Every struct here is wire format. A field that is added, removed or renamed changes `tests/ir/schema_v*.json`
and needs the version bump that `precast.ir.versions` computes. Behaviour (evaluation, inference, verification,
printing) lives in the modules beside this one; nothing in this room imports torch.

Words: a *graph* is the program; a *block* is a function of it, stored once and called once a layer; a *node* is
one operation; a *value* is a typed result; a *param* is made from checkpoint tensors by its *recipe*; a *slot* is
one layer's place in a cache *group*; a group's pages live in a *pool*.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Dtype = Literal["bool", "int8", "uint8", "int32", "int64", "float8_e4m3fn", "float16", "bfloat16", "float32", "float64"]
ExprOp = Literal["add", "mul", "floordiv", "mod", "min", "max", "ceildiv"]


class Wire(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What all wire structs share: immutable, no unknown fields, one canonical encoding."""


# --- symbols and types -----------------------------------------------------------------------------------------


class Apply(Wire, frozen=True, tag="e", tag_field="k"):
    """An integer operation over expressions; `add`, `mul`, `min` and `max` take two arguments or more."""

    op: ExprOp
    args: tuple[Expr, ...]


Expr = int | str | Apply
"""An integer: a constant, a symbol's name, or an operation over expressions."""


class Symbol(Wire, frozen=True):
    """A named integer known later, in `min..max` (both included; no `max`: unbounded)."""

    name: str
    min: int = 0
    max: int | None = None


class TensorType(Wire, frozen=True):
    """A tensor's element type and its sizes."""

    dtype: Dtype
    shape: tuple[Expr, ...]


class Value(Wire, frozen=True):
    """A typed name, assigned once."""

    name: str
    type: TensorType


# --- arguments -------------------------------------------------------------------------------------------------


class Ref(Wire, frozen=True, tag="r", tag_field="k"):
    """The value, param, constant or cache tensor of this name."""

    name: str


class Const(Wire, frozen=True, tag="c", tag_field="k"):
    """A literal. Floats are finite or infinite, never NaN."""

    value: bool | int | float | str | None


class Dim(Wire, frozen=True, tag="d", tag_field="k"):
    """An integer argument that depends on symbols."""

    expr: Expr


class DtypeArg(Wire, frozen=True, tag="t", tag_field="k"):
    """An element type passed as an argument."""

    dtype: Dtype


class Items(Wire, frozen=True, tag="l", tag_field="k"):
    """A list argument: tensors (`cat`) or integers (`view`)."""

    items: tuple[Ref | Const | Dim, ...]


Arg = Ref | Const | Dim | DtypeArg | Items


# --- program ---------------------------------------------------------------------------------------------------


class Node(Wire, frozen=True, tag="node", tag_field="k"):
    """One operation: its arguments by the names of the op's signature, its results in order."""

    op: str
    args: dict[str, Arg]
    outputs: tuple[Value, ...]
    version: int = 1


class Call(Wire, frozen=True, tag="call", tag_field="k"):
    """One use of a block: `args` binds each of its inputs, params and caches to a name of `main`."""

    block: str
    args: dict[str, str]
    outputs: tuple[Value, ...]


class Block(Wire, frozen=True):
    """A function: what it takes by name, its nodes in order, the names it returns in order."""

    name: str
    inputs: tuple[Value, ...]
    params: tuple[Value, ...]
    caches: tuple[Value, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[str, ...]


# --- recipes: how a param is made from checkpoint tensors ------------------------------------------------------


class Read(Wire, frozen=True, tag="read", tag_field="k"):
    """The checkpoint tensor of this name, whole, of this shape; `dtype` None: any floating type."""

    tensor: str
    shape: tuple[int, ...]
    dtype: Dtype | None = None


class Slice(Wire, frozen=True, tag="slice", tag_field="k"):
    """Elements `start .. start + length` of dimension `dim`."""

    of: Recipe
    dim: int
    start: Expr
    length: Expr


class Concat(Wire, frozen=True, tag="concat", tag_field="k"):
    """The parts one behind the other along the existing dimension `dim`."""

    parts: tuple[Recipe, ...]
    dim: int


class Stack(Wire, frozen=True, tag="stack", tag_field="k"):
    """The parts, of equal shape, along a new dimension `dim`."""

    parts: tuple[Recipe, ...]
    dim: int


class Transpose(Wire, frozen=True, tag="transpose", tag_field="k"):
    """Dimensions `dim0` and `dim1` exchanged."""

    of: Recipe
    dim0: int
    dim1: int


class Reshape(Wire, frozen=True, tag="reshape", tag_field="k"):
    """The same elements in row-major order under another shape."""

    of: Recipe
    shape: tuple[Expr, ...]


class Cast(Wire, frozen=True, tag="cast", tag_field="k"):
    """Each element converted to `dtype`, rounding to nearest even; a source of that type is taken as it is."""

    of: Recipe
    dtype: Dtype


class Tie(Wire, frozen=True, tag="tie", tag_field="k"):
    """The same memory as another param of the graph."""

    param: str


Recipe = Read | Slice | Concat | Stack | Transpose | Reshape | Cast | Tie


class Param(Wire, frozen=True):
    """A parameter of the graph: its name, type, and how it is made."""

    name: str
    type: TensorType
    recipe: Recipe


# --- caches ----------------------------------------------------------------------------------------------------


class PagedSpec(Wire, frozen=True, tag="paged", tag_field="k"):
    """Geometry of a paged key/value cache. `window` None: full attention; else the keys a query may see."""

    num_kv_heads: Expr
    head_size: int
    value_size: int
    dtype: Dtype
    page_size: int
    window: int | None = None


class PagedInputs(Wire, frozen=True):
    """The names of one group's metadata inputs (`docs/format/v1.md`, Caches)."""

    page_indices: str
    page_indptr: str
    page_start: str
    slot_mapping: str


class Slot(Wire, frozen=True):
    """One layer's cache: its tensors, typed over the symbol that counts the pool's pages."""

    name: str
    tensors: tuple[Value, ...]


class Group(Wire, frozen=True):
    """Layers of equal spec: they share one page table and one set of metadata inputs."""

    name: str
    pool: str
    spec: PagedSpec
    inputs: PagedInputs
    slots: tuple[Slot, ...]


class Pool(Wire, frozen=True):
    """Memory for groups of one page geometry; `pages` is the symbol that counts its pages."""

    name: str
    pages: str


class CachePlan(Wire, frozen=True):
    """The only source of truth for the graph's metadata inputs and the loader's allocations."""

    pools: tuple[Pool, ...] = ()
    groups: tuple[Group, ...] = ()


# --- graph -----------------------------------------------------------------------------------------------------


class Graph(Wire, frozen=True):
    """A program: symbols, what it takes by name, its blocks, and `main`, which returns `outputs` by name."""

    symbols: tuple[Symbol, ...]
    inputs: tuple[Value, ...]
    params: tuple[Param, ...]
    constants: tuple[Value, ...]
    blocks: tuple[Block, ...]
    main: tuple[Node | Call, ...]
    outputs: dict[str, str]
    caches: CachePlan = CachePlan()


# --- manifest --------------------------------------------------------------------------------------------------


class ModelInfo(Wire, frozen=True):
    """What the loader must know of the model beyond its graph. `max_seq_len` counts prompt and answer tokens."""

    architecture: str
    model_type: str
    dtype: Dtype
    vocab_size: int
    max_seq_len: int
    num_layers: int
    num_parameters: int
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None


class PassRecord(Wire, frozen=True):
    """One pass as it ran: `delta` counts the ops that it added (positive) or removed."""

    name: str
    stage: str
    version: int
    changed: bool
    delta: dict[str, int] = {}


class Checkpoint(Wire, frozen=True):
    """How tensor names of a checkpoint are read, beyond the recipes.

    `optional_prefixes` may be missing from, or stand before, every name of the checkpoint (GPT-2's `transformer.`).
    `ignored` are name patterns of tensors that are present in some checkpoints and used by none; `*` stands for any
    run of characters, all else for itself. `tied` maps a second name of a tensor to the name that recipes read: a
    checkpoint holds either of them, or both with equal content.
    """

    optional_prefixes: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    tied: dict[str, str] = {}


class Blob(Wire, frozen=True):
    """A file in the bundle: what it is for (`role`), under which name, its digest and size."""

    role: Literal["graph", "constants", "tokenizer"]
    name: str
    digest: str
    size: int


class Manifest(Wire, frozen=True):
    """The bundle's typed root. `ops` are the versions of all ops that the graph uses."""

    format: tuple[int, int]
    model: ModelInfo
    ops: dict[str, int]
    checkpoint: Checkpoint
    passes: tuple[PassRecord, ...]
    built_with: dict[str, str]
    blobs: tuple[Blob, ...]
