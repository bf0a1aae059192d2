"""Runs NFS-Ganesha in a mount namespace in which nothing lies but the exports.

    python -I -S -c BEGIN PACKAGES VERSION PID ROOT EXPORTS SECRET GUARD GANESHA
        LISTENER WAIT_S ABOUT

VERSION is that of these arguments and of what is said through the standard streams: where it is
another than this program's, the program was replaced beneath the running daemon.

The reason: Ganesha 4.3 checks no name of NFSv3 for slashes, so that `../x` and `/etc/x` lead out of
an export, and takes any filesystem that it can see beside an export (even the one of its
mountpoint) for part of it, all of whose handles it then decodes. So anything that it must not give
away is absent: its root is a read-only tmpfs with the system's programs, without /proc; its table
of mounts lists the exports alone, each below a name of its own in the directory EXPORTS, which only
root may enter, as only root may enter SECRET, which holds everything writable. Nobody on whose
behalf Ganesha acts is root there: version 3 does not serve exports in which root is not squashed
(`ganesha_config`). If GUARD is `guarded` (version 3 is served), a name with a slash is refused
(`name_guard`).

PID is the daemon's. Ganesha ends with this process, which ends when it is told to, with Ganesha, or
WAIT_S seconds after the daemon has died, if no other one has taken Ganesha over till then
(`jail_keeper`). LISTENER is the socket for callers, an inherited descriptor; ABOUT (JSON) is for
the next daemon. If the daemon ends it, Ganesha is asked to end. Without a daemon Ganesha is killed,
and then the views are ended: by an error of theirs clients would give up. This process imports
nothing of KVFS but `name_guard` and `jail_keeper`.

Below ROOT, a directory of the daemon's, lie `jail` (empty), `etc`, `dev`, `run`, `conf`, `exports`
(a shared mount, below which the daemon mounts and unmounts views), `state`, and `runs`, a file on
which this process has a lock (flock(2)) until it has ended.
"""

import ctypes
import fcntl
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable

from gateway.nfs import name_guard
from gateway.nfs.jail_keeper import JailKeeper

BEGIN = (
    "import sys; sys.path.append(sys.argv.pop(1));"
    " from gateway.nfs import jail_process; sys.exit(jail_process.main())"
)
"""The program: it imports the standard library's modules first, then those of KVFS."""
VERSION = 2
"""Grows by one when any of that changes."""
_CLONE_NEWNS = 0x20000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_REMOUNT = 1, 2, 4, 32
_MS_BIND, _MS_REC, _MS_SLAVE = 4096, 16384, 1 << 19
_MNT_DETACH = 2
_PR_SET_PDEATHSIG, _PR_CAPBSET_READ, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 23, 24, 38
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_KEPT = (0, 1, 2, 3, 4, 6, 7, 10, 24, 27)
"""Capabilities: chown, DAC override and read-search, fowner, fsetid, setgid, setuid, binding low
ports, resource limits, mknod."""
_LAST_CAPABILITY = 63
_MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(8 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(16 << 20),
    "MALLOC_ARENA_MAX": "8",
}
"""Settings by which buffers of READs and WRITEs are reused: the C library would map each anew, for
the kernel to fill with zeros, as their size is just what it maps by itself (mallopt(3))."""
_LOOK_MS = 1000
_WAITING_LOOK_MS = 100
_STOP_S = 5
_libc = ctypes.CDLL(None, use_errno=True)


def main() -> int:
    """Runs Ganesha and returns the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.argv[1] != str(VERSION):
        _say("the program was replaced beneath the running node: restart the node")
        return 70
    daemon = int(sys.argv[2])
    root, exports, secret, guarded, program, listener, wait_s, about = sys.argv[3:11]
    _runs = _locked(f"{root}/runs")
    keeper = JailKeeper(daemon, socket.socket(fileno=int(listener)), float(wait_s), about)
    if not keeper.until_begun():
        return 0
    ours, theirs = socket.socketpair()
    channel = theirs if guarded == "guarded" else None
    child = os.fork()
    if child == 0:
        try:
            _become_ganesha(root, exports, secret, program, channel)
        except OSError as error:
            _say(f"NFS-Ganesha cannot be started: {error}")
        os._exit(70)
    keeper.began(child)
    _say(f"pid {child}")
    theirs.close()
    name_guard.guard(ours, child)
    _wait(child, keeper)
    if not keeper.has_daemon:  # a killed thread of Ganesha may wait for a view until that ends
        keeper.end_views()
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) & 0xFF


def _wait(child: int, keeper: JailKeeper) -> None:
    """Returns when Ganesha has ended, or is killed."""
    ended = os.pidfd_open(child)
    asked_until = 0.0
    while True:
        waiting = select.poll()
        for each in (ended, keeper.listener.fileno(), *keeper.watched()):
            waiting.register(each, select.POLLIN)
        pause_ms = _WAITING_LOOK_MS if asked_until or not keeper.has_daemon else _LOOK_MS
        found = dict(waiting.poll(pause_ms))
        if ended in found:
            return
        if keeper.listener.fileno() in found:
            keeper.serve()
        if keeper.is_ending and keeper.in_order and keeper.has_daemon:
            if not asked_until:
                os.kill(child, signal.SIGTERM)
                asked_until = time.monotonic() + _STOP_S
            if time.monotonic() < asked_until:
                continue
        if keeper.is_ending or keeper.has_waited():
            os.kill(child, signal.SIGKILL)
            return


def _locked(path: str) -> int:
    """Returns a descriptor with a lock on the file, until it is closed."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    return fd


def _say(text: str) -> None:
    """Writes to the daemon's log, if there is room: perhaps nobody reads it now."""
    room = select.poll()
    room.register(2, select.POLLOUT)
    if not room.poll(0):
        return
    try:
        os.write(2, f"{text}\n".encode())
    except OSError:
        pass


def _become_ganesha(
    root: str, exports: str, secret: str, program: str, channel: socket.socket | None
) -> None:
    """Makes the child NFS-Ganesha. `channel`: to its guard. Raises OSError."""
    parent = os.getppid()
    _call(_libc.prctl, _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(70)
    _call(_libc.unshare, _CLONE_NEWNS)
    _mount(None, "/", None, _MS_REC | _MS_SLAVE)
    _furnish(root, f"{root}/jail", exports, secret)
    _enter(f"{root}/jail")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    _give_up_capabilities()
    place = f"/{secret}"
    arguments = [program, "-F", "-L", "STDERR", "-N", "NIV_EVENT", "-E", str(epoch())]
    arguments += ["-f", f"{place}/conf/ganesha.conf", "-p", f"{place}/state/ganesha.pid"]
    nowhere = os.open("/dev/null", os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(2, 1)
    kept = -1 if channel is None else channel.fileno()  # until the program is executed
    os.closerange(3, max(kept, 3))
    os.closerange(max(kept + 1, 3), 1 << 20)
    if channel is not None:
        name_guard.begin(channel)
    environment = {"PATH": "/usr/sbin:/usr/bin", "LANG": "C.UTF-8", **_MALLOC}
    os.execve(program, arguments, environment)  # noqa: S606  no shell


def epoch() -> int:
    """Returns a number that tells this start from all others, on this node and the others of a
    cluster: write verifiers and the numbers of clients are made of it. Ganesha's own would be the
    time in seconds, which is the same for two starts within one, or if the clock was set back."""
    return int.from_bytes(os.urandom(4), "big") or 1


def _furnish(root: str, jail: str, exports: str, secret: str) -> None:
    _mount("kvfs-nfs", jail, "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=755,size=1m")
    for name in ("usr", "etc", "dev", "run", "tmp", "var"):
        os.mkdir(f"{jail}/{name}", 0o755)
    for name in (exports, secret):
        os.mkdir(f"{jail}/{name}", 0o700)
    os.symlink("/run", f"{jail}/var/run")
    # A file there tells Ganesha that the kernel has locks of open files (F_OFD_SETLK).
    _mount("kvfs-nfs", f"{jail}/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=700,size=64k")  # noqa: S108
    _bind("/usr", f"{jail}/usr", _MS_RDONLY | _MS_NOSUID)
    for name in ("lib", "lib64", "bin", "sbin"):
        if os.path.islink(f"/{name}"):
            os.symlink(os.readlink(f"/{name}"), f"{jail}/{name}")
        elif os.path.isdir(f"/{name}"):
            os.mkdir(f"{jail}/{name}")
            _bind(f"/{name}", f"{jail}/{name}", _MS_RDONLY | _MS_NOSUID)
    for name in ("etc", "dev", "run"):
        _bind(f"{root}/{name}", f"{jail}/{name}", _MS_RDONLY | _MS_NODEV)
    for name in ("null", "urandom"):
        _mount(f"/dev/{name}", f"{jail}/dev/{name}", None, _MS_BIND)
    for name in ("conf", "state"):
        os.mkdir(f"{jail}/{secret}/{name}")
    _bind(f"{root}/conf", f"{jail}/{secret}/conf", _MS_RDONLY)
    _bind(f"{root}/state", f"{jail}/{secret}/state", _MS_NODEV)
    _mount(f"{root}/exports", f"{jail}/{exports}", None, _MS_BIND | _MS_REC)
    _mount(None, f"{jail}/{exports}", None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY)


def _enter(jail: str) -> None:
    """Makes it the root, and leaves nothing of the old one."""
    os.chdir(jail)
    number = _SYS_PIVOT_ROOT[os.uname().machine]
    _call(_libc.syscall, number, b".", b".")
    _call(_libc.umount2, b".", _MNT_DETACH)
    _mount(None, "/", None, _MS_REMOUNT | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)


def _give_up_capabilities() -> None:
    for capability in range(_LAST_CAPABILITY + 1):
        if capability in _KEPT or _libc.prctl(_PR_CAPBSET_READ, capability, 0, 0, 0) < 0:
            continue  # the kernel knows no such capability
        _call(_libc.prctl, _PR_CAPBSET_DROP, capability, 0, 0, 0)
    _call(_libc.prctl, _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def _bind(source: str, target: str, flags: int) -> None:
    _mount(source, target, None, _MS_BIND)
    if flags:
        _mount(None, target, None, _MS_REMOUNT | _MS_BIND | flags)


def _mount(
    source: str | None, target: str, kind: str | None, flags: int, data: str | None = None
) -> None:
    texts = [None if each is None else os.fsencode(each) for each in (source, target, kind)]
    _call(_libc.mount, *texts, flags, None if data is None else data.encode(), what=target)


def _call(function: Callable[..., int], *arguments: object, what: str = "") -> None:
    if function(*arguments) < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), what or getattr(function, "__name__", ""))
