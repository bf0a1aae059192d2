"""Counts what was looked for and is not there, by reason: the same decision for every door.

The reason for which a name went is remembered (`datastore.removal_reasons`); without one, the error
that was found says it (`policy.miss_reasons`). The mount counts in the node, each S3 worker in its
own process, from where its supervisor collects it, and a client tells the node with what else it
tells it.
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
    """Counts of 0 for each reason."""
    return dict.fromkeys(REASONS, 0)


class Misses:
    """The misses of one door; any thread. A race of two threads may lose a count, which does no
    harm."""

    def __init__(self, gone: GoneNames) -> None:
        self._gone = gone
        self.counts = no_misses()

    def missed(self, entry: bytes) -> None:
        """The name with this entry was looked for, and is not there."""
        words = self._gone.words
        if words is None:
            words = self._gone.open()
        hashed = hash_of(entry)
        word = words[hashed & _LAST]
        self.counts[reason_in(word, hashed) if word else "never_stored"] += 1

    def missed_all(self, missing: Iterable[bytes | NotFound]) -> None:
        """The same for many names, or what somebody is told of them."""
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
        """Somebody is told this."""
        reason: Reason = "never_stored"
        if error.at is not None:
            hashed = hash_of(error.at)
            reason = reason_in(self._gone.open()[hashed & _LAST], hashed)
        self.counts[reason_of(error) if reason == "never_stored" else reason] += 1

    def count(self, reason: Reason) -> None:
        """Somebody found nothing, for this reason."""
        self.counts[reason] += 1

    def take(self) -> Counts:
        """The counts since the last time, for reasons that have any."""
        taken, self.counts = self.counts, no_misses()
        return {reason: count for reason, count in taken.items() if count}
