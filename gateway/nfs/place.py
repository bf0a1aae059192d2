"""The directory in which the door keeps what Ganesha sees: `run/nfs` of the store, for the daemon's
user alone. `jail_process` explains its use.

| below it | content | lasts |
|---|---|---|
| jail | where Ganesha's root is mounted, in its own mount namespace | empty |
| etc | the system's tables that a C library asks for, and the table of mounts | a run |
| dev, run/blkid | a stable name for each view's device | a run |
| run | the port mapper's socket | a run |
| conf | Ganesha's configuration | a run |
| exports | the views; a shared mount of a tmpfs, which root alone may enter | a run |
| runs | locked by the process of the jail | a run |
| state (`nfs` of the store) | which clients had state, for their return after a restart | always |

A handle of Ganesha's names the filesystem by its UUID, as libblkid calls it. To keep that the same
after each start, and on each node, `dev` has a device file of the view's number and libblkid's
cache a UUID for it. `dev` is mounted without devices: the cache is believed when such a file cannot
be opened.
"""

import ctypes
import fcntl
import os
import secrets
import select
import shutil
import stat
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from gateway.fuse.channel import device
from kvfs.base.errors import Busy, KvfsError, Unavailable

_TABLES: Final = (
    *("passwd", "group", "nsswitch.conf", "ld.so.cache", "hosts", "netconfig"),
    *("services", "protocols", "localtime", "idmapd.conf", "resolv.conf", "host.conf"),
)
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_SHARED = 2, 4, 4096, 1 << 20
_LEFT_S: Final = 10.0
_LOOK_S: Final = 0.02
_libc: Final = ctypes.CDLL(None, use_errno=True)


class NfsDirectories:
    """The directories of one node. `secrets`: the parts of the paths to exports, and to everything
    writable, which no client of NFS knows."""

    def __init__(self, run: Path, state: Path) -> None:
        """`run`: the store's directory for a run's files; `state`: for those that outlast it."""
        self.root = run / "nfs"
        self._state = state
        self.secrets = secrets.token_hex(16), secrets.token_hex(16)
        self.exports = self.root / "exports"
        self._names: dict[int, str] = {}
        """The names of the views' directories, by the exports' numbers."""
        self._tables: dict[str, tuple[int, ...]] = {}
        """The copied state of the system's tables."""
        self._mounts: MountTable | None = None
        self._mounted: set[int] = set()

    def wait_until_left(self) -> None:
        """Returns when no server of a killed node runs there. Raises Busy, OSError."""
        try:
            fd = os.open(self.root / "runs", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            deadline = time.monotonic() + _LEFT_S
            while not _is_free(fd):
                if time.monotonic() > deadline:
                    raise Busy("the NFS-Ganesha of a node that was killed does not end")
                time.sleep(_LOOK_S)
        finally:
            os.close(fd)

    def make(self) -> None:
        """Makes the directories, replacing what a killed node left. Raises Unavailable if a mount
        of that cannot be removed, OSError."""
        self.clear()
        self.root.mkdir(mode=0o700)
        for name in ("jail", "etc", "dev", "run", "run/blkid", "conf", "exports", "state"):
            (self.root / name).mkdir(mode=0o755)
        self._mount(b"kvfs-nfs", self.root / "dev", _MS_NOSUID | _MS_NODEV, "tmpfs", "size=1m")
        for name in ("null", "urandom"):
            (self.root / "dev" / name).touch()
        self._state.mkdir(mode=0o700, exist_ok=True)
        self._mount(os.fsencode(self._state), self.root / "state", _MS_BIND)
        flags = _MS_NOSUID | _MS_NODEV
        self._mount(b"kvfs-nfs", self.exports, flags, "tmpfs", "mode=700,size=1m")
        self._mount(b"none", self.exports, _MS_SHARED)
        self._tables.clear()
        self.copy_tables()
        self.list_views({})

    def go_on(self, secrets: tuple[str, str], views: Mapping[int, str]) -> None:
        """Goes on with the directories of an earlier daemon. `views`: where they are mounted, by
        the exports' numbers."""
        self.secrets = secrets
        self._names = {number: os.path.basename(where) for number, where in views.items()}

    def clear(self) -> None:
        """Unmounts and removes all of it except the state. Raises Unavailable, OSError."""
        if self._mounts is not None:
            self._mounts.close()
            self._mounts = None
        if not self.root.exists():
            return
        for mounted in sorted(_mounted_below(self.root), key=len, reverse=True):
            try:
                device.unmount(mounted, lazy=True)
            except KvfsError as error:
                raise Unavailable(f"{mounted}: {error}") from error
        if left := _mounted_below(self.root):  # never remove what is mounted there
            raise Unavailable(f"{left[0]} is mounted still: unmount it")
        shutil.rmtree(self.root)

    def view(self, number: int) -> Path:
        """Returns the directory of an export's view, made if missing."""
        name = self._names.setdefault(number, secrets.token_hex(16))
        directory = self.exports / name
        directory.mkdir(mode=0o755, exist_ok=True)
        return directory

    def mounted(self) -> set[int]:
        """Returns the exports whose views are mounted now. The table of mounts is read only if it
        has changed."""
        if self._mounts is None:
            self._mounts = MountTable()
        if self._mounts.have_changed():
            found = set(_mounted_below(self.exports))
            place = os.path.realpath(self.exports)
            names = self._names.items()
            self._mounted = {each for each, name in names if os.path.join(place, name) in found}
        return self._mounted

    def path(self, number: int) -> str:
        """Returns the directory of an export's view as Ganesha sees it."""
        return f"/{self.secrets[0]}/{self._names[number]}"

    def list_views(self, identities: Mapping[int, uuid.UUID]) -> None:
        """Lists the mounted views of these exports, with the identities of their filesystems, as
        all that Ganesha finds in its table of mounts (fstab(5)) and among block devices. Raises
        OSError; Unavailable if one is not mounted."""
        mounts, devices = [], []
        for number, identity in identities.items():
            name = f"/dev/kvfs{number}"
            directory = self.exports / self._names[number]
            if not device.is_ours(str(directory)):
                raise Unavailable(f"the view of export {number} has gone")
            device_number = os.lstat(directory).st_dev
            self._make_device(name, device_number)
            mounts.append(f"{name} {self.path(number)} fuse.kvfs rw 0 0\n")
            devices.append(
                f'<device DEVNO="0x{device_number:04x}" TIME="{int(time.time())}.0"'
                f' UUID="{identity}" TYPE="ext4">{name}</device>\n'
            )
        self._write("run/blkid/blkid.tab", "".join(devices))
        self._write("etc/mtab", "".join(mounts))

    def _make_device(self, name: str, number: int) -> None:
        path = self.root / name.removeprefix("/")
        path.unlink(missing_ok=True)
        os.mknod(path, stat.S_IFBLK | 0o600, number)

    def configure(self, text: str) -> None:
        """Writes Ganesha's configuration, whole at every moment: half of one would end all
        exports."""
        self._write("conf/ganesha.conf", text)

    def copy_tables(self) -> None:
        """Copies the system's tables as they are now; if none has changed, this only examines each.
        Raises OSError."""
        for name in _TABLES:
            source = Path("/etc") / name
            try:
                status = source.stat()
                state = status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
                if self._tables.get(name) == state:
                    continue
                content = source.read_bytes()
            except OSError:
                continue
            self._write(f"etc/{name}", content)
            self._tables[name] = state

    def _write(self, name: str, content: str | bytes) -> None:
        target = self.root / name
        fresh = target.with_name(f".{target.name}.new")
        fresh.write_bytes(content.encode() if isinstance(content, str) else content)
        fresh.replace(target)

    def _mount(
        self, source: bytes, target: Path, flags: int, kind: str = "", options: str = ""
    ) -> None:
        arguments = source, os.fsencode(target), kind.encode(), flags, options.encode()
        if _libc.mount(*arguments) < 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error), str(target))


def _is_free(fd: int) -> bool:
    """Returns whether nobody has a lock on the file."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class MountTable:
    """Tells whether anything was mounted or unmounted, for one system call (proc(5))."""

    def __init__(self) -> None:
        self._table = os.open("/proc/self/mountinfo", os.O_RDONLY | os.O_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._table, select.POLLPRI)
        self._is_read = False

    def have_changed(self) -> bool:
        """Returns whether it changed since the last call; true the first time."""
        changed = bool(self._poll.poll(0)) or not self._is_read
        self._is_read = True
        return changed

    def close(self) -> None:
        """Closes the table."""
        os.close(self._table)


def _mounted_below(root: Path) -> list[str]:
    """Returns the mounts below it, by /proc/self/mountinfo (proc(5))."""
    prefix = os.fsencode(os.path.realpath(root)) + b"/"
    found = []
    with open("/proc/self/mountinfo", "rb") as table:
        for line in table:
            where = line.split()[4].decode("unicode_escape").encode("latin-1")
            if where.startswith(prefix):
                found.append(os.fsdecode(where))
    return found
