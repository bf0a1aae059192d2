"""Data files in which the parts of an upload stand at their places, so that completing the upload
moves nothing. No I/O here.

An assembly belongs to parts of one size, its stride: part n stands at (n - 1) strides. It is a file
of the upload's directory, NUL `data` and the stride in hexadecimal; a part in it is a file without
data of its own, which tells its place. A part that is shorter than the stride fits, too: the last.

Invariants
- The bytes of a recorded part are never written again: a part that is sent anew gets a file of its
  own. A writer into an assembly holds an exclusive lock on the part's bytes (`part_slots`).
- An assembly becomes an object only if nobody writes to it, and no recorded part is in it that is
  not the object's.
- It is not sealed before: its flag says so to the sealer.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import Flag, Inode
from kvfs.objects import lookup, mutations, object_attributes
from kvfs.objects.lookup import Bucket
from kvfs.objects.mutations import Moment
from kvfs.tree.copies import placements
from kvfs.tree.entries import touch
from kvfs.tree.inodes import BLOCK, add_usage, read_inode, set_blocks, write_inode

MIN_STRIDE: Final = 5 << 20
"""The least size of a part that an assembly is made for: only the last part of an upload may be
smaller."""
_MOST: Final = 4
"""Most assemblies of one upload."""
_PREFIX: Final = b"\0data"
_PLACE: Final = b"trusted.s3.part"


class PartBytes(NamedTuple):
    """The place of a part's bytes."""

    data: int
    """The inode number of the data file."""
    offset: int


def find(t: Transaction, directory: int) -> dict[int, int]:
    """Returns the assemblies of the upload in this directory: stride -> inode number."""
    prefix = keys.file_entry(directory, _PREFIX)
    return {
        int(key[len(prefix) :], 16): keys.unpack_u64(value)
        for key, value in t.scan(prefix, keys.after(prefix))
    }


def choose(strides: Sequence[int], size: int) -> int | None:
    """Returns the stride of the assembly for a part of so many bytes, existing or not; None: it
    gets a file of its own. The last part may come first: then the others get another assembly."""
    fitting = min((stride for stride in strides if stride >= size), default=None)
    if fitting is not None or size < MIN_STRIDE or len(strides) >= _MOST:
        return fitting
    return size


def make(
    t: Transaction, bucket: Bucket, directory: int, stride: int, ino: int, moment: Moment
) -> bool:
    """Makes the record of a missing assembly, of a reserved number that has a data file. False: a
    node that started took the number for a dead process's."""
    if not t.delete(keys.reserved(ino)):
        return False
    top = read_inode(t, bucket.root)
    inode = Inode(
        mode=mutations.FILE_MODE,
        uid=top.uid,
        gid=top.gid,
        nlink=1,
        flags=Flag.PUBLISHED | Flag.ASSEMBLY,
        atime_ns=moment.now,
        mtime_ns=moment.now,
        ctime_ns=moment.now,
        btime_ns=moment.now,
        parent=directory,
        name=_name(stride),
        boot=moment.boot,
    )
    t.put(keys.file_entry(directory, inode.name), keys.pack_u64(ino))
    t.put(keys.unsealed(ino), t.node)
    placements.hold(t, ino, inode.version)
    write_inode(t, ino, inode)
    add_usage(t, bucket.id, 0, 1)
    touch(t, directory, read_inode(t, directory), moment.now)
    return True


def reserve(t: Transaction, ino: int, blocks: int) -> None:
    """Accounts for so many blocks more, or less."""
    inode = read_inode(t, ino)
    set_blocks(t, ino, inode, max(0, inode.blocks + blocks))
    write_inode(t, ino, inode)


def add_part(
    t: Transaction,
    bucket: Bucket,
    directory: int,
    name: bytes,
    place: PartBytes,
    size: int,
    moment: Moment,
    *,
    synced: bool,
) -> tuple[int, Inode]:
    """Records a part that stands in an assembly, under a name that is free."""
    ino = mutations.add_note(t, bucket, directory, name, moment)
    note, data = read_inode(t, ino), read_inode(t, place.data)
    note.size, note.boot = size, 0 if synced else moment.boot
    write_inode(t, ino, note)
    t.put(keys.xattr(ino, _PLACE), b"%d %d" % place)
    if synced and data.boot:
        data.boot = 0
        write_inode(t, place.data, data)
    touch(t, directory, read_inode(t, directory), moment.now)
    return ino, note


def take_place(raw: dict[bytes, bytes]) -> PartBytes | None:
    """Takes a part's place out of its attributes; None for one with a file of its own."""
    packed = raw.pop(_PLACE, None)
    if packed is None:
        return None
    data, _, offset = packed.partition(b" ")
    return PartBytes(int(data), int(offset))


def place_of(t: Transaction, ino: int) -> PartBytes | None:
    """Returns the place of a part's file, like `take_place`."""
    packed = t.get(keys.xattr(ino, _PLACE))
    return None if packed is None else take_place({_PLACE: packed})


def is_place(inode: Inode) -> bool:
    """Returns whether a file of an upload's directory tells the place of a part, and has no
    data."""
    return lookup.is_marker(inode)


def release(t: Transaction, directory: int, ino: int) -> None:
    """Takes a data file out of its upload: it is an orphan, which a put may give a name."""
    inode = read_inode(t, ino)
    object_attributes.remove_all(t, ino)
    t.delete(keys.file_entry(directory, inode.name))
    inode.flags, inode.checksum = Flag.PUBLISHED, b""
    inode.nlink = inode.parent = 0
    t.put(keys.orphan(ino), b"")
    write_inode(t, ino, inode)


def blocks_of(size: int) -> int:
    """Returns the blocks that a part may take."""
    return -(-size // BLOCK) + 4096 // BLOCK  # it may begin and end within a page


def _name(stride: int) -> bytes:
    return b"%b%016x" % (_PREFIX, stride)
