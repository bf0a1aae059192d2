"""Claims that have no slot in their row: the row is full, or the fingerprint has many holders. No
numpy: there are few of them.

A fingerprint's holders are one int, a bit for each: a name that each of 1,000 nodes has takes 160
bytes. The number of fingerprints is bounded by the caller.
"""

from collections.abc import Iterator


class SpilledClaims:
    """Claims by row and fingerprint; a holder is a small number."""

    __slots__ = ("_rows", "claims", "fingerprints")

    def __init__(self) -> None:
        self._rows: dict[int, dict[int, int]] = {}
        self.fingerprints = 0
        self.claims = 0

    def holders(self, row: int, fingerprint: int) -> int:
        """Returns the bits of the holders; 0: none."""
        found = self._rows.get(row)
        return found.get(fingerprint, 0) if found else 0

    def add(self, row: int, fingerprint: int, holder: int) -> None:
        """Adds a claim that is not there."""
        found = self._rows.setdefault(row, {})
        holders = found.get(fingerprint, 0)
        self.fingerprints += not holders
        self.claims += 1
        found[fingerprint] = holders | 1 << holder

    def remove(self, row: int, fingerprint: int, holder: int) -> bool:
        """Removes a claim; returns whether it was there."""
        holders = self.holders(row, fingerprint)
        if not holders >> holder & 1:
            return False
        self._keep(row, fingerprint, holders & ~(1 << holder))
        self.claims -= 1
        return True

    def remove_holders(self, row: int, dropped: int) -> None:
        """Removes all claims of these holders, given as bits, from a row."""
        for fingerprint, holders in tuple(self._rows.get(row, {}).items()):
            gone = holders & dropped
            if gone:
                self.claims -= gone.bit_count()
                self._keep(row, fingerprint, holders & ~dropped)

    def fingerprints_in(self, row: int) -> tuple[int, ...]:
        """Returns what is claimed in a row."""
        return tuple(self._rows.get(row, ()))

    def remove_all(self, row: int, fingerprint: int) -> int:
        """Removes all claims of a fingerprint; returns the bits of its holders."""
        holders = self.holders(row, fingerprint)
        self.claims -= holders.bit_count()
        self._keep(row, fingerprint, 0)
        return holders

    def take(self, row: int) -> dict[int, int]:
        """Removes and returns what is there of a row."""
        found = self._rows.pop(row, {})
        self.fingerprints -= len(found)
        self.claims -= sum(holders.bit_count() for holders in found.values())
        return found

    def fingerprints_of(self, row: int, holder: int) -> list[int]:
        """Returns what the holder claims in a row."""
        found = self._rows.get(row, {})
        return [each for each, holders in found.items() if holders >> holder & 1]

    def __contains__(self, row: int) -> bool:
        return row in self._rows

    def _keep(self, row: int, fingerprint: int, holders: int) -> None:
        found = self._rows[row]
        if holders:
            found[fingerprint] = holders
            return
        del found[fingerprint]
        self.fingerprints -= 1
        if not found:
            del self._rows[row]


def bits_from(holders: int, start: int, most: int) -> list[int]:
    """Returns up to `most` of the holders, from bit `start` upwards and then from the lowest: nodes
    that begin elsewhere choose others."""
    found: list[int] = []
    for part, offset in ((holders >> start, start), (holders & (1 << start) - 1, 0)):
        found += _bits(part, offset, most - len(found))
    return found


def _bits(holders: int, offset: int, most: int) -> Iterator[int]:
    while holders and most > 0:
        low = holders & -holders
        yield offset + low.bit_length() - 1
        holders ^= low
        most -= 1
