"""Brings files here whose data this node does not have: from nodes that have them, else from
wherever `cold` finds them.

| step | on disk | in the engine | after a kill here |
|---|---|---|---|
| 1 room made, file begun | part of it, beside the data files | nothing | a start clears it away |
| 2 whole and verified, named | the data file | nothing | nobody is told of it: `stale_data_gc` |
| 3 on disk, described | the same | nothing | the same |
| 4 recorded | the same | this node's placement | nothing to do |

It can be opened from step 2 on: nobody waits for the disk or the engine.

Invariants
- One file comes once at a time, however many want it.
- What has the name of a data file was verified against the record, where the record had a checksum.
- A file of a cache namespace that nobody alive has is a miss: it is forgotten. One of a durable
  namespace is Unavailable until a holder returns.
- Nobody has the content that was closed last of a file that is written in place, but for nodes that
  had a copy before. Without them it is waited for, for a bounded time, until its writer has closed
  it: then its record is another. A file that is not closed by then is Busy, in a cache a miss.
"""

import logging
import os
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import islice
from typing import Final, NamedTuple

import trio

from kvfs.base.errors import (
    Busy,
    Conflict,
    Corrupt,
    KvfsError,
    NotFound,
    OtherVersion,
    Stale,
    Unavailable,
    Unreached,
)
from kvfs.base.media import is_shared
from kvfs.base.retry import Persistence
from kvfs.datastore import file_sync
from kvfs.datastore import files as data
from kvfs.datastore.checksum import combine
from kvfs.datastore.files import DataFiles
from kvfs.datastore.index import Index, Sealed
from kvfs.meta import keys
from kvfs.meta.engine import Engine, Transaction
from kvfs.meta.records import Flag, Inode, unpack_inode
from kvfs.transfer.incoming_file import FileFiller, IncomingFile
from kvfs.tree import lifecycle, namespaces
from kvfs.tree.copies import placements
from kvfs.tree.inodes import read_inode, read_inodes
from kvfs.vfs import seal
from kvfs.vfs.volume import Volume

log = logging.getLogger(__name__)
_ATTEMPTS: Final = 8
_PAUSE_S: Final = 0.25
"""Before a file is asked for again that was changed while it came."""
_LOOKS: Final = 20
_LOOK_S: Final = 0.02
_WRITTEN_S: Final = 3.0
"""For so long it is waited for who writes the file in place to close it."""
_GATHER_S: Final = 0.01
_BATCH: Final = 64
Name = tuple[int, int]
Fetch = Callable[[int, Inode, Sequence[int], int], FileFiller | None]
"""Begin to fill a descriptor with an inode's data from these nodes; None: none of them is alive."""
Cold = Callable[[int, Inode, int], Awaitable[bytes | None]]
"""Fill a descriptor with an inode's data; the checksums of its chunks, None where it is not there.
Raises NotFound, Unavailable."""
Change = tuple[bytes, bytes | None, bytes | None]
"""Key, value before, value now."""


class FileHolders(NamedTuple):
    """The nodes that may have a file."""

    nodes: list[int]
    """The nodes that have all of it, by the engine."""
    durable: bool


class _Settled(NamedTuple):
    """A data file that is on disk."""

    ino: int
    version: int
    blocks: int


class Bringing:
    """The fetcher of one node. `room` makes room for so many bytes on its disk, or raises
    NoSpace."""

    def __init__(
        self,
        engine: Engine,
        files: DataFiles,
        index: Index,
        volume: Volume,
        room: Callable[[int], Awaitable[None]],
    ) -> None:
        self._engine = engine
        self._files = files
        self._index = index
        self._volume = volume
        self._room = room
        self.fetch: Fetch | None = None
        """None: there are no other nodes."""
        self.look_again: Callable[[Sequence[int]], Awaitable[bool]] | None = None
        """Look which of these nodes are there now; whether that is news. Raises KvfsError."""
        self.cold: Cold | None = None
        self._incoming: dict[Name, IncomingFile] = {}
        self._unheld: dict[Name, None] = {}
        self._outdated: dict[int, set[int]] = {}
        """Versions of data files whose content was replaced elsewhere while they are open here."""
        self._wake = trio.Event()
        self._nursery: trio.Nursery | None = None
        self.counters = {"brought_files": 0, "brought_bytes": 0}

    @property
    def is_possible(self) -> bool:
        """Whether data can be anywhere else but here."""
        return self.fetch is not None or self.cold is not None

    @property
    def is_shared(self) -> bool:
        """Whether there are other nodes, who may have replaced a file's content."""
        return self.fetch is not None

    @property
    def coming_bytes(self) -> int:
        """Bytes of the files that are on their way, once they have their room: no one else may have
        that."""
        return sum(each.size for each in self._incoming.values() if each.has_room)

    @property
    def settles(self) -> bool:
        """Whether files come, or came and are not recorded yet: until they are, none of them can be
        dropped for space."""
        coming = any(each.has_room for each in self._incoming.values())
        return coming or bool(self._unheld)

    async def run(self) -> None:
        """Bring what is asked for, until cancelled; what was on its way then is left."""
        self._files.clear_arriving()
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._hold)

    def begin(self, ino: int, inode: Inode) -> IncomingFile:
        """The data of a published file, from here on on their way. Raises Unavailable while the
        node starts or stops."""
        name = ino, inode.version
        incoming = self._incoming.get(name)
        if incoming is None:
            if self._nursery is None:
                raise Unavailable("the node is not ready to bring data from others")
            incoming = self._incoming[name] = IncomingFile(ino, inode.version, inode.size)
            self._nursery.start_soon(self._drive, incoming, inode)
        return incoming

    async def bring(self, ino: int) -> None:
        """Returns when the file's data are here. Cancelled: they may come all the same.

        Raises NotFound, Stale, Unavailable, Corrupt, Conflict (it is written elsewhere all the
        time), Busy (it is open for writing elsewhere, and not closed), NoSpace, OSError.
        """
        for attempt in range(_ATTEMPTS):
            inode = await self._engine.read(lambda t: read_inode(t, ino))
            try:
                self._files.stat(ino, inode.version)
                return
            except FileNotFoundError:
                pass
            try:
                await self.begin(ino, inode).whole()
                return
            except Conflict:
                if attempt == _ATTEMPTS - 1:
                    raise
            await trio.sleep(_PAUSE_S)

    async def bring_span(self, ino: int, version: int, offset: int, length: int) -> None:
        """Returns when these bytes of a content can be read, from its data file or what is arriving
        of it. Raises as `bring`; Conflict where the file has another content by now."""
        inode = await self._engine.read(lambda t: read_inode(t, ino))
        if inode.version != version:
            raise Conflict(f"{os.fsdecode(inode.name)}: it was written on another node")
        if not self._is_here((ino, version)):
            await self.begin(ino, inode).span(offset, length)

    def share(self, ino: int, version: int) -> float:
        """The share of a data file on its way that is here; negative where it is not on its way."""
        incoming = self._incoming.get((ino, version))
        return -1.0 if incoming is None else incoming.share

    async def let_go(self, ino: int) -> bool:
        """Drop this node's data of a file, unless it is the last one to have them, or they came a
        moment ago; whether it did. A program that has the file open here reads on. Raises Stale,
        Unavailable."""
        if not self._volume.holders.is_recorded(ino):
            return False

        def fn(t: Transaction) -> int:
            inode = read_inode(t, ino)
            others = [node for node in _holders(t, ino, inode.version) if node != t.node]
            if not others:
                return -1
            placements.let_go(t, ino, t.node)
            return inode.version

        version = await self._engine.transact(fn)
        if version < 0:
            return False
        await self._drop_data([(ino, version)])
        return True

    async def adopt(self, ino: int, version: int, giver: int) -> None:
        """Answer for a file in a store that this node shares with `giver`, in its place: its data
        file stays where it is. Raises NotFound (it is not seen here), Stale, Conflict,
        Unavailable."""
        if not is_shared([self._files.medium(ino, version)]):
            raise NotFound("the file is in no store that this node shares")
        blocks = self._files.stat(ino, version).st_blocks
        node = keys.pack_node(giver)
        await self._engine.transact(lambda t: placements.hand_over(t, ino, version, node))
        self._index.add(ino, version, blocks)

    def disown(self, ino: int) -> None:
        """Another node answers for the file, and its data file stays."""
        self._index.remove([ino])

    def applied(self, changes: Iterable[Change]) -> None:
        """Others committed this: data of a content that was replaced, or of an orphan that was
        reaped, soon go here too.

        A record that had a name and vanishes was lost (an engine that was put back to an older
        state, or damaged), likewise a newer version: nobody removes either. What is here of it may
        be the last there is, and is left to `stale_data_gc`."""
        replaced: list[Name] = []
        unlinked: list[int] = []
        for key, old, new in changes:
            if key[:1] != b"i" or old is None:
                continue
            before = unpack_inode(old)
            now = None if new is None else unpack_inode(new)
            ino = keys.unpack_u64(key, 1)
            if now is None:
                if not before.nlink:
                    replaced.append((ino, before.version))
            elif now.version != before.version:
                if now.version > before.version:
                    replaced.append((ino, before.version))
            elif before.nlink and not now.nlink:
                unlinked.append(ino)
            elif now.mtime_ns != before.mtime_ns and not now.flags & Flag.SEALED:
                self._stamp(ino, before, now)
        if self._nursery is not None and (replaced or unlinked):
            self._nursery.start_soon(self._act, replaced, unlinked)

    async def _act(self, replaced: list[Name], unlinked: list[int]) -> None:
        await self._drop_data(replaced)
        for ino in unlinked:
            await self._lost_link(ino)

    def _stamp(self, ino: int, before: Inode, now: Inode) -> None:
        """Others set the times of a file that is not sealed: its data file has the truth about
        them, where it is here and has not been changed meanwhile."""
        if self._volume.holders.writes(ino):
            return
        path = self._files.path(ino, before.version)
        try:
            found = os.stat(path, follow_symlinks=False)
            if (found.st_size, found.st_mtime_ns) == (before.size, before.mtime_ns):
                os.utime(path, ns=(now.atime_ns, now.mtime_ns), follow_symlinks=False)
        except FileNotFoundError:
            return

    def _is_open(self, name: Name) -> bool:
        """Whether it is open, and so has to stay until `closed`."""
        holders = self._volume.holders
        if not holders.busy(name[0]) or not holders.has_content(*name):
            return False
        self._outdated.setdefault(name[0], set()).add(name[1])
        return True

    def is_outdated(self, ino: int) -> bool:
        """Whether data files of it wait for its close."""
        return ino in self._outdated

    def closed(self, ino: int) -> None:
        """The file's data file was closed; what was replaced elsewhere meanwhile may go."""
        versions = self._outdated.pop(ino, None)
        if versions and self._nursery is not None:
            self._nursery.start_soon(self._drop_data, [(ino, version) for version in versions])

    async def _lost_link(self, ino: int) -> None:
        """An orphan of whose data this node has some: they go when nobody here holds it."""

        def fn(t: Transaction) -> int:
            inode = read_inode(t, ino)
            own = t.get(keys.placement(ino, t.node))
            return -1 if inode.nlink or own is None else inode.version

        try:
            version = await self._engine.read(fn)
        except Stale:
            return
        if version >= 0 and not self._volume.holders.keep(ino):
            self._volume.holders.let_go(ino)
            self._volume.drop_later(ino, version)

    async def _drop_data(self, names: Sequence[Name]) -> None:
        """Unlink data files that no record speaks of any more, where they are here; those that are
        open when they are closed."""
        here = [name for name in names if self._is_here(name) and not self._is_open(name)]
        for ino, _ in here:
            self._volume.holders.let_go(ino)

        def unlink() -> None:
            for name in here:
                self._files.unlink(*name)

        if here:
            await trio.to_thread.run_sync(unlink)
            self._index.remove([name[0] for name in here if self._is_indexed(name)])

    def _is_here(self, name: Name) -> bool:
        try:
            self._files.stat(*name)
        except FileNotFoundError:
            return False
        return True

    def _is_indexed(self, name: Name) -> bool:
        entry = self._index.get(name[0])
        return entry is not None and entry.version == name[1]

    # ---- the way of one file

    async def _drive(self, incoming: IncomingFile, inode: Inode) -> None:
        name = incoming.ino, incoming.version
        error: Exception | None = None
        try:
            await self._fill(incoming, inode)
        except (KvfsError, OSError) as failed:
            error = failed
        except BaseException:
            error = Unavailable("the node stops")
            raise
        finally:
            del self._incoming[name]
            self._files.drop_arriving(*name)
            incoming.end(error)

    async def _fill(self, incoming: IncomingFile, inode: Inode) -> None:
        await self._room(inode.size)
        incoming.has_room = True  # counted at once: nobody else ran since the room was seen
        fd = self._files.begin_arriving(incoming.ino, incoming.version, inode.size)
        try:
            if inode.size:
                await self._from_anywhere(incoming, inode, fd)
            else:
                self._name(incoming, inode, fd, b"")
        finally:
            os.close(fd)

    async def _from_anywhere(self, incoming: IncomingFile, inode: Inode, fd: int) -> None:
        ino = incoming.ino
        tried: set[int] = set()
        deadline = trio.current_time() + _WRITTEN_S
        while True:
            found = await self._engine.read(lambda t: _found(t, ino, incoming.version))
            nodes = [node for node in found.nodes if node not in tried]
            tried.update(nodes)
            try:
                if nodes and await self._from_nodes(incoming, inode, nodes, fd):
                    return
                if not nodes and not await self._is_news(found.nodes, tried):
                    break
            except NotFound:  # they let it go meanwhile: perhaps others have it, or other content
                await self._settled(ino, inode)
                continue
            except Busy as error:
                if trio.current_time() >= deadline:
                    if found.durable:
                        raise
                    raise _miss(error) from error
                await self._settled(ino, inode)
                tried.clear()
                continue
            except (Unavailable, Corrupt) as error:
                if await self._is_news(found.nodes, tried):
                    continue
                inode = await self._still(ino, inode)
                if await self._from_cold(incoming, inode, fd, durable=found.durable):
                    return
                raise _miss(error) if not found.durable else error from error
        inode = await self._still(ino, inode)  # who let it go may have sent it there meanwhile
        if await self._from_cold(incoming, inode, fd, durable=found.durable):
            return
        raise await self._lost(ino, inode, found)

    async def _is_news(self, nodes: Sequence[int], tried: set[int]) -> bool:
        """Whether one of these nodes has come up, or elsewhere, since its lease was last looked at:
        then they are tried again. What is not known yet is not given up."""
        if not nodes or self.look_again is None or not await self.look_again(nodes):
            return False
        tried.clear()
        return True

    async def _settled(self, ino: int, inode: Inode) -> None:
        """Wait for a moment until this node has heard what the holders know already, or until who
        writes the file has closed it. Raises Conflict where the file has another content."""
        for _ in range(_LOOKS):
            await self._still(ino, inode)
            await trio.sleep(_LOOK_S)

    async def _still(self, ino: int, inode: Inode) -> Inode:
        """The record as it is now. Raises Conflict where the file has another content."""
        now = (await self._engine.read(lambda t: read_inodes(t, [ino])))[0]
        if now is None or now.version != inode.version:
            raise Conflict(f"{os.fsdecode(inode.name)}: it was written on another node")
        return now

    async def _from_nodes(
        self, incoming: IncomingFile, inode: Inode, nodes: Sequence[int], fd: int
    ) -> bool:
        arriving = None
        if self.fetch is not None:
            arriving = self.fetch(incoming.ino, inode, nodes, fd)
        if arriving is None:
            return False
        try:
            # Only what gives its first bytes is opened: it may be written where it is, or its
            # holder may have died a moment ago, and then it is a miss.
            await arriving.span(0, 1)
            incoming.begin(arriving)
            await arriving.whole()
            self._name(incoming, inode, fd, arriving.sums)
        finally:
            arriving.close()
            incoming.gave_up(arriving)
        return True

    async def _from_cold(
        self, incoming: IncomingFile, inode: Inode, fd: int, *, durable: bool
    ) -> bool:
        """False where it is not there. Where the tier is away, a cache's file is a miss now, and
        stays for when it is back."""
        sums = None
        try:
            if self.cold is not None:
                sums = await self.cold(incoming.ino, inode, fd)
        except Unavailable as error:
            raise error if durable else _miss(error) from error
        except NotFound:
            pass
        if sums is None:
            return False
        self._name(incoming, inode, fd, sums)
        return True

    async def _lost(self, ino: int, inode: Inode, found: FileHolders) -> KvfsError:
        """Nobody who is alive has it."""
        lost = await self._volume.give_up(
            ino, inode, asks_tier=self.cold is not None, away=found.nodes
        )
        if not lost.forgets:
            return lost.error
        gone = NotFound(f"{lost.error}; it is forgotten")  # another look finds that, or what came
        gone.at = keys.file_entry(inode.parent, inode.name)
        return gone

    def _name(self, incoming: IncomingFile, inode: Inode, fd: int, sums: bytes) -> None:
        """Step 2."""
        ino, version = incoming.ino, incoming.version
        if inode.flags & Flag.SEALED and combine(sums) != inode.checksum:
            raise Corrupt(f"{os.fsdecode(inode.name)}: what came does not match its checksum")
        os.utime(fd, ns=(inode.atime_ns, inode.mtime_ns))
        blocks = os.fstat(fd).st_blocks
        self._index.store([Sealed(ino, version, sums, blocks)])
        self._files.arrived(ino, version)
        if (ino, version) not in self._unheld:
            self._unheld[ino, version] = None
            self._volume.holders.unrecorded(ino)
        self._wake.set()
        self.counters["brought_files"] += 1
        self.counters["brought_bytes"] += inode.size

    # ---- recording what came

    async def _hold(self) -> None:
        holding = Persistence(log.warning, "what came here is not recorded yet")
        while True:
            await self._wake.wait()
            await trio.sleep(_GATHER_S)
            self._wake = trio.Event()
            while self._unheld:
                await holding.attempt(self._hold_batch)

    async def _hold_batch(self) -> None:
        """Steps 3 and 4 of some files."""
        names = list(islice(self._unheld, _BATCH))
        described = await self._engine.read(lambda t: [_describe(t, *name) for name in names])

        def settle() -> list[_Settled]:
            pairs = zip(names, described, strict=True)
            return [each for name, about in pairs if (each := self._settle(name, about))]

        settled = await trio.to_thread.run_sync(settle)
        held = await self._engine.transact(lambda t: _hold(t, settled))
        for name in names:
            del self._unheld[name]
            self._volume.holders.recorded(name[0])
        await self._drop_data([each[:2] for each in settled if each[:2] not in held])

    def _settle(self, name: Name, description: data.Description | None) -> _Settled | None:
        try:
            fd = self._files.open(*name, os.O_RDWR)
        except FileNotFoundError:
            return None
        try:
            if description is not None:
                data.describe(fd, description)
            file_sync.sync(fd)
            return _Settled(*name, os.fstat(fd).st_blocks)
        except OSError:
            if not file_sync.is_lost(fd):
                raise
            self._files.unlink(*name)  # a copy: whoever it came from has it
            return None
        finally:
            os.close(fd)


def _miss(error: KvfsError) -> NotFound:
    """The miss of a cache namespace where nobody answers, or the file is written elsewhere."""
    kind = OtherVersion if isinstance(error, Busy) else Unreached
    return kind(str(error))


def _found(t: Transaction, ino: int, version: int) -> FileHolders:
    nodes = [keys.unpack_node(node) for node in _holders(t, ino, version) if node != t.node]
    return FileHolders(nodes, namespaces.is_durable(t, ino))


def _holders(t: Transaction, ino: int, version: int) -> list[bytes]:
    """The nodes that have all of the file's present content."""
    return [
        each.node
        for each in placements.holders(t, ino)
        if each.whole and each.holding.version == version
    ]


def _describe(t: Transaction, ino: int, version: int) -> data.Description | None:
    (inode,) = read_inodes(t, [ino])
    if inode is None or inode.version != version or not inode.flags & Flag.SEALED:
        return None
    return seal.described(t, ino, version, inode.size, inode.checksum)


def _hold(t: Transaction, settled: Sequence[_Settled]) -> set[Name]:
    """Step 4; those that are still what their records say."""
    held: set[Name] = set()
    inodes = read_inodes(t, [each.ino for each in settled])
    for each, inode in zip(settled, inodes, strict=True):
        if inode is None or inode.version != each.version or not inode.nlink:
            continue
        placements.hold(t, each.ino, each.version)
        if not inode.blocks:  # it was in the cold tier alone
            lifecycle.brought(t, each.ino, each.version, each.blocks)
        held.add((each.ino, each.version))
    return held
