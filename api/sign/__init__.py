"""Vouching for bundles: private keys, signatures, attestations, and links from weights to bundles."""
