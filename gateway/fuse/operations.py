"""The meaning of each filesystem operation on this mount, in the core's own types.

Both speakers of the protocol call these methods: the fast path, which drives them to their end in
one step where they wait for nothing, and the adapter for pyfuse3. The kernel checks permission bits
(`default_permissions`). Errors are the core's or OSError; `errno_map` translates them.
"""

import os
import stat
from functools import partial
from typing import Final

import msgspec
import trio

from gateway.fuse.codec.caller import Caller, now_ns
from gateway.fuse.codec.protocol import NAME_MAX, Fattr
from gateway.fuse.codec.set_attributes import Attributes, changes_of, completed
from gateway.fuse.files.file_ranges import Ranges
from gateway.fuse.files.kernel_inodes import InodeOpener
from gateway.fuse.files.open_file import Handle, OpenFile
from gateway.fuse.files.open_files import LARGE_BLOCKS, OpenFiles
from gateway.fuse.files.orphans import Orphans
from gateway.fuse.files.overtaken_opens import OvertakenOpens
from gateway.fuse.files.xattrs import Xattrs
from gateway.fuse.names.directory_streams import DirectoryStreams, ListingEntry
from gateway.fuse.names.known_directories import Introductions
from gateway.fuse.names.moved_names import MovedNames
from kvfs.base import clock, detach
from kvfs.base.errors import (
    Busy,
    Conflict,
    Exists,
    Invalid,
    NameTooLong,
    NoLocks,
    NotFound,
    OtherVersion,
    Stale,
    Unreached,
)
from kvfs.cluster.cluster_locks import Locks, LockTarget
from kvfs.cluster.coherence import Coherence
from kvfs.datastore import file_sync
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import ROOT_INODE, Flag, Inode, namespace_of
from kvfs.node import Node
from kvfs.tree import inodes, lifecycle, published_view, tree
from kvfs.tree.private_files import is_given_way, make_way
from kvfs.tree.tree import Removed

_TARGET_MAX: Final = 4095
_KNOWN: Final = 0
_PRIVATE: Final = 1
_RESERVED: Final = 2
_OVER: Final = 3
"""How much others are told of a new name at once: everything; nothing; that it is taken; that it
replaces another node's name that gives way."""
_SETTLING: Final = 40
"""Files that are opened at a time to be synced before a rename."""


class Operations:
    """The operations of one mount."""

    def __init__(self, node: Node, open_files: OpenFiles) -> None:
        self.node = node
        self.engine = node.engine
        self.volume = node.volume
        self.holders = node.holders
        self.known = node.known
        self.coherence = node.coherence
        self.store = node.files
        self.misses = node.mounts.misses
        self.locks: Locks | None = None
        """The locks that the kernel leaves to this mount."""
        self.open_files = open_files
        self.publishing = open_files.publishing
        open_files.appends = node.appends
        open_files.former_writers = node.former_writers
        self.publishing.is_strict = self._is_strict
        self.ranges = Ranges(open_files)
        self._settling = trio.CapacityLimiter(_SETTLING)
        self.orphans = Orphans(node.volume, open_files)
        self.directories = DirectoryStreams(node)
        self.introductions = Introductions(node.engine, node.known, node.holders)
        self.moved_names = MovedNames(node.engine)
        self.overtaken_opens = OvertakenOpens(node.transfers, node.files)
        self.xattrs = Xattrs(node.engine, node.evictor, node.store.root)

    # ---- names

    async def lookup(
        self, parent: int, name: bytes, thread: int | None = None
    ) -> tuple[int, Inode]:
        """Returns the inode under a name, looked up by a thread of this host (0: by one that is not
        seen from here; None: by nobody). Raises NotFound, NameTooLong, Stale; Unavailable."""
        try:
            if self.coherence is not None:
                await self._catch_up(self.coherence, parent, name)
            if thread is not None and parent != ROOT_INODE and self._is_strict(parent):
                ino, inode = await self._find_for(thread, parent, name)
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
        return ino, self.live(ino, inode)

    def _is_strict(self, directory: int) -> bool:
        """Returns whether other hosts see each change of names there at once."""
        return self.coherence is not None and self.coherence.is_strict(namespace_of(directory))

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

    async def _catch_up(self, coherence: Coherence, parent: int, name: bytes) -> None:
        """Makes the metadata replica as new as the parent's namespace demands."""
        if parent != ROOT_INODE:
            await coherence.fresh(parent)
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

    async def read_directory(self, fh: int, offset: int, limit: int) -> list[ListingEntry]:
        """See `DirectoryStreams.read`. The kernel may be told of each entry except those that
        `introductions` finds strange."""
        return await self.introductions.page(await self.directories.read(fh, offset, limit))

    def live(self, ino: int, inode: Inode) -> Inode:
        """Completes the record by the data file's own stat, where that is the truth. Changes
        `inode`."""
        if not stat.S_ISREG(inode.mode) or self._is_as_sealed(ino, inode):
            atime = self.volume.atimes.get(ino)
            if atime is not None:
                inode.atime_ns = atime
            return inode
        st = self._data_stat(ino, inode.version)
        return inode if st is None else completed(inode, st)

    def _is_as_sealed(self, ino: int, inode: Inode) -> bool:
        """Returns whether a file is what its record was sealed as. A program that has it open for
        writing here sees its own changes, whatever another node has published and sealed since: the
        file then counts as not sealed. Changes `inode`."""
        if not inode.flags & Flag.SEALED:
            return False
        file = self.open_files.get(ino)
        if file is None or not file.writers:
            return True
        inode.flags &= ~Flag.SEALED
        return False

    def _content(self, ino: int, opener: InodeOpener | None) -> OpenFile | None:
        """Returns the content that the opener's inode has open, which other nodes may have
        replaced."""
        return None if opener is None else opener.content(self.open_files.get(ino))

    def _data_stat(self, ino: int, version: int) -> os.stat_result | None:
        """Returns the data file's own stat; None if it is missing or incomplete here, or the open
        content is one that others have replaced."""
        file = self.open_files.get(ino)
        if file:
            if file.is_partial or (file.version < version and not file.writers):
                return None
            return os.fstat(file.fd)
        try:
            return self.store.stat(ino, version)
        except FileNotFoundError:
            return None

    async def getattr(self, ino: int, opener: InodeOpener | None = None) -> Inode:
        """Returns attributes, with the access time that reads by passthrough left on the data file.
        An open file has them even if another node has dropped its record. `opener`: the kernel's
        inode, which has them as it was opened."""
        content = self._content(ino, opener)
        file = self.open_files.get(ino) if content is None else content
        try:
            inode = await self.engine.read(lambda t: tree.read_inode(t, ino))
        except Stale:
            if file is None:
                raise
            return _removed(file)
        if not stat.S_ISREG(inode.mode):
            return inode
        if content is not None and _is_replaced(content, inode):
            return _as_opened(inode, content)
        if file and file.armed and await self.publishing.disarm(file):
            inode = await self.engine.read(lambda t: tree.read_inode(t, ino))
        return self.present(ino, inode)

    def present(self, ino: int, inode: Inode) -> Inode:
        """Returns a regular file's record like `live`; a sealed file's has the data file's access
        time. Changes `inode`."""
        st = self._data_stat(ino, inode.version)
        if st is None:
            return inode
        if self._is_as_sealed(ino, inode):
            inode.atime_ns = st.st_atime_ns
            return inode
        return completed(inode, st)

    async def make_directory(
        self, parent: int, name: bytes, mode: int, caller: Caller
    ) -> tuple[int, Inode]:
        """Makes a directory; at the top level a durable namespace."""
        return await self._add(parent, name, stat.S_IFDIR | stat.S_IMODE(mode), caller)

    async def make_node(
        self, parent: int, name: bytes, mode: int, rdev: int, caller: Caller
    ) -> tuple[int, Inode]:
        """Makes a fifo, socket, device or empty regular file."""
        if stat.S_ISREG(mode):
            handle, ino, inode = await self.create(parent, name, mode, os.O_RDWR, caller)
            await self.publishing.publish(handle.file)
            await self.release(handle.fh)
            return ino, inode
        return await self._add(parent, name, mode, caller, rdev=rdev)

    async def make_symlink(
        self, parent: int, name: bytes, target: bytes, caller: Caller
    ) -> tuple[int, Inode]:
        """Makes a symbolic link."""
        if len(target) > _TARGET_MAX:
            raise NameTooLong("a symbolic link's target holds at most 4,095 bytes")
        return await self._add(
            parent, name, stat.S_IFLNK | 0o777, caller, size=len(target), target=target
        )

    async def _add(
        self,
        parent: int,
        name: bytes,
        mode: int,
        caller: Caller,
        *,
        ino: int = 0,
        size: int = 0,
        rdev: int = 0,
        target: bytes = b"",
        kind: int = _KNOWN,
        is_leased: bool = False,
    ) -> tuple[int, Inode]:
        """Gives a new inode a name. `ino`: its number; 0: the next one. `is_leased`: the creator
        appends to it."""
        top = parent == ROOT_INODE  # a new namespace numbers its directory itself
        if not top and not ino:
            ino = await self.volume.allocate(namespace_of(parent))
        now = now_ns()

        def fn(t: Transaction) -> tuple[int, Inode]:
            inode = Inode(
                mode=mode,
                uid=caller.uid,
                gid=caller.gid,
                nlink=1,
                size=size,
                atime_ns=now,
                mtime_ns=now,
                ctime_ns=now,
                parent=parent,
                name=name,
                rdev=rdev,
                target=target,
                boot=self.node.boot if stat.S_ISREG(mode) else 0,
                flags=Flag.RESERVED if kind == _RESERVED and t.node else 0,
            )
            if kind == _OVER:
                make_way(t, parent, name)
            made = tree.add(t, parent, name, ino, inode)
            if is_leased and self.node.appends is not None:
                self.node.appends.put(t, made)
            if stat.S_ISDIR(mode):
                self.known.add(made)
            return made, tree.read_inode(t, made) if top else inode

        return await self.engine.transact(fn, private=ino if kind == _PRIVATE else 0)

    async def readlink(self, ino: int) -> bytes:
        """Returns the target. Raises Invalid if it is no symbolic link."""
        inode = await self.engine.read(lambda t: tree.read_inode(t, ino))
        if not stat.S_ISLNK(inode.mode):
            raise Invalid("not a symbolic link")
        return inode.target

    async def link(self, ino: int, parent: int, name: bytes) -> Inode:
        """Gives a file another name."""
        _check_name(name)
        now = now_ns()
        inode = await self.engine.transact(lambda t: tree.link(t, ino, parent, name, now))
        self.orphans.named(ino)
        return self.live(ino, inode)

    async def unlink(self, parent: int, name: bytes) -> int:
        """Removes a name and returns its inode; the file goes with its last name, once nobody holds
        it."""
        now = now_ns()
        removed = await self.engine.transact(lambda t: tree.unlink(t, parent, name, now, _keep))
        self.orphans.removed(removed)
        return removed.ino

    async def rmdir(self, parent: int, name: bytes) -> int:
        """Removes an empty directory (at the top level a namespace) and returns its inode."""
        now = now_ns()
        removed = await self.engine.transact(lambda t: tree.rmdir(t, parent, name, now, _keep))
        self.orphans.removed(removed)
        self.orphans.removed(removed.marker)
        return removed.ino

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
        old, new = (old_parent, old_name), (new_parent, new_name)
        ino = 0
        if flags & tree.RENAME_WHITEOUT and old_parent != ROOT_INODE:
            ino = await self.volume.allocate(namespace_of(old_parent))
        now = now_ns()

        def move(t: Transaction) -> Removed | None:
            if not ino:
                return tree.rename(t, *old, *new, flags=flags, now=now, keep=_keep)
            whiteout = ino, _new(stat.S_IFCHR, caller.uid, caller.gid, now)
            return tree.rename_with_whiteout(
                t, old, new, whiteout, flags=flags, now=now, keep=_keep
            )

        def move_settled(t: Transaction) -> Removed | lifecycle.Unsettled | None:
            return lifecycle.unsettled_source(t, *old, *new) or move(t)

        def move_same(t: Transaction) -> Removed | None:
            found = tree.find(t, *old)
            if found is None or found[0] != unsettled.ino:
                raise Stale("another file has the name by now: look it up again")
            return move(t)

        replaced = await self.engine.transact(move_settled)
        if isinstance(replaced, lifecycle.Unsettled):
            unsettled = replaced
            await detach.aside()
            await self._settle(*unsettled)
            replaced = await self.engine.transact(move_same)
        self.orphans.removed(replaced)
        return 0 if replaced is None else replaced.ino

    def rename_now(self, old: tuple[int, bytes], new: tuple[int, bytes]) -> int | None:
        """Like `rename` without flags, on a lone node; returns None, and does nothing, if it has to
        wait. Raises what `rename` raises."""
        now = now_ns()

        def move(t: Transaction) -> Removed | lifecycle.Unsettled | None:
            unsettled = lifecycle.unsettled_source(t, *old, *new)
            return unsettled or tree.rename(t, *old, *new, flags=0, now=now, keep=_keep)

        replaced = self.node.local.transact_now(move)
        if isinstance(replaced, lifecycle.Unsettled):
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
        self.orphans.let_go(ino)

    async def close(self) -> None:
        """Publishes and closes what is open, and drops what only the kernel held: the mount has
        gone."""
        await self.open_files.release_all()
        self.holders.forget_all()
        self.known.forget_all()
        self.orphans.let_all_go()

    # ---- attributes

    async def setattr(
        self, ino: int, valid: int, wanted: Attributes, opener: InodeOpener | None = None
    ) -> Inode:
        """Does chmod, chown, utimens and truncate, in any combination. Returns the attributes as
        the opener's inode has them."""
        if valid & Fattr.SIZE:
            await self._truncate(ino, wanted.size)
        now = now_ns()
        changes = changes_of(valid, wanted, now)

        def fn(t: Transaction) -> Inode:
            if valid & Fattr.KILL_SUIDGID:
                present = tree.read_inode(t, ino).mode
                mode = present if changes.mode is None else stat.S_IFMT(present) | changes.mode
                changes.mode = stat.S_IMODE(inodes.without_set_ids(mode))
            return inodes.set_attributes(t, ino, changes, now)

        inode = await self.engine.transact(fn, private=ino)
        self.open_files.mode_changed(ino, inode.mode)
        if valid & (Fattr.ATIME | Fattr.MTIME) and stat.S_ISREG(inode.mode):
            self._stamp(ino, inode, valid)
        content = self._content(ino, opener)
        if content is not None and _is_replaced(content, inode):
            return _as_opened(inode, content)
        return self.live(ino, inode)

    def _stamp(self, ino: int, inode: Inode, valid: int) -> None:
        """Sets times on the data file too, which is the truth while the file is not sealed."""
        self.volume.atimes.pop(ino, None)
        st = self._data_stat(ino, inode.version)
        if st is None:
            return
        times = (
            inode.atime_ns if valid & Fattr.ATIME else st.st_atime_ns,
            inode.mtime_ns if valid & Fattr.MTIME else st.st_mtime_ns,
        )
        if file := self.open_files.get(ino):
            os.utime(file.fd, ns=times)
        else:
            os.utime(self.store.path(ino, inode.version), ns=times, follow_symlinks=False)

    async def is_large(self, ino: int) -> bool:
        """Returns whether truncating this file may take long."""
        return (await self.getattr(ino)).blocks > LARGE_BLOCKS

    async def _truncate(self, ino: int, size: int) -> None:
        handle = await self.open_files.open(ino, os.O_WRONLY, None)
        try:
            await self.open_files.cut(handle.file, size)
        finally:
            await self.release(handle.fh)

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
        self._check_locks(ino)
        if owner is not None and self._is_strict(ino):
            await self._find_anew(thread, ino)
        try:
            if flags & os.O_APPEND and self.open_files.is_leased(ino, flags):
                handle = await self.open_files.open_to_append(ino, flags, owner, thread, opener)
            else:
                handle = await self.open_files.open(ino, flags, owner, opener)
            self.overtaken_opens.ended(thread)
            return handle
        except (Stale, Conflict) as error:
            if opener is None:
                raise
            is_again = self.overtaken_opens.failed(thread) or isinstance(error, Conflict)
            if not is_again or self._is_strict(ino):
                raise
            miss = OtherVersion(str(error))
            self.misses.found_nothing(miss)
            raise miss from error
        except NotFound as error:
            self.misses.found_nothing(error)
            raise

    async def _find_anew(self, thread: int, ino: int) -> None:
        """Makes the metadata replica as new as an open without a look-up demands."""
        if not self.moved_names.has_just_found(thread, ino) and self.coherence is not None:
            await self.coherence.fresh(ino)

    async def create(
        self, parent: int, name: bytes, mode: int, flags: int, caller: Caller
    ) -> tuple[Handle, int, Inode]:
        """Makes and opens a file. Waits, within a deadline, for space in a cache namespace.

        Raises Exists, NoSpace, NotPermitted (top level), NameTooLong, NotFound,
        TooManyOpenFiles.
        """
        if self.node.locks is not None:
            self._check_locks(parent)
        namespace_id = namespace_of(parent)
        if self.node.evictor.pressed(namespace_id):
            await self.node.evictor.make_room(namespace_id)
        mode = stat.S_IFREG | stat.S_IMODE(mode)
        ino = 0 if parent == ROOT_INODE else await self.volume.allocate(namespace_id)
        if self.coherence is None:
            try:
                return self.make_file(parent, name, mode, flags, ino, caller)
            except Exists:
                if flags & os.O_EXCL:
                    raise
            return await self._open_existing(parent, name, flags, caller)
        self.open_files.begin_making(ino, caller.uid)
        try:
            ino, inode = await self._add_file(parent, name, mode, flags, ino, caller)
            handle = await self._make_data_file(parent, name, ino, inode, flags, caller.uid)
        except Exists:
            if flags & os.O_EXCL:
                raise
        else:
            return handle, ino, inode
        finally:
            self.open_files.end_making(ino, caller.uid)
        return await self._open_existing(parent, name, flags, caller)

    def make_file(
        self, parent: int, name: bytes, mode: int, flags: int, ino: int, caller: Caller
    ) -> tuple[Handle, int, Inode]:
        """Makes and opens a file on a lone node, at once. Raises what `create` raises, and
        Exists."""
        uid, gid, _ = caller
        inode = _new(mode, uid, gid, now_ns())
        inode.boot = self.node.boot

        shares = self.open_files.shares
        shares.take(uid)
        try:
            self.node.local.transact_now(lambda t: tree.add(t, parent, name, ino, inode), True)
            try:
                fd = self.store.create(ino, 0)
            except BaseException:
                detach.finish(self.unlink(parent, name))
                raise
        except BaseException:
            shares.give(uid)
            raise
        return self.open_files.created(ino, inode, fd, flags, uid), ino, inode

    async def _add_file(
        self, parent: int, name: bytes, mode: int, flags: int, ino: int, caller: Caller
    ) -> tuple[int, Inode]:
        """Does the first step of a create. If two hosts make one name, neither with O_EXCL, both
        succeed."""
        is_leased = bool(flags & os.O_APPEND) and self.open_files.is_leased(parent, flags)
        is_reserved = bool(flags & os.O_EXCL) or is_leased
        kind = _RESERVED if is_reserved else _PRIVATE
        try:
            return await self._add(
                *(parent, name, mode, caller), ino=ino, kind=kind, is_leased=is_leased
            )
        except Exists:
            if is_reserved or not await self.engine.read(lambda t: is_given_way(t, parent, name)):
                raise
        return await self._add(*(parent, name, mode, caller), ino=ino, kind=_OVER)

    async def _make_data_file(
        self, parent: int, name: bytes, ino: int, inode: Inode, flags: int, owner: int
    ) -> Handle:
        """Does the second step of a create."""
        try:
            fd = self.store.create(ino, 0)
        except BaseException:
            await self.unlink(parent, name)
            raise
        return self.open_files.created(ino, inode, fd, flags, owner)

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

    async def tmpfile(
        self, parent: int, mode: int, flags: int, caller: Caller
    ) -> tuple[Handle, int, Inode]:
        """O_TMPFILE: makes a file without a name, which link may give one."""
        namespace_id = namespace_of(parent)
        ino = await self.volume.allocate(namespace_id)
        now = now_ns()
        inode = _new(stat.S_IFREG | stat.S_IMODE(mode), caller.uid, caller.gid, now)
        inode.boot = self.node.boot
        self.open_files.begin_making(ino, caller.uid)
        try:
            await self._make_unlinked(parent, ino, inode)
            self.orphans.made(ino)
            fd = self.store.create(ino, 0)
            return self.open_files.created(ino, inode, fd, flags, caller.uid), ino, inode
        finally:
            self.open_files.end_making(ino, caller.uid)

    async def _make_unlinked(self, parent: int, ino: int, inode: Inode) -> None:
        def fn(t: Transaction) -> None:
            tree.add_unlinked(t, parent, ino, inode)

        if self.coherence is None:
            self.node.local.transact_unseen(fn)
        else:
            await self.engine.transact(fn, private=ino)

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

    def _check_locks(self, ino: int) -> None:
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

    async def sync_directory(self) -> None:
        """Returns when all earlier changes of names survive power loss."""
        await self.engine.sync()

    def file(self, fh: int) -> OpenFile:
        """Returns the open file behind a handle. Raises Stale."""
        return self.open_files.handle(fh).file

    async def statfs(self, ino: int) -> os.statvfs_result:
        """Returns space within the limit that holds here: the namespace's capacity or the
        store's."""
        return await self.node.space(namespace_of(ino))


def _keep(_: int) -> bool:
    # an orphan first: a kill between the record's end and the data file's must not leak the latter
    return True


def _new(mode: int, uid: int, gid: int, now: int) -> Inode:
    """Returns the record of an inode that has no name yet."""
    return Inode(
        mode=mode,
        uid=uid,
        gid=gid,
        nlink=0,
        atime_ns=now,
        mtime_ns=now,
        ctime_ns=now,
        parent=0,
        name=b"",
    )


def _check_name(name: bytes) -> None:
    if len(name) > NAME_MAX:
        raise NameTooLong(f"a name holds at most {NAME_MAX} bytes")


def _is_replaced(content: OpenFile, inode: Inode) -> bool:
    """Returns whether a file has another content than the one that is open."""
    return content.version < inode.version and not content.writers


def _as_opened(inode: Inode, content: OpenFile) -> Inode:
    """Returns a record with size and times of a content that was replaced."""
    if not content.is_partial:
        return completed(inode, os.fstat(content.fd))
    former = content.record
    inode.size, inode.blocks = former.size, former.blocks
    inode.mtime_ns = former.mtime_ns
    return inode


def _removed(file: OpenFile) -> Inode:
    """Returns a record for an open file whose own has gone."""
    inode = msgspec.structs.replace(file.record, nlink=0, flags=file.record.flags & ~Flag.SEALED)
    return inode if file.is_partial else completed(inode, os.fstat(file.fd))
