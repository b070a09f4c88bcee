"""Messages written for Python, as the command line spells them."""

from __future__ import annotations

import pytest

from precast.cli.main import main
from precast.cli.spelling import as_typed


@pytest.mark.parametrize(
    ("verb", "text", "typed"),
    [
        ("run", "give cache_bytes of at least 32768", "give --cache-bytes of at least 32768"),
        ("run", "use device='cpu', or install", "use --device cpu, or install"),
        ("run", "device is cuda:7", "device is cuda:7"),
        ("run", "load with allow_config_mismatch=True", "run with --allow-config-mismatch"),
        ("verify", "load with allow_config_mismatch=True", "run with --allow-config-mismatch"),
        ("run", "set allow_config_mismatch=True", "set --allow-config-mismatch"),
        ("run", "pass the token id: [bos_token_id]", "pass the token id: --token-ids BOS_TOKEN_ID"),
        ("run", "max_num_seqs is 0, lower max_tokens", "--max-num-seqs is 0, lower --max-tokens"),
        ("run", "an integer up to 9, or None for the model's limit", "an integer up to 9"),
        ("run", "an integer up to 9, or None, 0 or -1 for all", "an integer up to 9, or 0 or -1 for all"),
        ("run", "an integer up to 9, or None or -1 for a random one", "an integer up to 9, or -1 for a random one"),
        ("build", "max_seq_len of at most 9", "--max-seq-len of at most 9"),
        ("build", "but the config's max_seq_len is 9", "but the config's max_seq_len is 9"),
        ("build", "cache_bytes, my_max_seq_len, max_seq_len_2", "cache_bytes, my_max_seq_len, max_seq_len_2"),
        ("build", "disabled_passes=x", "--disable-pass x"),
        ("build", "build it as that (model_type='gpt-sw3')", "build it as that (--model-type gpt-sw3)"),
        ("build", "doesn't know the config's model_type llama17", "doesn't know the config's model_type llama17"),
    ],
)
def test_keywords_are_spelled_as_options(verb: str, text: str, typed: str) -> None:
    assert as_typed(text, main.commands[verb].params) == typed
