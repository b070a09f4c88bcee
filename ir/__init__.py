"""The artifact's language: what a bundle says, how it is written, read, checked and shown.

Standard library, msgspec and zstandard only; importable anywhere, without torch. `schema` holds the structs, `ops` the
table of operations, `verify` the rules, `text` the readable form, `bundle` the directory that holds it all.
"""
