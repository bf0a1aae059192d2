"""New files that only the node which made them knows of, when others are to know them.

Others may have used the name meanwhile, or removed its directory: they could not see it.
"""

from kvfs.meta import keys
from kvfs.meta.interface import Transaction
from kvfs.meta.records import unpack_inode
from kvfs.namespace.entries import find_entry, lose_link
from kvfs.namespace.inodes import is_directory, read_inode, write_inode


def settle(t: Transaction, ino: int, now: int) -> None:
    """Before an inode is known to others: the file has its name, in place of a file of another host
    that took it meanwhile, as the one that was closed last. Where its directory is gone, or the
    name is a directory's now, it is as if removed."""
    value = t.get(keys.inode(ino))
    inode = None if value is None else unpack_inode(value)
    if inode is None or not inode.nlink or is_directory(inode):
        return
    key = keys.file_entry(inode.parent, inode.name)
    parent = t.get(keys.inode(inode.parent))
    leads_to = t.get(key)
    if parent is not None and unpack_inode(parent).nlink:
        if leads_to == keys.pack_u64(ino):
            return
        entry = find_entry(t, inode.parent, inode.name)
        if entry is None or not entry.directory:
            if entry is not None:
                other = read_inode(t, entry.ino)
                lose_link(t, entry.ino, other, (inode.parent, inode.name), now, lambda _: True)
            t.put(key, keys.pack_u64(ino))
            return
    elif leads_to == keys.pack_u64(ino):
        t.delete(key)
    inode.nlink, inode.parent, inode.ctime_ns = 0, 0, now
    t.put(keys.orphan(ino), b"")
    write_inode(t, ino, inode)
