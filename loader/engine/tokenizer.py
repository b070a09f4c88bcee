"""Text to token ids and back, by the bundle's `tokenizer.json`; the `tokenizers` library is imported on first use.

Answers are turned into text while they grow. A token is not a character: the bytes of one character can be spread
over tokens, and a sentencepiece token's leading space depends on what stands before it. So text is made by decoding a
window that starts before the new tokens, and is given out when it ends with a whole character.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypeVar

import msgspec

from precast.ir.errors import BundleError, RequestError, is_failure

if TYPE_CHECKING:
    import tokenizers

FILE_NAME = "tokenizer.json"
T = TypeVar("T")

_FIX = "update the tokenizers library, or build the bundle again from files that it reads"
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_PROMPT_CONTEXT = 5
"""Tokens of the prompt that are decoded before an answer's first, so that its leading space is right."""
_CHARACTER_TOKENS = 4
"""A character is at most 4 bytes, and so at most 4 tokens."""


class _Model(msgspec.Struct):
    """The part of a `tokenizer.json` that says what kind it is; old ones don't say."""

    type: Literal["BPE", "Unigram", "WordLevel", "WordPiece"] | None = None


class _File(msgspec.Struct):
    model: _Model


def check_tokenizer(files: Mapping[str, bytes]) -> None:
    """Raise BundleError for a `tokenizer.json` in a bundle's tokenizer files that is damaged or of an unknown kind.

    This takes 1 to 2 ms a megabyte. What is wrong with its vocabulary, the `tokenizers` library says at the first
    prompt: it would need 0.3 s for a large one, and hold up the threads that stream the weights.
    """
    try:
        msgspec.json.decode(files.get(FILE_NAME, b'{"model": {}}'), type=_File)
    except (ValueError, RecursionError) as error:  # JSON that doesn't decode, text that isn't UTF-8, nesting
        raise BundleError("tokenizer-invalid", str(error), where=FILE_NAME, fix=_FIX) from error


class Tokenizer:
    """The tokenizer of a bundle."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        inner.no_truncation()  # lengths are the scheduler's business
        inner.no_padding()
        self._inner = inner

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> Tokenizer | None:
        """The tokenizer in a bundle's tokenizer files by name, or None where there is no `tokenizer.json`.

        Raises BundleError for a file that the `tokenizers` library can't read.
        """
        data = files.get(FILE_NAME)
        if data is None:
            return None
        import tokenizers

        return cls(_ask("can't read it", lambda: tokenizers.Tokenizer.from_str(data.decode())))

    def encode(self, text: str) -> list[int]:
        """The token ids of `text` with the special tokens that the tokenizer puts around a single text.

        Raises RequestError for text that isn't Unicode (lone surrogates), BundleError where the library fails.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                "prompt-invalid", f"the text has a lone surrogate at character {error.start}, expected Unicode text"
            ) from error
        return _ask("can't encode with it", lambda: self._inner.encode(text, add_special_tokens=True).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the ids, special tokens left out. Raises BundleError where the library fails."""
        return _ask("can't decode with it", lambda: self._inner.decode(token_ids, skip_special_tokens=True))


def _ask(refusal: str, call: Callable[[], T]) -> T:
    """What the `tokenizers` library answers. Raises BundleError, with the refusal, where it fails or panics."""
    try:
        return call()
    except BaseException as error:  # it raises plain Exception, and nothing narrower; or it panics
        if not is_failure(error):
            raise
        import tokenizers

        message = f"the tokenizers library {tokenizers.__version__} {refusal}: {error}"
        raise BundleError("tokenizer-invalid", message, where=FILE_NAME, fix=_FIX) from error


class AnswerText:
    """The text of one answer as it grows.

    Joined, the texts given out are the text of the whole answer after its prompt, cut before the first stop string.
    None ends in the middle of a character, or with what may yet become a stop string.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._ids = _context(tokenizer, prompt)
        self._context = 0  # the window's first token
        self._read = len(self._ids)  # the first token whose text was not given out
        self._context_text = tokenizer.decode(self._ids)
        self._held = ""
        self.stopped = False

    def push(self, token_id: int) -> None:
        """Add a token; `read` gives out its text."""
        self._ids.append(token_id)

    def read(self, *, final: bool = False) -> str:
        """The text that can be given out now. Sets `stopped` when a stop string is complete; nothing comes after it.

        `final`: the answer ends here, so nothing is kept back; the bytes of an unfinished character become U+FFFD.
        """
        if self.stopped:
            return ""
        text = self._held + self._decoded(final)
        found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = 0 if final else max((_overlap(text, stop) for stop in self._stop), default=0)
        given, self._held = text[: len(text) - keep], text[len(text) - keep :]
        return given

    def _decoded(self, final: bool) -> str:
        """The text of the tokens from `_read` on, or nothing while it ends in an unfinished character."""
        if self._read == len(self._ids):
            return ""
        window = self._tokenizer.decode(self._ids[self._context :])
        if len(window) <= len(self._context_text) or (window.endswith(_REPLACEMENT) and not final):
            return ""
        text = window[len(self._context_text) :]
        self._context, self._read = self._read, len(self._ids)
        self._context_text = self._tokenizer.decode(self._ids[self._context :])
        return text


def _context(tokenizer: Tokenizer, prompt: Sequence[int]) -> array[int]:
    """The end of the prompt, from where a character begins: bytes of a cut one would spoil those that follow."""
    ids = array("q")
    for size in range(_PROMPT_CONTEXT, _PROMPT_CONTEXT + _CHARACTER_TOKENS):
        ids = array("q", prompt[-size:])
        if not tokenizer.decode(ids).startswith(_REPLACEMENT):
            break
    return ids


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that a proper beginning of `stop` is."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
