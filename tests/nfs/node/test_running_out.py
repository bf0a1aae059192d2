"""Where a disk or the descriptors run out, clients are told, and what was acknowledged stays."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.waiting import wait_until
from tests.fault.disks import disk, fill
from tests.integration.mount.test_descriptors import FEW, MAY_NOT_RAISE
from tests.nfs import ganesha
from tests.nfs.door import Door
from tests.nfs.node.test_door import EVERY, Side
from tests.nfs.rpc import AuthSys
from tests.nfs.status import NfsError
from tests.nfs.v3_types import Stability
from tests.nfs.v4 import Opened, Owner
from tests.nfs.v4_operations import Share, Unchecked

LACKING = ganesha.why_not()
pytestmark = pytest.mark.skipif(bool(LACKING), reason=LACKING)
MIB = 1 << 20


def written(side: Side, name: str, data: bytes) -> None:
    """A new file, written as clients do: unstable, then committed, then closed."""
    if not hasattr(side.client, "minor"):
        handle = side.client.create(side.home, name).handle
        side.client.write(handle, 0, data, Stability.UNSTABLE)
        side.client.commit(handle)
        return
    opened = side.client.open(side.home, name, Owner(), Share.BOTH, creation=Unchecked())
    try:
        side.client.write(opened.handle, 0, data, Stability.UNSTABLE, opened.stateid)
        side.client.commit(opened.handle)
    finally:
        side.client.close(opened)


def until_refused(step: Callable[[int], object], most: int) -> list[int]:
    """The numbers for which it was done before there was no space."""
    done: list[int] = []
    for number in range(most):
        try:
            step(number)
        except NfsError as error:
            assert "NOSPC" in error.name, error
            return done
        done.append(number)
    raise AssertionError("a full disk took it all")


def everybodys(door: Door) -> Path:
    home = door.exported("shared", mode=0o777) / "home"
    home.mkdir()
    home.chmod(0o777)
    return home


def test_a_full_disk_is_told_and_what_was_committed_stays(tmp_path: Path) -> None:
    with disk(tmp_path, "ext4", 128 * MIB) as small:
        place = small.mountpoint / "node"
        with Door.make("--nfs-v3", "--s3", "off", "--scrub-rate", "0", home=place) as door:
            home = everybodys(door)
            foreign = fill(small.mountpoint)
            kept: list[str] = []
            for version in EVERY:
                side = Side(door, version, home)  # a client that asks nothing for 10 s is forgotten

                def write(number: int, side: Side = side, version: str = version) -> None:
                    written(side, f"{version}-{number}", version[:2].encode() * (MIB // 2))

                kept += [f"{version}-{number}" for number in until_refused(write, 64)]
            foreign.unlink()
            for version in EVERY:
                side = Side(door, version, home)

                def has_room(side: Side = side, version: str = version) -> bool:
                    try:
                        written(side, f"{version}-after", version[:2].encode() * (MIB // 2))
                    except NfsError as error:
                        assert "NOSPC" in error.name, error
                        return False
                    return True

                wait_until(has_room, "there is room again")
                kept.append(f"{version}-after")
            for name in kept:
                assert (home / name).read_bytes() == name[:2].encode() * (MIB // 2)


def test_who_has_too_many_files_open_is_told_and_others_go_on() -> None:
    inside = ("prlimit", f"--nofile={FEW}:{FEW}", *MAY_NOT_RAISE)
    with Door.make("--nfs-v3", "--s3", "off", inside=inside) as door:
        home = everybodys(door)
        greedy, owner = door.v41(AuthSys(uid=4002, gid=4002)), Owner()
        directory = greedy.walk("shared/home")
        held: list[Opened] = []

        def hold() -> None:
            held.append(greedy.open(directory, f"held-{len(held)}", owner, creation=Unchecked()))

        with pytest.raises(NfsError, match="NFS4ERR_IO"):
            for _ in range(2 * FEW):
                hold()
        assert len(held) > FEW // 8
        for version in EVERY:
            written(Side(door, version, home), f"other-{version}", b"x")
            greedy.renew()
        for each in held:
            greedy.close(each)
        hold()
