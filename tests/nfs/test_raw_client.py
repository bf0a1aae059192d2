"""The raw client against NFS-Ganesha on a plain directory: proof that the client is right, so that
what it finds at another door is that door's."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.nfs import ganesha
from tests.nfs.ganesha import Ganesha
from tests.nfs.mount import Export
from tests.nfs.rpc import AuthSys, RpcError
from tests.nfs.status import NfsError
from tests.nfs.v3 import Client
from tests.nfs.v3_types import SERVER, Access, Kind, SetAttributes, Stability, Time

LACKING = ganesha.why_not()
pytestmark = pytest.mark.skipif(bool(LACKING), reason=LACKING)

NAMES = {f"name-{number:04}" for number in range(2000)}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ganesha]:
    exported = tmp_path_factory.mktemp("exported")
    with ganesha.serving(tmp_path_factory.mktemp("ganesha"), {"plain": exported}) as running:
        yield running


@dataclass
class Room:
    """An empty directory of the export's, as the disk has it and by version 3."""

    path: Path
    client: Client
    handle: bytes


@pytest.fixture
def room(server: Ganesha, request: pytest.FixtureRequest) -> Room:
    path = server.exports["plain"] / request.node.name
    path.mkdir()
    client = server.v3()
    root = server.mounts().mount("/plain").handle
    return Room(path, client, client.lookup(root, path.name).handle)


# ---- version 3


def test_v3_what_is_exported(server: Ganesha) -> None:
    mounts = server.mounts()
    mounts.null()
    assert Export("/plain", []) in mounts.exports()
    mounts.mount("/plain")
    mounts.unmount("/plain")
    with pytest.raises(NfsError, match="MNT3ERR_ACCES"):
        mounts.mount("/nothing")


def test_v3_a_procedure_that_is_none_is_refused(server: Ganesha) -> None:
    with pytest.raises(RpcError, match="PROC_UNAVAIL"):
        server.connection().call(100003, 3, 99)


def test_v3_a_file_is_written_committed_and_read(room: Room) -> None:
    client = room.client
    client.null()
    made = client.create(room.handle, "a", SetAttributes(mode=0o640))
    unstable = client.write(made.handle, 0, b"x" * 100_001, Stability.UNSTABLE)
    stable = client.write(made.handle, 100_001, b"end")
    assert (unstable.count, stable.count) == (100_001, 3)
    assert stable.committed is Stability.FILE_SYNC
    assert client.commit(made.handle) == unstable.verifier == stable.verifier
    assert (room.path / "a").read_bytes() == b"x" * 100_001 + b"end"
    read = client.read(made.handle, 100_000, 1 << 16)
    assert (read.data, read.eof) == (b"xend", True)
    assert client.read(made.handle, 0, 10).eof is False


def test_v3_attributes(room: Room) -> None:
    client = room.client
    file = client.create(room.handle, "a").handle
    client.setattr(file, SetAttributes(mode=0o604, uid=7, gid=8, size=5, mtime=Time(10, 20)))
    client.setattr(file, SetAttributes(atime=SERVER))
    told, there = client.getattr(file), (room.path / "a").stat()
    assert (told.kind, told.mode, told.uid, told.gid, told.size) == (Kind.REGULAR, 0o604, 7, 8, 5)
    assert told.fileid == there.st_ino
    assert told.mtime.ns == there.st_mtime_ns == 10_000_000_020
    assert told.atime.ns == there.st_atime_ns
    with pytest.raises(NfsError, match="NFS3ERR_NOT_SYNC"):
        client.setattr(file, SetAttributes(size=1), guard=Time(1))


def test_v3_creates(room: Room) -> None:
    client = room.client
    client.create(room.handle, "a", guarded=True)
    client.create(room.handle, "a")
    with pytest.raises(NfsError, match="NFS3ERR_EXIST"):
        client.create(room.handle, "a", guarded=True)


def test_v3_an_exclusive_create_that_is_sent_again_succeeds(room: Room) -> None:
    client = room.client
    made = client.create_exclusive(room.handle, "a", b"verifier")
    assert client.create_exclusive(room.handle, "a", b"verifier").handle == made.handle
    with pytest.raises(NfsError, match="NFS3ERR_EXIST"):
        client.create_exclusive(room.handle, "a", b"anothers")


def test_v3_names(room: Room) -> None:
    client, top = room.client, room.handle
    below = client.mkdir(top, "below", SetAttributes(mode=0o755)).handle
    file = client.create(top, "a").handle
    client.rename(top, "a", below, "b")
    linked = client.link(file, top, "c")
    assert linked is not None
    assert linked.nlink == 2
    target = client.symlink(top, "s", "below/b").handle
    assert client.readlink(target) == "below/b"
    assert client.walk(top, "below/b") == file == client.lookup(top, "c").handle
    with pytest.raises(NfsError, match="NFS3ERR_NOTEMPTY"):
        client.rmdir(top, "below")
    client.remove(below, "b")
    client.rmdir(top, "below")
    client.remove(top, "s")
    assert os.listdir(room.path) == client.names(top) == ["c"]


@pytest.mark.parametrize("plus", [False, True])
def test_v3_a_directory_of_2000_names(room: Room, plus: bool) -> None:
    for name in NAMES:
        (room.path / name).touch()
    entries = list(room.client.entries(room.handle, plus))
    assert {each.name for each in entries} - {".", ".."} == NAMES
    assert len(entries) == len({each.cookie for each in entries})
    if plus:
        told = next(each for each in entries if each.name == "name-0007")
        assert told.handle == room.client.lookup(room.handle, told.name).handle
        assert told.attributes is not None
        assert told.fileid == told.attributes.fileid


def test_v3_a_handle_of_a_file_that_is_gone_is_stale(room: Room) -> None:
    file = room.client.create(room.handle, "a").handle
    room.client.remove(room.handle, "a")
    with pytest.raises(NfsError, match="NFS3ERR_STALE"):
        room.client.getattr(file)


def test_v3_the_filesystem(room: Room) -> None:
    limits, space = room.client.fsinfo(room.handle), room.client.fsstat(room.handle)
    there = os.statvfs(room.path)
    assert limits.read_max >= 1 << 20
    assert space.total_bytes == there.f_frsize * there.f_blocks
    assert room.client.pathconf(room.handle).case_preserving


def test_v3_who_calls_is_asked_for_permission(server: Ganesha, room: Room) -> None:
    file = room.client.create(room.handle, "a", SetAttributes(mode=0o040, gid=77)).handle
    stranger = server.v3(AuthSys(uid=1000, gid=1000))
    assert stranger.access(file) == Access(0)
    with pytest.raises(NfsError, match="NFS3ERR_ACCES"):
        stranger.read(file, 0, 1)
    member = server.v3(AuthSys(uid=1000, gid=1000, groups=range(62, 78)))
    assert member.access(file) == Access.READ
    assert member.read(file, 0, 1).eof
