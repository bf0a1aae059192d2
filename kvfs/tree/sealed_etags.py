"""ETags that files get at their seal, in namespaces whose `etag` is `md5-all`.

The transaction that seals gives the MD5. A process that must tell an ETag before that has it kept,
and then the seal leaves it as it is: a version has one ETag for its life.
"""

from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import Inode, namespace_of, unpack_namespace
from kvfs.tree.etags import ETAG, etag_of, is_awaited, is_content_as_given, packed
from kvfs.tree.inodes import read_inodes
from kvfs.tree.namespace_policies import MD5_ALL


def wanting_md5(t: Transaction, inos: list[int]) -> set[int]:
    """Returns the files to which a seal gives the MD5 of their content."""
    spaces = {space for space in set(map(namespace_of, inos)) if _gives_md5(t, space)}
    wanted = [ino for ino in inos if namespace_of(ino) in spaces] if spaces else []
    return {
        ino
        for ino, inode in zip(wanted, read_inodes(t, wanted), strict=True)
        if inode is not None and _lacks_etag(t, ino, inode)
    }


def give(t: Transaction, ino: int, md5: str) -> None:
    """Keeps the MD5 of the present content, unless an ETag was told before."""
    (inode,) = read_inodes(t, [ino])
    if inode is None or not _gives_md5(t, namespace_of(ino)):
        return
    if _lacks_etag(t, ino, inode):
        t.put(keys.xattr(ino, ETAG), packed(md5, inode))


def keep(t: Transaction, ino: int, told: str) -> bool:
    """Keeps the ETag that is told of a file before it is sealed. False: it has another by now."""
    (inode,) = read_inodes(t, [ino])
    if inode is None:
        return False
    kept = t.get(keys.xattr(ino, ETAG))
    if etag_of(kept, ino, inode) != told:
        return False
    if is_awaited(kept, inode):
        t.put(keys.xattr(ino, ETAG), packed(told, inode))
    return True


def _gives_md5(t: Transaction, namespace_id: int) -> bool:
    value = t.get(keys.namespace(namespace_id))
    return value is not None and unpack_namespace(value).etag == MD5_ALL


def _lacks_etag(t: Transaction, ino: int, inode: Inode) -> bool:
    kept = t.get(keys.xattr(ino, ETAG))
    return kept is None or not is_content_as_given(kept, inode)
