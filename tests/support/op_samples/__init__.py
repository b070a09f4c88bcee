"""Samples for the tests of the ops: arguments for calls that are odd in every way; `op_samples.table` finds them."""
