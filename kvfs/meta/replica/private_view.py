"""A transaction that is run to be committed in the metadata replica alone. No I/O but reading it.

A new file costs three of these, so unlike any other view it remembers nothing of what it read: no
server checks that."""

from collections.abc import Sequence

from kvfs.meta.merge_operators import merged
from kvfs.meta.replica.replica_view import View


class PrivateView(View):
    """Runs one function on it; `writes` and `merges` are then what it did."""

    def get(self, key: bytes, /) -> bytes | None:
        if key in self.writes:
            return self.writes[key]
        value = self._base.get(key)
        if key in self.merges:
            return merged(key, value, self.merges[key])
        return value

    def put(self, key: bytes, value: bytes, /) -> None:
        self.writes[key] = value
        if key in self.merges:
            del self.merges[key]

    def put_all(self, pairs: Sequence[tuple[bytes, bytes]], /) -> None:
        self.writes.update(pairs)
        for key, _ in pairs if self.merges else ():
            self.merges.pop(key, None)

    def delete(self, key: bytes, /) -> bool:
        found = self.get(key) is not None
        self.writes[key] = None
        if key in self.merges:
            del self.merges[key]
        return found
