"""Kernels compiled ahead for a target: which a bundle's steps can launch, and the layer that holds them."""
