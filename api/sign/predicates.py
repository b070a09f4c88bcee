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
        "remoteCode": record.get("remote_code", False),
    }
    metadata = {"invocationId": invocation_id, "finishedOn": record.get("built_at", "")}
    versions = dict(manifest.built_with) | ({"python": record["python"]} if "python" in record else {})
    return {
        "buildDefinition": {
            "buildType": BUILD_TYPE,
            "externalParameters": parameters,
            "internalParameters": internal,
            "resolvedDependencies": [*_config(bundle), *({"uri": _purl(*each)} for each in sorted(versions.items()))],
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
    itself = {
        "type": "machine-learning-model",
        "bom-ref": bundle.digest,
        "name": manifest.model.architecture,
        "version": bundle.digest,
        "hashes": [_hash(bundle.digest)],
    }
    tools = [
        {"type": "library", "bom-ref": _purl(*each), "name": each[0], "version": each[1], "purl": _purl(*each)}
        for each in sorted(manifest.built_with.items())
    ]
    layers = [
        {"type": "file", "bom-ref": f"layer:{blob.name}", "name": blob.name, "hashes": [_hash(blob.digest)]}
        for blob in manifest.blobs
    ]
    refs = [component["bom-ref"] for component in (*layers, *tools)]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": itself},
        "components": [*layers, *tools],
        "dependencies": [{"ref": bundle.digest, "dependsOn": refs}],
    }


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
