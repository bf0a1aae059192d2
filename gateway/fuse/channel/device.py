"""/dev/fuse: opening, mounting, unmounting, backing files, and messages that the server sends on
its own.

Notifications take kernel inode locks, which the kernel may hold while it waits for a reply of ours:
they are written by a thread of their own from a bounded queue, never by the event loop (a loop that
did deadlocked at once)."""

import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import pathlib
import queue
import shutil
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from kvfs.base.errors import AccessDenied, Busy, KvfsError, NotFound, NotSupported, Unavailable

log = logging.getLogger(__name__)
DEVICE: Final = "/dev/fuse"
FSTYPE: Final = "fuse.kvfs"
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT = 1, 2, 4, 32
MNT_FORCE: Final = 1
MNT_DETACH: Final = 2
UMOUNT_NOFOLLOW: Final = 8
_BACKING_OPEN: Final = 1 << 30 | 16 << 16 | 229 << 8 | 1
_BACKING_CLOSE: Final = 1 << 30 | 4 << 16 | 229 << 8 | 2
_BACKING_MAP: Final = struct.Struct("<iIQ")
_QUEUE_LIMIT: Final = 16_384
_FORGOTTEN: Final = (errno.ENOENT, errno.ENODEV, errno.ENOTDIR, errno.ENOTEMPTY)
"""The kernel does not know the name or inode (any more), or the mount has gone."""
_FSOPEN, _FSCONFIG, _FSMOUNT = 430, 431, 432
"""Since Linux 5.2, the same on every architecture but alpha."""
_FSCONFIG_CMD_CREATE: Final = 6
_CLOEXEC: Final = 1
"""FSOPEN_CLOEXEC and FSMOUNT_CLOEXEC."""
_libc: Final = ctypes.CDLL(None, use_errno=True)


def open_device() -> int:
    """A descriptor of /dev/fuse, non-blocking.

    Raises NotFound (no such device) or AccessDenied, each with its remedy. Where we may not open it
    fusermount3 cannot help either: set-uid as it is, it opens the device with its caller's rights.
    """
    try:
        return os.open(DEVICE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise NotFound(
            f"{DEVICE} does not exist: load the module (modprobe fuse), "
            "or give the container the device (--device /dev/fuse)"
        ) from None
    except OSError as e:
        if e.errno in (errno.EACCES, errno.EPERM):
            raise AccessDenied(
                f"{DEVICE} may not be opened: run as root, or allow it (chmod 666 {DEVICE})"
            ) from None
        if e.errno in (errno.ENXIO, errno.ENODEV):
            raise NotFound(f"{DEVICE} has no driver: load it with 'modprobe fuse'") from None
        raise


def mount_device(mountpoint: str, *, allow_other: bool, nosuid: bool, nodev: bool) -> int:
    """Mount at `mountpoint` and return the device's descriptor: mount(2), or without privilege
    fusermount3.

    Raises NotFound, AccessDenied, Busy, Unavailable."""
    device = open_device()
    flags = (MS_NOSUID if nosuid else 0) | (MS_NODEV if nodev else 0)
    root_mode = format(os.stat(mountpoint).st_mode & 0o170000, "o")
    options = f"fd={device},rootmode={root_mode},user_id={os.getuid()},group_id={os.getgid()},"
    options += "default_permissions" + (",allow_other" if allow_other else "")
    if _libc.mount(b"kvfs", os.fsencode(mountpoint), FSTYPE.encode(), flags, options.encode()) == 0:
        return device
    error = ctypes.get_errno()
    os.close(device)
    if error in (errno.EPERM, errno.EACCES):
        return _fusermount(mountpoint, allow_other)
    if error == errno.EBUSY:
        raise Busy(f"{mountpoint} is busy: something is mounted or open there")
    raise Unavailable(f"mount of {mountpoint} failed: {os.strerror(error)}")


def set_read_only(mountpoint: str, *, read_only: bool) -> None:
    """Have what `mount_device` mounted there, without set-uid programs and devices, refuse changes,
    or take them again.

    Raises Busy (a file is open for writing), AccessDenied, Unavailable."""
    flags = MS_REMOUNT | MS_NOSUID | MS_NODEV | (MS_RDONLY if read_only else 0)
    if _libc.mount(b"kvfs", os.fsencode(mountpoint), None, flags, None) == 0:
        return
    error = ctypes.get_errno()
    if error == errno.EBUSY:
        raise Busy(f"files are open for writing at {mountpoint}")
    if error == errno.EPERM:
        raise AccessDenied(f"{mountpoint} cannot be made read-only: run as root")
    raise Unavailable(f"remount of {mountpoint} failed: {os.strerror(error)}")


def _fusermount(mountpoint: str, allow_other: bool) -> int:
    """Let the set-uid helper mount; it sends the descriptor over a socket (its documented
    _FUSE_COMMFD)."""
    helper = shutil.which("fusermount3")
    if helper is None:
        raise AccessDenied("mounting needs root or the helper fusermount3: apt-get install fuse3")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    options = "fsname=kvfs,subtype=kvfs,default_permissions" + (
        ",allow_other" if allow_other else ""
    )
    with ours, theirs:
        result = subprocess.run(
            [helper, "-o", options, "--", mountpoint],
            env={**os.environ, "_FUSE_COMMFD": str(theirs.fileno())},
            pass_fds=[theirs.fileno()],
            stderr=subprocess.PIPE,
            timeout=10,
            check=False,
        )
        if result.returncode:
            why = result.stderr.decode(errors="replace").strip().splitlines()
            raise AccessDenied(
                f"{mountpoint} cannot be mounted on ({why[-1] if why else 'fusermount3 refused'}): "
                "run as root, or give the container --cap-add SYS_ADMIN"
            )
        ours.settimeout(10)
        _, fds, _, _ = socket.recv_fds(ours, 16, 1)
    if not fds:
        raise Unavailable("fusermount3 mounted but sent no descriptor")
    os.set_blocking(fds[0], False)
    os.set_inheritable(fds[0], False)
    return fds[0]


def unmount(mountpoint: str, *, lazy: bool) -> None:
    """Unmount; lazily: at once out of sight, ended when its last user goes.

    Raises Busy, NotFound (nothing is mounted there), AccessDenied.
    """
    flags = UMOUNT_NOFOLLOW | (MNT_DETACH if lazy else 0)
    if _libc.umount2(os.fsencode(mountpoint), flags) == 0:
        return
    error = ctypes.get_errno()
    helper = shutil.which("fusermount3")
    if error == errno.EPERM and helper:
        command = [helper, "-u", *(["-z"] if lazy else []), "--", mountpoint]
        result = subprocess.run(command, stderr=subprocess.PIPE, timeout=10, check=False)
        if result.returncode == 0:
            return
        raise AccessDenied(result.stderr.decode(errors="replace").strip() or "fusermount3 failed")
    if error == errno.EBUSY:
        raise Busy(f"{mountpoint} is in use: close what is open there, then try again")
    if error in (errno.EINVAL, errno.ENOENT):
        raise NotFound(f"nothing is mounted at {mountpoint}")
    raise Unavailable(f"unmount of {mountpoint} failed: {os.strerror(error)}")


def detach(mountpoint: str) -> None:
    """Unmount a mount of ours where it is there; where files are open, lazily: they lose their
    mount with us."""
    if not is_ours(mountpoint):
        return
    try:
        unmount(mountpoint, lazy=False)
    except Busy:
        log.warning("%s is in use: detached; files open there are closed", mountpoint)
        unmount(mountpoint, lazy=True)
    except KvfsError as e:
        log.warning("%s", e)


def abort(mountpoint: str) -> None:
    """End the connection of a mount whose server is dead, also where somebody holds its device:
    calls that wait there fail. It stays where it is, so that nobody takes what is below for it.
    Raises AccessDenied."""
    held = os.open(mountpoint, os.O_PATH | os.O_CLOEXEC)
    try:
        done = _libc.umount2(os.fsencode(mountpoint), UMOUNT_NOFOLLOW | MNT_FORCE)
        if done != 0 and ctypes.get_errno() != errno.EBUSY:
            raise AccessDenied(f"the dead mount at {mountpoint} cannot be ended: run as root")
    finally:
        os.close(held)


def abort_if(mountpoint: str, device: str) -> str | None:
    """As `abort`, where what is mounted there is that device still; why it could not be done, in
    words, where it could not."""
    found = mounted(mountpoint)
    try:
        if found is not None and found.device == device:
            abort(mountpoint)
    except (AccessDenied, OSError) as error:
        return str(error)
    return None


def open_abort(mountpoint: str) -> int | None:
    """A descriptor for the connection of what is mounted there: one byte written to it aborts that
    connection, wherever the mount is by then, and no other one, even if the mount has gone. It
    keeps nothing busy. None where the kernel's list of connections cannot be reached."""
    found = mounted(mountpoint)
    if found is None:
        return None
    name = f"{found.device.partition(':')[2]}/abort"
    flags = os.O_WRONLY | os.O_CLOEXEC
    with contextlib.suppress(OSError):
        return os.open(f"/sys/fs/fuse/connections/{name}", flags)
    try:
        connections = _connections()
    except OSError:
        return None
    try:
        return os.open(name, flags, dir_fd=connections)
    except OSError:
        return None
    finally:
        os.close(connections)


def can_abort() -> str:
    """By what means a watchdog may end a mount's connection here; empty: by none."""
    if os.path.ismount("/sys/fs/fuse/connections"):
        return "the kernel's list of connections"
    try:
        os.close(_connections())
    except OSError:
        return "its mountpoint" if os.geteuid() == 0 else ""
    return "the kernel's list of connections"


def _connections() -> int:
    """The kernel's list of FUSE connections, mounted nowhere (containers seldom have it). Raises
    OSError."""
    context = _system_call(_FSOPEN, b"fusectl", _CLOEXEC)
    try:
        _system_call(_FSCONFIG, context, _FSCONFIG_CMD_CREATE, None, None, 0)
        return _system_call(_FSMOUNT, context, _CLOEXEC, 0)
    finally:
        os.close(context)


def _system_call(number: int, *arguments: bytes | int | None) -> int:
    result: int = _libc.syscall(number, *arguments)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result


class Mounted(NamedTuple):
    """What is mounted somewhere."""

    fstype: str
    device: str
    """MAJOR:MINOR, as /sys/class/bdi names it."""


def mounted(mountpoint: str) -> Mounted | None:
    """What is mounted exactly at `mountpoint` (topmost), by /proc/self/mountinfo (proc(5)). Never
    touches the mount, so that it answers for one that is dead or ending too."""
    wanted = os.path.join(
        os.path.realpath(os.path.dirname(mountpoint)), os.path.basename(mountpoint)
    )
    found = None
    for line in pathlib.Path("/proc/self/mountinfo").read_bytes().splitlines():
        left, _, right = line.partition(b" - ")
        fields = left.split()
        where = fields[4].decode("unicode_escape").encode("latin-1")
        if where == os.fsencode(wanted):
            found = Mounted(right.split()[0].decode(), fields[2].decode())
    return found


def is_ours(mountpoint: str) -> bool:
    """Whether a KVFS mount is what is mounted there, alive or dead."""
    found = mounted(mountpoint)
    return found is not None and found.fstype == FSTYPE


def recover_stale(mountpoint: str) -> bool:
    """Detach a KVFS mount whose server has gone (its calls give ENOTCONN). Whether there was
    one."""
    if not is_ours(mountpoint):
        return False
    try:
        # Not stat: the kernel may answer that from what it remembers of the dead server.
        os.statvfs(mountpoint)
    except OSError as e:
        if e.errno in (errno.ENOTCONN, errno.ECONNABORTED):
            unmount(mountpoint, lazy=True)
            return True
        raise
    return False


def set_readahead(mountpoint: str, kib: int) -> bool:
    """Raise the mount's readahead (INIT can only lower it below the kernel's default of 128 KiB);
    False when the kernel's setting may not be written, or the mount has gone.

    It asks the mount nothing: a start that is given up ends those who would answer."""
    found = mounted(mountpoint)
    if found is None:
        return False
    try:
        pathlib.Path(f"/sys/class/bdi/{found.device}/read_ahead_kb").write_text(str(kib))
    except OSError:
        return False
    return True


def backing_open(device: int, fd: int) -> int:
    """Register the file open at `fd` as a backing file; its id.

    Raises OSError: EPERM without CAP_SYS_ADMIN, ELOOP where the filesystem beneath is stacked too
    deep."""
    request = bytearray(_BACKING_MAP.pack(fd, 0, 0))
    number: int = fcntl.ioctl(device, _BACKING_OPEN, request)
    return number


def backing_close(device: int, backing_id: int) -> None:
    """Take the registration back. Open handles keep the file itself."""
    fcntl.ioctl(device, _BACKING_CLOSE, bytearray(struct.pack("<I", backing_id)))


Item = tuple[bytes, Callable[[], None] | None]
"""A message to the kernel (empty: none), and whom to tell when it was written."""


class Notifier:
    """Writes messages to the kernel from a thread of its own, `first` ones before any other."""

    def __init__(self, device: int, first: Sequence[Item] = ()) -> None:
        self._device = device
        self._first = first
        # In C: for each message of a queue.Queue the loop would lose the GIL several times.
        self._queue: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvfs-notify", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether the thread has ended."""
        return not self._thread.is_alive()

    def tell(self, message: bytes) -> None:
        """One message. Raises Unavailable when the queue is full (the kernel holds a lock for
        long)."""
        self._offer((message, None))

    def flush(self, done: Callable[[], None]) -> None:
        """`done` is called, in the notifying thread, when everything queued so far has been
        written. Raises Unavailable when the queue is full."""
        self._offer((b"", done))

    def abandon(self, last: bytes = b"") -> list[Item]:
        """Take away what is queued; the thread ends when the kernel lets go of it, with a `last`
        message."""
        left = self._drain()
        if last:
            self._queue.put((last, None))
        self._queue.put(None)
        return left

    def _drain(self) -> list[Item]:
        left: list[Item] = []
        with contextlib.suppress(queue.Empty):
            while True:
                item = self._queue.get_nowait()
                if item is not None:
                    left.append(item)
        return left

    def _offer(self, item: Item) -> None:
        if self._queue.qsize() >= _QUEUE_LIMIT:
            raise Unavailable("the kernel takes no invalidations: a lock is held for long")
        self._queue.put(item)

    def close(self, deadline_s: float) -> bool:
        """End the thread, dropping what is queued: the mount has gone, and with it all that it
        remembered, as who waits is told. Whether it ended in time (the kernel may hold it in a
        lock); blocks the calling thread."""
        for _, done in self.abandon():
            if done is not None:
                done()
        self._thread.join(deadline_s)
        return self.ended

    def _run(self) -> None:
        for first in self._first:
            self._write(first)
        self._first = ()
        while (item := self._queue.get()) is not None:
            self._write(item)

    def _write(self, item: Item) -> None:
        message, done = item
        try:
            if message:
                os.write(self._device, message)
        except OSError as e:
            if e.errno not in _FORGOTTEN:
                log.warning("the kernel refused an invalidation: %s", e)
        if done is not None:
            done()


def retire(device: int, *, ended: bool) -> None:
    """End the connection to the kernel. The number is given back only when every thread that writes
    to it has `ended`: until then it leads nowhere, so that no late message meets a data file."""
    nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    os.dup2(nowhere, device, inheritable=False)
    os.close(nowhere)
    if ended:
        os.close(device)


def require_little_endian() -> None:
    """Raises NotSupported on a machine whose byte order the fast path's layouts do not fit."""
    if struct.pack("=H", 1) != struct.pack("<H", 1):
        raise NotSupported("the fast path knows little-endian machines only: use --mode libfuse")
