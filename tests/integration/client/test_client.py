"""The Python API beside a mount: what one changes, the other shows at once."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvfs
from kvfs.base.errors import NotFound
from tests.contract import client_store
from tests.integration.conftest import NATIVE, Place
from tests.integration.posix import IN_ATTRIB, its_watch_ends, watched

pytestmark = pytest.mark.skipif(bool(NATIVE), reason="a plain directory has no store")


@pytest.fixture
def client(place: Place) -> Iterator[kvfs.Client]:
    assert place.node is not None
    with kvfs.Client(place.node.store) as client:
        yield client


@pytest.fixture
def path(here: Path, place: Place) -> str:
    """The directory of the test, as a client names it."""
    assert place.node is not None
    return f"/{here.relative_to(place.node.mount)}"


def test_a_put_is_seen_where_the_absence_was_cached(
    client: kvfs.Client, here: Path, path: str
) -> None:
    for number in range(20):
        name = f"a{number}"
        for _ in range(2):
            assert not (here / name).exists()
        client.put(f"{path}/{name}", b"hello")
        assert (here / name).read_bytes() == b"hello"
    assert len(os.listdir(here)) == 20


def test_a_replaced_file_is_seen_at_once(client: kvfs.Client, here: Path, path: str) -> None:
    client.put(f"{path}/a", b"first")
    with open(here / "a", "rb") as before:
        for number in range(20):
            data = b"version %d" % number * (number + 1)
            client.put(f"{path}/a", data)
            assert (here / "a").stat().st_size == len(data)
            assert (here / "a").read_bytes() == data
        assert before.read() == b"first"


def test_who_watches_a_file_is_told_that_it_went(
    client: kvfs.Client, here: Path, path: str
) -> None:
    for name in ("replaced", "removed", "renamed over"):
        client.put(f"{path}/{name}", b"first")
    client.put(f"{path}/other", b"second")
    (here / "directory").mkdir()
    its_watch_ends(here / "replaced", lambda: client.put(f"{path}/replaced", b"second"))
    its_watch_ends(here / "removed", lambda: client.remove(f"{path}/removed"))
    its_watch_ends(
        here / "renamed over", lambda: client.rename(f"{path}/other", f"{path}/renamed over")
    )
    (here / "link").hardlink_to(here / "replaced")
    with watched(here / "link") as watch:
        client.remove(f"{path}/replaced")
        (here / "link").chmod(0o600)
        assert watch.next() == IN_ATTRIB, "it has another name"


def test_many_at_once(client: kvfs.Client, here: Path, path: str) -> None:
    names = [f"d{number % 7}/{number}" for number in range(300)]
    assert not any((here / name).exists() for name in names)
    client.put_many(((f"{path}/{name}", name.encode()) for name in names), parents=True)
    for name in names:
        assert (here / name).read_bytes() == name.encode()


def test_removed_and_renamed_names_are_gone_at_once(
    client: kvfs.Client, here: Path, path: str
) -> None:
    (here / "a").write_bytes(b"1")
    (here / "b").write_bytes(b"2")
    assert (here / "a").stat().st_size == 1
    client.rename(f"{path}/a", f"{path}/c")
    assert not (here / "a").exists()
    assert (here / "c").read_bytes() == b"1"
    client.rename(f"{path}/c", f"{path}/b")
    assert (here / "b").read_bytes() == b"1"
    client.remove(f"{path}/b")
    assert not (here / "b").exists()
    client.mkdir(f"{path}/d")
    assert (here / "d").is_dir()
    client.rmdir(f"{path}/d")
    assert not (here / "d").exists()
    assert os.listdir(here) == []


def test_a_file_open_on_the_mount_outlives_its_removal(
    client: kvfs.Client, here: Path, path: str
) -> None:
    (here / "a").write_bytes(b"kept" * 10_000)
    with open(here / "a", "rb") as file:
        client.remove(f"{path}/a")
        assert not (here / "a").exists()
        assert file.read() == b"kept" * 10_000


def sealed(client: kvfs.Client, name: str) -> None:
    """Wait until the kernel may believe the file's attributes for long."""
    until = time.monotonic() + 60
    while not client.stat(name).checksum:
        assert time.monotonic() < until
        time.sleep(0.05)


def test_the_other_names_of_a_file_count_its_links_right(
    client: kvfs.Client, here: Path, path: str
) -> None:
    (here / "a").write_bytes(b"shared")
    for name in "bcd":
        os.link(here / "a", here / name)
    sealed(client, f"{path}/a")
    with open(here / "a", "rb") as file:
        assert [(here / name).stat().st_nlink for name in "abcd"] == [4, 4, 4, 4]
        client.remove(f"{path}/b")
        assert (here / "a").stat().st_nlink == 3
        client.put(f"{path}/c", b"another")
        assert (here / "a").stat().st_nlink == 2
        client.put(f"{path}/e", b"another")
        client.rename(f"{path}/e", f"{path}/d")
        assert (here / "a").stat().st_nlink == 1
        assert os.fstat(file.fileno()).st_nlink == 1
        client.remove(f"{path}/a")
        assert os.fstat(file.fileno()).st_nlink == 0
        assert file.read() == b"shared"


def test_a_directory_that_gets_an_unknown_name_has_changed(
    client: kvfs.Client, here: Path, path: str
) -> None:
    """Its listing and its attributes, which the kernel remembers for long."""
    for number in range(3):
        assert len(os.listdir(here)) == 2 * number
        os.utime(here, (1, 1))  # the clock of directories ticks in milliseconds
        before = here.stat()
        client.mkdir(f"{path}/d{number}")
        client.put(f"{path}/f{number}", b"1")
        assert len(os.listdir(here)) == 2 * number + 2
        after = here.stat()
        assert after.st_nlink == before.st_nlink + 1
        assert after.st_mtime_ns > before.st_mtime_ns


def test_what_the_mount_wrote_is_read(client: kvfs.Client, here: Path, path: str) -> None:
    with open(here / "a", "wb") as file:
        file.write(b"x" * 100_000)
        file.flush()
        assert client.exists([f"{path}/a"]) == [False]
        assert list(client.list(path)) == []
        with pytest.raises(NotFound):
            client.get(f"{path}/a")
    assert client.exists([f"{path}/a"]) == [True]
    assert client.get(f"{path}/a") == b"x" * 100_000
    with open(here / "a", "ab") as file:
        file.write(b"y")
    assert client.stat(f"{path}/a").size == 100_001
    assert client.get(f"{path}/a", offset=100_000) == b"y"
    os.symlink("a", here / "link")
    assert client.stat(f"{path}/link").target == b"a"


def test_a_new_namespace_is_seen(client: kvfs.Client, place: Place) -> None:
    assert place.node is not None
    assert not (place.node.mount / "fresh").exists()
    client.mkdir("/fresh")
    client.put("/fresh/a", b"1")
    assert (place.node.mount / "fresh" / "a").read_bytes() == b"1"
    client.remove("/fresh/a")
    client.rmdir("/fresh")
    assert not (place.node.mount / "fresh").exists()


def test_a_client_killed_before_it_told_is_made_up_for(
    place: Place, client: kvfs.Client, here: Path, path: str
) -> None:
    assert place.node is not None
    client.put(f"{path}/old", b"1")
    assert not (here / "new").exists()
    assert (here / "old").stat().st_size == 1
    program = """
import os, signal, sys, kvfs
from kvfs.vfs import post_commit
post_commit.Finisher.finish = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
kvfs.Client(sys.argv[1]).rename(sys.argv[2] + "/old", sys.argv[2] + "/new")
"""
    client_store.run_killed(program, str(place.node.store), path)
    for _ in range(600):
        if (here / "new").exists() and not (here / "old").exists():
            break
        time.sleep(0.05)
    assert (here / "new").read_bytes() == b"1"
    assert os.listdir(here) == ["new"]
