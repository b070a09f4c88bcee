"""Rewrites the bundle's own graph, once it is lowered."""
