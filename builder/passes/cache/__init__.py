"""Gives each layer that looks back a cache or a state."""
