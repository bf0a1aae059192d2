"""Texts for people: names that a terminal takes for commands, or that end a line, and URLs that
have passwords in them.

A URL's password is what stands between the first colon after `//` and the last at sign before the
next slash. So one that was not escaped, with a question mark or an at sign in it, is known too.
"""

import re
from collections.abc import Iterator
from typing import Final

HIDDEN: Final = "xxxxx"
"""Stands in place of a password."""


def printable(text: str) -> str:
    """Returns the text, with escapes in place of control characters and of undecodable bytes."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def _with_user(ends: str) -> re.Pattern[str]:
    """Returns a pattern for the beginning of a URL that has a user: `//`, user and password.
    `ends`: characters that end any URL."""
    # It begins where no letter is before it: in a long word each letter would be a beginning, and
    # the time grow with the square of its length.
    return re.compile(
        rf"(?<![a-z0-9+.-])([a-z][a-z0-9+.-]*://)([^/\0:{ends}]*)(?::([^/\0{ends}]+))?@",
        re.IGNORECASE,
    )


_USER: Final = _with_user("")
_USER_IN_TEXT: Final = _with_user(r"\s\"'")


def passwords(values: str) -> Iterator[tuple[int, int]]:
    """Returns where passwords begin and end, in values that are divided by zero bytes."""
    return (found.span(3) for found in _USER.finditer(values) if found[3] is not None)


def without_passwords(value: str, instead: str = HIDDEN, *, is_text: bool = False) -> str:
    """Returns a value, with `instead` in place of a URL's password; of a text, in which URLs end at
    blanks and quotation marks, of all that are in it."""

    def hidden(found: re.Match[str]) -> str:
        return found[0] if found[3] is None else f"{found[1]}{found[2]}:{instead}@"

    return (_USER_IN_TEXT if is_text else _USER).sub(hidden, value)


def without_user(url: str) -> str:
    """Returns a URL without user and password."""
    return _USER.sub(lambda found: found[1], url)
