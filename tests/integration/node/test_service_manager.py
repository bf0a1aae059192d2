"""A service manager hears when a node serves, that it lives, and when it stops; a socket of the
test's own stands for systemd's."""

import contextlib
import os
import queue
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway import privileges, system_calls
from gateway.nfs.name_guard import machine
from tests.integration import harness

DEADLINE_S = 60.0
NOT_TRACING = "-sys_ptrace,-perfmon,-sys_admin"
"""What a program that looks into others has one of (the last two from Linux 6.14 on)."""
WITHOUT = ("setpriv", "--bounding-set", "-sys_resource")
"""Stands before the program of a container, in which root is no administrator of the host."""


class Manager:
    """A manager's socket. It is read all the time: its queue holds ten messages."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(address)
        self._heard: queue.Queue[dict[str, str]] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while message := self._socket.recv(4096):
            lines = (line.partition("=") for line in message.decode().splitlines())
            self._heard.put({key: value for key, _, value in lines})

    def wait_for(self, key: str) -> dict[str, str]:
        """The next message that has it."""
        while key not in (message := self._heard.get(timeout=DEADLINE_S)):
            pass
        return message


@contextlib.contextmanager
def node() -> Iterator[harness.Node]:
    made = harness.Node.make(harness.best_mode())
    try:
        yield made
    finally:
        made.remove()


def test_a_manager_hears_of_a_node_s_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = Manager(str(tmp_path / "notify"))
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    monkeypatch.setenv("WATCHDOG_USEC", "300000")
    with node() as made:
        made.up()
        assert manager.wait_for("EXTEND_TIMEOUT_USEC")["WATCHDOG"] == "1"
        said = manager.wait_for("READY")
        assert said["STATUS"] == f"serves {made.store} at {made.mount}"
        for _ in range(3):
            assert manager.wait_for("WATCHDOG")["READY"] == "1"
        assert made.pid is not None
        child = Path(f"/proc/{harness.watchdog_of(made.pid)}/environ").read_bytes()
        assert b"NOTIFY_SOCKET" not in child
        assert b"WATCHDOG_USEC" not in child
        made.down()
        assert "READY" not in manager.wait_for("STOPPING")


def test_a_manager_that_has_gone_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    for address in ("@" + os.urandom(8).hex(), "/nowhere/notify", "vsock:2:1"):
        monkeypatch.setenv("NOTIFY_SOCKET", address)
        with node() as made:
            made.up()
            made.down()


def test_a_service_s_log_has_no_key(tmp_path: Path) -> None:
    """The first start shows the key pair of S3 that it made to a person alone."""
    with node() as made:
        command = [sys.executable, "-c", "from cli.main import main; main()", "up", *made.place()]
        environment = {**os.environ, "PYTHONPATH": str(harness.ROOT), "KVFS_CONFIG": os.devnull}
        with open(tmp_path / "log", "wb") as log:
            process = subprocess.Popen(
                [*command, "--s3", "127.0.0.1:0", "--admin", "off", "--mode", made.mode],
                env=environment,
                stdout=log,
                stderr=log,
            )
        try:
            end = time.monotonic() + DEADLINE_S
            while b"s3-credentials" not in (tmp_path / "log").read_bytes():
                assert time.monotonic() < end
                assert process.poll() is None
                time.sleep(0.02)
            (secret,) = re.findall(
                r"secret\w* *[=:]? *(\S+)", (made.store / "s3-credentials").read_text()
            )
            assert secret not in (tmp_path / "log").read_text()
        finally:
            process.terminate()
            process.wait(DEADLINE_S)


def test_a_node_keeps_the_privileges_that_it_needs() -> None:
    """And so do its children. None dumps its memory, not even into a pipe."""
    kept = sum(1 << number for names in privileges.KEPT.values() for number in names.values())
    with node() as made:
        made.flags = ("--s3", "127.0.0.1:0", "--admin", "off")
        made.up()
        assert made.pid is not None
        worker = made.status()["s3"]["workers"][0]
        for pid in (made.pid, worker, harness.watchdog_of(made.pid)):
            told = Path(f"/proc/{pid}/status").read_text()
            for name in ("CapPrm", "CapEff", "CapBnd", "CapInh", "CapAmb"):
                (mask,) = re.findall(rf"^{name}:\t(\w+)$", told, re.MULTILINE)
                assert int(mask, 16) & ~kept == 0, (pid, name)
            assert "NoNewPrivs:\t1\n" in told
            assert "Seccomp:\t2\n" in told
            limits = Path(f"/proc/{pid}/limits").read_text()
            assert re.search(r"^Max core file size +1 +1 ", limits, re.MULTILINE)


def test_no_program_looks_into_a_node_of_root() -> None:
    """Not one of root either, unless it may trace all others."""
    with node() as made:
        made.flags = ("--s3", "127.0.0.1:0", "--admin", "off")
        made.up()
        worker = made.status()["s3"]["workers"][0]
        for pid in (made.pid, worker):
            for look in (("cat", "environ"), ("cat", "maps"), ("readlink", "fd/0")):
                seen = f"/proc/{pid}/{look[1]}"
                command = ["setpriv", "--bounding-set", NOT_TRACING, look[0], seen]
                assert subprocess.run(command, capture_output=True).returncode != 0, seen
        assert made.status()["confinement"] == {
            "hides_memory": True,
            "filters_calls": True,
            "is_root": True,
        }


def test_a_call_that_no_node_needs_is_refused() -> None:
    """Also to a program that it starts, which goes on with others."""
    numbers = [each for each in system_calls._numbers(machine()).values() if each is not None]
    program = f"""if True:
        import ctypes, os, subprocess, sys
        from gateway import privileges
        libc = ctypes.CDLL(None, use_errno=True)
        if sys.argv[1:]:
            privileges.give_up()
            subprocess.run([sys.executable, "-c", os.environ["PROGRAM"]], check=True)
        else:
            for number in {numbers}:
                assert libc.syscall(number, 0, 0, 0, 0) == -1, number
                assert ctypes.get_errno() == 1, number
            print(os.uname().sysname)
    """
    done = subprocess.run(
        [sys.executable, "-c", program, "parent"],
        cwd=harness.ROOT,
        env={**os.environ, "PROGRAM": program},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, f"{os.uname().sysname}\n"), done.stderr


def test_what_is_kept_is_enough() -> None:
    """For what a mount asks the kernel for, about a program that may do all; dumps that the caller
    forbids stay forbidden."""
    program = """if True:
        import resource, socket
        from gateway import privileges
        from gateway.fuse.channel import dispatch
        privileges.give_up()
        print(open(f"/proc/PID/syscall").read().split()[0].isdigit())
        for end in dispatch.server_socket():
            end.setsockopt(socket.SOL_SOCKET, dispatch._SO_SNDBUFFORCE, dispatch._SOCKET_BYTES)
        print(resource.getrlimit(resource.RLIMIT_CORE))
    """
    with subprocess.Popen(["sleep", "600"]) as sleeper:
        try:
            for before, limit in (((), (1, 1)), (("prlimit", "--core=0:0", *WITHOUT), (0, 0))):
                done = subprocess.run(
                    [*before, sys.executable, "-c", program.replace("PID", str(sleeper.pid))],
                    cwd=harness.ROOT,
                    capture_output=True,
                    text=True,
                )
                assert done.stdout.splitlines() == ["True", str(limit)], done.stderr
        finally:
            sleeper.kill()
