"""What a close could not record is recorded by the mount, whatever becomes of who closed."""

from types import SimpleNamespace
from typing import Any, cast

import trio

from gateway.fuse.files.open_file import Handle, OpenFile
from gateway.fuse.files.open_files import OpenFiles
from kvfs.base.errors import Unavailable


class Engine:
    """Records at once what it is asked for, once it is there."""

    def __init__(self) -> None:
        self.is_there = trio.Event()
        self.is_asked = trio.Event()
        self.recorded: list[int] = []

    async def publish(self, file: OpenFile) -> None:
        self.is_asked.set()
        await self.is_there.wait()
        self.recorded.append(file.ino)


def written(engine: Engine) -> tuple[OpenFiles, OpenFile, int]:
    """A mount's open files, one of which was written to, and the number of its handle."""

    def nothing(*_: object) -> None:
        pass

    holders = SimpleNamespace(released=nothing, not_writing=nothing)
    volume, transfers = SimpleNamespace(holders=holders), SimpleNamespace(is_shared=False)
    node = SimpleNamespace(
        volume=volume,
        transfers=transfers,
        engine=None,
        port=None,
        appends=None,
        former_writers=None,
        open_file_shares=None,
        near=None,
        boot=1,
        is_strict=nothing,
    )
    volume.engine = None
    memory = SimpleNamespace(attributes=nothing, content_soon=nothing)
    registrations = SimpleNamespace(renamed=nothing, cut=nothing)
    files = OpenFiles(*cast("Any", (node, registrations, memory)))
    files.publishing.publish = engine.publish  # type: ignore[method-assign,assignment]
    files.unrecorded._publish = engine.publish
    file = cast("OpenFile", SimpleNamespace(ino=7, handles=1, users=0, writers=1, is_partial=True))
    files.unrecorded._close_unused = nothing
    files._table.close_unused = nothing  # type: ignore[method-assign,assignment]
    files._handles[3] = cast(
        "Handle",
        SimpleNamespace(file=file, overwrites=False, writable=True, maps=False, appends=False),
    )
    return files, file, 3


def test_a_release_that_is_cancelled_is_recorded_by_the_mount() -> None:
    trio.run(_a_release_is_cancelled)


async def _a_release_is_cancelled() -> None:
    engine = Engine()
    files, file, fh = written(engine)
    with trio.CancelScope() as view:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(files.release, fh)
            await engine.is_asked.wait()
            view.cancel()
    assert file.users == 1, "it is kept open"
    assert 7 in files.unrecorded
    engine.is_there.set()
    await files.unrecorded._try_each()
    assert 7 in engine.recorded
    assert file.users == 0


def test_what_is_not_recorded_yet_is_when_the_mount_goes() -> None:
    trio.run(_the_mount_goes)


async def _the_mount_goes() -> None:
    engine = Engine()
    files, file, _ = written(engine)
    files.unrecorded.add(file, Unavailable("no engine"))
    engine.is_there.set()
    await files.release_all()
    assert engine.recorded.count(7) == 2, "what waited, and what was open"
