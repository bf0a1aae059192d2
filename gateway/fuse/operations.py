"""The meaning of each filesystem operation on this mount, in the core's own types.

Both speakers of the protocol call these methods: the fast path, which drives them to their end in
one step where they wait for nothing, and the adapter for pyfuse3. The kernel checks permission bits
(`default_permissions`). Errors are the core's or OSError; `errno_map` translates them.
"""

import os
import stat
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import trio

from gateway.fuse.codec.caller import Caller
from gateway.fuse.codec.protocol import NAME_MAX
from gateway.fuse.files.file_ranges import Ranges
from gateway.fuse.files.kernel_inodes import InodeOpener
from gateway.fuse.files.live_attributes import LiveAttributes
from gateway.fuse.files.open_file import Handle, OpenFile
from gateway.fuse.files.open_files import OpenFiles
from gateway.fuse.files.overtaken_opens import KeptData, OvertakenOpens
from gateway.fuse.files.xattrs import Xattrs
from gateway.fuse.names import noted_changes
from gateway.fuse.names.directory_streams import DirectoryStreams, ListingEntry
from gateway.fuse.names.journaled_streams import JournaledStreams
from gateway.fuse.names.known_directories import Introductions
from gateway.fuse.names.moved_names import MovedNames
from gateway.fuse.names.new_inodes import NewInodes
from gateway.holder.mount_journal import MountJournal
from kvfs.base import clock, detach
from kvfs.base.clock import file_time_ns
from kvfs.base.errors import (
    Busy,
    Conflict,
    EngineAway,
    Exists,
    Invalid,
    NameTooLong,
    NoLocks,
    NotEmpty,
    NotFound,
    OtherVersion,
    Stale,
    Unavailable,
    Unreached,
)
from kvfs.cluster.cluster_locks import Locks, LockTarget
from kvfs.cluster.coherence import Coherence
from kvfs.datastore import file_sync
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import ROOT_INODE, Flag, Inode, namespace_of
from kvfs.node import Node
from kvfs.tree import published_view, tree
from kvfs.tree.inodes import is_directory
from kvfs.tree.lifecycle import Unsettled
from kvfs.tree.tree import Removed
from kvfs.vfs.names.settled_move import settled_rename
from kvfs.vfs.names.visible_files import NoDataFile
from kvfs.vfs.open import ChangesAllTheTime
from kvfs.vfs.stage_records import new_record

if TYPE_CHECKING:
    from kvfs.node.names.name_finder import NameFinder

_SETTLING: Final = 40
"""Files that are opened at a time to be synced before a rename."""


class Operations:
    """The operations of one mount."""

    def __init__(
        self,
        node: Node,
        open_files: OpenFiles,
        locks: Locks | None = None,
        journal: MountJournal | None = None,
    ) -> None:
        """`locks`: those that the kernel leaves to this mount. `journal`: that of a mount which
        outlives its daemon."""
        self.node = node
        self.engine = node.engine
        self.volume = node.volume
        self.holders = node.holders
        self.known = node.known
        self.coherence = node.coherence
        self.names = node.names
        self.misses = node.mounts.misses
        self.locks = locks
        self.lock_openers: Final[set[int]] = set()
        """Threads of this process that open files only to lock them."""
        self.open_files = open_files
        self.publishing = open_files.publishing
        self.ranges = Ranges(open_files)
        self._settling = trio.CapacityLimiter(_SETTLING)
        self.orphans = open_files.orphans
        self.attributes = LiveAttributes(node.volume, open_files, self.release)
        self.new_inodes = NewInodes(node, open_files, self.orphans, self.unlink)
        self.directories = (
            DirectoryStreams(node) if journal is None else JournaledStreams(node, journal)
        )
        self.introductions = Introductions(node.engine, node.known, node.holders)
        self.moved_names = MovedNames(node.engine)
        self.overtaken_opens = OvertakenOpens(node.port, node.files)
        self.xattrs = Xattrs(node.engine, node.evictor, node.store.root)
        self._link, self._unlink, self._rmdir = tree.link, tree.unlink, tree.rmdir
        self._move: Callable[..., Removed | Unsettled | None] = settled_rename
        if journal is not None:
            self._keep(journal)

    def _keep(self, journal: MountJournal) -> None:
        """Notes changes of names and attributes in a mount's journal."""
        self.new_inodes.keep(journal)
        self.xattrs.keep(journal)
        self._link = noted_changes.before(self._link, journal, 1)
        self._unlink = noted_changes.after(self._unlink, journal, _ino_of)
        self._rmdir = noted_changes.after(self._rmdir, journal, _ino_of)
        self._move = noted_changes.moving(self._move, journal)

    # ---- names

    async def lookup(
        self, parent: int, name: bytes, thread: int | None = None
    ) -> tuple[int, Inode]:
        """Returns the inode under a name, looked up by a thread of this host (0: by one that is not
        seen from here; None: by nobody). Raises NotFound, NameTooLong, Stale; Unavailable."""
        try:
            if self.coherence is not None:
                await self._catch_up(self.coherence, parent, name)
            if thread is not None and parent != ROOT_INODE and self.node.is_strict(parent):
                ino, inode = await self._find_for(thread, parent, name)
            elif self.names is not None and self.names.is_kept(parent):
                ino, inode = await self._find_kept(self.names.finder, parent, name)
            else:
                ino, inode = await self.engine.read(lambda t: self._find(t, parent, name))
        except Unreached as error:
            self.misses.found_nothing(error)
            raise
        except NotFound:
            self.misses.missed(keys.file_entry(parent, name))
            if thread is not None:
                self.overtaken_opens.ended(thread)
            raise
        if thread in self.overtaken_opens:
            ino, inode = await self.overtaken_opens.settled(
                (ino, inode), lambda: self.lookup(parent, name)
            )
        if stat.S_ISDIR(inode.mode) and ino not in self.known:
            ino, inode = await self.introductions.read(lambda t: self._meet(t, parent, name))
        if not inode.nlink:
            raise Stale("the last link is gone")  # `.`, by a file handle
        return ino, self.attributes.live(ino, inode)

    async def _find_for(self, thread: int, parent: int, name: bytes) -> tuple[int, Inode]:
        """Like `_find`, for a thread that may be renaming what another host has just renamed."""
        looked_at = clock.now()
        try:
            ino, inode = await self.engine.read(lambda t: self._find(t, parent, name))
        except NotFound:
            self.moved_names.absent(thread)
            raise
        if thread:
            await self.moved_names.found(thread, parent, name, ino, looked_at)
        else:
            await self.moved_names.found_unseen(parent, name, ino)
        return ino, inode

    async def _find_kept(self, finder: "NameFinder", parent: int, name: bytes) -> tuple[int, Inode]:
        """Like `_find`, for a name that other nodes may have if it is not here."""

        def look(t: Transaction) -> tuple[int, Inode] | None:
            try:
                found = self._find(t, parent, name)
            except NotFound:
                return None
            return None if finder.is_doubtful(t, *found) else found

        found = await self.engine.read(look)
        if found is None:
            if not await self.node.port.find([(parent, name)]):
                raise NotFound("no such name")
            found = await self.engine.read(lambda t: self._find(t, parent, name))
        return found

    async def _catch_up(self, coherence: Coherence, parent: int, name: bytes) -> None:
        """Makes the metadata replica as new as the parent's namespace demands."""
        if parent != ROOT_INODE:
            try:
                await coherence.fresh(parent)
            except Unreached:
                if not await self.engine.read(lambda t: _is_certain(t, coherence, parent, name)):
                    raise
        elif not await self.engine.read(lambda t: tree.exist(t, parent, [name])[0]):
            await coherence.fresh_root()

    @staticmethod
    def _find(t: Transaction, parent: int, name: bytes) -> tuple[int, Inode]:
        """Like `tree.lookup`; a file that another node has not published yet is absent."""
        ino, inode = tree.lookup(t, parent, name)
        if t.node and not published_view.is_here(t, ino, inode):
            raise NotFound("no such name: another node is making it")
        return ino, inode

    def _meet(self, t: Transaction, parent: int, name: bytes) -> tuple[int, Inode]:
        """Looks up a directory that the kernel is about to know."""
        ino, inode = self._find(t, parent, name)
        self.introductions.meet(ino, inode)
        return ino, inode

    async def introduced(self, directory: int, page: list[ListingEntry]) -> list[ListingEntry]:
        """Returns the entries of a directory, of which the kernel may be told: except those that
        are still elsewhere, and that `introductions` finds strange."""
        elsewhere = [(directory, each.name) for each in page if each.is_elsewhere]
        if elsewhere:
            await self.node.port.find(elsewhere)
            page = await self.engine.read(lambda t: _met(t, directory, page))
        return await self.introductions.page(page)

    async def make_node(
        self, parent: int, name: bytes, mode: int, rdev: int, caller: Caller
    ) -> tuple[int, Inode]:
        """Makes a fifo, socket, device or empty regular file. Raises what `create` raises."""
        if stat.S_ISREG(mode):
            handle, ino, inode = await self.create(parent, name, mode, os.O_RDWR, caller)
            await self.publishing.publish(handle.file)
            await self.release(handle.fh)
            return ino, inode
        return await self.new_inodes.make_device(parent, name, mode, rdev, caller)

    async def readlink(self, ino: int) -> bytes:
        """Returns the target. Raises Invalid if it is no symbolic link."""
        inode = await self.engine.read(lambda t: tree.read_inode(t, ino))
        if not stat.S_ISLNK(inode.mode):
            raise Invalid("not a symbolic link")
        return inode.target

    async def link(self, ino: int, parent: int, name: bytes) -> Inode:
        """Gives a file another name."""
        _check_name(name)
        now = file_time_ns()
        inode = await self.engine.transact(lambda t: self._link(t, ino, parent, name, now))
        self.orphans.named(ino)
        return self.attributes.live(ino, inode)

    async def unlink(self, parent: int, name: bytes) -> int:
        """Removes a name and returns its inode; the file goes with its last name, once nobody holds
        it."""
        now = file_time_ns()
        removed = await self.engine.transact(lambda t: self._unlink(t, parent, name, now, _keep))
        self.orphans.removed(removed)
        return removed.ino

    async def rmdir(self, parent: int, name: bytes) -> int:
        """Removes an empty directory (at the top level a namespace) and returns its inode."""
        if self.names is not None and self.names.is_kept(parent):
            await self._leave_empty(parent, name)
        now = file_time_ns()
        removed = await self.engine.transact(lambda t: self._rmdir(t, parent, name, now, _keep))
        self.orphans.removed(removed)
        self.orphans.removed(removed.marker)
        return removed.ino

    async def _leave_empty(self, parent: int, name: bytes) -> None:
        """Raises NotEmpty if a directory that is about to be removed holds files of other nodes."""

        def look(t: Transaction) -> int:
            found = tree.find(t, parent, name)
            is_empty = found is not None and is_directory(found[1]) and tree.is_empty(t, found[0])
            return found[0] if found is not None and is_empty else 0

        directory = await self.engine.read(look)
        if directory and not await self.node.port.may_remove(directory):
            raise NotEmpty("the directory is not empty: other nodes have files in it")

    async def rename(
        self,
        old_parent: int,
        old_name: bytes,
        new_parent: int,
        new_name: bytes,
        flags: int,
        caller: Caller,
    ) -> int:
        """Does rename(2) with all its flags; atomic for every reader. Returns the inode that was
        replaced; 0: none.

        Over a file of a durable namespace it waits until the new file's present data are on disk: a
        power cut must not take both."""
        whiteout, now = None, file_time_ns()
        if flags & tree.RENAME_WHITEOUT and old_parent != ROOT_INODE:
            ino = await self.volume.allocate(namespace_of(old_parent))
            whiteout = ino, new_record(stat.S_IFCHR, caller.uid, caller.gid, now)
        old, new = (old_parent, old_name), (new_parent, new_name)
        move = partial(
            self._move,
            old=old,
            new=new,
            flags=flags,
            now=now,
            keep=_keep,
            whiteout=whiteout,
        )
        replaced = await self.volume.rename(old, new, move, flags=flags)
        if isinstance(replaced, Unsettled):
            await detach.aside()
            await self._settle(*replaced)
            replaced = await self.engine.transact(partial(move, settled=replaced.ino))
            assert not isinstance(replaced, Unsettled), "its file is settled"
        self.orphans.removed(replaced)
        return 0 if replaced is None else replaced.ino

    def rename_now(self, old: tuple[int, bytes], new: tuple[int, bytes]) -> int | None:
        """Like `rename` without flags; returns None, and does nothing, if it has to wait. Raises
        what `rename` raises."""
        private = 0
        if self.coherence is not None:
            private = self.volume.private_of_rename(old[0], new[0])
            if not private:
                return None
        move = partial(self._move, old=old, new=new, flags=0, now=file_time_ns(), keep=_keep)
        done = self.node.near.try_now(move, private=private)
        replaced = done.result
        if not done.is_done or isinstance(replaced, Unsettled):
            return None
        self.orphans.removed(replaced)
        return 0 if replaced is None else replaced.ino

    async def _settle(self, ino: int, inode: Inode) -> None:
        """Waits until a file's data are on disk, and records that if it is not recorded."""
        async with self._settling:
            if not inode.boot and await self._is_synced_here(ino, inode.version):
                return
            handle = await self.open(ino, os.O_WRONLY, None)
            try:
                await self.publishing.sync(handle.file, datasync=True)
            finally:
                await self.release(handle.fh)

    async def _is_synced_here(self, ino: int, version: int) -> bool:
        """Syncs a data file whose record counts it as synced since it once was; False: it is not
        here."""
        try:
            fd = self.volume.files.open(ino, version, os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:
            await trio.to_thread.run_sync(partial(file_sync.sync, fd, datasync=True))
        finally:
            os.close(fd)
        return True

    def forget(self, ino: int, count: int) -> None:
        """Notes that the kernel gives back look-ups."""
        if not self.holders.forgotten(ino, count):
            return
        self.known.forget(ino)
        self.open_files.forget(ino)
        self.overtaken_opens.forget(ino)
        self.orphans.let_go(ino)

    async def run(self) -> None:
        """Does what requests left for later, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.open_files.unrecorded.run)
            nursery.start_soon(self.overtaken_opens.run)

    async def leave(self) -> None:
        """Records what closes could not, and leaves what is open to the next daemon: the mount goes
        on."""
        await self.open_files.unrecorded.close()
        self.overtaken_opens.forget_all()

    async def close(self) -> None:
        """Publishes and closes what is open, and drops what only the kernel held: the mount has
        gone."""
        await self.open_files.release_all()
        self.overtaken_opens.forget_all()
        self.holders.forget_all()
        self.known.forget_all()
        self.orphans.let_all_go()

    # ---- files

    async def open(
        self,
        ino: int,
        flags: int,
        owner: int | None,
        thread: int = 0,
        opener: InodeOpener | None = None,
    ) -> Handle:
        """Opens a regular file, as one of this user's open files (None: the node's), for a thread
        of this host (0: for nobody). `opener`: the kernel's inode that is opened. Raises NoLocks if
        its locks could not be kept, TooManyOpenFiles."""
        self.check_locks(ino)
        if owner is not None and self.node.is_strict(ino):
            await self._find_anew(thread, ino)
        try:
            if owner is not None and self.coherence is not None and _reads(flags):
                self.coherence.check_content(ino)
            if flags & os.O_APPEND and self.open_files.is_leased(ino, flags):
                handle = await self.open_files.open_to_append(ino, flags, owner, thread, opener)
            else:
                handle = await self.open_files.open(ino, flags, owner, opener)
            self.overtaken_opens.ended(thread, ino)
            return handle
        except EngineAway as error:
            if flags & (os.O_ACCMODE | os.O_TRUNC) == os.O_RDONLY:
                raise Unavailable(str(error)) from error  # its last close is not recorded yet
            raise
        except (Stale, Conflict, ChangesAllTheTime) as error:
            if opener is None:
                raise
            if (kept := self.overtaken_opens.take(ino)) is not None:
                opened = await self._open_kept(ino, kept, flags, owner)
                if opened is not None:
                    self.overtaken_opens.ended(thread)
                    return opened
            is_again = self.overtaken_opens.failed(thread) or not isinstance(error, Stale)
            if not is_again or self.node.is_strict(ino):
                raise
            miss = OtherVersion(str(error))
            self.misses.found_nothing(miss)
            raise miss from error
        except NotFound as error:
            self.misses.found_nothing(error)
            raise

    async def _open_kept(
        self, ino: int, kept: KeptData, flags: int, owner: int | None
    ) -> Handle | None:
        """Opens what the look-up just before found, for reading, though the file has lost its last
        name since; returns None where it has one, or is to be written to. Raises
        TooManyOpenFiles."""
        is_opened = False
        try:
            found = await self.engine.read(lambda t: tree.read_inodes(t, [ino])[0])
            is_read = flags & os.O_ACCMODE == os.O_RDONLY and not flags & os.O_TRUNC
            if not is_read or (found is not None and found.nlink):
                return None
            is_opened = True
        finally:
            if not is_opened:
                os.close(kept.fd)
        handle = self.open_files.open_descriptor(ino, kept.inode, kept.fd, flags, owner)
        if found is not None:  # else the record was lost, or goes with its data by itself
            self.orphans.lost_place(ino, kept.inode.version)
        return handle

    async def _find_anew(self, thread: int, ino: int) -> None:
        """Makes the metadata replica as new as an open without a look-up demands."""
        if not self.moved_names.has_just_found(thread, ino) and self.coherence is not None:
            await self.coherence.fresh(ino)

    async def create(
        self,
        parent: int,
        name: bytes,
        mode: int,
        flags: int,
        caller: Caller,
        *,
        is_kept: bool = False,
    ) -> tuple[Handle, int, Inode]:
        """Makes and opens a file. Waits, within a deadline, for space in a cache namespace.
        `is_kept`: on a lone node it stays after a kill though it was never closed.

        Raises Exists, NoSpace, NotPermitted (top level), NameTooLong, NotFound,
        TooManyOpenFiles.
        """
        if self.node.locks is not None:
            self.check_locks(parent)
        namespace_id = namespace_of(parent)
        if self.node.evictor.pressed(namespace_id):
            await self.node.evictor.make_room(namespace_id)
        mode = stat.S_IFREG | stat.S_IMODE(mode)
        ino = 0 if parent == ROOT_INODE else await self.volume.allocate(namespace_id)
        made = self.new_inodes
        try:
            if self.coherence is None:
                done = made.make_file_now(
                    *(parent, name, mode, flags, ino, caller.uid, caller.gid), is_kept=is_kept
                )
                assert done is not None, "a lone node asks nobody"
                handle, inode = done
            else:
                handle, inode = await made.make_file(parent, name, mode, flags, ino, caller)
        except NoDataFile as failed:
            await failed.undo()
        except Exists:
            if flags & os.O_EXCL:
                raise
        else:
            return handle, ino, inode
        return await self._open_existing(parent, name, flags, caller)

    async def _open_existing(
        self, parent: int, name: bytes, flags: int, caller: Caller
    ) -> tuple[Handle, int, Inode]:
        """Opens a file that another process made after the kernel looked for it. Raises Busy while
        it belongs to another node, which has reserved the name and not closed the file yet; an open
        to append waits for that."""
        if self.open_files.is_leased(parent, flags):
            await self._await_lease(parent, name)
        try:
            ino, inode = await self.lookup(parent, name)
        except NotFound:
            raise Busy("another node is making a file of this name, or removed it") from None
        if not stat.S_ISREG(inode.mode):
            raise Exists("the name is taken by something that is no regular file")
        return await self.open(ino, flags, caller.uid, caller.pid), ino, inode

    async def _await_lease(self, parent: int, name: bytes) -> None:
        """Waits until nobody on another node appends to the file of this name. Raises Busy."""
        appends = self.node.appends
        assert appends is not None
        found = await self.engine.read(lambda t: tree.find(t, parent, name))
        if found is not None:
            await appends.take(found[0])
            appends.give_back(found[0])

    async def flush(self, fh: int) -> None:
        """Publishes what was written: a descriptor of the handle was closed."""
        handle = self.open_files.handle(fh)
        if handle.writable:
            await self.publishing.publish(handle.file)

    async def release(self, fh: int) -> None:
        """Ends a handle: its last descriptor was closed."""
        ino = await self.open_files.release(fh)
        if ino:
            self.orphans.let_go(ino)

    def check_locks(self, ino: int) -> None:
        """Refuses locks that should reach every node but would be left to this host's kernel
        unseen."""
        locks = self.node.locks
        if locks is not None and self.locks is None and locks.reaches_cluster(ino):
            raise NoLocks(
                "locks of this namespace reach the cluster, and this mount's do not: mount again"
                " (kvfs umount, kvfs mount), in passthrough or relay mode"
            )

    async def unlock(self, place: LockTarget, owner: int) -> None:
        """Drops the locks of an owner that closed the file."""
        if self.locks is not None:
            await self.locks.closed(place, self.locks.owner(owner))

    async def fsync(self, fh: int, *, datasync: bool) -> None:
        """Returns when data and record survive power loss."""
        await self.publishing.sync(self.open_files.handle(fh).file, datasync=datasync)

    async def sync_directory(self, ino: int) -> None:
        """Returns when all earlier changes of names in a directory survive power loss."""
        await self.node.volume.sync(ino)

    def file(self, fh: int) -> OpenFile:
        """Returns the open file behind a handle. Raises Stale."""
        return self.open_files.handle(fh).file

    async def statfs(self, ino: int) -> os.statvfs_result:
        """Returns space within the limit that holds here: the namespace's capacity or the
        store's."""
        return await self.node.space(namespace_of(ino))


def _reads(flags: int) -> bool:
    """Returns whether a file that is opened so may be read as it was."""
    return flags & os.O_ACCMODE != os.O_WRONLY and not flags & os.O_TRUNC


def _is_certain(t: Transaction, coherence: Coherence, parent: int, name: bytes) -> bool:
    """Returns whether a name of a cache is there, however long the engine is silent: a directory,
    or a file that this node alone knows of."""
    found = tree.find(t, parent, name)
    if found is None:
        return False
    ino, inode = found
    is_own = not inode.flags & Flag.PUBLISHED and published_view.is_here(t, ino, inode)
    is_alone = is_own or coherence.is_alone(keys.file_entry(parent, name), ino)
    return is_directory(inode) or (stat.S_ISREG(inode.mode) and is_alone)


def _ino_of(removed: Removed) -> int:
    return removed.ino


def _keep(_: int) -> bool:
    # an orphan first: a kill between the record's end and the data file's must not leak the latter
    return True


def _check_name(name: bytes) -> None:
    if len(name) > NAME_MAX:
        raise NameTooLong(f"a name holds at most {NAME_MAX} bytes")


def _met(t: Transaction, directory: int, page: Sequence[ListingEntry]) -> list[ListingEntry]:
    """Returns the entries with what is known here by now of those that were elsewhere."""
    found: list[ListingEntry] = []
    for each in page:
        met = tree.find(t, directory, each.name) if each.is_elsewhere else None
        found.append(each if met is None else ListingEntry(each.following, each.name, *met))
    return found
