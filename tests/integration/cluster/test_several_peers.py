"""A namespace whose names are each node's own, on two nodes: at the mount, over S3 and by clients,
also while the engine is away, after a kill, and when it is removed."""

import errno
import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvfs.client import Client
from s3api.auth.key_holders import ADMINISTRATOR
from tests.cluster.waiting import wait_until
from tests.integration.harness import kvfs
from tests.integration.posix import refused
from tests.integration.s3 import S3, users_of
from tests.integration.several import Several, paused, several

PART = 5 << 20


@pytest.fixture(scope="module")
def nodes() -> Iterator[Several]:
    flags = ("--s3", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--s3-workers", "1")
    with several(2, *flags) as cluster:
        peer(cluster, "create", "own", "--kind", "cache")
        yield cluster


@pytest.fixture(scope="module")
def s3(nodes: Several) -> Iterator[S3]:
    with users_of(nodes.nodes[0]) as users, ExitStack() as closing:
        found = S3(nodes.nodes[0], {ADMINISTRATOR: users.find(ADMINISTRATOR)})
        yield found
        for client in found.clients.values():
            closing.callback(client.close)


@pytest.fixture
def a(nodes: Several) -> Path:
    return nodes.nodes[0].mount / "own"


@pytest.fixture
def b(nodes: Several) -> Path:
    return nodes.nodes[1].mount / "own"


def peer(nodes: Several, action: str, name: str, *flags: str) -> None:
    """Has the first node make or change a namespace, and waits until the other knows it."""
    store = ("--store", str(nodes.nodes[0].store))
    kvfs("namespace", action, name, "--coherence", "peer", *flags, *store)
    wait_until((nodes.nodes[1].mount / name).is_dir, "the other node knows it")


@contextmanager
def engine_away(nodes: Several) -> Iterator[None]:
    nodes.server.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        nodes.server.signal(signal.SIGCONT)


def silent(nodes: Several, seconds: float) -> None:
    """Waits until the first node has not heard the engine for so long."""
    node = nodes.nodes[0]
    wait_until(lambda: node.status()["engine"]["silent_s"] > seconds, "it is silent")


def work_at(top: Path) -> None:
    """Does what programs do with files, and finds it done."""
    block, new = top / "block", top / "block.new"
    with refused(errno.ENOENT):
        block.read_bytes()
    for number in range(3):
        new.write_bytes(b"content" * (number + 1))
        new.rename(block)
        assert block.read_bytes() == b"content" * (number + 1)
    fd = os.open(top / "exclusive", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    os.write(fd, b"x" * 10)
    os.fsync(fd)
    os.close(fd)
    with refused(errno.EEXIST):
        os.open(top / "exclusive", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    os.truncate(top / "exclusive", 4)
    with (top / "exclusive").open("r+b") as file:
        file.write(b"yz")
    assert (top / "exclusive").read_bytes() == b"yzxx"
    os.setxattr(block, "user.a", b"1")
    assert os.getxattr(block, "user.a") == b"1"
    (top / "d").mkdir()
    (top / "d" / "e").write_bytes(b"e")
    with refused(errno.ENOTEMPTY):
        (top / "d").rmdir()
    (top / "d" / "e").rename(top / "e")
    (top / "link").symlink_to("block")
    assert sorted(os.listdir(top)) == ["block", "d", "e", "exclusive", "link"]
    (top / "d").rmdir()
    for name in ("block", "e", "exclusive", "link"):
        (top / name).unlink()
    assert os.listdir(top) == []


def work_over(client: Any, bucket: str) -> None:
    """Does what clients of S3 do, and finds it done."""
    client.put_object(Bucket=bucket, Key="k/1", Body=b"one")
    client.put_object(Bucket=bucket, Key="k/1", Body=b"two")
    assert client.get_object(Bucket=bucket, Key="k/1")["Body"].read() == b"two"
    made = client.create_multipart_upload(Bucket=bucket, Key="big")["UploadId"]
    parts = []
    for number, size in ((1, PART), (2, 10)):
        part = {"Bucket": bucket, "Key": "big", "UploadId": made, "PartNumber": number}
        tag = client.upload_part(**part, Body=b"p" * size)["ETag"]
        parts.append({"PartNumber": number, "ETag": tag})
    assert len(client.list_parts(Bucket=bucket, Key="big", UploadId=made)["Parts"]) == 2
    whole = {"MultipartUpload": {"Parts": parts}}
    client.complete_multipart_upload(Bucket=bucket, Key="big", UploadId=made, **whole)
    assert client.head_object(Bucket=bucket, Key="big")["ContentLength"] == PART + 10
    listed = client.list_objects_v2(Bucket=bucket)["Contents"]
    assert [each["Key"] for each in listed] == ["big", "k/1"]
    for key in ("big", "k/1", "absent"):
        client.delete_object(Bucket=bucket, Key=key)
    assert "Contents" not in client.list_objects_v2(Bucket=bucket)


def test_each_node_has_files_of_its_own(nodes: Several, a: Path, b: Path) -> None:
    (a / "mine").write_bytes(b"a")
    (a / "same").write_bytes(b"a")
    with paused(nodes.nodes[0]):  # else the other may have been told of them
        (b / "same").write_bytes(b"b")
    assert [(each / "same").read_bytes() for each in (a, b)] == [b"a", b"b"]
    assert (a / "same").stat().st_ino != (b / "same").stat().st_ino
    for each in (a / "mine", a / "same", b / "same"):
        each.unlink(missing_ok=True)  # a removal takes an earlier file of the other node along


def test_nobody_asks_the_engine(nodes: Several, a: Path, s3: S3) -> None:
    work_at(a)
    work_over(s3.client(ADMINISTRATOR), "own")
    with Client(store=nodes.nodes[0].store) as client:
        before = nodes.nodes[0].status()["engine"]["round_trips"]
        client.put("/own/k", b"content")
        assert client.get("/own/k") == b"content"
        client.remove("/own/k")
        work_at(a)
        work_over(s3.client(ADMINISTRATOR), "own")
        asked = nodes.nodes[0].status()["engine"]["round_trips"] - before
        assert asked <= 10  # reports of what is used, by the clock, and not for each of 100 steps


def test_all_goes_on_while_the_engine_is_away(nodes: Several, a: Path, s3: S3) -> None:
    (a / "before").write_bytes(b"before")
    with engine_away(nodes):
        silent(nodes, 11)  # its lease has ended, too
        assert (a / "before").read_bytes() == b"before"
        (a / "before").unlink()
        work_at(a)
        work_over(s3.client(ADMINISTRATOR), "own")
        with Client(store=nodes.nodes[0].store) as client:
            client.put("/own/k", b"content")
            client.remove("/own/k")
        with refused(errno.EROFS):
            (nodes.nodes[0].mount / "models" / "x").write_bytes(b"x")
    wait_until(lambda: nodes.nodes[0].status()["engine"]["silent_s"] < 2, "it is heard again")
    work_at(a)


def test_what_other_nodes_would_have_to_follow_is_refused(nodes: Several, a: Path) -> None:
    (a / "f").write_bytes(b"f")
    (a / "d").mkdir()
    with refused(errno.EPERM):
        os.link(a / "f", a / "g")
    with refused(errno.EXDEV):
        (a / "d").rename(a / "e")
    for source, target in ((a, a.parent / "cache"), (a.parent / "cache", a)):
        (source / "moves").write_bytes(b"m")
        with refused(errno.EXDEV):
            (source / "moves").rename(target / "moves")
        (source / "moves").unlink()
    (a / "d").rmdir()
    (a / "f").unlink()
    store = ("--store", str(nodes.nodes[0].store))
    for wrong in (["--kind", "durable"], ["--locks", "cluster"]):
        done = kvfs("namespace", "set", "own", *wrong, *store)
        assert done.returncode
        assert "--coherence peer" in done.stderr


def test_a_killed_node_finds_what_it_had(nodes: Several, a: Path) -> None:
    node = nodes.nodes[0]
    (a / "closed").write_bytes(b"closed")
    (a / "sealed").write_bytes(b"sealed")
    open_ = os.open(a / "open", os.O_CREAT | os.O_WRONLY)
    gone = os.open(a / "gone", os.O_CREAT | os.O_RDWR)
    (a / "gone").unlink()
    shared = a.parent / "cache" / "open"  # beside it: no commit of the start may change both
    beside = os.open(shared, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    node.kill()
    for fd in (open_, gone, beside):
        with refused(errno.ENOTCONN):
            os.close(fd)
    node.up()
    assert (a / "closed").read_bytes() == b"closed"
    assert sorted(os.listdir(a)) == ["closed", "sealed"]
    assert not shared.exists()
    inos = {each.stat().st_ino for each in a.iterdir()}

    def is_clean() -> bool:
        return {int(each.name[:16], 16) for each in data_of(node.store, a)} == inos

    wait_until(is_clean, "nothing of what was dropped is left")
    for name in ("closed", "sealed"):
        (a / name).unlink()
    work_at(a)


def data_of(store: Path, top: Path) -> list[Path]:
    """The data files of a namespace."""
    space = f"{top.stat().st_ino >> 48:04x}"
    return list((store / "data").glob(f"???/{space}*"))


def test_a_namespace_is_removed_where_no_node_has_files(nodes: Several) -> None:
    peer(nodes, "create", "brief", "--kind", "cache")
    here, there = (node.mount / "brief" for node in nodes.nodes)
    for number in range(300):
        (there / f"f{number}").write_bytes(b"x")
    store = nodes.nodes[1].store
    space = f"{there.stat().st_ino >> 48:04x}"
    assert len(data_of(store, there)) == 300
    wait_until(lambda: used(nodes, "brief") >= 300 * 4096, "what is used there is counted", 30)
    flags = ("--store", str(nodes.nodes[0].store))
    shown = json.loads(kvfs("namespace", "show", "brief", "--json", *flags).stdout)
    assert shown["used_bytes"] >= 300 * 4096
    assert shown["inodes"] >= 300
    with refused(errno.ENOTEMPTY):
        here.rmdir()
    assert "node 2" in kvfs("namespace", "remove", "brief", *flags).stderr
    for number in range(300):
        (there / f"f{number}").unlink()
    wait_until(lambda: is_removed(here), "the first node hears that it is empty")
    wait_until(lambda: not there.exists(), "the other node hears of it")
    wait_until(
        lambda: not list((store / "data").glob(f"???/{space}*")), "its files are dropped", 30
    )


def is_removed(top: Path) -> bool:
    try:
        top.rmdir()
    except OSError as error:
        assert error.errno == errno.ENOTEMPTY
        return False
    return True


def test_a_full_namespace_evicts_without_the_engine(nodes: Several) -> None:
    peer(nodes, "create", "small", "--kind", "cache", "--capacity", "16MiB")
    top = nodes.nodes[0].mount / "small"
    wait_until(lambda: os.statvfs(top).f_blocks * 4096 == 16 << 20, "it is known")
    wait_until(lambda: granted(nodes, "small") == 4 << 20, "it was granted a part")
    with engine_away(nodes):
        silent(nodes, 2.5)
        for number in range(24):
            (top / f"f{number}").write_bytes(bytes(1 << 20))
            wait_until(lambda: used(nodes, "small") <= 4 << 20, "there is room for the next one")
        assert (top / "f23").read_bytes() == bytes(1 << 20)
        assert len(os.listdir(top)) <= 4


def granted(nodes: Several, name: str) -> int:
    found = nodes.nodes[0].status()["namespaces"]
    return int(next(each["here_limit_bytes"] for each in found if each["name"] == name))


def used(nodes: Several, name: str) -> int:
    found = nodes.nodes[0].status()["namespaces"]
    return int(next(each["used_bytes"] for each in found if each["name"] == name))
