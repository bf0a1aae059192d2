"""Finds out of which namespace, or shard, a transaction is, by the first key of one that it reads
or writes. Pure."""

from collections.abc import Callable, Iterator, Sequence

from kvfs.meta.engine import Transaction
from kvfs.meta.gathered_writes import GatheredWrites
from kvfs.meta.redis.scripts import TOP, Pair


class _Found(Exception):
    """It leaves the transaction past all handlers of errors."""

    def __init__(self, shard: int) -> None:
        super().__init__(shard)
        self.shard = shard


def first_shard(
    t: Transaction, fn: Callable[[Transaction], object], shard_of: Callable[[bytes], int]
) -> int:
    """Returns the first shard but TOP, by `shard_of` of a key, that `fn` turns to; TOP if it comes
    to its end, or fails, without one."""
    try:
        fn(_Probe(t, shard_of))
    except _Found as found:
        return found.shard
    except Exception:  # it is run again, and raises that where it belongs
        return TOP
    return TOP


class _Probe(GatheredWrites):
    """A transaction that is left at the first key of a shard but TOP."""

    def __init__(self, t: Transaction, shard_of: Callable[[bytes], int]) -> None:
        super().__init__(writable=True)
        self._t = t
        self._shard_of = shard_of
        self.node = t.node

    def get(self, key: bytes, /) -> bytes | None:
        self._look(key)
        return self.writes[key] if key in self.writes else self._t.get(key)

    def get_many(self, names: Sequence[bytes], /) -> list[bytes | None]:
        return [self.get(key) for key in names]

    def scan(self, start: bytes, end: bytes, /) -> Iterator[Pair]:
        self._look(start)
        return self._t.scan(start, end)

    def scan_keys(self, start: bytes, end: bytes, /) -> Iterator[bytes]:
        self._look(start)
        return self._t.scan_keys(start, end)

    def _check(self, key: bytes) -> None:
        super()._check(key)
        self._look(key)

    def _look(self, key: bytes) -> None:
        if (shard := self._shard_of(key)) != TOP:
            raise _Found(shard)
