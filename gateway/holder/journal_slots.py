"""The entries of a table of a mount's journal (`gateway.holder.mount_journal`)."""


class JournalSlots:
    """The entries of one table: which are free."""

    def __init__(self, words: memoryview, word: int, most: int) -> None:
        self._words = words
        self._word = word
        self._most = most
        self._free: list[int] = []

    @property
    def used(self) -> int:
        """The number of entries that were ever used: those after them are free."""
        return int(self._words[self._word])

    def take(self) -> int:
        """Returns the number of a free entry; -1: there is none."""
        if self._free:
            return self._free.pop()
        used: int = self._words[self._word]
        if used == self._most:
            return -1
        self._words[self._word] = used + 1
        return used

    def give(self, number: int) -> None:
        self._free.append(number)
