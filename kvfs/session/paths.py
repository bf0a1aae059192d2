"""Paths within KVFS, as callers give them: text or bytes, kept as they are."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Final

from kvfs.base import errors
from kvfs.base.errors import Invalid, KvfsError, NotFound

Path = str | bytes | os.PathLike[str] | os.PathLike[bytes]
"""Like `/cache/a/b`; the leading slash is optional. Text becomes bytes as in `os.fsencode`."""
_OF_NAMES: Final = (
    errors.CrossNamespace,
    errors.Exists,
    errors.Invalid,
    errors.IsADirectory,
    errors.NameTooLong,
    errors.NotADirectory,
    errors.NotEmpty,
    errors.NotFound,
    errors.NotPermitted,
    errors.Stale,
)


def parse(path: Path) -> tuple[bytes, ...]:
    """Returns the names that the path consists of; none for `/`. Empty parts and `.` are skipped.

    Raises Invalid for a NUL byte.
    """
    return parse_all((path,))[0]


def parse_all(given: Sequence[Path]) -> list[tuple[bytes, ...]]:
    """Like `parse`, for many: half its price. Raises Invalid, also what `several` raises."""
    found = []
    for raw in encode_all(given):
        if b"\0" in raw:
            raise Invalid(f"{shown(raw)}: a path holds no NUL byte")
        found.append(tuple([part for part in raw.split(b"/") if part and part != b"."]))
    return found


def parse_name(path: Path) -> tuple[tuple[bytes, ...], bytes]:
    """Returns the names of the directory, and the last one. Raises Invalid for `/` itself and for
    `..` at the end."""
    parts = parse(path)
    if not parts or parts[-1] == b"..":
        raise Invalid(f"{joined(parts)} has no name that could be given or taken")
    return parts[:-1], parts[-1]


def encode(path: Path) -> bytes:
    """Returns the bytes of a path. Raises Invalid for anything else."""
    try:
        if isinstance(path, str):
            return path.encode("utf-8", "surrogateescape")
        if isinstance(path, bytes):
            return path
        return os.fsencode(path)
    except UnicodeEncodeError as error:
        raise Invalid(f"{error.object!r}: {error.reason} at {error.start}") from None
    except TypeError:
        raise Invalid(f"a path is text or bytes, not {type(path).__name__}") from None


def encode_all(given: Sequence[Path]) -> list[bytes]:
    """Like `encode`, for many: half its price. Raises Invalid, also what `several` raises."""
    try:
        return [
            path.encode("utf-8", "surrogateescape") if type(path) is str else encode(path)
            for path in several(given)
        ]
    except UnicodeEncodeError:
        return [encode(path) for path in given]


def several(given: Sequence[Path]) -> Sequence[Path]:
    """Returns the same. Raises Invalid for a path in place of a list of them, which would be taken
    for one of letters."""
    if isinstance(given, str | bytes | os.PathLike):
        raise Invalid(f"{given!r} is one path: a list of paths is wanted")
    return given


def shown(path: bytes) -> str:
    """Returns a path in a message."""
    return path.decode(errors="backslashreplace")


def joined(parts: tuple[bytes, ...]) -> str:
    """Returns the path that consists of these names, in a message."""
    return shown(b"/" + b"/".join(parts))


@contextlib.contextmanager
def naming(*paths: tuple[bytes, ...]) -> Iterator[None]:
    """Makes errors about names tell the path, or from where to where, if they name none of them
    yet."""
    try:
        yield
    except _OF_NAMES as error:
        named, text = [joined(parts) for parts in paths], str(error)
        if any(path in text for path in named):
            raise
        raise _renamed(error, f"{' to '.join(named)}: {text}") from None


def _renamed(error: KvfsError, text: str) -> KvfsError:
    """Returns the same with another message. The caller raises it without a name for it: the error
    would hold the frame, which held the error, and a view of the engine with it until the garbage
    collector came."""
    renamed = type(error)(text)
    if isinstance(error, NotFound):
        renamed.at = error.at  # type: ignore[attr-defined]
    return renamed
