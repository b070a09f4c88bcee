"""How much a step and a sequence may hold: what graphs are traced for, and what their symbols say."""

from __future__ import annotations

MAX_TOKENS = 1 << 20
"""Tokens of a step (`T`), of all its sequences. Longer prompts take several steps."""

MAX_SEQUENCES = 1 << 16
"""Sequences of a step (`B`)."""

MAX_SEQ_LEN = 1 << 24
"""Tokens of a sequence, prompt and answer; the longest config in use says 10 Mi. More than a step holds: a sequence
grows over many. Mask functions are evaluated over as many positions."""

MAX_EXPERTS = 1 << 14
"""Experts of a layer, each of which is a tensor or three of a checkpoint; the most known are 512."""

MAX_VOCABULARY = 1 << 24
"""Token ids of a `vocab.json`: readers keep a place for each up to the largest. The largest vocabularies in use have
262,144 tokens."""

MAX_DEPTH = 1 << 12
"""Layers of a model. transformers makes lists of as many while it reads a config; models have up to 200."""
