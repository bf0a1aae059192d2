"""A node that is killed while the kernel holds one of its threads in the lock of a directory, whose
holder waits for an answer of that node: neither would end by itself. The mount's watchdog ends
both; where that was killed too, the next command on the store does."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gateway import watchdog_process
from gateway.fuse.channel import device
from kvfs.base import control
from kvfs.base.errors import Unavailable
from kvfs.datastore.layout import is_locked
from kvfs.tree.changes import Change, to_wire
from tests.cluster.waiting import lives, wait_until
from tests.integration.harness import ROOT, Node, watchdog_of
from tests.integration.several import Several, several

_TELLING = "fuse_reverse_inval_entry"


def stacks_are_told() -> bool:
    """Whether this kernel says where a thread waits, and to us."""
    try:
        return bool(Path("/proc/self/stack").read_text())
    except OSError:
        return False


pytestmark = [
    pytest.mark.skipif(os.getuid() != 0, reason="to end a dead mount takes root"),
    pytest.mark.skipif(not stacks_are_told(), reason="no /proc/PID/stack here"),
]


@pytest.fixture
def cluster() -> Iterator[Several]:
    with several(1, "--s3", "127.0.0.1:0", "--s3-workers", "1") as made:
        yield made
        for node in made.nodes:
            if node.pid is None and device.is_ours(str(node.mount)):  # the test failed
                device.abort(str(node.mount))


def begun(step: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=step, daemon=True)
    thread.start()
    return thread


class Hanging:
    """A node that was killed so."""

    def __init__(self, cluster: Several) -> None:
        (node,) = cluster.nodes
        assert node.pid is not None
        self.pid, node.pid = node.pid, None
        self.directory = node.mount / "models"
        self.socket = node.store / "run" / "control.sock"
        self.number = self.directory.stat().st_ino
        self.workers = node_workers(node)
        self.watchdog = os.pidfd_open(watchdog_of(self.pid))
        # Until the test lets it go on, it does nothing about the death of its node.
        signal.pidfd_send_signal(self.watchdog, signal.SIGSTOP)
        self.maker = self._kill(cluster)

    def _kill(self, cluster: Several) -> threading.Thread:
        telling: list[threading.Thread] = []

        def is_held() -> bool:
            if not any(each.is_alive() for each in telling):
                telling.append(begun(self._forget))
            return is_in_the_lock(self.pid)

        # Whoever makes a name waits from here on, and holds the lock.
        cluster.server.signal(signal.SIGSTOP)
        maker = begun(self._make)
        wait_until(is_held, "the kernel holds a thread of the node", 9)
        os.kill(self.pid, signal.SIGKILL)
        wait_until(lambda: not lives(self.pid), "its other threads have ended")
        cluster.server.signal(signal.SIGCONT)
        assert is_in_the_lock(self.pid)
        assert maker.is_alive()
        return maker

    def _make(self) -> None:
        with contextlib.suppress(OSError):
            (self.directory / "made").mkdir()

    def _forget(self) -> None:
        changes = to_wire([Change(self.number, b"made", 0)])
        with contextlib.suppress(Unavailable):
            control.call(self.socket, "changed", {"changes": changes})

    def end(self) -> None:
        """Nothing of it is left, whatever the test found."""
        signal.pidfd_send_signal(self.watchdog, signal.SIGKILL)
        os.close(self.watchdog)


@pytest.fixture
def hanging(cluster: Several) -> Iterator[Hanging]:
    made = Hanging(cluster)
    yield made
    with contextlib.suppress(ProcessLookupError):
        made.end()


def node_workers(node: Node) -> list[int]:
    """The processes that serve S3."""
    s3 = node.status().get("s3")
    return list(s3["workers"]) if s3 else []


def is_in_the_lock(pid: int) -> bool:
    """Whether one of its threads waits for a directory's lock, to tell the kernel of a name."""
    return any(_TELLING in stack for stack in stacks(pid))


def stacks(pid: int) -> list[str]:
    """Of a process' threads, in the kernel."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/stack"):
        with contextlib.suppress(OSError):
            found.append(path.read_text())
    return found


def test_its_watchdog_ends_it(cluster: Several, hanging: Hanging) -> None:
    (node,) = cluster.nodes
    assert hanging.workers
    signal.pidfd_send_signal(hanging.watchdog, signal.SIGCONT)
    hanging.maker.join(60)
    assert not hanging.maker.is_alive()
    wait_until(lambda: not is_locked(node.store / "lock"), "the store is free")
    wait_until(lambda: not any(map(lives, hanging.workers)), "its S3 workers have ended")
    assert select.select([hanging.watchdog], [], [], 60)[0]
    with pytest.raises(OSError, match=r"not connected|abort"):
        os.listdir(node.mount)  # the mount stays, so that nobody takes what is below for it
    node.up()
    (node.mount / "models" / "later").mkdir()


def test_its_workers_end_while_it_hangs(hanging: Hanging) -> None:
    """The dead node's end of their pipes is open still."""
    assert hanging.workers
    wait_until(lambda: not any(map(lives, hanging.workers)), "its S3 workers have ended")
    assert hanging.maker.is_alive()


def test_a_watchdog_ends_it_by_the_mountpoint_where_it_has_no_other_way(
    cluster: Several, hanging: Hanging
) -> None:
    """The kernel's list of connections cannot be had everywhere."""
    signal.pidfd_send_signal(hanging.watchdog, signal.SIGKILL)
    (node,) = cluster.nodes
    device_number = device.mounted(str(node.mount))
    assert device_number is not None
    daemon = os.pidfd_open(hanging.pid)
    numbers = (watchdog_process.VERSION, hanging.pid, daemon, -1)
    words = (str(ROOT), device_number.device, str(node.mount))
    command = [sys.executable, "-I", "-S", watchdog_process.__file__, *map(str, numbers), *words]
    done = subprocess.run(command, pass_fds=[daemon], timeout=60, stderr=subprocess.PIPE)
    os.close(daemon)
    assert f"(process {hanging.pid}) has died" in done.stderr.decode()
    assert done.returncode == 0
    hanging.maker.join(60)
    assert not hanging.maker.is_alive()


@pytest.mark.parametrize("then", [Node.up, Node.down])
def test_without_a_watchdog_the_next_command_ends_it(
    cluster: Several, hanging: Hanging, then: Callable[[Node], object]
) -> None:
    signal.pidfd_send_signal(hanging.watchdog, signal.SIGKILL)
    (node,) = cluster.nodes
    then(node)
    hanging.maker.join(60)
    assert not hanging.maker.is_alive()
    if node.pid is not None:
        (node.mount / "models" / "later").mkdir()


def test_a_watchdog_that_was_killed_is_replaced(cluster: Several) -> None:
    (node,) = cluster.nodes
    assert node.pid is not None
    first = watchdog_of(node.pid)
    os.kill(first, signal.SIGKILL)

    def is_another() -> bool:
        with contextlib.suppress(LookupError):
            return watchdog_of(int(node.pid or 0)) != first
        return False

    wait_until(is_another, "the node has started another watchdog")
    second = os.pidfd_open(watchdog_of(node.pid))
    node.down()
    assert select.select([second], [], [], 60)[0]
    os.close(second)
