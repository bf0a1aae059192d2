"""Directories of several hosts that have one name, and who passes them."""

import stat

import pytest

from kvfs.meta.records import Inode
from kvfs.tree.copies.peer_directories import lets_no_more_pass


def directory(mode: int, uid: int = 1, gid: int = 1) -> Inode:
    return Inode(
        mode=stat.S_IFDIR | mode,
        uid=uid,
        gid=gid,
        nlink=2,
        atime_ns=1,
        mtime_ns=1,
        ctime_ns=1,
        parent=1,
        name=b"d",
    )


@pytest.mark.parametrize(
    ("here", "there", "is_so"),
    [
        (directory(0o755), directory(0o755), True),
        (directory(0o700), directory(0o755), True),
        (directory(0o755), directory(0o700), False),
        (directory(0o750), directory(0o700), False),
        (directory(0o775), directory(0o755), True),  # who writes there is no matter
        (directory(0o755, uid=2), directory(0o755), True),  # it is anybody's
        (directory(0o700, uid=2), directory(0o700), False),  # its owner could look
        (directory(0o700, uid=2), directory(0o711), False),  # and list
        (directory(0o700, uid=0), directory(0o700), True),
        (directory(0o750, gid=2), directory(0o750), False),
        (directory(0o750, gid=2), directory(0o755), True),
    ],
)
def test_a_directory_here_lets_nobody_pass_whom_the_holders_keeps_out(
    here: Inode, there: Inode, is_so: bool
) -> None:
    assert lets_no_more_pass(here, there) is is_so
