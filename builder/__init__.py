"""Offline: a Hugging Face config becomes a bundle, on a CPU, without weights.

The data's way is `source` -> `capture` (with `weights`: how each param is made) -> `passes` -> `lower`; `build.py`
walks it, `pipeline.py` states the passes' order, and `graph` holds what all of them know of FX graphs. A room imports
none that comes after it. Nothing imports this package but the front door.
"""
