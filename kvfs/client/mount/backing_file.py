"""The data file behind a path of a mount: for cuFile, O_DIRECT and others that know the filesystem
of the store, and not FUSE.

An open descriptor is the lease: while it is open, its bytes stay, even if the file is evicted,
replaced or removed. A program that writes to the file in place changes them under every reader, as
anywhere. A program that opens the data file by its name, later, needs more (`lease`): the file is
open on the mount too, so that the node keeps the name.
"""

import functools
import os
import stat
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from kvfs.base.errors import (
    AccessDenied,
    Busy,
    Corrupt,
    Invalid,
    KvfsError,
    NoSpace,
    NotSupported,
    Unavailable,
)
from kvfs.client.client_core import Core
from kvfs.client.mount.mount_store import AnyPath, require_believed, told_store
from kvfs.client.reader import OpenedFile
from kvfs.session import paths as names
from kvfs.session.uninterruptible import uninterrupted

_READING: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
_AT_ONCE: Final = 8


class BackingFile(NamedTuple):
    """An open data file."""

    fd: int
    """A descriptor for reading, which the caller closes."""
    store: Path | None
    """The store; None: the path is on no mount of KVFS, and the file is its own."""
    sums: bytes | None = None
    """The xxh3-128 of each chunk of 4 MiB, one after the other, if they were asked for and the
    store has them: they exist some seconds after a file was written."""


class Leased(NamedTuple):
    """A data file that others may open by its name."""

    name: str
    """The absolute path, in the store or one of its tiers."""
    size_bytes: int
    store: Path
    descriptors: tuple[int, int]
    """Descriptors of the file on the mount, and of its data file: the lease lasts while they are
    open, in whichever process."""


@contextmanager
def lease(paths: Sequence[AnyPath]) -> Iterator[list[Leased]]:
    """Leases the whole data files behind `paths`, under names that stay until the block ends and
    all inherited descriptors are closed: the files are not evicted, nor moved to another medium,
    and if one is replaced or removed, the leased content is kept to the end. A program that opens
    the file itself for writing later, on a lone node, changes the leased content; on a node of a
    cluster the data file gets another name.

    Raises NotSupported (a path is on no mount), Invalid (no regular file), AccessDenied (the caller
    may not enter the store, or the mount is another user's), Busy (it is open for writing, or was
    replaced just now), Unavailable (the node does not answer), what `Client.open` raises, and
    OSError of a path itself. Interrupted, it holds nothing."""
    with ExitStack() as stack:
        fds = open_on_mount(paths)
        for fd in fds:
            stack.callback(os.close, fd)
        leased = []
        with _Clients() as clients:  # let go of before a command takes the place of this process
            for path, fd in zip(paths, fds, strict=True):
                leased.append(_leased(path, fd, clients))
                stack.callback(os.close, leased[-1].descriptors[1])
        yield leased


class _Clients(ExitStack):
    """One client of each store: making one takes milliseconds."""

    def __init__(self) -> None:
        super().__init__()
        self._by_store: dict[Path, Core] = {}
        self._believed: set[int] = set()
        """Devices of mounts, which stay while files on them are open."""

    def believe(self, fd: int, path: AnyPath) -> None:
        """Raises what `require_believed` raises."""
        device = os.fstat(fd).st_dev
        if device not in self._believed:
            require_believed(device, path)
            self._believed.add(device)

    def of(self, store: Path) -> Core:
        """Raises KvfsError, OSError."""
        if store not in self._by_store:
            self._by_store[store] = self.enter_context(closing(Core(store, reads_known=True)))
        return self._by_store[store]


def _leased(path: AnyPath, fd: int, clients: _Clients) -> Leased:
    store = told_store(fd)
    if store is None:
        raise NotSupported(f"{os.fsdecode(path)} is on no mount of KVFS: use it as it is")
    clients.believe(fd, path)
    meant = os.fstat(fd)
    if not stat.S_ISREG(meant.st_mode):
        raise Invalid(f"{os.fsdecode(path)} is no regular file: name files")
    try:
        data = _data_file(path, clients.of(store), meant)
    except _Lost as lost:
        raise lost.error from None
    except (AccessDenied, PermissionError):
        raise AccessDenied(
            f"{os.fsdecode(path)}: its data file is in {store}, where you may not enter: be root, "
            "or the user of the node"
        ) from None
    if data is not None and _may_be_leased(data, path, clients.of(store)):
        name = os.readlink(f"/proc/self/fd/{data.fd}")
        return Leased(name, meant.st_size, store, (fd, data.fd))
    if data is not None:
        os.close(data.fd)
    raise Busy(
        f"{os.fsdecode(path)} is open for writing, or was replaced just now: ask again when it is "
        "closed"
    )


def _may_be_leased(data: OpenedFile, path: AnyPath, core: Core) -> bool:
    """Returns whether it still has its name, and is not open for writing. Raises Unavailable, and
    has closed it then, or interrupted."""
    try:
        return _has_name(data.fd) and not core.is_written(data)
    except BaseException as error:
        os.close(data.fd)
        if isinstance(error, Unavailable):
            raise _named(error, path) from None
        raise


def _has_name(fd: int) -> bool:
    """Returns whether the data file has the name by which it was opened."""
    try:
        return os.path.samestat(os.stat(os.readlink(f"/proc/self/fd/{fd}")), os.fstat(fd))
    except FileNotFoundError:
        return False


def open_backing(path: AnyPath) -> BackingFile:
    """Opens the whole file behind `path`: data on other nodes are fetched first.

    The descriptor is the mount's if the data file is not accessible: the caller may not enter the
    store, or does not see it; the mount is neither root's nor the caller's; the file is not closed
    yet, or has lost its name; a directory of the mount is mounted elsewhere. Raises Unavailable,
    NoSpace, Corrupt if the data cannot be had, not even by the mount (no node that has them
    answers); FileNotFoundError and other OSErrors of the path itself."""
    (found,) = open_backings([path])
    return found


def open_backings(paths: Sequence[AnyPath], *, sums: bool = False) -> list[BackingFile]:
    """Like `open_backing`, for several files: data on other nodes arrive at the same time. `sums`:
    with their checksums. Raises the error of the first faulty one, and leaves none open; for
    checksums also Unavailable and Corrupt. Interrupted, it ends with the opens under way."""
    return uninterrupted(functools.partial(_open_backings, paths, sums=sums), _close_backings)


def _open_backings(paths: Sequence[AnyPath], *, sums: bool) -> list[BackingFile]:
    fds = _open_all(paths)
    found: list[BackingFile] = []
    try:
        with _Clients() as clients:
            for path, fd in zip(paths, fds, strict=True):
                found.append(_behind(path, fd, clients, sums=sums))
    except BaseException:
        for fd in (*(each.fd for each in found), *fds[len(found) :]):
            os.close(fd)
        raise
    return found


def _close_backings(found: Sequence[BackingFile]) -> None:
    _close_all([each.fd for each in found])


def open_on_mount(paths: Sequence[AnyPath]) -> list[int]:
    """Returns a descriptor of each file for reading. An open on a mount fetches a small file's data
    from other nodes, and begins to fetch those of a large one: so several are opened at once.
    Raises OSError of the first that fails, and leaves none open; interrupted, it leaves none
    either."""
    return uninterrupted(functools.partial(_open_all, paths), _close_all)


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _open_all(paths: Sequence[AnyPath]) -> list[int]:
    if len(paths) == 1:
        return [os.open(paths[0], _READING)]
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="kvfs-open") as pool:
        jobs: list[Future[int]] = []
        try:
            jobs += (pool.submit(os.open, path, _READING) for path in paths)
            return [job.result() for job in jobs]
        except BaseException:
            for job in jobs:
                job.cancel()
            for job in wait(jobs).done:
                if not job.cancelled() and job.exception() is None:
                    os.close(job.result())
            raise


def _behind(path: AnyPath, fd: int, clients: _Clients, *, sums: bool) -> BackingFile:
    """Returns the data file of the file open as `fd`, which is closed if that succeeds."""
    store = told_store(fd)
    if store is None:
        return BackingFile(fd, None)
    try:
        clients.believe(fd, path)
        data = _data_file(path, clients.of(store), os.fstat(fd))
    except _Lost as lost:
        raise lost.error from None
    except (KvfsError, OSError):
        return BackingFile(fd, store)
    if data is None:
        return BackingFile(fd, store)
    try:
        found = BackingFile(data.fd, store, clients.of(store).sums_of(data) if sums else None)
    except BaseException:
        os.close(data.fd)
        raise
    os.close(fd)
    return found


class _Lost(Exception):
    """The data cannot be had by any way."""

    def __init__(self, error: KvfsError) -> None:
        self.error = error


def _data_file(path: AnyPath, core: Core, meant: os.stat_result) -> OpenedFile | None:
    """Returns the data file; None: the store has another file under that name. Raises _Lost,
    KvfsError, OSError."""
    name = within_mount(path)
    found = core.names.stat(names.parse(name))
    if (found.ino, found.size) != (meant.st_ino, meant.st_size):
        return None
    try:
        opened = core.open_file(name)
    except (Unavailable, NoSpace, Corrupt) as error:
        raise _Lost(_named(error, path)) from None
    if (opened.found.ino, opened.size) != (meant.st_ino, meant.st_size):
        os.close(opened.fd)  # it was replaced just now
        return None
    return opened


def _named(error: KvfsError, path: AnyPath) -> KvfsError:
    """Returns the same, naming the file."""
    where = os.fsdecode(path)
    return error if str(error).startswith(where) else type(error)(f"{where}: {error}")


def within_mount(path: AnyPath) -> bytes:
    """Returns the path from the mount's root on, symbolic links followed. Raises OSError."""
    real = os.path.realpath(os.fsencode(path))
    device = os.stat(real).st_dev
    root = real
    while os.stat(above := os.path.dirname(root)).st_dev == device and above != root:
        root = above
    return os.path.relpath(real, root)
