"""Listings of a directory in which several nodes have names, by the mount and by NFS: each name
once, and offsets that stay right while names come and go, however few names are remembered."""

import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import pytest

from gateway.fuse.names import directory_streams
from gateway.fuse.names.directory_streams import DirectoryStreams, ListingEntry
from gateway.fuse.views import stable_listing
from gateway.fuse.views.stable_listing import StableListings
from kvfs.tree import tree
from tests.contract.node.test_name_finder import TOP
from tests.contract.node.test_name_lister import Listed, run_lists

COUNT = 400
LIMIT = 25


class Listings(Protocol):
    async def read(self, of: int, offset: int, limit: int, /) -> list[ListingEntry]: ...


def node_of(host: Listed) -> Any:
    return SimpleNamespace(
        engine=host.engine,
        coherence=None,
        port=SimpleNamespace(listed=host.lister.pages),
        names=SimpleNamespace(is_kept=lambda _ino: True),
    )


async def of_a_mount(host: Listed) -> tuple[Listings, int]:
    streams = DirectoryStreams(node_of(host))
    return streams, await streams.open(TOP)


async def of_a_view(host: Listed) -> tuple[Listings, int]:
    return StableListings(node_of(host)), TOP


Door = Callable[[Listed], Awaitable[tuple[Listings, int]]]


async def rest(listings: Listings, of: int, offset: int) -> list[ListingEntry]:
    """All entries from an offset on, but for the dots."""
    found: list[ListingEntry] = []
    while page := await listings.read(of, offset, LIMIT):
        found += page
        offset = page[-1].following
    return [each for each in found if each.name not in (b".", b"..")]


@pytest.fixture(autouse=True)
def few_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_streams, "_BATCH", 16)
    monkeypatch.setattr(directory_streams, "_WINDOW", 4 * LIMIT)


def filled(*hosts: Listed) -> list[bytes]:
    names = [b"%04d" % number for number in range(COUNT)]
    for at, name in enumerate(names):
        hosts[at % 3].write(name)
        if at % 5 == 0:
            hosts[(at + 1) % 3].write(name)
    return names


@pytest.mark.parametrize("door", [of_a_mount, of_a_view])
def test_all_names_are_listed_once_and_from_any_offset(tmp_path: Path, door: Door) -> None:
    async def step(here: Listed, one: Listed, other: Listed) -> None:
        names = filled(here, one, other)
        listings, of = await door(here)
        whole = await rest(listings, of, 0)
        assert sorted(each.name for each in whole) == names
        assert {each.is_elsewhere for each in whole} == {True, False}
        for at in random.Random(1).sample(range(COUNT - 1), 20):
            following = await rest(listings, of, whole[at].following)
            assert [each[:3] for each in following] == [each[:3] for each in whole[at + 1 :]]

    run_lists(tmp_path, step)


@pytest.mark.parametrize("door", [of_a_mount, of_a_view])
def test_no_name_that_stays_is_left_out_whatever_else_changes(tmp_path: Path, door: Door) -> None:
    chance = random.Random(2)

    async def step(here: Listed, one: Listed, other: Listed) -> None:
        filled(here, one, other)
        listings, of = await door(here)
        for _ in range(6):
            whole = await rest(listings, of, 0)
            at = chance.randrange(len(whole) - 1)
            for host in (here, one, other) * 5:
                host.write(b"%04d.%d" % (chance.randrange(COUNT), chance.randrange(10**6)))
                _remove_one(host, chance)
            left = {name for host in (here, one, other) for name in _names(host)}
            found = [each.name for each in await rest(listings, of, whole[at].following)]
            assert len(set(found)) == len(found)
            missing = left & {each.name for each in whole[at + 1 :]} - set(found)
            assert not missing

    run_lists(tmp_path, step)


@pytest.mark.parametrize("door", [of_a_mount])
def test_what_was_read_is_removed_and_the_rest_follows(tmp_path: Path, door: Door) -> None:
    async def step(here: Listed, one: Listed, other: Listed) -> None:
        names = filled(here, one, other)
        listings, of = await door(here)
        offset, found = 0, list[bytes]()
        while page := await listings.read(of, offset, LIMIT):
            offset = page[-1].following
            found += (each.name for each in page)
            for host in (here, one, other):
                for name in {each.name for each in page} & set(_names(host)):
                    host.engine.transact_now(lambda t: tree.unlink(t, TOP, name, 1, _keep))  # noqa: B023
        assert found == [b".", b"..", *names]

    run_lists(tmp_path, step)


def _names(host: Listed) -> list[bytes]:
    children = host.engine.read_now(lambda t: tree.list_children(t, TOP, b"", 10_000))
    return [each.name for each in children]


def _remove_one(host: Listed, chance: random.Random) -> None:
    _remove(host, chance.choice(_names(host)))


def _remove(host: Listed, name: bytes) -> None:
    host.engine.transact_now(lambda t: tree.unlink(t, TOP, name, 1, _keep))


def _keep(_ino: int) -> bool:
    return True


def test_a_listing_that_has_begun_reads_a_changing_directory_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what changes meanwhile it says what is so; the next one begins with what is there."""
    monkeypatch.setattr(stable_listing, "_CHANGED_S", 600.0)

    async def step(here: Listed, _one: Listed, _other: Listed) -> None:
        for number in range(COUNT):
            here.write(b"%04d" % number)
        node = node_of(here)
        node.names = None
        listings = StableListings(node)
        scans = 0
        scan = listings._scan

        async def counted(ino: int) -> Any:
            nonlocal scans
            scans += 1
            return await scan(ino)

        listings._scan = counted  # type: ignore[method-assign]
        found = await listings.read(TOP, 0, LIMIT)
        told = {each.name for each in found}
        ahead = [name for n in range(COUNT) if (name := b"%04d" % n) not in told]
        gone, other, renamed = ahead[:3]
        for name in (gone, renamed):
            _remove(here, name)
        number = here.write(renamed)
        here.write(b"new")
        listings.changed(TOP)
        found += await rest(listings, TOP, found[-1].following)
        numbers = {each.name: each.ino for each in found}
        assert scans == 1
        assert gone not in numbers
        assert other in numbers
        assert set(numbers) - {b".", b".."} == {*told, *ahead} - {gone, b".", b".."}
        assert numbers[renamed] == number
        assert b"new" in {each.name for each in await rest(listings, TOP, 0)}
        assert scans == 2

    run_lists(tmp_path, step)
