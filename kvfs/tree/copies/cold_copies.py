"""The files that the cold tier has a copy of, and its objects that are garbage.

An object is named after inode number, version and checksum of a sealed file, so that one name never
stands for two contents. A record with the flag COLD says that its object is there, whole; the data
file may then go, and is fetched back from there.

| step of a demotion | in the engine | in the cold tier |
|---|---|---|
| 1 noted | `z` with the node | nothing |
| 2 uploaded | the same | object |
| 3 recorded | COLD, no `z` | object |
| 4 released | blocks 0 | object |
| changed or removed (`inodes.outdate_cold`) | `z`, empty | object |
| collected | nothing | nothing |

The remains of a kill before step 3 are garbage from the next start of that node on.

Invariants
- An object has a COLD record or a `z` key, never neither, and never both.
- Garbage is not uploaded anew before it was collected: the deletion may be on its way.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import Flag, Inode, namespace_of, unpack_namespace
from kvfs.tree.copies import placements
from kvfs.tree.inodes import read_inodes, set_blocks, write_inode

_UPLOADING: Final = b"u"


class Object(NamedTuple):
    """One content, by which an object is named."""

    ino: int
    version: int
    checksum: bytes

    def __str__(self) -> str:
        return f"{self.ino:016x}.{self.version:x}.{self.checksum.hex()}"


def is_wanted(t: Transaction, ino: int) -> bool:
    """Returns whether the file's namespace asks for the cold tier."""
    value = t.get(keys.namespace(namespace_of(ino)))
    return value is not None and unpack_namespace(value).cold


def object_of(ino: int, inode: Inode) -> Object | None:
    """Returns the object of a file that may be demoted: sealed, on disk, and with a name; else
    None."""
    if not inode.flags & Flag.SEALED or inode.boot or not inode.nlink:
        return None
    return Object(ino, inode.version, inode.checksum)


def begin(t: Transaction, wanted: Object) -> bool:
    """Does step 1; False if the file is another by now, or its object is still to be collected."""
    key = keys.cold_object(*wanted)
    inode = read_inodes(t, [wanted.ino])[0]
    if inode is None or object_of(wanted.ino, inode) != wanted or inode.flags & Flag.COLD:
        return False
    if t.get(key) is not None:
        return False
    t.put(key, _UPLOADING + t.node)
    return True


def finish(t: Transaction, done: Object) -> bool:
    """Does step 3; False if the file is another by now: its object is garbage."""
    key = keys.cold_object(*done)
    inode = read_inodes(t, [done.ino])[0]
    if inode is None or object_of(done.ino, inode) != done or inode.flags & Flag.COLD:
        t.put(key, b"")
        return False
    t.delete(key)
    inode.flags |= Flag.COLD
    write_inode(t, done.ino, inode)
    return True


def there(t: Transaction, asked: Sequence[Object]) -> list[Object]:
    """Returns the objects that the tier has now."""
    inodes = read_inodes(t, [each.ino for each in asked])
    return [
        each
        for each, inode in zip(asked, inodes, strict=True)
        if inode is not None and inode.flags & Flag.COLD and object_of(each.ino, inode) == each
    ]


def give_up(t: Transaction, failed: Object) -> None:
    """Gives up in place of step 3: whatever became of the object is garbage."""
    t.put(keys.cold_object(*failed), b"")


def release(t: Transaction, kept: Object) -> bool:
    """Does step 4, before the data file goes: it takes no space here; False if the file is another
    by now. In a cluster it takes none at all if no other node has it."""
    inode = read_inodes(t, [kept.ino])[0]
    if inode is None or object_of(kept.ino, inode) != kept or not inode.flags & Flag.COLD:
        return False
    if t.node:
        placements.let_go(t, kept.ino, t.node)
        if placements.is_held(t, kept.ino):
            return True
    set_blocks(t, kept.ino, inode, 0)
    write_inode(t, kept.ino, inode)
    return True


def garbage(t: Transaction, after: bytes, limit: int) -> tuple[list[Object], bytes]:
    """Returns objects that no record names and nobody uploads, among the next `limit` noted, and
    where to go on (empty: nowhere)."""
    found: list[Object] = []
    for count, (key, value) in enumerate(t.scan(after or b"z", b"{")):
        if count == limit:
            return found, key
        if not value:
            found.append(_object(key))
    return found, b""


def collected(t: Transaction, gone: list[Object]) -> list[Object]:
    """Notes that these objects are deleted. Returns them."""
    for each in gone:
        t.delete(keys.cold_object(*each))
    return gone


def uploads(t: Transaction, after: bytes, limit: int) -> tuple[list[Object], bytes]:
    """Returns the uploads of this node among the next `limit` noted, and where to go on (empty:
    nowhere)."""
    found: list[Object] = []
    for count, (key, value) in enumerate(t.scan(after or b"z", b"{")):
        if count == limit:
            return found, key
        if value == _UPLOADING + t.node:
            found.append(_object(key))
    return found, b""


def abandon(t: Transaction, left: list[Object]) -> list[Object]:
    """Abandons, at a start, these uploads of this node: they are garbage. Returns them."""
    for each in left:
        key = keys.cold_object(*each)
        if t.get(key) == _UPLOADING + t.node:
            t.put(key, b"")
    return left


def _object(key: bytes) -> Object:
    return Object(keys.unpack_u64(key, 1), keys.unpack_u64(key, 9), key[17:])
