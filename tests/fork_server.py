"""Runs programs in forks of a process that has made their imports, which take most of their time: a
thousand of them are run by the tests.

A fork is the process that the program would have been: its arguments, environment, mask and
descriptors are the caller's. What a process takes on besides, the server has from the time of its
start (`standing`): for a caller with another one the program is started anew.
"""

import array
import atexit
import contextlib
import gc
import importlib
import json
import os
import resource
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Final, NoReturn

_ROOT: Final = Path(__file__).resolve().parent.parent
_OF_THE_INTERPRETER: Final = ("LD_", "PYTHON", "MALLOC_", "GLIBC_", "LANG", "LC_", "TZ")


def standing() -> tuple[object, ...]:
    """What a process that this thread starts takes on from it, and a fork of the server would not:
    users, namespaces, limits, ignored signals, variables that the interpreter looks at."""
    here = Path("/proc/thread-self")
    limits = (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_AS)
    status = (here / "status").read_text().splitlines()
    return (
        *(os.getresuid(), os.getresgid(), tuple(os.getgroups())),
        *(os.readlink(each) for each in (here / "ns").iterdir()),
        *(resource.getrlimit(each) for each in limits),
        *(line for line in status if line.startswith(("SigIgn", "SigBlk", "CapEff"))),
        *((here / name).read_text() for name in ("cgroup", "personality")),
        sorted(each for each in os.environ.items() if each[0].startswith(_OF_THE_INTERPRETER)),
    )


class ForkServer:
    """A server that has imported `modules`. It ends with this process, and the programs go on."""

    def __init__(self, modules: Sequence[str]) -> None:
        self.standing = standing()
        self.owner = os.getpid()
        self._lock = threading.Lock()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        program = "import sys; from tests.fork_server import serve; serve(sys.argv[1:])"
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program, *modules],
                stdin=theirs.fileno(),
                cwd="/",
                env={**os.environ, "PYTHONPATH": str(_ROOT)},
            )

    def close(self) -> None:
        self._channel.close()
        self._process.wait()

    def run(
        self, program: str, arguments: Sequence[str], environment: dict[str, str], timeout_s: float
    ) -> subprocess.CompletedProcess[bytes]:
        """Runs a program text in `/` without input, as `subprocess.run` does with `capture_output`.
        Raises TimeoutExpired, after it was killed."""
        with contextlib.ExitStack() as closing:
            output, errors = (closing.enter_context(tempfile.TemporaryFile()) for _ in range(2))
            control, theirs = map(closing.enter_context, socket.socketpair())
            nothing = closing.enter_context(open(os.devnull, "rb"))
            files = [each.fileno() for each in (theirs, nothing, output, errors)]
            packed = array.array("i", files)
            with self._lock:
                self._channel.sendmsg([b"."], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, packed)])
            theirs.close()
            request = [program, list(arguments), environment, _mask()]
            control.sendall(json.dumps(request).encode() + b"\n")
            stream = closing.enter_context(control.makefile("r"))
            pid = int(stream.readline())
            waiting = select.poll()  # descriptors may be many
            waiting.register(control, select.POLLIN)
            if not waiting.poll(timeout_s * 1000):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired(list(arguments), timeout_s, _content(output))
            code = int(stream.readline())
            return subprocess.CompletedProcess(
                list(arguments), code, _content(output), _content(errors)
            )


_servers: Final[dict[tuple[str, ...], ForkServer]] = {}
_starting: Final = threading.Lock()


def run(
    modules: tuple[str, ...],
    program: str,
    arguments: Sequence[str],
    environment: dict[str, str],
    timeout_s: float,
) -> subprocess.CompletedProcess[bytes] | None:
    """Runs a program by the server that has imported these modules, started with the first one.
    None: this caller's programs would differ from its forks."""
    with _starting:
        server = _servers.get(modules)
        if server is None or server.owner != os.getpid():
            server = _servers[modules] = ForkServer(modules)
            atexit.register(server.close)
        if server.standing != standing():
            return None
    return server.run(program, arguments, environment, timeout_s)


def _content(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read()


def _mask() -> int:
    """This process's umask."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    raise AssertionError("the kernel tells no mask")


# --- the server's process


def serve(modules: Sequence[str]) -> None:
    """Forks for each request on the standard input, until that ends."""
    for module in modules:
        importlib.import_module(module)
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is meant for the tests and the programs
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lack the other threads"
    with socket.socket(fileno=0) as channel, selectors.DefaultSelector() as selector:
        selector.register(channel, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is not channel:
                    selector.unregister(key.fileobj)
                    _tell_end(key.fd, *key.data)
                elif files := _receive(channel):
                    control = socket.socket(fileno=files[0])
                    pid = os.fork()
                    if pid == 0:
                        _become(control, files[1:])
                    for each in files[1:]:
                        os.close(each)
                    with contextlib.suppress(BrokenPipeError):
                        control.sendall(b"%d\n" % pid)
                    selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, control))
                else:
                    return


def _receive(channel: socket.socket) -> list[int]:
    """The descriptors of the next request; none: there is none."""
    message, files, _, _ = socket.recv_fds(channel, 1, 4)
    return files if message else []


def _tell_end(watch: int, pid: int, control: socket.socket) -> None:
    os.close(watch)
    _, status = os.waitpid(pid, 0)
    with control, contextlib.suppress(BrokenPipeError):
        control.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))


def _become(control: socket.socket, files: list[int]) -> NoReturn:
    """Becomes the program."""
    code = 1
    try:
        with control.makefile("r") as stream:
            program, arguments, environment, mask = json.loads(stream.readline())
        for number, each in enumerate(files):
            os.dup2(each, number)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        os.umask(mask)
        os.environ.clear()
        os.environ.update(environment)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.argv = ["-c", *arguments]
        exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1 if end.code else 0
    except BaseException:
        traceback.print_exc()
    finally:
        _end_as_python(code)


def _end_as_python(code: int) -> NoReturn:
    """Ends as an interpreter does, but for what belongs to the server: objects that stand for
    descriptors which are others' by now are left alone."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        code = code or 120
    finally:
        os._exit(code)
