"""Transactions of a process beside a node of a cluster, whose metadata are a replica.

Reads are made on this host, and are as new as their namespace demands (`kvfs.cluster.coherence`):
the node catches up before a strict namespace is read, and a cache's names are misses while the node
does not hear the engine. The names of a peer namespace are this node's own, so nobody waits for the
engine there. The node commits our writes for us, and its mount has forgotten the
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
from kvfs.meta.engine_absence import WAIT_S
from kvfs.meta.inode_ranges import UsedUp
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from kvfs.meta.records import ROOT_INODE, namespace_of, unpack_namespace
from kvfs.meta.replica import process_transactions
from kvfs.meta.shards.partial_view import (
    Fetched,
    Lacking,
    PartialView,
    asked_again,
    beside_node,
)
from kvfs.session.node_return import NodeReturn
from kvfs.tree.namespaces import is_peer

T = TypeVar("T")
_TOP: Final = keys.entries(ROOT_INODE)
"""The beginning of the keys of namespaces' entries."""
_MOST_BYTES: Final = control.LINE_LIMIT * 3 // 4 - 4096
"""Bytes of a transaction: base64 makes four bytes of three."""
_DEADLINE_S: Final = 30.0
"""The node waits for the engine for ten seconds, and then for its mount's kernel."""
_CHANGED_S: Final = WAIT_S + _DEADLINE_S
"""The same of a change, which may wait until the engine is there again."""
_OF_THE_ENGINE: Final = (Unavailable, Conflict, TooLarge)
"""Errors that tell nothing about the metadata."""


class _Behind(Exception):
    """The replica has to catch up before this is read, with a namespace or with all of them (0)."""

    def __init__(self, namespace_id: int) -> None:
        super().__init__(namespace_id)
        self.namespace_id = namespace_id


class _Checked:
    """A view that is left when it turns to a namespace in which the replica may be behind."""

    __slots__ = ("_is_believed", "_t", "get_many", "node", "scan", "scan_keys")

    def __init__(self, t: Transaction, is_believed: Callable[[int], bool]) -> None:
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
            raise _Behind(0)
        number = namespace_of(keys.unpack_u64(entry))
        record = self._t.get(keys.namespace(number))
        namespace = None if record is None else unpack_namespace(record)
        if namespace is None or (namespace.is_strict and not _is_lacking(self._t, number)):
            raise _Behind(number)
        if namespace.is_peer or _is_lacking(self._t, number):
            return
        if not self._is_believed(number):
            raise Unreached("the engine is not heard, and a cache's names may be outdated")

    def put(self, key: bytes, value: bytes, /) -> object:
        return self._t.put(key, value)

    def put_all(self, pairs: Sequence[tuple[bytes, bytes]], /) -> None:
        self._t.put_all(pairs)

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
            return self.read_known(engine, lambda t: fn(_Checked(t, self.is_believed)))
        except _Behind as behind:
            self.catch_up(behind.namespace_id, reading=True)
        return self.read_known(engine, fn)

    def read_known(self, engine: EmbeddedEngine, fn: Callable[[Transaction], T]) -> T:
        """Runs `fn` on the replica `engine`, however old it is; what it turns to of a namespace
        that the node does not follow is read by the node, or the node follows it. Raises what it
        raises, Unavailable."""
        fetched: dict[int, Fetched] = {}
        while True:
            try:
                return engine.read_now(lambda t: fn(beside_node(t, fetched)))
            except Lacking as found:
                self._fetch(found, fetched)

    def _fetch(self, lacking: Lacking, fetched: dict[int, Fetched]) -> None:
        """Fetches what is lacking, and all anew that was fetched of its shard; nothing of that once
        the node has all."""
        names = asked_again(lacking, fetched)
        if not names:
            self.catch_up(lacking.shard)
            return
        asked = [base64.b64encode(key).decode() for key in names]
        values = [
            None if each is None else base64.b64decode(each)
            for each in self._ask("fetch", {"keys": asked})
        ]
        fetched[lacking.shard] = dict(zip(names, values, strict=True))

    def write(self, engine: EmbeddedEngine, fn: Callable[[Transaction], T]) -> T:
        """Runs `fn` on the replica, and has the node commit it. Raises what it raises, Unavailable
        (it may be committed or not), Conflict, TooLarge; Busy if another node may be making files
        in a directory that `fn` removes, and does not answer."""
        end = time.monotonic() + _DEADLINE_S
        while True:
            try:
                return self._write(engine, fn)
            except Lacking as found:  # the shard of what is changed is followed
                self.catch_up(found.shard)
            except UsedUp as found:
                self._ask("take_numbers", {"namespace": found.namespace_id})
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
            if engine.read_now(lambda t: process_transactions.concerns_own(t, fn)):
                raise
            # What it raised was perhaps not so any more: what it writes is checked, this is not.
            self._catch_up_for(engine, fn)
        return process_transactions.ask(engine, fn, self._propose, most_bytes=_MOST_BYTES)

    def foresee(self, engine: EmbeddedEngine, fn: Callable[[Transaction], T]) -> T:
        """Runs `fn` on the replica, as `write` begins; what it raises, it raises of all that was
        committed before the call. Raises Unavailable too."""
        try:
            return self.read_known(engine, fn)
        except _OF_THE_ENGINE:
            raise
        except KvfsError:  # perhaps not so any more
            if engine.read_now(lambda t: process_transactions.concerns_own(t, fn)):
                raise
            self._catch_up_for(engine, fn)
        return self.read_known(engine, fn)

    def is_believed(self, namespace_id: int) -> bool:
        """Returns whether the node heard the engine of a namespace of late."""
        return now() - heard_at(self._store.heard, namespace_id) < CACHE_S

    def catch_up(self, namespace_id: int = 0, *, reading: bool = False) -> None:
        """Returns when the replica holds everything that was committed before the call, of the
        names of namespaces and of the contents of this one; `reading`: or at once, where the engine
        is away and the namespace is read on (`kvfs.meta.engine_absence`). Raises Unavailable."""
        asked: dict[str, object] = {"namespace": namespace_id, "reading": reading}
        self._ask("catch_up", asked, _DEADLINE_S if reading else _CHANGED_S)

    def _catch_up_for(self, engine: EmbeddedEngine, fn: Callable[[Transaction], object]) -> None:
        self.catch_up(engine.read_now(lambda t: process_transactions.namespace_of(t, fn)))

    def must_catch_up(self, t: Transaction, name: bytes) -> int | None:
        """Returns the namespace with which the replica has to catch up before a look-up in one; 0:
        it knows none of the name; None: it need not. Raises Unreached if everything in it is a
        miss."""
        try:
            _Checked(t, self.is_believed).get(keys.directory_entry(ROOT_INODE, name))
        except _Behind as behind:
            return behind.namespace_id
        return self.lacking(t, name)

    def lacking(self, t: Transaction, name: bytes) -> int | None:
        """Returns the namespace if the replica does not have all of it; else None."""
        number = self.number(t, name)
        return number if number and _is_lacking(t, number) else None

    def number(self, t: Transaction, name: bytes) -> int:
        """Returns the number of a namespace; 0: there is none."""
        entry = t.get(keys.directory_entry(ROOT_INODE, name))
        return 0 if entry is None else namespace_of(keys.unpack_u64(entry))

    def is_own(self, t: Transaction, name: bytes) -> bool:
        """Returns whether the names of a namespace are this node's own."""
        number = self.number(t, name)
        return number != 0 and is_peer(t, number)

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
        asked: dict[str, object] = {"transaction": base64.b64encode(packed).decode()}
        return bool(self._ask("propose", asked, _CHANGED_S))

    def _ask(self, method: str, params: dict[str, object], deadline_s: float = _DEADLINE_S) -> Any:
        """Asks the node, or the next one where its mount waits for that. Raises Unavailable; of a
        transaction also where it may have been committed."""
        until = time.monotonic() + deadline_s
        try:
            return NodeReturn(self._store.socket.parent, until).ask(
                lambda: self._node.call(method, params, max(0.1, until - time.monotonic())),
                may_repeat=method != "propose",
            )
        except control.NoNode as error:
            raise Unavailable(f"{error}: what nodes share is changed through a node") from None


def _is_lacking(t: Transaction, namespace_id: int) -> bool:
    """Returns whether the replica does not have all of a namespace."""
    return isinstance(t, PartialView) and t.lacks(namespace_id)
