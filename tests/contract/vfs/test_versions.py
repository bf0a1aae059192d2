"""New content of a published file, on nodes of a cluster, where the engine's answer gets lost."""

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

from kvfs.base.errors import Stale, Unavailable
from kvfs.meta.engine import Transaction
from kvfs.tree.copies import held_names
from kvfs.vfs.content_versions import Overtaken, check_follows, publish_anew
from tests.contract.bringers import Host, Shared, Site, T, on_nodes, publish
from tests.contract.memory_engine import MemoryEngine


class Lossy:
    """An engine whose next commit fails: done, or not."""

    def __init__(self, host: Host, *, done: bool) -> None:
        self._engine = host.engine
        self._done = done
        self.read = host.engine.read

    async def transact(self, fn: Callable[[Transaction], T]) -> T:
        if self._done:
            await self._engine.transact(fn)
        raise Unavailable("the answer was lost")


class Behind:
    """An engine that knows of nothing that was committed since it was made, until a commit is
    refused. `found`: what was so at each commit."""

    def __init__(self, host: Host, is_so: Callable[[], bool]) -> None:
        self._engine = host.engine
        self._old = _copy(host.engine)
        self._is_so = is_so
        self.found: list[bool] = []

    async def read(self, fn: Callable[[Transaction], T]) -> T:
        return await (self._engine if self.found else self._old).read(fn)

    async def transact(self, fn: Callable[[Transaction], T]) -> T:
        self.found.append(self._is_so())
        return await self._engine.transact(fn)


def _copy(engine: Shared) -> Shared:
    made = MemoryEngine()
    everything = engine.read_now(lambda t: list(t.scan(b"", b"\xff")))

    def put(t: Transaction) -> None:
        for key, value in everything:
            t.put(key, value)

    made.transact_now(put)
    return Shared(made, 1)


async def rewrite(
    host: Host,
    ino: int,
    version: int,
    data: bytes,
    engine: Lossy | Behind | None = None,
    names: set[int] | None = None,
    *,
    follows: bool = False,
) -> int:
    """Written in place and closed, at the node that has this version of the data file. `follows`:
    it goes past nobody."""
    st = host.write_in_place(ino, version, data)

    def record(t: Transaction, new: int) -> None:
        if follows:
            check_follows(t, ino, version)
        publish(t, ino, st, version=new)

    left = set() if names is None else names
    return await publish_anew(engine or host.engine, host.files, ino, version, record, left)  # type: ignore[arg-type]


def test_what_was_not_recorded_is_not_taken_for_what_another_node_published(
    tmp_path: Path,
) -> None:
    async def test(site: Site) -> None:
        here, there = site.hosts
        ino = here.put(b"old", space=site.durable)
        await there.transfers.bring(ino)
        with pytest.raises(Unavailable):
            await rewrite(here, ino, 0, b"lost", Lossy(here, done=False))
        await rewrite(there, ino, 0, b"new")
        assert not here.has(ino)
        await here.transfers.bring(ino)
        assert here.read(ino) == b"new"

    on_nodes(tmp_path, 2, test)


@pytest.mark.parametrize("done", [True, False])
def test_a_close_after_one_whose_answer_was_lost_is_recorded(tmp_path: Path, done: bool) -> None:
    async def test(site: Site) -> None:
        (here,) = site.hosts
        ino = here.put(b"old", space=site.durable)
        with pytest.raises(Unavailable):
            await rewrite(here, ino, 0, b"first", Lossy(here, done=done))
        new = await rewrite(here, ino, 0, b"second")
        assert here.inode(ino).version == new
        assert here.read(ino) == b"second"

    on_nodes(tmp_path, 1, test)


def test_a_node_that_does_not_know_that_it_was_recorded_loses_nothing(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        (here,) = site.hosts
        ino = here.put(b"old", space=site.durable)
        behind = Behind(here, lambda: here.has(ino))
        with pytest.raises(Unavailable):
            await rewrite(here, ino, 0, b"first", Lossy(here, done=True))
        new = await rewrite(here, ino, 0, b"second", behind)
        assert behind.found == [True, True]
        assert here.inode(ino).version == new
        assert here.read(ino) == b"second"

    on_nodes(tmp_path, 1, test)


@pytest.mark.parametrize("attempts", [0, 1])
@pytest.mark.parametrize("how", ["removed", "overtaken", "recorded"])
def test_no_name_is_left_under_which_nothing_is_recorded(
    tmp_path: Path, attempts: int, how: str
) -> None:
    """`attempts`: those before it of which nobody knows what became of them."""

    async def test(site: Site) -> None:
        here, there = site.hosts
        ino = here.put(b"old", space=site.durable)
        await there.transfers.bring(ino)
        await site.held_by(ino, [1, 2])
        names: set[int] = set()
        for _ in range(attempts):
            with pytest.raises(Unavailable):
                await rewrite(here, ino, 0, b"lost", Lossy(here, done=False), names)
        if how == "removed":
            here.engine.transact_now(lambda t: forget(t, ino))
        elif how == "overtaken":
            await rewrite(there, ino, 0, b"new")
        raises = {"removed": Stale, "overtaken": Overtaken}.get(how)
        with pytest.raises(raises) if raises else contextlib.nullcontext():
            await rewrite(here, ino, 0, b"second", None, names, follows=True)
        recorded = [] if raises else [(ino, here.inode(ino).version)]
        assert [each for each in here.files.scan() if each != (ino, 0)] == recorded
        assert not names

    on_nodes(tmp_path, 2, test)


def forget(t: Transaction, ino: int) -> None:
    """The file was removed, and nobody held it."""
    held_names.drop(t, ino)
