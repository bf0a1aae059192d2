"""A new file at a path of a mount, or of any other filesystem, written straight to its final
place."""

import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from kvfs.base.errors import (
    AccessDenied,
    IsADirectory,
    KvfsError,
    NotADirectory,
    NotFound,
    ReadOnly,
)
from kvfs.client.blocking import Client
from kvfs.client.local_files import written_destination
from kvfs.client.mount.backing_file import within_mount
from kvfs.client.mount.mount_store import AnyPath, require_believed, told_store
from kvfs.datastore import file_sync
from kvfs.session.paths import joined, parse


@contextmanager
def new_file(path: AnyPath, size_bytes: int) -> Iterator[int]:
    """Opens a descriptor to write `size_bytes` to. `path` (symbolic links are followed) gets the
    new file, whole, when the block ends; until then, and if it ends by an exception, the previous
    file stays, and nothing else is left.

    On a mount the descriptor is the data file's, and the file is as durable as `Client.put` makes
    it; if the caller may not write to the store, it goes through the mount and is synced. On
    another filesystem it is not synced. Raises NotFound, NotADirectory (of the directory),
    IsADirectory, NoSpace, the other errors of `Client.open`, OSError."""
    given = os.fsdecode(path)
    real = os.path.realpath(given)
    if os.path.isdir(real):
        raise IsADirectory(f"{given} is a directory: name the file that is to be written")
    directory, name = os.path.split(real)
    store = _store_behind(directory)
    inside = b"" if store is None else within_mount(directory) + b"/" + os.fsencode(name)
    with ExitStack() as stack:
        with _naming(given, inside):
            fd = None if store is None else _in_store(stack, store, real, inside, size_bytes)
            synced = fd is None and store is not None
            if fd is None:
                fd = stack.enter_context(written_destination(real))
        yield fd
        with _naming(given, inside):
            if synced:
                file_sync.sync(fd)
            stack.close()


@contextmanager
def _naming(given: str, inside: bytes) -> Iterator[None]:
    """Makes errors name the path that the caller gave, not where that leads, nor its place within
    KVFS (`inside`)."""
    try:
        yield
    except KvfsError as error:
        name, text = joined(parse(inside)), str(error)
        rest = text.removeprefix(name) if inside and text.startswith(name) else f": {text}"
        raise type(error)(given + rest) from None
    except OSError as error:
        raise OSError(error.errno, error.strerror, given) from None


def _store_behind(directory: str) -> Path | None:
    """Returns the store; None: the directory is on no mount. Raises NotFound, NotADirectory,
    OSError."""
    try:
        mode = os.stat(directory).st_mode
    except FileNotFoundError:
        raise NotFound(f"{directory}: no such directory") from None
    if not stat.S_ISDIR(mode):
        raise NotADirectory(f"{directory} is no directory")
    return told_store(directory)


def _in_store(
    stack: ExitStack, store: Path, real: str, inside: bytes, size_bytes: int
) -> int | None:
    """Returns a descriptor in the store; None: only the mount may be written to."""
    try:
        require_believed(os.stat(os.path.dirname(real)).st_dev, real)
        client = stack.enter_context(Client(store))
        writer = stack.enter_context(client.open(inside, "wb"))
    except (AccessDenied, PermissionError, ReadOnly):
        return None
    writer.reserve(size_bytes)
    return writer.fileno()
