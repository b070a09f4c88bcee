"""What a graph needs of memory: cache plans, and activations from liveness."""
