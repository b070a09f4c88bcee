"""Finds what our ops compute, however a model writes it, and fuses what belongs together."""
