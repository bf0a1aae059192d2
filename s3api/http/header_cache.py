"""Header fields of objects as GET and HEAD show them, kept for a worker while they stay true.

They follow from the facts, the bucket's settings and whether checksums are asked for. All of these
are immutable, and those who read them tell the same object again while nothing has changed, so that
a look whether they are the same says whether the fields are right.
"""

from collections.abc import Callable
from typing import Final

from kvfs.http.api import Prepared
from kvfs.objects.object_info import Facts
from s3api.http.s3_errors import Headers
from s3api.storage.bucket_settings import Settings

_REMEMBERED: Final = 4096


class Shown:
    """The cache of one worker; its event loop."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, bool], tuple[Facts, Settings, Prepared]] = {}

    def fields(
        self, facts: Facts, settings: Settings, checksums: bool, make: Callable[[], Headers]
    ) -> Prepared:
        """The result of `make` for them. Raises what it raises."""
        where = facts.ino, checksums
        seen = self._seen.get(where)
        if seen is not None and seen[0] is facts and seen[1] is settings:
            return seen[2]
        fields = Prepared(make())
        if len(self._seen) >= _REMEMBERED:
            self._seen.clear()
        self._seen[where] = facts, settings, fields
        return fields
