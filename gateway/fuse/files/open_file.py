"""An open file of the mount, and one open of it. What they share is decided in `handles`."""

import os
import stat

import trio

from kvfs.base import detach
from kvfs.meta.records import Inode
from kvfs.policy.readahead import Readahead
from kvfs.transfer.incoming_file import IncomingFile
from kvfs.tree import inodes

_APPENDS = os.O_WRONLY | os.O_APPEND
_SET_IDS = stat.S_ISUID | stat.S_ISGID


class OpenFile:
    """What all handles of one inode share."""

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
        "lapses",
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
        """Handles among these that kernels of views have, not the mount's."""
        self.owner: int | None = None
        """The user among whose open files it counts; None: nobody's."""
        self.users = 0
        """Requests that are opening, publishing or closing it."""
        self.publishing: list[trio.Event] | None = None
        """Those who wait until it has been published, while it is."""
        self.published: tuple[int, int, int] | None = None
        """(size, mtime, ctime) of the data file when it was last published; None: never, by this
        mount."""
        self.base = version
        """The recorded version that what is written here builds on."""
        self.lapses = 0
        """How often this node had lost its lease when writing began."""
        self.in_doubt = False
        """What was to be published last failed: it may be recorded or not, and others may have gone
        on since."""
        self.is_appended = False
        """Whether somebody appends to it who must not lose others' lines."""
        self.replaces = False
        """Whether it was cut to nothing since writing began, or was last published: it builds on
        nothing that was there."""
        self.refused = ""
        """Why what was written is not published, and will not be."""
        self.overwriters = 0
        """Handles through which more can be changed than what is appended."""
        self.rewritten = False
        """Whether there were any since it was last published, or it was cut."""
        self.backing_id = 0
        """Of the kernel's registration; 0: none."""
        self.atime_ns = 0
        """As the record has it, or will soon."""
        self.record = record
        """As it was when the file was opened."""
        mode = record.mode
        self.set_ids = bool(mode & _SET_IDS) and inodes.without_set_ids(mode) != mode
        """A write takes mode bits away, so the daemon must see each write: no passthrough."""
        self.armed: tuple[int, int, int] | None = None
        """Set-id bits came while the file was open for writing: the data file as it was then. Once
        it has changed, the bits go."""
        self.incoming: IncomingFile | None = None
        """Its data came, or come, while it is open: it stays without passthrough until its last
        close."""
        self.is_new = False
        """Made by this mount, and not published yet."""
        self.is_draft = False
        """Cut to nothing before its data had come: they will not, and it has no name yet."""
        self.is_former = False
        """Whether other nodes have replaced its content: whoever opens the file gets another."""
        self.is_mappable = False
        """Whether somebody may have it mapped for writing: also who has closed it."""
        self.is_remembered = False
        """Whether the kernel may still have content or size of before others replaced them."""

    @property
    def is_changed(self) -> bool:
        """Whether some of what was published of it may be overwritten by now. What was appended
        leaves that as it was. ctime does not count: a chmod or a new name changes it alone."""
        if not self.rewritten:
            return False
        return self.published is None or signature_of(os.fstat(self.fd))[:2] != self.published[:2]

    @property
    def is_partial(self) -> bool:
        """Whether some of its data are not here yet."""
        return self.incoming is not None and not self.incoming.is_whole


class Handle:
    """One open of a file."""

    __slots__ = ("appends", "creating", "fh", "file", "flags", "readahead", "replaced", "writable")

    def __init__(self, fh: int, file: OpenFile, flags: int, writable: bool) -> None:
        self.fh = fh
        self.file = file
        self.flags = flags
        self.writable = writable
        self.appends = False
        """Whether it has the file's append lease."""
        self.creating = False
        """Whether it made the file."""
        self.readahead: Readahead | None = None
        """Of who reads what is still coming."""
        self.replaced = False
        """Whether what the kernel keeps of the file's content is of other content."""

    @property
    def overwrites(self) -> bool:
        """Whether it can change what the file holds: who may append alone cannot, nor map it."""
        return self.writable and self.flags & _APPENDS != _APPENDS

    @property
    def maps(self) -> bool:
        """Whether what it has open can be changed through a mapping."""
        return self.flags & os.O_ACCMODE == os.O_RDWR


def signature_of(st: os.stat_result) -> tuple[int, int, int]:
    """Size, mtime and ctime: whatever changes a data file changes one of them."""
    return st.st_size, st.st_mtime_ns, st.st_ctime_ns


def copy_over(source: int, target: int) -> None:
    """Give a file the content of another; in a thread."""
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
    """Wait until those who are at it have ended."""
    turn = trio.Event()
    waiting.append(turn)
    await detach.aside()
    await turn.wait()
