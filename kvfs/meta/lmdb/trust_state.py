"""The users of the engine's file, and whether it can be trusted: the files `state` and `users`.

`state` holds the boot (`boot.boot_of`) in which the file was last opened for writing, and whether
it was synced and closed since. In another boot, a file that was not is rebuilt before LMDB sees it.
The lock on `state` serialises opening, closing, rotating and rebuilding; each writer holds a shared
lock on `users` for life, so an exclusive one means to be alone. The system drops both locks when a
process ends, however it ends.
"""

import contextlib
import fcntl
import hashlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from kvfs.meta.lmdb.magic import refuse_later

_STATE: Final = struct.Struct("<8sQ?")
_MAGIC: Final = b"KVFSEND1"
_DIGEST_SIZE: Final = 16


class TrustState(NamedTuple):
    """The state in which the file was left."""

    boot: int
    clean: bool
    """Whether its last writer synced and closed it."""


def read_state(path: Path) -> TrustState | None:
    """Returns the state; None if there is none, or it was torn by a power cut. Raises NotSupported
    if a later version of KVFS wrote it, OSError."""
    try:
        stored = path.read_bytes()
    except FileNotFoundError:
        return None
    refuse_later(path, _MAGIC, stored[: len(_MAGIC)])
    packed, digest = stored[: _STATE.size], stored[_STATE.size :]
    if len(packed) < _STATE.size or digest != _digest(packed):
        return None
    magic, boot, clean = _STATE.unpack(packed)
    return TrustState(boot, clean) if magic == _MAGIC else None


class StateFile:
    """A writer's hold on both files; made when missing. Raises OSError."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "state"
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._fd = os.open(self.path, flags, 0o600)
        try:
            self._users = os.open(directory / "users", flags, 0o600)
        except BaseException:
            os.close(self._fd)
            raise

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Locks the state alone among processes: waits while another opens, closes, rotates or
        rebuilds."""
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    @contextlib.contextmanager
    def try_locked(self) -> Iterator[bool]:
        """Like `locked`, without waiting: False when another has it."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        try:
            yield True
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def try_alone(self) -> bool:
        """Returns whether no other writer has the file open; then none can until the state is
        unlocked."""
        try:
            fcntl.flock(self._users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    @contextlib.contextmanager
    def alone(self) -> Iterator[bool]:
        """Yields whether this is the only writer that has the file open; no other opens it while
        the block lasts. The caller counts as a writer before and after."""
        with self.locked():
            try:
                yield self.try_alone()
            finally:
                self.share()

    def share(self) -> None:
        """Counts as a writer from now on. The state must be locked."""
        fcntl.flock(self._users, fcntl.LOCK_SH)

    def read(self) -> TrustState | None:
        return read_state(self.path)

    def write(self, state: TrustState) -> None:
        """Writes the state; it is on disk when this returns."""
        packed = _STATE.pack(_MAGIC, state.boot, state.clean)
        os.pwrite(self._fd, packed + _digest(packed), 0)
        os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)
        os.close(self._users)


def _digest(packed: bytes) -> bytes:
    return hashlib.blake2b(packed, digest_size=_DIGEST_SIZE).digest()
