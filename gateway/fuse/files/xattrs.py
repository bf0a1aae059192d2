"""Extended attributes: the user., trusted. and security. classes are kept, access lists refused.

The kernel decides who may set which, and clears `security.capability` on a file that is written; it
asks for that attribute once after each look at a file's attributes.

Every file has `kvfs.store`, which tells where the store behind the mount is; it is not listed.
"""

import os
from pathlib import Path
from typing import Final

from gateway.fuse.codec.caller import Caller
from gateway.fuse.names import noted_changes
from gateway.holder.mount_journal import MountJournal
from kvfs.base import detach
from kvfs.base.clock import file_time_ns
from kvfs.base.errors import NotSupported
from kvfs.client.mount.mount_store import STORE_XATTR
from kvfs.meta.engine import Engine, Transaction
from kvfs.meta.records import namespace_of
from kvfs.node.tasks.eviction.evictor import Evictor
from kvfs.objects import attribute_guard
from kvfs.tree import inodes

_KEPT_XATTRS: Final = (b"user.", b"trusted.", b"security.")


class Xattrs:
    """The extended attributes of one mount's files."""

    def __init__(self, engine: Engine, evictor: Evictor, store: Path) -> None:
        """`store`: its directory."""
        self._engine = engine
        self._evictor = evictor
        self._store = os.fsencode(store)
        self._set, self._remove = inodes.set_xattr, inodes.remove_xattr

    def keep(self, journal: MountJournal) -> None:
        """Notes in a mount's journal, before each commit, the inode whose attribute is changed."""
        self._set = noted_changes.of(self._set, journal, 1)
        self._remove = noted_changes.of(self._remove, journal, 1)

    async def getxattr(self, ino: int, name: bytes) -> bytes:
        """Raises NoAttribute, NotSupported."""
        if name == STORE_XATTR:
            return self._store
        _check_xattr(name)
        return await self._engine.read(lambda t: inodes.get_xattr(t, ino, name))

    async def setxattr(self, ino: int, name: bytes, value: bytes, flags: int) -> None:
        """Sets an attribute of the classes that are kept; others raise NotSupported. Raises Invalid
        and NotPermitted for attributes that S3 could not read, or alone may change (`guard`),
        NoSpace.

        Waits for space in a full namespace, as a create does: attributes take space too."""
        _check_xattr(name)
        namespace_id = namespace_of(ino)
        if self._evictor.pressed(namespace_id):
            await detach.aside()
            await self._evictor.make_room(namespace_id)
        now = file_time_ns()

        def fn(t: Transaction) -> None:
            attribute_guard.check_set(t, ino, name, value, now)
            self._set(t, ino, name, value, flags, now)

        await self._engine.transact(fn, private=ino)

    async def listxattr(self, ino: int, caller: Caller) -> list[bytes]:
        """Returns the names of all attributes that the caller may see: trusted. ones are root's."""
        names = await self._engine.read(lambda t: inodes.list_xattrs(t, ino))
        if caller.uid == 0:
            return names
        return [name for name in names if not name.startswith(b"trusted.")]

    async def removexattr(self, ino: int, name: bytes) -> None:
        """Raises NoAttribute, NotSupported, NotPermitted."""
        _check_xattr(name)
        now = file_time_ns()

        def fn(t: Transaction) -> None:
            attribute_guard.check_remove(t, ino, name, now)
            self._remove(t, ino, name, now)

        await self._engine.transact(fn, private=ino)


def _check_xattr(name: bytes) -> None:
    if name.startswith(b"system."):
        raise NotSupported("access lists are not kept")
    if not name.startswith(_KEPT_XATTRS) or name in _KEPT_XATTRS:
        raise NotSupported("an attribute is named user.NAME, trusted.NAME or security.NAME")
