"""The words of the text form: names, numbers, strings, marks, each with the place where it stands; and a cursor."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, NoReturn, TypeVar

from precast.ir import limits

Item = TypeVar("Item")
WordKind = Literal["name", "ref", "string", "int", "float", "mark", "end"]

_STRING = r'"(?:[^"\\\n]|\\.)*"'
_WORD = re.compile(
    rf"""
      (?P<space>   [ \t\r\n]+ | \#[^\n]* )
    | (?P<ref>     % (?: [A-Za-z_][A-Za-z0-9_.]* | {_STRING} ) )
    | (?P<float>   -? [0-9]+ (?: \.[0-9]+ (?:[eE][+-]?[0-9]+)? | [eE][+-]?[0-9]+ ) | -inf\b )
    | (?P<int>     -? [0-9]+ )
    | (?P<name>    [A-Za-z_][A-Za-z0-9_.]* )
    | (?P<string>  {_STRING} )
    | (?P<mark>    \.\. | [{{}}()\[\]=:,@+*] )
    """,
    re.VERBOSE,
)


class TextError(ValueError):
    """A graph in text form that does not parse; `where` says at which line and column."""

    def __init__(self, message: str, where: str) -> None:
        super().__init__(f"{where}: {message}")
        self.where = where


class Word(NamedTuple):
    """A word: `text` as it is written, `value` without quotes and mark, and its place, both counted from 1."""

    kind: WordKind
    text: str
    value: str
    line: int
    column: int

    def refuse(self, message: str) -> NoReturn:
        """Raise the syntax error at this word's place."""
        raise TextError(message, f"line {self.line}, column {self.column}")


def words(text: str) -> Iterator[Word]:
    """The words of `text`, then one of kind "end". Raises TextError."""
    position, line, start = 0, 1, 0
    while position < len(text):
        match = _WORD.match(text, position)
        if match is None:
            found = text[position]
            word = Word("mark", found, found, line, position - start + 1)
            word.refuse("a string that does not end on its line" if found == '"' else f"unexpected {found!r}")
        kind, written = match.lastgroup, match[0]
        position = match.end()
        if kind == "space":
            if "\n" in written:
                line += written.count("\n")
                start = match.start() + written.rindex("\n") + 1
            continue
        yield _word(kind, written, line, match.start() - start + 1)  # type: ignore[arg-type]
    yield Word("end", "", "", line, position - start + 1)


def _word(kind: WordKind, text: str, line: int, column: int) -> Word:
    word = Word(kind, text, text.removeprefix("%"), line, column)
    if kind in ("int", "float") and len(text) > limits.MAX_STRING_BYTES:
        word.refuse(f"a number of {len(text)} digits")
    if not word.value.startswith('"'):
        return word
    try:
        return word._replace(value=json.loads(word.value, strict=False))
    except json.JSONDecodeError as error:
        word.refuse(f"not a string as JSON writes it: {error.msg}")


class Cursor:
    """The words of a text, one after the other, and the forms that every part of the grammar is made of."""

    def __init__(self, text: str) -> None:
        self._words = list(words(text))
        self._next = 0
        self._depth = 0

    @property
    def now(self) -> Word:
        """The next word, not taken yet."""
        return self._words[self._next]

    @property
    def then(self) -> Word:
        """The word after the next one."""
        return self._words[min(self._next + 1, len(self._words) - 1)]

    def take(self) -> Word:
        """The next word. Never the end: no form of the grammar asks for it."""
        word = self.now
        self._next += 1
        return word

    def at(self, text: str) -> bool:
        """Whether the next word is this mark or bare word."""
        return _is(self.now, text)

    def at_call_of(self, name: str | None = None) -> bool:
        """Whether the next words are a bare word, this one if it is given, and an opening bracket."""
        return self.now.kind == "name" and name in (None, self.now.text) and _is(self.then, "(")

    def takes(self, text: str) -> bool:
        """Take the next word if it is this mark or bare word."""
        found = self.at(text)
        if found:
            self.take()
        return found

    def expect(self, *texts: str) -> Word:
        """Take the next word, which must be one of these marks and bare words."""
        if not any(map(self.at, texts)):
            self.refuse(" or ".join(map(repr, texts)))
        return self.take()

    def kind(self, kind: WordKind, what: str) -> Word:
        """Take the next word, which must be of this kind; `what` says it in a message."""
        if self.now.kind != kind:
            self.refuse(what)
        return self.take()

    def refuse(self, expected: str) -> NoReturn:
        """Raise: something else was expected here."""
        found = repr(self.now.text) if self.now.kind != "end" else "the end of the text"
        self.now.refuse(f"expected {expected}, found {found}")

    def name(self, what: str = "a name") -> str:
        """A bare word, or a string in its place."""
        return self.take().value if self.now.kind == "string" else self.kind("name", what).value

    def ref(self, what: str = "a tensor (%name)") -> str:
        """`%name`"""
        return self.kind("ref", what).value

    def int(self) -> int:
        """An integer literal."""
        return int(self.kind("int", "an integer").text)

    def key(self, name: str, *, first: bool = False) -> None:
        """`name=`, after a comma unless it is the first."""
        if not first:
            self.expect(",")
        self.expect(name)
        self.expect("=")

    def inside(self, opening: str, content: Callable[[], Item], closing: str) -> Item:
        """What stands in brackets. All recursion of the grammar goes through here, and ends at a limit."""
        self.expect(opening)
        self._depth += 1
        if self._depth > limits.MAX_NESTING:
            self.now.refuse(f"nested more than {limits.MAX_NESTING} levels deep")
        found = content()
        self.expect(closing)
        self._depth -= 1
        return found

    def list(self, opening: str, item: Callable[[], Item], closing: str) -> tuple[Item, ...]:
        """Items in brackets, with commas between them."""
        return self.inside(opening, lambda: self.items(item, closing), closing)

    def items(self, item: Callable[[], Item], closing: str) -> tuple[Item, ...]:
        """Items with commas between them, up to the closing bracket or brace, which stays."""
        items: list[Item] = []
        while not self.at(closing):
            items.append(item())
            if not self.at(closing):
                self.expect(",", closing)
        return tuple(items)

    def many(self, item: Callable[[], Item]) -> tuple[Item, ...]:
        """Items in braces, with nothing between them."""
        items: list[Item] = []
        self.expect("{")
        while not self.takes("}"):
            items.append(item())
        return tuple(items)


def _is(word: Word, text: str) -> bool:
    return word.kind in ("mark", "name") and word.text == text
