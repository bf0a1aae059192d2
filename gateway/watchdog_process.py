"""The watchdog of a mount: a process that waits for the end of its daemon and then ends the mount's
connection to the kernel.

    python -I -S watchdog_process.py VERSION PID PIDFD ABORT PACKAGES DEVICE MOUNTPOINT

VERSION is that of these arguments: if it is another than this program's, the program was replaced
beneath the running daemon, and this one ends at once with REPLACED. PIDFD (of the daemon) and ABORT
(see `device.open_abort`; -1: there is none) are inherited. `watchdog` starts it, and ends it in
order. It imports nothing of KVFS, so that it takes 4 MB of memory of its own: without ABORT it asks
a new interpreter.

A killed daemon is not always gone: while the kernel holds one of its threads in a lock, its
descriptors stay open, and its pidfd does not report its end. So the state of its first thread is
checked too, each second. That number is nobody else's while a thread is left.
"""

import os
import select
import signal
import sys
import time

VERSION = 2
"""Grows by one when the arguments change."""
REPLACED = 75
"""The exit code where the arguments are of another version; it never changes."""
_LOOK_MS = 1000


def main() -> None:
    """Runs until the daemon has ended, and with it the connection."""
    # The terminal's ^C, and what ends all processes of a service, are for the daemon to heed.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.argv[1] != str(VERSION):
        sys.exit(REPLACED)
    pid, pidfd, abort = map(int, sys.argv[2:5])
    packages, device, mountpoint = sys.argv[5:8]
    ended = select.poll()
    ended.register(pidfd, select.POLLIN)
    while not ended.poll(_LOOK_MS) and not has_ended(pid):
        pass
    _say(f"the daemon (process {pid}) has died: its mount at {mountpoint} is ended")
    if abort >= 0:
        os.write(abort, b"1")
    elif not ended.poll(0):  # else its device is closed, and who is mounted there may be another
        _abort_by_path(packages, device, mountpoint)


def has_ended(pid: int) -> bool:
    """Returns whether its first thread has ended: then all do, unless the kernel holds them."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] in "ZX"
    except (OSError, IndexError):
        return False  # gone, or about to: the pidfd says so


def _say(text: str) -> None:
    """Writes a line in the form of the daemon's log, which is its standard error."""
    try:
        found = os.fstat(2)
        is_journal = os.environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"
        os.write(2, f"{_line(text, is_journal)}\n".encode())
    except OSError:
        pass


def _line(text: str, is_journal: bool) -> str:
    """Returns what `kvfs.base.log_lines` would write."""
    mark = "<4>" if is_journal else ""
    if os.environ.get("KVFS_LOG_FORMAT") == "json":
        import json  # needed once, at the end: until then it would take memory

        now = time.strftime("%Y-%m-%dT%H:%M:%S.000+00:00", time.gmtime())
        fields = {"time": now, "level": "warning", "logger": "gateway.watchdog", "message": text}
        return mark + json.dumps({**fields, "pid": os.getpid(), "process": "watchdog"})
    now = "" if is_journal else time.strftime("%Y-%m-%d %H:%M:%S,000 ")
    return f"{mark}{now}WARNING gateway.watchdog: {text}"


def _abort_by_path(packages: str, device: str, mountpoint: str) -> None:
    os.chdir(packages)
    program = (
        "import sys; from gateway.fuse.channel import device; "
        "sys.exit(device.abort_if(*sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, mountpoint, device]
    os.execv(command[0], command)  # noqa: S606  no shell


if __name__ == "__main__":
    main()
