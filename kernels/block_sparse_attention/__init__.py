"""Sparse attention over blocks: blocks of neighbouring keys are selected by their best one, and attended to whole."""
