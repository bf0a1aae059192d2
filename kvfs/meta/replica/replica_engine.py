"""The engine of a node in a cluster: a replica of all metadata in LMDB, whose changes are committed
by a server (Redis or Valkey).

Invariants
- A read sees one moment of the whole; it is at most as old as `heard_at` says. `catch_up` brings it
  up to now.
- A transaction whose `transact` returned is committed at the server, and in the replica; writes
  that are private to this node (`private`) in the replica alone, until another node has to know.
- Nothing is committed on a basis that the server does not have any more.

A cache of reads would not do: a prompt asks for many names that are not there, each for the first
time, and only a node that has all names can tell that by itself. The price is some 400 bytes a file
on each node.
"""

from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from typing import Any, Final, TypeVar, cast

import trio

from kvfs.base import detach
from kvfs.base.clock import now
from kvfs.base.errors import Conflict, CrossNamespace, EngineAway, Unavailable
from kvfs.meta import exclusive, keys
from kvfs.meta.asked_requests import ChangeWitness, Sent, became
from kvfs.meta.delegations import Delegated
from kvfs.meta.ending_namespaces import EndingNamespaces
from kvfs.meta.engine import MOVED, NOT_DONE, Transaction, Tried
from kvfs.meta.engine_absence import WAIT_S, EngineAbsence
from kvfs.meta.exclusive import BELIEVED_S, Excluded
from kvfs.meta.exclusive_keeper import Exclusives
from kvfs.meta.inode_ranges import UsedUp
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from kvfs.meta.records import NAMESPACE_SHIFT, Namespace, namespace_of, unpack_namespace
from kvfs.meta.redis.calling import locate
from kvfs.meta.redis.dropping import drop_local_keys
from kvfs.meta.redis.log import Proposal
from kvfs.meta.redis.scripts import RAISE, TOP
from kvfs.meta.replica import process_transactions
from kvfs.meta.replica.applier import Applied
from kvfs.meta.replica.committer import MOST_BYTES, Function
from kvfs.meta.replica.local_namespaces import (
    LocalNamespaces,
    Mixed,
    NotHeld,
    OnLocal,
    tells_nobody,
)
from kvfs.meta.replica.local_transaction import Ending
from kvfs.meta.replica.local_writes import Committed, LocalWrites
from kvfs.meta.replica.range_keeper import RangeKeeper
from kvfs.meta.replica.recalls import PATIENCE_S, Recalls
from kvfs.meta.replica.replica_mark import check_replica, new_mark
from kvfs.meta.replica.replica_status import ReplicaStatus
from kvfs.meta.replica.replica_view import Settle
from kvfs.meta.shards.partial_view import Lacking
from kvfs.meta.shards.shard_map import ShardMap, space_of
from kvfs.meta.shards.shard_replica import ReplicaParts, ShardReplica

T = TypeVar("T")
DEADLINE_S: Final = 10.0
_TRIES: Final = 100
_DROPPED: Final = 2_000
"""Keys dropped in one commit: some milliseconds."""


async def _no_data(_ino: int) -> None:
    raise Unavailable("data of other nodes cannot come here yet")


class ReplicaEngine(ReplicaStatus):
    """The replica in `local`, of the metadata at `url`, which must be those of `cluster` (None:
    anybody's). All methods but `read_now` belong to the event loop that runs `run`."""

    immediate = False
    reads_immediate = True

    def __init__(
        self,
        local: EmbeddedEngine,
        url: str,
        *,
        node: int,
        incarnation: int = 0,
        cluster: str | None = None,
        deadline_s: float = DEADLINE_S,
        on_applied: Callable[[Sequence[Applied]], None] = lambda _applied: None,
        settle: Settle = lambda _t, _ino, _published_at: True,
        is_alive: Callable[[int], bool] = lambda _node: True,
        on_local: OnLocal = tells_nobody,
        must_follow: Callable[[int], bool] = lambda _namespace_id: True,
    ) -> None:
        """`settle` handles the name of a private inode that is to be known. `on_applied` is told
        what others changed, when it is in the replica; it must not wait. `is_alive`: whether
        another node holds its lease. `on_local` is told what this host changes in namespaces whose
        names are its own. `must_follow`: whether a namespace is followed, used or not. Raises
        Invalid, NotSupported (the URL)."""
        location = locate(url)
        self.local = local
        self.node = node
        self._cluster = cluster
        self._privates = LocalWrites(local)
        self._locals = LocalNamespaces(local, on_local)
        self.is_local: Final[Callable[[int], bool]] = self._locals.has
        """Like `Engine.is_local`."""
        self._on_applied = on_applied
        exclusives = Exclusives(local, lambda: self.position)
        self.changes: Final = ChangeWitness()
        """Has what becomes of requests' changes noted, for a process that follows this one."""
        super().__init__(
            ReplicaParts(
                *(local, location, deadline_s, node, incarnation, self._privates, self._locals),
                *(ShardMap(), settle, self._applied, self._look_for_recalls, must_follow),
                *(self._give_back, exclusives, self.changes),
            )
        )
        self._applier, self._follower = self._shards.top.applier, self._shards.top.follower
        self._exclusives = exclusives
        self._exclusives.commits = self._shards
        self.ending: Final = EndingNamespaces(
            self._locals, self._shards, self._applied, self._check_open, deadline_s
        )
        self._recalls = Recalls(node, self._privates, self._shards, is_alive, self._exclusives.look)
        self._ranges = RangeKeeper(local, self._locals, self._commit)
        self._locals.on_numbers = self._ranges.look
        self._locals.on_becoming = self._privates.release
        self.hold: Callable[[int], Awaitable[None]] = _no_data
        """Brings the data of a file here that is held elsewhere, and records them."""
        self._absence = EngineAbsence(
            self.namespace, lambda number: self._shards.of(number).follower
        )
        self._is_closed = False
        local.node = keys.pack_node(node)

    # ---- what the core asks

    def read_now(self, fn: Callable[[Transaction], T]) -> T:
        """Like `read`, from any thread."""
        return self._shards.read_now(fn)

    def namespace(self, number: int) -> Namespace | None:
        """Returns the record of a namespace, None if there is none: it is asked for several times a
        file, so it is remembered while it stays. It must not be changed. Raises Unavailable."""
        known = self._locals.records
        if number not in known:
            value = self.read_now(lambda t: t.get(keys.namespace(number)))
            known[number] = None if value is None else unpack_namespace(value)
        return known[number]

    def may_lag(self, number: int) -> bool:
        """Returns whether other nodes may hear of a new file in a namespace after its close. Raises
        Unavailable."""
        known = self._locals.lagging.get(number)
        if known is None:
            record = self.namespace(number)
            known = self._locals.lagging[number] = record is not None and record.may_lag
        return known

    def shard(self, namespace_id: int) -> int:
        """Like `Engine.shard`."""
        return namespace_id if self._shards.following.is_own(namespace_id) else TOP

    async def read(self, fn: Callable[[Transaction], T]) -> T:
        """Runs `fn` on the replica, without suspending; but where it turns to a namespace that is
        not followed it goes aside, and has its server read, or the namespace followed. Raises
        Unavailable; Unreached, of a cache, where that server is silent."""
        try:
            return self._shards.read_now(fn)
        except Lacking as found:
            return await self._shards.following.read(fn, found)

    async def fetch(self, names: Sequence[bytes]) -> list[bytes | None]:
        """Does one look-up for another process: returns the values of these keys of a namespace
        that is not followed, as of one moment after the call. Raises Unavailable."""
        self._check_open()
        try:
            found = await self._shards.following.fetch(names)
        except EngineAway as error:
            raise Unavailable(str(error)) from error
        return [found[key] for key in names]

    def is_whole(self, namespace_id: int) -> bool:
        """Returns whether the replica has all of a namespace, as of some moment."""
        return not self._map.spaces or self._shards.is_whole(namespace_id)

    async def follow_all(self) -> None:
        """Follows all namespaces, and returns when the replica has all of each: it is waited for as
        long as more of it comes. Raises Unavailable."""
        self._check_open()
        await self._shards.following.open_all()

    async def transact(
        self, fn: Callable[[Transaction], T], *, private: int = 0, behind: bool = False
    ) -> T:
        """Runs `fn` on the replica, and commits. Cancelled while it waits: nothing was committed;
        once it was sent, it is waited for, at most until the deadline.

        `private`: an inode that `fn` makes or changes, and nothing else but its entry: if possible
        it is committed on this node alone, at once, and others know of it with the next transaction
        that reads or writes any of it; `behind`: they shall know of it soon. Of a file that they
        know already, or are being told of, only the name can be changed so, behind. MOVED: the file
        to which `fn` gives another name, and nothing else; behind, if others are to know the file.

        Raises Unavailable (it may be committed or not), EngineAway (it was not), Conflict,
        TooLarge."""
        end = 0.0
        while True:
            turns = self._locals.turns
            try:
                return await self._transact(fn, private, behind)
            except Mixed as error:
                await self._over(error, turns)
            except Ending:
                await self.ending.until_open()
            except EngineAway as refused:
                end = end or trio.current_time() + WAIT_S
                await self._absence.until_heard(self._changed(fn, private), refused, end)

    def _changed(self, fn: Function, private: int) -> int:
        """Returns the namespace in which `fn` changes something first; 0: in none."""
        if private and private != MOVED:
            return namespace_of(private)
        return self.local.read_now(lambda t: process_transactions.namespace_of(t, fn))

    async def _over(self, error: Mixed, turns: int) -> None:
        """Returns when a change that `error` refused is to be tried again: its namespace became
        this node's own, or everybody's, since `turns`, or does so. Raises CrossNamespace, Paused.
        """
        if self._locals.layer.is_closed(error.space):
            await self.ending.until_open()
        elif turns == self._locals.turns:
            raise CrossNamespace(str(error)) from None

    async def _transact(self, fn: Callable[[Transaction], T], private: int, behind: bool) -> T:
        self._check_open()
        if self._may_be_local(private):
            tried = await self._try_local(fn, 0 if behind else private)
            if tried.is_done:
                return cast("T", tried.result)
        wanted: Function = fn
        if private and not self._is_told_at_once(private, behind=behind):
            shard = await self._shards.ready(self._space_of(fn, private))
            done = self._commit_private(shard, fn, private, behind=behind)
            if done.is_done:
                return cast("T", done.result)
            if done.lacks_delegation:
                wanted = self._recalls.taking(namespace_of(done.lacks_delegation), fn)
        result: T = await self._commit(wanted)
        return result

    def try_now(
        self, fn: Callable[[Transaction], object], *, private: int = 0, behind: bool = False
    ) -> Tried:
        """Does what `transact` does where that commits on this node alone; else nothing. Raises
        what `transact` raises."""
        if self._is_closed:
            self._check_open()
        if self._may_be_local(private):
            try:
                tried = self._locals.try_commit(fn, 0 if behind else private)
            except (UsedUp, NotHeld, Ending):
                return NOT_DONE
            if tried.is_done:
                return tried
        if not private or self._is_told_at_once(private, behind=behind):
            return NOT_DONE
        space = self._space_of(fn, private)
        shard = self._shards.of(space)
        if not shard.is_whole or shard.shard != self.shard(space):
            return NOT_DONE
        if shard.follower.is_away:
            return NOT_DONE
        done = self._commit_private(shard, fn, private, behind=behind)
        return Tried(True, done.result) if done.is_done else NOT_DONE

    async def propose(self, proposal: Proposal) -> bool:
        """Commits a proposal that another process ran on this replica. False: it must be run again,
        on the present replica. Cancelled, raises: as for `transact`."""
        end = trio.current_time() + WAIT_S
        while True:
            try:
                return await self._propose(proposal)
            except EngineAway as refused:
                spaces = {space_of(key) for key in (*proposal.writes, *dict(proposal.merges))}
                number = max(map(keys.unpack_node, spaces - {b""}), default=0)
                await self._absence.until_heard(number, refused, end)

    async def _propose(self, proposal: Proposal) -> bool:
        self._check_open()
        if self._locals.local_key:
            try:
                is_done = self._locals.try_proposal(proposal)
            except NotHeld as found:
                await self.hold(found.ino)
                return False
            except Ending:
                await self.ending.until_open()
                return False
            if is_done is not None:
                return is_done
        try:
            checked = self.local.read_now(partial(exclusive.checked, proposal=proposal))
            shared = self._locals.shared(checked) if self._locals.local_key else checked
            return shared is not None and await self._shards.propose(shared)
        except Mixed as error:
            raise CrossNamespace(str(error)) from None
        except Excluded as found:
            await self._exclusives.until_free(found.namespace_id)
            return False

    async def recall(self, namespace_id: int) -> None:
        """Prepares for another process that removes a directory of the namespace: all files that
        other nodes made there are known then. Raises Busy, Unavailable, Conflict, NoSpace."""
        self._check_open()
        await self._recalls.recall(namespace_id, trio.current_time() + PATIENCE_S)

    async def take_numbers(self, namespace_id: int) -> None:
        """Prepares for another process that makes files in a namespace whose names are this node's
        own: there are inode numbers then. Raises Unavailable, Conflict, NoSpace."""
        self._check_open()
        await self._ranges.take(namespace_id)

    async def known(self, inos: Sequence[int]) -> None:
        """Returns when others know of all that was done here to these inodes. Raises Unavailable,
        Conflict, NoSpace."""
        private = {self._privates.owners.get(keys.inode(ino)) for ino in inos} - {None}
        if private:
            await self._shards.make_known([ino for ino in private if ino is not None])

    def is_alone(self, name: bytes, ino: int) -> bool:
        """Returns whether this node alone knows that a name (the key of an entry) leads to this
        file, or of the file."""
        owners = self._privates.owners
        return ino in (owners.get(name), owners.get(keys.inode(ino)))

    def closed_alone_at(self, ino: int) -> float:
        """Returns the time when a file that this node alone knows of was closed, or got its name,
        by `clock.now`; 0: others may know of it, or it was never closed."""
        group = self._privates.groups.get(ino)
        return 0.0 if group is None else group.published_at

    async def became(self, sent: Sent) -> bool | None:
        """Returns whether a change that an earlier run of this node sent was done; None: its server
        says nothing of it any more. Raises Unavailable."""
        self._check_open()
        shard = await self._shards.ready(sent.shard)
        if shard.shard != sent.shard:
            return None
        found = await shard.call(b"HGET", shard.proposing.state, b"e:" + sent.engine)
        return became(found, sent)

    async def catch_up(self, namespace_id: int = 0) -> None:
        """Returns when the replica holds everything that was committed of a namespace, anywhere
        before the call: one round trip, which all waiting callers share. Raises Unavailable."""
        self._check_open()
        end = trio.current_time() + WAIT_S
        while True:
            try:
                return await self._shards.catch_up(namespace_id)
            except EngineAway as refused:
                await self._absence.until_heard(namespace_id, refused, end)

    async def readable(self, namespace_id: int) -> None:
        """Does what `catch_up` does of a namespace and of the names of all, for a process that
        reads: where the engine is away, and the namespace is read on, the replica is as it is.
        Raises Unavailable."""
        self._check_open()
        try:
            await self._shards.catch_up(TOP)
            if self.shard(namespace_id):
                await self._shards.catch_up(namespace_id)
        except Unavailable as error:
            self._check_reads_on(namespace_id, error)

    def _check_reads_on(self, namespace_id: int, error: Unavailable) -> None:
        """Raises Unavailable, which tells the error, unless the namespace is read on."""
        if not self._absence.reads_on(namespace_id):
            raise Unavailable(str(error)) from error

    async def fresh(self, namespace_id: int) -> None:
        """Returns when the replica holds all names and attributes of a namespace that were
        committed anywhere before the call: without a question while this node alone changes them;
        or at once, where the engine is away and the namespace is read on. Raises Unavailable."""
        self._check_open()
        try:
            await self._fresh(namespace_id)
        except Unavailable as error:
            self._check_reads_on(namespace_id, error)

    async def _fresh(self, namespace_id: int) -> None:
        if not self._map.is_used:
            if not self._exclusives.is_believed(namespace_id, self._shards.top.heard_still_at):
                self._exclusives.asks(namespace_id)
            # Other nodes may see already what this one's own request under way does.
            elif await self._shards.top.proposer.answered():
                return
        await self._shards.catch_up(namespace_id)

    async def sync(self, namespace_id: int | None = None) -> None:
        """Makes everything committed before the call kept as `promise` says, of all namespaces or
        of those in this one's shard; what this host keeps for itself survives power loss. Raises
        Unavailable."""
        self._check_open()
        shards = list[ShardReplica]()
        while not shards or set(shards) - set(self._synced(namespace_id)):  # one was gathered
            shards = self._synced(namespace_id)
            try:
                for each in shards:
                    await each.behind.drain()
                await self.local.sync()
                for each in shards:
                    await each.keep()
            except Unavailable:
                if set(shards) <= set(self._synced(namespace_id)):
                    raise
                self._check_open()

    def _synced(self, namespace_id: int | None) -> list[ShardReplica]:
        if namespace_id is None:
            return list(self._shards.all)
        return [self._shards.of(namespace_id)]

    async def promise(self) -> str:
        """Does what `sync` does of all; returns which commits survive the server's death."""
        await self.sync()
        return self._shards.top.promise

    async def raise_layout(self) -> bool:
        """Makes the server's layout that of this version, after which no earlier one may use it.
        Returns whether it was an earlier one. Raises Unavailable."""
        self._check_open()
        return bool(await self._shards.top.script(RAISE))

    async def spread(self) -> list[int]:
        """Gives namespaces shards of their own, those there are and those that come; returns those
        that it moved. Raises NotSupported, Conflict, Corrupt, Unavailable, NoSpace: to be begun
        again."""
        self._check_open()
        return await self._shards.spread()

    async def gather(self, namespace_id: int | None = None) -> list[int]:
        """Brings a namespace back from its own shard into the one of all, or every one, and those
        that come; returns those that it moved. Raises Conflict, Corrupt, Unavailable, NoSpace: to
        be begun again."""
        self._check_open()
        return await self._shards.gather(namespace_id)

    async def fence(self, nodes: Collection[int]) -> None:
        """Does what `ShardSet.fence` does."""
        self._check_open()
        await self._shards.fence(nodes)

    # ---- namespaces whose names are this node's own

    def local_remains(self) -> list[int]:
        """Returns the namespaces that were removed and of which local keys are left here. Raises
        Unavailable."""
        return self.read_now(self._locals.gone)

    def drop_local_inodes(self, inos: Sequence[int]) -> None:
        """Drops the records of inodes of such a namespace, whose data files have gone. Raises
        NoSpace, ReadOnly, Unavailable."""
        self._locals.drop_inodes(inos)

    def drop_local(self, namespace_id: int, limit: int) -> bool:
        """Drops up to `limit` keys of such a namespace; returns whether that was all. Raises
        NoSpace, ReadOnly, Unavailable."""
        return self._locals.drop(namespace_id, limit)

    async def drop_shared(self, namespace_id: int) -> None:
        """Drops what the server still has of keys of a namespace that are each node's own now, and
        its usage; no log has that. Raises Unavailable, Conflict (it is another one by now)."""
        self._check_open()
        record = self.read_now(lambda t: t.get(keys.namespace(namespace_id))) or b""
        async with self._shards.top.aside() as caller:
            await drop_local_keys(caller, namespace_id, record)

    # ---- its life

    async def run(self, task_status: "trio.TaskStatus[None]" = trio.TASK_STATUS_IGNORED) -> None:
        """Follows the cluster until cancelled; started when the replica is whole and up to date,
        however long the server takes to be there. Raises Invalid, NotSupported, Conflict: the
        server is unsuitable; before it is started Lost: the server lost what the replica had."""
        try:
            cluster = await self._shards.top.until_examined(self._cluster)
            mark = check_replica(self.local, cluster, self.node)
            self._applier.mark = mark or new_mark(cluster, self.node)
            self._privates.load()
            self._locals.load()
            self._ranges.begin()
            if mark is None:
                self._privates.forget()
                # What another node had is gone with it: it was removed.
                while not self._locals.drop_every(_DROPPED):
                    await trio.lowlevel.checkpoint()
            async with trio.open_nursery() as nursery:
                try:
                    await nursery.start(self._shards.run, cluster)
                    self._shards.tell_behind(self._privates.published())
                    nursery.start_soon(self._recalls.run)
                    nursery.start_soon(self._exclusives.run)
                    nursery.start_soon(self._ranges.run)
                    self._ranges.look()
                    self._look_for_recalls()
                    task_status.started()
                    await trio.sleep_forever()
                finally:  # before its tasks are waited for: requests under way are not cancelled
                    self.close()
        finally:
            self.close()

    async def leave(self) -> None:
        """Ends what other nodes would have to wait for, before this one ends, unless the engine is
        silent. Raises Unavailable, Conflict, NoSpace."""
        self._check_open()
        if now() - self.heard_at() < BELIEVED_S:
            await self._exclusives.give_back_all()

    def close(self) -> None:
        """Gives up the work under way, and the connections; idempotent. The file is the
        caller's."""
        self._is_closed = True
        self._shards.close()

    def _may_be_local(self, private: int) -> bool:
        if not private:
            return self._locals.local_key is not None
        return self.is_local(private >> NAMESPACE_SHIFT)  # MOVED is of no namespace

    async def _try_local(self, fn: Callable[[Transaction], object], made: int) -> Tried:
        """Does `LocalNamespaces.try_commit`, with the numbers and data that it needs. Raises
        Unavailable, Conflict, and what `hold` raises, too."""
        for _ in range(_TRIES):
            try:
                return self._locals.try_commit(fn, made)
            except UsedUp as lacking:
                await detach.aside()
                await self._ranges.take(lacking.namespace_id)
            except NotHeld as found:
                await detach.aside()
                await self.hold(found.ino)
        raise Conflict("the data of a file go as soon as they have come: try again")

    def _space_of(self, fn: Function, private: int) -> int:
        """Returns a namespace of the shard in which `fn` changes something private."""
        return self._shards.guess(fn) if private == MOVED else namespace_of(private)

    def _commit_private(
        self, shard: ShardReplica, fn: Function, private: int, *, behind: bool
    ) -> Committed:
        """Commits here alone, if possible, and has others told if they are to know."""
        shard.follower.check_change()
        done = self._privates.commit(fn, private, is_published=behind)
        if done.waiting:
            self._shards.tell_behind([done.waiting])
        return done

    def _is_told_at_once(self, private: int, *, behind: bool) -> bool:
        """Returns whether too much waits to be told behind."""
        if not behind and private != MOVED:
            return False
        space = 0 if private == MOVED else namespace_of(private)
        return self._shards.of(space).behind.is_full or self._privates.waiting_bytes > MOST_BYTES

    def _check_open(self) -> None:
        if self._is_closed:
            raise Unavailable("the engine is closed")

    async def _commit(self, fn: Function) -> Any:
        """Commits; delegations of others that must go first are recalled. Raises Busy too."""
        end = 0.0
        while True:
            try:
                return await self._shards.commit(fn)
            except Delegated as found:
                end = end or trio.current_time() + PATIENCE_S
                await self._recalls.recall(found.namespace_id, end)

    def _give_back(self, namespace_id: int) -> None:
        self._recalls.give_back_soon(namespace_id)

    def _look_for_recalls(self) -> None:
        self.local.read_now(self._recalls.found)
        for namespace_id in self.local.read_now(exclusive.namespaces):
            self._exclusives.look(namespace_id)

    def _applied(self, applied: Sequence[Applied]) -> None:
        self._shards.applied(applied)
        self._recalls.applied(applied)
        self._on_applied(applied)
