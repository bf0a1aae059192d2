"""A node that is killed while the kernel holds one of its threads in the lock of a directory, whose
holder waits for an answer of that node: neither ends by itself. The next command on the store ends
both."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gateway.fuse import device
from kvfs import control
from kvfs.changes import Change, to_wire
from kvfs.errors import Unavailable
from tests.cluster.waiting import lives, wait_until
from tests.integration.harness import Node
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
    with several(1) as made:
        yield made
        for node in made.nodes:
            if node.pid is None and device.is_ours(str(node.mount)):  # the test failed
                device.abort(str(node.mount))


def begun(step: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=step, daemon=True)
    thread.start()
    return thread


def hang(cluster: Several) -> threading.Thread:
    """Kill the node so; who waits for it."""
    (node,) = cluster.nodes
    directory = node.mount / "models"
    number = directory.stat().st_ino
    assert node.pid is not None
    pid, node.pid = node.pid, None

    def make() -> None:
        with contextlib.suppress(OSError):
            (directory / "made").mkdir()

    def forget() -> None:
        changes = to_wire([Change(number, b"made", 0)])
        with contextlib.suppress(Unavailable):
            control.call(node.store / "run" / "control.sock", "changed", {"changes": changes})

    telling: list[threading.Thread] = []

    def is_held() -> bool:
        if not any(each.is_alive() for each in telling):
            telling.append(begun(forget))
        return is_in_the_lock(pid)

    cluster.server.signal(signal.SIGSTOP)  # who makes a name waits from here on, and holds the lock
    maker = begun(make)
    wait_until(is_held, "the kernel holds a thread of the node", 9)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not lives(pid), "its other threads have ended")
    cluster.server.signal(signal.SIGCONT)
    assert is_in_the_lock(pid)
    assert maker.is_alive()
    return maker


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


@pytest.mark.parametrize("then", [Node.up, Node.down])
def test_the_next_command_ends_it(cluster: Several, then: Callable[[Node], object]) -> None:
    maker = hang(cluster)
    (node,) = cluster.nodes
    then(node)
    maker.join(60)
    assert not maker.is_alive()
    if node.pid is not None:
        (node.mount / "models" / "later").mkdir()
