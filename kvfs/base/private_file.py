"""Small files for their owner alone, whole at any time, and on disk once that is confirmed.

Content is written to a draft beside the file, which gets the file's name when it is on disk. Only a
kill leaves a draft behind.
"""

import os
from pathlib import Path

from kvfs.base.descriptors import closing
from kvfs.base.errors import Invalid


def read(path: Path, limit: int) -> str | None:
    """Returns up to `limit` characters of it; None: there is none. Raises Invalid (others may read
    it, it is longer, or no text), OSError."""
    try:
        with open(path, "rb") as file:
            if is_open_to_others(file.fileno()):
                raise Invalid(f"others may read or write {path}: chmod 600 it, and be its owner")
            data = file.read(limit + 1)
    except FileNotFoundError:
        return None
    if len(data) > limit or not data.isascii():
        raise Invalid(f"{path} is not what it should be: it is no text, or too long")
    return data.decode("ascii")


def is_open_to_others(fd: int) -> bool:
    """Returns whether anyone but root and the caller may read or write it."""
    found = os.fstat(fd)
    return bool(found.st_mode & 0o077) or found.st_uid not in (0, os.geteuid())


def make(path: Path, content: bytes) -> bool:
    """Makes the file; returns whether it was missing: of several processes that make it one wins.
    Raises OSError."""
    draft = _draft_of(path)
    try:
        _write(draft, content)
        os.link(draft, path)
    except FileExistsError:
        return False
    finally:
        draft.unlink(missing_ok=True)
    sync_directory(path.parent)
    return True


def replace(path: Path, content: bytes, draft_name: str = "", *, mode: int = 0o600) -> None:
    """Makes the file, or replaces its content at once. `draft_name`: that of a draft that the next
    one removes, for directories where no other names may be left. `mode`: others may read it.

    Raises OSError."""
    draft = path.with_name(draft_name) if draft_name else _draft_of(path)
    try:
        if draft_name:
            draft.unlink(missing_ok=True)
        _write(draft, content)
        os.chmod(draft, mode)
        os.rename(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Makes the names in a directory survive a power cut. Raises OSError."""
    with closing(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
        os.fsync(fd)


def _draft_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")


def _write(draft: Path, content: bytes) -> None:
    with open(draft, "xb", opener=_private) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)
