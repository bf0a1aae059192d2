"""Refuses NFS-Ganesha's system calls by names with slashes, which are paths and no names.

Ganesha 4.3 hands the names of version 3 to the kernel unchecked: `d/x` is looked up as root,
whatever the caller may search, and `d/..` stops everybody who uses the directory, for Ganesha then
waits for a lock that it holds itself. A filter (seccomp(2)) makes the kernel ask the jail's process
for each call by a name in an open directory; Ganesha's own files have paths, and pass.

It costs such a call 15 to 20 microseconds; reads and writes, which have no names, nothing.
"""

import ctypes
import errno
import fcntl
import os
import socket
import struct
import threading
from typing import Final, NamedTuple

_LONGEST: Final = 255
_O_CREAT: Final = 0o100
_AT_EMPTY_PATH: Final = 0x1000
_AT_FDCWD: Final = -100 & 0xFFFF_FFFF
_SET_MODE_FILTER, _NEW_LISTENER = 1, 8
_ALLOW, _ASK = 0x7FFF_0000, 0x7FC0_0000
_RECV, _SEND, _SET_FLAGS = 0xC050_2100, 0xC018_2101, 0x4008_2104
_SYNC_WAKE_UP, _CONTINUE = 1, 1
_EQUAL, _ANY_BIT, _LOAD, _RETURN = 0x15, 0x45, 0x20, 0x06
_instruction: Final = struct.Struct("=HBBI").pack
_answer: Final = struct.Struct("=QqiI").pack
_asked: Final = struct.Struct("=QIIiIQ6Q")
"""id, thread, flags, and the call: number, architecture, instruction pointer, arguments."""
_libc: Final = ctypes.CDLL(None, use_errno=True)


class GuardedCall(NamedTuple):
    """A system call by names beneath directories that are open."""

    names: tuple[int, ...] = (1,)
    """The arguments that are names; each follows its directory."""
    only: tuple[int, int] | None = None
    """An argument and its bits, one of which is set if a name can be made."""
    never: tuple[int, int] | None = None
    """The same, if the directory itself is meant."""


_MAKES: Final = GuardedCall(only=(2, _O_CREAT))
_STAT: Final = GuardedCall(never=(3, _AT_EMPTY_PATH))
_STATX: Final = GuardedCall(never=(2, _AT_EMPTY_PATH))
_PLAIN: Final = GuardedCall()
_TARGETED: Final = GuardedCall(names=(2,))
_TWO: Final = GuardedCall(names=(1, 3))


class Machine(NamedTuple):
    """Numbers of one kind of processor (seccomp(2), syscalls(2))."""

    audit: int
    seccomp: int
    calls: dict[int, GuardedCall]
    """openat; newfstatat, statx; mkdirat, mknodat, unlinkat; symlinkat; linkat, renameat,
    renameat2. Ganesha makes no handle by a name (name_to_handle_at) except after one of them."""


_MACHINES: Final = {
    "x86_64": Machine(
        *(0xC000_003E, 317),
        {257: _MAKES, 262: _STAT, 332: _STATX, 258: _PLAIN, 259: _PLAIN, 263: _PLAIN}
        | {266: _TARGETED, 265: _TWO, 264: _TWO, 316: _TWO},
    ),
    "aarch64": Machine(
        *(0xC000_00B7, 277),
        {56: _MAKES, 79: _STAT, 291: _STATX, 34: _PLAIN, 33: _PLAIN, 35: _PLAIN}
        | {36: _TARGETED, 37: _TWO, 38: _TWO, 276: _TWO},
    ),
}


def machine() -> Machine:
    """Returns this machine's numbers. Raises OSError for an unknown kind."""
    kind = os.uname().machine
    if kind not in _MACHINES:
        raise OSError(errno.ENOSYS, f"no filter of system calls is written for {kind}")
    return _MACHINES[kind]


def program(numbers: Machine) -> bytes:
    """Returns the filter (BPF), which allows everything that it does not ask about."""
    parts = [
        (_LOAD, 0, 0, 4),
        (_EQUAL, 1, 0, numbers.audit),
        (_RETURN, 0, 0, _ALLOW),
    ]
    for number, call in numbers.calls.items():
        block = _block(call)
        parts += [(_LOAD, 0, 0, 0), (_EQUAL, 0, len(block), number), *block]
    parts.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(_instruction(*each) for each in parts)


def _block(call: GuardedCall) -> list[tuple[int, int, int, int]]:
    """Returns the end of the filter for one call."""
    block = [
        (_LOAD, 0, 0, _low(call.names[0] - 1)),
        (_EQUAL, 1, 0, _AT_FDCWD),
        (_RETURN, 0, 0, _ASK),
        (_RETURN, 0, 0, _ALLOW),
    ]
    allow = len(block) - 1
    if call.only is not None:
        argument, bits = call.only
        block[:0] = [(_LOAD, 0, 0, _low(argument)), (_ANY_BIT, 0, allow, bits)]
    if call.never is not None:
        argument, bits = call.never
        block[:0] = [(_LOAD, 0, 0, _low(argument)), (_ANY_BIT, allow, 0, bits)]
    return block


def _low(argument: int) -> int:
    """Returns the offset of an argument's lower half, on processors that have it first."""
    return 16 + 8 * argument


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def begin(channel: socket.socket) -> None:
    """Has the owner of this socket's other end guard this process and the programs that it executes
    from now on. The process has given up gaining privileges (PR_SET_NO_NEW_PRIVS). Raises
    OSError."""
    numbers = machine()
    code = program(numbers)
    filtering = _Program(len(code) // 8, code)
    listener = _libc.syscall(
        numbers.seccomp, _SET_MODE_FILTER, _NEW_LISTENER, ctypes.byref(filtering)
    )
    if listener < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"no filter of system calls (seccomp): {os.strerror(number)}")
    socket.send_fds(channel, [b"\0"], [listener])
    os.close(listener)


def guard(channel: socket.socket, pid: int) -> None:
    """Answers, in a thread, what the kernel asks about the process at the other end, once that has
    executed its program, which closes its end. Does nothing if that began no guard."""
    threading.Thread(target=_guard, args=(channel, pid), daemon=True).start()


def _guard(channel: socket.socket, pid: int) -> None:
    with channel:
        _, fds, _, _ = socket.recv_fds(channel, 1, 1)
        if not fds:
            return
        channel.recv(1)  # its end: what was executed has its own memory
    try:
        _answer_all(fds[0], pid)
    except OSError:
        pass  # it has ended
    finally:
        os.close(fds[0])  # whom nobody answers is refused each such call


def _answer_all(listener: int, pid: int) -> None:
    """Raises OSError when the process has ended."""
    memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:  # since Linux 6.6; a third faster
        fcntl.ioctl(listener, _SET_FLAGS, _SYNC_WAKE_UP)
    except OSError:
        pass
    calls = machine().calls
    asked = bytearray(_asked.size)
    nothing = bytes(_asked.size)
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        try:
            while True:
                asked[:] = nothing
                fcntl.ioctl(listener, _RECV, asked, True)
                number, _, _, call, _, _, *arguments = _asked.unpack(asked)
                error = 0
                for each in calls[call].names:
                    error = error or refusal(memory, arguments[each])
                answer = _answer(number, 0, -error, 0 if error else _CONTINUE)
                fcntl.ioctl(listener, _SEND, answer)
        except (FileNotFoundError, InterruptedError):
            continue  # a signal ended the call, or the process


def refusal(memory: int, address: int) -> int:
    """Returns the error for a name at this address of a process's memory; 0 if it is a name."""
    try:
        name, ended, _ = os.pread(memory, _LONGEST + 1, address).partition(b"\0")
    except OSError:
        return errno.EFAULT
    if b"/" in name:
        return errno.EACCES  # what RFC 1813 has for characters that no name has
    return 0 if ended else errno.ENAMETOOLONG
