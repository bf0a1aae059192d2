"""Local files that are copied from and to."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from typing import Final, Protocol

from kvfs.base.descriptors import closing
from kvfs.base.errors import Invalid


class HasDescriptor(Protocol):
    """A file object."""

    def fileno(self) -> int: ...


Source = str | bytes | os.PathLike[str] | int | HasDescriptor
Destination = Source
_PERMISSIONS: Final = 0o666


@contextlib.contextmanager
def opened_source(source: Source) -> Iterator[int]:
    """Opens its descriptor. Raises OSError."""
    if isinstance(source, int):
        yield source
    elif isinstance(source, str | bytes | os.PathLike):
        with closing(os.open(source, os.O_RDONLY | os.O_CLOEXEC)) as fd:
            yield fd
    else:
        yield _descriptor(source)


@contextlib.contextmanager
def written_destination(destination: Destination) -> Iterator[int]:
    """Opens a descriptor to write to; a path gets the new file when the block ends without an
    error. Raises OSError."""
    if isinstance(destination, int):
        yield destination
    elif isinstance(destination, str | bytes | os.PathLike):
        with _draft(os.fsdecode(destination)) as fd:
            yield fd
    else:
        yield _descriptor(destination)


@contextlib.contextmanager
def _draft(path: str) -> Iterator[int]:
    directory, name = os.path.split(path)
    if os.path.isdir(path):
        raise Invalid(f"{path} is a directory: name the file that is to be written")
    if os.path.exists(path) and not os.path.isfile(path):
        with open(path, "wb", buffering=0) as device:  # /dev/null, a fifo: never replaced
            yield device.fileno()
        return
    with _naming(path):
        fd, draft = tempfile.mkstemp(prefix=f".{name[:200]}.", dir=directory or ".")
    try:
        os.fchmod(fd, _PERMISSIONS & ~_umask())
        yield fd
        with _naming(path):
            os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise
    finally:
        os.close(fd)


@contextlib.contextmanager
def _naming(path: str) -> Iterator[None]:
    """Names the file that the caller knows, not the draft, in errors."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None


def _umask() -> int:
    with open("/proc/self/status", encoding="utf-8", errors="replace") as status:
        fields = dict(line.split(":", 1) for line in status)
    return int(fields.get("Umask", "022"), 8)


def _descriptor(file: HasDescriptor) -> int:
    try:
        return file.fileno()
    except (AttributeError, OSError) as error:
        raise Invalid(f"{type(file).__name__} is no local file: {error}") from None
