"""The raw client against NFS-Ganesha on a plain directory: proof that the client is right, so that
what it finds at another door is that door's."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.nfs import ganesha, v4
from tests.nfs import v4_operations as op
from tests.nfs.ganesha import Ganesha
from tests.nfs.mount import Export
from tests.nfs.nlm import Holder, Range
from tests.nfs.rpc import AuthSys, RpcError
from tests.nfs.status import NfsError
from tests.nfs.v3 import Client
from tests.nfs.v3_types import SERVER, Access, Kind, SetAttributes, Stability, Time
from tests.nfs.v4_attributes import (
    FILEHANDLE,
    FILEID,
    LEASE_TIME,
    MAXREAD,
    MODE,
    NUMLINKS,
    OWNER,
    OWNER_GROUP,
    SIZE,
    SPACE_TOTAL,
    SUPPORTED,
    TIME_ACCESS_SET,
    TIME_MODIFY,
    TIME_MODIFY_SET,
    TYPE,
    USUAL,
)
from tests.nfs.v4_operations import LockKind, Share

LACKING = ganesha.why_not()
pytestmark = pytest.mark.skipif(bool(LACKING), reason=LACKING)

NAMES = {f"name-{number:04}" for number in range(2000)}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ganesha]:
    exported = tmp_path_factory.mktemp("exported")
    with ganesha.serving(tmp_path_factory.mktemp("ganesha"), {"plain": exported}) as running:
        yield running


@pytest.fixture(scope="module")
def many(server: Ganesha) -> Path:
    """A directory of the export's that is only read."""
    path = server.exports["plain"] / "many"
    path.mkdir()
    for name in NAMES:
        (path / name).touch()
    return path


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
def test_v3_a_directory_of_2000_names(server: Ganesha, many: Path, plus: bool) -> None:
    client = server.v3()
    directory = client.lookup(server.mounts().mount("/plain").handle, many.name).handle
    entries = list(client.entries(directory, plus))
    assert {each.name for each in entries} - {".", ".."} == NAMES
    assert len(entries) == len({each.cookie for each in entries})
    if plus:
        told = next(each for each in entries if each.name == "name-0007")
        assert told.handle == client.lookup(directory, told.name).handle
        assert told.attributes is not None
        assert told.fileid == told.attributes.fileid


def test_v3_a_handle_of_a_file_that_is_gone_is_stale(room: Room) -> None:
    file = room.client.create(room.handle, "a").handle
    room.client.remove(room.handle, "a")
    with pytest.raises(NfsError, match="NFS3ERR_STALE"):
        room.client.getattr(file)


def test_v3_locks_of_two_owners(server: Ganesha, room: Room) -> None:
    file = room.client.create(room.handle, "a").handle
    mine, theirs = server.locker("one", 1), server.locker("another", 2)
    mine.null()
    mine.lock(Range(file, 0, 10), monitored=False)
    assert theirs.test(Range(file, 5, 10)) == Holder(True, 1, b"1", 0, 10)
    with pytest.raises(NfsError, match="NLM4_DENIED"):
        theirs.lock(Range(file, 9, 1, exclusive=False), monitored=False)
    theirs.lock(Range(file, 10), monitored=False)
    mine.unlock(Range(file, 0, 10))
    assert theirs.test(Range(file, 0, 10)) is None
    theirs.lock(Range(file, 0, 10), monitored=False)
    theirs.unlock(Range(file))


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


# ---- version 4


@dataclass
class Room4:
    """An empty directory of the export's, by version 4."""

    path: Path
    client: v4.Client
    handle: bytes
    another: v4.Client


@pytest.fixture(params=[v4.Client40, v4.Client41])
def room4(server: Ganesha, request: pytest.FixtureRequest) -> Room4:
    name = request.node.name.translate(str.maketrans("[]", "--"))
    path = server.exports["plain"] / name
    path.mkdir()
    client = request.param(server.connection())
    handle = client.walk(f"plain/{name}")
    return Room4(path, client, handle, request.param(server.connection()))


def test_v4_a_file_is_written_committed_and_read(room4: Room4) -> None:
    client, owner = room4.client, v4.Owner()
    made = client.open(room4.handle, "a", owner, creation=op.Guarded((MODE.to(0o640),)))
    unstable = client.write(made.handle, 0, b"x" * 100_001, Stability.UNSTABLE, made.stateid)
    stable = client.write(made.handle, 100_001, b"end", stateid=made.stateid)
    assert (unstable.count, stable.count) == (100_001, 3)
    assert stable.committed is Stability.FILE_SYNC
    assert client.commit(made.handle) == unstable.verifier == stable.verifier
    assert (room4.path / "a").read_bytes() == b"x" * 100_001 + b"end"
    assert client.read(made.handle, 100_000, 1 << 16, made.stateid) == op.ReadResult(b"xend", True)
    client.close(made)
    again = client.open(room4.handle, "a", owner, Share.READ)
    assert again.handle == made.handle
    assert not client.read(again.handle, 0, 10, again.stateid).eof
    with pytest.raises(NfsError, match="NFS4ERR_OPENMODE"):
        client.write(again.handle, 0, b"x", stateid=again.stateid)
    client.close(again)
    with pytest.raises(NfsError, match="NFS4ERR_BAD_STATEID"):
        client.read(again.handle, 0, 10, again.stateid)
    assert client.read(made.handle, 0, 1).data == b"x"


def test_v4_attributes(room4: Room4) -> None:
    client = room4.client
    (room4.path / "a").touch()
    file = client.lookup(room4.handle, "a")
    changed = client.setattr(
        file,
        MODE.to(0o604),
        OWNER.to("7"),
        OWNER_GROUP.to("8"),
        SIZE.to(5),
        TIME_MODIFY_SET.to(Time(10, 20)),
        TIME_ACCESS_SET.to(SERVER),
    )
    assert MODE.number in changed
    told, there = client.getattr(file), (room4.path / "a").stat()
    assert (told[TYPE], told[MODE], told[SIZE]) == (Kind.REGULAR, 0o604, 5)
    assert (told[OWNER], told[OWNER_GROUP]) == ("7", "8")
    assert (told[FILEID], told[NUMLINKS]) == (there.st_ino, 1)
    assert told[TIME_MODIFY].ns == there.st_mtime_ns == 10_000_000_020
    assert TIME_MODIFY_SET not in told
    client.call(op.putfh(file), op.verify([SIZE.to(5)]), op.nverify([SIZE.to(6)]))
    with pytest.raises(NfsError, match="VERIFY: NFS4ERR_NOT_SAME"):
        client.call(op.putfh(file), op.verify([SIZE.to(6)]))
    limits = client.getattr(file, (SUPPORTED, FILEHANDLE, MAXREAD, LEASE_TIME, SPACE_TOTAL))
    assert limits[FILEHANDLE] == file
    supported = limits[SUPPORTED]
    assert set(supported) >= {each.number for each in USUAL}
    assert limits[MAXREAD] >= 1 << 20
    volume = os.statvfs(room4.path)
    assert limits[SPACE_TOTAL] == volume.f_frsize * volume.f_blocks


def test_v4_creates(room4: Room4) -> None:
    client, owner = room4.client, v4.Owner()
    client.open(room4.handle, "a", owner, creation=op.Guarded())
    client.open(room4.handle, "a", owner, creation=op.Unchecked())
    with pytest.raises(NfsError, match="NFS4ERR_EXIST"):
        client.open(room4.handle, "a", owner, creation=op.Guarded())
    with pytest.raises(NfsError, match="NFS4ERR_NOENT"):
        client.open(room4.handle, "b", owner)


def test_v4_an_exclusive_create_that_is_sent_again_succeeds(room4: Room4) -> None:
    client, owner = room4.client, v4.Owner()
    made = client.open(room4.handle, "a", owner, creation=op.Exclusive(b"verifier"))
    again = client.open(room4.handle, "a", owner, creation=op.Exclusive(b"verifier"))
    assert again.handle == made.handle
    with pytest.raises(NfsError, match="NFS4ERR_EXIST"):
        client.open(room4.handle, "a", owner, creation=op.Exclusive(b"anothers"))


def test_v4_names(room4: Room4) -> None:
    client, top = room4.client, room4.handle
    below = client.mkdir(top, "below", MODE.to(0o755))
    file = client.open(top, "a", v4.Owner(), creation=op.Guarded()).handle
    client.rename(top, "a", below, "b")
    client.link(file, top, "c")
    assert client.getattr(file)[NUMLINKS] == 2
    assert client.readlink(client.symlink(top, "s", "below/b")) == "below/b"
    assert client.lookup(below, "b") == file == client.lookup(top, "c")
    assert client.lookup_parent(below) == top
    with pytest.raises(NfsError, match="NFS4ERR_NOTEMPTY"):
        client.remove(top, "below")
    client.remove(below, "b")
    client.remove(top, "below")
    client.remove(top, "s")
    assert os.listdir(room4.path) == client.names(top) == ["c"]
    assert client.access(file, Access.READ) == Access.READ
    assert client.call(op.putfh(top), flavors := op.secinfo("c")).of(flavors) == [1]


def test_v4_a_directory_of_2000_names(room4: Room4, many: Path) -> None:
    client = room4.client
    directory = client.walk(f"plain/{many.name}")
    entries = list(client.entries(directory, (FILEID, FILEHANDLE)))
    assert {each.name for each in entries} == NAMES
    assert len(entries) == len(NAMES) == len({each.cookie for each in entries})
    told = next(each for each in entries if each.name == "name-0007")
    assert told.attributes[FILEHANDLE] == client.lookup(directory, told.name)
    assert told.attributes[FILEID] == (many / told.name).stat().st_ino


def test_v4_a_handle_of_a_file_that_is_gone_is_stale(room4: Room4) -> None:
    (room4.path / "a").touch()
    file = room4.client.lookup(room4.handle, "a")
    room4.client.remove(room4.handle, "a")
    with pytest.raises(NfsError, match="NFS4ERR_STALE"):
        room4.client.getattr(file)


def test_v4_locks_of_two_owners(room4: Room4) -> None:
    client, another = room4.client, room4.another
    (room4.path / "a").touch()
    mine = client.open(room4.handle, "a", v4.Owner())
    theirs = another.open(room4.handle, "a", v4.Owner())
    owner = v4.Owner()
    locked = client.lock(mine, owner, offset=10, length=10)
    with pytest.raises(v4.LockDenied) as caught:
        another.lock(theirs, v4.Owner(), LockKind.READ, offset=19)
    held = caught.value.held
    assert (held.offset, held.length, held.kind) == (10, 10, LockKind.WRITE)
    with pytest.raises(v4.LockDenied):
        another.lock_test(theirs.handle, v4.Owner(), offset=0, length=11)
    another.lock_test(theirs.handle, v4.Owner(), offset=20)
    client.lock_test(mine.handle, owner)
    client.lock_more(locked, LockKind.READ, offset=0, length=10)
    client.unlock(locked, offset=15, length=5)
    beside = another.lock(theirs, v4.Owner(), offset=15, length=5)
    client.unlock(locked)
    another.lock_more(beside, offset=0, length=20)
    another.unlock(beside)
    another.close(theirs)
    client.close(mine)


def test_v4_a_share_denies(room4: Room4) -> None:
    (room4.path / "a").touch()
    mine = room4.client.open(room4.handle, "a", v4.Owner(), Share.READ, deny=Share.WRITE)
    with pytest.raises(NfsError, match="NFS4ERR_SHARE_DENIED"):
        room4.another.open(room4.handle, "a", v4.Owner())
    room4.client.close(mine)
    room4.another.open(room4.handle, "a", v4.Owner())


def test_v40_a_client_renews_its_lease(server: Ganesha) -> None:
    client = v4.Client40(server.connection())
    client.renew()
    with pytest.raises(NfsError, match="NFS4ERR_STALE_CLIENTID"):
        client.call(op.renew(client.clientid ^ (1 << 40)))


def test_v41_a_session(server: Ganesha) -> None:
    client = v4.Client41(server.connection())
    client.renew()
    with pytest.raises(NfsError, match="SEQUENCE: NFS4ERR_SEQ_MISORDERED"):
        client.call_as(client.sequence + 5, op.putrootfh())
    made = op.create(Kind.DIRECTORY, "made-once")
    number = client.sequence
    first = client.call_as(number, op.putrootfh(), op.lookup("plain"), made, cache=True).of(made)
    assert (
        client.call_as(number, op.putrootfh(), op.lookup("plain"), made, cache=True).of(made)
        == first
    )
    client.end()
    with pytest.raises(NfsError, match="SEQUENCE: NFS4ERR_BADSESSION"):
        client.renew()


def test_v41_an_exclusive_create_with_attributes(server: Ganesha) -> None:
    client, owner = v4.Client41(server.connection()), v4.Owner()
    top = client.walk("plain")
    how = op.ExclusiveWith(b"verifier", (MODE.to(0o640),))
    made = client.open(top, "exclusive", owner, creation=how)
    assert client.open(top, "exclusive", owner, creation=how).handle == made.handle
    assert client.getattr(made.handle)[MODE] == 0o640


def test_v4_minor_versions_that_are_not_spoken(server: Ganesha) -> None:
    with pytest.raises(NfsError, match="NFS4ERR_MINOR_VERS_MISMATCH"):
        v4.compound(server.connection(), 2, (op.putrootfh(),))
