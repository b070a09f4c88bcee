"""The bundle's typed root, and its parts. As in `precast.ir.graph.schema`, every struct is wire format."""

from __future__ import annotations

from typing import Literal

import msgspec

from precast.ir.graph.schema import Dtype, Wire


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
    delta: dict[str, int] = msgspec.field(default_factory=dict)


class Checkpoint(Wire, frozen=True):
    """How tensor names of a checkpoint are read, beyond the recipes.

    `optional_prefixes` may be missing from, or stand before, every name of the checkpoint (GPT-2's `transformer.`).
    `ignored` are patterns of names of tensors that some checkpoints have and no model uses; `*` stands for any run
    of characters, all else for itself. `tied` maps a second name of a tensor to the name that recipes read: a
    checkpoint holds either of them, or both with equal content. `unused` are patterns of tensors that belong to the
    model but not to its graph: the vision tower of a model whose text decoder was built. A name that begins with a
    key of `prefixes` may begin with its value instead. One that ends with a key of `endings` may end with its value
    instead, and under either name the tensor may have dimensions of size 1 more or fewer. `groups_in_order` are
    patterns of tensors, int32 `[inputs]`, that say of which group each input is, and how many inputs a group has
    (0: all are one group). Where groups are of neighbours, in order, no recipe reads them; a checkpoint in which
    they say something else is refused. `zeros` are patterns of tensors, floating point `[n]`, that are all 0 and
    that the model has not, and their n (0: any).
    """

    optional_prefixes: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    tied: dict[str, str] = msgspec.field(default_factory=dict)
    unused: tuple[str, ...] = ()
    prefixes: dict[str, str] = msgspec.field(default_factory=dict)
    groups_in_order: dict[str, int] = msgspec.field(default_factory=dict)
    zeros: dict[str, int] = msgspec.field(default_factory=dict)
    endings: dict[str, str] = msgspec.field(default_factory=dict)


Scalar = bool | int | float | str | None
Fact = Scalar | tuple[Scalar, ...]
"""The value of a config's entry. Floats that JSON cannot write are the strings `Infinity`, `-Infinity`, `NaN`."""


class ConfigFacts(Wire, frozen=True):
    """What the config says that the model was traced with (`docs/format/v1.md`, Config facts).

    `values` are the decoder's entries by name, those of nested objects joined with dots. `same` are other values of an
    entry that mean the same. `absent` is what leaving out an entry means, `absent_objects` what leaving out the whole
    object that it stands in means, each where that is another value. `spellings` are other names of entries, or of
    objects of entries. `part` is the way to the decoder in the config of a larger model.
    """

    values: dict[str, Fact]
    same: dict[str, tuple[Fact, ...]] = msgspec.field(default_factory=dict)
    absent: dict[str, Fact] = msgspec.field(default_factory=dict)
    absent_objects: dict[str, Fact] = msgspec.field(default_factory=dict)
    spellings: dict[str, tuple[str, ...]] = msgspec.field(default_factory=dict)
    part: tuple[str, ...] = ()


Role = Literal["graph", "constants", "tokenizer", "native"]


class Blob(Wire, frozen=True):
    """A file in the bundle: what it is for (`role`), under which name, its digest and size."""

    role: Role
    name: str
    digest: str
    size: int


class Manifest(Wire, frozen=True):
    """The bundle's typed root. `ops` are the versions of all ops that the graph uses.

    `checked`: the build compared the model, made tiny, with the implementation that it was built from. `config`: what
    the build read, to be compared with the config of a checkpoint; None in bundles of format 1.0.
    """

    format: tuple[int, int]
    model: ModelInfo
    ops: dict[str, int]
    checkpoint: Checkpoint
    passes: tuple[PassRecord, ...]
    built_with: dict[str, str]
    blobs: tuple[Blob, ...]
    checked: bool = False
    config: ConfigFacts | None = None
