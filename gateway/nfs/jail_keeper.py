"""The part of the jail's process that stays while daemons change: it keeps what the next one needs.

| word of a caller | answer | what follows |
|---|---|---|
| `keep KEY`, data and descriptors | `done` | they are kept, in place of what the key had |
| `drop KEY` | `done` | they are closed |
| `begin` | `done` | Ganesha begins |
| `take` | `given`, JSON; each `item KEY`, data and descriptors; `end` | it is the daemon now |
| the same while there is a daemon | `busy` | |
| `end` | `done` | Ganesha is asked to end; without a daemon, whom it would wait for, it is killed |
| `kill` | `done` | Ganesha is killed |

Each is a message; words, KEY and data are parted by NUL. A caller is root or of the daemon's user,
which the kernel tells. When the daemon has died, WAIT_S pass before `has_waited` says so. It
imports nothing of KVFS.
"""

import array
import json
import os
import select
import socket
import struct
import time

LONGEST = 64 << 10
FDS_MOST = 8
_CREDENTIALS = struct.Struct("3i")
_ANSWER_S = 2.0
_LOOK_MS = 1000


class JailKeeper:
    """The kept things, and whose they are."""

    def __init__(self, daemon: int, listener: socket.socket, wait_s: float, about: str) -> None:
        """`about`: JSON for the next daemon; Ganesha's `pid` and that of the `jail` are added."""
        self.listener = listener
        self.pidfd = os.pidfd_open(daemon)
        self.is_ending = False
        """Whether Ganesha is to end."""
        self.in_order = False
        """Whether it is asked to."""
        self._pid = daemon
        self._wait_s = wait_s
        self._about = json.loads(about)
        self._items: dict[str, tuple[bytes, list[int]]] = {}
        self._deadline = 0.0
        self._has_begun = False

    def until_begun(self) -> bool:
        """Returns when the daemon has said `begin`; False: it has died, or wants an end."""
        poll = select.poll()
        poll.register(self.listener, select.POLLIN)
        poll.register(self.pidfd, select.POLLIN)
        while not self._has_begun:
            poll.poll(_LOOK_MS)
            if not self.has_daemon or self.is_ending:
                return False
            if self.listener.fileno() in dict(poll.poll(0)):
                self.serve()
        return True

    def began(self, ganesha: int) -> None:
        """Notes the number of Ganesha's process."""
        self._about |= {"pid": ganesha, "jail": os.getpid()}

    @property
    def has_daemon(self) -> bool:
        """Returns whether the daemon lives."""
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return not poll.poll(0) and not has_ended(self._pid)

    def watched(self) -> list[int]:
        """Returns the descriptors that tell of the daemon's end, while it lives."""
        return [self.pidfd] if self.has_daemon else []

    def has_waited(self) -> bool:
        """Returns whether there has been no daemon for too long."""
        if self.has_daemon:
            self._deadline = 0.0
            return False
        self._deadline = self._deadline or time.monotonic() + self._wait_s
        return time.monotonic() >= self._deadline

    def end_views(self) -> None:
        """Ends the connections of all views, whose daemon is no more."""
        for key, (_, fds) in self._items.items():
            if key.startswith("view/") and len(fds) > 1:
                try:
                    os.write(fds[1], b"1")
                except OSError:
                    pass

    def serve(self) -> None:
        """Answers a caller."""
        caller, _ = self.listener.accept()
        with caller:
            caller.settimeout(_ANSWER_S)
            try:
                pid, uid, _ = _CREDENTIALS.unpack(
                    caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
                )
                if uid not in (0, os.geteuid()):
                    return
                message, fds, _, _ = socket.recv_fds(caller, LONGEST, FDS_MOST)
                word, _, rest = message.partition(b"\0")
                if word == b"take":
                    self._give(caller, pid)
                    return
                if word == b"keep":
                    key, _, data = rest.partition(b"\0")
                    self._keep(key.decode(), data, fds)
                elif word == b"drop":
                    self._drop(rest.decode())
                elif word == b"begin":
                    self._has_begun = True
                elif word in (b"end", b"kill"):
                    self.is_ending, self.in_order = True, word == b"end" and self.has_daemon
                caller.send(b"done")
            except OSError:
                pass

    def _keep(self, key: str, data: bytes, fds: list[int]) -> None:
        self._drop(key)
        self._items[key] = data, fds

    def _drop(self, key: str) -> None:
        _, fds = self._items.pop(key, (b"", []))
        for each in fds:
            os.close(each)

    def _give(self, caller: socket.socket, pid: int) -> None:
        if self.is_ending or self.has_daemon:
            caller.send(b"busy")
            return
        pidfd = os.pidfd_open(pid)
        try:
            caller.send(b"given\0" + json.dumps(self._about).encode())
            for key, (data, fds) in self._items.items():
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
                caller.sendmsg([b"item\0", key.encode(), b"\0", data], rights if fds else [])
            caller.send(b"end\0\0")
        except OSError:
            os.close(pidfd)
            raise
        os.close(self.pidfd)
        self._pid, self.pidfd, self._deadline = pid, pidfd, 0.0


def has_ended(pid: int) -> bool:
    """Returns whether its first thread has ended."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] in "ZX"
    except (OSError, IndexError):
        return True
