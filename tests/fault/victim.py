"""A node whose process is killed within a step, the power of its disk cut too if wanted; and the
start after it.

A step is source text. It finds `node`, its namespaces `cache` (full at 16 MiB) and `durable` (with
a sealed file `kept`), `write` for a file of 1 MiB, `fill` for a cache that must be evicted from,
`die` to stand in for what must not be reached, `seal`, `evict`, and `mountpoint` of the disk.
"""

import os
import signal
import textwrap
import time
from pathlib import Path
from typing import Final

import trio

from kvfs.admin.fsck import Fsck
from kvfs.node.recover import recover
from tests.contract import client_store
from tests.contract.small_node import BOOT, SmallNode, small_node
from tests.fault.disks import cut

OTHER_BOOT: Final = 54321
_MIB: Final = 1 << 20
_BLOCKS: Final = 16


def run_victim(store: Path, step: str, *, disk: Path | None = None) -> None:
    """Take a step in another process, which must end in `die`; it cuts the power of `disk`."""
    program = "import sys; from tests.fault import victim; victim.main(*sys.argv[1:])"
    client_store.run_killed(program, str(store), str(disk or ""), step)


def main(store: str, disk: str, step: str) -> None:
    """In the process that dies."""
    mountpoint = Path(disk) if disk else None

    def die(*_: object, **__: object) -> None:
        if mountpoint is not None:
            cut(mountpoint)
        os.kill(os.getpid(), signal.SIGKILL)

    with small_node(Path(store)) as node:
        cache = node.namespace("cache", capacity=_BLOCKS * _MIB)
        durable = node.namespace("models", kind="durable")

        def write(space: int, name: str) -> None:
            node.write(space, name, b"x" * _MIB)

        def fill() -> None:
            for number in range(_BLOCKS):
                node.write(cache, f"cold{number}", bytes(_MIB))

        def seal() -> None:
            trio.run(node.sealer.settle)
            trio.run(node.engine.sync)

        def evict() -> None:
            trio.run(_evict, node)

        node.write(durable, "kept", b"kept" * 100_000)
        seal()
        exec(textwrap.dedent(step), {"os": os, "trio": trio, **locals()})
    raise SystemExit("the step did not end")


async def _evict(node: SmallNode) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(node.evictor.run)
        await trio.sleep(60)


def start_again(node: SmallNode, *, boot: int = BOOT, restored: bool = False) -> dict[str, int]:
    """What a start does before it serves; what it had to mend."""
    found = trio.run(
        lambda: recover(
            node.store,
            node.engine,
            node.files,
            node.index,
            boot=boot,
            now=time.time_ns(),
            clean=node.store.take_clean(),
            restored=restored,
        )
    )
    return found or {}


def problems(node: SmallNode) -> list[str]:
    fsck = Fsck(node.engine, node.files, node.index, checksums=True)
    return [str(problem) for problem in fsck.check()]


def assert_books_balance(node: SmallNode) -> None:
    assert problems(node) == []
    on_disk = sum(512 * node.files.stat(*each).st_blocks for each in node.files.scan())
    on_disk += sum(each.used_bytes for each in node.files.quarantined())
    trio.run(node.quarantine.look)
    assert node.census().store.used == on_disk
