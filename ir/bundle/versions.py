"""Versions of the format: which are read, how old ones become the current one, and which bump a change needs.

A *minor* version adds what older readers refuse and changes nothing of what was: every file of (1, 0) decodes under
the structs of (1, 3), to the same meaning. A *major* version changes or removes; its structs stay here as code,
frozen, with two pure functions that turn its graph and its manifest into those of the next (`docs/versioning.md`).

The snapshot is the schema as data. The one in `tests/ir` was taken when the version was made; `changes` compares it
with the code and says which bump, if any, the difference needs.
"""

from __future__ import annotations

import json
import sys
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from precast.ir import limits
from precast.ir.errors import BundleError
from precast.ir.graph.schema import Graph, Wire
from precast.ir.manifest import Manifest
from precast.ir.ops import table as ops

FORMAT: tuple[int, int] = (1, 1)
"""The version that is written."""

Bump = Literal["none", "op", "minor", "major"]

# Not of the format: what messages list, and what a checkpoint may hold.
_LIMITS = frozenset(name for name in vars(limits) if name.startswith("MAX_")) - {
    "MAX_LISTED",
    "MAX_CONFIG_BYTES",
    "MAX_CHECKPOINT_INDEX_BYTES",
}


class Era(msgspec.Struct, frozen=True):
    """One major version: its last minor version, its structs, and the way to the next, which the newest lacks."""

    minor: int
    graph: type
    manifest: type
    next_graph: Callable[[Any], Any] | None = None
    next_manifest: Callable[[Any], Any] | None = None


ERAS: Mapping[int, Era] = types.MappingProxyType({FORMAT[0]: Era(FORMAT[1], Graph, Manifest)})
"""All major versions that are read."""


def era(format: tuple[int, int], eras: Mapping[int, Era] = ERAS) -> Era:
    """The structs that a bundle of this format is decoded with.

    Raises BundleError: `format-newer` or `format-unknown`.
    """
    major, minor = format
    newest = max(eras)
    found = eras.get(major)
    if major > newest or (found is not None and minor > found.minor):
        known = f"{newest}.{eras[newest].minor}"
        message = f"the bundle has format {major}.{minor}; this Precast reads formats up to {known}"
        raise BundleError("format-newer", message, fix="upgrade Precast, or build the bundle with this version")
    if found is None or minor < 0:
        known = ", ".join(f"{major}.0 to {major}.{eras[major].minor}" for major in sorted(eras))
        message = f"the bundle has format {major}.{minor}; this Precast reads formats {known}"
        raise BundleError("format-unknown", message, fix="build the bundle again")
    return found


def upgrade_graph(graph: Any, format: tuple[int, int], eras: Mapping[int, Era] = ERAS) -> Any:
    """`graph`, decoded as one of this format, as one of the newest."""
    major = format[0]
    while (step := eras[major].next_graph) is not None:
        graph, major = step(graph), major + 1
    return graph


def upgrade_manifest(manifest: Any, format: tuple[int, int], eras: Mapping[int, Era] = ERAS) -> Any:
    """`manifest`, decoded as one of this format, as one of the newest; `format` stays what the bundle says."""
    major = format[0]
    while (step := eras[major].next_manifest) is not None:
        manifest, major = step(manifest), major + 1
    return manifest


# --- the schema as data ----------------------------------------------------------------------------------------


def snapshot() -> dict[str, Any]:
    """The schema and the op table as plain data: what `tests/ir/schema_v1.json` holds."""
    return {
        "format": list(FORMAT),
        "structs": structs(Graph, Manifest),
        "ops": {f"{name}@{version}": ops.signature(name, version) for name, version in ops.names()},
        "limits": {name: value for name, value in sorted(vars(limits).items()) if name in _LIMITS},
    }


def structs(*roots: type) -> dict[str, Any]:
    """Every wire struct that `roots` lead to: its tag and its fields with their types and defaults."""
    found: dict[str, Any] = {}
    pending: list[Any] = list(roots)
    while pending:
        cls = pending.pop()
        if cls.__name__ in found:
            continue
        hints = typing.get_type_hints(cls)
        fields = {}
        for field in msgspec.structs.fields(cls):
            fields[field.encode_name] = {"type": _describe(hints[field.name], pending)} | _default(field)
        found[cls.__name__] = {"tag": cls.__struct_config__.tag, "fields": fields}
    return dict(sorted(found.items()))


def _default(field: msgspec.structs.FieldInfo) -> dict[str, Any]:
    default = field.default
    if default is msgspec.NODEFAULT:
        if field.default_factory is msgspec.NODEFAULT:
            return {}
        default = field.default_factory()
    return {"default": json.loads(msgspec.json.encode(default))}


def _describe(hint: Any, pending: list[Any]) -> Any:
    """A type as data: a name, or `[constructor, parts...]` with unordered parts sorted. Structs go to `pending`."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return ["union", *sorted((_describe(arg, pending) for arg in args), key=str)]
    if origin is typing.Literal:
        return ["literal", *sorted(args)]
    if origin is tuple and args[-1] is Ellipsis:
        return ["list", _describe(args[0], pending)]
    if origin in (tuple, dict):
        return [origin.__name__, *(_describe(arg, pending) for arg in args)]
    if hint in (None, type(None)):
        return "null"
    if isinstance(hint, type) and issubclass(hint, Wire):
        pending.append(hint)
    return hint.__name__


# --- which bump a change needs ---------------------------------------------------------------------------------


class Change(msgspec.Struct, frozen=True):
    """One difference between two snapshots and the bump it needs; `op`: a new version of that op."""

    bump: Bump
    where: str
    what: str


_FROM_LARGEST: tuple[Bump, ...] = ("major", "minor", "op")


def required_bump(found: list[Change]) -> Bump:
    """The largest bump among the changes."""
    present = {change.bump for change in found}
    for bump in _FROM_LARGEST:
        if bump in present:
            return bump
    return "none"


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """What differs between two snapshots."""
    found = []
    for name in sorted({*old["structs"], *new["structs"]}):
        if name not in new["structs"]:
            found.append(Change("major", name, "struct removed"))
        elif name not in old["structs"]:
            found.append(Change("minor", name, "struct added"))
        else:
            found += _struct_changes(name, old["structs"][name], new["structs"][name])
    for name in sorted({*old["ops"], *new["ops"]}):
        if name not in new["ops"]:
            found.append(Change("major", name, "op version removed"))
        elif name not in old["ops"]:
            # Bundles name the versions of their ops, so readers without this one refuse it by name.
            found.append(Change("none", name, "op version added"))
        elif old["ops"][name] != new["ops"][name]:
            found.append(Change("op", name, f"signature {old['ops'][name]} became {new['ops'][name]}"))
    for name in sorted({*old["limits"]} & {*new["limits"]}):
        if new["limits"][name] < old["limits"][name]:
            found.append(Change("major", name, f"limit lowered from {old['limits'][name]} to {new['limits'][name]}"))
    return found


def _struct_changes(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    found = []
    if old["tag"] != new["tag"]:
        found.append(Change("major", name, f"tag {old['tag']!r} became {new['tag']!r}"))
    for field in sorted({*old["fields"], *new["fields"]}):
        where = f"{name}.{field}"
        before, after = old["fields"].get(field), new["fields"].get(field)
        if after is None:
            found.append(Change("major", where, "field removed"))
        elif before is None:
            optional = "default" in after
            what = "optional field added" if optional else "field without a default added"
            found.append(Change("minor" if optional else "major", where, what))
        else:
            if before["type"] != after["type"]:
                bump: Bump = "minor" if _widens(before["type"], after["type"]) else "major"
                found.append(Change(bump, where, f"type {before['type']} became {after['type']}"))
            if before.get("default", ...) != after.get("default", ...):
                found.append(Change("major", where, "default changed"))
    return found


def _widens(old: Any, new: Any) -> bool:
    """Whether every value of the type `old` is one of `new`, with the same encoding and meaning."""
    if old == new:
        return True
    if isinstance(new, list) and new[0] == "union":
        members = old[1:] if isinstance(old, list) and old[0] == "union" else [old]
        return all(any(_widens(member, other) for other in new[1:]) for member in members)
    if not (isinstance(old, list) and isinstance(new, list) and old[0] == new[0]):
        return False
    if old[0] == "literal":
        return set(old[1:]) <= set(new[1:])
    if old[0] == "union":
        return False
    return len(old) == len(new) and all(_widens(a, b) for a, b in zip(old[1:], new[1:], strict=True))


if __name__ == "__main__":
    sys.stdout.write(json.dumps(snapshot(), indent=1) + "\n")
