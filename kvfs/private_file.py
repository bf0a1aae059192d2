"""Small files that are for their owner alone, and whole at any time."""

import os
from pathlib import Path

from kvfs.errors import Invalid


def read(path: Path, limit: int) -> str | None:
    """Up to `limit` characters of it; None: there is none. Raises Invalid (others may read it, it
    is longer, or no text), OSError."""
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_mode & 0o077:
                raise Invalid(f"others may read or write {path}: chmod 600 it")
            data = file.read(limit + 1)
    except FileNotFoundError:
        return None
    if len(data) > limit or not data.isascii():
        raise Invalid(f"{path} is not what it should be: it is no text, or too long")
    return data.decode("ascii")


def make(path: Path, text: str) -> bool:
    """Make it; whether it was not there yet: of several that make it one wins. Raises OSError."""
    draft = _draft(path, text)
    try:
        os.link(draft, path)
    except FileExistsError:
        return False
    finally:
        draft.unlink()
    _sync_directory(path.parent)
    return True


def replace(path: Path, text: str) -> None:
    """Make it, or have this in it instead, at once. Raises OSError."""
    draft = _draft(path, text)
    try:
        os.rename(draft, path)
    except BaseException:
        draft.unlink()
        raise
    _sync_directory(path.parent)


def _draft(path: Path, text: str) -> Path:
    draft = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    with open(draft, "x", encoding="ascii", opener=_private) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return draft


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
