"""Rotary position embedding: the frequencies, the tables made from them, and the rotation."""
