"""Messages to /dev/fuse that nobody asked for, by which a mount's kernel forgets.

| message | forgotten | waits for |
|---|---|---|
| `entry` | one name, its absence too | the lock of its directory |
| `removed` | the same, and that its inode exists: its watchers are told | its lock too |
| `inode` | attributes | nothing |
| `inode` with `pages` | a directory's listing too | a copy of that listing to a program |
| `EVERY_NAME` (Linux 6.16) | all names, absences too, at the next look at each | nothing |

A program that changes a directory holds its lock until the mount's server has answered. So names
are forgotten one by one while that works, and all at once if it does not. Source of layouts and
numbers: Linux include/uapi/linux/fuse.h, protocol 7.45. Pure.
"""

import struct
from collections.abc import Sequence
from typing import Final

from kvfs.tree.changes import Change

HEADER: Final = struct.Struct("=IiQ")
"""The header of every message to the kernel: len, error (here: the code), unique (here: 0)."""
_INODE: Final = struct.Struct("=Qqq")
"""inode, offset (negative: attributes alone), length (0: to the end)."""
_ENTRY: Final = struct.Struct("=QII")
_REMOVED: Final = struct.Struct("=QQII")
"""directory, inode, length of the name, padding; the name follows."""
_INVAL_INODE: Final = 2
_INVAL_ENTRY: Final = 3
_DELETE: Final = 6
_RESEND: Final = 7
_INC_EPOCH: Final = 8


def _message(code: int, body: bytes) -> bytes:
    return HEADER.pack(HEADER.size + len(body), code, 0) + body


EVERY_NAME: Final = _message(_INC_EPOCH, b"")
RESEND: Final = _message(_RESEND, b"")
"""Has the kernel send again all requests that are not answered (Linux 6.9), their numbers marked by
the highest bit."""


def entry(parent: int, name: bytes) -> bytes:
    """Returns the message by which the kernel forgets what it knows of `name` in the directory."""
    return _message(_INVAL_ENTRY, _ENTRY.pack(parent, len(name), 0) + name + b"\0")


def removed(parent: int, name: bytes, ino: int) -> bytes:
    """Like `entry`, for a name that was an inode's last: inotify's watches of it end, with
    IN_DELETE_SELF and IN_IGNORED."""
    return _message(_DELETE, _REMOVED.pack(parent, ino, len(name), 0) + name + b"\0")


def inode(ino: int, *, pages: bool) -> bytes:
    """Returns the message by which the kernel forgets an inode's attributes and, with `pages`, its
    content: of a directory, the listing."""
    return _message(_INVAL_INODE, _INODE.pack(ino, 0 if pages else -1, 0))


def is_of_entry(message: bytes) -> bool:
    """Returns whether `EVERY_NAME` covers this message."""
    kinds = (_INVAL_ENTRY, _DELETE)
    return len(message) > HEADER.size and HEADER.unpack_from(message)[1] in kinds


def at_once(changes: Sequence[Change]) -> list[bytes]:
    """Returns the messages by which everything that contradicts these changes is forgotten, and
    every other name with it; listings last."""
    unlinked = {each.ino for each in changes if each.ino}
    return [
        EVERY_NAME,
        *(inode(ino, pages=False) for ino in sorted(unlinked)),
        *(inode(parent, pages=True) for parent in sorted({each.parent for each in changes})),
    ]
