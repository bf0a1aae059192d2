"""A node of a service manager, which starts the next daemon when `kvfs restart` ends this one."""

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Final

import pytest

from gateway.node_start import HANDED_OVER
from tests.integration.harness import ROOT, Node, best_mode, kvfs
from tests.integration.takeover.successor import DEADLINE_S, WAIT, follow

_MANAGER: Final = """
while true; do
    "$@"
    code=$?
    echo "$code" >&3
    [ "$code" = 75 ] || exit 0
done
"""
"""A process of its own: it inherits no file of the mount, which a child would close before it is
the next daemon, and wait for that."""


class _Service:
    """Starts the node again whenever it ends with that exit code, as the unit says."""

    def __init__(self, node: Node) -> None:
        words = ["up", *node.place(), "--mode", node.mode, *WAIT]
        program = "from cli.main import main; main()"
        environment = {k: v for k, v in os.environ.items() if not k.startswith("KVFS_")}
        environment |= {"KVFS_S3": "off", "KVFS_CONFIG": os.devnull, "PYTHONPATH": str(ROOT)}
        environment["NOTIFY_SOCKET"] = str(node.home / "notify")
        self._log = node.home / "service.log"
        self._codes = node.home / "codes"
        script = f"exec 3>{self._codes} >{self._log} 2>&1\n{_MANAGER}"
        self._process = subprocess.Popen(
            ["sh", "-c", script, "manager", sys.executable, "-c", program, *words],
            env=environment,
        )

    def ended(self) -> list[int]:
        """The exit codes of its daemons, once the last one has ended."""
        self._process.wait(DEADLINE_S)
        print(self._log.read_text())
        return [int(each) for each in self._codes.read_text().split()]


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node.make(best_mode())
    try:
        yield made
    finally:
        made.remove()


def test_its_mount_goes_on(node: Node) -> None:
    service = _Service(node)
    try:
        follow(node, [])
        before = node.pid or 0
        path = node.mount / "models" / "file"
        with path.open("w+b", buffering=0) as file:
            file.write(b"before")
            done = kvfs("restart", "--store", str(node.store), timeout_s=DEADLINE_S)
            assert done.returncode == 0, done.stderr
            file.write(b", after")
            assert os.pread(file.fileno(), 100, 0) == b"before, after"
        follow(node, [before])
    finally:
        kvfs("down", "--store", str(node.store), "--mount", str(node.mount))
        codes = service.ended()
    assert codes == [HANDED_OVER, 0]
