"""Excerpts of a file's text for a message: an invalid file may hold very long texts. Pure."""

from typing import Final

_MOST: Final = 200
"""Most characters."""
_TOO_LONG: Final = "set_int_max_str_digits"


def shown(said: object) -> str:
    """Returns the value as Python writes it; a long one is shortened to its beginning and end."""
    if isinstance(said, str) and len(said) <= _MOST:
        return repr(said)
    text = repr(said)
    return text if len(text) <= _MOST else f"{text[: _MOST // 2]}...{text[-_MOST // 4 :]}"


def no_json(error: ValueError | RecursionError) -> str:
    """Returns why a text is no JSON, without the advice to programmers that Python adds."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    text = str(error)
    return "a number has too many digits" if _TOO_LONG in text else text
