"""Removes secrets from texts that leave the machine (no I/O).

Two nets: the known secrets, wherever they stand, and what stands where secrets do: after the name
of one, or before the host of a URL.
"""

import re
from collections.abc import Iterable
from typing import Final

from kvfs.base.printable import without_passwords

REMOVED: Final = "[removed]"
_SHORTEST: Final = 6
"""Letters of a known secret: of shorter ones every text is full."""
_NAMED: Final = re.compile(
    r"(?P<name>(?:password|passwd|passphrase|secret(?:[_-]?(?:access)?[_-]?key)?|token|signature|"
    r"credential)[\"']?\s*[=:]\s*[\"']?)(?P<value>[^\s,;&\"'\])}]+)",
    re.IGNORECASE,
)
_AUTHORIZED: Final = re.compile(
    r"(?P<name>authorization[\"']?\s*[=:]\s*)(?P<value>.+)", re.IGNORECASE
)


class Redactor:
    """Removes secrets, those given among them."""

    def __init__(self, secrets: Iterable[str]) -> None:
        known = sorted({each for each in secrets if len(each) >= _SHORTEST}, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, known))) if known else None

    def clean(self, text: str) -> str:
        """Returns the text without secrets."""
        if self._known is not None:
            text = self._known.sub(REMOVED, text)
        text = without_passwords(text, REMOVED, is_text=True)
        for pattern in (_AUTHORIZED, _NAMED):
            text = pattern.sub(lambda found: f"{found['name']}{REMOVED}", text)
        return text
