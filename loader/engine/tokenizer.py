"""Text to token ids and back, by the bundle's `tokenizer.json`; the `tokenizers` library is imported on first use.

Answers are turned into text while they grow. A token is not a character: the bytes of one character can be spread
over tokens, and a sentencepiece token's leading space depends on what stands before it. So text is made by decoding a
window that starts before the new tokens, and is given out when it ends with a whole character. Bytes that never become
one are given out before the window grows long, so that the work for an answer is in proportion to its length.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypeVar

import msgspec

from precast.ir.errors import BundleError, PrecastError, RequestError, is_failure, shown_value
from precast.loader.engine import values

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
_MOST_PENDING = 2 * _CHARACTER_TOKENS
"""Tokens whose text is kept back while they end in what may become a character: more than any character has."""
_LONG = 10_000
"""Characters of a text that takes some 10 ms to encode."""
_MAX_ID = 2**32 - 1
"""The largest token id that the library knows."""


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
        self._special = frozenset(i for i, token in inner.get_added_tokens_decoder().items() if token.special)

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> Tokenizer | None:
        """The tokenizer in a bundle's tokenizer files by name, or None where there is no `tokenizer.json`.

        Raises BundleError for a file that the `tokenizers` library can't read.
        """
        data = files.get(FILE_NAME)
        if data is None:
            return None
        import tokenizers

        return _ask("can't read it", lambda: cls(tokenizers.Tokenizer.from_str(data.decode())), BundleError)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of `text`, with the special tokens that the tokenizer puts around a single text.

        Those that it puts in front (beginning of sequence, as a rule) are left out where the text's own tokens begin
        with the same ones: a rendered chat template has them already. `add_special_tokens` False: nothing is put
        around it. Special tokens that are written in the text are ids like others, either way.

        Raises RequestError for text that isn't Unicode (lone surrogates), and where the library fails.
        """
        if not isinstance(text, str):
            raise RequestError("prompt-invalid", f"the text is a {type(text).__name__}, expected a string")
        values.check_flag("add_special_tokens", add_special_tokens)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                "prompt-invalid", f"the text has a lone surrogate at character {error.start}, expected Unicode text"
            ) from error
        encoding = _ask("can't encode with it", lambda: self._encoded(text, add_special_tokens))
        ids, is_added = encoding.ids, encoding.special_tokens_mask
        front = is_added.index(0) if 0 in is_added else 0
        is_doubled = ids[front : 2 * front] == ids[:front] and not any(is_added[front : 2 * front])
        return ids[front:] if is_doubled else ids

    def _encoded(self, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
        """A long text as a batch of one, which the library encodes without holding up other threads."""
        if len(text) < _LONG:
            return self._inner.encode(text, add_special_tokens=add_special_tokens)
        return self._inner.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the ids; special tokens, and ids that the tokenizer doesn't know, are left out.

        Raises RequestError for what are no token ids, and where the library fails.
        """
        if not (isinstance(token_ids, array) and token_ids.typecode == "q"):
            token_ids = values.token_ids(token_ids, "what is decoded", expected="a list of token ids")
        try:
            return _ask("can't decode with it", lambda: self._inner.decode(token_ids, skip_special_tokens=True))
        except RequestError:
            for place, token in enumerate(token_ids):
                if not 0 <= token <= _MAX_ID:
                    message = f"token {place} of what is decoded is {shown_value(token)}, expected 0 to {_MAX_ID}"
                    raise RequestError("token-out-of-range", message) from None
            raise

    def has_text(self, token_id: int) -> bool:
        """Whether `decode` doesn't leave the id out."""
        return token_id not in self._special and self._inner.id_to_token(token_id) is not None


def _ask(refusal: str, call: Callable[[], T], kind: type[PrecastError] = RequestError) -> T:
    """What the `tokenizers` library answers. Raises the kind of error, with the refusal, where it fails or panics."""
    try:
        return call()
    except BaseException as error:  # it raises plain Exception, and nothing narrower; or it panics
        if not is_failure(error):
            raise
        import tokenizers

        message = f"the tokenizers library {tokenizers.__version__} {refusal}: {error}"
        raise kind("tokenizer-invalid", message, where=FILE_NAME, fix=_FIX) from error


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
        self.held = ""  # what may yet become a stop string
        self.stopped = False

    def push(self, token_id: int) -> None:
        """Add a token; `read` gives out its text."""
        if self._tokenizer.has_text(token_id):
            self._ids.append(token_id)

    def read(self, *, final: bool = False) -> str:
        """The text that can be given out now. Sets `stopped` when a stop string is complete; nothing comes after it.

        `final`: the answer ends here, so nothing is kept back; the bytes of an unfinished character become U+FFFD.
        Raises RequestError where the tokenizer fails; what was held back then stays in `held`.
        """
        if self.stopped:
            return ""
        text = self.held + self._decoded(final)
        found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.stopped, self.held = True, ""
            return text[: min(found)]
        keep = 0 if final else max((_overlap(text, stop) for stop in self._stop), default=0)
        given, self.held = text[: len(text) - keep], text[len(text) - keep :]
        return given

    def _decoded(self, final: bool) -> str:
        """The text of the tokens from `_read` on, or nothing while it ends in an unfinished character."""
        end, unsure = len(self._ids), 0
        if self._read == end:
            return ""
        window = self._window(end)
        is_whole = len(window) > len(self._context_text) and not window.endswith(_REPLACEMENT)
        if not is_whole and not final:
            if end - self._read < _MOST_PENDING:
                return ""
            end, unsure = self._cut()
            window = self._window(end)
        text = window[len(self._context_text) : len(window) - unsure]
        self._context, self._read = self._read, end - unsure
        context = self._window(end)
        self._context_text = context[: len(context) - unsure]
        return text

    def _window(self, end: int) -> str:
        """The text of the tokens from the window's first up to `end`."""
        return self._tokenizer.decode(self._ids[self._context : end])

    def _cut(self) -> tuple[int, int]:
        """Where a window that has grown long is to end, and how many of the characters before that are unsure.

        Bytes that are no text come out as U+FFFD: more of them where a character is cut in two, and a single byte may
        spoil a whole run. So of the last few ends the one is best that leaves the least text on both sides, and of
        such the one behind no U+FFFD. If only the very last is best, characters lie across all the others; then the
        U+FFFD before it is all that may still change.
        """
        last = len(self._ids)

        def spoils(end: int) -> tuple[int, bool]:
            left, right = self._window(end), self._tokenizer.decode(self._ids[end:])
            return len(left) + len(right), left.endswith(_REPLACEMENT)

        end = min((*range(last - 1, last - _CHARACTER_TOKENS, -1), last), key=spoils)
        return end, int(end == last)


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
