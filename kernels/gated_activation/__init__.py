"""The gate of a gated feed-forward layer."""
