"""The language of a bundle: frozen structs, nothing else.

Every struct here is wire format: adding, removing or renaming a field changes `tests/ir/schema_v1.json` and needs a new
version of the format (`docs/versioning.md`). What is done with graphs (evaluation, inference, printing) stands in the
modules beside this one. The manifest's structs are in `precast.ir.manifest`.

Words: a *graph* is the program; a *block* is a function of it, stored once and called once per layer; a *node* is one
operation; a *value* is a typed result; a *param* is made from checkpoint tensors by its *recipe*; a *slot* is one
layer's place in a cache *group*; a group's pages live in a *pool*.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Dtype = Literal["bool", "int8", "uint8", "int32", "int64", "float8_e4m3fn", "float16", "bfloat16", "float32", "float64"]
ReadDtype = Literal[Dtype, "float8_e8m0fnu"]
"""The element types that a tensor of a checkpoint is read as. float8_e8m0fnu are exponents, of scales: they become
floating-point numbers while they are read, and no value of a graph is of this type."""
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


class Step(Wire, frozen=True):
    """One step of a fused op: an op of the op table at version 1, with its arguments by name.

    A `Ref` names an operand of the fused op (`x0`), or what an earlier step makes (`s0`).
    """

    op: str
    args: dict[str, Ref | Const | DtypeArg | Items]


class Steps(Wire, frozen=True, tag="s", tag_field="k"):
    """The body of a fused op as data: its steps in order, which make `s0`, `s1`, ..., and the names that it returns."""

    steps: tuple[Step, ...]
    results: tuple[str, ...]


Arg = Ref | Const | Dim | DtypeArg | Items | Steps


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
    """The checkpoint tensor of this name, whole, of this shape; `dtype` None: any floating type.

    float8_e8m0fnu: exponents, which some checkpoints store as uint8.
    """

    tensor: str
    shape: tuple[int, ...]
    dtype: ReadDtype | None = None


class Slice(Wire, frozen=True, tag="slice", tag_field="k"):
    """Elements `start .. start + length` of dimension `dim`."""

    of: Recipe
    dim: int
    start: Expr
    length: Expr


class Concat(Wire, frozen=True, tag="concat", tag_field="k"):
    """The parts one after the other, along the existing dimension `dim`."""

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


class Each(Wire, frozen=True, tag="each", tag_field="k"):
    """`of` once for each number `start .. start + count`, along a new dimension `dim`.

    Each `*` in a name that `of` reads stands for the number: the experts of a layer are one `Each`, not hundreds of
    parts. There is no `Each` inside another.
    """

    of: Recipe
    dim: int
    count: int
    start: int = 0


class Dequantise(Wire, frozen=True, tag="dequantise", tag_field="k"):
    """The float32 values that `of` holds in few bits, by the formula of `format` (`docs/format/v1.md`, Recipes).

    `fp8`: `of [.., r, c]` times `scales [.., r / block[0], c / block[1]]`. `mxfp4`: `of [.., g, b]`, two values a byte,
    times two to the power of `scales [.., g]`. `awq` and `gptq`: int32 with eight values each, `[i, o / 8]` and
    `[i / 8, o]`, minus `zeros`, times `scales [g, o]`; `groups [i]` (`gptq`) gives the row of `scales` of each input,
    and without them groups are of neighbours, in order.
    `zero_offset` is added to what `zeros` holds, or is all that is subtracted. `nvfp4`: `of [.., r, c / 2]`, two values
    a byte, times `scales [.., r, c / 16]` and `global_scale [.., 1, 1]`, by which `nvfp4_divided` divides the scales.
    `packed4` and `packed8`: n = 8 or 4 values in each int32, `[o, i / n]`, `scales [o, g]`, `zeros [o / n, g]`, and
    `biases [o, g]`, which are added last, where there are no `groups`. `int8`: as `fp8`, minus `zeros`, if there are
    some.
    """

    of: Recipe
    scales: Recipe
    format: Literal["fp8", "mxfp4", "awq", "gptq", "nvfp4", "nvfp4_divided", "packed4", "packed8", "int8"]
    block: tuple[int, int] | None = None
    zeros: Recipe | None = None
    groups: Recipe | None = None
    zero_offset: int = 0
    global_scale: Recipe | None = None
    biases: Recipe | None = None


class Quantise(Wire, frozen=True, tag="quantise", tag_field="k"):
    """One of the parts of an `fp8` that matrices of any floating type become while they are read.

    `values`: float8_e4m3fn, of the shape of `of` [.., R, C]; `scales`: float32 [.., ceil(R / block[0]), ceil(C /
    block[1])], the largest magnitude of each block over 448 (`docs/format/v1.md`, Recipes).
    """

    of: Recipe
    part: Literal["values", "scales"]
    block: tuple[int, int]


class Repeat(Wire, frozen=True, tag="repeat", tag_field="k"):
    """Each element of dimension `dim` `count` times in a row: one scale of a matrix as one for each of its rows."""

    of: Recipe
    dim: int
    count: Expr


class Repack(Wire, frozen=True, tag="repack", tag_field="k"):
    """Words of a read of int32 as `packed4` has them: the same values of four bits.

    `values`: those of `awq`, [I, O / 8] as [O, I / 8], of eight inputs each; `zeros`: those of `awq`, [G, O / 8] as
    [O / 8, G], of eight outputs each, in order. `groups`: zeros of which eight groups of an output have a word, in
    order, [O, W] as [O / 8, 8 W], of eight outputs each.
    """

    of: Recipe
    part: Literal["values", "zeros", "groups"]


class Tie(Wire, frozen=True, tag="tie", tag_field="k"):
    """The same memory as another param of the graph."""

    param: str


class Scale(Wire, frozen=True, tag="scale", tag_field="k"):
    """A float32 number above 0, `[1]`, by which cached keys or values are divided. A recipe of its own, never a part.

    It is the one number of the first of these tensors that the checkpoint has; `default` where it has none of any
    scale of the graph.
    """

    tensors: tuple[str, ...]
    default: float = 1.0


Recipe = (
    Read | Slice | Concat | Stack | Transpose | Reshape | Cast | Each | Dequantise | Quantise | Repeat | Repack | Tie
    | Scale
)  # fmt: skip


class Param(Wire, frozen=True):
    """A parameter of the graph: its name, type, and how it is made."""

    name: str
    type: TensorType
    recipe: Recipe


# --- caches ----------------------------------------------------------------------------------------------------


class PagedSpec(Wire, frozen=True, tag="paged", tag_field="k"):
    """Geometry of a paged key/value cache. `window` None: full attention; else the keys a query may see.

    With a `chunk`, and no window, a query at position i sees the keys from position `i // chunk * chunk` on.
    """

    num_kv_heads: Expr
    head_size: int
    value_size: int
    dtype: Dtype
    page_size: int
    window: int | None = None
    chunk: int | None = None


class LatentSpec(Wire, frozen=True, tag="latent", tag_field="k"):
    """Geometry of a paged cache of latents, which all heads share. `window` None: full attention."""

    latent_size: int
    rope_size: int
    dtype: Dtype
    page_size: int
    window: int | None = None


class IndexSpec(Wire, frozen=True, tag="index", tag_field="k"):
    """Geometry of a paged cache of the keys by which sparse attention selects: one of `key_size` elements a token."""

    key_size: int
    dtype: Dtype
    page_size: int


class EntrySpec(Wire, frozen=True, tag="entries", tag_field="k"):
    """Geometry of a paged cache of entries, which all heads share: one of `entry_size` elements for each block of
    `rate` tokens. A page holds whole blocks. `window` None: all entries are seen; a window is for a rate of 1 alone."""

    entry_size: int
    dtype: Dtype
    page_size: int
    rate: int = 1
    window: int | None = None


class StateSpec(Wire, frozen=True, tag="state", tag_field="k"):
    """Geometry of a state that a sequence keeps as a whole: a recurrent `state`, or the last inputs of a `conv`.

    `shape` is that of one sequence.
    """

    kind: Literal["state", "conv"]
    shape: tuple[Expr, ...]
    dtype: Dtype


CacheSpec = PagedSpec | LatentSpec | IndexSpec | EntrySpec | StateSpec


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
    spec: PagedSpec | LatentSpec | IndexSpec | EntrySpec
    inputs: PagedInputs
    slots: tuple[Slot, ...]


class StateGroup(Wire, frozen=True):
    """Layers whose states are of equal spec. A page of the pool holds a sequence's state in each of these layers; the
    input `slot_ids` says which page each sequence has."""

    name: str
    pool: str
    spec: StateSpec
    slot_ids: str
    slots: tuple[Slot, ...]


CacheGroup = Group | StateGroup


class Pool(Wire, frozen=True):
    """Memory for the pages of one group. `pages` is the symbol that counts them; a slab holds `pages_per_slab`.

    In plans without slabs, groups whose pages have the same geometry may share a pool.
    """

    name: str
    pages: str
    pages_per_slab: int = 1


class CachePlan(Wire, frozen=True):
    """What caches there are: the graph's metadata inputs and the loader's allocations both follow from it alone.

    All cache memory is one arena of slabs of `slab_bytes`, which pools draw and give back; 0: the loader chooses.
    """

    pools: tuple[Pool, ...] = ()
    groups: tuple[Group, ...] = ()
    states: tuple[StateGroup, ...] = ()
    slab_bytes: int = 0


# --- steps as graphs -------------------------------------------------------------------------------------------


class CapturePlan(Wire, frozen=True):
    """The sizes of steps that are captured as CUDA graphs: tokens, in the order in which they are wanted.

    None: the loader plans them.
    """

    sizes: tuple[int, ...] = ()


# --- worlds of several ranks -----------------------------------------------------------------------------------


class World(Wire, frozen=True):
    """A number of ranks that can share each layer; and into how many parts they can split the experts."""

    tp: int
    ep: tuple[int, ...] = (1,)


class ShardRow(Wire, frozen=True):
    """How a layer, or a part of one, is split over the ranks of a world.

    `kind` is the layer's: `attention`, `experts`. `block` is where it stands, empty for `main`, and `params` are its
    params there. `column`: each rank makes some of the results; `row`: each sums over some of the inputs, and `nodes`
    are the results that `collective` puts together over `group`; `vocab`: each has some of the tokens' rows; `expert`:
    some of the experts; `replicated`: all have all, for the `reason`. `units` can't be split further.
    """

    kind: str
    block: str
    mode: Literal["column", "row", "vocab", "expert", "replicated"]
    params: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    units: int = 0
    collective: Literal["", "all_reduce", "all_gather"] = ""
    group: str = ""
    reason: str = ""


Choice = Literal["replicate", "split", "column", "row", "vocab", "expert"]


class ShardOverride(Wire, frozen=True):
    """What the user said of params whose names begin with `pattern`: that they stay whole (`replicate`), or how the
    plan had to split them."""

    pattern: str
    choice: Choice


class Pipeline(Wire, frozen=True):
    """A way to divide the layers over stages, each of ranks of its own: how many calls of `main` each stage has."""

    layers: tuple[int, ...]


class ShardPlan(Wire, frozen=True):
    """Over how many ranks the graph can be split, and how. No worlds: the graph is that of one rank.

    `pipelines` has at most one way for each number of stages, from two on.
    """

    worlds: tuple[World, ...] = ()
    rows: tuple[ShardRow, ...] = ()
    overrides: tuple[ShardOverride, ...] = ()
    pipelines: tuple[Pipeline, ...] = ()


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
    capture: CapturePlan = CapturePlan()
    shards: ShardPlan = ShardPlan()
