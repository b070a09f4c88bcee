"""The first product of a gated feed-forward layer, and its gate."""
