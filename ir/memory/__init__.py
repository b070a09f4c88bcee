"""What a graph needs of memory: cache plans, and what is alive while it runs."""
