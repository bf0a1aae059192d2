"""Data files: one for each version of a file, named after its inode number, private to the store's
owner.

Invariants
- The store never truncates or punches a published data file: it only unlinks it, or moves it into
  quarantine, so that a process that has it open or mapped keeps what was promised.
- The name follows from inode number and version alone; nothing is looked up.
- A data file describes itself in an extended attribute, so that lost metadata can be rebuilt by a
  scan.
- A data file is opened through no symbolic link, and only if it is a regular file of a trusted
  owner (`kernel.safe_open`); the directory itself was checked (`kernel.ownership`).
- A file that comes from another node lies beside the data files, and gets its name when it is
  whole: a data file of a published version is never incomplete.

Hot path: `create` and `unlink` are one system call and one formatted name (about 0.5 us of Python),
`open` is two (`kernel.safe_open`). A create that finds its one of the 4,096 directories missing
makes it.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Final

import msgspec

from kvfs.base.errors import UNDECODABLE
from kvfs.base.private_file import sync_directory
from kvfs.datastore import quarantine_directory
from kvfs.datastore.kernel import inode_search
from kvfs.datastore.kernel.file_sequence import FileSequence, is_local
from kvfs.datastore.kernel.ownership import trusted
from kvfs.datastore.kernel.safe_open import create_file, open_file
from kvfs.datastore.quarantine_directory import Quarantined, Reason
from kvfs.datastore.spare_files import Spares, name_spare

_CREATE: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_ATTRIBUTE: Final = "user.kvfs"
_HINT_LIMIT_BYTES: Final = 1024
"""Bytes of a path hint."""
_DESCRIPTION_LIMIT_BYTES: Final = 3600
"""Bytes of a whole description: it stays under the 4 KiB that ext4 gives an inode's attributes."""
_ARRIVING: Final = "arriving"
FAN_OUT: Final = 4096
"""Number of directories. Neighbouring inode numbers share one (the name holds bits 10 to 21), so
that files made together lie together: on ext4 a directory has its own block group, and a create in
a cold group costs up to ten times one in a warm group."""


class Description(msgspec.Struct, array_like=True, kw_only=True, frozen=True):
    """A data file's description of itself (msgpack array; fields are only ever appended)."""

    format: int = 1
    ino: int
    version: int
    size: int
    checksum: bytes
    path: bytes
    """The path of the file when it was sealed, relative to the root; empty when longer than the
    limit. A hint only."""
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    described_ns: int = 0
    """Time when this was written, since the epoch; 0: by an earlier version."""
    namespace: bytes = b""
    """The name of the file's namespace."""
    kind: str = ""
    """The kind of the namespace: 'durable' or 'cache'; empty: not known."""
    others: list[bytes] = []
    """The paths of its other links, if they fit."""
    xattrs: dict[bytes, bytes] = {}
    """Its extended attributes, if they fit."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Description).decode


class DataFiles:
    """The data files under one directory. Errors of the system pass through as OSError: the caller
    knows their meaning.

    Methods that take a name finish in one system call and may be called from any thread.
    """

    def __init__(self, root: Path, owners: Collection[int] | None = None) -> None:
        """`owners`: the users whose data files are opened; None: those of `trusted`."""
        self.root = os.fspath(root)
        self._owners = trusted() if owners is None else owners
        self._directory = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._is_local = is_local(self._directory)
        self._spares: Spares | None = None

    def close(self) -> None:
        """Releases the directory; idempotent."""
        if self._spares is not None:
            self._spares.close()
            self._spares = None
        directory, self._directory = self._directory, -1
        if directory >= 0:
            os.close(directory)

    def path(self, ino: int, version: int) -> str:
        """Returns the absolute path of a data file, whether it exists or not."""
        return f"{self.root}/{ino >> 10 & 0xFFF:03x}/{ino:016x}.{version:x}"

    def keep_spares(self) -> None:
        """Begins to make data files ahead of their use, where a create may take long; for a process
        that makes many."""
        if self._spares is None and inode_search.is_long_after_removals(self._directory):
            self._spares = Spares(self._directory)

    def after_fork(self) -> None:
        """Lets go of the files made ahead, which are the parent's; to be called in the child, which
        then makes its own."""
        spares, self._spares = self._spares, None
        if spares is not None:
            spares.let_go()
            self.keep_spares()

    def create(self, ino: int, version: int) -> int:
        """Makes a data file, and returns a new descriptor, readable and writable. FileExistsError
        if it exists."""
        near = f"{ino >> 10 & 0xFFF:03x}"
        name = f"{near}/{ino:016x}.{version:x}"
        if self._spares is not None:
            spare = self._spares.take(near)
            if spare is not None and self._name(spare, ino, name):
                return spare
        try:
            return create_file(self._directory, name, _CREATE)
        except FileNotFoundError:
            self._make_directory(ino)
            return create_file(self._directory, name, _CREATE)

    def _name(self, spare: int, ino: int, name: str) -> bool:
        """Returns whether the spare has its name now; if the system refuses there are no more
        spares."""
        try:
            try:
                name_spare(spare, self._directory, name)
            except FileNotFoundError:
                self._make_directory(ino)
                name_spare(spare, self._directory, name)
            os.utime(spare)  # it is older than its file
        except OSError:
            os.close(spare)
            if self._spares is not None:
                self._spares.close()
                self._spares = None
            return False
        return True

    def begin_arriving(self, ino: int, version: int, size: int) -> int:
        """Returns a descriptor of a new file of `size` bytes, all hole, in which a data file is to
        arrive; an earlier one is dropped."""
        name = _arriving(ino, version)
        try:
            fd = create_file(self._directory, name, _CREATE)
        except FileNotFoundError:
            os.mkdir(_ARRIVING, 0o700, dir_fd=self._directory)
            fd = create_file(self._directory, name, _CREATE)
        except FileExistsError:
            self.drop_arriving(ino, version)
            fd = create_file(self._directory, name, _CREATE)
        os.ftruncate(fd, size)
        return fd

    def arrived(self, ino: int, version: int) -> None:
        """Makes a file that arrived whole the data file, replacing an existing one."""
        source, target = _arriving(ino, version), _relative(ino, version)
        try:
            os.rename(source, target, src_dir_fd=self._directory, dst_dir_fd=self._directory)
        except FileNotFoundError:
            self._make_directory(ino)
            os.rename(source, target, src_dir_fd=self._directory, dst_dir_fd=self._directory)

    def drop_arriving(self, ino: int, version: int) -> None:
        """Drops a file that will not become whole; a process that has it open keeps what has
        come."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(_arriving(ino, version), dir_fd=self._directory)

    def clear_arriving(self, is_kept: Callable[[int], bool]) -> None:
        """Drops the arriving files that a killed process left, but for drafts of inodes of which
        `is_kept` says that programs have them open."""
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(f"{self.root}/{_ARRIVING}"):
                with contextlib.suppress(OSError, ValueError):
                    if name.endswith(".draft") and is_kept(int(name.partition(".")[0], 16)):
                        continue
                    os.unlink(f"{_ARRIVING}/{name}", dir_fd=self._directory)

    def open_arriving(self, ino: int, version: int) -> int:
        """Returns a new descriptor, for reading, of a file that is arriving. FileNotFoundError if
        it is not, or has arrived."""
        return open_file(self._directory, _arriving(ino, version), os.O_RDONLY, self._owners)

    def begin_draft(self, ino: int, version: int) -> int:
        """Returns a descriptor of a new, empty file for content that is to replace that of this
        version, whose data file is not here. A kill leaves nothing of it, unless the mount outlives
        its daemon. FileExistsError when there is one."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(_ARRIVING, 0o700, dir_fd=self._directory)
        return create_file(self._directory, _draft(ino, version), _CREATE)

    def open_draft(self, ino: int, version: int) -> int:
        """Returns a new descriptor, for writing, of a draft. FileNotFoundError if there is none."""
        return open_file(self._directory, _draft(ino, version), os.O_RDWR, self._owners)

    def name_draft(self, ino: int, version: int, new: int) -> None:
        """Makes a draft the data file of a new version. FileExistsError when there is one."""
        self._make_directory(ino)
        os.link(
            _draft(ino, version),
            _relative(ino, new),
            src_dir_fd=self._directory,
            dst_dir_fd=self._directory,
        )
        self.drop_draft(ino, version)

    def drop_draft(self, ino: int, version: int) -> None:
        """Drops a draft that was named, or is not wanted."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(_draft(ino, version), dir_fd=self._directory)

    def replace_version(self, ino: int, version: int, new: int) -> None:
        """Renames a data file to a new version, replacing the data file of that name."""
        os.rename(
            _relative(ino, version),
            _relative(ino, new),
            src_dir_fd=self._directory,
            dst_dir_fd=self._directory,
        )

    def add_version(self, ino: int, version: int, new: int) -> None:
        """Gives a data file a second name, that of a new version of its content. FileNotFoundError
        when there is no such data file, FileExistsError when there is one of the new version."""
        os.link(
            _relative(ino, version),
            _relative(ino, new),
            src_dir_fd=self._directory,
            dst_dir_fd=self._directory,
        )

    def renew(self, ino: int, version: int, copy: Callable[[int, int], object]) -> None:
        """Gives this version another data file in place of the present one, which a process that
        has it open keeps: the result of `copy` (source, target), on disk when this returns, with
        the same times and description. A kill leaves the one or the other. FileNotFoundError when
        there is none."""
        source = self.open(ino, version, os.O_RDONLY | os.O_NOATIME)
        name = f"{_ARRIVING}/{ino:016x}.{version:x}.copy"
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(_ARRIVING, 0o700, dir_fd=self._directory)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self._directory)
            target = create_file(self._directory, name, _CREATE)
            try:
                copy(source, target)
                copy_description(source, target)
                found = os.fstat(source)  # after the copy: not older than anything in it
                os.utime(target, ns=(found.st_atime_ns, found.st_mtime_ns))
                os.fsync(target)
                os.rename(
                    name,
                    _relative(ino, version),
                    src_dir_fd=self._directory,
                    dst_dir_fd=self._directory,
                )
            except BaseException:
                os.unlink(name, dir_fd=self._directory)
                raise
            finally:
                os.close(target)
        finally:
            os.close(source)
        sync_directory(Path(self.path(ino, version)).parent)

    def sync_name(self, ino: int, version: int) -> None:
        """Makes a data file's name survive power loss. FileNotFoundError when there is none."""
        self.stat(ino, version)
        sync_directory(Path(self.root, f"{ino >> 10 & 0xFFF:03x}"))

    def open(self, ino: int, version: int, flags: int) -> int:
        """Returns a new descriptor of an existing data file. Raises what
        `safe_open.open_file` raises."""
        name = f"{ino >> 10 & 0xFFF:03x}/{ino:016x}.{version:x}"
        return open_file(self._directory, name, flags, self._owners)

    def sequences(self) -> list[FileSequence]:
        """Returns what opens data files by `name_of`, for one thread: of each place where they may
        be, the most likely first."""
        return [FileSequence(lambda: self._directory, self._owners, is_local=self._is_local)]

    def open_unseen(self, ino: int, version: int) -> int:
        """Like `open`, to read all of it for checksums: it never waits (O_NONBLOCK), and the access
        time stays that of the file's readers."""
        flags = os.O_RDONLY | os.O_NONBLOCK
        try:
            return self.open(ino, version, flags | os.O_NOATIME)
        except PermissionError:  # made by a client that is another user
            return self.open(ino, version, flags)

    def stat(self, ino: int, version: int) -> os.stat_result:
        """Returns the data file's own attributes. FileNotFoundError when there is none."""
        return os.lstat(f"{ino >> 10 & 0xFFF:03x}/{ino:016x}.{version:x}", dir_fd=self._directory)

    def has(self, ino: int, version: int) -> bool:
        """Returns whether there is such a data file."""
        try:
            self.stat(ino, version)
        except FileNotFoundError:
            return False
        return True

    def is_ours(self, found: os.stat_result) -> bool:
        """Returns whether a file with these attributes is opened as a data file."""
        return stat.S_ISREG(found.st_mode) and found.st_uid in self._owners

    def medium(self, ino: int, version: int) -> str:
        """Returns the medium of a data file, as namespaces name it; empty when there is none."""
        return "ssd" if self.has(ino, version) else ""

    def unlink(self, ino: int, version: int) -> bool:
        """Removes a data file, and returns whether it existed. Its space is free once nobody has it
        open or mapped.

        The time grows with the size (ext4: about 1 ms for 64 MiB): large files are for a worker
        thread.
        """
        try:
            os.unlink(f"{ino >> 10 & 0xFFF:03x}/{ino:016x}.{version:x}", dir_fd=self._directory)
        except FileNotFoundError:
            return False
        return True

    def quarantine(self, ino: int, version: int, reason: Reason) -> str | None:
        """Moves a data file into quarantine, where it can be examined, and returns its path there;
        None when it is gone. A process that has it open keeps it."""
        source = f"{self.root}/{_relative(ino, version)}"
        return quarantine_directory.enter(self.root, source, ino, version, reason)

    def quarantined(self) -> Iterator[Quarantined]:
        """Yields everything in quarantine, in no order."""
        return quarantine_directory.entries(self.root)

    def quarantine_stamp(self) -> int:
        """Returns another number after each change of the quarantine."""
        return quarantine_directory.stamp(self.root)

    def restore(self, entry: Quarantined) -> None:
        """Gives a data file in quarantine its name back. FileExistsError if there is one of that
        name."""
        self._make_directory(entry.ino)
        quarantine_directory.leave(entry, f"{self.root}/{_relative(entry.ino, entry.version)}")

    def tmpfile(self) -> int:
        """Returns a descriptor of a data file that never has a name: gone when closed."""
        flags = os.O_RDWR
        try:
            return create_file(self._directory, ".", flags | os.O_TMPFILE)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                raise
            return self._unnamed()

    def scan(self) -> Iterator[tuple[int, int]]:
        """Yields (inode number, version) of every data file, one directory after the other, in no
        order within one.

        Names that no data file can have are skipped; see `strangers`.
        """
        for directory in self._directories():
            for name in os.listdir(f"{self.root}/{directory}"):
                parsed = parse_name(name)
                if parsed and f"{parsed[0] >> 10 & 0xFFF:03x}" == directory:
                    yield parsed

    def strangers(self) -> Iterator[str]:
        """Yields paths below the data directory that are no data files."""
        known = set(self._directories())
        ours = {_ARRIVING, quarantine_directory.DIRECTORY, quarantine_directory.FORMER}
        for name in sorted(set(os.listdir(self.root)) - known - ours):
            yield f"{self.root}/{name}"
        for directory in sorted(known):
            for name in os.listdir(f"{self.root}/{directory}"):
                parsed = parse_name(name)
                if not parsed or f"{parsed[0] >> 10 & 0xFFF:03x}" != directory:
                    yield f"{self.root}/{directory}/{name}"

    def _directories(self) -> list[str]:
        valid = {f"{number:03x}" for number in range(FAN_OUT)}
        return sorted(valid & set(os.listdir(self.root)))

    def _make_directory(self, ino: int) -> None:
        try:
            os.mkdir(f"{ino >> 10 & 0xFFF:03x}", 0o700, dir_fd=self._directory)
        except FileExistsError:
            pass

    def _unnamed(self) -> int:
        """Makes a file without a name on a filesystem without O_TMPFILE."""
        name = f"tmp.{os.getpid()}.{os.urandom(8).hex()}"
        fd = create_file(self._directory, name, _CREATE)
        os.unlink(name, dir_fd=self._directory)
        return fd


def name_of(ino: int, version: int) -> tuple[str, str]:
    """Returns the directory and the name of a data file within its place."""
    return f"{ino >> 10 & 0xFFF:03x}", f"{ino:016x}.{version:x}"


def _relative(ino: int, version: int) -> str:
    return f"{ino >> 10 & 0xFFF:03x}/{ino:016x}.{version:x}"


def _arriving(ino: int, version: int) -> str:
    return f"{_ARRIVING}/{ino:016x}.{version:x}"


def _draft(ino: int, version: int) -> str:
    return f"{_ARRIVING}/{ino:016x}.{version:x}.draft"


def parse_name(name: str) -> tuple[int, int] | None:
    """Returns (inode number, version) from the last part of a data file's name, None if it is not
    one."""
    ino, dot, version = name.partition(".")
    if len(ino) != 16 or not dot or not version:
        return None
    try:
        parsed = int(ino, 16), int(version, 16)
    except ValueError:
        return None
    return parsed if name == f"{parsed[0]:016x}.{parsed[1]:x}" else None


def describe(fd: int, description: Description) -> bool:
    """Writes the file's description of itself, as much as fits; False on a filesystem without
    extended attributes, where a lost engine cannot be rebuilt. Changes the data file's ctime."""
    try:
        os.setxattr(fd, _ATTRIBUTE, _encode(fitting(description)))
    except OSError as error:
        if error.errno == errno.EOPNOTSUPP:
            return False
        raise
    return True


def fitting(description: Description) -> Description:
    """Returns as much of the description as fits: without its other paths, then without attributes
    too."""
    if len(description.path) > _HINT_LIMIT_BYTES:
        description = msgspec.structs.replace(description, path=b"", others=[])
    if len(_encode(description)) > _DESCRIPTION_LIMIT_BYTES:
        description = msgspec.structs.replace(description, others=[])
    if len(_encode(description)) > _DESCRIPTION_LIMIT_BYTES:
        description = msgspec.structs.replace(description, xattrs={})
    return description


def copy_description(source: int, target: int) -> None:
    """Copies the description to a copy of the file, if both filesystems keep it."""
    try:
        os.setxattr(target, _ATTRIBUTE, os.getxattr(source, _ATTRIBUTE))
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.ENODATA):
            raise


def description(fd: int) -> Description | None:
    """Returns the file's description of itself; None if there is none that can be understood."""
    try:
        return _decode(os.getxattr(fd, _ATTRIBUTE))
    except (OSError, *UNDECODABLE):
        return None
