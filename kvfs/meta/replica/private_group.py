"""The private keys of one file, and what a transaction of this node adds to them.

| a transaction of this node | is private |
|---|---|
| makes a file, or changes one that only this node knows | yes |
| publishes a file that nobody else sees (O_EXCL) | yes, if it may be told behind |
| moves a file of this node with one name, and nothing else | yes, if it may be told behind |
| the same over a published file that has this name alone and no lock or lease | the same |
| anything else | no |

It reads the metadata replica, and writes nothing.
"""

import stat
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

import msgspec

from kvfs.base.clock import now
from kvfs.meta import delegations, keys
from kvfs.meta.engine import Transaction
from kvfs.meta.merge_operators import merged
from kvfs.meta.records import Flag, Inode, namespace_of, unpack_inode
from kvfs.meta.replica.replica_view import View

_OF_INODE: Final = frozenset(b"iouwxpr")
ENTRY: Final = keys.ENTRY[0]
_HELD: Final = keys.HELD[0]
_INODE: Final = keys.INODE[0]
MOST_NAMES: Final = 16
"""Names that a file may have one after the other before its server has to know one."""


class InodeWrites(msgspec.Struct, array_like=True):
    """The private keys of one inode, and of the files that it replaced."""

    keys: set[bytes]
    """The keys that are there, in the replica alone."""
    merges: dict[bytes, bytes]
    is_published: bool = False
    """Whether others are to know of it, as soon as possible."""
    published_at: float = 0.0
    """Time when it was published here alone, in seconds since this host's boot; 0: it was not."""
    before: dict[bytes, bytes] = {}
    """The server's values of keys that are there too. Those without a value are deleted here."""
    earlier: list[bytes] = []
    """Keys of names that the file had here before its present one, of which the server knows or may
    be learning."""
    size: int = 0
    """Bytes of the keys and values that the server has to be told, at most."""


class NotPrivate(Exception):
    """Others have to know at once. `lacks_delegation`: an inode of the namespace with which
    delegated they had not; 0: there is none."""

    def __init__(self, lacks_delegation: int = 0) -> None:
        super().__init__(lacks_delegation)
        self.lacks_delegation = lacks_delegation


class Wanted(NamedTuple):
    """A change that is to be private."""

    ino: int
    is_published: bool
    """Whether others are to know of it behind."""
    replaced: int = 0
    """The file whose name it takes; 0: none."""


def moved(t: Transaction, view: View, is_private: Callable[[bytes], bool]) -> Wanted:
    """Returns the file of this node to which a transaction gave another name, and nothing else.
    `is_private`: whether a key is one of a group. Raises NotPrivate."""
    found = inodes_among(view.writes)
    named = {value for key, value in view.writes.items() if key[0] == ENTRY and value is not None}
    if len(named) != 1 or len(found) > 2:
        raise NotPrivate
    ino = keys.unpack_u64(named.pop())
    inode = _record(view.writes.get(keys.inode(ino)))
    if inode is None or not stat.S_ISREG(inode.mode) or inode.nlink != 1:
        raise NotPrivate
    if t.get(keys.placement(ino, t.node)) is None:
        raise NotPrivate
    is_published = bool(inode.flags & Flag.PUBLISHED)
    replaced = next((each for each in found if each != ino), 0)
    if replaced and not (is_published and _is_replaceable(t, replaced, is_private)):
        raise NotPrivate
    return Wanted(ino, is_published, replaced)


def _is_replaceable(t: Transaction, ino: int, is_private: Callable[[bytes], bool]) -> bool:
    """Returns whether a file may lose its name here alone."""
    key = keys.inode(ino)
    if is_private(key):
        return False
    inode = _record(t.get(key))
    if inode is None or not stat.S_ISREG(inode.mode) or inode.nlink != 1:
        return False
    if not inode.flags & Flag.PUBLISHED:
        return False
    bound = (keys.locks(ino, True), keys.locks(ino, False), keys.append_lease(ino))
    return all(t.get(each) is None for each in bound)


def grown(
    t: Transaction,
    view: View,
    wanted: Wanted,
    old: InodeWrites | None,
    *,
    is_sent: bool,
    is_private: Callable[[bytes], bool],
) -> InodeWrites:
    """Returns the group of an inode as it is after a transaction; `old` before it, None: there was
    none. `is_sent`: the server is being told of it. Raises NotPrivate."""
    is_told = _is_told(t, wanted, old, is_sent=is_sent)
    if is_told and not (wanted.is_published and _is_move(view, wanted)):
        raise NotPrivate
    group = _with_writes(t, view, wanted, old, is_told=is_told, is_private=is_private)
    needs_place = not is_known(group, wanted.ino) or has_new_name(group, wanted.ino)
    binds = needs_place and (wanted.is_published or old is None)
    if binds and not delegations.is_held(t, namespace_of(wanted.ino)):
        raise NotPrivate(lacks_delegation=wanted.ino)
    return group


def _is_told(t: Transaction, wanted: Wanted, old: InodeWrites | None, *, is_sent: bool) -> bool:
    """Returns whether the server knows the inode, or is being told of it, so that nothing but its
    name may change here alone."""
    if old is not None:
        return is_sent or bool(old.earlier)
    if t.get(keys.inode(wanted.ino)) is None:
        return False
    return not (wanted.is_published and t.get(keys.unpublished(wanted.ino)) == t.node)


def _with_writes(
    t: Transaction,
    view: View,
    wanted: Wanted,
    old: InodeWrites | None,
    *,
    is_told: bool,
    is_private: Callable[[bytes], bool],
) -> InodeWrites:
    ino, packed = wanted.ino, keys.pack_u64(wanted.ino)
    replaced = keys.pack_u64(wanted.replaced) if wanted.replaced else b""
    group = old or InodeWrites(set(), {})
    names, before, earlier = set(group.keys), dict(group.before), list(group.earlier)
    is_new = not is_known(group, ino) and (old is not None or t.get(keys.inode(ino)) is None)
    theirs = [each for each in (b"" if is_new else packed, replaced) if each]
    for key in view.writes.keys() - names if theirs else ():
        there = t.get(key)
        if there is not None and any(_is_of(key, each) or there == each for each in theirs):
            before[key] = there
    for key, value in view.writes.items():
        if value is None and key[0] == ENTRY and (is_told or not is_new):
            earlier.append(key)
        if key in before:
            names.add(key)
        elif value is None:
            if key not in names and t.get(key) is not None:
                raise NotPrivate
            if key not in earlier:
                names.discard(key)
        elif (
            key in names
            or _is_of(key, packed)
            or (replaced and _is_of(key, replaced))
            or (value == packed and _is_free(t, key, is_private))
        ):
            names.add(key)
        else:
            raise NotPrivate
    if keys.inode(ino) not in names or len(earlier) > MOST_NAMES:
        raise NotPrivate
    merges = dict(group.merges)
    for key, operand in view.merges.items():
        merges[key] = merged(key, merges.get(key), operand) or operand
    size = group.size
    for key, value in view.writes.items():
        size += len(key) if value is None else len(key) + len(value)
    published_at = now() if wanted.is_published else group.published_at
    is_published = wanted.is_published or group.is_published
    return InodeWrites(names, merges, is_published, published_at, before, earlier, size)


def _is_free(t: Transaction, key: bytes, is_private: Callable[[bytes], bool]) -> bool:
    """Returns whether it is a name that nobody has: also no file here that the server has under
    it."""
    return key[0] == ENTRY and not is_private(key) and t.get(key) is None


def _is_move(view: View, wanted: Wanted) -> bool:
    """Returns whether a transaction changes nothing but names."""
    files = [keys.pack_u64(wanted.ino)]
    if wanted.replaced:
        files.append(keys.pack_u64(wanted.replaced))
    own = {keys.INODE + each for each in files} | {keys.ORPHAN + each for each in files[1:]}
    return all(key[0] == ENTRY or key in own for key in view.writes)


def is_known(group: InodeWrites, ino: int) -> bool:
    """Returns whether the server has a record of a group's file."""
    return keys.inode(ino) in group.before


def has_new_name(group: InodeWrites, ino: int) -> bool:
    """Returns whether a group's file has a name that the server has not."""
    packed = keys.pack_u64(ino)
    return any(key[0] == ENTRY and group.before.get(key) != packed for key in group.keys)


def is_own(key: bytes, ino: int) -> bool:
    """Returns whether a group's key is its file's own: no name, and not of a file that it
    replaced."""
    return _is_of(key, keys.pack_u64(ino))


def inodes_among(names: Iterable[bytes]) -> list[int]:
    """Returns the inodes whose records are among these keys."""
    return [keys.unpack_u64(name, 1) for name in names if name[0] == _INODE]


def _is_of(key: bytes, packed: bytes) -> bool:
    """Returns whether it is a key of an inode's own."""
    if key[0] in _OF_INODE:
        return key[1:9] == packed
    return key[0] == _HELD and key[3:11] == packed


def _record(value: bytes | None) -> Inode | None:
    return None if value is None else unpack_inode(value)
