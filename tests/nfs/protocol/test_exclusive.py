"""A create that is exclusive may be sent again; the verifier by which the server knows it, kept in
the file's times, is no time of the file's use, and none of S3's."""

import datetime
import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.cluster.waiting import wait_until
from tests.integration import s3
from tests.integration.s3 import S3
from tests.nfs import ganesha
from tests.nfs.door import Door, held_of
from tests.nfs.node.test_door import ALICE
from tests.nfs.status import NfsError
from tests.nfs.v3_types import SERVER, SetAttributes
from tests.nfs.v4 import Owner
from tests.nfs.v4_attributes import MODE, TIME_ACCESS_SET, TIME_MODIFY_SET
from tests.nfs.v4_operations import Creation, Exclusive, ExclusiveWith
from tests.ports import free_port

LACKING = ganesha.why_not()
pytestmark = pytest.mark.skipif(bool(LACKING), reason=LACKING)
MIB = 1 << 20
OLD, NEW = bytes(7) + b"\1", b"\xf0" * 8
"""Verifiers that are times of 1970 and of 2097."""


@dataclass
class Both:
    """A node that serves NFS and S3."""

    door: Door
    server: S3


@pytest.fixture(scope="module")
def both() -> Iterator[Both]:
    """With the namespaces `shared` and `cache` (8 MiB, evicts), for everybody."""
    port, mount_port = free_port(), free_port()
    place = "--nfs", f"127.0.0.1:{port}", "--nfs-v3", "--nfs-mount-port", str(mount_port)
    with s3.serving(*place) as server:
        door = Door(server.node, port, mount_port)
        for name in ("shared", "cache"):
            door.exported(name, mode=0o777)
        door.kvfs("namespace", "set", "cache", "--capacity", "8MiB")
        door.kvfs("namespace", "set", "shared", "--etag", "md5-all")
        yield Both(door, server)
        door.close()


@pytest.fixture(params=["v3", "v40", "v41"])
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def made(door: Door, version: str, namespace: str, name: str, verifier: bytes) -> bytes:
    """The handle of what such a create makes, or had made."""
    if version == "v3":
        client = door.v3(ALICE)
        root = door.mounts().mount(f"/{namespace}").handle
        found = client.create_exclusive(root, name, verifier)
        return found.handle or client.lookup(root, name).handle
    how: Creation = Exclusive(verifier)
    client4 = door.v40(ALICE) if version == "v40" else door.v41(ALICE)
    if version == "v41":
        how = ExclusiveWith(verifier, (MODE.to(0o644),))
    opened = client4.open(client4.walk(namespace), name, Owner(), creation=how)
    client4.close(opened)
    return opened.handle


def finish(door: Door, version: str, handle: bytes, data: bytes) -> None:
    """As clients do behind such a create: set the times, then write."""
    if version == "v3":
        client = door.v3(ALICE)
        client.setattr(handle, SetAttributes(mode=0o644, atime=SERVER, mtime=SERVER))
        client.write(handle, 0, data)
        return
    client4 = door.v40(ALICE) if version == "v40" else door.v41(ALICE)
    client4.setattr(handle, MODE.to(0o644), TIME_ACCESS_SET.to(SERVER), TIME_MODIFY_SET.to(SERVER))
    client4.write(handle, 0, data)


def test_it_succeeds_again_and_not_for_another(both: Both, version: str) -> None:
    name = f"again-{version}"
    first = made(both.door, version, "shared", name, b"verifier")
    assert made(both.door, version, "shared", name, b"verifier") == first
    with pytest.raises(NfsError, match="EXIST"):
        made(both.door, version, "shared", name, b"anothers")
    finish(both.door, version, first, b"data")
    assert (both.door.node.mount / "shared" / name).read_bytes() == b"data"


def test_a_file_that_is_there_was_not_made_by_it(both: Both, version: str) -> None:
    root = both.door.node.mount / "shared"
    (root / f"there-{version}").write_bytes(b"of the mount")
    (root / f"there-{version}").chmod(0o666)
    with pytest.raises(NfsError, match="EXIST"):
        made(both.door, version, "shared", f"there-{version}", b"verifier")
    assert (root / f"there-{version}").read_bytes() == b"of the mount"


@pytest.mark.parametrize("verifier", [OLD, NEW], ids=["old", "new"])
def test_the_order_of_eviction_is_that_of_use(both: Both, version: str, verifier: bytes) -> None:
    """What was made before it goes before it, what was made after it goes after it."""
    cache = both.door.node.mount / "cache"
    for each in cache.iterdir():
        each.unlink()
    before, after = cache / "before", cache / "after"
    before.write_bytes(bytes(MIB // 2))
    handle = made(both.door, version, "cache", "exclusive", verifier)
    finish(both.door, version, handle, bytes(MIB // 2))
    server = both.door.node.status()["nfs"]["pid"]
    wait_until(lambda: not held_of(server, "/exclusive"), "nobody has it open")
    after.write_bytes(bytes(MIB // 2))
    numbers = itertools.count()

    def have_gone() -> bool:
        (cache / f"filler{next(numbers)}").write_bytes(bytes(MIB // 4))
        after_is_there, exclusive_is_there = after.exists(), (cache / "exclusive").exists()
        assert exclusive_is_there or not before.exists()
        assert after_is_there or not exclusive_is_there
        return not after_is_there

    wait_until(have_gone, "all three are evicted")


def test_s3_tells_times_and_etag_of_the_content(both: Both, version: str) -> None:
    name, data = f"object-{version}", b"content " * 1000
    handle = made(both.door, version, "shared", name, NEW)
    finish(both.door, version, handle, data)
    client = both.server.client("admin")
    md5 = f'"{hashlib.md5(data).hexdigest()}"'

    def head() -> tuple[str, datetime.datetime]:
        told = client.head_object(Bucket="shared", Key=name)
        return told["ETag"], told["LastModified"]

    wait_until(lambda: head()[0] == md5, "S3 tells the content's MD5")
    now = datetime.datetime.now(datetime.UTC)
    assert abs(head()[1] - now) < datetime.timedelta(hours=1)
    first = head()
    assert client.get_object(Bucket="shared", Key=name)["Body"].read() == data
    assert head() == first
