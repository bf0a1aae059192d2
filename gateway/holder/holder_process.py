"""The holder of a mount: a process that keeps the mount's device open when its daemon has died,
and hands it to the next one; if none comes in time, it ends the mount's connection.

    python -I -S holder_process.py VERSION PID PIDFD ABORT DEVICE JOURNAL LISTENER FORMER GENERATION
        WAIT_S RUN CWD [WORD...]

VERSION is that of these arguments: if it is another than this program's, the program was replaced
beneath the running daemon, and this one ends at once with REPLACED. The numbers from PIDFD (of the
daemon) to FORMER are inherited descriptors: ABORT of the connection's `abort` (see
`device.open_abort`; -1: there is none), JOURNAL of what the next daemon must know
(`mount_journal`), LISTENER of the socket `holder.sock.new` in RUN, which takes the place of the
former holder's, FORMER a pidfd of that holder (-1: there is none). WORDs are the command that
starts the next daemon, in the directory CWD; none: somebody else does. It imports nothing of KVFS.

| word of a caller | answer | what follows |
|---|---|---|
| `take` | `given PID` (its own), device and journal, or `busy` | the caller is the daemon |
| `expect` of the daemon | `done` | the next daemon runs already: none is started for a while |
| `abort` | `done` | no waiting (any more): the mount ends with its daemon, or now |
| `state` | `waits SECONDS WHY` or `served` | nothing; WHY: the failure of the last start, if any |

GENERATION is that of the daemon, counted in the journal whenever a holder hands the mount on. A
holder that finds another there than it knows has been overtaken: the daemon that it watched died
before it began, and the holder before has handed the mount on. It ends, and does nothing else.

A caller is root or of the daemon's user, which the kernel tells. Each daemon that takes over
starts its own holder, of its own version, once all of it serves, and that ends the one before.
Until then that one watches over the daemon: if it dies, or cannot start, the mount waits on, for
WAIT_S in all since the last daemon that served.

A killed daemon whose thread the kernel holds in a lock never gives the store free, so nobody can
follow it: then the connection ends at once, as by the watchdog.
"""

import array
import fcntl
import os
import select
import signal
import socket
import struct
import sys
import time

VERSION = 2
"""Grows by one when the arguments or the words change."""
REPLACED = 75
"""The exit code where the arguments are of another version; it never changes."""
_LOOK_MS = 1000
_ENDING_S = 10.0
"""Time after which a killed process has gone, also one that waits for a busy disk."""
_ANSWER_S = 2.0
_WAITING_LOOK_MS = 100
_PAUSE_S = 0.2
_LONGEST_S = 5.0
_PARTING_S = 1.0
"""Time in which a start that failed at the last moment says why."""
_SAID_BYTES = 1 << 16
_WHY_BYTES = 400
_EXPECTED_S = 10.0
_DEATHS = 30
"""So many deaths of daemons within DEATHS_S are too many."""
_DEATHS_S = 60.0
_APPEND = os.O_WRONLY | os.O_APPEND
_CREDENTIALS = struct.Struct("3i")
_GENERATION = struct.Struct("<I")
_GENERATION_AT = 4
_TIME = struct.Struct("<d")
_DEATHS_AT = 3848
"""In the journal: times of the last deaths."""


class MountHolder:
    """The state of the process."""

    def __init__(self, arguments: list[str]) -> None:
        numbers = list(map(int, arguments[:8]))
        self.pid, self.pidfd, self.abort, self.device, self.journal, listener = numbers[:6]
        self.former, self.generation = numbers[6:]
        self.wait_s = float(arguments[8])
        self.run_directory, self.directory, *self.command = arguments[9:]
        self.listener = socket.socket(fileno=listener)
        for each in (self.pidfd, self.abort, self.device, self.journal):
            if each >= 0:
                os.set_inheritable(each, False)
        self.listener.set_inheritable(False)
        self.since = 0.0
        """When the last daemon that served ended; 0: it is there."""
        self.deadline = 0.0
        """When waiting for the next daemon ends; 0: there is one, which perhaps serves."""
        self.dying = 0.0
        """Since when the daemon is dead and not gone; 0: it is not so."""
        self.started = 0
        """The process that starts the next daemon; 0: none."""
        self.said = os.memfd_create("start")
        """A memory file, in which that process says why it fails."""
        self.why = ""
        """The failure of the last start."""
        self.start_at = 0.0
        self.expects = False
        """Whether the next daemon runs already."""
        self.is_over = False
        """Whether the mount ends with this daemon."""

    def run(self) -> None:
        """Runs until the mount has ended, or is another holder's."""
        if not self._begin():
            return
        poll = select.poll()
        poll.register(self.listener, select.POLLIN)
        poll.register(self.pidfd, select.POLLIN)
        while True:
            ready = dict(poll.poll(_LOOK_MS if not self.deadline else _WAITING_LOOK_MS))
            if self.listener.fileno() in ready:
                before = self.pidfd
                if self._serve():
                    return
                if self.pidfd != before:
                    poll.unregister(before)
                    os.close(before)
                    poll.register(self.pidfd, select.POLLIN)
                    continue
            if (self.deadline or self.pidfd in ready) and self._is_overtaken():
                return
            if not self.deadline and self.pidfd in ready:
                poll.modify(self.pidfd, 0)
                self._begin_waiting()
            self._see_to_next()
            if self._is_at_end():
                self._end()
                return

    def _begin(self) -> bool:
        """Takes the place of the holder before; False: that one has handed the mount on, and
        stays."""
        with _Turn(self.journal):
            if self._is_overtaken():
                return False
            os.rename(f"{self.run_directory}/holder.sock.new", f"{self.run_directory}/holder.sock")
            if self.former >= 0:
                try:
                    signal.pidfd_send_signal(self.former, signal.SIGKILL)
                except ProcessLookupError:
                    pass
                os.close(self.former)
        return True

    def _is_overtaken(self) -> bool:
        (generation,) = _GENERATION.unpack(os.pread(self.journal, 4, _GENERATION_AT))
        return bool(generation != self.generation)

    # ---- waiting

    def _begin_waiting(self) -> None:
        now, self.start_at = time.monotonic(), 0.0
        if self.since:  # the node that took the mount never came to serve it
            self.why = f"process {self.pid} ended before it served"
            self._pause()
        self.since = self.since or now
        self.deadline = self.since + self.wait_s
        left_s = max(0.0, self.deadline - now)
        _say(f"the node (process {self.pid}) ended: its mount waits {left_s:.0f} s for another")
        if self.expects:
            self.start_at, self.expects = now + _EXPECTED_S, False
        if self._is_hopeless():
            _say(f"{_DEATHS} nodes died within {_DEATHS_S:g} s: no other is waited for")
            self.is_over = True

    def _is_hopeless(self) -> bool:
        """Notes a death; returns whether there were too many."""
        now = time.monotonic()
        slot = self.generation % _DEATHS
        os.pwrite(self.journal, _TIME.pack(now), _DEATHS_AT + slot * _TIME.size)
        oldest = (self.generation + 1) % _DEATHS
        packed = os.pread(self.journal, _TIME.size, _DEATHS_AT + oldest * _TIME.size)
        (before,) = _TIME.unpack(packed)
        return bool(before) and now - before < _DEATHS_S

    def _see_to_next(self) -> None:
        """Starts the next daemon, and another one if its start has failed."""
        now = time.monotonic()
        if self.started:
            ended, status = os.waitpid(self.started, os.WNOHANG)
            if not ended:
                return
            self.started = 0
            if status:
                self._note_failure(status)
                self._pause()
        if self.deadline and self.command and now >= self.start_at and not has_gone(self.device):
            self._start_next()

    def _note_failure(self, status: int) -> None:
        """Keeps what a start said that has failed, and passes it on to the log."""
        said = os.pread(self.said, _SAID_BYTES, 0)
        try:
            os.write(2, said)
        except OSError:
            pass
        lines = said.decode(errors="replace").strip().splitlines()
        code = os.waitstatus_to_exitcode(status)
        self.why = lines[-1].removeprefix("kvfs: ") if lines else f"it ended with code {code}"

    def _start_next(self) -> None:
        os.ftruncate(self.said, 0)
        try:
            os.chdir(self.directory)
            self.started = os.posix_spawn(
                self.command[0],
                self.command,
                os.environ,
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 2, f"/proc/{os.getpid()}/fd/{self.said}", _APPEND, 0)
                ],
                setsid=True,
                setsigdef=(signal.SIGINT, signal.SIGTERM, signal.SIGHUP),
            )
            _raise_group(self.started)
        except OSError as error:
            self.why = f"no node could be started: {error}"
            _say(self.why)
            self._pause()
        finally:
            os.chdir("/")

    def _pause(self) -> None:
        """Has the next daemon be started later, as the last start has failed."""
        now = time.monotonic()
        self.start_at = now + min(max(_PAUSE_S, (now - self.since) / 2), _LONGEST_S)

    def _is_at_end(self) -> bool:
        """Returns whether the mount has to end now."""
        if self.deadline:
            last = self.deadline + (_PARTING_S if self.started else 0)
            return self.is_over or time.monotonic() > last or has_gone(self.device)
        if not _has_ended(self.pid):
            self.dying = 0.0
            return False
        self.dying = self.dying or time.monotonic()
        return time.monotonic() - self.dying > _ENDING_S

    def _end(self) -> None:
        """Ends the connection: calls that wait there fail."""
        why = f" (the last start: {self.why})" if self.why else ""
        _say(f"no node has taken the mount over: it ends, and what waits for it fails{why}")
        if self.abort >= 0:
            try:
                os.write(self.abort, b"1")
            except OSError:
                pass

    # ---- callers

    def _serve(self) -> bool:
        """Answers a caller; returns whether this process is to end."""
        caller, _ = self.listener.accept()
        with caller:
            caller.settimeout(_ANSWER_S)
            try:
                pid, uid, _ = _CREDENTIALS.unpack(
                    caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
                )
                if uid not in (0, os.geteuid()):
                    return False
                word = caller.recv(16)
                if word == b"take":
                    self._give(caller, pid)
                elif word == b"state":
                    caller.send(self._state())
                elif word == b"expect" and pid == self.pid:
                    self.expects = True
                    caller.send(b"done")
                elif word == b"abort":
                    self.is_over = True
                    at_once = pid == self.pid
                    if at_once or self.deadline:
                        self._end()
                    caller.send(b"done")
                    return at_once or bool(self.deadline)
            except OSError:
                pass
        return False

    def _state(self) -> bytes:
        if not self.since:
            return b"served"
        left_s = max(0.0, self.since + self.wait_s - time.monotonic())
        return b"waits %d " % left_s + self.why.encode()[:_WHY_BYTES]

    def _give(self, caller: socket.socket, pid: int) -> None:
        """Hands everything to the caller, who is the daemon from now on."""
        pidfd = os.pidfd_open(pid)
        with _Turn(self.journal):
            if not self.deadline or self.is_over or self._is_overtaken():
                os.close(pidfd)
                caller.send(b"busy")
                return
            self.generation += 1
            os.pwrite(self.journal, _GENERATION.pack(self.generation), _GENERATION_AT)
        answer = b"given %d" % os.getpid()
        rights = array.array("i", [self.device, self.journal])
        try:
            caller.sendmsg([answer], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        except OSError:
            os.close(pidfd)
            raise
        self.pid, self.pidfd, self.deadline, self.dying = pid, pidfd, 0.0, 0.0


class _Turn:
    """Keeps apart the moments in which a holder takes another's place, and hands the mount on."""

    def __init__(self, journal: int) -> None:
        self._journal = journal

    def __enter__(self) -> None:
        fcntl.lockf(self._journal, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        fcntl.lockf(self._journal, fcntl.LOCK_UN)


def _has_ended(pid: int) -> bool:
    """Returns whether its first thread has ended: then all do, unless the kernel holds them."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] in "ZX"
    except (OSError, IndexError):
        return False  # gone, or about to: the pidfd says so


def has_gone(device: int) -> bool:
    """Returns whether the mount of this device has ended."""
    poll = select.poll()
    poll.register(device, 0)
    return bool(poll.poll(0))


def _raise_group(pid: int) -> None:
    """Gives the session that a process leads the nice value of the process. The kernel shares the
    processors among sessions first (autogroup), and what waits for the mount waits for this."""
    try:
        with open(f"/proc/{pid}/autogroup", "w") as group:
            group.write(str(os.getpriority(os.PRIO_PROCESS, pid)))
    except OSError:  # there are no groups, or it has no right to
        pass


def _say(text: str) -> None:
    """Writes a line in the form of the daemon's log, which is its standard error."""
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    try:
        os.write(2, f"{now},000 WARNING gateway.holder: {text}\n".encode())
    except OSError:
        pass


def main() -> None:
    """Runs the holder that the arguments tell of."""
    # The terminal's ^C, and what ends all processes of a service, are for the daemon to heed.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.argv[1] != str(VERSION):
        sys.exit(REPLACED)
    _raise_group(os.getpid())
    MountHolder(sys.argv[2:]).run()


if __name__ == "__main__":
    main()
