"""How the command line spells what errors say for Python: `cache_bytes` is `--cache-bytes` there."""

from __future__ import annotations

import re
from collections.abc import Sequence

import click

_PHRASES = {
    "[bos_token_id]": "--token-ids BOS_TOKEN_ID",
    "load with allow_config_mismatch=True": "run with --allow-config-mismatch",
    ", or None for the model's limit": "",
    "or None, 0 or -1 for": "or 0 or -1 for",
    "or None or -1 for": "or -1 for",
}
"""What stands for no option, or for one of another verb, and is typed otherwise; and None, which can't be typed."""


def as_typed(text: str, options: Sequence[click.Parameter]) -> str:
    """The text with these options' keywords as they are typed: `device='cpu'` as `--device cpu`.

    A keyword that is an English word as well (`device`) counts only where a value follows. What an entry of the config
    is called stays: the message says whose it is.
    """
    for phrase, typed in _PHRASES.items():
        text = text.replace(phrase, typed)
    for option in options:
        if option.name is None or not isinstance(option, click.Option):
            continue
        typed, name = max(option.opts, key=len), re.escape(option.name)
        text = re.sub(rf"\b{name}=True\b", typed, text)
        text = re.sub(rf"\b{name}=(?:'([^']*)'|(\w[\w:]*))", rf"{typed} \1\2", text)
        if "_" in option.name:
            text = re.sub(rf"(?<!config's )\b{name}\b", typed, text)
    return text
