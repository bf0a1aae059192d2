"""The transactions by which a file gets its record, and later its name. No I/O here."""

import stat
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from kvfs.base.errors import Conflict, Exists, IsADirectory, NotADirectory, NotFound, NotPermitted
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import ROOT_INODE, Flag, Inode, namespace_of
from kvfs.session.paths import joined, naming, shown
from kvfs.session.session import Author
from kvfs.tree import lifecycle, namespaces, tree
from kvfs.tree.entries import find_shown
from kvfs.tree.inodes import BLOCK, read_inode, set_blocks, write_inode
from kvfs.vfs.post_commit import Changed
from kvfs.vfs.space_reservation import ReservationRefused, SpaceReservation

PAGE_BYTES: Final = 4096


class Options(NamedTuple):
    """The way in which the files of one call are to be put."""

    mode: int = 0o644
    exclusive: bool = False
    """Whether the names must be free."""
    parents: bool = False
    """Whether missing directories are made; the namespace must exist."""


class StagingTarget(NamedTuple):
    """The place where a file is to appear."""

    directory: tuple[bytes, ...]
    name: bytes

    def __str__(self) -> str:
        return joined((*self.directory, self.name))


Walked = dict[tuple[bytes, ...], tuple[int, tuple[bytes, ...]]]
"""For each path of a directory that was looked for in one transaction, the last one on the way that
exists, and the names of those that are missing."""


class NewFile(msgspec.Struct, frozen=True):
    """A file that is to be made."""

    parent: int
    """The directory that it will be in, or one above: it gives the namespace and the group."""
    size: int
    """Its size in bytes."""
    durable: bool
    mode: int = 0o600
    """Permissions."""

    @property
    def namespace(self) -> int:
        """The id of its namespace."""
        return namespace_of(self.parent)


class Dropped(Exception):
    """A node that has started took the record for a dead process's."""


def reserve(
    t: Transaction,
    room: SpaceReservation,
    files: Sequence[NewFile],
    author: Author,
    attempt: int,
) -> list[int] | ReservationRefused:
    """Makes a record without a name for each of these files, the space included; returns their
    inode numbers."""
    sizes: dict[int, int] = {}
    counts: dict[int, int] = {}
    for file in files:
        number = file.namespace
        sizes[number] = sizes.get(number, 0) + BLOCK * blocks_of(file.size)
        counts[number] = counts.get(number, 0) + 1
    if refused := room.refuse(t, sizes, attempt):
        return refused
    following = {
        number: namespaces.allocate_inodes(t, number, count) for number, count in counts.items()
    }
    reserved = []
    for file in files:
        number = file.namespace
        ino, following[number] = following[number], following[number] + 1
        inode = new_record(stat.S_IFREG | stat.S_IMODE(file.mode), *author[:3])
        inode.blocks, inode.boot = blocks_of(file.size), author.boot
        tree.add_unlinked(t, file.parent, ino, inode)
        reserved.append(ino)
    return reserved


def grow(
    t: Transaction, room: SpaceReservation, ino: int, old: int, new: int, attempt: int
) -> ReservationRefused | None:
    """Reserves `new` bytes for a file in place of `old`."""
    if refused := room.refuse(t, {namespace_of(ino): new - old}, attempt):
        return refused
    if t.get(keys.orphan(ino)) is not None:
        inode = read_inode(t, ino)
        set_blocks(t, ino, inode, blocks_of(new))
        write_inode(t, ino, inode)
    return None


class WrittenData(msgspec.Struct, frozen=True):
    """A data file as it is to be published."""

    ino: int
    size: int
    blocks: int
    mtime_ns: int
    ctime_ns: int
    synced: bool


def place(
    t: Transaction,
    target: StagingTarget,
    file: WrittenData,
    options: Options,
    author: Author,
    changed: Changed,
    directories: dict[tuple[bytes, ...], int],
) -> None:
    """Puts a file under its name, over an existing one, and publishes it. `directories`: those that
    this transaction found or made, by their paths; empty for its first file.

    Raises what `check` raises, Dropped, and Conflict when another namespace has taken the old one's
    name.
    """
    parent = directories.get(target.directory)
    if parent is None:
        parent = _make_directories(t, target, options, author, changed)
        directories[target.directory] = parent
    if namespace_of(parent) != namespace_of(file.ino):
        raise Conflict(f"{target}: the namespace is another one than when the put began")
    is_numbered = t.delete(keys.reserved(file.ino))
    if not is_numbered and t.get(keys.orphan(file.ino)) is None:
        raise Dropped
    removed = None
    if _is_taken(t, parent, target, options):
        removed = tree.unlink(t, parent, target.name, author.now, lambda _: True)
    boot = 0 if file.synced else author.boot
    if is_numbered:
        tree.add(t, parent, target.name, file.ino, _published(file, options.mode, author, boot))
    else:
        tree.link(t, file.ino, parent, target.name, author.now)
        lifecycle.publish(
            t,
            file.ino,
            size=file.size,
            blocks=file.blocks,
            mtime_ns=file.mtime_ns,
            ctime_ns=file.ctime_ns,
            boot=boot,
        )
    changed.name(parent, target.name, removed)
    changed.publish(file.ino, file.size)


def make_directory(
    t: Transaction, target: StagingTarget, options: Options, author: Author, changed: Changed
) -> None:
    """Does mkdir; at the top level it makes a durable namespace. Raises Exists, and what `check`
    raises."""
    parent = _make_directories(t, target, options, author, changed)
    if find_shown(t, parent, target.name) is not None:
        raise Exists(f"{target} exists already")
    _add_directory(t, parent, target.name, options.mode, author, changed)


def blocks_of(size: int) -> int:
    """Returns the blocks (see `Inode.blocks`) that so many bytes take on disk."""
    return -(-size // PAGE_BYTES) * (PAGE_BYTES // BLOCK)


def check(
    t: Transaction, target: StagingTarget, size: int, options: Options, walked: Walked
) -> NewFile:
    """Returns the file that is to appear there. Errors that can be foreseen are raised here.
    `walked`: empty for the first file of a transaction.

    Raises NotFound, NotADirectory, IsADirectory, Exists, NotPermitted, NameTooLong, Invalid."""
    way = walked.get(target.directory)
    if way is None:
        way = walked[target.directory] = _deepest(t, target, options)
    parent, missing = way
    if parent == ROOT_INODE:
        raise NotPermitted(f"{target}: a file stands in a namespace, not beside them")
    with naming((*target.directory, target.name)):
        for name in (*missing, target.name):
            namespaces.check_name(name)
    if not missing:
        _is_taken(t, parent, target, options)
    return NewFile(parent, size, namespaces.is_durable(t, parent), options.mode)


def _is_taken(t: Transaction, parent: int, target: StagingTarget, options: Options) -> bool:
    entry = find_shown(t, parent, target.name)
    if entry is None:
        return False
    if options.exclusive:
        raise Exists(f"{target} exists already")
    if entry.directory:
        raise IsADirectory(f"{target} is a directory")
    return True


def _deepest(
    t: Transaction, target: StagingTarget, options: Options
) -> tuple[int, tuple[bytes, ...]]:
    """Returns the last existing directory on the way, and the names of the missing ones."""
    ino = ROOT_INODE
    for depth, name in enumerate(target.directory):
        found = tree.find(t, ino, name)
        if found is None:
            if ino == ROOT_INODE:
                raise NotFound(
                    f"{target}: there is no namespace {shown(name)}: make it with `kvfs namespace "
                    f"create {shown(name)}`"
                )
            if not options.parents:
                raise NotFound(f"{target}: no such directory as {shown(name)}")
            return ino, target.directory[depth:]
        ino, inode = found
        if not stat.S_ISDIR(inode.mode):
            raise NotADirectory(f"{target}: {shown(name)} is not a directory")
    return ino, ()


def _make_directories(
    t: Transaction, target: StagingTarget, options: Options, author: Author, changed: Changed
) -> int:
    parent, missing = _deepest(t, target, options)
    for name in missing:
        parent = _add_directory(t, parent, name, 0o755, author, changed)
    return parent


def _add_directory(
    t: Transaction, parent: int, name: bytes, mode: int, author: Author, changed: Changed
) -> int:
    top = parent == ROOT_INODE
    ino = 0 if top else namespaces.allocate_inodes(t, namespace_of(parent), 1)
    inode = new_record(stat.S_IFDIR | stat.S_IMODE(mode), *author[:3])
    changed.name(parent, name)
    return tree.add(t, parent, name, ino, inode)


def _published(file: WrittenData, mode: int, author: Author, boot: int) -> Inode:
    """Returns the first record of a file that is whole already."""
    inode = new_record(stat.S_IFREG | stat.S_IMODE(mode), *author[:3])
    inode.size, inode.blocks, inode.boot = file.size, file.blocks, boot
    inode.mtime_ns, inode.ctime_ns = file.mtime_ns, max(author.now, file.ctime_ns)
    inode.flags = Flag.PUBLISHED
    return inode


def new_record(mode: int, uid: int, gid: int, now: int) -> Inode:
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
