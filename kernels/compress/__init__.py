"""Entries of attention, made of the tokens of a block."""
