"""Decides what the target needs not decide: page sizes, and which rows get logits."""
