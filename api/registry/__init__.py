"""Bundles in OCI registries, and the store of those that were pulled. Nothing here decodes a graph or imports torch."""
