"""Transactions of a process beside a node of a cluster, whose metadata are a replica.

Reads are made on this host, and are as new as their namespace demands (`kvfs.cluster.coherence`):
the node catches up before a strict namespace is read, and a cache's names are misses while the node
does not hear the engine. The node commits our writes for us, and its mount has forgotten the
earlier state when it answers.
"""

import base64
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeVar

from kvfs.base import control
from kvfs.base.clock import now
from kvfs.base.errors import Busy, Conflict, KvfsError, TooLarge, Unavailable, Unreached
from kvfs.cluster.coherence import CACHE_S
from kvfs.datastore.layout import Store
from kvfs.datastore.replica_clock import heard_at
from kvfs.meta import keys
from kvfs.meta.delegations import Delegated
from kvfs.meta.engine import Transaction
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from kvfs.meta.records import ROOT_INODE, namespace_of, unpack_namespace
from kvfs.meta.replica import process_transactions

T = TypeVar("T")
_TOP: Final = keys.entries(ROOT_INODE)
"""The beginning of the keys of namespaces' entries."""
_MOST_BYTES: Final = control.LINE_LIMIT * 3 // 4 - 4096
"""Bytes of a transaction: base64 makes four bytes of three."""
_DEADLINE_S: Final = 30.0
"""The node waits for the engine for ten seconds, and then for its mount's kernel."""
_OF_THE_ENGINE: Final = (Unavailable, Conflict, TooLarge)
"""Errors that tell nothing about the metadata."""


class _Behind(Exception):
    """The replica has to catch up before this is read."""


class _Checked:
    """A view that is left when it turns to a namespace in which the replica may be behind."""

    __slots__ = ("_is_believed", "_t", "get_many", "node", "scan", "scan_keys")

    def __init__(self, t: Transaction, is_believed: Callable[[], bool]) -> None:
        self._t = t
        self._is_believed = is_believed
        self.get_many: Callable[[Sequence[bytes]], list[bytes | None]] = t.get_many
        self.scan: Callable[[bytes, bytes], Iterator[tuple[bytes, bytes]]] = t.scan
        self.scan_keys: Callable[[bytes, bytes], Iterator[bytes]] = t.scan_keys
        self.node = t.node

    def get(self, key: bytes, /) -> bytes | None:
        value = self._t.get(key)
        if key.startswith(_TOP) and key.endswith(b"/"):
            self._look(value)
        return value

    def _look(self, entry: bytes | None) -> None:
        """Looks at a namespace. Raises Unreached if everything in it is a miss."""
        if entry is None:
            raise _Behind
        record = self._t.get(keys.namespace(namespace_of(keys.unpack_u64(entry))))
        if record is None or unpack_namespace(record).is_strict:
            raise _Behind
        if not self._is_believed():
            raise Unreached("the engine is not heard, and a cache's names may be outdated")

    def put(self, key: bytes, value: bytes, /) -> object:
        return self._t.put(key, value)

    def delete(self, key: bytes, /) -> bool:
        return self._t.delete(key)

    def merge(self, key: bytes, operand: bytes, /) -> None:
        self._t.merge(key, operand)


class ReplicaTransactions:
    """The transactions of one store; any thread."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._node = control.ControlClient(store.socket)

    def read(self, engine: EmbeddedEngine, fn: Callable[[Transaction], T]) -> T:
        """Runs `fn` on the replica `engine`. Raises what it raises, Unreached, Unavailable."""
        try:
            return engine.read_now(lambda t: fn(_Checked(t, self.is_believed)))
        except _Behind:
            self.catch_up()
        return engine.read_now(fn)

    def write(self, engine: EmbeddedEngine, fn: Callable[[Transaction], T]) -> T:
        """Runs `fn` on the replica, and has the node commit it. Raises what it raises, Unavailable
        (it may be committed or not), Conflict, TooLarge; Busy if another node may be making files
        in a directory that `fn` removes, and does not answer."""
        end = time.monotonic() + _DEADLINE_S
        while True:
            try:
                return self._write(engine, fn)
            except Delegated as found:
                if time.monotonic() >= end:
                    raise Busy(
                        "other nodes make files in the namespace all the time: try again"
                    ) from None
                self._ask("recall", {"namespace": found.namespace_id})

    def _write(self, engine: EmbeddedEngine, fn: Callable[[Transaction], T]) -> T:
        try:
            return process_transactions.ask(engine, fn, self._propose, most_bytes=_MOST_BYTES)
        except _OF_THE_ENGINE:
            raise
        except KvfsError:
            # What it raised was perhaps not so any more: what it writes is checked, this is not.
            self.catch_up()
        return process_transactions.ask(engine, fn, self._propose, most_bytes=_MOST_BYTES)

    def foresee(self, engine: EmbeddedEngine, fn: Callable[[Transaction], T]) -> T:
        """Runs `fn` on the replica, as `write` begins; what it raises, it raises of all that was
        committed before the call. Raises Unavailable too."""
        try:
            return engine.read_now(fn)
        except _OF_THE_ENGINE:
            raise
        except KvfsError:  # perhaps not so any more
            self.catch_up()
        return engine.read_now(fn)

    def is_believed(self) -> bool:
        """Returns whether the node heard the engine of late."""
        return now() - heard_at(self._store.heard) < CACHE_S

    def catch_up(self) -> None:
        """Returns when the replica holds everything that was committed before the call. Raises
        Unavailable."""
        self._ask("catch_up", {})

    def must_catch_up(self, t: Transaction, name: bytes) -> bool:
        """Returns whether a look-up in a namespace needs that. Raises Unreached if everything in it
        is a miss."""
        try:
            _Checked(t, self.is_believed).get(keys.directory_entry(ROOT_INODE, name))
        except _Behind:
            return True
        return False

    def sync(self) -> None:
        """See `Engine.sync`. Raises Unavailable."""
        self._ask("sync", {})

    def claim(self, job: str) -> bool:
        """Takes a job that only one node of the cluster at a time may do; returns whether this node
        does it. Raises Unavailable."""
        return bool(self._ask("claim", {"job": job}))

    def close(self) -> None:
        """Closes the connection to the node."""
        self._node.close()

    def _propose(self, packed: bytes) -> bool:
        return bool(self._ask("propose", {"transaction": base64.b64encode(packed).decode()}))

    def _ask(self, method: str, params: dict[str, object]) -> Any:
        try:
            return self._node.call(method, params, _DEADLINE_S)
        except control.NoNode as error:
            raise Unavailable(f"{error}: what nodes share is changed through a node") from None
