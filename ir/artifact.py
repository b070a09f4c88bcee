"""A bundle: opened, it is checked completely; written, it is complete or not there.

`precast.ir.bundle` reads and writes the bytes, `precast.ir.encoding` says what they mean. Here the parts are held
against each other: the manifest's list of blobs against the layers, its ops and the constants against the graph, and
the graph against the rules.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from precast.ir import encoding, limits
from precast.ir.bundle import attached as attachments
from precast.ir.bundle import codec, oci
from precast.ir.bundle.attached import Attached
from precast.ir.bundle.layout import (
    Contents,
    Layer,
    check_file_name,
    compose_index,
    is_bundle,
    read_layer,
    read_layout,
    read_shared,
    survey,
)
from precast.ir.errors import BuildError, BundleError, some
from precast.ir.graph.schema import Graph, Node, Steps
from precast.ir.manifest import Blob, Manifest, Role
from precast.ir.native import NativeLayer
from precast.ir.ops import table as ops
from precast.ir.verify import extent
from precast.ir.verify.verifier import check
from precast.ir.weights import tensorfile
from precast.ir.weights.tensorfile import Tensor, TensorFileError

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://")
_ROLES: dict[str, Role] = {
    oci.GRAPH: "graph",
    oci.CONSTANTS: "constants",
    oci.TOKENIZER: "tokenizer",
    oci.NATIVE: "native",
}


class Bundle(msgspec.Struct, frozen=True, eq=False):
    """An opened bundle: all of it has been held against its digests, and all but the native layers decoded and checked.

    `digest` is the image manifest's: the bundle's identity. `constants` maps names to (dtype, shape, content).
    `provenance` says who made it, when and where; it is outside of the identity and may be empty. So is `attached`:
    the manifests that others attached (signatures, attestations), and that of the provenance record. `native` has the
    native layers by target: code, of which nothing is run or loaded here. Each is read and decoded when it is looked
    up, which raises BundleError for one that is no valid layer, or is not there any more. `held` has the contents of
    the other layers by digest.
    """

    path: Path
    digest: str
    manifest: Manifest
    graph: Graph
    constants: dict[str, Tensor]
    provenance: dict[str, Any]
    layers: tuple[Layer, ...]
    held: Mapping[str, bytes]
    descriptor: oci.Descriptor
    attached: tuple[Attached, ...] = ()
    native: Mapping[str, NativeLayer] = {}

    @staticmethod
    def open(path: str | os.PathLike[str]) -> Bundle:
        """Read and check the bundle at `path`, or at an address such as `oci://ghcr.io/org/name@sha256:...`.

        An address is opened by what is installed for its scheme (the entry points of `precast.addresses`), and raises
        what that raises. Otherwise raises BundleError with the code of the first thing that is wrong: its form, sizes,
        digests, version, encoding, and the rules of the graph, in this order.
        """
        _check_is_path(path)
        if isinstance(path, str) and (scheme := _SCHEME.match(path)):
            return _open_address(scheme[1], path)
        contents = read_layout(Path(path))
        try:
            return _decode(Path(path), contents)
        except BundleError as error:
            raise error.inside(str(path)) from None

    @staticmethod
    def open_shared(path: str | os.PathLike[str], index: bytes) -> Bundle:
        """The bundle that `index` (the content of an `index.json`) lists, in a directory of many bundles' blobs.

        Raises BundleError, as `open` does.
        """
        contents = read_shared(Path(path), index)
        try:
            return _decode(Path(path), contents)
        except BundleError as error:
            raise error.inside(str(path)) from None

    def files(self, role: str) -> dict[str, bytes]:
        """The contents of all files of this role (`graph`, `constants`, `tokenizer`, `native`) by name."""
        return {layer.name: self.content(layer) for layer in self.layers if _ROLES[layer.media_type] == role}

    def content(self, layer: Layer) -> bytes:
        """The bytes of one of the bundle's layers; those of a native layer are read now, and held against its digest.

        Raises BundleError.
        """
        held = self.held.get(layer.digest)
        return read_layer(self.path, layer) if held is None else held

    @staticmethod
    def open_whole(path: str | os.PathLike[str]) -> Bundle:
        """The bundle, opened, of which the native layers were decoded too, one at a time. Raises as `open` does."""
        found = Bundle.open(path)
        found.check_native()
        return found

    def check_native(self) -> None:
        """Decode each native layer, and keep none. Raises BundleError: `native-*` or `limit-exceeded`."""
        for target in self.native:
            self.native[target]

    def native_digest(self, target: str) -> str:
        """The digest of the native layer for a target that has one: what `--allow-native` takes, and signers name."""
        (found,) = (x.digest for x in self.layers if (x.media_type, x.name) == (oci.NATIVE, target))
        return found


def write_bundle(
    path: str | os.PathLike[str],
    *,
    manifest_without_blobs: Manifest,
    graph: Graph,
    constants: Mapping[str, Tensor],
    files: Mapping[str, bytes],
    provenance: Mapping[str, object],
    native: Sequence[NativeLayer] = (),
) -> Bundle:
    """Write a bundle to `path`, all or nothing, and return it opened.

    `constants` maps names to (dtype, shape, bytes-like), `files` names to tokenizer files. The digest depends on the
    manifest, the graph, the constants, the files and the native layers alone; clocks, paths and host names belong in
    `provenance`. A bundle at `path` is replaced; anything else there is left alone.

    Raises BundleError for contents that `Bundle.open` would refuse, and BuildError: `build-in-progress`,
    `output-not-a-bundle`, `disk-full` or `write-failed`.
    """
    # Here, because readers need neither it nor what it imports.
    from precast.ir.bundle.publish import publish

    content = _layout(manifest_without_blobs, graph, constants, files, provenance, native)
    return _at(publish(Path(path), content, may_replace=is_bundle, check=Bundle.open), Path(path))


def check_output(path: str | os.PathLike[str]) -> None:
    """Raise BuildError for a path that `write_bundle` would not write to, before the work for it is done."""
    from precast.ir.bundle.publish import check_place

    check_place(Path(path), is_bundle)


def attach(path: str | os.PathLike[str], *attached: Attached, replacing: Collection[str] = ()) -> Bundle:
    """Attach manifests to the bundle at `path`, which is replaced in one step; its digest stays what it was.

    `Bundle.descriptor` and `precast.ir.bundle.attached.compose` make a manifest. One that is attached already stays as
    it is; a provenance record takes the place of the one that is there, and they all that of those with the digests
    `replacing`. Returns the bundle, opened.

    Raises BundleError for a bundle that is refused, or that would be with these (`index-invalid`: another bundle's;
    `limit-exceeded`), and BuildError as `write_bundle` does, also where another process attaches at the same time
    (`build-in-progress`).
    """
    contents = read_layout(Path(path))
    has_record = any(extra.artifact_type == oci.PROVENANCE for extra in attached)
    kept = [
        extra
        for extra in contents.attached
        if extra.digest not in replacing and not (has_record and extra.artifact_type == oci.PROVENANCE)
    ]
    return _replace_attached(Path(path), contents, {extra.digest: extra for extra in (*kept, *attached)})


def detach(path: str | os.PathLike[str], *digests: str) -> Bundle:
    """Remove manifests that are attached to the bundle at `path`, by digest; those that aren't there are passed over.

    Raises what `attach` does.
    """
    contents = read_layout(Path(path))
    kept = {extra.digest: extra for extra in contents.attached if extra.digest not in digests}
    return _replace_attached(Path(path), contents, kept)


def _replace_attached(path: Path, contents: Contents, attached: Mapping[str, Attached]) -> Bundle:
    """Write the bundle anew with these manifests attached. The blobs of the bundle itself are copied as files."""
    from precast.ir.bundle.publish import publish

    if tuple(attached.values()) == contents.attached:
        return Bundle.open(path)
    attachments.check_together([attachments.decode(extra.manifest) for extra in attached.values()])
    image = attachments.decode(contents.image)
    digests = [contents.descriptor.digest, *(part.digest for part in image.parts)]
    content: dict[str, bytes | Path] = {oci.blob_path(digest): path / oci.blob_path(digest) for digest in digests}
    for extra in attached.values():
        content |= {oci.blob_path(digest): data for digest, data in extra.blobs().items()}
    content[oci.INDEX_FILE] = compose_index(contents.descriptor, tuple(attached.values()))
    content[oci.LAYOUT_FILE] = oci.MARKER

    def check(made: Path) -> Bundle:
        """The new bundle, opened; called while nobody else may write to `path`."""
        now = survey(path)
        if (now.descriptor, now.attached) != (contents.descriptor, contents.attached):
            message, fix = "another process has changed the bundle since it was read", "try again: nothing was written"
            raise BuildError("build-in-progress", message, where=str(path), fix=fix)
        return Bundle.open(made)

    return _at(publish(path, content, may_replace=is_bundle, check=check), path)


def _at(bundle: Bundle, path: Path) -> Bundle:
    """The bundle, which was opened before it was put in its place."""
    return msgspec.structs.replace(bundle, path=path, native=_NativeLayers(path, bundle.layers))


def ops_of(graph: Graph) -> dict[str, int]:
    """The version of each op that the graph uses, in steps of fused ops too, for `Manifest.ops`.

    Raises BundleError (`manifest-invalid`) for a graph that uses two versions of one op.
    """
    found: dict[str, int] = {}
    steps = [*(node for block in graph.blocks for node in block.nodes), *graph.main]
    nodes = [step for step in steps if isinstance(step, Node)]
    bodies = [arg for node in nodes for arg in node.args.values() if isinstance(arg, Steps)]
    used = [*((node.op, node.version) for node in nodes), *((step.op, 1) for body in bodies for step in body.steps)]
    for op, version in used:
        if found.setdefault(op, version) != version:
            raise BundleError("manifest-invalid", f"graph: {op} is used in versions {found[op]}, {version}")
    return dict(sorted(found.items()))


def _open_address(scheme: str, address: str) -> Bundle:
    """The bundle at an address, by the entry point of its scheme: the format knows of no place to get bundles from."""
    from importlib.metadata import entry_points

    for found in entry_points(group="precast.addresses", name=scheme):
        bundle: Bundle = found.load()(address)
        return bundle
    fix = "name a directory, or an address with oci:// before it"
    raise BundleError("bundle-missing", f"nothing is installed that opens {scheme}://", where=address[:300], fix=fix)


# --- reading ---------------------------------------------------------------------------------------------------


def _decode(path: Path, contents: Contents) -> Bundle:
    manifest = encoding.decode_manifest(contents.config)
    _check_manifest(manifest, contents.layers)
    _check_ops_known(manifest)
    graph_data, constants_data = (contents.held[layer.digest] for layer in contents.layers[:2])
    graph = encoding.decode_graph(graph_data, manifest.format)
    extent.check(graph)
    if ops_of(graph) != manifest.ops:
        raise BundleError("manifest-invalid", "manifest: its ops are not those that the graph uses")
    check(graph, manifest.model)
    constants = _decode_constants(constants_data)
    _check_constants(graph, constants)
    provenance: dict[str, Any] = {}
    if contents.provenance is not None:
        provenance = codec.decode_json(contents.provenance, dict[str, Any], "provenance")
    return Bundle(
        path, contents.descriptor.digest, manifest, graph, constants, provenance, contents.layers, contents.held,
        contents.descriptor, contents.attached, _NativeLayers(path, contents.layers),
    )  # fmt: skip


class _NativeLayers(Mapping[str, NativeLayer]):
    """The native layers of a bundle at `path` by target, each read and decoded when it is looked up."""

    def __init__(self, path: Path, layers: tuple[Layer, ...]) -> None:
        self._path = path
        self._layers = {layer.name: layer for layer in layers if layer.media_type == oci.NATIVE}

    def __getitem__(self, target: str) -> NativeLayer:
        found = encoding.decode_native(read_layer(self._path, self._layers[target]))
        if found.target != target:
            raise BundleError("native-invalid", f"the native layer {target} says that it is for {found.target}")
        return found

    def __contains__(self, target: object) -> bool:
        return target in self._layers

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)


def _check_is_path(path: object) -> None:
    if not isinstance(path, (str, os.PathLike)):
        fix = "name a bundle's directory, or its address such as oci://ghcr.io/org/name@sha256:..."
        raise BundleError("bundle-missing", f"expected a bundle's path, found a {type(path).__name__}", fix=fix)


def _check_manifest(manifest: Manifest, layers: tuple[Layer, ...]) -> None:
    model = manifest.model
    if min(model.vocab_size, model.max_seq_len) < 1 or min(model.num_layers, model.num_parameters) < 0:
        raise BundleError("manifest-invalid", "manifest: the model's vocab_size and max_seq_len are at least 1")
    rules = manifest.checkpoint
    for what, found, limit in (
        ("prefixes of tensor names", len(rules.optional_prefixes) + len(rules.prefixes), limits.MAX_PREFIXES),
        ("endings of tensor names", len(rules.endings), limits.MAX_PREFIXES),
        ("patterns of tensor names", len(rules.ignored) + len(rules.unused), limits.MAX_PATTERNS),
        ("patterns of groups in order", len(rules.groups_in_order), limits.MAX_PATTERNS),
        ("patterns of zeros", len(rules.zeros), limits.MAX_PATTERNS),
        ("tied tensor names", len(rules.tied), limits.MAX_TIED),
    ):
        if found > limit:
            raise BundleError("limit-exceeded", f"manifest: {found} {what}; at most {limit} are allowed")
    if any(size < 0 for size in rules.groups_in_order.values()):
        raise BundleError("manifest-invalid", "manifest: groups_in_order has groups of fewer than 0 inputs")
    if any(size < 0 for size in rules.zeros.values()):
        raise BundleError("manifest-invalid", "manifest: zeros has tensors of fewer than 0 elements")
    expected = _blobs(layers)
    if manifest.blobs != expected:
        listed, held = (", ".join(some([blob.name for blob in blobs])) for blobs in (manifest.blobs, expected))
        raise BundleError("blob-list", f"manifest: lists {listed}, which are not the layers {held}")


def _blobs(layers: tuple[Layer, ...]) -> tuple[Blob, ...]:
    """The layers as the manifest lists them."""
    return tuple(Blob(_ROLES[x.media_type], x.name, x.digest, x.size) for x in layers)


def _check_ops_known(manifest: Manifest) -> None:
    unknown = [f"{name}@{version}" for name, version in manifest.ops.items() if ops.lookup(name, version) is None]
    if unknown:
        message = f"the graph uses ops that this Precast does not have: {', '.join(some(unknown))}"
        raise BundleError("op-unknown", message, fix="upgrade Precast, or build the bundle with this version")


def _decode_constants(data: bytes) -> dict[str, Tensor]:
    try:
        return dict(tensorfile.decode(data))
    except TensorFileError as error:
        raise BundleError("constants-invalid", f"constants: {error}") from None


def _check_constants(graph: Graph, constants: Mapping[str, Tensor]) -> None:
    declared = {value.name: (value.type.dtype, value.type.shape) for value in graph.constants}
    held = {name: (dtype, shape) for name, (dtype, shape, _) in constants.items()}
    differ = sorted(name for name in {*declared, *held} if declared.get(name) != held.get(name))
    if differ:
        listed = some([f"{name}: graph {declared.get(name)}, file {held.get(name)}" for name in differ])
        raise BundleError(
            "constants-mismatch", f"constants: {len(differ)} differ from the graph's: {'; '.join(listed)}"
        )


# --- writing ---------------------------------------------------------------------------------------------------


def _layout(
    manifest: Manifest,
    graph: Graph,
    constants: Mapping[str, Tensor],
    files: Mapping[str, bytes],
    provenance: Mapping[str, object],
    native: Sequence[NativeLayer],
) -> dict[str, bytes]:
    """All files of the layout by their path in it. A pure function of its arguments."""
    assert manifest.format == encoding.FORMAT, "bundles are written in the current format only"
    assert not manifest.blobs, "the blobs are listed here"
    for name in files:
        check_file_name(name)
    written = (
        (oci.GRAPH, "graph", encoding.encode_graph(graph)),
        (oci.CONSTANTS, "constants", _encode_constants(constants)),
        *((oci.TOKENIZER, name, files[name]) for name in sorted(files)),
        *((oci.NATIVE, each.target, encoding.encode_native(each)) for each in sorted(native, key=_target)),
    )
    layers = tuple(Layer(media_type, name, oci.digest_of(data), len(data)) for media_type, name, data in written)
    config = encoding.encode_manifest(msgspec.structs.replace(manifest, blobs=_blobs(layers)))
    image = codec.encode_json(oci.image(oci.BUNDLE, oci.describe(config, oci.MANIFEST), tuple(map(_describe, layers))))
    descriptor = oci.describe(image, oci.IMAGE_TYPE)
    record = attachments.compose(
        descriptor, oci.PROVENANCE, [(oci.PROVENANCE, codec.encode_json(dict(provenance)))]
    )  # fmt: skip
    contents = {oci.digest_of(data): data for data in (config, image, *(data for _, _, data in written))}
    return {
        **{oci.blob_path(digest): data for digest, data in (contents | record.blobs()).items()},
        oci.INDEX_FILE: compose_index(descriptor, (record,)),
        oci.LAYOUT_FILE: oci.MARKER,
    }


def _target(layer: NativeLayer) -> str:
    return layer.target


def _describe(layer: Layer) -> oci.Descriptor:
    annotations = {oci.TITLE: layer.name} if layer.media_type in oci.TITLED else {}
    return oci.Descriptor(layer.media_type, layer.digest, layer.size, annotations=annotations)


def _encode_constants(constants: Mapping[str, Tensor]) -> bytes:
    try:
        return tensorfile.encode(constants)
    except TensorFileError as error:
        raise BundleError("constants-invalid", f"constants: {error}") from None
