"""A mount that has only just been made: it answers before its start has come to an end."""

import os
import subprocess
import sys

import pytest

from tests.integration.conftest import NATIVE, why_not
from tests.integration.harness import ROOT, Node

_PUT = (
    "import sys; from kvfs import Client\nwith Client(sys.argv[1]) as c: c.put('/cache/new', b'x')"
)
_MOUNT = """
import os, subprocess, sys
from pathlib import Path

import trio

from gateway.fuse import device, mount
from kvfs.config import Config
from kvfs.node import open_node

store, mountpoint, mode, put = sys.argv[1:]
path = os.path.join(mountpoint, "cache", "new")
shown = []

def meanwhile(where, kib):
    shown.append(os.path.exists(path))
    subprocess.run([sys.executable, "-c", put, store], check=True)
    shown.append(os.path.exists(path))
    return False

device.set_readahead = meanwhile  # called when the mount answers already

async def main():
    options = mount.MountOptions(mountpoint=mountpoint, mode=mode)
    async with open_node(Config(store=Path(store))) as node, trio.open_nursery() as nursery:
        await nursery.start(mount.serve, node, options)
        nursery.cancel_scope.cancel()

trio.run(main)
print(*shown)
"""


def test_what_comes_while_the_mount_is_made_is_seen(mode: str) -> None:
    """The kernel was told that there is no such file, and remembers that for an hour."""
    if NATIVE:
        pytest.skip("about the mount, not about what POSIX says")
    node = Node.make(mode)
    try:
        if lacking := why_not(node):
            pytest.skip(lacking)
        done = subprocess.run(
            [sys.executable, "-c", _MOUNT, str(node.store), str(node.mount), mode, _PUT],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.stdout == "False True\n", done.stderr
    finally:
        node.remove()
