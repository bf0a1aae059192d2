"""Patterns of policies and CORS rules: `*` is any text, `?` any one character.

Matching is greedy from the left and never goes back, so its time is bounded by the product of the
lengths whatever the pattern is. `${*}`, `${?}` and `${$}` are these characters themselves.
"""

import re
from functools import lru_cache
from typing import Final

_PIECE: Final = re.compile(r"\$\{([*?$])\}|([*?])|([^*?$]+|\$)")
_SPECIAL: Final = re.compile(r"[*?$]")
_REMEMBERED: Final = 4096


def matches(pattern: str, text: str) -> bool:
    """Returns whether `text` as a whole is of the form of `pattern`."""
    return compiled(pattern).fullmatch(text) is not None


def literal(text: str) -> str:
    """Returns the pattern that only `text` matches."""
    return _SPECIAL.sub(lambda match: "${" + match[0] + "}", text)


def is_fixed(pattern: str) -> bool:
    """Returns whether a pattern has no wildcard."""
    return not any(match[2] for match in _PIECE.finditer(pattern))


@lru_cache(_REMEMBERED)
def compiled(pattern: str) -> re.Pattern[str]:
    """Returns the regular expression of a pattern. Between stars, the first place of a part is as
    good as any later one: atomic groups, which never go back, find it."""
    parts = [""]
    for escaped, wildcard, text in _PIECE.findall(pattern):
        if wildcard == "*":
            parts.append("")
        else:
            parts[-1] += "." if wildcard else re.escape(escaped or text)
    if len(parts) == 1:
        return re.compile(parts[0], re.DOTALL)
    first, *middle, last = parts
    skips = "".join(f"(?>.*?{part})" for part in middle if part)
    return re.compile(f"{first}{skips}.*{last}", re.DOTALL)
