"""Puts a lowered graph and what belongs to it into a bundle, and publishes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from precast.builder.capture.capture import Captured
from precast.builder.graph.constants import tensor_bytes
from precast.ir.artifact import Bundle, ops_of, write_bundle
from precast.ir.encoding import FORMAT
from precast.ir.errors import BuildError, BundleError
from precast.ir.graph.schema import Graph
from precast.ir.manifest import ConfigFacts, Manifest, PassRecord
from precast.ir.native import NativeLayer

_OF_CONFIG = ("graph-invalid", "manifest-invalid", "json-invalid", "limit-exceeded")
"""What contradictions and numbers out of all proportion in a config become in the bundle that is made of it."""


def pack(
    out: Path, captured: Captured, graph: Graph, history: tuple[PassRecord, ...], *, files: Mapping[str, bytes],
    built_with: Mapping[str, str], checked: bool, config: ConfigFacts, provenance: Mapping[str, object],
    native: Sequence[NativeLayer] = (),
) -> Bundle:  # fmt: skip
    """Publish the bundle at `out`, whole or not at all, and open it as any reader would.

    Raises BuildError: `config-invalid` when that reader would refuse it, and what `write_bundle` raises of that kind.
    """
    manifest = Manifest(
        format=FORMAT,
        model=captured.model,
        ops=ops_of(graph),
        checkpoint=captured.checkpoint,
        passes=history,
        built_with=dict(built_with),
        blobs=(),
        checked=checked,
        config=config,
    )
    wanted = {value.name for value in graph.constants}
    constants = {
        info.name: (str(info.value.dtype).removeprefix("torch."), tuple(info.value.shape), tensor_bytes(info.value))
        for info in captured.ctx.constants.values()
        if info.name in wanted
    }
    try:
        return write_bundle(
            out, manifest_without_blobs=manifest, graph=graph, constants=constants, files=dict(files),
            provenance=dict(provenance), native=native,
        )  # fmt: skip
    except BundleError as error:
        if error.code not in _OF_CONFIG:
            raise
        raise BuildError(
            "config-invalid",
            f"the config gives a bundle that would be refused ({error.code}): {error.message}",
            fix="check the numbers in the config: those of heads, ranks and dimensions have to fit each other; if they "
            "do, report it with the config.json",
        ) from error
