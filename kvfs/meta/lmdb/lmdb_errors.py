"""Refusals by LMDB and the system, as domain errors that name the file and the remedy."""

import errno
import os
from pathlib import Path
from typing import Final

import lmdb

from kvfs.base.errors import Busy, Corrupt, KvfsError, ReadOnly, Unavailable
from kvfs.meta.lmdb.reserve import disk_full, is_full, map_full

_DAMAGE: Final = (
    lmdb.CorruptedError,
    lmdb.InvalidError,
    lmdb.PageNotFoundError,
    lmdb.PanicError,
    lmdb.VersionMismatchError,
    lmdb.IncompatibleError,
)


def translated(error: lmdb.Error | OSError, path: Path) -> KvfsError:
    """Returns the error to raise for an error of the metadata in the directory `path`."""
    if isinstance(error, OSError):
        return _of_system(error, path)
    return _of_lmdb(error, path)


def _of_lmdb(error: lmdb.Error, path: Path) -> KvfsError:
    file = path / "data.mdb"
    what = str(error)
    if "already open in this process" in what:
        return Busy(
            f"the metadata in {path} are open in this process already, by a node or a client: use "
            "that one, or another process"
        )
    if os.strerror(errno.EAGAIN) in what:
        return _number_taken(path)
    if isinstance(error, lmdb.MapFullError):
        return map_full(path)
    if isinstance(error, lmdb.MapResizedError):
        return Unavailable(
            f"the metadata file {file} is larger than what this process may map: lift its limit of"
            " address space (ulimit -v) and restart it"
        )
    if is_full(error, path):
        return disk_full(path)
    if isinstance(error, lmdb.ReadonlyError) or "Read-only file system" in what:
        return ReadOnly(
            f"cannot write the metadata in {path}: {what}; check its permissions and mount"
        )
    if isinstance(error, _DAMAGE):
        return Corrupt(f"the metadata file {file} is damaged ({what}): restart to rebuild it")
    return Unavailable(f"the metadata file {file} cannot be used: {what}")


def _number_taken(path: Path) -> Busy:
    """LMDB tells readers apart by the numbers of their processes (`mdb_reader_pid`), and each PID
    namespace has its own."""
    return Busy(
        f"the metadata in {path} are read by another container's process whose number is"
        f" {os.getpid()} too: run this one where it sees that one's processes (docker --pid"
        " container:NAME, compose pid, Kubernetes hostPID), or use the mount or S3"
    )


def _of_system(error: OSError, path: Path) -> KvfsError:
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return ReadOnly(
            f"cannot write the metadata in {path}: {error.strerror}; check permissions and mount"
        )
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return disk_full(path)
    return Unavailable(f"the metadata directory {path} cannot be used: {error.strerror}")
