"""A handle is of one file: evicted, deleted or replaced, it is stale, and never another's."""

import os
from pathlib import Path

import pytest

from tests.cluster.waiting import wait_until
from tests.nfs import ganesha
from tests.nfs.door import Door
from tests.nfs.node.test_door import EVERY, Side
from tests.nfs.status import NfsError
from tests.nfs.v4 import Owner
from tests.nfs.v4_operations import Share

LACKING = ganesha.why_not()
pytestmark = pytest.mark.skipif(bool(LACKING), reason=LACKING)
MIB = 1 << 20


@pytest.fixture
def cache(plain_door: Door) -> Path:
    """A namespace of 8 MiB that evicts, for everybody."""
    return plain_door.node.mount / "cache"


def fill(cache: Path, *witnesses: Path) -> None:
    """Write by the mount until these have been evicted."""

    def are_gone() -> bool:
        for number in range(16):
            (cache / f"filler{number}").write_bytes(bytes(MIB // 2))
        return not any(each.exists() for each in witnesses)

    wait_until(are_gone, "the cache evicts what was not used for longest")


@pytest.fixture(params=EVERY)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def side(plain_door: Door, version: str, home: Path) -> Side:
    return Side(plain_door, version, home)


def is_stale(side: Side, handle: bytes, once: bytes) -> bool:
    """A server that has it open still may read what the file was, and nothing else, until it closes
    it."""
    try:
        assert side.read(handle) == once
    except NfsError as error:
        assert "STALE" in error.name, error
        return True
    return False


def is_found(side: Side, name: str) -> bool:
    try:
        side.lookup(side.home, name)
    except NfsError as error:
        assert "NOENT" in error.name, error
        return False
    return True


def wait_until_stale(side: Side, handle: bytes, once: bytes) -> None:
    wait_until(lambda: is_stale(side, handle, once), "the handle is stale")
    with pytest.raises(NfsError, match="STALE"):
        side.client.getattr(handle)


def test_an_evicted_file_is_stale_and_its_successor_another(
    plain_door: Door, cache: Path, version: str
) -> None:
    inside = cache / version
    inside.mkdir()
    inside.chmod(0o777)
    side = Side(plain_door, version, inside, "cache")
    handle = side.make("block", b"first" * 1000)
    assert side.read(handle) == b"first" * 1000
    fill(cache, inside / "block")
    wait_until_stale(side, handle, b"first" * 1000)
    with pytest.raises(NfsError, match="NOENT"):
        side.lookup(side.home, "block")
    (inside / "block").write_bytes(b"second" * 1000)
    wait_until(lambda: is_found(side, "block"), "what the mount makes is found")
    again = side.lookup(side.home, "block")
    assert again != handle
    assert side.read(again) == b"second" * 1000
    with pytest.raises(NfsError, match="STALE"):
        side.read(handle)
    with pytest.raises(NfsError, match="STALE"):
        side.client.write(handle, 0, b"x")
    assert side.read(again) == b"second" * 1000


@pytest.mark.parametrize("version", ["v40", "v41"], indirect=True)
def test_what_a_client_has_open_is_not_evicted(plain_door: Door, cache: Path, version: str) -> None:
    inside = cache / f"open-{version}"
    inside.mkdir()
    inside.chmod(0o777)
    side = Side(plain_door, version, inside, "cache")
    side.make("block", b"kept" * 1000)
    (inside / "witness").write_bytes(b"x")
    opened = side.client.open(side.home, "block", Owner(), Share.READ)
    fill(cache, inside / "witness")
    assert side.client.read(opened.handle, 0, 4000, opened.stateid).data == b"kept" * 1000
    assert (inside / "block").read_bytes() == b"kept" * 1000
    side.client.close(opened)
    wait_until(
        lambda: fill(cache) is None and not (inside / "block").exists(),
        "it is evicted once nobody has it open",
    )


def test_a_deleted_file_is_stale_when_its_name_is_used_again(side: Side, home: Path) -> None:
    first = side.make("x", b"first")
    side.client.remove(side.home, "x")
    second = side.make("x", b"second")
    assert first != second
    assert side.read(second) == b"second"
    wait_until_stale(side, first, b"first")
    assert (home / "x").read_bytes() == b"second"


def test_a_rename_over_a_file_leaves_its_handle_no_bytes_but_its_own(
    side: Side, home: Path
) -> None:
    old, new = side.make("old", b"old"), side.make("new", b"new")
    side.client.rename(side.home, "new", side.home, "old")
    assert side.lookup(side.home, "old") == new
    assert side.read(new) == b"new"
    wait_until_stale(side, old, b"old")
    assert os.listdir(home) == ["old"]


@pytest.mark.parametrize("version", ["v40", "v41"], indirect=True)
def test_an_open_file_is_read_and_written_after_a_rename_over_it(side: Side, home: Path) -> None:
    client = side.client
    side.make("old", b"old")
    side.make("new", b"new")
    opened = client.open(side.home, "old", Owner(), Share.BOTH)
    client.rename(side.home, "new", side.home, "old")
    assert client.read(opened.handle, 0, 10, opened.stateid).data == b"old"
    client.write(opened.handle, 3, b"er", stateid=opened.stateid)
    assert client.read(opened.handle, 0, 10, opened.stateid).data == b"older"
    assert (home / "old").read_bytes() == b"new"
    client.close(opened)
    wait_until_stale(side, opened.handle, b"older")
    assert (home / "old").read_bytes() == b"new"


def test_a_silly_rename_keeps_the_file_until_its_name_goes(side: Side, home: Path) -> None:
    """What a kernel's client does with a file that a program removes and has open."""
    handle = side.make("x", b"in use")
    side.client.rename(side.home, "x", side.home, ".nfs0001")
    successor = side.make("x", b"another")
    assert side.read(handle) == b"in use"
    side.client.write(handle, 0, b"IN")
    assert side.read(handle) == b"IN use"
    assert side.read(successor) == b"another"
    side.client.remove(side.home, ".nfs0001")
    assert os.listdir(home) == ["x"]
    wait_until_stale(side, handle, b"IN use")


def test_a_handle_goes_with_its_file_to_another_directory(side: Side, home: Path) -> None:
    handle = side.make("x", b"moved")
    below = home / "below"
    below.mkdir(mode=0o777)
    below.chmod(0o777)
    side.client.rename(side.home, "x", side.lookup(side.home, "below"), "y")
    assert side.read(handle) == b"moved"
    (below / "y").rename(home / "z")
    assert side.read(handle) == b"moved"
    assert side.lookup(side.home, "z") == handle
