"""Descriptors of this process: how many it may have, how many are kept for the node itself, and how
the mount's users share the rest; and their closing.

Each open file of the mount is a descriptor of the daemon, so any user could take all of them; then
neither journal nor control socket could be opened. A part is therefore kept for the node, and of
the rest each user may hold as many as are left for the others (a dynamic threshold: one user alone
gets half, two get a third each). So the next user always finds some.
"""

import contextlib
import os
import resource
from collections.abc import Iterator
from typing import Final

from kvfs.base.errors import TooManyOpenFiles

_MOST: Final = 1 << 20
"""Linux's own upper bound (fs.nr_open), unless an administrator raised it."""
_KEPT_LEAST: Final = 320
"""The control socket's connections and a margin."""
_KEPT_MOST: Final = 4096
_IDLE_MOST: Final = 512
_CAP_SYS_RESOURCE: Final = 24


@contextlib.contextmanager
def closing(fd: int) -> Iterator[int]:
    """Closes the descriptor when the block ends. Hot paths call `os.close` themselves."""
    try:
        yield fd
    finally:
        os.close(fd)


def allow_most() -> int:
    """Raises this process's limit as far as the system allows, and returns it."""
    hard = hard_limit()
    for most in (max(hard, most_of_system()), hard):
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        except (OSError, ValueError):  # raising it needs CAP_SYS_RESOURCE
            continue
        break
    return limit()


def hard_limit() -> int:
    """Returns how many this process may allow itself without privilege."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[1]


def most_of_system() -> int:
    """Returns how many the kernel lets any process have; no more than a node can use."""
    try:
        with open("/proc/sys/fs/nr_open", encoding="ascii") as file:
            return min(_MOST, int(file.read()))
    except (OSError, ValueError):
        return 0


def may_raise() -> bool:
    """Returns whether this process may exceed its hard limit."""
    with open("/proc/self/status", "rb") as status:
        (mask,) = (line.split()[1] for line in status if line.startswith(b"CapEff:"))
    return bool(int(mask, 16) >> _CAP_SYS_RESOURCE & 1)


def limit() -> int:
    """Returns how many descriptors this process may have."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def kept_of(limit: int) -> int:
    """Returns how many of `limit` descriptors are the node's own: journal, control, S3, peers."""
    return min(_KEPT_MOST, max(limit // 4, min(_KEPT_LEAST, limit // 2)))


class OpenFileShares:
    """The shares of users in the open files of the mount. Used from the event loop."""

    def __init__(self, limit: int, *, is_shared: bool) -> None:
        """`limit`: descriptors of this process. `is_shared`: whether there may be several users."""
        self.limit = limit
        self.idle_most = min(_IDLE_MOST, limit // 8)
        """Files kept open without a user."""
        self.most = limit - kept_of(limit) - self.idle_most
        """Files that users may hold together."""
        self.held = 0
        self._of_user: dict[int, int] = {}
        self._is_shared = is_shared
        self.counters = {"refused_open_files": 0}

    def take(self, uid: int) -> None:
        """Counts one more open file of a user. Raises TooManyOpenFiles."""
        own, left = self._of_user.get(uid, 0), self.most - self.held
        if left <= 0 or (self._is_shared and own >= left):
            self.counters["refused_open_files"] += 1
            raise TooManyOpenFiles(
                f"user {uid} holds {own} open files of the mount, and {left} are left for others:"
                " raise the node's limit of descriptors (ulimit -n)"
            )
        self._of_user[uid] = own + 1
        self.held += 1

    def give(self, uid: int) -> None:
        """Counts one less."""
        left = self._of_user.pop(uid) - 1
        if left:
            self._of_user[uid] = left
        self.held -= 1

    def describe(self) -> dict[str, int]:
        """Returns the counts that status shows."""
        return {"limit": self.limit, "files": self.held, "most_files": self.most}
