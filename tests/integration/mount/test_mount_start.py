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

from gateway.fuse import mount
from gateway.fuse.channel import device
from kvfs.base.config import Config
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


_GIVEN_UP = """
import sys, time
from pathlib import Path

import trio

from gateway.fuse import mount
from gateway.fuse.channel import device
from kvfs.base.config import Config
from kvfs.node import open_node

store, mountpoint, mode = sys.argv[1:]
begun = trio.Event()
set_readahead = device.set_readahead

def late(where, kib):
    trio.from_thread.run_sync(begun.set)
    time.sleep(1)  # until nobody answers what the mount is asked
    return set_readahead(where, kib)

device.set_readahead = late

async def main():
    options = mount.MountOptions(mountpoint=mountpoint, mode=mode)
    async with open_node(Config(store=Path(store))) as node, trio.open_nursery() as nursery:
        nursery.start_soon(mount.serve, node, options)
        await begun.wait()
        nursery.cancel_scope.cancel()

trio.run(main)
print(device.mounted(mountpoint))
"""


def test_a_start_that_is_given_up_ends(mode: str) -> None:
    """What the start has under way then may not ask the mount, which nobody serves any more."""
    if NATIVE:
        pytest.skip("about the mount, not about what POSIX says")
    assert _run(mode, _GIVEN_UP) == "None\n"


def test_what_comes_while_the_mount_is_made_is_seen(mode: str) -> None:
    """The kernel was told that there is no such file, and remembers that for an hour."""
    if NATIVE:
        pytest.skip("about the mount, not about what POSIX says")
    assert _run(mode, _MOUNT, _PUT) == "False True\n"


def _run(mode: str, program: str, *arguments: str) -> str:
    """What the program prints; it gets a store, a mountpoint and the mode."""
    node = Node.make(mode)
    try:
        if lacking := why_not(node):
            pytest.skip(lacking)
        done = subprocess.run(
            [sys.executable, "-c", program, str(node.store), str(node.mount), mode, *arguments],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert not done.returncode, done.stderr
        return done.stdout
    finally:
        node.remove()
