"""The artifact's language: what a bundle says, how it is written, read, checked and shown.

Standard library, msgspec and zstandard only; importable anywhere, without torch. `graph` holds the structs and their
text form, `ops` the table of operations, `verify` the rules, `weights` recipes and checkpoints, `memory` cache plans
and liveness, `bundle` the container, `artifact` the bundle as a whole.
"""
