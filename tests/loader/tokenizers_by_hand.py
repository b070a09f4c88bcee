"""Tokenizer files made in the test, one of each way in which tokens differ from characters."""

from __future__ import annotations

import json
from collections.abc import Sequence

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors


def byte_level() -> bytes:
    """Byte-level BPE: a token is a byte, or one of a few merges; `<s>` is put in front, `</s>` is special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, "<pad>": 1, "</s>": 2} | {letter: i + 3 for i, letter in enumerate(alphabet)}
    merges = [("h", "e"), ("l", "l"), ("Ġ", "w")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    made = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<s>", "<pad>", "</s>"])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return made.to_str().encode()


def byte_pairs(pairs: Sequence[bytes]) -> bytes:
    """Byte-level, with tokens of several bytes besides, 259 and up, of which none need be text; `<s>` and `</s>`."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that stand for themselves
    others = [byte for byte in range(256) if byte not in plain]
    letters = {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    content = json.loads(byte_level())
    content["model"]["merges"] = []
    content["model"]["vocab"] = {"<s>": 0, "<pad>": 1, "</s>": 2} | {letters[byte]: byte + 3 for byte in range(256)}
    content["model"]["vocab"] |= {"".join(letters[byte] for byte in pair): 259 + i for i, pair in enumerate(pairs)}
    return json.dumps(content).encode()


def sentencepiece() -> bytes:
    """Sentencepiece as Llama 2 has it: words begin with U+2581, unknown characters fall back to bytes."""
    words = ["▁", "▁he", "▁said", "ll", "o", "▁w", ".", "▁<", "h", "e"]
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": byte + 3 for byte in range(256)}
    vocabulary |= {word: 259 + i for i, word in enumerate(words)}
    merges = [("▁", "he"), ("▁", "w")]
    for piece in ("he", "w"):
        vocabulary[piece] = len(vocabulary)
    made = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return made.to_str().encode()


def letters(vocab_size: int) -> bytes:
    """A token a character: `vocab_size` of them, `<s>`, `<pad>`, `</s>` and then `a`, `b`, ... and a space."""
    characters = "abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ"[: vocab_size - 3]
    vocabulary = {"<s>": 0, "<pad>": 1, "</s>": 2} | {letter: i + 3 for i, letter in enumerate(characters)}
    made = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.decoder = decoders.Fuse()
    made.add_special_tokens(["<s>", "<pad>", "</s>"])
    return made.to_str().encode()


def with_front(data: bytes, front: str, back: str = "") -> bytes:
    """The same file, which puts these special tokens in front of a text and behind it: `<s> <pad>`."""
    made = tokenizers.Tokenizer.from_str(data.decode())
    around = [(name, made.token_to_id(name)) for name in f"{front} {back}".split()]
    made.post_processor = processors.TemplateProcessing(single=f"{front} $A {back}".strip(), special_tokens=around)
    return made.to_str().encode()


def without_text(data: bytes, token: str) -> bytes:
    """The same file, whose decoder makes nothing of this token, which is no special one."""
    content = json.loads(data)
    nothing = {"type": "Replace", "pattern": {"String": token}, "content": ""}
    content["decoder"] = {"type": "Sequence", "decoders": [nothing, content["decoder"]]}
    return json.dumps(content).encode()


def failing(vocab_size: int, token_id: int) -> bytes:
    """As `letters`, but that the library panics where it decodes this one: a space, and shorter than is stripped."""
    content = json.loads(letters(vocab_size))
    vocabulary = content["model"]["vocab"]
    spelled = {number: letter for letter, number in vocabulary.items()}
    vocabulary[spelled[token_id]], vocabulary[" "] = vocabulary[" "], token_id
    strip = {"type": "Strip", "content": " ", "start": 0, "stop": 2}
    content["decoder"] = {"type": "Sequence", "decoders": [strip, {"type": "Fuse"}]}
    return json.dumps(content).encode()


def with_padding_and_truncation(data: bytes) -> bytes:
    """The same file as some training scripts leave it: cut to 4 tokens, padded to 8."""
    content = json.loads(data)
    content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {
        "strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 1, "pad_type_id": 0,
        "pad_token": "<pad>",
    }  # fmt: skip
    return json.dumps(content).encode()
