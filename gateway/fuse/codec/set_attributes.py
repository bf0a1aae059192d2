"""The changes that a SETATTR request asks for, and a record completed by its data file. Pure."""

import os
import stat
from typing import Final, NamedTuple

from gateway.fuse.codec.protocol import Fattr
from kvfs.meta.records import Inode
from kvfs.tree import inodes


class Attributes(NamedTuple):
    """The fields that a SETATTR request may carry; `valid` says which of them count."""

    mode: int
    uid: int
    gid: int
    size: int
    atime_ns: int
    mtime_ns: int


NO_ATTRIBUTES: Final = Attributes(0, 0, 0, 0, 0, 0)


def changes_of(valid: int, wanted: Attributes, now: int) -> inodes.AttributeChanges:
    """Returns the changes to the record, with NOW replaced by `now`. The size is not among them."""
    changes = inodes.AttributeChanges()
    if valid & Fattr.MODE:
        changes.mode = stat.S_IMODE(wanted.mode)
    if valid & Fattr.UID:
        changes.uid = wanted.uid
    if valid & Fattr.GID:
        changes.gid = wanted.gid
    if valid & Fattr.ATIME:
        changes.atime_ns = now if valid & Fattr.ATIME_NOW else wanted.atime_ns
    if valid & Fattr.MTIME:
        changes.mtime_ns = now if valid & Fattr.MTIME_NOW else wanted.mtime_ns
    return changes


def completed(inode: Inode, st: os.stat_result) -> Inode:
    """Completes the record of a file that is not sealed with the state of its data file. Changes
    `inode`."""
    if (inode.size, inode.mtime_ns) != (st.st_size, st.st_mtime_ns):  # else the sealer changed it
        inode.ctime_ns = max(inode.ctime_ns, st.st_ctime_ns)
    inode.size = st.st_size
    inode.blocks = st.st_blocks
    inode.atime_ns = st.st_atime_ns
    inode.mtime_ns = st.st_mtime_ns
    return inode
