"""The common part of transactions that gather their writes, to be committed later."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final

from kvfs.base.errors import Invalid
from kvfs.meta.merge_operators import merge

MAX_KEY: Final = 511


class GatheredWrites(ABC):
    """A transaction whose `writes` hold its changes; None: deleted."""

    node = b""

    def __init__(self, *, writable: bool) -> None:
        self._writable = writable
        self.writes: dict[bytes, bytes | None] = {}

    @abstractmethod
    def get(self, key: bytes, /) -> bytes | None:
        """Like `Transaction.get`: its own writes come first."""

    def put(self, key: bytes, value: bytes, /) -> None:
        """Like `Transaction.put`. Raises Invalid."""
        self._check(key)
        self.writes[key] = value

    def put_all(self, pairs: Sequence[tuple[bytes, bytes]], /) -> None:
        """Like `Transaction.put_all`. Raises Invalid."""
        for key, value in pairs:
            self.put(key, value)

    def delete(self, key: bytes, /) -> bool:
        """Like `Transaction.delete`. Raises Invalid."""
        self._check(key)
        found = self.get(key) is not None
        self.writes[key] = None
        return found

    def merge(self, key: bytes, operand: bytes, /) -> None:
        """Like `Transaction.merge`. Raises Invalid."""
        merge(self, key, operand)

    def _check(self, key: bytes) -> None:
        if not self._writable:
            raise Invalid("a read-only transaction cannot write")
        if not 0 < len(key) <= MAX_KEY:
            raise Invalid(f"a key has 1 to {MAX_KEY} bytes, this one {len(key)}")
