"""Counts missing names that were looked for, by reason: the same decision for every door.

The reason for which a name went is remembered (`datastore.removal_reasons`); without one, the error
tells it (`policy.miss_reasons`). The mount counts in the node, each S3 worker in its own process,
from where its supervisor collects it, and a client tells the node with its other notices.
"""

from collections.abc import Iterable
from typing import Final

from kvfs.base.errors import NotFound
from kvfs.datastore.removal_reasons import GoneNames
from kvfs.policy.miss_reasons import REASONS, SLOTS, Reason, hash_of, reason_in, reason_of

Counts = dict[str, int]
"""Counts by reason."""
_LAST: Final = SLOTS - 1


def no_misses() -> Counts:
    """Returns counts of 0 for each reason."""
    return dict.fromkeys(REASONS, 0)


class Misses:
    """The misses of one door; any thread. A race of two threads may lose a count, which does no
    harm."""

    def __init__(self, gone: GoneNames) -> None:
        self._gone = gone
        self.counts = no_misses()

    def missed(self, entry: bytes) -> None:
        """Counts a look-up of the name with this entry, which does not exist."""
        words = self._gone.words
        if words is None:
            words = self._gone.open()
        hashed = hash_of(entry)
        word = words[hashed & _LAST]
        self.counts[reason_in(word, hashed) if word else "never_stored"] += 1

    def missed_all(self, missing: Iterable[bytes | NotFound]) -> None:
        """Does the same for many names, or the errors that a caller gets for them."""
        words, counts = self._gone.open(), self.counts
        unknown = 0
        for each in missing:
            if isinstance(each, NotFound):
                self.found_nothing(each)
                continue
            hashed = hash_of(each)
            if word := words[hashed & _LAST]:
                counts[reason_in(word, hashed)] += 1
            else:
                unknown += 1
        counts["never_stored"] += unknown

    def found_nothing(self, error: NotFound) -> None:
        """Counts an error that a caller gets."""
        reason: Reason = "never_stored"
        if error.at is not None:
            hashed = hash_of(error.at)
            reason = reason_in(self._gone.open()[hashed & _LAST], hashed)
        self.counts[reason_of(error) if reason == "never_stored" else reason] += 1

    def count(self, reason: Reason) -> None:
        """Counts a miss for this reason."""
        self.counts[reason] += 1

    def take(self) -> Counts:
        """Returns the counts since the last time, for reasons that have any."""
        taken, self.counts = self.counts, no_misses()
        return {reason: count for reason, count in taken.items() if count}
