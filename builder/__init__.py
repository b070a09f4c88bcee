"""Offline: a Hugging Face config becomes a bundle, on a CPU, without weights.

The data's way is `source` -> `factory` -> `export` -> `pipeline` (the passes) -> `lower` -> `pack`; `build.py` walks
it.
Nothing imports this room but the front door.
"""
