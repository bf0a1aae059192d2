"""What other doors and clients of the other version change, a client sees that has the file open:
nobody is given a delegation, so none has to be called back."""

from collections.abc import Callable
from pathlib import Path

import pytest

from kvfs import Client
from tests.cluster.waiting import wait_until
from tests.nfs import ganesha
from tests.nfs.door import Door
from tests.nfs.node.test_door import Side
from tests.nfs.status import NfsError
from tests.nfs.v3_types import Stability
from tests.nfs.v4 import Opened, Owner
from tests.nfs.v4_attributes import CHANGE
from tests.nfs.v4_operations import Guarded, Share, Unchecked

LACKING = ganesha.why_not()
pytestmark = pytest.mark.skipif(bool(LACKING), reason=LACKING)
SIZE = 8192


class Reader:
    """A client of version 4 that has a file open for reading, and would take a delegation."""

    def __init__(self, door: Door, version: str, home: Path, name: str) -> None:
        self._side = Side(door, version, home)
        self._name = name
        self._wanted = Share.READ
        if version == "v41":
            self._wanted |= Share.WANT_READ_DELEGATION
        self.opened = self.open()

    def open(self) -> Opened:
        """Fails where a delegation is given."""
        return self._side.client.open(self._side.home, self._name, Owner(), self._wanted)

    def read(self) -> bytes:
        """By what it has open."""
        return self._side.client.read(self.opened.handle, 0, SIZE, self.opened.stateid).data

    def read_anew(self) -> bytes:
        """By a new open of the name."""
        opened = self.open()
        data = self._side.client.read(opened.handle, 0, SIZE, opened.stateid).data
        self._side.client.close(opened)
        return data

    def change(self) -> int:
        """By which a client knows whether what it remembers still holds."""
        return int(self._side.client.getattr(self.opened.handle, (CHANGE,))[CHANGE])


def by_mount(_door: Door, path: Path, data: bytes) -> None:
    with path.open("r+b", buffering=0) as file:
        file.write(data)


def by_version_3(door: Door, path: Path, data: bytes) -> None:
    side = Side(door, "v3", path.parent)
    side.client.write(side.lookup(side.home, path.name), 0, data)


def by_another_client(door: Door, path: Path, data: bytes) -> None:
    side = Side(door, "v40", path.parent)
    opened = side.client.open(side.home, path.name, Owner(), Share.WRITE)
    side.client.write(opened.handle, 0, data, stateid=opened.stateid)
    side.client.close(opened)


@pytest.mark.parametrize("version", ["v40", "v41"])
@pytest.mark.parametrize("write", [by_mount, by_version_3, by_another_client])
def test_an_open_file_shows_what_others_write(
    plain_door: Door, home: Path, version: str, write: Callable[[Door, Path, bytes], None]
) -> None:
    path = home / "x"
    path.write_bytes(b"1" * SIZE)
    path.chmod(0o666)
    reader = Reader(plain_door, version, home, "x")
    assert reader.read() == b"1" * SIZE
    before = reader.change()
    write(plain_door, path, b"2" * SIZE)
    wait_until(lambda: reader.read() == b"2" * SIZE, "the client reads what was written")
    wait_until(lambda: reader.change() != before, "its memory does not hold any more")


@pytest.mark.parametrize("version", ["v40", "v41"])
def test_who_opens_a_replaced_file_has_the_new_content(
    plain_door: Door, home: Path, version: str
) -> None:
    """Who has the former one open goes on reading that."""
    path = home / "x"
    path.write_bytes(b"1")
    reader = Reader(plain_door, version, home, "x")
    with Client(plain_door.node.store) as client:
        client.put(f"/shared/{home.name}/x", b"2")
    wait_until(lambda: reader.read_anew() == b"2", "the client has what the Python API has put")
    (home / "new").write_bytes(b"3")
    (home / "new").rename(path)
    wait_until(lambda: reader.read_anew() == b"3", "the client has what the mount has renamed")
    assert reader.read() == b"1"


@pytest.mark.parametrize("version", ["v40", "v41"])
def test_both_versions_change_one_file(plain_door: Door, home: Path, version: str) -> None:
    old, new = Side(plain_door, "v3", home), Side(plain_door, version, home)
    handle = old.client.create(old.home, "x").handle
    with pytest.raises(NfsError, match="EXIST"):
        new.client.open(new.home, "x", Owner(), Share.BOTH, creation=Guarded())
    opened = new.client.open(new.home, "x", Owner(), Share.BOTH, creation=Unchecked())
    for number in range(8):
        old.client.write(handle, 2 * number, b"3", Stability.UNSTABLE)
        new.client.write(
            opened.handle, 2 * number + 1, b"4", Stability.UNSTABLE, stateid=opened.stateid
        )
        written = b"34" * (number + 1)
        assert old.read(handle) == written
        assert new.client.read(opened.handle, 0, SIZE, opened.stateid).data == written
    old.client.commit(handle)
    old.client.rename(old.home, "x", old.home, "y")
    assert new.lookup(new.home, "y") == opened.handle
    new.client.write(opened.handle, 16, b"5", stateid=opened.stateid)
    new.client.close(opened)
    assert (home / "y").read_bytes() == b"34" * 8 + b"5"
    new.client.remove(new.home, "y")
    with pytest.raises(NfsError, match="NOENT"):
        old.lookup(old.home, "y")
