"""Namespaces whose names and files are each node's own (`--coherence peer`): their keys are
committed in the replica's file alone. The server has of them what all nodes share.

`kvfs.meta.local_keys` says which they are. What may come between a local key and its node, and what
keeps the two together:

| event | local keys |
|---|---|
| an entry of the log | names none, but where the namespace is made, changed or removed |
| the replica is read anew | stay: neither overwritten by what the server has, nor asked for there |
| the namespace is removed, by any node | stay local until `LocalNamespaces.drop` has dropped them |
| a kill | its mark (`MARKS`) is in the commit that first told of the namespace, and goes last |
| the namespace ends being of this kind | stay local until they are what the engine has (`take`) |
| the node is another one now (it was removed) | dropped before its replica is read anew |
| a copy of the metadata into another engine | not copied: they would become everybody's |

Invariants
- A namespace is of this kind from its making, or from the entry of the log that says so, to its
  removal: from then on each node's replica has its own of what all had alike, and the server takes
  nothing of it any more from a replica without that entry (`kvfs.meta.redis.log`: 'turn'). Where a
  replica is read anew, it is so when it is whole.
- From the entry of the log on with which it begins to end nothing is written to a node's own keys
  of it, until it is asked back, or they are what the engine has (`take`); that is kept beside them
  until then (`kvfs.meta.engine_layer`).
- One transaction writes local keys or shared ones. What changes a namespace itself may replace or
  remove its usage and the times of its root directory, at the server and so on all nodes.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Final, TypeVar

import msgspec
import trio

from kvfs.base.errors import CrossNamespace, Unavailable
from kvfs.meta import keys
from kvfs.meta.engine import NOT_DONE, Transaction, Tried
from kvfs.meta.engine_layer import (
    CLOSED,
    ENDED,
    MARKS,
    VOID,
    Changed,
    EngineLayer,
    space_of,
)
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from kvfs.meta.lmdb.lmdb_transactions import WriteTransaction
from kvfs.meta.local_keys import LOCAL_KINDS, is_local_key, is_namespaces_own
from kvfs.meta.records import Namespace, unpack_namespace
from kvfs.meta.redis.log import Proposal
from kvfs.meta.redis.scripts import digest
from kvfs.meta.replica.local_transaction import (
    ClosingTransaction,
    Ending,
    LocalChange,
    LocalSpaces,
    LocalTransaction,
    SharedKey,
)

T = TypeVar("T")
_COUNTER: Final = keys.counter(0)[0]
_INODE: Final = keys.INODE[0]


class NotHeld(Exception):
    """A file whose data are not here is to get another name or other attributes, which only its
    holders keep. It leaves a transaction past all handlers of errors; the caller never gets it,
    since the transaction is run again when the data are here."""

    def __init__(self, ino: int) -> None:
        super().__init__(ino)
        self.ino = ino


Then = Callable[[], None]
OnLocal = Callable[[Transaction, Sequence[LocalChange]], Then]
"""Told, in its transaction, what any process of the host commits here alone, but for a new file
that nobody sees yet. It may write there what is beyond the metadata, and returns what is to be done
once that is committed; neither may wait. Raises NotHeld."""


def nothing() -> None:
    """Does nothing, after a change that nobody has to be told of."""


def tells_nobody(_t: Transaction, _changes: Sequence[LocalChange]) -> Then:
    """Hears of what is committed here alone, and does nothing."""
    return nothing


class _Outdated(Exception):
    """The transaction was run on what is not so any more."""


class LocalNamespaces:
    """The namespaces of this kind, as one replica knows them, and their changes. They are
    remembered as its file has them; after an error, `load` them again."""

    def __init__(self, local: EmbeddedEngine, on_local: OnLocal = tells_nobody) -> None:
        self._local = local
        self._on_local = on_local
        self._spaces = LocalSpaces()
        self._ids = self._spaces.ids
        self.has: Final[Callable[[int], bool]] = self._spaces.numbers.__contains__
        """Returns whether a namespace is of this kind."""
        self.layer: Final = EngineLayer()
        """The records that the engine has of those that end being of this kind."""
        self.opened = trio.Event()
        """Set when one that was closed may be written to again; then it is another one."""
        self.on_numbers: Callable[[], None] = lambda: None
        """Called when more inode numbers may be needed."""
        self.on_becoming: Callable[[Transaction, int], None] = lambda _t, _namespace_id: None
        """Called in the transaction from which on a namespace's keys are this node's own."""
        self.turns = 0
        """Namespaces that became such ones, or ended it, since the start."""
        self.records: dict[int, Namespace | None] = {}
        """Decoded records of namespaces, of all kinds, until one of them changes, or the replica is
        read anew."""
        self.lagging: dict[int, bool] = {}
        """Whether others may hear of their new files later, for as long."""

    def load(self) -> None:
        """Loads what the file knows. Raises Corrupt, Unavailable."""

        self.forget_records()
        self._spaces.replace(map(keys.unpack_node, self._local.read_now(self.layer.load)))

    def forget_records(self) -> None:
        """Forgets what was remembered of records."""
        self.records.clear()
        self.lagging.clear()

    def note(self, t: Transaction, key: bytes, value: bytes | None) -> None:
        """Takes notice, in the transaction that writes it, of a namespace's record."""
        self.forget_records()
        space = key[1:]
        if value is None:
            return
        if space in self._ids:
            self._note_end(t, space, value)
        elif _is_peer(value):
            self._spaces.add(space)
            self.turns += 1
            t.put(MARKS + space, b"")
            prefix = keys.delegations(keys.unpack_node(space))
            for each in list(t.scan_keys(prefix, keys.after(prefix))):
                t.delete(each)
            self.on_becoming(t, keys.unpack_node(space))
            self.on_numbers()
            self._note_end(t, space, value)

    def _note_end(self, t: Transaction, space: bytes, value: bytes) -> None:
        """Takes notice of how far a namespace is that ends being of this kind. It ends when all
        nodes have told what they hold, so this one has."""
        record, stage = _decoded(value), self.layer.stages.get(space, b"")
        if record is None or self.layer.is_taking(space):
            return
        wanted = b"" if record.is_peer else ENDED
        if record.is_peer and record.ends_peer:
            wanted = VOID if record.is_asked_back else CLOSED
        if wanted == stage:
            return
        if not wanted:
            self.layer.drop(t, space, sys.maxsize)  # which has nothing, unless this node was away
        self.layer.enter(t, space, wanted)
        if wanted in (b"", VOID):
            self._let_go_on()

    def note_all(self, t: Transaction) -> None:
        """Takes notice of all records, when the replica has been read anew."""
        for key, value in list(t.scan(keys.NAMESPACE, keys.after(keys.NAMESPACE))):
            self.note(t, key, value)

    def begin_anew(self, t: Transaction, records: Sequence[tuple[bytes, bytes]]) -> None:
        """Takes notice that the replica is read anew: the layer gets its part of what is read.
        `records`: those of all namespaces, as the engine has them."""
        for key, value in records:
            record = _decoded(value)
            if record is None:
                continue
            if key[1:] in self._ids or (record.ends_peer and record.is_peer):
                self.note(t, key, value)

    def note_filling(self, t: Transaction, key: bytes, value: bytes) -> None:
        """Takes notice of a namespace's record while the replica is read anew. Raises Unavailable:
        it is to be begun again."""
        self.forget_records()
        record = _decoded(value)
        if record is None or not record.ends_peer:
            return
        if key[1:] in self._ids:
            self._note_end(t, key[1:], value)
        elif record.is_peer:
            raise Unavailable("a namespace began to end being peer while all metadata were read")

    def _let_go_on(self) -> None:
        """Wakes those who wait for a namespace that was closed."""
        self.opened.set()
        self.opened = trio.Event()

    # ---- what is local

    def numbers(self) -> list[int]:
        """Returns all namespaces of this kind, with those that were removed."""
        return sorted(self._spaces.numbers)

    @property
    def local_key(self) -> Callable[[bytes], bool] | None:
        """`is_local`; None while there is no such namespace, so that nobody has to ask."""
        return self.is_local if self._ids else None

    def is_local(self, key: bytes) -> bool:
        """Returns whether a key is this node's own."""
        return is_local_key(key, self._ids)

    # ---- changes

    def try_commit(self, fn: Callable[[Transaction], T], made: int = 0) -> Tried:
        """Runs `fn` and commits it here; not done, and without effect, if it writes a shared key,
        or neither wrote nor read a local one. Errors of `fn` pass through if they are about local
        keys. Raises NotHeld, NoSpace, ReadOnly, Corrupt, Unavailable.

        `made`: an inode that `fn` may make and that no other process is to see yet: then the commit
        is deferred."""
        committed: Then | None = None

        def body(t: WriteTransaction) -> T:
            nonlocal committed
            guarded = LocalTransaction(t, self._spaces)
            if self.layer.stages:
                guarded = ClosingTransaction(t, self._spaces, self.layer)
            try:
                result = fn(guarded)
            except Ending:
                raise
            except Exception:
                if not guarded.is_local_matter:
                    raise SharedKey from None
                raise
            if not guarded.is_local_matter:
                raise SharedKey
            is_told = not is_new or not _is_of_unseen(guarded.changes)
            committed = self._committing(t, guarded.changes) if is_told else nothing
            return result

        try:
            is_new = made != 0 and self._local.first_now(keys.inode(made)) is None
            result = self._local.transact_now(body, is_new)
        except SharedKey:
            return NOT_DONE
        assert committed is not None, "it was run"
        committed()
        return Tried(True, result)

    def try_proposal(self, proposal: Proposal) -> bool | None:
        """Commits here what another process ran on this replica. False: it has to be run again;
        None: it is not local, and nothing was done. Raises what `try_commit` raises."""
        is_local = self.is_local
        written = [*proposal.writes, *(key for key, _ in proposal.merges)]
        self._check_open(written)
        if not written or not all(is_local(key) for key in written):
            return None
        committed: Then | None = None

        def body(t: Transaction) -> None:
            nonlocal committed
            changes: list[LocalChange] = []
            if any(t.get(key) != seen for key, seen in proposal.reads.items()):
                raise _Outdated
            if not all(is_range_so(t, *each) for each in proposal.ranges):
                raise _Outdated
            for key, value in proposal.writes.items():
                changes.append(LocalChange(key, t.get(key), value))
                if value is None:
                    t.delete(key)
                else:
                    t.put(key, value)
            for key, operand in proposal.merges:
                t.merge(key, operand)
            committed = self._committing(t, changes)

        try:
            self._local.transact_now(body)
        except _Outdated:
            return False
        assert committed is not None, "it was run"
        committed()
        return True

    def _check_open(self, written: Iterable[bytes]) -> None:
        """Raises Ending if keys of a namespace that is closed are to be written."""
        if self.layer.stages and any(
            self.layer.is_closed(space_of(key))
            for key in written
            if self.is_local(key) and not is_namespaces_own(key)
        ):
            raise Ending

    def shared(self, proposal: Proposal) -> Proposal | None:
        """Returns what the server is to check and write of a proposal that is not local; None: it
        has to be run again, since what it read of local keys is not so. Raises Mixed."""
        is_local = self.is_local
        for key in proposal.writes:
            check_shared(key, is_local)
        for key, _ in proposal.merges:
            if is_local(key):
                raise Mixed(key)
        own = {key: seen for key, seen in proposal.reads.items() if is_local(key)}
        if not own:
            return proposal
        if self._local.read_now(lambda t: any(t.get(key) != seen for key, seen in own.items())):
            return None
        others = {key: seen for key, seen in proposal.reads.items() if key not in own}
        return proposal._replace(reads=others)

    def _committing(self, t: Transaction, changes: Sequence[LocalChange]) -> Then:
        if not changes:
            return nothing
        then = self._on_local(t, changes)
        for each in changes:
            if each[0][0] == _COUNTER:
                break
        else:
            return then

        def committed() -> None:
            self.on_numbers()
            then()

        return committed

    # ---- the end of a namespace

    def add_engines(
        self, namespace_id: int, after: bytes, limit: int, *, switches: bool
    ) -> tuple[list[Changed], bytes]:
        """Does what `EngineLayer.add` does. Raises what `try_commit` raises."""
        space = keys.pack_u16(namespace_id)
        return self._local.transact_now(
            lambda t: self.layer.add(t, space, after, limit, switches=switches)
        )

    def take(self, namespace_id: int, limit: int) -> tuple[list[Changed], bool]:
        """Does what `EngineLayer.take` does; the namespace is not of this kind any more when that
        was all. Raises what `try_commit` raises."""
        space = keys.pack_u16(namespace_id)
        try:
            changed, is_all = self._local.transact_now(lambda t: self.layer.take(t, space, limit))
        except BaseException:
            self.load()
            raise
        if is_all:
            self._spaces.discard(space)
            self.forget_records()
            self.turns += 1
            self._let_go_on()
        return changed, is_all

    def drop_layer(self, namespace_id: int, limit: int) -> bool:
        """Drops up to `limit` keys of what the engine had of a namespace that was asked back;
        returns whether that was all. Raises what `try_commit` raises."""
        space = keys.pack_u16(namespace_id)
        return self._local.transact_now(lambda t: self.layer.drop(t, space, limit))

    def gone(self, t: Transaction) -> list[int]:
        """Returns the namespaces that were removed and whose local keys are not dropped yet. Says
        nothing of use while the replica is not whole."""
        spaces = sorted(self._ids)
        return [keys.unpack_node(each) for each in spaces if t.get(keys.NAMESPACE + each) is None]

    def drop_inodes(self, inos: Sequence[int]) -> None:
        """Drops the records of inodes whose data are gone: what hangs on them follows (`drop`).
        Raises what `try_commit` raises."""

        def fn(t: Transaction) -> None:
            for ino in inos:
                t.delete(keys.inode(ino))

        self._local.transact_now(fn)

    def drop(self, namespace_id: int, limit: int) -> bool:
        """Drops up to `limit` local keys of a namespace that was removed; the last of them is its
        mark. Returns whether that was all. Raises what `try_commit` raises."""
        space = keys.pack_u16(namespace_id)

        def fn(t: Transaction) -> bool:
            is_all = self._drop(t, space, limit)
            if is_all:
                t.delete(MARKS + space)
            return is_all

        is_all = self._local.transact_now(fn)
        if is_all:
            self._spaces.discard(space)
        return is_all

    def drop_every(self, limit: int) -> bool:
        """Drops up to `limit` local keys of all namespaces, which another node left here. Returns
        whether that was all. Raises what `try_commit` raises."""
        return all(
            self._local.transact_now(partial(self._drop, space=space, limit=limit))
            for space in sorted(self._ids)
        )

    def _drop(self, t: Transaction, space: bytes, limit: int) -> bool:
        found = list(islice(self._local_keys(t, space), limit))
        for key in found:
            t.delete(key)
        return len(found) < limit

    def _local_keys(self, t: Transaction, space: bytes) -> Iterator[bytes]:
        for kind in LOCAL_KINDS:
            prefix = kind + space
            yield from filter(self.is_local, t.scan_keys(prefix, keys.after(prefix)))
        start, end = keys.HELD, keys.after(keys.HELD)
        while (first := next(t.scan_keys(start, end), None)) is not None:
            prefix = first[:3] + space
            yield from t.scan_keys(prefix, keys.after(prefix))
            start = keys.after(first[:3])


def _is_of_unseen(changes: Sequence[LocalChange]) -> bool:
    """Returns whether a transaction that made a file which nobody sees yet did nothing else that
    anybody is told of: no other file was changed, and no number of inodes taken."""
    for key, old, _ in changes:
        kind = key[0]
        if kind == _COUNTER or (kind == _INODE and old is not None):
            return False
    return True


def _is_peer(record: bytes) -> bool:
    found = _decoded(record)
    return found is not None and found.is_peer


def _decoded(record: bytes) -> Namespace | None:
    """Returns the record of a namespace; None for a damaged one, which counts as that of another
    kind, and keeps nobody from following the log."""
    try:
        return unpack_namespace(record)
    except msgspec.DecodeError:
        return None


def marked(t: Transaction) -> set[int]:
    """Returns the namespaces of this kind of which a replica may have local keys."""
    marks = t.scan_keys(MARKS, keys.after(MARKS))
    return {keys.unpack_node(key[len(MARKS) :]) for key in marks}


class Mixed(CrossNamespace):
    """A change of local keys and shared ones. Whoever commits raises its base class, unless the
    namespace is closed, or was of another kind when the change began."""

    def __init__(self, key: bytes) -> None:
        """`key`: the local one."""
        super().__init__(
            "a namespace with --coherence peer is each node's own: nothing is changed there and"
            " elsewhere at once"
        )
        self.space = space_of(key)


def check_shared(key: bytes, is_local: Callable[[bytes], bool]) -> None:
    """Checks a key that is to be written at the server. Raises Mixed if it is local and not a
    namespace's own."""
    if is_local(key) and not is_namespaces_own(key):
        raise Mixed(key)


def is_range_so(t: Transaction, start: bytes, end: bytes, limit: int, seen: bytes) -> bool:
    """Returns whether a range is as another process read it."""
    return digest(islice(t.scan(start, end), limit)) == seen
