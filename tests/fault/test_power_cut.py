"""The power goes at each step: what was acknowledged as synced is there, nothing is torn, the books
balance."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
import trio

from kvfs.store.checksum import checksum
from tests.contract.small_node import small_node
from tests.fault.disks import disk
from tests.fault.test_recovery import OTHER_BOOT, assert_books_balance, start_again

ROOT: Final = Path(__file__).resolve().parents[2]
VICTIM: Final = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import trio
from tests.contract.small_node import small_node
from tests.fault.disks import cut

mountpoint = Path(sys.argv[2])

def die(*_, **__):
    cut(mountpoint)
    os.kill(os.getpid(), signal.SIGKILL)

def evict(node):
    async def main():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.evictor.run)
            await trio.sleep(60)
    trio.run(main)

def settle(node):
    trio.run(node.sealer.settle)
    trio.run(node.engine.sync)

MIB = 1 << 20
with small_node(mountpoint / "store") as node:
    cache = node.namespace("cache", capacity=16 * MIB)
    durable = node.namespace("models", kind="durable")
    node.write(durable, "kept", b"kept" * 100_000)
    settle(node)
    {steps}
    raise SystemExit("the step did not end")
"""
STEPS: Final = {
    "at rest": """
    die()
""",
    "published": """
    node.write(durable, "young", b"x" * MIB)
    die()
""",
    "data on disk, directory perhaps, record not": """
    ino, fd = node.make(durable, "young")
    os.write(fd, b"x" * MIB)
    os.sync()
    node.close(ino, fd)
    die()
""",
    "record on disk, data not": """
    node.write(durable, "young", b"x" * MIB)
    trio.run(node.engine.sync)
    die()
""",
    "sealing: sealed, not synced": """
    node.write(durable, "young", b"x" * MIB)
    import kvfs.background.sealing as sealing
    sealing.settle_on_disk = die
    trio.run(node.sealer.settle)
""",
    "sealing: synced, record does not say so": """
    node.write(durable, "young", b"x" * MIB)
    import kvfs.background.sealing as sealing
    sealing.confirm = die
    trio.run(node.sealer.settle)
""",
    "sealed and synced": """
    node.write(durable, "acknowledged", b"x" * MIB)
    settle(node)
    node.write(durable, "young", b"x" * MIB)
    die()
""",
    "evicting: names removed": """
    for number in range(16):
        node.write(cache, f"cold{number}", bytes(MIB))
    settle(node)
    node.files.unlink = die
    evict(node)
""",
    "evicting: data files unlinked, the directories on disk": """
    for number in range(16):
        node.write(cache, f"cold{number}", bytes(MIB))
    settle(node)
    def fsync_then_die(*_):
        directory = os.open(mountpoint, os.O_RDONLY)
        os.fsync(directory)
        for each in os.scandir(node.files.root):
            os.fsync(os.open(each.path, os.O_RDONLY))
        die()
    node.index.remove = fsync_then_die
    evict(node)
""",
}


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
@pytest.mark.parametrize("step", STEPS)
def test_a_power_cut_at_each_step(tmp_path: Path, kind: str, step: str) -> None:
    with disk(tmp_path, kind) as made:
        program = VICTIM.replace("{steps}", STEPS[step].strip())
        done = subprocess.run(
            [sys.executable, "-c", program, str(ROOT), str(made.mountpoint)],
            capture_output=True,
            text=True,
        )
        assert done.returncode == -signal.SIGKILL, done.stderr
        made.power_cycle()
        with small_node(made.mountpoint / "store", boot=OTHER_BOOT) as node:
            start_again(node, boot=OTHER_BOOT)
            assert_books_balance(node)
            spaces = {each.name: number for number, each in node.census().namespaces.items()}
            left = node.names(spaces[b"models"])
            assert "kept" in left
            assert "acknowledged" in left or "acknowledged" not in STEPS[step]
            trio.run(node.sealer.settle)
            assert_books_balance(node)
            for ino, version in node.files.scan():
                inode = node.record(ino)
                assert inode is not None
                fd = node.files.open(ino, version, os.O_RDONLY)
                found = checksum(fd, inode.size)
                content = set(os.pread(fd, inode.size, 0))
                os.close(fd)
                assert found is not None and found.combined == inode.checksum
                expected = {b"kept": set(b"kept"), b"young": set(b"x"), b"acknowledged": set(b"x")}
                assert content == expected.get(inode.name, {0}), "whole, or not there"
