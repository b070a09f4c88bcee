"""Decides page sizes, and which rows get logits, before any target is known."""
