"""/dev/fuse: opening, mounting, unmounting, backing files, and messages that the server sends
unasked.

Notifications take kernel inode locks, which the kernel may hold while it waits for a reply of ours.
They are therefore written by a thread of their own from a bounded queue, never by the event loop (a
loop that wrote them deadlocked at once)."""

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
from kvfs.base.fuse_device import UNSERVED

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
"""The kernel no longer knows the name or inode, or the mount has gone."""
_FSOPEN, _FSCONFIG, _FSMOUNT = 430, 431, 432
"""System calls since Linux 5.2, numbered alike on every architecture but alpha."""
_FSCONFIG_CMD_CREATE: Final = 6
_CLOEXEC: Final = 1
"""FSOPEN_CLOEXEC and FSMOUNT_CLOEXEC."""
_libc: Final = ctypes.CDLL(None, use_errno=True)


def open_device() -> int:
    """Returns a non-blocking descriptor of /dev/fuse.

    Raises NotFound (no such device) or AccessDenied, each with its remedy. Where this process may
    not open the device, fusermount3 cannot help either: although it is set-uid, it opens the device
    with its caller's rights.
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
    """Mounts at `mountpoint` and returns the device's descriptor: by mount(2), or by fusermount3
    where privilege is missing.

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
    """Makes the filesystem that `mount_device` mounted there (without set-uid programs and devices)
    refuse changes, or accept them again.

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
    """Lets the set-uid helper mount; it sends the descriptor over a socket (its documented
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
    """Unmounts. With `lazy` the mount disappears at once and ends when its last user goes.

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
    """Unmounts a mount of ours if there is one; lazily if files are open: they lose their mount
    with us."""
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
    """Ends the connection of a mount whose server is dead, even if another process holds its
    device: calls that wait there fail. The mount stays in place, so that nobody mistakes the
    directory beneath for it. Raises AccessDenied."""
    held = os.open(mountpoint, os.O_PATH | os.O_CLOEXEC)
    try:
        done = _libc.umount2(os.fsencode(mountpoint), UMOUNT_NOFOLLOW | MNT_FORCE)
        if done != 0 and ctypes.get_errno() != errno.EBUSY:
            raise AccessDenied(f"the dead mount at {mountpoint} cannot be ended: run as root")
    finally:
        os.close(held)


def abort_if(mountpoint: str, device: str) -> str | None:
    """Does what `abort` does if that device is still mounted there. Returns the reason, in words,
    if it could not."""
    found = mounted(mountpoint)
    try:
        if found is not None and found.device == device:
            abort(mountpoint)
    except (AccessDenied, OSError) as error:
        return str(error)
    return None


def open_abort(mountpoint: str) -> int | None:
    """Returns a descriptor for the connection of the filesystem that is mounted there. One byte
    written to it aborts that connection and no other, wherever the mount is by then and even if it
    has gone. The descriptor keeps nothing busy. None if the kernel's list of connections cannot be
    reached."""
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
    """Names the means by which a watchdog may end a mount's connection here; empty: none."""
    if reaches_connections():
        return "the kernel's list of connections"
    return "its mountpoint" if os.geteuid() == 0 else ""


def reaches_connections() -> bool:
    """Returns whether this process may open the kernel's list of connections."""
    if os.path.ismount("/sys/fs/fuse/connections"):
        return True
    try:
        os.close(_connections())
    except OSError:
        return False
    return True


def _connections() -> int:
    """Opens the kernel's list of FUSE connections without mounting it anywhere (containers seldom
    have it). Raises OSError."""
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
    """A filesystem as it is mounted somewhere."""

    fstype: str
    device: str
    """MAJOR:MINOR, as /sys/class/bdi names it."""


def mounted(mountpoint: str) -> Mounted | None:
    """Returns the topmost filesystem mounted exactly at `mountpoint`, from /proc/self/mountinfo
    (proc(5)). Never touches the mount, so it also answers for one that is dead or ending."""
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
    """Returns whether the filesystem mounted there is a KVFS mount, alive or dead."""
    found = mounted(mountpoint)
    return found is not None and found.fstype == FSTYPE


def recover_stale(mountpoint: str) -> bool:
    """Detaches a KVFS mount whose server has gone (its calls give ENOTCONN). Returns whether there
    was one."""
    if not is_ours(mountpoint):
        return False
    try:
        # Not stat: the kernel may answer that from what it remembers of the dead server.
        os.statvfs(mountpoint)
    except OSError as e:
        if e.errno in UNSERVED:
            unmount(mountpoint, lazy=True)
            return True
        # Any other error is an answer: somebody serves it.
    return False


def set_readahead(mountpoint: str, kib: int) -> bool:
    """Raises the mount's readahead (INIT can only lower it below the kernel's default of 128 KiB).
    Returns False if the kernel's setting may not be written, or the mount has gone.

    Asks the mount nothing: a start that is given up ends the tasks that would answer."""
    found = mounted(mountpoint)
    if found is None:
        return False
    try:
        pathlib.Path(f"/sys/class/bdi/{found.device}/read_ahead_kb").write_text(str(kib))
    except OSError:
        return False
    return True


def backing_open(device: int, fd: int) -> int:
    """Registers the file open at `fd` as a backing file and returns its id.

    Raises OSError: EPERM without CAP_SYS_ADMIN, ELOOP if the filesystem beneath is stacked too
    deep."""
    request = bytearray(_BACKING_MAP.pack(fd, 0, 0))
    number: int = fcntl.ioctl(device, _BACKING_OPEN, request)
    return number


def backing_close(device: int, backing_id: int) -> None:
    """Withdraws the registration. Open handles keep the file itself."""
    fcntl.ioctl(device, _BACKING_CLOSE, bytearray(struct.pack("<I", backing_id)))


Item = tuple[bytes, Callable[[], None] | None]
"""A message to the kernel (empty: none), and a function to call when it has been written."""


class Notifier:
    """Writes messages to the kernel from a thread of its own; `first` ones precede all others."""

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
        """Queues one message. Raises Unavailable when the queue is full (the kernel has held a lock
        for long)."""
        self._offer((message, None))

    def flush(self, done: Callable[[], None]) -> None:
        """Has `done` called, in the notifying thread, when everything queued so far has been
        written. Raises Unavailable when the queue is full."""
        self._offer((b"", done))

    def abandon(self, last: bytes = b"") -> list[Item]:
        """Takes away the queued messages and returns them; the thread ends, with a `last` message,
        when the kernel lets go of it."""
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
        """Ends the thread and drops the queued messages: the mount has gone, and with it all that
        its kernel remembered, so waiting callers are told that they are done. Returns whether the
        thread ended in time (the kernel may hold it in a lock). Blocks the calling thread."""
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
    """Ends the connection to the kernel. The descriptor's number is given back only when every
    thread that writes to it has `ended`: until then it leads nowhere, so that no late message
    reaches a data file."""
    nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    os.dup2(nowhere, device, inheritable=False)
    os.close(nowhere)
    if ended:
        os.close(device)


def require_little_endian() -> None:
    """Raises NotSupported on a machine whose byte order the fast path's layouts do not fit."""
    if struct.pack("=H", 1) != struct.pack("<H", 1):
        raise NotSupported("the fast path knows little-endian machines only: use --mode libfuse")
