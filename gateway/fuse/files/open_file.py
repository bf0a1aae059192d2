"""An open file of the mount, and one open of it. `handles` decides what they share."""

import os
import stat

import trio

from kvfs.base import detach
from kvfs.meta.records import Inode
from kvfs.policy.readahead import Readahead
from kvfs.transfer.transfer import Transfer
from kvfs.tree import inodes

_APPENDS = os.O_WRONLY | os.O_APPEND
_SET_IDS = stat.S_ISUID | stat.S_ISGID


class OpenFile:
    """The state that all handles of one inode share."""

    __slots__ = (
        "armed",
        "atime_ns",
        "backing_id",
        "base",
        "fd",
        "handles",
        "in_doubt",
        "incoming",
        "ino",
        "is_appended",
        "is_draft",
        "is_former",
        "is_mappable",
        "is_new",
        "is_remembered",
        "is_removed",
        "lapses",
        "names",
        "overwriters",
        "owner",
        "published",
        "publishing",
        "record",
        "refused",
        "replaces",
        "rewritten",
        "set_ids",
        "users",
        "version",
        "viewed",
        "writable",
        "writers",
    )

    def __init__(self, ino: int, version: int, fd: int, writable: bool, record: Inode) -> None:
        self.ino = ino
        self.version = version
        self.fd = fd
        self.writable = writable
        self.handles = 0
        self.writers = 0
        self.viewed = 0
        """How many of these handles belong to kernels of views rather than the mount's."""
        self.owner: int | None = None
        """The user among whose open files it counts; None: nobody's."""
        self.users = 0
        """How many requests are opening, publishing or closing it."""
        self.publishing: list[trio.Event] | None = None
        """Events of the tasks that wait for its publication, while it is being published."""
        self.published: tuple[int, int, int] | None = None
        """(size, mtime, ctime) of the data file when it was last published; None: this mount never
        published it."""
        self.base = version
        """The recorded version that writes made here build on."""
        self.names: set[int] = set()
        """The versions under which its data file got names that may be recorded nowhere."""
        self.lapses = 0
        """How often this node had lost its lease when writing began."""
        self.in_doubt = False
        """Whether the last publication failed: it may be recorded or not, and others may have gone
        on since."""
        self.is_appended = False
        """Whether a program appends to it that must not lose others' lines."""
        self.replaces = False
        """Whether it was truncated to nothing since writing began or since it was last published:
        it builds on no earlier content."""
        self.refused = ""
        """The reason why its writes are not published, and will not be."""
        self.overwriters = 0
        """How many handles can do more than append."""
        self.rewritten = False
        """Whether there were any overwriters since it was last published, or it was truncated."""
        self.backing_id = 0
        """The id of the kernel's registration; 0: none."""
        self.atime_ns = 0
        """The access time that the record has, or will have soon."""
        self.record = record
        """The record at the time when the file was opened."""
        mode = record.mode
        self.set_ids = bool(mode & _SET_IDS) and inodes.without_set_ids(mode) != mode
        """Whether a write clears mode bits, so that the daemon must see each write: no
        passthrough."""
        self.armed: tuple[int, int, int] | None = None
        """The state of the data file when set-id bits were set while the file was open for writing.
        Once the data file has changed, the bits go."""
        self.incoming: Transfer | None = None
        """The transfer of its data, which arrived or are arriving while it is open: it stays
        without passthrough until its last close."""
        self.is_new = False
        """Whether this mount made it and has not published it yet."""
        self.is_draft = False
        """Whether it was truncated to nothing before its data had arrived: they will not be
        fetched, and it has no name yet."""
        self.is_former = False
        """Whether other nodes have replaced its content: an open of the file gets another."""
        self.is_mappable = False
        """Whether a program may have it mapped for writing, even one that has closed it."""
        self.is_remembered = False
        """Whether the kernel may still have content or the size from before others replaced
        them."""
        self.is_removed = False
        """Whether other nodes removed the file and dropped its record: nobody will ever read what
        is written, except by what is open."""

    @property
    def is_changed(self) -> bool:
        """Whether some of its published content may be overwritten by now. Appends leave that
        content as it was. ctime does not count: a chmod or a new name changes it alone."""
        if not self.rewritten:
            return False
        return self.published is None or signature_of(os.fstat(self.fd))[:2] != self.published[:2]

    @property
    def is_partial(self) -> bool:
        """Whether some of its data are not here yet."""
        return self.incoming is not None and not self.incoming.is_whole


class Handle:
    """One open of a file."""

    __slots__ = (
        "appends",
        "creating",
        "fh",
        "file",
        "flags",
        "maps",
        "number",
        "overwrites",
        "readahead",
        "replaced",
        "writable",
    )

    def __init__(self, fh: int, file: OpenFile, flags: int, writable: bool) -> None:
        self.fh = fh
        self.file = file
        self.flags = flags
        self.writable = writable
        self.number = file.ino
        """The number of the view's inode by which it was opened."""
        self.appends = False
        """Whether it has the file's append lease."""
        self.creating = False
        """Whether it made the file."""
        self.overwrites = writable and flags & _APPENDS != _APPENDS
        """Whether it can change the file's content: append-only handles cannot, nor map it."""
        self.maps = flags & os.O_ACCMODE == os.O_RDWR
        """Whether its content can be changed through a mapping."""
        self.readahead: Readahead | None = None
        """The readahead of a program that reads a file that is still being fetched."""
        self.replaced = False
        """Whether the pages that the kernel keeps of the file are of other content."""


def signature_of(st: os.stat_result) -> tuple[int, int, int]:
    """Returns size, mtime and ctime: any change to a data file changes one of them."""
    return st.st_size, st.st_mtime_ns, st.st_ctime_ns


def copy_over(source: int, target: int) -> None:
    """Gives a file the content of another; runs in a thread."""
    size = os.fstat(source).st_size
    done = 0
    while done < size:
        count = os.copy_file_range(source, target, size - done, done, done)
        if not count:
            break
        done += count
    os.ftruncate(target, size)
    st = os.fstat(source)
    os.utime(target, ns=(st.st_atime_ns, st.st_mtime_ns))


async def turn(waiting: list[trio.Event]) -> None:
    """Waits until the tasks that are at it have ended."""
    turn = trio.Event()
    waiting.append(turn)
    await detach.aside()
    await turn.wait()
