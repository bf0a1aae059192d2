"""The place where backups lie: a directory, or a bucket of any S3 endpoint below a prefix.

| name | content |
|---|---|
| `format` | makes the directory a place of backups |
| `backups/<time>.json` | a manifest: written last, so that only a whole backup has one |
| `pages/<digest>` | sorted keys and values, packed |
| `packs/<digest>` | contents of small files, one after the other |
| `large/<inode>.<version>.<checksum>` | the content of one large file |
| `begun/<digest>` | what a pack holds, until a manifest names the pack |

Invariants
- A name stands for one content: what is there is never written anew with another one.
- An object is there whole or not at all.
- Everything is for its owner alone (0700, 0600), and believed only where nobody else may write.
"""

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, Protocol

from kvfs.base import private_file
from kvfs.base.descriptors import closing
from kvfs.base.errors import Busy, Corrupt, Invalid, KvfsError, NoSpace, NotFound, ReadOnly
from kvfs.datastore.kernel.filesystem_sync import sync_filesystem
from kvfs.datastore.kernel.ownership import require_directory, trusted
from kvfs.transfer.cold import object_transfer
from kvfs.transfer.cold.endpoint import ColdLocation, Endpoint, parse

FORMAT: Final = b'{"kvfs-backups":1}\n'
_FORMAT: Final = "format"
_WHAT: Final = "the directory of backups"
_PIECE: Final = 8 << 20
MOST_BYTES: Final = 256 << 20
"""A limit for what is read into memory: more than any object has that a backup puts as a whole."""
Step = Callable[[int], None]


class Repository(Protocol):
    """A place of backups; any method raises what its place raises: NoSpace, ReadOnly, Unavailable,
    AccessDenied, Invalid, Corrupt (its disk fails)."""

    shown: str
    """The place as messages name it."""

    def put(self, name: str, data: bytes) -> None:
        """Puts an object, in place of an existing one."""

    def put_file(self, name: str, fd: int, size: int) -> None:
        """Puts an object of the first `size` bytes of a file. A large one that was cut short goes
        on where the place can do that."""

    def get(self, name: str, offset: int = 0, size: int = -1) -> bytes:
        """Returns (a part of) an object. Raises NotFound, Corrupt (over MOST_BYTES)."""

    def get_file(self, name: str, size: int, fd: int) -> None:
        """Writes an object of this size into a file. Raises NotFound, Corrupt (it is shorter), and
        the OSErrors of the file."""

    def size_of(self, name: str) -> int | None:
        """Returns the size of an object; None: there is none."""

    def names(self, below: str) -> Iterator[str]:
        """Yields the names of all objects below one of the directories above, in order."""

    def delete(self, name: str) -> None:
        """Deletes an object, which may be missing."""

    def settle(self) -> None:
        """Returns when all that was put survives a power cut."""

    def close(self) -> None:
        """Idempotent."""


@contextlib.contextmanager
def opened(place: str, endpoint: str | None, *, make: bool = False) -> Iterator[Repository]:
    """Opens a place of backups. `make`: it is made if missing, and taken: another `create` waits
    for its end. Raises NotFound, Invalid (something else lies there), Busy, AccessDenied, and what
    a Repository raises."""
    found: Repository
    if place.startswith("s3://"):
        found = BucketOfBackups(parse(place), endpoint, make=make)
    else:
        found = DirectoryOfBackups(Path(place), make=make)
    with contextlib.closing(found):
        yield found


class DirectoryOfBackups:
    """Backups in a directory; its drafts, which a kill left, go with the next `make`."""

    def __init__(self, root: Path, *, make: bool) -> None:
        self.root = root.absolute()
        self.shown = str(self.root)
        self._put: list[str] = []
        self._fd = -1
        with self._translated():
            try:
                require_directory(self.root, _WHAT, trusted(), make=make)
            except (FileNotFoundError, NotADirectoryError):
                raise NotFound(f"there is no directory of backups {self.root}") from None
            self._check(make=make)
            self._fd = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            if make:
                try:
                    self._take()
                except BaseException:
                    self.close()
                    raise

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def put(self, name: str, data: bytes) -> None:
        with self._translated(), self._draft(name) as fd:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]

    def put_file(self, name: str, fd: int, size: int) -> None:
        with self._translated(), self._draft(name) as target:
            _copy(fd, target, size)

    def get(self, name: str, offset: int = 0, size: int = -1) -> bytes:
        with self._translated(), self._reading(name) as fd:
            if size < 0:
                size = os.fstat(fd).st_size - offset
            _require_possible(size, f"{self.shown}/{name}")
            found = os.pread(fd, size, offset)
            while len(found) < size:
                more = os.pread(fd, size - len(found), offset + len(found))
                if not more:
                    break
                found += more
            return found

    def get_file(self, name: str, size: int, fd: int) -> None:
        with self._translated():
            source = self._open(name)
        with closing(source):
            _copy(source, fd, size)

    def size_of(self, name: str) -> int | None:
        with self._translated():
            try:
                return self._path(name).stat().st_size
            except FileNotFoundError:
                return None

    def names(self, below: str) -> Iterator[str]:
        for found in sorted((self.root / below).rglob("*")):
            if not found.name.startswith(".") and not found.is_dir():
                yield f"{below}/{found.name}"

    def delete(self, name: str) -> None:
        with self._translated():
            self._path(name).unlink(missing_ok=True)

    def settle(self) -> None:
        with self._translated():
            if not sync_filesystem(self._fd):
                for name in self._put:
                    with self._reading(name) as fd:
                        os.fsync(fd)
                    private_file.sync_directory(self._path(name).parent)
            self._put = []

    def _check(self, *, make: bool) -> None:
        path = self.root / _FORMAT
        if path.exists():
            if path.read_bytes() != FORMAT:
                raise Invalid(
                    f"{path} is not of this version of KVFS: use the version that made the backups"
                )
            return
        if any(not each.name.startswith(".") for each in self.root.iterdir()):
            raise Invalid(
                f"{self.root} holds something else than backups: name an empty or a new directory"
            )
        if not make:
            raise NotFound(f"there are no backups in {self.root}")
        private_file.replace(path, FORMAT)

    def _take(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Busy(f"another backup into {self.root} is under way: wait for its end") from None
        for left in self.root.rglob(".*.draft"):
            left.unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        kind, _, rest = name.partition("/")
        if kind in ("backups", "begun"):
            return self.root / kind / rest
        return self.root / kind / rest[-2:] / rest

    @contextlib.contextmanager
    def _draft(self, name: str) -> Iterator[int]:
        """Opens a new file that gets its name, and its mode, when the block ends well."""
        path = self._path(name)
        if not path.parent.exists():
            (self.root / name.partition("/")[0]).mkdir(0o700, exist_ok=True)
            path.parent.mkdir(0o700, exist_ok=True)
        draft = path.with_name(f".{path.name}.draft")
        draft.unlink(missing_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            with closing(os.open(draft, flags, 0o600)) as fd:
                yield fd
            os.rename(draft, path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        self._put.append(name)

    @contextlib.contextmanager
    def _reading(self, name: str) -> Iterator[int]:
        with closing(self._open(name)) as fd:
            yield fd

    def _open(self, name: str) -> int:
        """Raises NotFound, Corrupt (it is no file)."""
        path = self._path(name)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            raise NotFound(f"{path} is missing") from None
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):
                raise Corrupt(f"{path} is damaged: it is no file") from None
            raise
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise Corrupt(f"{path} is damaged: it is no file")
        return fd

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except KvfsError:
            raise
        except OSError as error:
            raise self._refusal(error) from error

    def _refusal(self, error: OSError) -> KvfsError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return NoSpace(
                f"{self.shown} is full: free some space there (--backup-keep N deletes older"
                " backups), and run it again: it goes on where it was"
            )
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            return ReadOnly(f"{self.shown} cannot be written: {error.strerror}")
        if error.errno == errno.EIO:
            return Corrupt(f"the disk of {self.shown} reports an error: see the kernel's log")
        return Invalid(f"{self.shown} cannot be used: {error.strerror or error}")


class BucketOfBackups:
    """Backups below a prefix of a bucket."""

    def __init__(self, location: ColdLocation, url: str | None, *, make: bool) -> None:
        self.shown = str(location)
        self._below = f"{location.prefix}/" if location.prefix else ""
        self._endpoint = Endpoint(location.bucket, url)
        try:
            self._check(make=make)
        except BaseException:
            self._endpoint.close()
            raise

    def close(self) -> None:
        self._endpoint.close()

    def put(self, name: str, data: bytes) -> None:
        self._endpoint.put(self._below + name, data)

    def put_file(self, name: str, fd: int, size: int) -> None:
        object_transfer.upload(self._endpoint, self._below + name, fd, size, _nothing, trusted=True)

    def get(self, name: str, offset: int = 0, size: int = -1) -> bytes:
        key = self._below + name
        if size < 0:
            found = self._endpoint.head(key)
            if found is None:
                raise NotFound(f"{self.shown}/{name} is missing")
            size = found.size - offset
        _require_possible(size, f"{self.shown}/{name}")
        if not size:
            return b""
        try:
            with self._endpoint.reading(key, offset, size) as body:
                return bytes(body.read(size))
        except NotFound:
            raise NotFound(f"{self.shown}/{name} is missing") from None

    def get_file(self, name: str, size: int, fd: int) -> None:
        object_transfer.download(self._endpoint, self._below + name, size, fd, _nothing)

    def size_of(self, name: str) -> int | None:
        found = self._endpoint.head(self._below + name)
        return None if found is None else found.size

    def names(self, below: str) -> Iterator[str]:
        for each in self._endpoint.objects(f"{self._below}{below}/"):
            yield each.key[len(self._below) :]

    def delete(self, name: str) -> None:
        self._endpoint.delete(self._below + name)

    def settle(self) -> None:
        """An object that was put is as safe as its service makes it."""

    def _check(self, *, make: bool) -> None:
        if self.size_of(_FORMAT) is not None:
            if self.get(_FORMAT) != FORMAT:
                raise Invalid(
                    f"{self.shown}/{_FORMAT} is not of this version of KVFS: use the version that"
                    " made the backups"
                )
            return
        if not make:
            raise NotFound(f"there are no backups in {self.shown}")
        if next(self._endpoint.objects(self._below), None) is not None:
            raise Invalid(f"{self.shown} holds something else than backups: name another prefix")
        self.put(_FORMAT, FORMAT)


def _require_possible(size: int, where: str) -> None:
    if size > MOST_BYTES:
        raise Corrupt(f"{where} is damaged: no backup puts {size:,} bytes there")


def _nothing(_size: int) -> None:
    """Counts nothing."""


def _copy(source: int, target: int, size: int) -> None:
    """Copies the first bytes of a file within the kernel, sharing blocks where the filesystem does
    that. Raises Corrupt if it is shorter, OSError."""
    done = 0
    while done < size:
        try:
            count = os.copy_file_range(source, target, min(size - done, _PIECE), done, done)
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            os.lseek(target, done, os.SEEK_SET)
            count = os.sendfile(target, source, done, min(size - done, _PIECE))
        if not count:
            raise Corrupt("the file is shorter than it was said to be")
        done += count
