"""The members of a JSON object, one after the other, from a text that comes in parts: a large one
is never in memory as a whole, nor is anything beyond what the caller keeps. Pure.

Read strictly: a key occurs once in its object, NaN and Infinity are no numbers, and all text can be
written as UTF-8.
"""

import codecs
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, Final

_SPACES: Final = " \t\n\r"
_SPACE: Final = re.compile(f"[{_SPACES}]*")


class Duplicate(Exception):
    """A key occurs twice in one object."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def members(parts: Iterable[bytes]) -> Iterator[tuple[str, Any]]:
    """Yields each key and its value, as they stand in the text. Raises ValueError and
    RecursionError if the text is no such object, Duplicate; earlier members may have been yielded
    by then."""
    text = _Text(parts)
    text.take("{")
    seen: set[str] = set()
    is_last = text.next() == "}"
    while not is_last:
        name = _named(text, seen)
        text.take(":")
        yield name, text.value()
        if not (is_last := text.next() != ","):
            text.take(",")
    text.take("}")
    if text.next():
        raise text.wrong("there is more behind its end")


def _named(text: "_Text", seen: set[str]) -> str:
    if text.next() != '"':
        raise text.wrong("a key is wanted")
    name = text.value()
    assert isinstance(name, str)
    _require_text(name)
    if name in seen:
        raise Duplicate(name)
    seen.add(name)
    return name


class _Text:
    """The buffered part of a text, and the position in it."""

    def __init__(self, parts: Iterable[bytes]) -> None:
        self._parts = iter(parts)
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._text = ""
        self._at = 0
        self._gone = 0
        """Characters before the buffered ones."""

    def next(self) -> str:
        """Returns the next character that is no space; empty: there is none."""
        if self._at < len(self._text) and (here := self._text[self._at]) not in _SPACES:
            return here  # as files are usually written: the expression would take most of the time
        while True:
            found = _SPACE.match(self._text, self._at)
            assert found is not None
            self._at = found.end()
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def take(self, wanted: str) -> None:
        if self.next() != wanted:
            raise self.wrong(f"{wanted!r} is wanted")
        self._at += 1

    def value(self) -> Any:
        """Returns the value that begins with the next character."""
        self.next()
        while True:
            try:
                found, end = _DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                if self._more():
                    continue
                raise self.wrong(error.msg, error.pos) from None
            # What ends where the part does may go on: a number.
            if end < len(self._text) or not self._more():
                self._at = end
                return found

    def _more(self) -> bool:
        """Buffers at least twice as much, so that a long value is not scanned too often; False:
        there is no more."""
        left = self._text[self._at :]
        came, size = [], 0
        while size <= len(left) and (part := next(self._parts, None)) is not None:
            came.append(self._decoder.decode(part))
            size += len(came[-1])
        if not size:
            self._decoder.decode(b"", True)  # raises where it ends within a character
            return False
        self._gone += self._at
        self._text, self._at = left + "".join(came), 0
        return True

    def wrong(self, what: str, at: int | None = None) -> ValueError:
        return ValueError(f"{what} at character {self._gone + (self._at if at is None else at)}")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    for name, each in pairs:
        _require_text(name)
        if isinstance(each, str):
            _require_text(each)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise Duplicate(name)
            seen.add(name)
    return found


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is no number")


def _require_text(text: str) -> None:
    if not text.isascii():
        text.encode()  # else UnicodeEncodeError, a ValueError


_DECODER: Final = json.JSONDecoder(
    object_pairs_hook=_without_duplicates, parse_constant=_no_constant
)
