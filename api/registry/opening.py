"""`Bundle.open("oci://...")`: from the store, and by way of it from the registry. An entry point names this module."""

from __future__ import annotations

from precast.ir.artifact import Bundle
from precast.ir.errors import BundleError
from precast.registry.pull import pull
from precast.registry.reference import Reference
from precast.registry.store import Store

_DAMAGED = ("blob-missing", "blob-size", "blob-digest")


def open_bundle(text: str) -> Bundle:
    """The bundle that an `oci://` address names. With a digest that the store has, nothing is asked of any registry.

    A blob of the store that is damaged is fetched again. Raises RegistryError, BundleError, and PrecastError where the
    store can't be written.
    """
    wanted, store = Reference.parse(text), Store()
    with store.using():
        digest = wanted.digest
        if digest is None or store.index(digest) is None:
            digest = pull(wanted, store=store).digest
        try:
            return store.open(digest)
        except BundleError as error:
            if error.code not in _DAMAGED:
                raise
        pull(wanted.at(digest), store=store)
        return store.open(digest)
