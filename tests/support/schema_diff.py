"""The schema as data, and which bump of the version a change of it needs (`docs/versioning.md`).

    python tests/support/schema_diff.py > tests/ir/schema_v1.json

takes the snapshot. A test compares the one that was taken when the version was made with the code.
"""

from __future__ import annotations

import json
import sys
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from precast.ir import limits
from precast.ir.encoding import FORMAT
from precast.ir.graph.schema import Graph, Wire
from precast.ir.manifest import Manifest
from precast.ir.native import NativeLayer
from precast.ir.ops import table as ops

Bump = Literal["none", "op", "minor", "major"]

# Not of the format: what messages list, what a checkpoint may hold, and how long is waited.
_LIMITS = frozenset(name for name in vars(limits) if name.startswith("MAX_")) - {
    "MAX_LISTED",
    "MAX_CONFIG_BYTES",
    "MAX_CHECKPOINT_INDEX_BYTES",
    "MAX_SECONDS",
}


def snapshot() -> dict[str, Any]:
    """The schema and the op table as plain data: what `tests/ir/schema_v1.json` holds."""
    return {
        "format": list(FORMAT),
        "structs": structs(Graph, Manifest, NativeLayer),
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
