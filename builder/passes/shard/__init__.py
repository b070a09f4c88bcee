"""Splits a model over the ranks of a world, whose size is a symbol until a load."""
