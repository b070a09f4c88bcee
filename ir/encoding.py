"""The graph and the manifest to bytes and back: written in the newest version of the format, read in all known ones."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

import msgspec

from precast.ir import limits, native
from precast.ir.bundle import codec, versions
from precast.ir.bundle.scan import NATIVE_CAPS
from precast.ir.bundle.versions import Era
from precast.ir.graph.schema import Graph
from precast.ir.manifest import Manifest
from precast.ir.native import NativeLayer

FORMAT: tuple[int, int] = (1, 1)
"""The version that is written."""

ERAS: Mapping[int, Era] = types.MappingProxyType({FORMAT[0]: Era(FORMAT[1], Graph, Manifest)})
"""All major versions that are read."""


class _Versioned(msgspec.Struct):
    """The one field of a manifest that every version has."""

    format: tuple[int, int]


def encode_graph(graph: Graph) -> bytes:
    """The graph's blob. Raises BundleError for a graph that has no valid encoding (`codec.encode_packed`)."""
    return codec.encode_packed(graph, "graph")


def decode_graph(data: bytes, format: tuple[int, int] = FORMAT) -> Graph:
    """The graph in a blob of a bundle of this format, as a graph of the current one.

    Raises BundleError: `graph-compression`, `graph-encoding`, `graph-not-canonical`, `graph-nesting`,
    `limit-exceeded`, `format-newer` or `format-unknown`.
    """
    era = versions.era(format, ERAS)
    old: Any = codec.decode_packed(data, era.graph, "graph")
    graph: Graph = versions.upgrade(old, "graph", format, ERAS)
    return graph


def encode_native(layer: NativeLayer) -> bytes:
    """The blob of a native layer. Raises BundleError for one that `decode_native` would refuse."""
    native.check(layer)
    return codec.encode_packed(layer, "native", NATIVE_CAPS)


def decode_native(data: bytes) -> NativeLayer:
    """The native layer in a blob, checked by its rules. Nothing in it is run or loaded.

    Raises BundleError: `native-compression`, `native-encoding`, `native-not-canonical`, `native-nesting`,
    `native-invalid` or `limit-exceeded`.
    """
    layer = codec.decode_packed(data, NativeLayer, "native", NATIVE_CAPS)
    native.check(layer)
    return layer


def encode_manifest(manifest: Manifest) -> bytes:
    """The manifest as canonical JSON."""
    return codec.encode_json(manifest)


def decode_manifest(data: bytes) -> Manifest:
    """The manifest in the bundle's config blob, of any version that is read, as one of the current version.

    Its `format` stays what the bundle says. Raises BundleError: `format-newer`, `format-unknown`, `json-invalid`,
    `json-duplicate-key`, `json-not-canonical` or `limit-exceeded`.
    """
    # The version comes first: fields of a newer one must be reported as that, not as unknown.
    format = codec.peek_json(data, _Versioned, "manifest", limits.MAX_JSON_BYTES).format
    era = versions.era(format, ERAS)
    old: Any = codec.decode_json(data, era.manifest, "manifest")
    manifest: Manifest = versions.upgrade(old, "manifest", format, ERAS)
    return manifest
