"""The core's errors as the ones that callers of Python's own files expect."""

import contextlib
import os
from collections.abc import Iterator

from gateway.fuse.codec.errno_map import errno_of
from kvfs.base.errors import KvfsError


@contextlib.contextmanager
def os_errors(path: str, to: str | None = None) -> Iterator[None]:
    """Raises FileNotFoundError, FileExistsError and other OSErrors that name `path`, or lead from
    `path` to `to`, if the block raises a KvfsError; its message is kept.

    It does so for errors of the disk too that name nothing, or a file by its number in the store.
    Those that name an absolute path stay as they are."""
    try:
        yield
    except KvfsError as error:
        code = errno_of(error)
        raise _named(code, f"{os.strerror(code)} ({error})", path, to) from error
    except OSError as error:
        if error.errno is None or _is_absolute(error.filename):
            raise
        raise _named(error.errno, error.strerror, path, to) from error


def _named(code: int, text: str | None, path: str, to: str | None) -> OSError:
    """Returns an OSError, which chooses its own subclass for the errno."""
    return OSError(code, text, path, None, to)


def _is_absolute(name: object) -> bool:
    return isinstance(name, str | bytes) and os.path.isabs(name)
