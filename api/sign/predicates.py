"""What an attestation says: how a bundle was built (SLSA provenance 1.0), and of what it was made (CycloneDX 1.6).

Both repeat what the bundle and its provenance record say: the signature makes them the signer's word, no truer. Neither
has a clock of its own: the same bundle and arguments give the same predicate.
https://slsa.dev/spec/v1.0/provenance, https://cyclonedx.org/docs/1.6/json
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from precast.ir.artifact import Bundle
from precast.ir.bundle import codec
from precast.ir.native import NativeLayer

BUILD_TYPE = "https://precast.dev/build/v1"
"""How `externalParameters` and `resolvedDependencies` are to be read: docs/trust.md."""
LOCAL_BUILDER = "https://precast.dev/builder/local"
"""The builder's id where nobody names one: some machine, of which nothing is known."""


def provenance(bundle: Bundle, *, builder_id: str = LOCAL_BUILDER, invocation_id: str = "") -> dict[str, Any]:
    """The predicate of an SLSA provenance: the config and versions that went in, the options, and who built.

    `builder_id` is a URI of what ran the build, such as a CI workflow; `invocation_id` of the one run.
    """
    record, manifest = bundle.provenance, bundle.manifest
    parameters = {"source": record.get("source", ""), "options": record.get("options", {})}
    internal = {
        "format": ".".join(map(str, manifest.format)),
        "passes": [f"{done.name}@{done.version}" for done in manifest.passes],
        "checked": manifest.checked,
        "targets": sorted(bundle.native),
        "remoteCode": record.get("remote_code", False),
    }
    metadata = {"invocationId": invocation_id, "finishedOn": record.get("built_at", "")}
    versions = dict(manifest.built_with) | ({"python": record["python"]} if "python" in record else {})
    return {
        "buildDefinition": {
            "buildType": BUILD_TYPE,
            "externalParameters": parameters,
            "internalParameters": internal,
            "resolvedDependencies": [
                *_config(bundle),
                *({"uri": _purl(*each)} for each in sorted(versions.items())),
                *_native(bundle),
            ],
        },
        "runDetails": {
            "builder": {"id": builder_id, "version": versions},
            "metadata": {name: value for name, value in metadata.items() if value},
        },
    }


def config_digest(bundle: Bundle) -> str | None:
    """The SHA-256, in hexadecimal, of what the build read of the config, in canonical JSON; None for format 1.0."""
    config = bundle.manifest.config
    return None if config is None else hashlib.sha256(codec.encode_json(config)).hexdigest()


def bill_of_materials(bundle: Bundle) -> dict[str, Any]:
    """The predicate of an SBOM: the bundle's layers with their digests, and what they were made from and with."""
    manifest = bundle.manifest
    itself: dict[str, Any] = {
        "type": "machine-learning-model",
        "bom-ref": bundle.digest,
        "name": manifest.model.architecture,
        "version": bundle.digest,
        "hashes": [_hash(bundle.digest)],
    }
    tools: list[dict[str, Any]] = [
        {"type": "library", "bom-ref": _purl(*each), "name": each[0], "version": each[1], "purl": _purl(*each)}
        for each in sorted(manifest.built_with.items())
    ]
    layers: list[dict[str, Any]] = [
        {
            "type": "file",
            "bom-ref": f"{blob.role}:{blob.name}",
            "name": blob.name,
            "description": blob.role,
            "hashes": [_hash(blob.digest)],
        }
        for blob in manifest.blobs
    ]
    origins = {f"native:{target}": _origins(layer) for target, layer in sorted(bundle.native.items())}
    parts = {part["bom-ref"]: part for layer in origins.values() for part in layer}
    refs = [component["bom-ref"] for component in (*layers, *tools)]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": itself},
        "components": [*layers, *tools, *parts.values()],
        "dependencies": [
            {"ref": bundle.digest, "dependsOn": refs},
            *({"ref": ref, "dependsOn": [part["bom-ref"] for part in layer]} for ref, layer in origins.items()),
        ],
    }


def _origins(layer: NativeLayer) -> list[dict[str, Any]]:
    """The components that a native layer was compiled from and with: our sources by their hashes, and compilers."""
    sources: list[dict[str, Any]] = [
        {
            "type": "file",
            "bom-ref": f"source:{name}@{digest}",
            "name": name,
            "hashes": [{"alg": "SHA-256", "content": digest}],
        }
        for name, digest in sorted(layer.sources.items())
    ]
    return sources + [
        {"type": "application", "bom-ref": f"compiler:{name}@{version}", "name": name, "version": version}
        for name, version in sorted(layer.compilers.items())
    ]


def _native(bundle: Bundle) -> Iterator[dict[str, Any]]:
    """The sources and compilers of all native layers, each once, as resource descriptors."""
    found: dict[str, dict[str, Any]] = {}
    for layer in bundle.native.values():
        for name, digest in sorted(layer.sources.items()):
            found[f"{name}@{digest}"] = {"name": name, "digest": {"sha256": digest}}
        for name, version in sorted(layer.compilers.items()):
            found[f"{name}@{version}"] = {"name": name, "annotations": {"version": version}}
    yield from found.values()


def _config(bundle: Bundle) -> Iterator[dict[str, Any]]:
    digest = config_digest(bundle)
    if digest is not None:
        yield {"name": "config", "digest": {"sha256": digest}}


def _hash(digest: str) -> dict[str, str]:
    return {"alg": "SHA-256", "content": digest.removeprefix("sha256:")}


def _purl(name: str, version: str) -> str:
    """A package URL (https://github.com/package-url/purl-spec): of PyPI, but for Python itself."""
    kind = "generic" if name == "python" else "pypi"
    return f"pkg:{kind}/{name}@{version.replace('+', '%2B')}"
