"""The store directory: the places of its parts, who may use it, and whether it was left in order.

| name | content |
|---|---|
| `format` | JSON: format version, store and node id; its presence makes the directory a store |
| `lock` | flock held by the daemon, its pid inside |
| `meta/` | the embedded engine |
| `data/xxx/` | data files, 4,096 directories made when first needed |
| `run/` | control socket, log, files shared between processes: `known`, `heard`, `gone`, `marks` |
| `run/leases/` | the leases of each process (`leases.table`) |
| `clean` | there while no daemon runs and the last one stopped in order |
| `recovered` | id of the boot in which data files and records were last known to agree |
| `node`, `cluster.key` | which node of a cluster it is, the cluster's secrets |

Invariants
- `format` is written first and atomically: a directory without it that holds anything else is not
  ours and is refused.
- It belongs to root or to the user of its node, and nobody else may write in it or in a directory
  above it (`kernel.ownership`).
- Everything is for the owner alone (0700, 0600): data files do not carry the permission bits of the
  files they hold.
"""

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from kvfs.base import private_file
from kvfs.base.errors import (
    AccessDenied,
    Busy,
    Corrupt,
    Invalid,
    KvfsError,
    NoSpace,
    NotFound,
    NotSupported,
    ReadOnly,
    Unavailable,
)
from kvfs.base.fuse_device import UNSERVED, unserved_mount
from kvfs.datastore.kernel.ownership import require_directory, trusted

T = TypeVar("T")

FORMAT: Final = 1
_FORMAT_DRAFT: Final = ".format.new"
_RECOVERED_DRAFT: Final = ".recovered.new"
_IGNORED: Final = frozenset({"lost+found", _FORMAT_DRAFT, "lock"})
"""Names that do not make a directory another program's: a filesystem's own, our first step when it
was cut short, and what `remove_unused` leaves when it was."""


_MADE: Final = (
    *("clean", "recovered", _RECOVERED_DRAFT),
    *("secret.key", "s3-credentials", "s3-lifecycle.lock"),
    *("node", "cluster.key"),
    *("format", "lock"),
)
"""The files of a store beside its directories, in the order in which they may go."""


class StoreFormat(msgspec.Struct, frozen=True):
    """The contents of `format`."""

    format: int
    store: str
    node: str


class Store:
    """An opened store directory. Opening takes no lock: readers beside a running daemon are
    welcome."""

    def __init__(self, root: Path, identity: StoreFormat) -> None:
        self.root = root
        self.identity = identity
        self.meta = root / "meta"
        self.data = root / "data"
        self.run = root / "run"
        self.socket = self.run / "control.sock"
        self.known = self.run / "known"
        self.heard = self.run / "heard"
        self.gone = self.run / "gone"
        self._clean = root / "clean"
        self._recovered = root / "recovered"
        self._lock_fd = -1

    def lock(self) -> None:
        """Makes this process the daemon of this store until `unlock` or its end.

        Raises Busy, naming the process that holds the store, and ReadOnly.
        """
        fd = guarded(self.root, lambda: os.open(self.root / "lock", _CREATE, 0o600))
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(fd)
            raise Busy(
                f"the store {self.root} is in use by process {holder}: stop it with `kvfs down "
                f"--store {self.root}`, or choose another directory with --store"
            ) from None
        os.pwrite(fd, f"{os.getpid():<{_PID_WIDTH}}\n".encode(), 0)  # in its old block, if any
        self._lock_fd = fd

    def place(self) -> str:
        """Returns an identity of the directory on this host, valid as long as the host runs: a copy
        is another, the same under another path is not. Raises OSError."""
        stat = os.stat(self.root)
        return f"{stat.st_dev:x}.{stat.st_ino:x}"

    def unlock(self) -> None:
        """Lets others lock the store; idempotent."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def mark_clean(self) -> None:
        """Marks the store as left in order. Call it last, after the engine was synced."""
        with open(self._clean, "wb") as file:
            os.fsync(file.fileno())
        private_file.sync_directory(self.root)

    def take_clean(self) -> bool:
        """Returns whether the last daemon stopped in order; from now on it counts as running. Needs
        the lock."""
        try:
            os.unlink(self._clean)
        except FileNotFoundError:
            return False
        private_file.sync_directory(self.root)
        return True

    def recovered_boot(self) -> int:
        """Returns the boot given to the last `mark_recovered`; 0: never."""
        try:
            return int(self._recovered.read_text(encoding="ascii"))
        except (FileNotFoundError, ValueError):
            return 0

    def mark_recovered(self, boot: int) -> None:
        """Records that in this boot data files and records agree, except for what the engine
        lists."""
        private_file.replace(self._recovered, b"%d" % boot, _RECOVERED_DRAFT)


_WHAT: Final = "the store"
_GET_FLAGS: Final = 0x80086601
_SET_FLAGS: Final = 0x40086602
_TOP_DIRECTORY: Final = 0x20000
"""FS_IOC_GETFLAGS, FS_IOC_SETFLAGS and FS_TOPDIR_FL of linux/fs.h."""
_PID_WIDTH: Final = 10
_CREATE = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC


def open_store(path: Path) -> Store:
    """Returns the store in `path`. Raises NotFound, AccessDenied (the caller may not enter it, or
    somebody else could change it), Invalid (another program's directory), NotSupported (another
    format), Corrupt."""
    root = path.absolute()
    try:
        _require_ours(root)
        raw = (root / "format").read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise _not_a_store(root) from None
    except PermissionError:
        raise AccessDenied(
            f"the store {root} belongs to another user: be root, or the user of its node, or use "
            "the files on its mount"
        ) from None
    try:
        identity = msgspec.json.decode(raw, type=StoreFormat)
    except msgspec.MsgspecError as error:
        raise Corrupt(
            f"{root / 'format'} is not readable ({error}): restore it from a backup, or choose "
            "another directory with --store"
        ) from None
    if identity.format != FORMAT:
        raise NotSupported(
            f"the store {root} has format {identity.format}, this version of KVFS knows {FORMAT}: "
            "use the version that made it"
        )
    return Store(root, identity)


def _require_ours(root: Path) -> None:
    """Requires the right owner of the store and of its parts, which may lie elsewhere behind links.
    Raises AccessDenied, OSError."""
    require_directory(root, _WHAT, trusted())
    for part in ("meta", "data", "run"):
        if os.path.islink(root / part):
            require_directory(root / part, _WHAT, trusted())


def is_locked(path: Path) -> bool:
    """Returns whether a node holds the lock file of a store."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def create_store(path: Path, store_id: str = "") -> Store:
    """Returns the store in `path`, made first if the directory is missing or empty, with this id
    (empty: a new one); idempotent.

    Raises Invalid for a directory that holds anything else, ReadOnly, NoSpace.
    """
    root = path.absolute()
    if not (root / "format").exists():
        guarded(root, lambda: _make(root, store_id or str(uuid.uuid4())))
    store = open_store(root)
    guarded(root, lambda: _make_directories(store))
    return store


def remove_unused(path: Path) -> None:
    """Removes a store that never held a file, all but its directory: for a start that failed. It
    stays if it is in use, or if there is a data file."""
    root = path.absolute()
    with contextlib.suppress(OSError, KvfsError):
        (root / _FORMAT_DRAFT).unlink(missing_ok=True)
        store = open_store(root)
        store.lock()
        try:
            if any(store.data.glob("*/*")):
                return
            for directory in (store.meta, store.data, store.run):
                shutil.rmtree(directory, ignore_errors=True)
            for name in _MADE:
                (root / name).unlink(missing_ok=True)
        finally:
            store.unlock()


def _make(root: Path, store_id: str) -> None:
    if root.exists() and not root.is_dir():
        raise Invalid(f"{root} is not a directory: choose another store with --store")
    if root.exists():
        _require_empty(root)
        _make_private(root)
    require_directory(root, _WHAT, trusted(), make=True)
    _require_empty(root)
    _identify(root, store_id)


def _require_empty(root: Path) -> None:
    if foreign := sorted(set(os.listdir(root)) - _IGNORED):
        raise _foreign(root, foreign[0])


def _make_private(root: Path) -> None:
    """Closes an empty directory to others. A sticky one is meant for others, and is refused when it
    is examined."""
    found = os.stat(root)
    if found.st_uid == os.geteuid() and not found.st_mode & stat.S_ISVTX:
        os.chmod(root, 0o700)


def be_new_node(store: Store) -> None:
    """Makes the store a node that its cluster has never seen, from its next opening on: its
    metadata replica goes. Needs the lock. Raises OSError."""
    shutil.rmtree(store.meta)
    _identify(store.root, store.identity.store)


def _identify(root: Path, store: str) -> None:
    identity = StoreFormat(format=FORMAT, store=store, node=str(uuid.uuid4()))
    private_file.replace(root / "format", msgspec.json.encode(identity) + b"\n", _FORMAT_DRAFT)


def _make_directories(store: Store) -> None:
    for directory in (store.meta, store.data, store.run):
        directory.mkdir(mode=0o700, exist_ok=True)
    _spread(store.data)


def _spread(data: Path) -> None:
    """Asks ext4 to give each directory in `data` a block group of its own (chattr +T).

    ext4 does not use an inode again for some minutes after its deletion and looks past every such
    one when it makes a file in the same group: under churn a create costs 16 to 27 us with this
    flag and 73 to 544 us without. Other filesystems know no such flag and need none.
    """
    fd = os.open(data, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    flags = bytearray(8)
    try:
        fcntl.ioctl(fd, _GET_FLAGS, flags)
        value = int.from_bytes(flags[:4], sys.byteorder) | _TOP_DIRECTORY
        fcntl.ioctl(fd, _SET_FLAGS, value.to_bytes(8, sys.byteorder))
    except OSError:
        return
    finally:
        os.close(fd)


def _not_a_store(root: Path) -> KvfsError:
    try:
        names = sorted(set(os.listdir(root)) - _IGNORED)
    except OSError:
        names = []
    if names:
        return _foreign(root, names[0])
    return NotFound(f"there is no store in {root}: make one with `kvfs up --store {root}`")


def _foreign(root: Path, name: str) -> Invalid:
    return Invalid(
        f"{root} holds files that are not of KVFS ('{name}' for one): "
        "choose an empty directory with --store"
    )


def guarded(root: Path, step: Callable[[], T]) -> T:
    """Runs a step that writes, with the system's refusals translated."""
    try:
        return step()
    except OSError as error:
        raise translate(error, root) from error


def translate(error: OSError, root: Path) -> KvfsError:
    """Returns the domain error for a refusal of the system in a store directory; `error` itself if
    it has no KVFS meaning."""
    if error.errno == errno.EROFS:
        return ReadOnly(f"the store {root} is on a read-only filesystem: remount it read-write")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoSpace(f"the filesystem of the store {root} is full: free some space on it")
    if error.errno in (errno.EACCES, errno.EPERM):
        return ReadOnly(f"no permission to write in the store {root}: run as its owner")
    if error.errno == errno.EIO:
        return Corrupt(f"the disk of the store {root} reports an error: see the kernel's log")
    if error.errno in UNSERVED:
        return Unavailable(f"{root}: {unserved_mount(str(root))}")
    return Invalid(f"the store {root} cannot be used: {error.strerror or error}")
