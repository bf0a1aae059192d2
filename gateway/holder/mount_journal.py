"""The journal of a mount that outlives its daemon: what the kernel knows and only the daemon knew.

A memory file (memfd) that the holder keeps. The daemon changes it in place, so that a SIGKILL
leaves it as the kernel has it; a power cut takes it with the mount. An entry counts once its last
word is written.

| entry | written | removed |
|---|---|---|
| an open file, under its handle's number | before the reply to OPEN or CREATE | by RELEASE |
| that an open file was cut to nothing | before it is | before it is published |
| a backing file, under its id | when it is registered | when it is withdrawn |
| an open directory, and the page that was asked for last | before each reply | by RELEASEDIR |
| the inode that a request makes, names or removes | before its commit | once it is answered |
| the place of that commit in what a server is sent | before that is sent | likewise |
| the place of a relayed append | before it is written | likewise |
| a lock that the mount keeps in place of the kernel (`lock_table`) | before the reply | likewise |

By these notes the next daemon tells whether a request that comes again (FUSE_NOTIFY_RESEND) was
done. Those of a request that was done wait with it through several deaths; where its caller was
killed it never comes again, and they go with the 32nd daemon after.

Numbers of handles are never used twice, so a RELEASE that comes again finds its own handle or none.
"""

import contextlib
import enum
import mmap
import os
import struct
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from gateway.holder.journal_slots import JournalSlots
from gateway.holder.lock_table import LOCK, LockTable
from kvfs.base.errors import Busy, NotSupported
from kvfs.meta.asked_requests import Sent, asking

VERSION: Final = 5
"""The version of the layout."""
VIEWED: Final = 1 << 62
"""Set in the numbers of requests, and of backing files, of the view of a namespace
(`gateway.fuse.views`), whose kernel counts for itself."""
_NAME: Final = "kvfs-mount"
_VERSION: Final = struct.Struct("<I")
_REQUEST_BITS: Final = 46
"""A kernel that sends a million requests a second counts a year with these."""
_HEADER: Final = struct.Struct("<IIIIIIII")
"""Version; generation; length of the description; how many entries of each table were ever used:
files, backings, directories, notes, locks."""
_WORDS: Final = (1, 3, 4, 5, 6, 7)
_ABOUT_AT: Final = 64
_ABOUT_MOST: Final = 3072
_FORMERS: Final = 32
_TABLES_AT: Final = 4096
_FILE: Final = struct.Struct("<QQQIIQQ")
"""Number of the kernel's inode, of the request that opened it, version, flags of the open, whether
it was cut, owner (all ones: none), handle."""
_VERSION_AT: Final = 16
_CUT_AT: Final = 28
_BACKING: Final = struct.Struct("<QQ")
"""Number of the kernel's inode, id."""
_DIRECTORY: Final = struct.Struct("<QQQQHxxxxxx")
"""Inode, request, number of the page's first name, sum of its names, length of the key before it;
the key follows, the handle stands in the last word."""
_DIRECTORY_BYTES: Final = 512
_KEY_MOST: Final = _DIRECTORY_BYTES - _DIRECTORY.size - 8
_NOTE: Final = struct.Struct("<QQQIHHIxxxxQ")
"""Inode (of an append: its place); the name of the process at the server, number and shard of what
was sent, place in it; the state of the note; generation; number of the request."""
_CUT: Final = struct.Struct("<I")
_STATE: Final = struct.Struct("<H")
_STATE_AT: Final = 30
_MOST: Final = (1 << 20, 1 << 20, 1 << 14, 1 << 16, 1 << 16)
_SIZES: Final = (_FILE.size, _BACKING.size, _DIRECTORY_BYTES, _NOTE.size, LOCK.size)
_HANDLE: Final = struct.Struct("<Q")
_GENERATION_SHIFT: Final = 40
"""A daemon gives out fewer handles than that, however long it runs."""
NOBODY: Final = (1 << 64) - 1
_ENDS: Final = (
    *accumulate((m * n for m, n in zip(_MOST, _SIZES, strict=True)), initial=_TABLES_AT),
)
_AT: Final = _ENDS[:-1]
_SIZE: Final = _ENDS[-1]
SIZES_OF: Final = {4: _ENDS[4], VERSION: _SIZE}
"""The layouts that are understood, and their sizes. Version 4 had no locks: it grows."""
_OF_HOLDER: Final = 3848
"""From here to the tables the holder keeps its own."""
assert _HEADER.size <= _ABOUT_AT
assert _ABOUT_AT + _ABOUT_MOST <= _OF_HOLDER < _TABLES_AT
AGAIN: Final = 1 << 63
"""The bit by which the kernel marks the numbers of requests that it sent before."""


def can_go_on(pid: int) -> bool:
    """Returns whether this program can go on with the mount of the daemon of this process number:
    False if its journal has a layout that is not understood. What cannot be seen is taken for this
    one."""
    with contextlib.suppress(OSError):
        for each in Path(f"/proc/{pid}/fd").iterdir():
            if os.readlink(each).startswith(f"/memfd:{_NAME}"):
                with each.open("rb") as journal:
                    return _VERSION.unpack(journal.read(_VERSION.size))[0] in SIZES_OF
    return True


def mark_of(namespace: int) -> int:
    """Returns the bits that tell requests of a namespace's view from those of other kernels."""
    return VIEWED | namespace << _REQUEST_BITS


def is_of(request: int, namespace: int) -> bool:
    """Returns whether a request is of this namespace's view."""
    return (request & ~AGAIN) >> _REQUEST_BITS == mark_of(namespace) >> _REQUEST_BITS


def unmarked(request: int) -> int:
    """Returns the number by which a view's kernel knows its request."""
    return request & (AGAIN | (1 << _REQUEST_BITS) - 1)


class State(enum.IntEnum):
    """The known fate of the change of a request that was noted."""

    NOTED = 0
    """It was about to be made here."""
    SENT = 1
    """It was about to be sent to a server."""
    DONE = 2
    """The server did it."""
    PLACED = 3
    """It is an append, of which the place is known."""


class JournaledNote(NamedTuple):
    """The subject of a request that was not answered."""

    ino: int
    """The inode; of an append the place in the file."""
    sent: Sent
    state: State


class JournaledFile(NamedTuple):
    """An open file as the kernel has it."""

    number: int
    """That of the kernel's inode."""
    request: int
    version: int
    flags: int
    is_cut: bool
    """Whether it was cut to nothing since it was opened for writing, or published last."""
    owner: int
    fh: int


class JournaledDirectory(NamedTuple):
    """An open directory as the kernel has it, and the page of its listing asked for last."""

    ino: int
    request: int
    first: int
    sum: int
    after: bytes
    fh: int


class MountJournal:
    """The journal by one process. Used from the event loop."""

    def __init__(self, fd: int) -> None:
        """Opens what `made` or an earlier daemon left at `fd`, which it takes. Raises NotSupported
        for a layout that is not understood, OSError."""
        self.fd = fd
        (version,) = _VERSION.unpack(os.pread(fd, _VERSION.size, 0).ljust(_VERSION.size, b"\0"))
        if SIZES_OF.get(version) != os.fstat(fd).st_size:
            raise NotSupported("the mount was kept by another version")
        if version != VERSION:
            os.ftruncate(fd, _SIZE)
            os.pwrite(fd, _VERSION.pack(VERSION), 0)
        self._map = mmap.mmap(fd, _SIZE)
        self._words = memoryview(self._map)[: _ABOUT_AT // 4 * 4].cast("I")
        self._files, self._backings, self._directories, self._notes, locks = (
            JournalSlots(self._words, word, most)
            for word, most in zip(_WORDS[1:], _MOST, strict=True)
        )
        self.locks: Final = LockTable(self._map, _AT[4], locks)
        self._noted: dict[int, int] = {}
        """The entry of each request's note."""
        self.has_noted = False

    @classmethod
    def made(cls) -> "MountJournal":
        """Makes an empty one. Raises OSError."""
        fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        os.ftruncate(fd, _SIZE)
        os.pwrite(fd, _HEADER.pack(VERSION, 0, 0, 0, 0, 0, 0, 0), 0)
        return cls(fd)

    def close(self) -> None:
        """Gives it up; what is in it stays with the holder."""
        self._words.release()
        self._map.close()
        os.close(self.fd)

    # ---- the mount itself

    def describe(self, about: msgspec.Struct) -> None:
        """Keeps what the kernel agreed on with the daemon."""
        packed = msgspec.msgpack.encode(about)
        if len(packed) > _ABOUT_MOST:
            raise NotSupported("the description of the mount is too long to be kept")
        self._map[_ABOUT_AT : _ABOUT_AT + len(packed)] = packed
        self._words[2] = len(packed)

    def about(self) -> bytes:
        """Returns that description, packed; empty: the mount never came to be."""
        return self._map[_ABOUT_AT : _ABOUT_AT + self._words[2]]

    @property
    def generation(self) -> int:
        """The number of daemons before this one; the holder counts them."""
        return int(self._words[1])

    def first_handle(self) -> int:
        """Begins the numbers of handles of a daemon: all that it gives out come after this one."""
        return (self.generation << _GENERATION_SHIFT) + 1

    # ---- open files

    def opened(self, file: JournaledFile) -> int:
        """Enters a file; returns its entry's number, -1 if there is no room."""
        number = self._files.take()
        if number >= 0:
            _FILE.pack_into(self._map, _AT[0] + number * _FILE.size, *file)
        return number

    def released(self, number: int) -> None:
        """Removes a file."""
        _HANDLE.pack_into(self._map, _AT[0] + (number + 1) * _FILE.size - _HANDLE.size, 0)
        self._files.give(number)

    def registered(self, number: int, backing_id: int) -> int:
        """Enters a backing file; returns its entry's number, -1 if there is no room."""
        entry = self._backings.take()
        if entry >= 0:
            _BACKING.pack_into(self._map, _AT[1] + entry * _BACKING.size, number, backing_id)
        return entry

    def withdrawn(self, number: int) -> None:
        """Removes a backing file."""
        _HANDLE.pack_into(self._map, _AT[1] + (number + 1) * _BACKING.size - _HANDLE.size, 0)
        self._backings.give(number)

    # ---- open directories

    def listed(self, number: int, directory: JournaledDirectory) -> int:
        """Enters a directory (`number` -1), or what is asked of it now; returns its entry's number,
        -1 if there is no room."""
        if number < 0:
            number = self._directories.take()
        if number < 0 or len(directory.after) > _KEY_MOST:
            return number
        start = _AT[2] + number * _DIRECTORY_BYTES
        last = start + _DIRECTORY_BYTES - _HANDLE.size
        _HANDLE.pack_into(self._map, last, 0)
        ino, request, first, total, after, fh = directory
        _DIRECTORY.pack_into(self._map, start, ino, request, first, total, len(after))
        key = start + _DIRECTORY.size
        self._map[key : key + len(after)] = after
        _HANDLE.pack_into(self._map, last, fh)
        return number

    def unlisted(self, number: int) -> None:
        """Removes a directory."""
        last = _AT[2] + (number + 1) * _DIRECTORY_BYTES - _HANDLE.size
        _HANDLE.pack_into(self._map, last, 0)
        self._directories.give(number)

    def renamed(self, number: int, version: int) -> None:
        """Notes that the data file of an open file has another version from now on."""
        _HANDLE.pack_into(self._map, _AT[0] + number * _FILE.size + _VERSION_AT, version)

    def cut(self, number: int, is_cut: bool) -> None:
        """Notes whether an open file was cut to nothing since it was published last."""
        _CUT.pack_into(self._map, _AT[0] + number * _FILE.size + _CUT_AT, is_cut)

    # ---- requests

    def note(self, ino: int) -> None:
        """Notes, before the commit of the request that is served, the inode it is about. Raises
        Busy if there is no room."""
        self.has_noted = True
        self._note(asking.get() & ~AGAIN, ino, State.NOTED)

    def note_append(self, request: int, place: int) -> None:
        """Notes where a relayed append is about to be written. Raises Busy."""
        self._note(request & ~AGAIN, place, State.PLACED)

    def _note(self, request: int, ino: int, state: State) -> None:
        number = self._noted.get(request, -1)
        if number < 0:
            number = self._notes.take()
            if number < 0:
                raise Busy("too many requests of the mount are under way")
            self._noted[request] = number
        at = _AT[3] + number * _NOTE.size
        _NOTE.pack_into(self._map, at, ino, 0, 0, 0, 0, state, self.generation, request)

    def sent(self, request: int, sent: Sent) -> None:
        """Notes that the change that a request was noted for is about to be sent."""
        number = self._noted.get(request & ~AGAIN, -1)
        if number >= 0:
            at = _AT[3] + number * _NOTE.size
            ino, *_, generation, request = _NOTE.unpack_from(self._map, at)
            shard, engine, requests, index = sent
            named = int(engine, 16), requests, shard, index
            _NOTE.pack_into(self._map, at, ino, *named, State.NOTED, generation, request)
            _STATE.pack_into(self._map, at + _STATE_AT, State.SENT)

    def done(self, request: int) -> None:
        """Notes that it was done."""
        number = self._noted.get(request & ~AGAIN, -1)
        if number >= 0:
            _STATE.pack_into(self._map, _AT[3] + number * _NOTE.size + _STATE_AT, State.DONE)

    def answered(self, request: int) -> None:
        """Removes the note of a request, if there is one: the kernel has its answer."""
        number = self._noted.pop(request & ~AGAIN, -1)
        if number >= 0:
            self._forget(number)

    def _forget(self, number: int) -> None:
        _HANDLE.pack_into(self._map, _AT[3] + (number + 1) * _NOTE.size - _HANDLE.size, 0)
        self._notes.give(number)

    # ---- for the next daemon

    def take_over(self) -> None:
        """Begins with the notes and locks that daemons before left: to be called once, before
        anything is entered."""
        self.locks.take_over()
        for number, found in enumerate(_NOTE.iter_unpack(self._used(3))):
            *_, generation, request = found
            if request and generation + _FORMERS > self.generation:
                self._noted[request] = number
            else:
                self._forget(number)

    def notes(self) -> dict[int, JournaledNote]:
        """Returns what requests of daemons before were about, by request."""
        found = {}
        for request, number in self._noted.items():
            at = _AT[3] + number * _NOTE.size
            ino, name, requests, shard, index, state, _, _ = _NOTE.unpack_from(self._map, at)
            sent = Sent(shard, b"%016x" % name, requests, index)
            found[request] = JournaledNote(ino, sent, State(state))
        return found

    def files(self) -> Iterator[tuple[int, JournaledFile]]:
        """Yields each open file with its entry's number; entries without one become free."""
        for number, found in enumerate(_FILE.iter_unpack(self._used(0))):
            file = JournaledFile(*found)
            if file.fh:
                yield number, file
            else:
                self._files.give(number)

    def backings(self) -> Iterator[tuple[int, int, int]]:
        """Yields (entry's number, the kernel's inode, id) of each backing file."""
        for number, (ino, backing_id) in enumerate(_BACKING.iter_unpack(self._used(1))):
            if backing_id:
                yield number, ino, backing_id
            else:
                self._backings.give(number)

    def directories(self) -> Iterator[tuple[int, JournaledDirectory]]:
        """Yields each open directory with its entry's number."""
        packed = self._used(2)
        for number, start in enumerate(range(0, len(packed), _DIRECTORY_BYTES)):
            (fh,) = _HANDLE.unpack_from(packed, start + _DIRECTORY_BYTES - _HANDLE.size)
            if not fh:
                self._directories.give(number)
                continue
            ino, request, first, total, length = _DIRECTORY.unpack_from(packed, start)
            key = start + _DIRECTORY.size
            after = packed[key : key + length]
            yield number, JournaledDirectory(ino, request, first, total, after, fh)

    def _used(self, table: int) -> bytes:
        used: int = self._words[_WORDS[table + 1]]
        return self._map[_AT[table] : _AT[table] + used * _SIZES[table]]
