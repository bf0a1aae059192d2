"""Finds read transactions that do not end: LMDB reuses no page that was freed since they began, so
that the file grows by every commit, up to the end of its map.

A read takes microseconds, but its process may be stopped in the middle (SIGSTOP, a debugger).
"""

from typing import Final, NamedTuple

LONG_S: Final = 30.0
"""Time after which a reader is told of: a copy of the metadata may take some seconds."""


class _Reader(NamedTuple):
    pid: int
    thread: str
    seen: int
    """The commit that it sees."""


class LongReaders:
    """The readers of one file, as seen by regular looks."""

    def __init__(self) -> None:
        self._since: dict[_Reader, float] = {}

    def look(self, listed: str, newest: int, now: float) -> str | None:
        """Returns the message about the reader that has been there for longest, if it is a long
        one. `listed`: LMDB's list of readers; `newest`: the last commit; `now`: a time in
        seconds."""
        behind = [each for each in _read(listed) if each.seen < newest]
        self._since = {each: self._since.get(each, now) for each in behind}
        first = min(behind, key=self._since.__getitem__, default=None)
        if first is None or now - self._since[first] < LONG_S:
            return None
        return (
            f"process {first.pid} has read the metadata since {newest - first.seen} commits, whose"
            " pages are kept for it: let it go on (SIGCONT), or end it"
        )


def _read(listed: str) -> list[_Reader]:
    found = []
    for line in listed.splitlines()[1:]:
        words = line.split()
        if len(words) == 3 and words[2].isdigit():  # a `-`: it reads nothing now
            found.append(_Reader(int(words[0]), words[1], int(words[2])))
    return found
