"""A directory in which one host is making a file is removed by no other host, by whichever door:
what a close acknowledged has a place."""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import kvfs
from kvfs.base.errors import Exists, NotEmpty
from s3api.auth.key_holders import ADMINISTRATOR
from tests.cluster.waiting import wait_until
from tests.integration.harness import Node
from tests.integration.posix import refused
from tests.integration.s3 import S3, users_of
from tests.integration.several import Several, has, several

Make = Callable[[Path], int]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Several]:
    flags = ("--s3", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--s3-workers", "1")
    with several(2, *flags) as cluster:
        yield cluster


@pytest.fixture
def a(nodes: Several) -> Node:
    return nodes.nodes[0]


@pytest.fixture
def b(nodes: Several) -> Node:
    return nodes.nodes[1]


@pytest.fixture(scope="module")
def s3(nodes: Several) -> Iterator[Any]:
    """Of the first node."""
    with ExitStack() as closing:
        with users_of(nodes.nodes[0]) as users:
            server = S3(nodes.nodes[0], {ADMINISTRATOR: users.find(ADMINISTRATOR)})
        client = server.client(ADMINISTRATOR)
        closing.callback(client.close)
        yield client


NAMESPACES = pytest.mark.parametrize("namespace", ["models", "cache"])


def seen(node: Node, other: Node, path: str) -> tuple[Path, Path]:
    """A directory, on both hosts."""
    here, there = node.mount / path, other.mount / path
    here.mkdir(parents=True, exist_ok=True)
    wait_until(there.is_dir, "the other host sees the directory")
    return here, there


def plain(path: Path) -> int:
    """It takes the place of what another one makes meanwhile."""
    return os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)


def exclusive(path: Path) -> int:
    return os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)


def by_rmdir(node: Node, path: str) -> None:
    (node.mount / path).rmdir()


def by_rename(node: Node, path: str) -> None:
    source = node.mount / f"{path}-source"
    source.mkdir(exist_ok=True)
    source.rename(node.mount / path)


def by_client(node: Node, path: str) -> None:
    with kvfs.Client(node.store) as client:
        try:
            client.rmdir(f"/{path}")
        except NotEmpty as error:
            raise OSError(errno.ENOTEMPTY, str(error)) from None


DOORS = pytest.mark.parametrize("remove", [by_rmdir, by_rename, by_client])


@NAMESPACES
@DOORS
@pytest.mark.parametrize("make", [plain, exclusive])
def test_a_directory_with_an_open_new_file_of_another_host_stays(
    a: Node, b: Node, namespace: str, remove: Callable[[Node, str], None], make: Make
) -> None:
    name = f"{remove.__name__}-{make.__name__}"
    for number in range(3):
        path = f"{namespace}/{name}/{number}"
        here, there = seen(a, b, path)
        fd = make(there / "f")
        os.write(fd, b"content")
        with refused(errno.ENOTEMPTY):
            remove(a, path)
        if number % 2:
            os.fsync(fd)
        os.close(fd)
        wait_until((here / "f").exists, "the other host sees the file")
        assert (here / "f").read_bytes() == b"content"
    (there / "f").unlink()
    wait_until(lambda: not (here / "f").exists(), "the other host sees it go")
    remove(a, path)


def test_what_a_close_in_a_cache_acknowledged_has_a_place(a: Node, b: Node) -> None:
    below, above = seen(a, b, "cache/closed")
    for number in range(40):
        (below / f"{number}").mkdir()
    wait_until((above / "39").is_dir, "the other host sees the last directory")
    for number in range(40):
        os.close(plain(above / f"{number}" / "f"))
        with refused(errno.ENOTEMPTY):
            (below / f"{number}").rmdir()
    wait_until(lambda: all((each / "f").exists() for each in below.iterdir()), "all are seen")


def by_mkdir(node: Node, path: str) -> None:
    (node.mount / path).mkdir()


def by_rename_to(node: Node, path: str) -> None:
    source = node.mount / f"{path}-source"
    source.mkdir(exist_ok=True)
    source.rename(node.mount / path)


def by_client_mkdir(node: Node, path: str) -> None:
    with kvfs.Client(node.store) as client:
        try:
            client.mkdir(f"/{path}")
        except Exists as error:
            raise OSError(errno.EEXIST, str(error)) from None


@pytest.mark.parametrize("take", [by_mkdir, by_rename_to, by_client_mkdir])
def test_what_a_close_in_a_cache_acknowledged_keeps_its_name(
    a: Node, b: Node, take: Callable[[Node, str], None]
) -> None:
    path = f"cache/{take.__name__}"
    below, above = seen(a, b, path)
    for number in range(20):
        for name in ("first", "second", "last"):  # what follows closely is made known together
            (above / f"{number}-{name}").write_bytes(b"content")
        with refused(errno.EEXIST, errno.ENOTDIR):
            take(a, f"{path}/{number}-last")
    for number in range(20):
        wait_until((below / f"{number}-last").exists, "the other host sees the file")
        assert (below / f"{number}-last").read_bytes() == b"content"


@NAMESPACES
def test_a_tree_goes_at_once_after_another_host_closed_its_files(
    a: Node, b: Node, namespace: str
) -> None:
    path = f"{namespace}/tree"
    here, there = seen(a, b, path)
    for number in range(20):
        leaf = there / f"{number % 4}" / f"{number}"
        leaf.mkdir(parents=True)
        (leaf / "f").write_bytes(b"x")
    wait_until(lambda: (here / "3" / "19" / "f").exists(), "the other host sees the last file")
    shutil.rmtree(here)
    assert not here.exists()


def test_a_directory_made_for_a_key_stays_while_another_host_makes_a_file_in_it(
    b: Node, a: Node, s3: Any
) -> None:
    s3.put_object(Bucket="models", Key="implied/below/key", Body=b"x")
    there = b.mount / "models" / "implied" / "below"
    fd = plain(there / "f")
    os.write(fd, b"content")
    s3.delete_object(Bucket="models", Key="implied/below/key")
    os.close(fd)
    assert (a.mount / "models" / "implied" / "below" / "f").read_bytes() == b"content"
    s3.delete_object(Bucket="models", Key="implied/below/f")
    assert not (a.mount / "models" / "implied").exists()


def test_a_bucket_stays_while_another_host_makes_a_file_in_it(b: Node, s3: Any) -> None:
    s3.create_bucket(Bucket="going")
    there = b.mount / "going"
    wait_until(there.is_dir, "the other host sees the bucket")
    fd = plain(there / "f")
    with pytest.raises(s3.exceptions.ClientError, match="BucketNotEmpty"):
        s3.delete_bucket(Bucket="going")
    os.close(fd)
    assert s3.get_object(Bucket="going", Key="f")["ContentLength"] == 0
    (there / "f").unlink()
    s3.delete_bucket(Bucket="going")
    wait_until(lambda: not there.exists(), "the other host sees it go")


@NAMESPACES
@pytest.mark.parametrize("last", ["a", "b"])
def test_of_two_hosts_that_make_one_file_the_last_to_close_has_it(
    a: Node, b: Node, namespace: str, last: str
) -> None:
    """Also where the name of the first one's is known already."""
    (a.mount / namespace / f"gone-{last}").mkdir()
    (a.mount / namespace / f"gone-{last}").rmdir()  # so the other one's next file is known at once
    path = f"{namespace}/both-{last}"
    first = plain(b.mount / path)
    os.write(first, b"of b")
    second = plain(a.mount / path)
    os.write(second, b"of a")
    with refused(errno.EEXIST):
        exclusive(a.mount / path)
    for fd in (first, second) if last == "a" else (second, first):
        os.fsync(fd)
        os.close(fd)
    wanted = f"of {last}".encode()
    for node in (a, b):
        there = node.mount / path
        wait_until(lambda: has(there, wanted), "both see it")  # noqa: B023
