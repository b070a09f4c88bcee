"""Measured choices that are attached to a bundle: a table for each machine that the bundle was sealed on. No torch.

They are data, and no part of the bundle's identity. A table counts on the machine that it was measured on alone: of the
same GPU, driver and versions. Whoever may attach can attach what is no table, so that counts for nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from precast.ir.bundle import oci
from precast.ir.bundle.attached import Attached, compose
from precast.ir.bundle.codec import decode_json, encode_json
from precast.ir.errors import BundleError
from precast.kernels.measured import MAX_TABLE_BYTES, Table


def sealed(bundle: oci.Descriptor, table: Table) -> Attached:
    """The manifest that attaches a table to the bundle whose image manifest `bundle` describes."""
    annotations = {oci.TITLE: f"choices for {table.machine.gpu}"}
    return compose(bundle, oci.CHOICES, [(oci.CHOICES, encode_json(table))], annotations)


def sealed_tables(attached: Iterable[Attached]) -> dict[str, Table]:
    """The tables among what is attached to a bundle, by the digest of their manifests. What should be one and can't be
    read is passed over, and the log says so."""
    found = {}
    for extra in attached:
        if extra.artifact_type == oci.CHOICES:
            try:
                found[extra.digest] = _table(extra)
            except BundleError as error:
                logging.getLogger("precast").info(
                    "attached choices %s are passed over: %s", extra.digest, error.message
                )
    return found


def _table(extra: Attached) -> Table:
    if [layer.media_type for layer in extra.layers] != [oci.CHOICES]:
        raise BundleError("choices-invalid", f"expected one layer of {oci.CHOICES}")
    return decode_json(extra.layers[0].data, Table, "the table", MAX_TABLE_BYTES)
