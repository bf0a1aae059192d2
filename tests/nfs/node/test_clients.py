"""Several clients at once; names, sizes, times, links and owners as they are on the mount."""

import contextlib
import itertools
import os
import random
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.waiting import wait_until
from tests.conftest import LONG, SEED
from tests.nfs import ganesha
from tests.nfs.door import Door
from tests.nfs.files import Files, LibNfs, Raw41, library
from tests.nfs.node.test_door import EVERY, Side
from tests.nfs.rpc import AuthSys
from tests.nfs.status import NfsError
from tests.nfs.v3_types import SERVER, SetAttributes, Time
from tests.nfs.v4_attributes import (
    MODE,
    NUMLINKS,
    OWNER,
    SIZE,
    SPACE_USED,
    TIME_ACCESS,
    TIME_ACCESS_SET,
    TIME_MODIFY,
    TIME_MODIFY_SET,
)
from tests.nfs.v4_operations import readdir

LACKING = ganesha.why_not()
pytestmark = pytest.mark.skipif(bool(LACKING), reason=LACKING)
STEPS = 400 if LONG else 60
MANY = 10_000 if LONG else 2_000


@pytest.fixture(params=EVERY)
def side(request: pytest.FixtureRequest, plain_door: Door, home: Path) -> Side:
    return Side(plain_door, request.param, home)


# ---- several at once


class Actor:
    """A client that makes, reads, renames and removes files of its own in a directory of all, and
    knows what there must be."""

    def __init__(self, files: Files, home: str, number: int) -> None:
        self.files = files
        self.model: dict[str, bytes] = {}
        self.won: list[str] = []
        self._home = home
        self._number = number
        self._random = random.Random(f"{SEED} {number}")

    def run(self) -> None:
        for step in range(STEPS):
            act = self._random.choice((self._write, self._write, self._read, self._move, self._end))
            act(f"{self._number}-{self._random.randrange(12)}")
            self._race(f"race{step // 4}")

    def _write(self, name: str) -> None:
        data = self._random.randbytes(self._random.randrange(20_000))
        self.files.write(f"{self._home}/{name}", data)
        self.model[name] = data

    def _read(self, name: str) -> None:
        if name in self.model:
            assert self.files.read(f"{self._home}/{name}") == self.model[name]
        else:
            with pytest.raises(FileNotFoundError):
                self.files.read(f"{self._home}/{name}")

    def _move(self, name: str) -> None:
        to = f"{self._number}-{self._random.randrange(12)}"
        if name in self.model and to != name:
            self.files.replace(f"{self._home}/{name}", f"{self._home}/{to}")
            self.model[to] = self.model.pop(name)

    def _end(self, name: str) -> None:
        if self.model.pop(name, None) is not None:
            self.files.remove(f"{self._home}/{name}")

    def _race(self, name: str) -> None:
        """Whoever makes it first has it."""
        with contextlib.suppress(FileExistsError):
            self.files.write(f"{self._home}/{name}", b"%d" % self._number, new=True)
            self.won.append(name)


@pytest.mark.skipif(library() is None, reason="not installed: libnfs (libnfs-utils)")
def test_eight_clients_at_once(plain_door: Door, home: Path) -> None:
    kinds = [LibNfs, Raw41] * 4
    with contextlib.ExitStack() as closing:
        actors = []
        for number, kind in enumerate(kinds):
            files: Any = kind(plain_door, "shared")
            closing.callback(files.close)
            actors.append(Actor(files, home.name, number))
        with ThreadPoolExecutor(len(actors)) as pool:
            for each in [pool.submit(actor.run) for actor in actors]:
                each.result()
        races = {f"race{step // 4}" for step in range(STEPS)}
        won = [name for actor in actors for name in actor.won]
        assert sorted(won) == sorted(races)
        expected = {name: data for actor in actors for name, data in actor.model.items()}
        expected |= {name: b"%d" % each for each, a in enumerate(actors) for name in a.won}
        assert actors[0].files.names(home.name) == set(expected) == set(os.listdir(home))
        for name, data in expected.items():
            assert (home / name).read_bytes() == data
            assert actors[1].files.read(f"{home.name}/{name}") == data


# ---- a directory


@pytest.fixture(scope="module")
def many(plain_door: Door) -> Path:
    """A directory of so many files, half of which may go."""
    path = plain_door.node.mount / "shared" / "many"
    path.mkdir()
    path.chmod(0o777)
    for number in range(MANY):
        os.mknod(path / f"{'stays' if number % 2 else 'goes'}-{number:05d}", stat.S_IFREG)
    return path


@pytest.mark.parametrize("version", EVERY)
def test_a_large_directory_is_listed_while_it_changes(
    plain_door: Door, many: Path, version: str
) -> None:
    """What is there all the time is listed once, whatever comes and goes between its pages."""
    side = Side(plain_door, version, many)
    is_v4 = hasattr(side.client, "minor")
    fresh = itertools.count()
    gone = [f"goes-{number:05d}" for number in range(0, MANY, 2)]
    random.Random(SEED).shuffle(gone)
    seen: list[str] = []
    cookie, verifier, pages = 0, bytes(8), 0
    found: Any
    while True:
        if is_v4:
            found = side.client.ask(side.home, readdir(cookie, verifier, count=16 << 10))
        else:
            found = side.client.readdirplus(side.home, cookie, verifier)
        seen += [each.name for each in found.entries]
        pages += 1
        if found.eof:
            break
        cookie, verifier = found.entries[-1].cookie, found.verifier
        for _ in range(20):
            os.mknod(many / f"comes-{version}-{next(fresh)}", stat.S_IFREG)
            with contextlib.suppress(FileNotFoundError):
                (many / gone.pop()).unlink()
    listed = [name for name in seen if name not in (".", "..")]
    assert pages > 2
    assert len(listed) == len(set(listed))
    assert {name for name in listed if name.startswith("stays")} == {
        f"stays-{number:05d}" for number in range(1, MANY, 2)
    }


ODD_NAMES = (
    "n" * 255,
    "\N{GREEK SMALL LETTER OMEGA}" * 127,
    "...",
    ".hidden",
    "a b\tc\nd",
    "back\\slash",
    "colon:star*question?",
    "%2F%00",
    "-rf",
    "trailing.",
    "trailing ",
)


@pytest.mark.parametrize("name", ODD_NAMES, ids=range(len(ODD_NAMES)))
def test_odd_names(side: Side, home: Path, name: str) -> None:
    handle = side.make(name, b"odd")
    assert os.listdir(home) == [name] == side.client.names(side.home)
    assert side.lookup(side.home, name) == handle
    side.client.rename(side.home, name, side.home, name[::-1])
    side.client.remove(side.home, name[::-1])
    assert os.listdir(home) == []


def test_a_name_that_is_too_long(side: Side) -> None:
    with pytest.raises(NfsError, match="NAMETOOLONG"):
        side.make("n" * 256, b"")


def test_names_that_are_no_utf_8(plain_door: Door, home: Path) -> None:
    """Names are bytes, as on the mount, by version 4 too."""
    name = os.fsdecode(b"caf\xe9-\xff")
    side = Side(plain_door, "v3", home)
    handle = side.make(name, b"bytes")
    assert os.listdir(os.fsencode(home)) == [b"caf\xe9-\xff"]
    assert side.client.names(side.home) == [name]
    four = Side(plain_door, "v41", home)
    assert four.client.names(four.home) == [name]
    assert four.read(four.lookup(four.home, name)) == b"bytes" == side.read(handle)
    side.client.remove(side.home, name)


# ---- sizes, links, times, owners


def set_attributes(side: Side, handle: bytes, v3: SetAttributes, *v4: Any) -> None:
    if hasattr(side.client, "minor"):
        side.client.setattr(handle, *v4)
    else:
        side.client.setattr(handle, v3)


def told(side: Side, handle: bytes) -> dict[str, Any]:
    found: Any = side.client.getattr(handle)
    if not hasattr(side.client, "minor"):
        return {
            "mode": found.mode,
            "links": found.nlink,
            "owner": found.uid,
            "size": found.size,
            "used": found.used,
            "atime": found.atime.ns,
            "mtime": found.mtime.ns,
        }
    return {
        "mode": found[MODE],
        "links": found[NUMLINKS],
        "owner": int(found[OWNER]),
        "size": found[SIZE],
        "used": found[SPACE_USED],
        "atime": found[TIME_ACCESS].ns,
        "mtime": found[TIME_MODIFY].ns,
    }


def test_files_with_holes_and_of_other_sizes(side: Side, home: Path) -> None:
    handle = side.make("x", b"head")
    side.client.write(handle, 1 << 30, b"tail")
    assert side.client.read(handle, 0, 8).data == b"head\0\0\0\0"
    assert side.client.read(handle, (1 << 30) - 4, 8).data == b"\0\0\0\0tail"
    assert told(side, handle)["size"] == (1 << 30) + 4
    assert told(side, handle)["used"] < 1 << 20
    for size in (2, 1 << 20, 0, 100):
        set_attributes(side, handle, SetAttributes(size=size), SIZE.to(size))
        assert told(side, handle)["size"] == size
        wait_until(lambda size=size: (home / "x").stat().st_size == size, "the mount has it")
        expected = b"he".ljust(4, b"\0")[:4] if size == 1 << 20 else None
        if expected:
            assert side.client.read(handle, 0, 4).data == expected
    assert (home / "x").read_bytes() == bytes(100)


def test_hard_and_symbolic_links(side: Side, home: Path) -> None:
    handle = side.make("x", b"linked")
    side.client.link(handle, side.home, "y")
    assert told(side, handle)["links"] == 2 == (home / "x").stat().st_nlink
    assert side.lookup(side.home, "y") == handle
    side.client.remove(side.home, "x")
    assert side.read(handle) == b"linked" == (home / "y").read_bytes()
    for target in ("y", "../elsewhere", "/etc/passwd", "t" * 1000):
        side.client.symlink(side.home, "s", target)
        assert side.client.readlink(side.lookup(side.home, "s")) == target
        wait_until(lambda target=target: os.readlink(home / "s") == target, "so on the mount")
        side.client.remove(side.home, "s")


def test_times(side: Side, home: Path) -> None:
    handle = side.make("x", b"")
    then, later = Time(1_000_000_000, 123_456_789), Time(1_500_000_000, 5)
    set_attributes(
        side,
        handle,
        SetAttributes(atime=then, mtime=later),
        TIME_ACCESS_SET.to(then),
        TIME_MODIFY_SET.to(later),
    )
    there = (home / "x").stat()
    assert (there.st_atime_ns, there.st_mtime_ns) == (then.ns, later.ns)
    assert (told(side, handle)["atime"], told(side, handle)["mtime"]) == (then.ns, later.ns)
    set_attributes(side, handle, SetAttributes(mtime=SERVER), TIME_MODIFY_SET.to(SERVER))
    wait_until(lambda: (home / "x").stat().st_mtime_ns > later.ns, "it is the server's time")


def test_modes_and_owners(side: Side, home: Path) -> None:
    handle = side.make("x", b"")
    set_attributes(side, handle, SetAttributes(mode=0o4750), MODE.to(0o4750))
    assert (home / "x").stat().st_mode & 0o7777 == told(side, handle)["mode"] & 0o7777 == 0o4750
    assert told(side, handle)["owner"] == 4001 == (home / "x").stat().st_uid
    with pytest.raises(NfsError, match="PERM"):
        set_attributes(side, handle, SetAttributes(uid=4002), OWNER.to("4002"))


@pytest.mark.parametrize(
    ("squash", "caller", "owner"),
    [
        ("root", 0, 65534),
        ("root", 4001, 4001),
        ("all", 0, 65534),
        ("all", 4001, 65534),
        ("none", 0, 0),
        ("none", 4001, 4001),
    ],
)
def test_whose_the_files_are(plain_door: Door, squash: str, caller: int, owner: int) -> None:
    name = f"of-{squash}"
    if not (plain_door.node.mount / name).exists():
        plain_door.exported(name, "--squash", squash, mode=0o777)
    who = AuthSys(uid=caller, gid=caller)
    versions = ("v41",) if squash == "none" else ("v41", "v3")
    for version in versions:
        client = getattr(plain_door, version)(who)
        by_v3 = version == "v3"
        root = plain_door.mounts().mount(f"/{name}").handle if by_v3 else client.walk(name)
        client.mkdir(root, f"{version}-{caller}")
        there = (plain_door.node.mount / name / f"{version}-{caller}").stat()
        assert (there.st_uid, there.st_gid) == (owner, owner)
