"""Experts whose weights stay as they are stored: in few bits, with scales."""
