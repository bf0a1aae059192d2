"""Nodes of a cluster export what the others write, by the same handles."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster.waiting import wait_until
from tests.integration.several import several
from tests.nfs import ganesha
from tests.nfs.door import Door
from tests.nfs.node.test_door import EVERY, Side
from tests.nfs.status import NfsError
from tests.nfs.v3_types import SetAttributes
from tests.nfs.v4_attributes import FSID, MODE, SIZE

LACKING = ganesha.why_not()
pytestmark = pytest.mark.skipif(bool(LACKING), reason=LACKING)


@dataclass
class Two:
    """Two nodes that export the namespaces `strict` and `cache`."""

    a: Door
    b: Door


@pytest.fixture(scope="module")
def two() -> Iterator[Two]:
    with several(0) as cluster, contextlib.ExitStack() as open_:
        a = open_.enter_context(Door.of(cluster))
        b = open_.enter_context(Door.of(cluster))
        for name, coherence in (("strict", "strict"), ("cache", "cache")):
            a.exported(name, mode=0o777)
            a.kvfs("namespace", "set", name, "--coherence", coherence)
        wait_until(lambda: len(b.node.status()["nfs"]["exports"]) == 2, "both export both")
        b.kvfs("nfs", "list")
        yield Two(a, b)


@pytest.fixture(params=EVERY)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@dataclass
class Sides:
    """A directory by the mount of each node, and by the server of each."""

    here: Path
    there: Path
    a: Side
    b: Side


def sides(two: Two, version: str, namespace: str, name: str) -> Sides:
    home = two.a.node.mount / namespace / f"{name}-{version}"
    home.mkdir()
    home.chmod(0o777)
    there = two.b.node.mount / namespace / home.name
    wait_until(lambda: there.exists() and there.stat().st_mode & 0o777 == 0o777, "it is there")
    a = Side(two.a, version, home, namespace)
    made: list[Side] = []

    def is_there() -> bool:
        with contextlib.suppress(NfsError):
            made.append(Side(two.b, version, home, namespace))
        return bool(made)

    wait_until(is_there, "the other server has it")
    return Sides(home, there, a, made[-1])


def test_in_a_strict_namespace_what_another_node_writes_is_read_at_once(
    two: Two, version: str
) -> None:
    """A name that is looked up. By a handle alone it is read what the server has open, for a
    second."""
    side = sides(two, version, "strict", "fresh")
    (side.there / "x").write_bytes(b"0" * 100)
    handle = side.a.lookup(side.a.home, "x")
    assert side.a.read(handle) == b"0" * 100
    for number in range(1, 20):
        data = b"%d" % number * 100
        (side.there / "x").write_bytes(data)
        assert side.a.read(side.a.lookup(side.a.home, "x")) == data
    (side.there / "x").unlink()
    with pytest.raises(NfsError, match="NOENT"):
        side.a.lookup(side.a.home, "x")
    (side.there / "y").write_bytes(b"new")
    assert side.a.read(side.a.lookup(side.a.home, "y")) == b"new"


def size_of(side: Side, handle: bytes) -> int:
    told = side.client.getattr(handle)
    size = told[SIZE] if hasattr(side.client, "minor") else told.size
    assert isinstance(size, int)
    return size


@pytest.mark.parametrize(
    ("version", "namespace"), [("v3", "strict"), ("v41", "cache")], indirect=["version"]
)
def test_a_client_with_a_handle_reads_what_another_node_wrote(
    two: Two, version: str, namespace: str
) -> None:
    """What the server has open it reads for a second more, attributes and bytes of one content."""
    side = sides(two, version, namespace, "held")
    (side.there / "x").write_bytes(b"before" * 1000)
    wait_until(lambda: (side.here / "x").exists(), "it is there")
    handle = side.a.lookup(side.a.home, "x")
    wait_until(lambda: side.a.read(handle) == b"before" * 1000, "it is read")
    longest = 0.0
    for number in range(2):
        data = b"%06d" % number * (1000 + number)
        (side.there / "x").write_bytes(data)
        began = time.monotonic()
        told: list[int] = []

        def is_new(data: bytes = data, told: list[int] = told) -> bool:
            told.append(size_of(side.a, handle))
            found = side.a.read(handle)
            assert len(found) == told[-1] or size_of(side.a, handle) != told[-1]
            return found == data

        wait_until(is_new, "the new content is read")
        longest = max(longest, time.monotonic() - began)
    print(f"{namespace} {version}: read by the handle after {longest:.3f} s at most")


@pytest.mark.parametrize("namespace", ["strict", "cache"])
def test_what_one_server_wrote_another_reads(two: Two, version: str, namespace: str) -> None:
    side = sides(two, version, namespace, "served")
    side.a.make("x", b"written by NFS" * 100)

    def is_read() -> bool:
        try:
            return side.b.read(side.b.lookup(side.b.home, "x")) == b"written by NFS" * 100
        except NfsError as error:
            assert "NOENT" in error.name, error
            return False

    wait_until(is_read, "the other node's client reads it")


def test_a_handle_of_one_node_is_good_on_the_other(two: Two, version: str) -> None:
    """So that a client may be moved, or its address be taken over."""
    side = sides(two, version, "strict", "moved")
    handle = side.a.make("x", b"the same file")
    assert side.b.lookup(side.b.home, "x") == handle
    assert side.b.read(handle) == b"the same file"
    assert side.a.home == side.b.home
    mode = SetAttributes(mode=0o755) if version == "v3" else MODE.to(0o755)
    below = side.a.client.mkdir(side.a.home, "below", mode)
    below = getattr(below, "handle", below)
    side.b.client.rename(side.b.home, "x", below, "y")
    assert side.b.read(handle) == b"the same file"
    wait_until(lambda: (side.here / "below" / "y").exists(), "it was moved")
    assert side.a.read(handle) == b"the same file"
    if version == "v3":
        first, second = (each.client.getattr(handle) for each in (side.a, side.b))
        assert (first.fsid, first.fileid) == (second.fsid, second.fileid)
    else:
        fsids = {each.client.getattr(handle, (FSID,))[FSID] for each in (side.a, side.b)}
        assert len(fsids) == 1


def test_a_file_that_another_node_removed_is_stale(two: Two, version: str) -> None:
    side = sides(two, version, "strict", "removed")
    handle = side.a.make("x", b"first")
    assert side.a.read(handle) == b"first"
    wait_until(lambda: (side.there / "x").exists(), "it is there")
    (side.there / "x").unlink()
    (side.there / "x").write_bytes(b"second")

    def is_stale() -> bool:
        try:
            assert side.a.read(handle) == b"first"
        except NfsError as error:
            assert "STALE" in error.name, error
            return True
        return False

    wait_until(is_stale, "the handle is stale")
    assert side.a.read(side.a.lookup(side.a.home, "x")) == b"second"
